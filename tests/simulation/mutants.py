"""The kill list: what people get wrong in leases, put into the real code one at a time.

Each of these has been shipped by somebody. A simulation that does not notice one of them proves nothing about the
others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from pglease import clock, loops, options, steps
from pglease.backends import memory
from pglease.backends.base import Budget
from pglease.backends.hybrid import HybridPostgresBackend
from pglease.backends.hybrid_keeper import Keeper
from pglease.backends.hybrid_session import Mark
from pglease.bonds import Bond
from pglease.errors import BackendUnavailable, PgleaseError
from pglease.giveback import GiveBack
from pglease.handles import HeldLease, Hold
from pglease.heartbeat import RELEASE_BOX, HeartbeatManager
from pglease.primitives import election
from pglease.primitives.many import GroupContext
from pglease.primitives.read_write import ReadWriteLock
from pglease.primitives.semaphore import Semaphore
from pglease.primitives.talk import Take, Talk
from pglease.records import Lease, Loss, Released, Request, Unknown
from pglease.taking import Taking
from pglease.term import Term
from tests.simulation import kernel as virtual
from tests.simulation.sessions import Hybrid, Sessions
from tests.simulation.store import Server, Store
from tests.simulation.world import Stage

PATIENCE = 500
"""Seeds within which each of them must be noticed."""


@dataclass(frozen=True)
class Mutant:
    """One mistake: what it is, and how to make it."""

    name: str
    mistake: str
    make: Callable[[Stage], None]


KILL_LIST: list[Mutant] = []


def mutant(name: str, mistake: str) -> Callable[[Callable[[Stage], None]], Callable[[Stage], None]]:
    """Put a mistake on the list."""

    def enter(make: Callable[[Stage], None]) -> Callable[[Stage], None]:
        KILL_LIST.append(Mutant(name, mistake, make))
        return make

    return enter


@mutant("response-anchor", "belief is counted from when the reply came, not from when the request left")
def _(stage: Stage) -> None:
    begin = Term.begin.__func__  # type: ignore[attr-defined]

    def from_the_reply(cls: type[Term], lease: Lease, *, sent_at: float, **others: Any) -> Term:
        return begin(cls, lease, sent_at=clock.now(), **others)  # type: ignore[no-any-return]

    stage.patch(Term, "begin", classmethod(from_the_reply))


@mutant("renew-by-name", "a renewal extends whatever hold the name has")
def _(stage: Stage) -> None:
    renew = Store._renew

    def by_name(store: Store, renewal: Any, now: Any) -> Any:
        row = store.rows.get(renewal.name)
        if row is not None and row.lease_id is not None:
            renewal = type(renewal)(renewal.name, row.lease_id, renewal.ttl)
        return renew(store, renewal, now)

    stage.patch(memory.MemoryBackend, "_renew", by_name)


@mutant("release-by-name", "a release ends whatever hold the name has")
def _(stage: Stage) -> None:
    release = memory.MemoryBackend.release

    def by_name(store: Store, name: str, lease_id: str, budget: Any, **others: Any) -> Any:
        row = store.rows.get(name)
        return release(store, name, (row and row.lease_id) or lease_id, budget, **others)

    stage.patch(memory.MemoryBackend, "release", by_name)


@mutant("delete-on-release", "a release deletes the row, and its token with it")
def _(stage: Stage) -> None:
    release = memory.MemoryBackend.release

    def and_delete(store: Store, name: str, lease_id: str, budget: Any, **others: Any) -> Any:
        outcome = release(store, name, lease_id, budget, **others)
        if isinstance(outcome, Released):
            del store.rows[name]
        return outcome

    stage.patch(memory.MemoryBackend, "release", and_delete)


@mutant("cleanup-without-lock", "a cleanup does not keep out inserts that have read the old floor")
def _(stage: Stage) -> None:
    stage.patch(Server, "locks_for_cleanup", False)


@mutant("no-epoch", "a failover begins no new epoch of tokens")
def _(stage: Stage) -> None:
    stage.patch(Store, "next_epoch", lambda _store, _timeline: None)


@mutant("wall-clock", "belief is counted on the wall clock, which gets stepped")
def _(stage: Stage) -> None:
    def wall() -> float:
        kernel = virtual._kernel
        process: Any = kernel.running.process if kernel.running is not None else kernel.acting
        return virtual.clock() + process.wall  # type: ignore[no-any-return]

    stage.patch(clock, "now", wall)


@mutant("ttl-is-interval", "a lease is renewed once per ttl")
def _(stage: Stage) -> None:
    stage.patch(options, "rhythm", lambda ttl, margin, _interval=None: (ttl, options.renewal_box(ttl, margin, ttl)))


@mutant("error-as-success", "a renewal that was not answered counts as confirmed")
def _(stage: Stage) -> None:
    apply = HeartbeatManager._apply

    def hopeful(manager: HeartbeatManager, hold: Hold, renewal: Any, outcome: Any, budget: Budget) -> None:
        if isinstance(outcome, Unknown):
            margin = manager.margin_for(renewal.ttl)
            until = budget.sent_at + renewal.ttl - margin
            hold.confirm(Term(hold.term.lease, budget.sent_at, until, hold.bond))
        apply(manager, hold, renewal, outcome, budget)

    stage.patch(HeartbeatManager, "_apply", hopeful)


@mutant("loop-dies", "the first error ends the thread that renews")
def _(stage: Stage) -> None:
    def until_the_first(manager: HeartbeatManager) -> None:
        try:
            while manager._listen():
                manager._renew_due()
        except BackendUnavailable:
            return

    stage.patch(HeartbeatManager, "_run", until_the_first)
    stage.patch(HeartbeatManager, "_ask", lambda manager, renewals, budget: manager.backend.renew(renewals, budget))


@mutant("lost-at-next-renewal", "a holder learns of a loss only when it renews")
def _(stage: Stage) -> None:
    stage.patch(Hold, "held", lambda hold: not hold.over)
    stage.patch(Hold, "overdue", lambda _hold: None)


@mutant("resurrect", "a late confirmation brings a lost hold back")
def _(stage: Stage) -> None:
    confirm = Hold.confirm

    def revive(hold: Hold, term: Term) -> bool:
        if hold.loss is not None:
            hold.loss = None
        hold.term = term
        return confirm(hold, term)

    stage.patch(Hold, "confirm", revive)


@mutant("release-first", "the store is told of a release before the holder stops acting")
def _(stage: Stage) -> None:
    settle = HeartbeatManager.settle

    def store_first(manager: HeartbeatManager, hold: Hold, seconds: float) -> Any:
        if not hold.over:
            manager.backend.release(hold.name, hold.lease_id, Budget.of(RELEASE_BOX, clock.now), min_hold=hold.min_hold)
        return settle(manager, hold, seconds)

    stage.patch(HeartbeatManager, "settle", store_first)


@mutant("unknown-is-failure", "an acquisition whose answer was lost counts as refused, and nothing is given back")
def _(stage: Stage) -> None:
    stage.patch(Taking, "_give_back_if_unknown", lambda _taking, _request, _error: None)


@mutant("doubt-is-loss", "a renewal that was not answered counts as refused")
def _(stage: Stage) -> None:
    apply = HeartbeatManager._apply

    def hopeless(manager: HeartbeatManager, hold: Hold, renewal: Any, outcome: Any, budget: Budget) -> None:
        if isinstance(outcome, Unknown):
            hold.lose(Loss("unreachable", outcome.error))
        else:
            apply(manager, hold, renewal, outcome, budget)

    stage.patch(HeartbeatManager, "_apply", hopeless)


@mutant("told-twice", "both the watchdog and the next refusal tell of the same loss")
def _(stage: Stage) -> None:
    def again(hold: Hold, loss: Loss) -> bool:
        hold.loss = loss
        hold.keeper.lost(hold, loss)
        return True

    stage.patch(Hold, "lose", again)


@mutant("late-find", "a grant that only a later look found is renewed as if its whole ttl were left")
def _(stage: Stage) -> None:
    plan = HeartbeatManager._plan

    def as_if_new(manager: HeartbeatManager, hold: Hold, *, since: float | None = None) -> None:
        plan(manager, hold, since=hold.term.sent_at if since is None else since)

    stage.patch(HeartbeatManager, "_plan", as_if_new)


@mutant("longer-at-once", "a renewal that was given up is forgotten, though it may yet cut a longer one short")
def _(stage: Stage) -> None:
    stage.patch(Hold, "doubt", lambda _hold, _ttl: None)


@mutant("same-id-again", "after a late grant was given back, the next one is asked for under the same id")
def _(stage: Stage) -> None:
    acquire = steps.acquire

    def as_before(request: Request, *, anew: Any, **others: Any) -> Any:
        return acquire(request, anew=lambda request: request, **others)

    stage.patch(steps, "acquire", as_before)


@mutant("cancelled-keeps", "what a cancelled task was being granted is not given back")
def _(stage: Stage) -> None:
    stage.patch(GiveBack, "add_when_known", lambda _give_back, _call, _name, _lease_id: None)


@mutant("half-forgotten", "what a loop has sent for a task that was cancelled since is left as it is")
def _(stage: Stage) -> None:
    left_alone = loops._Asked.left_alone

    def forgotten(asked: Any) -> Any:
        if asked._begun is None or asked._made is not None:
            return left_alone(asked)
        future: Future[Any] = Future()
        future.cancel()
        return future

    stage.patch(loops._Asked, "left_alone", forgotten)


@mutant("group-keeps-a-part", "of several leases, those taken before one was refused are kept")
def _(stage: Stage) -> None:
    stage.patch(GroupContext, "_give_up", lambda _context, taken: taken)


@mutant("slots-by-number", "a slot below a limit that was lowered is taken, whoever still holds one beyond it")
def _(stage: Stage) -> None:
    def by_number(semaphore: Semaphore) -> Talk[HeldLease | list[Lease]]:
        held = []
        for number in range(semaphore.limit):
            answer = yield Take(replace(semaphore._slot, name=f"{semaphore.name}#slot:{number}", wait=None))
            if isinstance(answer, HeldLease):
                return answer
            held += [answer.lease] if answer.lease else []
        return held

    stage.patch(Semaphore, "_try_once", by_number)


@mutant("slots-counted-once", "whoever took a slot beside one beyond the limit does not count once more")
def _(stage: Stage) -> None:
    stage.patch(Semaphore, "_has_room", lambda _semaphore, _slot, _limit: _says(True))


@mutant("reader-looks-once", "a reader does not look for a writer again once its flag is up")
def _(stage: Stage) -> None:
    stage.patch(ReadWriteLock, "_writer_beside", lambda _lock, _reading: _says(None))


@mutant("writer-does-not-look", "a writer does not wait for those who read already")
def _(stage: Stage) -> None:
    stage.patch(ReadWriteLock, "_wait_for_readers", lambda _lock, _writing, _deadline: _says(None))


@mutant("resigns-first", "a leader gives the role back when it is told to step down, and its work ends later")
def _(stage: Stage) -> None:
    leave = election.Term.leave

    def at_once(term: election.Term) -> None:
        leave(term)
        with contextlib.suppress(PgleaseError):
            term.lease.release()

    stage.patch(election.Term, "leave", at_once)


@mutant("leads-until-told", "a candidate says that it leads until it was told otherwise, whatever the time")
def _(stage: Stage) -> None:
    stage.patch(election.Term, "leads", property(lambda term: not (term.leaving or term.lease._hold.over)))


@mutant("works-on", "a leader's work is not told of a loss")
def _(stage: Stage) -> None:
    def in_silence(hold: Hold, loss: Loss) -> None:
        hold.loss = loss

    stage.patch(Hold, "_note", in_silence)


@mutant("bond-forgotten", "a holder goes on by its ttl when the session that it is bound to is silent for too long")
def _(stage: Stage) -> None:
    stage.patch(Hold, "due", property(lambda hold: hold.deadline))


@mutant("broken-in-silence", "nobody tells a holder that its session is dead; it finds out when it renews")
def _(stage: Stage) -> None:
    stage.patch(Bond, "when_broken", lambda _bond, _listener: None)


@mutant("taken-over-at-once", "whoever gets a dead holder's lock takes over without the handover delay")
def _(stage: Stage) -> None:
    take_over = Hybrid._take_over

    def at_once(hybrid: Hybrid, *wanted: Any) -> Any:
        delay, hybrid._delay = hybrid._delay, 0.0
        try:
            return take_over(hybrid, *wanted)
        finally:
            hybrid._delay = delay

    stage.patch(HybridPostgresBackend, "_take_over", at_once)


@mutant("lock-alone", "whoever gets a name's lock takes over a hold that never was bound to it")
def _(stage: Stage) -> None:
    contest, nobodys = HybridPostgresBackend._contest, Mark(0, "")

    def by_the_lock(hybrid: Hybrid, request: Any, seat: Any, seen: Any, budget: Budget) -> Any:
        return contest(hybrid, request, seat, replace(seen, mark=seen.mark or nobodys), budget)

    mark_of = Sessions.mark_of
    stage.patch(HybridPostgresBackend, "_contest", by_the_lock)
    stage.patch(Sessions, "mark_of", lambda *row: mark_of(*row) or nobodys)


@mutant("swept-in-a-try", "a lock is swept up when an earlier grant would have lapsed, in the middle of another try")
def _(stage: Stage) -> None:
    def heedless(keeper: Keeper, now: float) -> None:
        for seat in list(keeper._seats.values()):
            if seat.until is not None and seat.until <= now:
                keeper.drop(seat)

    stage.patch(Keeper, "_sweep", heedless)


@mutant("marked-without-room", "a hold beyond as many as may be bound is marked as if its lock had been there")
def _(stage: Stage) -> None:
    has_room, mark_of = Keeper._has_room, Keeper.mark_of

    def marked_all_the_same(keeper: Keeper, seat: Any) -> Any:
        session = keeper._session
        full = session is not None and seat.session is None and not has_room(keeper, session)
        return session.mark if full else mark_of(keeper, seat)  # type: ignore[union-attr]

    stage.patch(Keeper, "mark_of", marked_all_the_same)


def _says(answer: Any) -> Talk[Any]:
    """Return a talk that asks nothing."""
    return answer
    yield
