"""Where connections come from: our own pool, or somebody else's, lent for one conversation.

Our own are autocommit, bounded in everything, and go back to the pool without a second round trip. Borrowed ones must
be idle and are given back as they came. Either way a conversation that outlasts its budget is cut off at the socket: a
server that is frozen behind a healthy kernel answers neither time-outs of the driver nor `tcp_user_timeout`.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from pglease import forks
from pglease.backends.base import Budget
from pglease.backends.cutoff import Cutoff
from pglease.backends.postgres_dsn import Dsn
from pglease.backends.postgres_errors import COLUMNS_CHANGED, READ_ONLY, STALE_PREPARED, is_transport, translated
from pglease.backends.postgres_link import Link
from pglease.errors import (
    BackendClosed,
    BackendError,
    BackendMisconfigured,
    BackendUnavailable,
    ConfigurationError,
)

if TYPE_CHECKING:
    from psycopg_pool import ConnectionPool

    from pglease.backends.postgres_psycopg import Connection

log = logging.getLogger("pglease")

_NO_TIME = 0.001
"""Seconds to wait for a connection that lies idle. The pool takes none for a time that is over already."""
_FIRST_LOOK = 0.025
"""How often a caller who waits for a connection looks whether connecting has failed; the pool itself would not say."""
PROBE = """
SELECT pg_catalog.pg_backend_pid(), pg_catalog.pg_is_in_recovery(),
       pg_catalog.current_setting('transaction_read_only')::boolean, pg_catalog.current_setting('transaction_isolation')
"""
OURS_ALONE = """
SELECT pg_catalog.set_config('default_transaction_isolation', 'read committed', false),
       pg_catalog.set_config('plan_cache_mode', 'force_generic_plan', false),
       pg_catalog.set_config('enable_seqscan', 'off', false), pg_catalog.set_config('jit', 'off', false),
       pg_catalog.set_config('search_path', pg_catalog.concat_ws(', ', 'pg_catalog',
         nullif(pg_catalog.current_setting('search_path'), '')), false)
"""
"""`pg_catalog` first and by name: otherwise a schema before it in somebody's search path could shadow our operators.
Our statements are planned once for each connection, since planning costs more than running them; and by keys, since a
plan made while the table was one page would go on reading all of it when it has thousands."""


class Connections(Protocol):
    """A source of connections."""

    def lend(self, budget: Budget, *, reserved: bool = False) -> AbstractContextManager[Link]:
        """Lend one connection for one conversation that ends within the budget.

        `reserved` asks for the one that is kept for renewals. Inside, `budget.sending()` has been called; a driver's
        error comes out as ours.
        """

    def lend_idle(self, budget: Budget) -> Loan | None:
        """Lend at once, waiting for nothing, a connection of ours that lies idle; None where there is none.

        `budget.sending()` has been called. The loan has to be ended, whatever becomes of the conversation.
        """

    def connect(self, budget: Budget) -> Connection | None:
        """Make a connection that is the caller's alone, for somebody who listens; None where there is no such thing.

        Raises:
            BackendUnavailable: not within the budget.
        """

    def forget(self) -> None:
        """Drop, in a forked child, what is the parent's."""

    def close(self) -> None:
        """Close what was opened here."""


class Report:
    """What the pool's workers, who connect, have to tell those who wait for a connection, and the other way round."""

    def __init__(self) -> None:
        self.failures = 0
        self.last: BackendError | None = None
        self.pooler = False
        self.unprepared = False

    def failed(self, error: BackendError) -> None:
        """Note why no connection could be made."""
        self.last = error
        self.failures += 1

    def connected(self) -> None:
        """Note that a connection was made: earlier failures explain nothing any more."""
        self.last = None


class OwnConnections:
    """A bounded pool of our own, opened at the first use.

    Args:
        dsn: where to.
        pool_size: how many conversations may go on at once; one more connection is kept for renewals alone.
        connect_timeout: seconds one connection attempt may take, unless the address says otherwise.
    """

    def __init__(self, dsn: Dsn, *, pool_size: int, connect_timeout: float) -> None:
        self.dsn = dsn
        self.pool_size = pool_size
        self._connect_timeout = connect_timeout
        self._closed = False
        self._fresh()
        forks.forget_in_children(self, type(self).forget)

    def _fresh(self) -> None:
        self._opening = threading.RLock()
        # One token for each conversation that may go on: a semaphore at a tenth of its cost.
        self._places: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(self.pool_size):
            self._places.put(None)
        self._queueing: list[None] = []  # one for each thread that waits for a token; a list, since it needs no lock
        self._pool: ConnectionPool[Any] | None = None
        self._report = Report()

    @property
    def behind_pooler(self) -> bool:
        """Whether a transaction pooler was seen between us and the server."""
        return self._report.pooler

    def lend(self, budget: Budget, *, reserved: bool = False) -> AbstractContextManager[Link]:
        """See `Connections.lend`."""
        return _LoanInTime(self, budget, reserved=reserved)

    def lend_idle(self, budget: Budget) -> Loan | None:
        """See `Connections.lend_idle`. Never before threads that wait: who need not wait would always be the first."""
        pool = self._pool
        if pool is None or self._queueing or not self._take_idle_place():
            return None
        connection = loan = None
        try:
            connection = _idle_in(pool)
            if connection is not None and not connection.link.in_transactions:  # which takes several statements
                connection.link.cutoff.arm(budget.until)
                budget.sending()
                loan = Loan(self, connection)
            return loan
        finally:
            if loan is None and connection is not None:
                self.put_back(connection, None, reserved=False)
            elif loan is None:
                self._free_place(reserved=False)

    def connect(self, budget: Budget) -> Connection:
        """See `Connections.connect`."""
        if self._closed:
            raise BackendClosed("the backend is closed")
        return _Attempt(self.asking(), self.dsn.scrub).within(budget.left())

    def take(self, budget: Budget, *, reserved: bool) -> Any:
        """Take a connection out of the pool and begin its conversation; the first half of a loan."""
        if not reserved:
            self._take_place(budget)
        connection = None
        try:
            connection = self._checked_out(self._pool or self._opened(), budget)
            connection.link.cutoff.arm(budget.until)
            budget.sending()
        except BaseException as error:
            if connection is not None:
                self.put_back(connection, error, reserved=reserved)
            else:
                self._free_place(reserved=reserved)
            raise
        return connection

    def put_back(self, connection: Any, error: BaseException | None, *, reserved: bool) -> BackendError | None:
        """Put it back; the second half of a loan. Returns our error for a driver's."""
        cutoff = connection.link.cutoff
        try:
            cutoff.disarm()
            if cutoff.fired:  # also after an answer that had come by then: this socket is shut
                connection.close()
            if error is None or isinstance(error, BackendError):
                return None
            if isinstance(error, Exception):
                return self._explained(error, connection, cutoff)
            connection.close()  # interrupted in mid-conversation: nobody knows what its next answer would belong to
            return None
        except BaseException:
            cutoff.disarm()  # interrupted right here: armed, it would shut whoever has that number next
            connection.close()
            raise
        finally:
            pool = self._pool  # read once: it may be closed meanwhile
            if pool is not None:
                pool.putconn(connection)
            else:
                connection.close()
            self._free_place(reserved=reserved)

    def _take_idle_place(self) -> bool:
        try:
            self._places.get_nowait()
        except queue.Empty:
            return False
        return True

    def _take_place(self, budget: Budget) -> None:
        if self._take_idle_place():
            return
        self._queueing.append(None)
        try:
            self._places.get(timeout=max(0.0, budget.left()))
        except queue.Empty:
            raise BackendUnavailable(
                f"no connection was free in time: all {self.pool_size} of the pool are in use"
            ) from None
        finally:
            self._queueing.pop()

    def _free_place(self, *, reserved: bool) -> None:
        if not reserved:
            self._places.put(None)

    def _explained(self, error: Exception, connection: Any, cutoff: Cutoff) -> BackendError:
        if cutoff.fired:
            return BackendUnavailable("PostgreSQL did not answer in time", outcome_unknown=True)
        ours = translated(error, self.dsn.scrub, sent=True)
        if ours.sqlstate in STALE_PREPARED:
            self._report.unprepared = self._report.unprepared or ours.sqlstate != COLUMNS_CHANGED
            connection.close()
        elif connection.closed or ours.sqlstate == READ_ONLY:
            # Also after a read-only answer: only a new connection finds the present primary.
            connection.close()
            self._drop_idle()
        return ours

    def _drop_idle(self) -> None:
        """Close the idle connections: whatever ended one has most likely ended them all."""
        pool = self._pool
        if pool is not None:
            pool.drain()

    def _checked_out(self, pool: ConnectionPool[Any], budget: Budget) -> Any:
        import psycopg_pool

        failures = self._report.failures
        while True:
            left = budget.left()
            if left <= 0:
                last = self._report.last
                raise _again(last) if last else BackendUnavailable("no connection to PostgreSQL was made in time")
            try:
                return pool.getconn(timeout=min(left, _FIRST_LOOK))
            except psycopg_pool.PoolTimeout:
                last = self._report.last
                if self._report.failures != failures and last is not None:
                    raise _again(last) from None
            except psycopg_pool.PoolClosed:
                raise BackendClosed("the backend is closed") from None

    def _opened(self) -> ConnectionPool[Any]:
        pool = self._pool
        if pool is not None:
            return pool
        with self._opening:
            if self._closed:
                raise BackendClosed("the backend is closed")
            if self._pool is None:
                self._pool = self._new_pool()
            return self._pool

    def _new_pool(self) -> ConnectionPool[Any]:
        from psycopg_pool import ConnectionPool

        from pglease.backends.postgres_psycopg import Connection

        pool = ConnectionPool(
            "",
            connection_class=Connection,
            kwargs={"params": self.asking(), "report": self._report, "scrub": self.dsn.scrub},
            min_size=0,
            max_size=self.pool_size + 1,
            num_workers=1,
            reconnect_timeout=0.0,  # we retry ourselves, within each caller's budget
            name="pglease",
            open=False,
        )
        try:
            pool.open()
        except RuntimeError as error:  # no more threads, or the interpreter is going down
            raise BackendUnavailable(f"no connection can be made any more: {error}") from None
        return pool

    def params(self, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return libpq's parameters: the address's, then `more`, then what we choose ourselves."""
        return self.asking(more)()

    def asking(self, more: Mapping[str, Any] | None = None) -> Callable[[], dict[str, Any]]:
        """Return a function that tells them anew, for each connection that is made.

        It refers to the address alone: whoever keeps it to connect later does not keep all of us alive.
        """
        return partial(_params, self.dsn, max(2, round(self._connect_timeout)), more)  # 2 is libpq's own least

    def forget(self) -> None:
        """See `Connections.forget`."""
        forks.bury(self._pool)
        self._fresh()

    def close(self) -> None:
        """Close the pool; conversations under way end by their own budgets."""
        with self._opening:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close(timeout=1.0)


def _idle_in(pool: ConnectionPool[Any]) -> Connection | None:
    """Take an idle connection out of the pool, which by itself would wait for one."""
    import psycopg_pool

    if not pool.get_stats()["pool_available"]:
        return None
    try:
        return pool.getconn(timeout=_NO_TIME)  # type: ignore[no-any-return]
    except (psycopg_pool.PoolTimeout, psycopg_pool.PoolClosed):  # somebody was faster
        return None


def _params(dsn: Dsn, connect_timeout: int, more: Mapping[str, Any] | None) -> dict[str, Any]:
    dsn.refresh()
    several = "," in (dsn.get("host") or os.environ.get("PGHOST", ""))
    return dsn.params(
        {
            "connect_timeout": connect_timeout,
            "application_name": "pglease",
            "client_encoding": "UTF8",
            "keepalives": 1,
            "keepalives_idle": 10,
            "keepalives_interval": 2,
            "keepalives_count": 3,
            "tcp_user_timeout": 10_000,
            **({"target_session_attrs": "read-write"} if several else {}),
            **(more or {}),
        }
    )


class Loan:
    """One connection of our pool, in the hands of somebody who gives it back when the conversation has ended.

    Attributes:
        link: the connection, as statements see it.
    """

    __slots__ = ("_connection", "_connections", "link")

    def __init__(self, connections: OwnConnections, connection: Connection) -> None:
        self._connections, self._connection = connections, connection
        self.link = connection.link

    def end(self, error: Exception | None = None) -> BackendError | None:
        """Give it back, with the driver's error that the conversation ended in; returns ours for it. On any thread."""
        return self._connections.put_back(self._connection, error, reserved=False)

    def drop(self) -> None:
        """Close it in mid-conversation: nobody knows what its next answer would belong to."""
        self.link.cutoff.disarm()  # first: armed, it would shut whoever has that number next
        self._connection.close()
        self._connections.put_back(self._connection, None, reserved=False)


class _LoanInTime:
    """One connection of our pool for one conversation; no generator, which would cost as much as reading a row."""

    __slots__ = ("_budget", "_connection", "_connections", "_reserved")

    def __init__(self, connections: OwnConnections, budget: Budget, *, reserved: bool) -> None:
        self._connections = connections
        self._budget = budget
        self._reserved = reserved

    def __enter__(self) -> Link:
        self._connection = self._connections.take(self._budget, reserved=self._reserved)
        return self._connection.link  # type: ignore[no-any-return]

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ours = self._connections.put_back(self._connection, error, reserved=self._reserved)
        if ours is not None:
            raise ours from None


class _Attempt:
    """One attempt to connect, on a thread of its own: a look-up of the host's name cannot be cut off, only left."""

    def __init__(self, params: Callable[[], dict[str, Any]], scrub: Callable[[str], str]) -> None:
        self._params, self._scrub = params, scrub
        self._made: queue.SimpleQueue[Connection | BackendError] = queue.SimpleQueue()
        self._handing_over = threading.Lock()
        self._given_up = False

    def within(self, seconds: float) -> Connection:
        """Return the connection if it is made in time."""
        try:
            threading.Thread(target=self._run, name="pglease-connect", daemon=True).start()
            made = self._made.get(timeout=max(0.0, seconds))
        except queue.Empty:
            self._give_up()
            raise BackendUnavailable("no connection to PostgreSQL was made in time") from None
        except RuntimeError as error:  # no more threads, or the interpreter is going down
            raise BackendUnavailable(f"no connection can be made any more: {error}") from None
        except BaseException:
            self._give_up()
            raise
        if isinstance(made, BackendError):
            raise made
        return made

    def _give_up(self) -> None:
        with self._handing_over:
            self._given_up = True
            while not self._made.empty():
                _close(self._made.get())

    def _run(self) -> None:
        from pglease.backends.postgres_psycopg import Connection

        report = Report()
        made: Connection | BackendError
        try:
            made = Connection.connect(params=self._params, report=report, scrub=self._scrub)
        except Exception as error:  # noqa: BLE001  # the report has ours
            made = report.last or translated(error, self._scrub, sent=False)
        with self._handing_over:
            if self._given_up:
                _close(made)
            else:
                self._made.put(made)


def _close(made: Connection | BackendError) -> None:
    if not isinstance(made, BackendError):
        made.close()


def _again(error: BackendError) -> BackendError:
    """Return a copy to raise: one exception object raised by many threads would mix up their tracebacks."""
    return type(error)(*error.args)


class BorrowedConnections:
    """Connections of the user's own making, lent by a factory for one conversation each.

    Args:
        factory: called without arguments; returns a context manager that yields a psycopg 3 or psycopg2 connection, or
            something that carries one (a SQLAlchemy pool's proxy, a Django connection).
    """

    def __init__(self, factory: Callable[[], AbstractContextManager[Any]]) -> None:
        self._factory = factory
        self._closed = False
        self.behind_pooler = False

    @contextmanager
    def lend(self, budget: Budget, *, reserved: bool = False) -> Iterator[Link]:  # noqa: ARG002  # there is only one kind
        """See `Connections.lend`."""
        if self._closed:
            raise BackendClosed("the backend is closed")
        ours: BackendError | ConfigurationError | None = None
        sent = False
        try:
            with self._factory() as lent:
                connection = _driver_connection(lent)
                _refuse_if_busy(connection)
                cutoff = Cutoff(connection.fileno())
                try:
                    cutoff.arm(budget.until)
                    budget.sending()
                    sent = True
                    yield Link(connection, in_transactions=True)
                finally:
                    cutoff.disarm()
        except (BackendError, ConfigurationError):
            raise
        except Exception as error:  # noqa: BLE001  # whatever the factory's world raises becomes one of ours
            ours = _explained_borrowing(error, sent=sent)
        if ours is not None:
            raise ours

    def lend_idle(self, budget: Budget) -> None:
        """See `Connections.lend_idle`: nobody knows what the factory waits for."""

    def connect(self, budget: Budget) -> None:  # noqa: ARG002
        """See `Connections.connect`: one that is lent cannot be kept."""
        if self._closed:
            raise BackendClosed("the backend is closed")

    def forget(self) -> None:
        """Nothing to drop: nothing is kept between conversations."""

    def close(self) -> None:
        """Refuse further conversations; the connections are the user's."""
        self._closed = True


def _explained_borrowing(error: Exception, *, sent: bool) -> BackendError:
    if sent or is_transport(error):
        return translated(error, str, sent=sent)
    return BackendMisconfigured(f"the connection factory raised {type(error).__name__}: {error}")


def _driver_connection(lent: Any) -> Any:
    """Find the driver's own connection in what was lent.

    SQLAlchemy's proxy has a dict as `.info`, so it has to be unwrapped before anybody looks there.
    """
    raw = getattr(lent, "driver_connection", None) or lent
    if not hasattr(raw, "info") and hasattr(raw, "connection"):
        raw = raw.connection  # Django's wrapper
    if not hasattr(getattr(raw, "info", None), "transaction_status"):
        raise BackendMisconfigured(
            f"the connection factory must lend a psycopg or psycopg2 connection, not {type(lent).__module__}."
            f"{type(lent).__qualname__}"
        )
    return raw


def _refuse_if_busy(connection: Any) -> None:
    status = int(connection.info.transaction_status)
    if connection.closed:
        raise BackendUnavailable("the connection factory lent a closed connection")
    if status != 0:
        raise ConfigurationError(
            "the connection factory lent a connection that is inside a transaction: a lease cannot be taken there, "
            "because it would depend on that transaction's commit. Lend a connection of its own, or end the "
            "transaction first"
        )
