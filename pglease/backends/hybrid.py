"""Leases in PostgreSQL that are free within a second of their holder's death.

The row stays the source of truth: token, holder, ttl. Besides, each client has one session of its own whose advisory
locks tell that its process lives. PostgreSQL frees them when the process dies; whoever gets such a lock while the row
still runs waits a moment, so that a holder that is alive hears of it first, and takes over.
"""

from __future__ import annotations

import builtins
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from pglease import clock, options
from pglease.backends.base import AsksInOne, Budget, lacks
from pglease.backends.hybrid_keeper import Keeper, Seat, who
from pglease.backends.hybrid_session import CLIENT_SETTINGS, Mark, Session, pooler_in_between
from pglease.backends.hybrid_sql import LOCKS_IN_USE, MARKING, HybridStatements, key_of
from pglease.backends.postgres import TRAITS, PostgresBackend
from pglease.backends.postgres_asking import BUSY_RETRY_AFTER
from pglease.backends.postgres_connections import OwnConnections
from pglease.backends.postgres_dsn import Address
from pglease.backends.postgres_rows import lease_in
from pglease.backends.postgres_sql import Statements
from pglease.backends.postgres_waiting import reserved
from pglease.errors import BackendClosed, BackendError, BackendUnavailable, ConfigurationError
from pglease.records import (
    Adoption,
    Gone,
    Granted,
    Held,
    Lease,
    Refused,
    ReleaseOutcome,
    Renewal,
    RenewalOutcome,
    Request,
)
from pglease.schema import PROTOCOL

if TYPE_CHECKING:
    from pglease.backends.checks import Check

log = logging.getLogger("pglease")

HANDOVER_DELAY = 0.3
"""Seconds between the freeing of a dead session's lock and the takeover. A holder hears of its session's end within a
few milliseconds of it, and this is what a busy machine adds."""
STRICT_HANDOVER_DELAY = 3.0
LOOK_EVERY = 0.2
"""Seconds between two looks of a waiter at a name whose holder may die."""
_PREFIX = "hybrid+"


class HybridPostgresBackend(AsksInOne, PostgresBackend):  # a lock comes first, and after a grant its mark
    """Leases in a PostgreSQL table, each bound to a session whose death frees it.

    Args:
        url: as for `PostgresBackend`, also with `hybrid+` before; it must lead to the primary itself, not to a pooler.
        handover_delay: seconds between the moment a dead holder's lock is free and the takeover. Default 0.3, with
            `strict` 3. The same in all clients of a table.
        strict: Default False. True: a holder believes only for a little less than `handover_delay` after each sign of
            life of its session. That closes the gap in which a session is ended while its holder is cut off or stands
            still, at the price of a later takeover, and of losses when the server or the network is silent for so long.
            It takes effect only if all clients of a table say so.
        max_advisory: how many leases of this client are bound to its session at most; the others are plain. Default: a
            quarter of what the server's lock table has room for.
        knobs: those of `PostgresBackend`.

    One connection more than `PostgresBackend`, kept for as long as this is open. Building it connects to nothing.

    Raises:
        ConfigurationError: for what is wrong with the arguments, all of it, without showing the address.
    """

    traits = replace(
        TRAITS,
        kind="PostgreSQL, hybrid",
        prompt_failover=True,
        groups=False,
        in_two_halves=False,
        caveat="no pooler; one connection more for each client",
    )

    def __init__(
        self,
        url: Address,
        *,
        handover_delay: options.Duration | None = None,
        strict: bool = False,
        max_advisory: int | None = None,
        **knobs: Any,
    ) -> None:
        with options.all_problems() as problems:
            strictly = problems.check(options.flag, strict, "strict")
            usual = STRICT_HANDOVER_DELAY if strictly else HANDOVER_DELAY
            delay = problems.check(
                options.seconds, usual if handover_delay is None else handover_delay, "handover_delay"
            )
            most = None if max_advisory is None else problems.check(options.count, max_advisory, "max_advisory")
            problems.check(super().__init__, _without_prefix(url), **knobs)
        assert isinstance(self.connections, OwnConnections)
        self._delay = delay
        self._hybrid: HybridStatements | None = None
        self._keeper = Keeper(
            self.connections.asking(CLIENT_SETTINGS),
            self.connections.dsn.scrub,
            silence=delay - options.margin_for(delay, None) if strictly else float("inf"),
            most=most,
        )
        weakref.finalize(self, self._keeper.close).atexit = False

    @classmethod
    def from_connection_factory(cls, factory: Callable[[], AbstractContextManager[Any]], **knobs: Any) -> NoReturn:  # noqa: ARG003
        """Refuse: the session that holds are bound to must be nobody's but ours."""
        raise ConfigurationError(
            "the hybrid backend needs an address: it binds leases to a session of its own, and a lent connection goes "
            "back to its pool with the locks on it"
        )

    @classmethod
    def from_engine(cls, engine: Any, **knobs: Any) -> NoReturn:
        """Refuse, as `from_connection_factory` does."""
        cls.from_connection_factory(engine, **knobs)

    # -- taking --------------------------------------------------------------------------------------------------------

    def try_acquire(self, request: Request, budget: Budget) -> Granted | Refused:
        """See `Backend.try_acquire`. Takes the handover delay longer where it takes over from a dead holder.

        Raises:
            BackendMisconfigured: also for a pooler in between, and for a standby.
        """
        return self._persist(lambda: self._attempt(request, budget), budget)

    def _attempt(self, request: Request, budget: Budget) -> Granted | Refused:
        self._ready(budget)
        with self._seated(request.name, request.lease_id, request.ttl, budget) as (seat, keep):
            answer = self._answer_to(request, seat, budget)
            if not isinstance(answer, Granted):
                return answer
            keep()
        return self._bound(answer.lease, seat)

    def _ready(self, budget: Budget) -> None:
        """Have a session, and know where the tables are."""
        self._vetted(self._keeper.session(budget), budget)
        if self._hybrid is None:
            self._settled(budget)

    @contextmanager
    def _seated(
        self, name: str, lease_id: str, ttl: float, budget: Budget
    ) -> Iterator[tuple[Seat, Callable[[], None]]]:
        """Take a seat in the book for one try; it is kept if the hold was granted, or may have been."""
        seat = self._keeper.sit(name, key_of(self._names, name), lease_id)
        until: builtins.list[float] = []
        try:
            yield seat, lambda: until.append(budget.sent_at + ttl)
        except BaseException as error:
            if not isinstance(error, BackendError) or getattr(error, "outcome_unknown", False):
                until.append(clock.now() + ttl)
            raise
        finally:
            self._keeper.rise(seat, until[-1] if until else None)

    @staticmethod
    def _bound(lease: Lease, seat: Seat) -> Granted:
        if seat.bond.loss is not None:
            raise BackendUnavailable("the session died while a lease was granted", outcome_unknown=True)
        return Granted(lease, seat.bond)

    def _answer_to(self, request: Request, seat: Seat, budget: Budget) -> Granted | Refused:
        """Ask for a lease from a seat of the book."""
        seen = self._glance(request, budget) if self._known_held.get(request.name, 0.0) > clock.now() else None
        if seen is None or not seen.runs:
            if not self._keeper.lock(seat, budget):
                seen = seen or self._glance(request, budget)
                seat.rival = seen.mark if seen is not None and not seen.runs else None
            answer = self._once(lambda link, sql: self._ask(link, sql, request, budget, **self._mark(seat)), budget)
            if isinstance(answer, Granted):
                return answer if _is_fresh(answer.lease) else self._recognised(answer, seat, budget)
            if answer.lease is None or answer.retry_after <= BUSY_RETRY_AFTER or answer.lease.is_expired():
                return answer
            seen = self._glance(request, budget)
        if seen is None or not seen.runs:
            return Refused(None if seen is None else seen.lease, BUSY_RETRY_AFTER)  # it has just ended
        return self._contest(request, seat, seen, budget)

    def _glance(self, request: Request, budget: Budget) -> _Seen | None:
        """Look who has the name, and whose session it is bound to."""
        assert self._hybrid is not None
        glance = self._hybrid.glance
        params = {"name": request.name, "lease_id": request.lease_id}
        rows = self._once(lambda link, _: link.rows(glance, params), budget)
        if not rows:
            return None
        *record, queued, lease_id, pid, started = rows[0]
        mark = None if pid is None else Mark(pid, started)
        return _Seen(record[0], lease_in(tuple(record)), lease_id, mark, queued)

    def _recognised(self, answer: Granted, seat: Seat, budget: Budget) -> Granted:
        """Make the mark of our own earlier grant say how things stand now; whatever it says was said by that try.

        What is left of it was read before: belief counts from when that was asked for, however long this takes.
        """
        assert self._hybrid is not None
        read_at, errands = budget.sent_at, self._hybrid.errands
        mark = self._keeper.mark_of(seat)
        statement = errands.untie if mark is None else errands.tie
        params = who([seat], mark or Mark(0, ""))
        if not self._once(lambda link, _: link.rows(statement, params), budget):
            raise BackendUnavailable(f"the row of {seat.name!r} is locked by another session", outcome_unknown=True)
        budget.sent_at = read_at
        return answer

    def _contest(self, request: Request, seat: Seat, seen: _Seen, budget: Budget) -> Granted | Refused:
        """Look whether the session behind a running hold is dead; if it is, take over."""
        if seen.verdict == "granted":
            return self._recognised(Granted(seen.lease), seat, budget)
        left = seen.lease.time_remaining()
        self._remember(request.name, clock.now() + left)
        if seen.mark is None:
            return Refused(seen.lease, left)
        refused = Refused(seen.lease, left, look_every=LOOK_EVERY)
        if seen.queued and self._once(lambda link, sql: reserved(link, sql, request), budget) is not None:
            return refused  # the lock would be in the way of whoever is at the head
        if not self._keeper.lock(seat, budget) or budget.left() <= self._delay:
            return refused
        return self._take_over(request, seat, seen, budget) or refused

    def _take_over(self, request: Request, seat: Seat, seen: _Seen, budget: Budget) -> Granted | None:
        """Wait until the holder, should it be alive, has heard of its session's death; then take what it still has."""
        assert self._hybrid is not None
        assert seen.mark is not None
        if self._closing.wait(self._delay):
            raise BackendClosed("the backend is closed")
        if not seat.is_tied:
            raise BackendUnavailable("the session died during a takeover")
        rival = {"rival_id": seen.lease_id, "rival_pid": seen.mark.pid, "rival_started": seen.mark.started}
        statements = self._hybrid.take_over
        answer = self._once(
            lambda link, _: self._ask(link, statements, request, budget, **self._mark(seat), **rival), budget
        )
        return answer if isinstance(answer, Granted) else None

    def try_acquire_many(self, requests: Sequence[Request], budget: Budget) -> NoReturn:  # noqa: ARG002
        """Refuse: each hold takes a lock of its own on the session."""
        raise lacks(self.traits, "groups", "try_acquire_many")

    def adopt(self, adoption: Adoption, budget: Budget) -> Granted | Gone:
        """See `Backend.adopt`. What nobody attends to is bound to no session: its next holder may be anybody."""
        if adoption.unattended:
            answer = self._converse(lambda link, sql: self._adopted(link, sql, adoption, **_NO_MARK), budget)
        else:
            answer = self._persist(lambda: self._attempt_to_adopt(adoption, budget), budget)
        if (seat := self._keeper.seat_of(adoption.lease_id)) is not None:
            self._keeper.drop(seat)
        return answer

    def _attempt_to_adopt(self, adoption: Adoption, budget: Budget) -> Granted | Gone:
        self._ready(budget)
        with self._seated(adoption.name, adoption.next_id, adoption.ttl, budget) as (seat, keep):
            self._keeper.lock(seat, budget)  # without it, it is tied as soon as its predecessor's lock is free
            answer = self._once(lambda link, sql: self._adopted(link, sql, adoption, **self._mark(seat)), budget)
            if isinstance(answer, Gone):
                return answer
            if not _is_fresh(answer.lease):
                answer = self._recognised(answer, seat, budget)
            keep()
        return self._bound(answer.lease, seat)

    def _mark(self, seat: Seat) -> dict[str, Any]:
        """Return what a statement writes for a seat: its session, if that has the lock for good."""
        mark = self._keeper.mark_of(seat)
        return _NO_MARK if mark is None else {"session_pid": mark.pid, "session_started": mark.started}

    # -- keeping and leaving -------------------------------------------------------------------------------------------

    def renew(self, renewals: Sequence[Renewal], budget: Budget) -> builtins.list[RenewalOutcome]:
        """See `Backend.renew`. A hold whose session died is gone, whatever its row says."""
        seats = [self._keeper.seat_of(renewal.lease_id) for renewal in renewals]
        alive = [place for place, seat in enumerate(seats) if seat is None or seat.bond.loss is None]
        outcomes: builtins.list[RenewalOutcome] = [Gone("session_died") for _ in renewals]
        answers = super().renew([renewals[place] for place in alive], budget)
        for place, outcome in zip(alive, answers, strict=True):
            outcomes[place] = outcome
        for seat, renewal, outcome in zip(seats, renewals, outcomes, strict=True):
            if seat is not None and isinstance(outcome, Held):
                self._keeper.prolong(seat, budget.sent_at + renewal.ttl)
            elif seat is not None and isinstance(outcome, Gone) and seat.bond.loss is None:
                self._keeper.drop(seat)  # a broken one is remembered for as long as its row might be renewed
        return outcomes

    def _renewal_params(self, renewals: Sequence[Renewal]) -> dict[str, Any]:
        seats = [self._keeper.seat_of(renewal.lease_id) for renewal in renewals]
        tied = [seat for seat in seats if seat is not None and self._keeper.mark_of(seat) is not None]
        mark = self._mark(tied[0]) if tied else _NO_MARK
        bound = [seat.lease_id for seat in tied if seat.session is tied[0].session]
        return super()._renewal_params(renewals) | mark | {"bound": bound}

    def release(self, name: str, lease_id: str, budget: Budget, *, min_hold: float = 0.0) -> ReleaseOutcome:
        """See `Backend.release`."""
        outcome = super().release(name, lease_id, budget, min_hold=min_hold)
        if (seat := self._keeper.seat_of(lease_id)) is not None:
            self._keeper.drop(seat)
        return outcome

    # -- the session ---------------------------------------------------------------------------------------------------

    def _vetted(self, session: Session, budget: Budget) -> None:
        """Compare a new session with a connection of the pool that is inside a transaction.

        Two clients of a transaction pooler would be given one and the same session of the server, or ours another one
        than before; whatever the pooler says about itself.
        """
        if session.vetted:
            return
        with self.connections.lend(budget) as link, link.transaction(idle=budget.left()):
            ((pid,),) = link.rows("SELECT pg_catalog.pg_backend_pid()")
            if pid == session.mark.pid:
                raise pooler_in_between()
            self._keeper.ping(budget)
        self._keeper.accept(budget)

    def _rendered(self, *, lineage: bool) -> Statements:
        notify = self._listening.wanted
        keep = self._history
        self._hybrid = HybridStatements.of(self._names, PROTOCOL, lineage=lineage, notify=notify, history=keep)
        self._keeper.errands = self._hybrid.errands
        return Statements.of(self._names, PROTOCOL, lineage=lineage, marking=MARKING, notify=notify, history=keep)

    def close(self) -> None:
        """See `Backend.close`. Holds that are left become plain ones."""
        self._closing.set()
        self._keeper.close()
        super().close()

    def forget(self) -> None:
        """See `Backend.forget`."""
        super().forget()
        self._keeper.forget()

    def diagnose(self, *, timeout: float = 30.0) -> Iterator[Check]:
        """Yield one check after the other: what was found, and what to do about it."""
        yield from super().diagnose(timeout=timeout)
        yield self.examine_session(timeout=timeout)

    def examine_session(self, *, timeout: float = 30.0) -> Check:
        """Tell whether holds can be bound to a session: `fail` behind a pooler, or where there is none to be had."""
        from pglease.backends.checks import Check

        try:
            self._vetted(self._keeper.session(self._budget(timeout)), self._budget(timeout))
            with self.connections.lend(self._budget(timeout)) as link:
                ((used, capacity),) = link.rows(LOCKS_IN_USE)
        except BackendError as error:
            return Check("session", "fail", str(error), "")
        text = f"direct; {used} advisory locks on the server, whose memory has room for {capacity}"
        if used > capacity // 2:
            return Check("session", "warn", text, "raise max_locks_per_transaction, or say max_advisory")
        return Check("session", "ok", text)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a glance at a row told.

    Attributes:
        verdict: as in `postgres_sql`: held, granted, over.
        lease: the record.
        lease_id: of the hold; None when it was given back.
        mark: the session it is bound to.
        queued: whether somebody may stand in the queue for the name.
    """

    verdict: str
    lease: Lease
    lease_id: str | None
    mark: Mark | None
    queued: bool

    @property
    def runs(self) -> bool:
        """Whether the hold has not lapsed."""
        return self.verdict in {"granted", "held"}


def _without_prefix(url: Any) -> Any:
    return url.removeprefix(_PREFIX) if isinstance(url, str) else url


_NO_MARK = {"session_pid": None, "session_started": None}


def _is_fresh(lease: Lease) -> bool:
    """Tell a grant of this very statement from an earlier one that was found: a new hold begins when it is read."""
    return lease.acquired_at == lease.seen_at
