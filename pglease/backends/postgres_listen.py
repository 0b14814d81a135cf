"""One connection that listens: what PostgreSQL notifies becomes hints.

It is no connection of the pool, which it would leave with a LISTEN in it, and it never runs a transaction.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from pglease import clock
from pglease.backends.base import Budget
from pglease.backends.postgres_errors import translated
from pglease.errors import BackendClosed, BackendUnavailable
from pglease.records import Change

if TYPE_CHECKING:
    from pglease.backends.postgres_psycopg import Connection


class PostgresSubscription:
    """What one client hears. See `Subscription`.

    Args:
        connection: ours alone, until it is closed here.
        channel: what to listen on.
        released: called with a name that was heard to be released.
        over: called once with this object when it is closed.
    """

    def __init__(
        self,
        connection: Connection,
        channel: str,
        released: Callable[[str], object],
        over: Callable[[PostgresSubscription], object],
    ) -> None:
        self._connection = connection
        self._channel = channel
        self._released = released
        self._over = over
        self._listening = threading.RLock()  # held by whoever uses the connection
        self._ending = threading.RLock()  # never held for long
        self._closed = False
        # To wake whoever listens. Shutting the connection's own socket could hit a stranger's: the driver closes it as
        # soon as it finds it broken, and its number is given away again.
        self._bell, self._ear = socket.socketpair()
        # Made once: twenty processes that are told at the same moment share the processors.
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection.pgconn.socket, selectors.EVENT_READ)
        self._selector.register(self._ear, selectors.EVENT_READ)

    @property
    def behind_pooler(self) -> bool:
        """Whether something stands between us and the server that may hand our session to others."""
        return self._connection.behind_pooler

    def begin(self, budget: Budget) -> None:
        """Listen from now on."""
        self._execute(f'LISTEN "{self._channel}"', budget)

    def hears_itself(self, notify: Callable[[str], object], budget: Budget, seconds: float) -> bool:
        """Tell whether a notification from another connection comes through. On a channel that nobody else uses."""
        channel = f"pglease hello {os.urandom(8).hex()}"
        self._execute(f'LISTEN "{channel}"', budget)
        notify(channel)
        until = clock.now() + min(seconds, max(0.0, budget.left()))
        while (left := until - clock.now()) > 0:
            if any(heard == channel for heard, _ in self._hear(left)):
                return True
        return False

    def _execute(self, statement: str, budget: Budget) -> None:
        cutoff = self._connection.link.cutoff
        with self._listening:
            try:
                cutoff.arm(budget.until)
                self._connection.execute(statement, prepare=False)
            except Exception as error:  # noqa: BLE001  # a driver's
                raise self._broken(error) from None
            finally:
                cutoff.disarm()

    def next(self, seconds: float) -> Sequence[Change]:
        """See `Subscription.next`."""
        until = clock.now() + seconds
        while True:
            heard = self._hear(max(0.0, until - clock.now()))
            changes = [change for channel, said in heard if channel == self._channel and (change := _change(said))]
            for change in changes:
                if change.what == "released":
                    self._released(change.name)
            if changes or clock.now() >= until:
                return changes

    def _hear(self, seconds: float) -> list[tuple[str, str]]:
        """Return what was notified, waiting for something for at most `seconds`."""
        with self._listening:
            self._refuse_if_closed()
            try:
                heard = self._taken()
                if not heard and self._readable(seconds):
                    heard = self._taken()
            except Exception as error:  # noqa: BLE001  # a driver's, or of a socket that was shut
                raise self._broken(error) from None
            self._refuse_if_closed()
            return heard

    def _taken(self) -> list[tuple[str, str]]:
        pgconn: Any = self._connection.pgconn
        pgconn.consume_input()
        heard = []
        while (notified := pgconn.notifies()) is not None:
            heard.append((notified.relname.decode(), notified.extra.decode(errors="replace")))
        return heard

    def _readable(self, seconds: float) -> bool:
        return bool(self._selector.select(seconds))

    def _broken(self, error: Exception) -> BackendUnavailable | BackendClosed:
        closed = self._closed
        self.close()
        if closed:
            return BackendClosed("this subscription was closed")
        return BackendUnavailable(f"the connection that listens is gone: {translated(error, str, sent=False)}")

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise BackendClosed("this subscription was closed")

    def close(self) -> None:
        """See `Subscription.close`."""
        with self._ending:
            first, self._closed = not self._closed, True
            if first:
                self._bell.close()
        if first:
            with self._listening:
                self._selector.close()
                self._connection.close()
                self._ear.close()
            self._over(self)


def _change(said: str) -> Change | None:
    """Read `released 0 name` or `granted 59.9 name`; None for what is none of ours."""
    what, _, rest = said.partition(" ")
    left, _, name = rest.partition(" ")
    if what not in {"released", "granted"} or not name:
        return None
    try:
        return Change(name, cast("Literal['released', 'granted']", what), float(left))
    except ValueError:
        return None
