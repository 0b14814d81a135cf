"""Keeps the leases of one client alive: one thread, one conversation a tick for all that are due.

A renewal has three outcomes. *held*: a new belief. *gone*: lost at once, with a reason. *unknown*: belief does not
move; it is tried again until the deadline, and then the watchdog, which does no I/O, declares the loss.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

from pglease import clock, exits, identity, options, watchdog
from pglease.backends.base import Backend, Begun, Budget, SplitBackend
from pglease.errors import BackendClosed, BackendError, BackendUnavailable, PgleaseError, ReleaseError
from pglease.events import Observer
from pglease.giveback import GiveBack
from pglease.handles import Hold, Warned, refuse
from pglease.notices import Notices
from pglease.records import (
    Adoption,
    Gone,
    Handover,
    Held,
    Loss,
    Released,
    ReleaseOutcome,
    Renewal,
    RenewalOutcome,
    Unknown,
)
from pglease.schedule import RenewalSchedule
from pglease.term import Term

log = logging.getLogger("pglease")

RELEASE_BOX = 2.0
"""Seconds a release may take before it is left to the background."""
HASTY_RELEASE_BOX = 0.5
"""The same when the body has raised: its error is what the caller waits for."""
LONGEST_RENEWAL = 5.0
BRIEFLY = 0.3
"""Seconds for which a renewal by hand looks again at a row that somebody has locked: rivals and waiters lock one for a
millisecond, and nobody would look again for the caller. On the thread, the next try is never far."""


Told: TypeAlias = Callable[[], Callable[[str], object] | None]
"""Tells what to call, or that there is nobody left to be told."""


@dataclass(frozen=True, slots=True)
class _Dropped:
    hold: Hold


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class BegunRelease(NamedTuple):
    """A release that was sent and whose answer nobody has read.

    Attributes:
        release: the other half.
        budget: for both.
    """

    release: Begun[ReleaseOutcome]
    budget: Budget


BY_TIME = frozenset({"expired", "unreachable", "max_hold"})
"""Reasons of losses that this process declares by itself, before the store can give the lease to anybody."""


class HeartbeatManager:
    """Renews, releases and loses the holds of one client.

    Args:
        backend: the store.
        heartbeat_interval: seconds between renewals at most; None for a third of each ttl.
        margin: seconds by which belief ends before the store's expiry; None for the default of each ttl.
        on_lease_lost: tells whom to call with the lease's name, once for each loss, on a thread of its own, in the
            context of whoever took the lease; None when nobody is left to be told.
        on_at_risk: the same for when a third of the ttl is left and no renewal has come; again only after one has.
        on_over: called with each hold that was lost, released or let go; before anybody else hears of a loss.
        observers: told of everything.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        heartbeat_interval: float | None = None,
        margin: float | None = None,
        on_lease_lost: Told | None = None,
        on_at_risk: Told | None = None,
        on_over: Callable[[Hold], None] = lambda _hold: None,
        observers: Iterable[Observer] = (),
    ) -> None:
        self.backend = backend
        self.notices = Notices(observers)
        self.give_back = GiveBack(backend)
        self._interval = heartbeat_interval
        self._margin = margin
        self._on_lease_lost = on_lease_lost
        self._on_at_risk = on_at_risk
        self._on_over = on_over
        self._warns = bool(self.notices) or on_at_risk is not None
        self._fresh()

    def _fresh(self) -> None:
        self._lock = threading.RLock()
        self._holds: dict[Hold, None] = {}
        self._schedule: RenewalSchedule[Hold] = RenewalSchedule()
        # A SimpleQueue, since a handle may be dropped, and put something here, at any moment on any thread.
        self._messages: queue.SimpleQueue[_Dropped | _Stop | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._wakes_at = float("inf")
        self._asking: frozenset[Hold] = frozenset()
        self._asking_until = float("inf")
        self._stopped = False

    # -- what handles ask for ------------------------------------------------------------------------------------------

    def margin_for(self, ttl: float) -> float:
        """Return the margin that applies to `ttl`."""
        return options.margin_for(ttl, self._margin)

    def holds(self) -> list[Hold]:
        """Return the holds that are not over."""
        with self._lock:
            return list(self._holds)

    def number_of_holds(self) -> int:
        """Return how many holds are not over, without a lock: also for the garbage collector."""
        return len(self._holds)

    def begin(self, hold: Hold) -> None:
        """Keep `hold` alive from now on, unless another thread has ended it already."""
        with self._lock:
            if hold.over:
                return
            self._holds[hold] = None
            if hold.wanted.heartbeat:
                self._plan(hold)
            if self._thread is None and not self._stopped:
                self._start()
        if self._warns:
            hold.warning = Warned(hold)
            watchdog.watch(hold.warning)  # which comes first, and has the hold itself watched in its turn
        else:
            watchdog.watch(hold)
        if hold.bond is not None:
            hold.bond.when_broken(hold.lose)

    def _plan(self, hold: Hold, *, since: float | None = None) -> None:
        ttl = hold.span
        margin = hold.margin if ttl == hold.ttl else self.margin_for(ttl)
        interval, box = options.rhythm(ttl, margin, self._interval)
        # A grant that only a later look found has less than its ttl left: then its renewal comes as much earlier.
        granted_at = hold.term.trusted_until + margin - ttl
        if since is None:
            since = min(hold.term.sent_at, granted_at)
        due = self._schedule.add(hold, interval=interval, box=box, sent_at=since)
        if due < self._wakes_at:
            self._wakes_at = due
            self._messages.put(None)

    def end(self, hold: Hold) -> None:
        """Renew it no more and watch it no more."""
        watchdog.forget(hold)
        if hold.warning is not None:
            watchdog.forget(hold.warning)
        with self._lock:
            self._holds.pop(hold, None)
            self._schedule.drop(hold)

    def lost(self, hold: Hold, loss: Loss) -> None:
        """Tell about a loss, once, and call the client's callback on a thread of its own."""
        self.end(hold)
        self._on_over(hold)
        self.notices.tell_of("lost", hold, reason=loss.reason, error=loss.error)
        if loss.reason == "closed":
            return
        if hold.exits and not hold.releases:  # else its work is done
            soon = clock.now() + exits.LAST_WORDS
            exits.plan(hold.name, hold.deadline if loss.reason in BY_TIME else min(soon, hold.deadline))
        if self._on_lease_lost is not None:
            self._call_back(hold, self._on_lease_lost, "on_lease_lost")

    def at_risk(self, hold: Hold) -> None:
        """Warn that little is left of a hold. Called by the watchdog; once, until a renewal has come."""
        self.notices.tell_of("at_risk", hold, seconds=hold.remaining(), error=hold.trouble)
        if self._on_at_risk is not None:
            self._call_back(hold, self._on_at_risk, "on_at_risk")

    def _call_back(self, hold: Hold, told: Told, what: str) -> None:
        name, callback = hold.name, told()
        if callback is None:
            return
        thread = threading.Thread(
            target=hold.context.run, args=(_run_callback, callback, what, name), name="pglease-lost", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the interpreter is going down or is out of threads; `lost` is set all the same
            log.exception("%s could not be called for %r", what, name, extra={"lease_name": name})

    def dropped(self, hold: Hold) -> None:
        """Note that nobody has the handle any more. Called by the garbage collector: only leaves a message."""
        self._messages.put(_Dropped(hold))

    def is_asking(self, hold: Hold) -> bool:
        """Tell whether a renewal of it is under way."""
        return hold in self._asking

    def get_zombie_threads(self) -> list[str]:
        """Return the names whose renewal is stuck in the store beyond its time box; empty in a healthy system."""
        if clock.now() <= self._asking_until:
            return []
        return sorted(hold.name for hold in self._asking)

    def is_alive(self) -> bool:
        """Tell whether the renewer runs, or has nothing to renew."""
        with self._lock:
            return not len(self._schedule) or (self._thread is not None and self._thread.is_alive())

    # -- renewing by hand ----------------------------------------------------------------------------------------------

    def renew(self, hold: Hold, ttl: float | None) -> None:
        """Extend `hold` in the caller's thread. See `HeldLease.renew`."""
        hold.progress_at = clock.now()
        outcome = self._extend(hold, ttl)
        if isinstance(outcome, Unknown):
            raise outcome.error or BackendUnavailable(f"it is unknown whether {hold.name!r} was renewed")
        if isinstance(outcome, Gone) or not hold.held():
            hold.current_loss()
            refuse(hold, "renewed")

    def try_to_extend(self, hold: Hold) -> bool:
        """Extend `hold` if the store lets us; False for trouble of any kind."""
        try:
            self.renew(hold, None)
        except PgleaseError:
            return False
        return True

    def _extend(self, hold: Hold, ttl: float | None) -> RenewalOutcome:
        if not hold.held():
            hold.current_loss()
            refuse(hold, "renewed")
        budget = Budget.of(min(LONGEST_RENEWAL, hold.remaining()), clock.now)
        if not hold.renewing.acquire(timeout=max(0.0, budget.left())):
            return Unknown(BackendUnavailable(f"another renewal of {hold.name!r} is still under way"))
        try:
            if ttl is not None and ttl != hold.ttl and not self._change_ttl(hold, ttl, budget):
                return Unknown(BackendUnavailable(f"a renewal of {hold.name!r} by its old ttl is still under way"))
            renewal = Renewal(hold.name, hold.lease_id, hold.ttl)
            outcome = self._insist(renewal, budget)
            self._apply(hold, renewal, outcome, budget)
        finally:
            hold.renewing.release()
        return outcome

    def _insist(self, renewal: Renewal, budget: Budget) -> RenewalOutcome:
        """Renew one hold; look again for a moment if its row is locked."""
        until = min(budget.until, clock.now() + BRIEFLY)
        while True:
            try:
                (outcome,) = self.backend.renew([renewal], budget)
            except BackendUnavailable as error:
                budget.forsaken = True
                return Unknown(error)
            if not isinstance(outcome, Unknown) or clock.now() >= until:
                return outcome
            time.sleep(0.005)

    def _change_ttl(self, hold: Hold, ttl: float, budget: Budget) -> bool:
        """Have this renewal and all later ones ask for `ttl`; False while one that asks for the old ttl is under way.

        Two that ask for different ttls at once would leave it open which of them the store hears last, and a belief in
        the longer one might outlive the hold by the shorter one. The same goes for a shorter ttl whose confirmation is
        lost, this one's or one of the thread's meanwhile, so belief shrinks before anybody can ask by it.
        """
        shorter, now = ttl < hold.ttl, clock.now()
        hold.change_ttl(ttl, self.margin_for(ttl))
        if shorter:
            with self._lock:
                if hold in self._schedule:
                    self._plan(hold, since=now)
        while hold in self._asking:
            if budget.left() <= 0:
                return False
            time.sleep(0.001)
        if shorter:
            budget.until = min(budget.until, hold.due)
        return True

    # -- describing and handing over -----------------------------------------------------------------------------------

    def set_metadata(self, hold: Hold, metadata: Mapping[str, Any]) -> None:
        """Replace what is attached to `hold`. See `HeldLease.set_metadata`."""
        if not hold.held():
            hold.current_loss()
            refuse(hold, "described")
        budget = Budget.of(min(LONGEST_RENEWAL, hold.remaining()), clock.now)
        outcome = self.backend.set_metadata(hold.name, hold.lease_id, metadata, budget)
        if isinstance(outcome, Gone):
            hold.lose(_loss(hold, outcome))
            refuse(hold, "described")
        hold.describe(outcome.lease.metadata)

    def transfer(self, hold: Hold, owner_id: str, ttl: float) -> Handover:
        """End `hold` here and let it go on as one that nobody attends to. See `HeldLease.transfer`."""
        if not hold.end():
            hold.current_loss()
            refuse(hold, "handed over")
        adoption = Adoption(hold.name, hold.lease_id, identity.new_lease_id(), owner_id, ttl, unattended=True)
        hold.release_begun()
        try:
            outcome = self.backend.adopt(adoption, Budget.of(RELEASE_BOX, clock.now))
        except BaseException as error:
            self.notices.tell_of("unconfirmed", hold, error=error)
            self.give_back.add(hold.name, adoption.next_id)
            self._give_back(hold)
            raise
        hold.release_answered()
        self._on_over(hold)
        if isinstance(outcome, Gone):
            hold.lose_in_release(_loss(hold, outcome))
            refuse(hold, "handed over")
        self.notices.tell_of("transferred", hold)
        return Handover(hold.name, adoption.next_id, owner_id, outcome.lease.fencing_token, ttl)

    # -- releasing -----------------------------------------------------------------------------------------------------

    def release(self, hold: Hold, begun: BegunRelease | None = None) -> bool:
        """End `hold`. See `HeldLease.release`."""
        try:
            outcome = self.settle(hold, RELEASE_BOX, begun)
        except BackendError as error:
            raise ReleaseError(
                f"the release of {hold.name!r} could not be confirmed: {error}; it is over here and lapses in the "
                "store by its ttl",
                name=hold.name,
            ) from error
        return isinstance(outcome, Released)

    async def arelease(self, hold: Hold) -> bool:
        """Do the same without blocking the event loop, and to the end; a cancellation follows when it is done."""
        from pglease import loops

        loops.running_loop()  # or it is refused before anything has ended
        begun = self.begin_release(hold, RELEASE_BOX)
        release = None if begun is None else begun.release
        return await loops.to_the_end(lambda: self.release(hold, begun), begun=release)

    def begin_release(self, hold: Hold, seconds: float) -> BegunRelease | None:
        """End `hold` here and send its release, where the store can do that without waiting. Give that to `settle`.

        None: `settle` does all of it.
        """
        if not self.backend.traits.in_two_halves or not hold.end():
            return None
        try:
            budget = Budget.of(seconds, clock.now)
            store = cast("SplitBackend", self.backend)
            begun = store.begin_release(hold.name, hold.lease_id, budget, min_hold=hold.min_hold)
            if begun is None:
                return None
            hold.release_begun()
        except BaseException as error:
            self.unconfirmed(hold, error)
            raise
        return BegunRelease(begun, budget)

    def settle(self, hold: Hold, seconds: float, begun: BegunRelease | None = None) -> ReleaseOutcome | None:
        """End `hold` here, then in the store; None if it was over already.

        A lease that turns out to have been gone before counts as lost. Trouble with the store is raised; the background
        goes on trying, and this may be called again.

        Args:
            hold: which.
            seconds: how long the store may take.
            begun: what `begin_release` has sent.
        """
        try:
            if begun is not None:
                budget = begun.budget
                outcome = begun.release.finish()
            else:
                if hold.unconfirmed:
                    hold.release_begun()
                elif not hold.end(to_release=True):
                    return None
                budget = Budget.of(seconds, clock.now)
                outcome = self.backend.release(hold.name, hold.lease_id, budget, min_hold=hold.min_hold)
        except BaseException as error:
            if hold.ended:  # and not interrupted before
                self.unconfirmed(hold, error)
            raise
        first = hold.release_answered()
        self._on_over(hold)
        if not first:  # another call has ended it, and said so
            return None
        if hold.releases > 1 and isinstance(outcome, Gone):
            # Over since another try, which we did not hear the answer of: what became of it later is no loss of ours.
            return Released() if outcome.reason == "forced" else outcome
        if isinstance(outcome, Gone) and not _over_since_its_end(hold, outcome, budget.sent_at):
            hold.lose_in_release(_loss(hold, outcome))
        else:
            self.notices.tell_of("released", hold)
        return outcome

    def unconfirmed(self, hold: Hold, error: BaseException | None) -> None:
        """Tell that the store has not confirmed the end of `hold`, and have the background go on with it."""
        self.notices.tell_of("unconfirmed", hold, error=error)
        if not isinstance(error, BackendClosed):
            self._give_back(hold)

    def _give_back(self, hold: Hold) -> None:
        """Have the background end it in the store, and tell when that is confirmed."""
        self.give_back.add(
            hold.name,
            hold.lease_id,
            min_hold=hold.min_hold,
            confirmed=lambda: self.notices.tell_of("released_late", hold),
        )

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if (greener := identity.threads_are_green()) is not None:
            log.warning(
                "%s has made greenlets of the threads: while one computes, or blocks in C, no lease is renewed; "
                "give busy work a ttl that outlasts it, or a process without %s",
                greener,
                greener,
            )
        thread = threading.Thread(target=self._run, name="pglease-heartbeat", daemon=True)
        thread.start()
        self._thread = thread

    def _run(self) -> None:
        try:
            while self._listen():
                self._tick()
        except BaseException:
            # Nothing in the loop may end it; what does all the same must not leave leases without a renewer.
            log.critical("pglease's heartbeat thread failed and is started anew", exc_info=True)
            with self._lock:
                self._asking = frozenset()
                self._thread = None
                if not self._stopped:
                    self._start()

    def _listen(self) -> bool:
        """Sleep until something is due or somebody says something; False when it is time to end."""
        with self._lock:
            due, now = self._schedule.next_at(), clock.now()
            # A wake-up once planned is kept even if its lease is gone, so that short holds do not disturb us one by
            # one.
            self._wakes_at = min(due, self._wakes_at) if self._wakes_at > now else due
            left = self._wakes_at - now
        try:
            message = self._messages.get(timeout=None if left == float("inf") else max(0.0, left))
        except queue.Empty:
            return True
        if isinstance(message, _Dropped):
            self.let_go(message.hold)
        return not isinstance(message, _Stop)

    def let_go(self, hold: Hold, trouble: Exception | None = None) -> None:
        """End `hold` here, and in the store in the background: for those who cannot wait, because of `trouble`."""
        if hold.end() or (hold.unconfirmed and not hold.releases):  # ended, and nothing was sent
            self._on_over(hold)
            self.unconfirmed(hold, trouble)

    def _tick(self) -> None:
        try:
            self._renew_due()
        except Exception:
            log.exception("pglease's renewals go on after an error")
            time.sleep(0.05)  # a fault in every round must not become a busy loop

    def _renew_due(self) -> None:
        due, box = self._due()
        if not due:
            return
        budget = Budget.of(box, clock.now)
        self._asking, self._asking_until = frozenset(due), budget.until + 0.25  # before any ttl is read: `_change_ttl`
        try:
            renewals = [Renewal(hold.name, hold.lease_id, hold.ttl) for hold in due]
            outcomes = self._ask(renewals, budget)
            self._asking_until = float("inf")
            for hold, renewal, outcome in zip(due, renewals, outcomes, strict=True):
                self._apply(hold, renewal, outcome, budget)
        finally:
            self._asking, self._asking_until = frozenset(), float("inf")

    def _due(self) -> tuple[list[Hold], float]:
        """Return what to renew now, and how long that may take."""
        with self._lock:
            due = self._schedule.due(clock.now())
            box = self._schedule.box(due)
            for hold in [hold for hold in due if hold.stalls]:
                due.remove(hold)
                self._schedule.unanswered(hold, now=clock.now(), trusted_until=hold.due, spread=random.random())
        for hold in due:
            if hold.over:  # somebody was interrupted while ending it: renewed, it would never lapse
                self.end(hold)
        return [hold for hold in due if not hold.over], box

    def _ask(self, renewals: list[Renewal], budget: Budget) -> list[RenewalOutcome]:
        try:
            return self.backend.renew(renewals, budget)
        except Exception as error:  # also a backend that its owner has closed: unknown, and asked again at leisure
            if not isinstance(error, PgleaseError):  # ours say all there is to say, also of a connection of no use
                log.exception("a renewal failed in an unexpected way")
            budget.forsaken = True
            return [Unknown(error)] * len(renewals)

    def _apply(self, hold: Hold, renewal: Renewal, outcome: RenewalOutcome, budget: Budget) -> None:
        if budget.forsaken:
            hold.doubt(renewal.ttl)
        if isinstance(outcome, Held):
            ttl = min(renewal.ttl, hold.doubted)  # neither `hold.ttl` nor its margin: `_change_ttl` may set them
            term = Term.begin(outcome.lease, sent_at=budget.sent_at, ttl=ttl, margin=self.margin_for(ttl))
            if hold.confirm(term):
                self._confirmed(hold)
                self.notices.tell_of("renewed", hold)
            elif not hold.ended:
                # It came too late: lost here, so not to be kept there.
                self.give_back.add(hold.name, hold.lease_id, min_hold=hold.min_hold)
        elif isinstance(outcome, Gone):
            hold.lose(_loss(hold, outcome))
        else:
            self._unanswered(hold, outcome.error)

    def _confirmed(self, hold: Hold) -> None:
        if hold.warning is not None:
            watchdog.watch(hold.warning)
        with self._lock:
            if hold in self._schedule:
                self._plan(hold)

    def _unanswered(self, hold: Hold, error: Exception | None) -> None:
        hold.trouble = error
        self.notices.tell_of("unknown", hold, seconds=hold.remaining(), error=error)
        with self._lock:
            self._schedule.unanswered(hold, now=clock.now(), trusted_until=hold.due, spread=random.random())

    # -- the end -------------------------------------------------------------------------------------------------------

    def stop(self, seconds: float) -> None:
        """End the thread, waiting for it for at most `seconds`; harmless on that thread itself."""
        with self._lock:
            self._stopped = True
            thread = self._thread
        self._messages.put(_Stop())
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)

    def forget(self) -> None:
        """In a forked child: every hold is the parent's."""
        holds = list(self._holds)
        self._fresh()
        self.give_back.forget()
        self.notices.forget()
        for hold in holds:
            hold.forget(Loss("forked"))


def _run_callback(callback: Callable[[str], object], what: str, name: str) -> None:
    try:
        callback(name)
    except BaseException:  # also SystemExit, which would end this thread in silence
        log.exception("%s failed for %r", what, name, extra={"lease_name": name})


def _loss(hold: Hold, gone: Gone) -> Loss:
    """Return the loss behind a refusal; a name that was taken and given back by now was taken all the same."""
    later = gone.lease is not None and gone.lease.fencing_token > hold.term.lease.fencing_token
    return Loss("taken" if later else gone.reason, hold.trouble, gone.lease)


def _over_since_its_end(hold: Hold, gone: Gone, sent_at: float) -> bool:
    """Tell whether it was over in the store only after its holder had ended it here, by a repeated release.

    Counted to when the request left that was answered, so that in doubt it is a loss.
    """
    if gone.lease is None:
        return False
    over_since = gone.lease.acquired_at if gone.reason == "taken" else gone.lease.expires_at
    return (gone.lease.seen_at - over_since).total_seconds() <= sent_at - hold.ended_at
