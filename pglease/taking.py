"""Takes leases and leaves them: what `acquire`, `try_acquire`, `wait_for_lease` and the decorator are made of.

A `Taking` is one client's: it keeps the book of what that client holds. It does not know the client, so that a client
nobody remembers can be noticed.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pglease import clock, current, drive, identity, options, steps
from pglease.backends.base import Backend, Budget
from pglease.bell import Bell
from pglease.errors import (
    AcquireTimeout,
    AcquisitionError,
    BackendClosed,
    BackendError,
    BackendUnavailable,
    ConfigurationError,
    ReentrantError,
)
from pglease.events import EventKind, Observer
from pglease.handles import HeldLease, Hold, NotAcquired
from pglease.heartbeat import HASTY_RELEASE_BOX, RELEASE_BOX, BegunRelease, HeartbeatManager
from pglease.notices import Notices
from pglease.options import HoldOptions
from pglease.records import Adoption, InTheWay, Loss, Refused, Request
from pglease.term import Term
from pglease.waiting import HEARD_POLL, HEARD_STRETCH, Cancelled, Nap, Room, TaskNap, Waiter

if TYPE_CHECKING:
    from concurrent.futures import Future

log = logging.getLogger("pglease")

SHORT_TTL = 1.0
"""Seconds below which a lease leaves little room for anything to go wrong."""
LEAST = 0.1
"""Seconds that a release is given though its turn came late."""
_NEVER = float("inf")
POLL = 1.0
"""The longest pause of `acquire(wait=…)` between two looks, in seconds, where the store wakes nobody."""


class Taking:
    """One client's taking and leaving, and the book of its holds.

    Args:
        backend: who is asked.
        owner_id: the label for people; None makes one, and a new one in a forked child.
        box: seconds that one conversation with the store may take.
        heartbeat_interval, margin, on_lease_lost, on_at_risk, observers: what `HeartbeatManager` is told.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        owner_id: str | None,
        box: float,
        heartbeat_interval: float | None,
        margin: float | None,
        on_lease_lost: Callable[[str], object] | None,
        on_at_risk: Callable[[str], object] | None,
        observers: Iterable[Observer],
    ) -> None:
        self.backend = backend
        self.box = box
        self._once = steps.Patience(None, POLL, box)
        self._owner = owner_id
        self._warned_of_short_ttl = False
        # Kept here and not by the manager: they often refer to the client, whose threads would keep it alive for ever.
        self._on_lease_lost, self._on_at_risk = on_lease_lost, on_at_risk
        this = weakref.ref(self)
        self.manager = HeartbeatManager(
            backend,
            heartbeat_interval=heartbeat_interval,
            margin=margin,
            on_lease_lost=None if on_lease_lost is None else lambda: _callback_of(this, "_on_lease_lost"),
            on_at_risk=None if on_at_risk is None else lambda: _callback_of(this, "_on_at_risk"),
            on_over=_dropper(this),
            observers=observers,
        )
        self.room = Room(backend, self.manager.give_back, self.manager.notices)
        self._fresh()

    def _fresh(self) -> None:
        self._lock = threading.RLock()
        self.closed = Bell()
        self.holds: dict[str, Hold] = {}
        self.owned: dict[Hold, HeldLease] = {}
        self._default_owner: str | None = None

    @property
    def owner_id(self) -> str:
        """The label for people; the default one is made anew in a forked child."""
        if self._owner is not None:
            return self._owner
        if self._default_owner is None:
            self._default_owner = identity.default_owner()
        return self._default_owner

    # -- taking --------------------------------------------------------------------------------------------------------

    def take(
        self, wanted: HoldOptions, *, poll: float | None = None, cancel: threading.Event | None = None
    ) -> HeldLease | NotAcquired:
        """Take a lease by checked options; the caller owns the handle."""
        request, margin = self._request(wanted)
        attempt = Attempt.begin(self.manager.notices, request, wanted)
        asked = [request]
        # Who asks once rests never: it is the most frequent call of all, and a nap costs a tenth of it.
        nap = Nap(self.refuse_if_closed, cancel) if wanted.wait else None
        waiter = None if nap is None else self._waiter(request, wanted, nap, poll)
        try:
            if nap is None and wanted.adopts is None:
                found = self._ask_once(request, margin)
            else:
                conversation = self._conversation(asked, wanted, margin, waiter)
                found = drive.run(conversation, self.backend, time.sleep if nap is None else nap.rest)
            taken, trouble = self._taken(found, asked[-1], wanted, margin, attempt)
        except BackendUnavailable as error:
            return self._refused_before(asked[-1], error, attempt)
        except (BackendError, ConfigurationError) as error:
            attempt.failed(error)
            raise
        except BaseException as error:
            if waiter is None or waiter.in_doubt:  # interrupted: nobody knows whether it was granted
                self._let_go(asked[-1])
            if isinstance(error, Cancelled):
                holder = waiter.holder() if waiter else None
                attempt.refused(holder.owner_id if holder else None)
                return NotAcquired(request.name, holder, 0.0)
            attempt.failed(error)
            raise
        if trouble is not None:
            self._return(taken)
            raise trouble
        return taken

    def _ask_once(self, request: Request, margin: float) -> Term | Refused:
        """Ask a single time. What `steps.acquire` does without patience, and without what makes it a conversation.

        It is the most frequent call of all; as a conversation it would cost a tenth more.
        """
        budget = Budget.of(self.box, clock.now)
        answer = self.backend.try_acquire(request, budget)
        if isinstance(answer, Refused):
            return answer
        term = Term.begin(answer.lease, sent_at=budget.sent_at, ttl=request.ttl, margin=margin, bond=answer.bond)
        if clock.now() < term.trusted_until:
            return term
        release = steps.Call("release", (request.name, request.lease_id), self.box)
        raise steps.too_late(request.name, drive.call(self.backend, release, Budget.of(self.box, clock.now)))

    def take_many(self, wanted: Sequence[HoldOptions]) -> list[HeldLease] | NotAcquired | None:
        """Take several leases by checked options in one step: all, or none; None where the store declines."""
        asked = [self._request(each)[0] for each in wanted]
        margin = self.manager.margin_for(wanted[0].ttl)
        conversation = steps.acquire_many(asked, margin=margin, attempt=self.box)
        try:
            found = drive.run(conversation, self.backend, time.sleep)
            return self._all_taken(found, asked, wanted, margin)
        except BaseException as error:
            self._let_all_go(asked, wanted, error)
            raise

    async def atake_many(self, wanted: Sequence[HoldOptions]) -> list[HeldLease] | NotAcquired | None:
        """Do the same without blocking the event loop; a cancelled task leaves nothing behind."""
        from pglease import loops

        asked = [self._request(each)[0] for each in wanted]
        margin = self.manager.margin_for(wanted[0].ttl)
        nap = TaskNap(self.refuse_if_closed)

        def give_back(call: Future[steps.Answer]) -> None:
            for request in asked:
                self.manager.give_back.add_when_known(call, request.name, request.lease_id)

        conversation = steps.acquire_many(asked, margin=margin, attempt=self.box)
        try:
            found = await loops.arun(conversation, self.backend, give_back, nap.arest)
            return self._all_taken(found, asked, wanted, margin)
        except Exception as error:  # a cancellation has been seen to by then
            self._let_all_go(asked, wanted, error)
            raise

    def _let_all_go(self, asked: Sequence[Request], wanted: Sequence[HoldOptions], error: BaseException) -> None:
        """Let go of several grants, unless the store has said that there are none."""
        if not isinstance(error, BackendError) or getattr(error, "outcome_unknown", False):
            for request in asked:
                self._let_go(request)
        for request, options_ in zip(asked, wanted, strict=True):
            Attempt.begin(self.manager.notices, request, options_).failed(error)

    def _all_taken(
        self,
        found: list[Term] | InTheWay | None,
        asked: Sequence[Request],
        wanted: Sequence[HoldOptions],
        margin: float,
    ) -> list[HeldLease] | NotAcquired | None:
        if found is None:
            return None
        if isinstance(found, InTheWay):
            self._attempt_of(found.name, asked, wanted).refused(found.refused.held_by)
            return NotAcquired(found.name, found.refused.lease, found.refused.retry_after)
        leases: list[HeldLease] = []
        for term, request, options_ in zip(found, asked, wanted, strict=True):
            lease, trouble = self._taken(
                term, request, options_, margin, Attempt.begin(self.manager.notices, request, options_)
            )
            if trouble is not None:
                trouble.outcome_unknown = True  # type: ignore[attr-defined]  # all of them are given back
                raise trouble
            assert isinstance(lease, HeldLease)
            leases.append(lease)
        return leases

    def _attempt_of(self, name: str, asked: Sequence[Request], wanted: Sequence[HoldOptions]) -> Attempt:
        """Tell of one attempt out of several that were made in one step: of the name that was in the way."""
        place = next(place for place, request in enumerate(asked) if request.name == name)
        return Attempt.begin(self.manager.notices, asked[place], wanted[place])

    def _let_go(self, request: Request) -> None:
        hold = self.holds.get(request.name)
        if hold is not None and hold.lease_id == request.lease_id:
            hold.end()  # it was granted, and we were on our way to tell
            self.drop(hold)
        self.manager.give_back.add(request.name, request.lease_id)

    async def atake(self, wanted: HoldOptions, *, poll: float | None = None) -> HeldLease | NotAcquired:
        """Take a lease by checked options without blocking the event loop; a cancelled task leaves nothing behind."""
        from pglease import loops

        request, margin = self._request(wanted)
        attempt = Attempt.begin(self.manager.notices, request, wanted)
        asked = [request]
        nap = TaskNap(self.refuse_if_closed) if wanted.wait else None  # as in `take`
        waiter = None if nap is None else self._waiter(request, wanted, nap, poll)

        def give_back(call: Future[steps.Answer]) -> None:
            if waiter is None or waiter.in_doubt:  # else it was a mark or a place that was asked for
                self.manager.give_back.add_when_known(call, request.name, asked[-1].lease_id)

        try:
            conversation = self._conversation(asked, wanted, margin, waiter)
            pause = self.anap if nap is None else nap.arest
            found = await loops.arun(conversation, self.backend, give_back, pause)
        except BackendUnavailable as error:
            return self._refused_before(asked[-1], error, attempt)
        except BaseException as error:
            ours = isinstance(error, BackendError | ConfigurationError)
            if isinstance(error, Exception) and not ours and (waiter is None or waiter.in_doubt):
                self._let_go(asked[-1])  # as in `take`; what a cancelled task has asked for was seen to
            attempt.failed(error)
            raise
        taken, trouble = self._taken(found, asked[-1], wanted, margin, attempt)
        if trouble is not None:
            await loops.to_the_end(lambda: self._return(taken))
            raise trouble
        return taken

    def _request(self, wanted: HoldOptions) -> tuple[Request, float]:
        self.refuse_if_closed()
        if wanted.wait:
            self._refuse_to_wait_for_oneself(wanted.name)
        if wanted.ttl < SHORT_TTL:
            self._warn_of_short_ttl(wanted)
        ticket_id = identity.new_lease_id() if wanted.wait and wanted.fair else None
        request = Request(wanted.name, self.owner_id, identity.new_lease_id(), wanted.ttl, wanted.metadata, ticket_id)
        return request, self.manager.margin_for(wanted.ttl)

    def _waiter(self, request: Request, wanted: HoldOptions, nap: Nap, poll: float | None) -> Waiter | None:
        """Return who waits; None for somebody who asks once."""
        if not wanted.wait:
            return None
        return Waiter(
            self.room,
            request,
            nap,
            poll=POLL if poll is None else poll,
            heard_poll=HEARD_POLL if poll is None else HEARD_STRETCH * poll,
            warn_after=wanted.warn_after,
            box=self.box,
        )

    def _warn_of_short_ttl(self, wanted: HoldOptions) -> None:
        if not self._warned_of_short_ttl:
            self._warned_of_short_ttl = True
            log.warning(
                "the ttl of %r is %g s: a pause or a restart of the store of about half of that loses the lease",
                wanted.name,
                wanted.ttl,
                extra={"lease_name": wanted.name},
            )

    def _conversation(self, asked: list[Request], wanted: HoldOptions, margin: float, waiter: Waiter | None) -> Any:
        """Return the steps; `asked` ends with what was asked last."""

        def anew(request: Request) -> Request:
            asked.append(request._replace(lease_id=identity.new_lease_id()))
            return asked[-1]

        if wanted.adopts is not None:
            request = asked[0]
            adoption = Adoption(request.name, wanted.adopts, request.lease_id, request.owner_id, request.ttl)
            return steps.adopt(adoption, margin=margin, attempt=self.box)
        now = clock.now()
        patience = self._once
        if waiter is not None and wanted.wait:
            patience = steps.Patience(now + wanted.wait, waiter.poll, self.box)
        asking = steps.acquire(asked[0], margin=margin, patience=patience, now=now, spread=random.random, anew=anew)
        return waiter.attend(asking) if waiter else asking

    def _taken(
        self, found: Term | Refused, request: Request, wanted: HoldOptions, margin: float, attempt: Attempt
    ) -> tuple[HeldLease | NotAcquired, BackendError | None]:
        """Return what was found, and why it cannot be kept."""
        manager = self.manager
        if isinstance(found, Refused):
            attempt.refused(found.held_by)
            return NotAcquired(request.name, found.lease, found.retry_after), None
        try:
            hold = Hold(manager, found, request.lease_id, wanted, margin)
        except BaseException:  # slots of the caller's own that fail, say: it was granted, and reaches nobody
            manager.give_back.add(request.name, request.lease_id)
            raise
        lease = HeldLease(hold)
        with self._lock:
            earlier, self.holds[hold.name] = self.holds.get(hold.name), hold
            closed = self.closed.is_set()
        if earlier is not None:
            if earlier.current_loss() is None:
                earlier.lose(Loss("taken", lease=found.lease))  # by ourselves, after somebody had ended it in the store
            self.owned.pop(earlier, None)  # its release may have had no answer; now it is over in any case
        try:
            manager.begin(hold)
        except RuntimeError as error:  # no more threads, or the interpreter is going down: it could not be renewed
            return lease, BackendUnavailable(f"{hold.name!r} was given back, for nothing could renew it: {error}")
        attempt.acquired(lease.fencing_token)
        return lease, BackendClosed("the client is closed") if closed else None  # between our asking and the answer

    def _return(self, taken: HeldLease | NotAcquired) -> None:
        """Give back what was taken in vain; unconfirmed, it lapses by itself."""
        if isinstance(taken, HeldLease):
            with contextlib.suppress(BackendError):
                self.manager.release(taken._hold)

    def _refused_before(self, request: Request, error: BackendUnavailable, attempt: Attempt) -> NotAcquired:
        """Let go of a grant that may exist; a wait that was refused before its last look failed has simply run out."""
        self._give_back_if_unknown(request, error)
        if error.refused is None:
            attempt.failed(error)
            raise error
        attempt.refused(error.refused.held_by)
        return NotAcquired(request.name, error.refused.lease, error.refused.retry_after)

    def _give_back_if_unknown(self, request: Request, error: BackendUnavailable) -> None:
        if error.outcome_unknown:
            self.manager.give_back.add(request.name, request.lease_id)

    def own(self, taken: HeldLease | NotAcquired) -> HeldLease | None:
        """Let the client own what was taken; None when nothing was."""
        if isinstance(taken, NotAcquired):
            return None
        hold = taken._hold
        self.owned[hold] = taken
        hold.client_owned = True  # last: interrupted before, it is nobody's and given back
        if self.holds.get(hold.name) is not hold:  # lost in this moment: whoever dropped it may not have seen us
            self.owned.pop(hold, None)
        return taken

    def nap(self, seconds: float) -> None:
        """Sleep, or less when the client is closed: then `BackendClosed`."""
        if self.closed.wait(seconds):
            self.refuse_if_closed()

    async def anap(self, seconds: float) -> None:
        """Sleep like `nap`, without blocking the event loop."""
        from pglease import loops

        await loops.asleep(seconds, self.closed)
        self.refuse_if_closed()

    def refuse_if_closed(self) -> None:
        """Raise `BackendClosed` once the client is closed."""
        if self.closed.is_set():
            raise BackendClosed("the client is closed")

    def _refuse_to_wait_for_oneself(self, name: str) -> None:
        hold = self.holds.get(name)
        if hold is not None and hold.held() and is_callers(hold):
            raise ReentrantError(
                f"this thread already holds {name!r} through this client; waiting for it would never end", name=name
            )

    def leave(
        self,
        hold: Hold,
        body_error: BaseException | None,
        *,
        until: float = _NEVER,
        begun: BegunRelease | None = None,
    ) -> None:
        """End the hold of a block; say loudly what went wrong, but never instead of the block's own error.

        Args:
            hold: the block's.
            body_error: what the block has raised, if it has.
            until: the boot clock by which it must be left; it may have had to wait for its turn.
            begun: its release, if that was sent.
        """
        hold.in_block = False
        trouble: BackendError | ConfigurationError | None = None
        box = _box_for(body_error)
        if until != _NEVER:
            box = max(LEAST, min(box, until - clock.now()))
        try:
            self.manager.settle(hold, box, begun)
        except BackendError as error:
            trouble = error
        except ConfigurationError as error:  # the lent connection was of no use; the background tries another
            if body_error is None:
                raise
            trouble = error
        self._say_how_it_ended(hold, trouble, body_error)

    async def aleave(self, hold: Hold, body_error: BaseException | None) -> None:
        """`leave` without blocking the event loop, in bounded time; a cancellation follows when it is done."""
        from pglease import loops

        if isinstance(body_error, GeneratorExit):  # closed rather than cancelled: nobody is there to wait with
            hold.in_block = False
            self.manager.let_go(hold)
            self.drop(hold)
        elif hold.over and (hold.settled or hold.loss is not None):
            self.leave(hold, body_error)  # there is nothing to ask the store
        else:
            box = _box_for(body_error)
            until = clock.now() + box
            begun = self.manager.begin_release(hold, box)
            await loops.to_the_end(
                lambda: self.leave(hold, body_error, until=until, begun=begun),
                seconds=box,
                instead=lambda: self.leave_later(hold, body_error, begun=begun),
                begun=None if begun is None else begun.release,
            )

    def leave_later(self, hold: Hold, body_error: BaseException | None, *, begun: BegunRelease | None = None) -> None:
        """`leave` without asking the store here: the background does."""
        hold.in_block = False
        trouble = BackendUnavailable("other releases are stuck before it")
        if begun is None:
            self.manager.let_go(hold, trouble)
        else:
            self.manager.unconfirmed(hold, trouble)
        self._say_how_it_ended(hold, trouble, body_error)

    def _say_how_it_ended(
        self, hold: Hold, trouble: BackendError | ConfigurationError | None, body_error: BaseException | None
    ) -> None:
        self.drop(hold)
        loss = hold.loss
        if loss is not None and hold.wanted.on_lost != "log":
            if body_error is None:
                raise hold.lost_error(loss)
            body_error.add_note(f"pglease: {hold.lost_error(loss)}")
        elif trouble is not None:
            _note_unconfirmed(hold, trouble, body_error)

    # -- the book ------------------------------------------------------------------------------------------------------

    def hold_of(self, name: str) -> Hold | None:
        """Return what this client has or had last by that name, if it was not given back."""
        self.refuse_if_closed()
        try:
            return self.holds[name]  # what is in the book was looked at when it was taken
        except (KeyError, TypeError):  # the latter for what has no hash, and is no name
            options.text(name, "name")
            return None

    def held_here(self, matches: Callable[[str], bool]) -> str | None:
        """Return a name that matches and that this thread or task holds, or None."""
        with self._lock:
            holds = [hold for hold in self.holds.values() if is_callers(hold) and matches(hold.name)]
        return next((hold.name for hold in holds if hold.held()), None)

    def names(self) -> list[str]:
        """Return the names in the book, in order."""
        self.refuse_if_closed()
        with self._lock:
            return sorted(self.holds)

    def drop(self, hold: Hold) -> None:
        """Forget a hold that is over, unless another has taken its place."""
        if self.holds.get(hold.name) is hold:  # else that was done before
            with self._lock:
                if self.holds.get(hold.name) is hold:
                    del self.holds[hold.name]
        self.owned.pop(hold, None)

    def close_book(self) -> list[Hold] | None:
        """Take no more; return what is held, None if this was done before. A grant that comes later is given back."""
        with self._lock:
            if self.closed.is_set():
                return None
            self.closed.set()
            holds = list(self.holds.values())
        self.room.close()
        return holds

    def forget(self) -> None:
        """In a forked child: start with nothing; the parent's holds are the parent's."""
        was_closed = self.closed.is_set()
        self._fresh()
        if was_closed:
            self.closed.set()
        self.manager.forget()
        self.room.forget()


class Attempt:
    """One question of a caller's, told to observers: that it is asked, and how that ended."""

    __slots__ = ("_name", "_notices", "_owner", "_since", "_waits")

    def __init__(self, notices: Notices, request: Request, wanted: HoldOptions) -> None:
        self._notices, self._name, self._owner, self._waits = notices, request.name, request.owner_id, wanted.wait
        self._since = clock.now()
        notices.tell("attempted", self._name, self._owner)

    @classmethod
    def begin(cls, notices: Notices, request: Request, wanted: HoldOptions) -> Attempt:
        """Return one that is told of; most of the time nobody wants to hear, and one that says nothing does for all."""
        return cls(notices, request, wanted) if notices.wants("attempted") else _UNHEARD

    def acquired(self, fencing_token: int) -> None:
        """It was granted."""
        self._notices.tell("acquired", self._name, self._owner, fencing_token, seconds=clock.now() - self._since)

    def refused(self, held_by: str | None) -> None:
        """Somebody else has it, still."""
        kind: EventKind = "waited" if self._waits else "busy"
        self._notices.tell(kind, self._name, held_by, seconds=clock.now() - self._since)

    def failed(self, error: BaseException) -> None:
        """Nobody knows who has it, or nobody wants to know any more."""
        self._notices.tell("failed", self._name, self._owner, seconds=clock.now() - self._since, error=error)


class _Unheard(Attempt):
    """An attempt that nobody is told of."""

    __slots__ = ()

    def __init__(self) -> None:
        """Keep nothing."""

    def acquired(self, fencing_token: int) -> None:
        """Say nothing."""

    def refused(self, held_by: str | None) -> None:
        """Say nothing."""

    def failed(self, error: BaseException) -> None:
        """Say nothing."""


_UNHEARD = _Unheard()


def is_callers(hold: Hold) -> bool:
    """Tell whether the running code is what took it, so that to wait for it is to wait for oneself.

    The same thread or task; and for a block, the same context: a web framework enters a block for one request on some
    thread of its pool, and has that thread serve the next request while the block goes on elsewhere.
    """
    if hold.caller != identity.current_caller():
        return False
    lease = None if hold.handle is None else hold.handle()
    return not hold.in_block or lease is None or current.is_under(lease)


def _callback_of(taking: weakref.ref[Taking], which: str) -> Callable[[str], object] | None:
    """Return a callback of the client's, as long as there is a client."""
    this = taking()
    return None if this is None else getattr(this, which)


def _dropper(taking: weakref.ref[Taking]) -> Callable[[Hold], None]:
    """Return what makes the book forget a lost hold, without keeping it alive."""

    def drop(hold: Hold) -> None:
        if (this := taking()) is not None:
            this.drop(hold)
            if hold.settled:
                this.room.freed(hold.name)

    return drop


def not_acquired(refused: NotAcquired, wanted: HoldOptions, *, cancelled: bool = False) -> AcquisitionError:
    """Return the error for a refusal: who has it, and until when."""
    holder = f"held by {refused.held_by!r}" if refused.held_by else "held by somebody else"
    until = ""
    if refused.lease is not None and refused.retry_after:
        until = f" until {refused.lease.expires_at:%Y-%m-%d %H:%M:%S} UTC ({refused.retry_after:.1f} s left)"
    facts: dict[str, Any] = {"name": refused.name, "held_by": refused.held_by, "retry_after": refused.retry_after}
    if wanted.wait is None:
        return AcquisitionError(f"the lease {refused.name!r} is {holder}{until}", **facts)
    how = (
        "the wait was cancelled"
        if cancelled or wanted.wait == float("inf")
        else f"{timedelta(seconds=wanted.wait)} were not enough"
    )
    return AcquireTimeout(f"the lease {refused.name!r} is still {holder}{until}: {how}", **facts)


def _box_for(body_error: BaseException | None) -> float:
    return RELEASE_BOX if body_error is None else HASTY_RELEASE_BOX


def _note_unconfirmed(hold: Hold, trouble: Exception, body_error: BaseException | None) -> None:
    """Observers were told; a body's own error carries it along."""
    if body_error is not None:
        after = "it lapses by itself" if isinstance(trouble, BackendClosed) else "it goes on in the background"
        body_error.add_note(f"pglease: the release of {hold.name!r} could not be confirmed, {after}: {trouble}")
