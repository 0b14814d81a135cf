"""A verb's first statement under way on one of our own connections, for an event loop that watches its socket.

Most verbs are one statement with one answer, and need no thread to wait for it. What takes more, whatever it is (a
connection that broke, a row that is locked, a queue, a new epoch), is done by the verb itself, on a thread: it is told
whether the first try may have reached the server.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pglease.backends.postgres_connections import Loan
from pglease.backends.postgres_link import Row
from pglease.errors import BackendUnavailable

if TYPE_CHECKING:
    from psycopg.abc import PQGen

    from pglease.backends.postgres_psycopg import OwnLink

T = TypeVar("T")

READABLE = 1
"""What psycopg's generators yield when they wait to read, and what they are sent when there is something to read."""


class Begun(Generic[T]):
    """See `base.Begun`.

    Args:
        loan: the connection. It goes back as soon as the answer is read.
        statement, params: what is said.
        read: reads the answer; None where it takes more than that.
        verb: does the verb from the beginning; told whether the try before may have been carried out unheard.
    """

    __slots__ = ("_asking", "_link", "_loan", "_process", "_read", "_unknown", "_value", "_verb", "_waits_for")

    def __init__(
        self,
        loan: Loan,
        statement: str,
        params: Mapping[str, Any],
        read: Callable[[list[Row]], T | None],
        verb: Callable[[bool], T],
    ) -> None:
        self._loan, self._read, self._verb = loan, read, verb
        self._process = os.getpid()
        self._value: T | None = None
        self._unknown = False
        self._link: OwnLink = loan.link
        self._asking: PQGen[list[Row]] | None = self._link.asking(statement, params)
        self._go_on(None)

    @property
    def watch(self) -> object:
        """See `base.Begun.watch`."""
        return self._link.watch

    @watch.setter
    def watch(self, watch: object) -> None:
        self._link.watch = watch

    @property
    def done(self) -> bool:
        """See `base.Begun.done`."""
        return self._value is not None

    def fileno(self) -> int:
        """See `base.Begun.fileno`."""
        try:
            return self._link.connection.fileno()  # type: ignore[no-any-return]
        except Exception as error:  # noqa: BLE001  # its driver's; there is nothing to watch, and `finish` hears why
            raise OSError(f"the connection has no descriptor: {error}") from None

    def arrived(self) -> bool:
        """See `base.Begun.arrived`."""
        if self._asking is not None and self._waits_for == READABLE:
            self._go_on(READABLE)
        # A question too large for the socket's buffer is sent, and its answer read, by `finish`.
        return self._asking is None or self._waits_for != READABLE

    def finish(self) -> T:
        """See `base.Begun.finish`."""
        if os.getpid() != self._process:
            raise BackendUnavailable("the parent process waits for this answer", outcome_unknown=True)
        if self._asking is not None:
            try:
                rows = self._link.wait(self._asking)
            except Exception as error:  # noqa: BLE001  # the verb itself meets it again, if it lasts, and explains it
                self._broken(error)
            except BaseException:
                self.drop()
                raise
            else:
                self._ended(rows)
        return self._verb(self._unknown) if self._value is None else self._value

    def drop(self) -> None:
        """See `base.Begun.drop`."""
        if self._asking is not None and os.getpid() == self._process:
            self._asking = None
            self._loan.drop()

    def _go_on(self, ready: int | None) -> None:
        try:
            self._waits_for = self._asking.send(ready)  # type: ignore[union-attr,arg-type]  # None begins
        except StopIteration as end:
            self._ended(end.value)
        except Exception as error:  # noqa: BLE001  # as above
            self._broken(error)
        except BaseException:
            self.drop()
            raise

    def _ended(self, rows: list[Row]) -> None:
        self._asking = None
        self._loan.end()
        self._value = self._read(rows)

    def _broken(self, error: Exception) -> None:
        """Give the connection back, and note whether the server may have heard of this."""
        self._asking = None
        ours = self._loan.end(error)
        self._unknown = isinstance(ours, BackendUnavailable) and ours.outcome_unknown
