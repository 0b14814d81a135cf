"""Leases in PostgreSQL: one statement and one round trip per verb, judged by the server's clock.

What decides is in `postgres_sql`; where connections come from in `postgres_connections`; what a driver's error means in
`postgres_errors`. Here they are put together: a verb is a conversation, retried within its budget while trouble is of
the kind that passes.
"""

from __future__ import annotations

import builtins
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import tenacity

from pglease import clock, forks, options
from pglease.backends import postgres_fencing, postgres_guard, postgres_schema, postgres_waiting
from pglease.backends.base import Budget, Fence, Guard, ParamStyle, Traits
from pglease.backends.postgres_asking import BUSY_RETRY_AFTER, REASONS, adopt, ask, ask_for_all, refuse_busy
from pglease.backends.postgres_begun import Begun
from pglease.backends.postgres_connections import BorrowedConnections, Connections, OwnConnections
from pglease.backends.postgres_dsn import Address, Dsn
from pglease.backends.postgres_epochs import Lineage, Quarantine, ask_lineage, raise_epoch
from pglease.backends.postgres_errors import INSUFFICIENT_PRIVILEGE, LOCK_NOT_AVAILABLE, UNDEFINED_TABLE, sqlstate
from pglease.backends.postgres_link import Link, Row
from pglease.backends.postgres_rows import answer_in, lease_in, tenure_in, written
from pglease.backends.postgres_sql import LONGEST_LOCK_WAIT, Statements
from pglease.backends.postgres_waiting import Listening
from pglease.backends.settling import Settling
from pglease.errors import BackendError, BackendMisconfigured, BackendUnavailable, ConfigurationError
from pglease.records import (
    Adoption,
    Claim,
    Gone,
    Granted,
    Held,
    InTheWay,
    Lease,
    Place,
    Refused,
    Released,
    ReleaseOutcome,
    Renewal,
    RenewalOutcome,
    Request,
    Tenure,
    Ticket,
    Unknown,
)
from pglease.schema import DEFAULT_TABLE, PROTOCOL, TableNames, table_names

if TYPE_CHECKING:
    from pglease.backends.base import Subscription
    from pglease.backends.checks import Check

if "psycopg2" in sys.modules:
    # 0.0.x imported it here, and pools that its users lend us are made of it after `import psycopg2` alone.
    import psycopg2.pool  # noqa: F401

log = logging.getLogger("pglease")

T = TypeVar("T")

TRAITS = Traits(
    kind="PostgreSQL",
    clock="server",
    shared_by="hosts",
    durable=True,
    wakes_waiters=True,
    fair=True,
    transactional_fencing=True,
    groups=True,
    history=True,
    token_survives_loss=True,
    in_two_halves=True,
    slots=True,
)
_REMEMBERED = 4096


class PostgresBackend:
    """Leases in a PostgreSQL table.

    Args:
        url: `postgresql://user:pass@host/db`, also with a driver in the scheme, or libpq's `host=… dbname=…`. Several
            hosts are tried for the one that accepts writes. Or a function that returns libpq's parameters as a
            mapping, asked before each connection is made, on any thread: for passwords that change.
        table_name: the lease table; one identifier. Default `pglease_leases`.
        schema: its schema. Default None: wherever the connection's `search_path` finds or would create it.
        auto_initialize: whether the table is made at the first use if it is missing. Default True; False where the role
            may not, or migrations do it.
        connect_timeout: seconds (or "10s") for one connection attempt; a `connect_timeout` in the address wins. At
            least 2, as in libpq; whole seconds, as there. Default 10.
        pool_size: how many conversations may go on at once, 1 or more; callers wait for their turn, and one more
            connection is kept for renewals. Default 4: a conversation takes a millisecond, a connection of the server
            is dear.
        notify: whether waiters are woken by NOTIFY, which costs one more connection while somebody waits or watches
            through this client. Default True. False: this client wakes nobody and looks on its own; say it to all
            clients alike.
        failover_quarantine: seconds (or "5m") during which nothing is granted once a failover or a restore was noticed:
            holders of leases that the new server has never heard of may still act on them. At least the longest ttl in
            use; True takes the longest one in the table, at least 60. Default False. Say the same in every client: the
            first that asks for a lease decides, and all keep to it.
        history: how many holds that have ended are remembered for each name, in the table `<table_name>_history`: one
            row more in the statement that ends a hold, or takes over one that lapsed. Default 0: none. Say the same in
            every client: what others end is remembered by them, or not at all.

    Building it connects to nothing.

    Raises:
        ConfigurationError: for what is wrong with the arguments, all of it, without showing the address.
    """

    traits = TRAITS
    """`token_survives_loss` turns false at the first use of a server that cannot tell its timeline."""

    def __init__(
        self,
        url: Address,
        *,
        table_name: str = DEFAULT_TABLE,
        schema: str | None = None,
        auto_initialize: bool = True,
        connect_timeout: options.Duration = 10,
        pool_size: int = 4,
        notify: bool = True,
        failover_quarantine: bool | options.Duration = False,
        history: int = 0,
    ) -> None:
        with options.all_problems() as problems:
            dsn = problems.check(Dsn, url)
            timeout = problems.check(options.seconds, connect_timeout, "connect_timeout")
            size = problems.check(options.count, pool_size, "pool_size")
            names = problems.check(table_names, table_name, schema)
            create = problems.check(options.flag, auto_initialize, "auto_initialize")
            wakes = problems.check(options.flag, notify, "notify")
            quarantine = problems.check(Quarantine.of, failover_quarantine)
            keep = problems.check(options.count, history, "history", least=0)
        own = OwnConnections(dsn, pool_size=size, connect_timeout=timeout)
        self._begin(own, names, auto_initialize=create, notify=wakes, quarantine=quarantine, history=keep)

    def _begin(
        self,
        connections: Connections,
        names: TableNames,
        *,
        auto_initialize: bool,
        notify: bool,
        quarantine: Quarantine,
        history: int,
    ) -> None:
        self.connections = connections
        self._listening = Listening(connections, self._no_longer_known, wanted=notify)
        self._names = names
        self._auto_initialize = auto_initialize
        self._quarantine = quarantine
        self._history = history
        self._statements: Statements | None = None
        self._known_held: dict[str, float] = {}
        self._whereabouts = postgres_fencing.Whereabouts(self._look_around)
        self._fresh_locks()
        forks.forget_in_children(self, type(self).forget)

    def _fresh_locks(self) -> None:
        self._settling = Settling("the lease table")
        self._closing = threading.Event()

    @classmethod
    def from_connection_factory(
        cls,
        factory: Callable[[], AbstractContextManager[Any]],
        *,
        table_name: str = DEFAULT_TABLE,
        schema: str | None = None,
        auto_initialize: bool = True,
        notify: bool = True,
        failover_quarantine: bool | options.Duration = False,
        history: int = 0,
        shared: bool = True,
    ) -> PostgresBackend:
        """Use connections that the application lends.

        Args:
            factory: called without arguments for each conversation; returns a context manager that yields a psycopg 3
                or psycopg2 connection, SQLAlchemy's pooled proxy of one, or Django's. Rows may have any shape. It must
                be callable from any thread.
            table_name, schema, auto_initialize: as for the class.
            notify: whether others are woken by what is released here. Default True. Nobody listens on a lent
                connection, so this client's own waiters look for themselves.
            failover_quarantine, history: as for the class.
            shared: whether the application can use the factory's connections up, which is said once in the log. Default
                True. False where each call makes a connection of its own.

        A lent connection that is inside a transaction is refused (`ConfigurationError`) before any SQL. Otherwise the
        conversation is a READ COMMITTED transaction of its own, committed here. `close` leaves the connections alone.

        Renewals share the factory's connections: if the application can use them all up, leases can be lost. A pool of
        its own, or a URL, is safer.

        Raises:
            ConfigurationError: for what is wrong with the arguments.
        """
        if not callable(factory):
            raise ConfigurationError(f"factory must be callable, not {factory!r}")
        backend = cls.__new__(cls)
        names = table_names(table_name, schema)
        quarantine = Quarantine.of(failover_quarantine)
        keep = options.count(history, "history", least=0)
        if shared:
            log.warning(
                "pglease renews its leases on the application's own connections: when all are in use, leases are lost"
            )
        backend._begin(
            BorrowedConnections(factory),
            names,
            auto_initialize=auto_initialize,
            notify=notify,
            quarantine=quarantine,
            history=keep,
        )
        return backend

    @classmethod
    def from_pool(cls, pool: Any, **knobs: Any) -> PostgresBackend:
        """Use a `psycopg_pool.ConnectionPool` of the application's. Knobs as for `from_connection_factory`."""
        return cls.from_connection_factory(pool.connection, **knobs)

    @classmethod
    def from_engine(cls, engine: Any, **knobs: Any) -> PostgresBackend:
        """Use a SQLAlchemy engine of psycopg or psycopg2, 1.4 or 2. Knobs as for `from_connection_factory`.

        Raises:
            ConfigurationError: an asynchronous engine, whose connections no other thread can use, or another database.
        """
        _refuse_engine(engine)
        # A pool that keeps nothing cannot be used up.
        knobs.setdefault("shared", type(engine.pool).__name__ != "NullPool")

        @contextmanager
        def borrow() -> Iterator[Any]:
            connection = engine.raw_connection()
            try:
                yield connection
            finally:
                connection.close()  # back to SQLAlchemy's pool

        return cls.from_connection_factory(borrow, **knobs)

    # -- the verbs -----------------------------------------------------------------------------------------------------

    def try_acquire(self, request: Request, budget: Budget) -> Granted | Refused:
        """See `Backend.try_acquire`."""
        return self._try_acquire(request, budget)

    def _try_acquire(self, request: Request, budget: Budget, *, unknown: bool = False) -> Granted | Refused:
        until = self._known_held.get(request.name)
        answer = None if until is None else self._look(request, until, budget)
        if answer is None:
            answer = self._converse(lambda link, sql: self._ask(link, sql, request, budget), budget, unknown=unknown)
            self._note_holder(request.name, answer)
        return answer

    def begin_try_acquire(self, request: Request, budget: Budget) -> Begun[Granted | Refused] | None:
        """See `SplitBackend.begin_try_acquire`."""
        sql = self._statements
        loan = None if sql is None else self.connections.lend_idle(budget)
        if sql is None or loan is None:
            return None
        held = self._known_held.get(request.name, 0.0) > clock.now()

        def read(rows: builtins.list[Row]) -> Granted | Refused | None:
            answer = answer_in(rows)
            if answer is None:
                self._no_longer_known(request.name)
            elif not held:
                self._note_holder(request.name, answer)
            return answer

        def verb(unknown: bool) -> Granted | Refused:
            return self._try_acquire(request, budget, unknown=unknown)

        if held:
            return Begun(loan, sql.look, {"name": request.name, "lease_id": request.lease_id}, read, verb)
        return Begun(loan, sql.try_acquire, _question(request), read, verb)

    def _look(self, request: Request, until: float, budget: Budget) -> Granted | Refused | None:
        """Look without asking when the last answer said that the name is held for longer: the common case of losing."""
        if until > clock.now():
            params = {"name": request.name, "lease_id": request.lease_id}
            answer = answer_in(self._converse(lambda link, sql: link.rows(sql.look, params), budget))
            if answer is not None:
                return answer
        self._known_held.pop(request.name, None)
        return None

    def _no_longer_known(self, name: str) -> None:
        """Ask at once the next time: a look first would cost those who were woken a round trip."""
        self._known_held.pop(name, None)

    def _note_holder(self, name: str, answer: Granted | Refused) -> None:
        if isinstance(answer, Refused) and answer.retry_after > BUSY_RETRY_AFTER:
            self._remember(name, clock.now() + answer.retry_after)

    def _remember(self, name: str, until: float) -> None:
        if len(self._known_held) >= _REMEMBERED:
            self._known_held.clear()
        self._known_held[name] = until

    def _ask(self, link: Link, sql: Statements, request: Request, budget: Budget, **more: Any) -> Granted | Refused:
        params = more | _question(request)
        return ask(link, sql, request, params, budget, quarantine=self._quarantine, pause=self._closing.wait)

    def try_acquire_many(self, requests: Sequence[Request], budget: Budget) -> builtins.list[Granted] | InTheWay | None:
        """See `GroupBackend.try_acquire_many`. One statement; all requests have one owner, ttl and metadata."""
        first = requests[0]
        alike = (first.owner_id, first.ttl, first.metadata, None)
        if any((each.owner_id, each.ttl, each.metadata, each.ticket_id) != alike for each in requests):
            return None
        params = {
            "names": [request.name for request in requests],
            "lease_ids": [request.lease_id for request in requests],
            "owner": first.owner_id,
            "ttl": first.ttl,
            "metadata": written(first.metadata),
        }
        return self._converse(lambda link, sql: ask_for_all(link, sql, requests, params), budget)

    def renew(self, renewals: Sequence[Renewal], budget: Budget) -> builtins.list[RenewalOutcome]:
        """See `Backend.renew`. Uses the connection that is kept for renewals."""
        if not renewals:
            return []
        params = self._renewal_params(renewals)
        return self._converse(lambda link, sql: _renewed(link, sql, params), budget, reserved=True)

    def _renewal_params(self, renewals: Sequence[Renewal]) -> dict[str, Any]:
        return {
            "names": [renewal.name for renewal in renewals],
            "lease_ids": [renewal.lease_id for renewal in renewals],
            "ttls": [renewal.ttl for renewal in renewals],
        }

    def release(self, name: str, lease_id: str, budget: Budget, *, min_hold: float = 0.0) -> ReleaseOutcome:
        """See `Backend.release`."""
        params = {"name": name, "lease_id": lease_id, "min_hold": min_hold}
        return self._release(params, budget, _Tries(budget))

    def _release(self, params: dict[str, Any], budget: Budget, tries: _Tries) -> ReleaseOutcome:
        def end(link: Link, sql: Statements) -> ReleaseOutcome:
            earlier = tries.begin()
            row = _first_in_line(link, sql, sql.release, params, budget)
            return self._release_outcome(row, params["name"], tries, earlier)

        return self._converse(end, budget)

    def _release_outcome(self, row: Row | None, name: str, tries: _Tries, earlier: float | None) -> ReleaseOutcome:
        """Read what a release came to. `earlier` is when the first try was sent that nobody answered."""
        tries.heard(earlier)
        if row is None:
            return Gone("deleted")
        if row[0] == "released":
            self._no_longer_known(name)  # whom we have kept from it ourselves need not look first
            return Released()
        refuse_busy(row[0], name)
        lease = lease_in(row)
        if tries.may_have_done(earlier, _over_for(row[0], lease)):
            return Released()  # by that try; a rival may have the name by now
        return Gone(REASONS[row[0]], lease)

    def begin_release(
        self, name: str, lease_id: str, budget: Budget, *, min_hold: float = 0.0
    ) -> Begun[ReleaseOutcome] | None:
        """See `SplitBackend.begin_release`."""
        sql = self._statements
        loan = None if sql is None else self.connections.lend_idle(budget)
        if sql is None or loan is None:
            return None
        params = {"name": name, "lease_id": lease_id, "min_hold": min_hold}
        tries = _Tries(budget)
        earlier = tries.begin()

        def read(rows: builtins.list[Row]) -> ReleaseOutcome | None:
            if rows and rows[0][0] == "busy":  # it takes standing in line
                tries.heard(earlier)
                return None
            return self._release_outcome(_first(rows), name, tries, earlier)

        return Begun(loan, sql.release, params, read, lambda _: self._release(params, budget, tries))

    def force_release(self, name: str, fencing_token: int, budget: Budget) -> bool:
        """See `Backend.force_release`."""
        params = {"name": name, "fencing_token": fencing_token}
        tries = _Tries(budget)

        def force(link: Link, sql: Statements) -> bool:
            earlier = tries.begin()
            row = _first_in_line(link, sql, sql.force_release, params, budget)
            tries.heard(earlier)
            if row is None:
                return False
            verdict, over_for = row
            refuse_busy(verdict, name)
            return verdict == "forced" or (verdict == "over" and tries.may_have_done(earlier, over_for))

        return self._converse(force, budget)

    def adopt(self, adoption: Adoption, budget: Budget) -> Granted | Gone:
        """See `Backend.adopt`."""
        return self._converse(lambda link, sql: self._adopted(link, sql, adoption), budget)

    def _adopted(self, link: Link, sql: Statements, adoption: Adoption, **more: Any) -> Granted | Gone:
        params = more | {
            "name": adoption.name,
            "lease_id": adoption.lease_id,
            "next_id": adoption.next_id,
            "owner": adoption.owner_id,
            "ttl": adoption.ttl,
        }
        return adopt(link, sql, params, quarantine=self._quarantine)

    def set_metadata(self, name: str, lease_id: str, metadata: Mapping[str, Any], budget: Budget) -> Held | Gone:
        """See `Backend.set_metadata`."""
        params = {"name": name, "lease_id": lease_id, "metadata": written(metadata)}

        def describe(link: Link, sql: Statements) -> Held | Gone:
            row = _first(link.rows(sql.set_metadata, params))
            if row is None:
                return Gone("deleted")
            refuse_busy(row[0], name)
            lease = lease_in(row)
            return Held(lease) if row[0] == "held" else Gone(REASONS[row[0]], lease)

        return self._converse(describe, budget)

    def get(self, name: str, budget: Budget) -> Lease | None:
        """See `Backend.get`."""
        params = {"name": name, "lease_id": None}
        row = self._converse(lambda link, sql: _first(link.rows(sql.look, params)), budget)
        return None if row is None else lease_in(row)

    def list(self, prefix: str, budget: Budget, *, ended: bool = False) -> builtins.list[Lease]:
        """See `Backend.list`."""
        params = {"prefix": prefix, "ended": ended}
        return [lease_in(row) for row in self._converse(lambda link, sql: link.rows(sql.list, params), budget)]

    def history(self, name: str, budget: Budget, *, limit: int, prefix: bool = False) -> builtins.list[Tenure]:
        """See `RememberingBackend.history`. Reads what any client has kept, whatever this one keeps."""
        params = {"name": name, "prefix": prefix, "limit": limit}
        rows = self._converse(lambda link, sql: link.rows(sql.history, params), budget)
        return [tenure_in(row) for row in reversed(rows)]

    def cleanup(self, older_than: float, budget: Budget) -> int:
        """See `Backend.cleanup`. Needs DELETE; each batch of 1000 holds the table for a few milliseconds."""
        total = 0
        while True:
            try:
                deleted = self._converse(lambda link, sql: _cleanup_batch(link, sql, older_than), budget)
            except BackendMisconfigured as error:
                raise self._named_right(error) from None
            total += deleted
            if deleted < 1000:
                return total

    def _named_right(self, error: BackendMisconfigured) -> BackendMisconfigured:
        """Name the GRANT that a cleanup lacks."""
        if error.sqlstate != INSUFFICIENT_PRIVILEGE:
            return error
        return BackendMisconfigured(
            f"cleanup may not delete here: GRANT DELETE ON {self._names.leases}, {self._names.tickets}, "
            f"{self._names.history}, and UPDATE ON {self._names.meta} to this role, or let another role do it "
            "(`pglease schema grants`)"
        )

    # -- fencing -------------------------------------------------------------------------------------------------------

    def guard(self, claim: Claim, connection: Any, *, idle: float = 60.0) -> Guard:
        """See `Backend.guard`. For psycopg, psycopg2, SQLAlchemy, Django and asyncpg."""
        return postgres_fencing.guard(claim, connection, self._whereabouts, idle)

    def fence_sql(self, claim: Claim, paramstyle: ParamStyle, *, start: int = 1) -> Fence:
        """See `Backend.fence_sql`."""
        return postgres_guard.fence(self._whereabouts.find(), claim, paramstyle, start)

    def _look_around(self) -> postgres_guard.Place:
        return self._converse(lambda link, _: postgres_guard.find(link, self._names), self._budget(10.0))

    # -- what waiters rest on ------------------------------------------------------------------------------------------

    def listen(self, budget: Budget) -> Subscription | None:
        """See `WakingBackend.listen`."""
        self._statements or self._settled(budget)

        def notify(channel: str) -> None:
            self._converse(lambda link, _: link.rows(postgres_waiting.NOTIFY, {"channel": channel}), budget)

        return self._listening.begin(self._names, notify, budget)

    def mark(self, name: str, seconds: float, budget: Budget) -> bool:
        """See `WakingBackend.mark`."""
        return self._converse(lambda link, sql: postgres_waiting.mark(link, sql, name, seconds), budget)

    def queue(self, ticket: Ticket, budget: Budget) -> Place | None:
        """See `FairBackend.queue`."""
        return self._converse(lambda link, sql: postgres_waiting.queue(link, sql, ticket), budget)

    def leave_queue(self, name: str, ticket_id: str, budget: Budget) -> bool:
        """See `FairBackend.leave_queue`."""
        return self._converse(lambda link, sql: postgres_waiting.leave_queue(link, sql, name, ticket_id), budget)

    def queued(self, name: str, budget: Budget) -> builtins.list[str]:
        """See `FairBackend.queued`."""
        rows = self._converse(lambda link, sql: link.rows(sql.queued, {"name": name}), budget)
        return [row[0] for row in rows]

    def queues(self, prefix: str, budget: Budget) -> dict[str, builtins.list[str]]:
        """See `FairBackend.queues`."""
        found: dict[str, builtins.list[str]] = {}
        for name, label in self._converse(lambda link, sql: link.rows(sql.queues, {"prefix": prefix}), budget):
            found.setdefault(name, []).append(label)
        return found

    # -- conversations -------------------------------------------------------------------------------------------------

    def _converse(
        self,
        talk: Callable[[Link, Statements], T],
        budget: Budget,
        *,
        reserved: bool = False,
        unknown: bool = False,
    ) -> T:
        """Hold one conversation; while trouble is of the kind that passes, hold it again until the budget is spent."""
        return self._persist(lambda: self._once(talk, budget, reserved=reserved), budget, unknown=unknown)

    def _persist(self, act: Callable[[], T], budget: Budget, *, unknown: bool = False) -> T:
        """Do something; while trouble is of the kind that passes, do it again until the budget is spent.

        `unknown` says that an earlier try may have been carried out unheard.
        """
        try:
            return act()
        except BackendUnavailable as trouble:
            trouble.outcome_unknown = unknown = unknown or trouble.outcome_unknown
        # The first try again is made at once: most often a restart had left a dead connection in the pool.
        retrying = tenacity.Retrying(
            wait=tenacity.wait_random_exponential(multiplier=0.02, max=0.5),
            stop=lambda state: self._closing.is_set() or budget.left() <= state.upcoming_sleep,
            retry=tenacity.retry_if_exception_type(BackendUnavailable),
            sleep=self._sleep,
            reraise=True,
        )
        try:
            answer: T = retrying(act)
        except BackendUnavailable as last:
            last.outcome_unknown = last.outcome_unknown or unknown
            raise
        return answer

    def _sleep(self, seconds: float) -> None:
        self._closing.wait(seconds)

    def _once(self, talk: Callable[[Link, Statements], T], budget: Budget, *, reserved: bool = False) -> T:
        statements = self._statements or self._settled(budget)
        try:
            with self.connections.lend(budget, reserved=reserved) as link:
                return talk(link, statements)
        except BackendError as error:
            error.__context__ = None  # the driver's own error, whose frames know the password
            if error.sqlstate != UNDEFINED_TABLE:
                raise
        # Somebody dropped the table while we run: look again, and make it again if we may.
        self._statements = None
        self._whereabouts.forget()
        statements = self._settled(budget)  # before a connection is lent: two threads could wait for each other's
        with self.connections.lend(budget, reserved=reserved) as link:
            return talk(link, statements)

    def _settled(self, budget: Budget) -> Statements:
        """Find or make the tables, once for this backend."""
        with self._settling.turn(budget):
            if self._statements is None:
                with self.connections.lend(budget) as link:
                    self._names = postgres_schema.ensure(link, self._names, create=self._auto_initialize)
                    lineage = ask_lineage(link, self._names)
                self._note(lineage)
                self._statements = self._rendered(lineage=not lineage.untold)
            return self._statements

    def _rendered(self, *, lineage: bool) -> Statements:
        notify = self._listening.wanted
        return Statements.of(self._names, PROTOCOL, lineage=lineage, notify=notify, history=self._history)

    def _note(self, lineage: Lineage) -> None:
        self.traits = replace(type(self).traits, token_survives_loss=not lineage.untold)
        if lineage.untold:
            log.warning(
                "the server cannot tell its timeline (%s): run `pglease bump-epoch` after a failover or a restore, or "
                "fencing tokens are granted twice",
                lineage.untold,
            )

    def forget(self) -> None:
        """See `Backend.forget`."""
        self._fresh_locks()
        self._listening.forget()
        self.connections.forget()

    def close(self) -> None:
        """See `Backend.close`."""
        self._closing.set()
        self._whereabouts.forget()
        self._listening.close()
        self.connections.close()

    # -- what operators ask for ----------------------------------------------------------------------------------------

    def ddl(self) -> str:
        """Return the script that makes the tables, for a DBA to run."""
        return postgres_schema.ddl(self._names)

    def grants(self) -> str:
        """Return the GRANT statements for each role: app, guard, cleanup, read-only."""
        return postgres_schema.grants(self._names)

    def apply_schema(self, *, force: bool = False, timeout: float = 30.0) -> builtins.list[str]:
        """Make or upgrade the tables; return what was done, one sentence each.

        Args:
            force: upgrade a 0.0.x table even though one of its clients was seen within its ttl. Default False.
            timeout: seconds until it gives up. Default 30.

        Raises:
            BackendMisconfigured: a table that is not ours, a right that is missing, a live 0.0.x client.
        """
        with self.connections.lend(self._budget(timeout)) as link:
            done = postgres_schema.apply(link, self._names, force=force)
        self._statements = None
        self._whereabouts.forget()
        return done

    def schema_diff(self, *, timeout: float = 30.0) -> builtins.list[str]:
        """Return what the tables lack or have too much of, one sentence each; empty when all is in order."""
        with self.connections.lend(self._budget(timeout)) as link:
            return postgres_schema.diff(link, self._names)

    def bump_epoch(self, *, quarantine: options.Duration | None = None, timeout: float = 30.0) -> int:
        """Let tokens go on in a new epoch, above all that were ever granted; return its number.

        For what the server cannot tell by itself: a volume or a virtual machine that was set back, rows that were
        deleted or copied back by hand, two replicas of one primary that were both promoted. Harmless otherwise.

        Args:
            quarantine: seconds (or "5m") during which nothing is granted from now on; default: the backend's
                `failover_quarantine`.
            timeout: seconds until it gives up. Default 30.

        Raises:
            BackendMisconfigured: this role may not; or there are no epochs left, after two thousand million of them.
        """
        wanted = self._quarantine if quarantine is None else Quarantine.of(quarantine)
        epoch = self._converse(lambda link, sql: _bumped(link, sql, wanted), self._budget(timeout))
        if epoch is None:
            raise BackendMisconfigured("there are no epochs left: the tokens of this table cannot rise any more")
        return epoch

    def diagnose(self, *, timeout: float = 30.0) -> Iterator[Check]:
        """Yield one check after the other: what was found, and what to do about it."""
        from pglease.backends import postgres_doctor

        def take_and_return() -> None:
            request = Request(postgres_doctor.PROBE_NAME, "pglease doctor", os.urandom(16).hex(), 5.0)
            if isinstance(self.try_acquire(request, self._budget(timeout)), Granted):  # else another doctor is at work
                self.release(request.name, request.lease_id, self._budget(timeout))

        yield from postgres_doctor.diagnose(
            lambda: self.connections.lend(self._budget(timeout)), self._names, take_and_return
        )

    @staticmethod
    def _budget(timeout: float) -> Budget:
        return Budget.of(timeout, clock.now)


def _refuse_engine(engine: Any) -> None:
    dialect = getattr(engine, "dialect", None)
    if dialect is None:
        raise ConfigurationError(f"from_engine needs a SQLAlchemy engine, not {type(engine).__name__}")
    if dialect.name != "postgresql":
        raise ConfigurationError(f"from_engine needs an engine of PostgreSQL, not of {dialect.name}")
    if getattr(dialect, "is_async", False):
        raise ConfigurationError(
            f"from_engine needs a synchronous engine, since leases are renewed on a thread, not one of "
            f"{dialect.driver}: give PGLease or AsyncPGLease the address instead"
        )


def _first(rows: list[Row]) -> Row | None:
    return rows[0] if rows else None


def _first_in_line(
    link: Link, sql: Statements, statement: str, params: Mapping[str, Any], budget: Budget
) -> Row | None:
    """Change a row at once, or wait in line for a moment where another session has it locked.

    A name that many queue for is locked most of the time, for a millisecond each. Whoever only tried again, and again
    found it locked, might not give it back before its time was over.
    """
    row = _first(link.rows(statement, params))
    if row is None or row[0] != "busy" or budget.left() < 2 * LONGEST_LOCK_WAIT:
        return row
    try:
        with link.transaction():
            link.rows(sql.queue_lock, {"name": params["name"]})
            return _first(link.rows(statement, params))
    except Exception as error:
        if sqlstate(error) != LOCK_NOT_AVAILABLE:
            raise
        return row


def _question(request: Request) -> dict[str, Any]:
    """Return a request as `try_acquire` of `postgres_sql` has it."""
    return {
        "name": request.name,
        "owner": request.owner_id,
        "lease_id": request.lease_id,
        "ttl": request.ttl,
        "metadata": written(request.metadata),
        "in_turn": False,
    }


def _over_for(verdict: str, lease: Lease) -> float:
    """Return how long, by the store, the hold has been over at most; infinity for one that lapsed."""
    if verdict == "expired":
        return math.inf
    ended = lease.expires_at if verdict == "ended" else lease.acquired_at
    return (lease.seen_at - ended).total_seconds()


class _Tries:
    """Tells, when a hold is found over, whether an earlier try of ours ended it, whose reply was lost."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._unheard: float | None = None

    def begin(self) -> float | None:
        """Note that a try is under way; return when the first was sent that nobody answered."""
        earlier, self._unheard = self._unheard, self._budget.sent_at if self._unheard is None else self._unheard
        return earlier

    def heard(self, earlier: float | None) -> None:
        """Note that this try was answered."""
        self._unheard = earlier

    @staticmethod
    def may_have_done(earlier: float | None, over_for: float) -> bool:
        """Tell whether what has been over for so many seconds, by the store, was over only since that try was sent."""
        return earlier is not None and over_for <= clock.now() - earlier


def _renewed(link: Link, sql: Statements, params: dict[str, Any]) -> list[RenewalOutcome]:
    """Return the outcome for each of the holds, in their order."""
    names = params["names"]
    outcomes: list[RenewalOutcome | None] = [None] * len(names)
    for *row, place in link.rows(sql.renew, params):
        outcomes[place - 1] = _renewal_outcome(tuple(row))
    unanswered = [name for name, outcome in zip(names, outcomes, strict=True) if outcome is None]
    present = {row[0] for row in link.rows(sql.present, {"names": unanswered})} if unanswered else set()
    return [outcome or _unanswered(name, present) for name, outcome in zip(names, outcomes, strict=True)]


def _renewal_outcome(row: Row) -> RenewalOutcome:
    lease = lease_in(row)
    return Held(lease) if row[0] == "held" else Gone(REASONS[row[0]], lease)


def _unanswered(name: str, present: set[str]) -> RenewalOutcome:
    if name in present:
        return Unknown(BackendUnavailable(f"the row of {name!r} is locked by another session"))
    return Gone("deleted")


def _bumped(link: Link, sql: Statements, quarantine: Quarantine) -> int | None:
    """Raise the epoch while nobody grants: a grant that has read the old one would slip out after us."""
    with link.transaction():
        link.rows(sql.cleanup_lock)
        link.script(sql.cleanup_table)
        return raise_epoch(link, sql, quarantine, anyway=True)


def _cleanup_batch(link: Link, sql: Statements, older_than: float) -> int:
    with link.transaction():
        link.rows(sql.cleanup_lock)
        link.script(sql.cleanup_table)
        link.rows(sql.cleanup_tickets)
        ((deleted, raised),) = link.rows(sql.cleanup_batch, {"older_than": older_than})
        if deleted and not raised:
            raise BackendMisconfigured(
                "the floor of the tokens is missing: run `pglease schema apply`; nothing was deleted"
            )
    return int(deleted)
