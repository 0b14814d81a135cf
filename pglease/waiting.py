"""Waits for leases through one client: who looks, when, and who is woken.

`steps.acquire` says how long a wait may rest; here is what makes it shorter. All waits of a client for one name stand
in a line, and one of them looks for all: at the holder's known expiry, or as soon as the store says that the name was
released. Whoever is told and leaves without looking passes it on. Nothing is lost when the store says nothing: each
waiter also makes its own last look, and the line looks when the known hold is over.

A `Waiter`'s steps are a generator like any other, so threads and event loops wait by the same rules.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

from pglease import clock, steps
from pglease.backends.base import Backend, Budget, WakingBackend
from pglease.bell import Bell
from pglease.events import Waiting
from pglease.giveback import GiveBack
from pglease.listening import Ear
from pglease.notices import Notices
from pglease.records import Change, Granted, Lease, Place, Refused, Request, Ticket
from pglease.steps import Answer, Call, Step, Wait
from pglease.term import Term

if TYPE_CHECKING:
    import asyncio

MARK = 600.0
"""Seconds for which whoever marked a name may rely on that."""
ASKED_FOR = 2 * MARK
"""Seconds for which the store is asked to mark it. It writes only when half of them are over: once in `MARK`, whoever
asks."""
AHEAD_OF_ITS_END = 75.0
"""Seconds before the end of that time at which the mark is renewed."""
TICKET = 6.0
"""Seconds a place in a queue lasts unless it is renewed, three times in that time: so long a dead waiter may delay."""
HEARD_POLL = 60.0
"""The longest pause between two looks of `acquire(wait=…)` while the store is heard, in seconds."""
HEARD_STRETCH = 12.0
"""How many times `poll_interval` the longest pause is while the store is heard: looking is only the net beneath."""
BEHIND = 0.25
"""Seconds by which each waiter of a line looks later than the one before it, should that one be stuck."""
LOOKING = 1.0
"""Seconds that a look may take before the next waiter of the line looks too."""
AHEAD = 0.01
"""Seconds by which a fair waiter looks later for each one ahead of it, who most likely takes the name meanwhile."""
MOST_SPREAD = 0.02
"""Seconds over which waiters of many clients spread their looks after a release, at most."""
LATEST = 0.1
"""Seconds after a release within which everybody looks who has not heard of a new holder."""
AT_ONCE = 0.001
"""A delay so short, in seconds, that a waiter is woken to wait for it: the ear's own rest is no finer."""
OWN_WORD = 0.1
"""Seconds that a client waits for the store to announce what it released itself."""
LONGEST_NAP = 3600.0
_REMEMBERED = 4096


@dataclass(slots=True)
class _Mark:
    """What was marked: until when, which record (token less transitions), and when its last release was heard."""

    until: float = 0.0
    released_at: float = float("-inf")
    retry_at: float = 0.0
    kin: int | None = None

    @property
    def due_at(self) -> float:
        return max(self.until - AHEAD_OF_ITS_END, self.retry_at)

    def see(self, lease: Lease) -> None:
        """Forget the mark when the record is another than the one that was marked: it was deleted in between.

        As long as it is the same, token and transitions rise together; a new one starts above every older token.
        """
        if lease.fencing_token - lease.transitions != self.kin:
            self.until, self.kin = 0.0, lease.fencing_token - lease.transitions


@dataclass(eq=False)
class _Line:
    """All who wait for one name through this client, in the order in which they look."""

    mark: _Mark
    waiters: list[Waiter] = field(default_factory=list)
    look_at: float = float("inf")
    said: Refused | None = None
    marking: bool = False

    def due(self, waiter: Waiter) -> float:
        """Return when `waiter` looks for all, if nobody before it does."""
        return self.look_at + BEHIND * self.waiters.index(waiter)

    def set(self, look_at: float) -> None:
        """Have somebody look then; the first two are woken if that is earlier than they think."""
        earlier, self.look_at = look_at < self.look_at, look_at
        if earlier:
            self.wake()

    def wake(self) -> None:
        """Let those in front think again."""
        for waiter in self.waiters[:2]:
            waiter.nap.kick()


def mark(backend: Backend, name: str, seconds: float) -> float:
    """Mark a name; return the boot clock until when one may rely on that, or 0.0 where it has to be looked at again.

    Raises:
        BackendError: as for `WakingBackend.mark`, within `seconds`.
    """
    now = clock.now()
    marked = cast("WakingBackend", backend).mark(name, ASKED_FOR, Budget.of(seconds, clock.now))
    return now + MARK if marked else 0.0


class Watcher(Protocol):
    """Somebody who watches without waiting."""

    def hear(self, change: Change) -> None:
        """Take a hint, at once and without I/O."""

    def turn(self) -> None:
        """Look again: hearing has begun, or ended, or the client was closed."""


class Room:
    """One client's waiting room.

    Args:
        backend: who is asked.
        give_back: gives up the tickets of those who left.
        notices: the client's observers.
    """

    def __init__(self, backend: Backend, give_back: GiveBack, notices: Notices) -> None:
        self.backend = backend
        self.give_back = give_back
        self.notices = notices
        self._fresh()
        self.ear = Ear(backend, needed=self._is_used, heard=self._heard, turned=self._turned, rest=self._wake_late_ones)

    def _fresh(self) -> None:
        self.lock = threading.RLock()
        self._lines: dict[str, _Line] = {}
        self._marks: dict[str, _Mark] = {}
        self._watches: weakref.WeakSet[Watcher] = weakref.WeakSet()
        self._late: set[_Line] = set()
        self._spread = 0.0
        self._hearing_since = float("inf")

    @property
    def hearing(self) -> bool:
        """Whether the store is heard just now."""
        return self.ear.hearing

    def waits(self) -> list[Waiting]:
        """Return how each wait stands, ordered by name."""
        with self.lock:
            return [waiter.report() for _, line in sorted(self._lines.items()) for waiter in line.waiters]

    # -- what waiters do -----------------------------------------------------------------------------------------------

    def join(self, waiter: Waiter) -> _Line:
        """Stand in the line for a name, behind those who came before; the fair ones by their numbers."""
        with self.lock:
            line = self._lines.get(waiter.name)
            if line is None:
                line = _Line(self._marks.setdefault(waiter.name, _Mark()))
            waiter.line = line  # first: interrupted anywhere from here, `leave` undoes it
            line.waiters.append(waiter)
            self._lines[waiter.name] = line  # last: a line in which nobody stands would be found by the ear
            self.ear.need()
            if line.mark.released_at >= waiter.looked_at or (self.hearing and self._hearing_since > waiter.looked_at):
                line.set(clock.now())  # it looked before a release that it was not here to hear of, or before any
            return line

    def leave(self, waiter: Waiter, term: Term | None) -> None:
        """Stand there no more; what was for this waiter to do is the next one's."""
        with self.lock:
            line = waiter.line
            if line is None or waiter not in line.waiters:
                return
            was_in_front = waiter in line.waiters[:2]
            line.waiters.remove(waiter)
            if not line.waiters:
                self._lines.pop(waiter.name, None)
                self._forget_old_marks()
            elif term is not None:
                line.mark.see(term.lease)
                line.set(clock.now() + min(term.lease.time_remaining(), line.waiters[0].heard_poll))
                line.said = Refused(term.lease, term.lease.time_remaining())
            elif waiter.looking:
                line.set(clock.now())
            if was_in_front:
                line.wake()
            if term is not None and waiter.hinted:
                self._spread = self._spread / 2 if self._spread > 0.0004 else 0.0

    def _forget_old_marks(self) -> None:
        if len(self._marks) > _REMEMBERED:
            self._marks = {name: line.mark for name, line in self._lines.items()}

    def learn(self, waiter: Waiter, line: _Line, wait: Wait, now: float) -> None:
        """Take what a waiter's look has said as what the whole line knows."""
        with self.lock:
            if waiter.hinted and wait.said is not None:  # somebody else was faster
                self._spread = min(MOST_SPREAD, 1.26 * self._spread + 0.0002)  # so that a few look, and not only one
            if wait.said is not None:
                line.said = wait.said
                if wait.said.lease is not None:
                    line.mark.see(wait.said.lease)
            waiter.looking = waiter.hinted = False
            if (
                line.mark.released_at < waiter.looked_at
            ):  # else a release was announced meanwhile: that look is outdated
                line.look_at = now + self._pause(waiter, line, wait, now)
                line.wake()

    def _pause(self, waiter: Waiter, line: _Line, wait: Wait, now: float) -> float:
        if self.hearing and line.mark.until > now:
            return steps.pause(waiter.heard_poll, wait.said, random.random())
        return wait.seconds

    def nap(self, waiter: Waiter, line: _Line, now: float) -> float:
        """Return how long `waiter` may rest; 0 when it is to look, for itself or for all."""
        with self.lock:
            due = line.due(waiter)
            if due > now:
                marks = self.hearing and not line.marking and waiter is line.waiters[0]
                return max(0.001, min(due, line.mark.due_at if marks else due) - now)
            self.claim(waiter, line, now)
            return 0.0

    def claim(self, waiter: Waiter, line: _Line, now: float) -> None:
        """Let `waiter` look for all; the next one follows if that takes long."""
        with self.lock:
            waiter.hinted = line.mark.released_at > waiter.looked_at
            waiter.looking = True
            line.look_at = now + LOOKING

    def owes_mark(self, line: _Line, now: float) -> bool:
        """Tell whether the name has to be marked, and take that on."""
        with self.lock:
            if not self.hearing or line.marking or now < line.mark.due_at:
                return False
            line.marking = True
            return True

    def marked(self, line: _Line, answer: Answer | None) -> None:
        """Note what became of marking; None when it was given up."""
        with self.lock:
            line.marking = False
            if answer is None:
                line.wake()
            elif answer.error is None and answer.value:
                line.mark.until = answer.sent_at + MARK
            else:
                line.mark.retry_at = answer.now + 0.1
                line.wake()

    def placed(self, line: _Line) -> None:
        """Let the fair ones of a line look in the order of their numbers, before all others."""
        with self.lock:
            # Not in place: whoever interrupts us would find the list empty.
            line.waiters = sorted(line.waiters, key=lambda w: w.place.number if w.place else float("inf"))

    # -- what watchers do ----------------------------------------------------------------------------------------------

    def watch(self, watcher: Watcher) -> None:
        """Tell somebody of all that is heard, until it is forgotten or says `unwatch`."""
        with self.lock:
            self._watches.add(watcher)
            self.ear.need()

    def unwatch(self, watcher: Watcher) -> None:
        """Tell it no more."""
        with self.lock:
            self._watches.discard(watcher)

    def _is_used(self) -> bool:
        return bool(self._lines) or len(self._watches) > 0

    # -- what is heard -------------------------------------------------------------------------------------------------

    def _heard(self, changes: Sequence[Change]) -> None:
        with self.lock:
            for change in changes:
                line = self._lines.get(change.name)
                if line is not None and line.waiters:  # else whoever left it was interrupted
                    self._released(line, change) if change.what == "released" else self._granted(line, change)
                elif change.what == "released" and (mark := self._marks.get(change.name)) is not None:
                    mark.released_at = clock.now()  # for whoever has looked already and is on its way into the line
                for watcher in list(self._watches):
                    watcher.hear(change)

    def _released(self, line: _Line, change: Change) -> None:
        now = line.mark.released_at = clock.now()
        first = line.waiters[0]
        delay = AHEAD * first.place.ahead if first.place else self._spread * random.random()
        look_at = now + (change.left or 0.0) + min(delay, LATEST)
        if self.hearing and AT_ONCE < look_at - now <= LATEST:
            line.look_at = look_at
            self._late.add(line)
        else:
            line.set(look_at)

    def _wake_late_ones(self) -> float:
        """Wake those whose time has come with no word of a grant before it; return for how long the ear may rest.

        Most of a crowd hear of the next holder before it is their turn. Waking a thread in each of twenty processes for
        nothing would cost the one that is first more than its own look.
        """
        rest = float("inf")
        if not self._late:
            return rest
        with self.lock:
            now = clock.now()
            for line in list(self._late):
                left = line.look_at - now
                if left <= 0:
                    line.wake()
                if 0 < left <= LATEST:
                    rest = min(rest, left)
                else:  # also where a grant was heard of, and the next look is that of its end
                    self._late.discard(line)
        return rest

    def _granted(self, line: _Line, change: Change) -> None:
        for waiter in line.waiters:
            waiter.moved_up()
        left = 2.0 + 2.0 * random.random() if change.left is None else change.left
        every = line.said.look_every if line.said else float("inf")  # the next holder is most likely of the same kind
        longest = min(left, every, line.waiters[0].heard_poll)
        line.set(clock.now() + longest + 0.005 + 0.05 * random.random())

    def freed(self, name: str) -> None:
        """Note that this client released a name itself: no other word is needed where the store cannot be heard."""
        if name not in self._lines:  # nobody stands there, as it is most of the time
            return
        with self.lock:
            line = self._lines.get(name)
            if line is None or not line.waiters:
                return
            if self.hearing:  # wait for the word that all clients get, or ours would always be the first
                line.set(min(line.look_at, clock.now() + OWN_WORD))
            else:
                self._released(line, Change(name, "released"))

    def _turned(self, hearing: bool) -> None:
        with self.lock:
            now = clock.now()
            self._hearing_since = now if hearing else float("inf")
            for watcher in list(self._watches):
                watcher.turn()
            for line in list(self._late):  # the ear will not wake them any more
                line.wake()
            self._late.clear()
            for line in filter(lambda each: each.waiters, self._lines.values()):
                # Heard again: what was missed meanwhile is unknown. No longer heard: look as often as one must then.
                first = line.waiters[0]
                line.set(min(line.look_at, now + (0.0 if hearing else first.poll * random.random())))

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wake everybody, to find the client closed, and hear no more."""
        with self.lock:
            for line in self._lines.values():
                for waiter in line.waiters:
                    waiter.nap.kick()
            for watcher in list(self._watches):
                watcher.turn()
        self.ear.close()

    def forget(self) -> None:
        """In a forked child: nobody waits here."""
        self.ear.fresh()
        self._fresh()


class Waiter:
    """One wait for one name.

    Args:
        room: where it waits.
        request: what it asks for; with a ticket if it is to be served in the order of arrival.
        nap: how it rests.
        poll: the longest pause between two looks while the store cannot be heard, in seconds.
        heard_poll: the same while it is heard.
        warn_after: seconds after which the log tells who has it, then after twice as many, and so on; None: never.
        box: the longest a request for a mark or a place may take, in seconds.
    """

    def __init__(
        self,
        room: Room,
        request: Request,
        nap: Nap,
        *,
        poll: float,
        heard_poll: float,
        warn_after: float | None,
        box: float,
    ) -> None:
        self.room, self.name, self.owner_id, self.nap = room, request.name, request.owner_id, nap
        self.poll, self.heard_poll = poll, heard_poll
        self.began_at = clock.now()
        self.looked_at = self.began_at
        self.looking = False
        self.hinted = False
        self.in_doubt = False
        self.line: _Line | None = None
        self.place: Place | None = None
        self._box = box
        self._warn_at = float("inf") if warn_after is None else self.began_at + warn_after
        ticket_id = request.ticket_id
        self._ticket = None if ticket_id is None else Ticket(self.name, ticket_id, self.owner_id, TICKET)
        self._renew_at = 0.0
        self._queueing = False
        self._marking = False

    def attend(self, conversation: Generator[Step, Answer, Term | Refused]) -> Generator[Step, Answer, Term | Refused]:
        """Pass on the steps of `steps.acquire`, and do between its looks what a waiter owes."""
        found: Term | Refused | None = None
        try:
            step = next(conversation)
            while True:
                if isinstance(step, Wait):
                    answer = yield from self._rest(step)
                else:
                    answer = yield from self._ask(step)
                step = conversation.send(answer)
        except StopIteration as end:
            found = end.value
            return found
        finally:
            try:
                conversation.close()
            finally:
                self._end(found)

    def _ask(self, call: Call) -> Generator[Step, Answer, Answer]:
        self.looked_at, self.in_doubt = clock.now(), True
        answer = yield call
        if answer.error is not None:
            self.in_doubt = answer.error.outcome_unknown
        else:
            self.in_doubt = isinstance(answer.value, Granted)  # until it is in somebody's hands
        return answer

    def _rest(self, wait: Wait) -> Generator[Step, Answer, Answer]:
        """Rest until it is time to look."""
        now = clock.now()
        ends = now + wait.at_most
        line = self.line or self.room.join(self)
        self.room.learn(self, line, wait, now)
        while True:
            found_out, now = yield from self._do_what_is_owed(line, now, ends)
            if found_out:
                self.room.claim(self, line, now)
                return Answer(now)
            self._speak_up(now)
            nap = self.room.nap(self, line, now)
            if nap <= 0 or now >= ends:
                return Answer(now)
            until = min(ends, self._warn_at, self._renew_at if self._ticket else float("inf"))
            now = (yield Wait(min(nap, max(0.0, until - now), LONGEST_NAP), wait.at_most)).now

    def _do_what_is_owed(self, line: _Line, now: float, ends: float) -> Generator[Step, Answer, tuple[bool, float]]:
        """Mark the name and hold the place in the queue; tell whether to look afterwards, and the time."""
        look = False
        if self._ticket is not None and now >= self._renew_at:
            self._queueing, first = True, self.place is None
            answer = yield Call("queue", (self._ticket,), min(self._box, max(0.0, ends - now)))
            now = answer.now
            self._queued(answer)
            self.room.placed(line)
            look = first or self.place is None
        if now < ends and self.room.owes_mark(line, now):
            self._marking = True
            answer = yield Call("mark", (self.name, ASKED_FOR), min(self._box, ends - now))
            self._marking, now, look = False, answer.now, True
            self.room.marked(line, answer)
        return look, now

    def _queued(self, answer: Answer) -> None:
        if answer.error is not None:  # the place may be lost meanwhile; then it is a later one
            self._renew_at = answer.now + 0.5
            return
        self.place = answer.value
        self._renew_at = answer.sent_at + TICKET / 3 if self.place else answer.now + 0.5

    def moved_up(self) -> None:
        """Note that one ahead of it was served, as it seems."""
        if self.place is not None and self.place.ahead:
            self.place = Place(self.place.number, self.place.ahead - 1)

    def _end(self, found: Term | Refused | None) -> None:
        term = found if isinstance(found, Term) else None
        if self._marking and self.line is not None:
            self.room.marked(self.line, None)
        self.room.leave(self, term)
        if self._ticket is not None and self._queueing and term is None:
            self.room.give_back.add_ticket(self.name, self._ticket.ticket_id, in_doubt=self.place is None)

    # -- for people ----------------------------------------------------------------------------------------------------

    def holder(self) -> Lease | None:
        """Return the holder's record as this client last saw it."""
        return self.line.said.lease if self.line and self.line.said else None

    def report(self) -> Waiting:
        """Return how it stands."""
        said = self.line.said if self.line else None
        lease, reserved_for = (said.lease, said.reserved_for) if said else (None, None)
        return Waiting(self.name, self.owner_id, clock.now() - self.began_at, lease, self.place, reserved_for)

    def _speak_up(self, now: float) -> None:
        if now < self._warn_at:
            return
        self._warn_at = now + (now - self.began_at)
        stands = self.report()
        holder = stands.lease.owner_id if stands.lease else None
        self.room.notices.tell("waiting", self.name, holder, seconds=stands.seconds, waiting=stands)


class Cancelled(Exception):
    """The caller's event was set while it waited."""


class Nap:
    """How a thread rests until its time has come or somebody wakes it.

    Args:
        refuse: raises when the wait is to end.
        cancel: an event of the caller's that ends the wait, by `Cancelled`.
    """

    SLICE = 0.05
    """Seconds after which somebody else's event is looked at again: one cannot wait for two events at once, but a
    `Bell` wakes us."""

    def __init__(self, refuse: Callable[[], None], cancel: threading.Event | None = None) -> None:
        self._refuse, self._cancel = refuse, cancel
        self._kicked = Bell()  # a signal handler may close the client, or wait for the same name, wherever it comes
        self._bell = cancel if isinstance(cancel, Bell) else None
        self._slice = self.SLICE if cancel is not None and self._bell is None else float("inf")

    def kick(self) -> None:
        """Wake it, from any thread."""
        self._kicked.set()

    def rest(self, seconds: float) -> None:
        """Rest for so long, or less."""
        if self._bell is None:
            self._doze(seconds)
            return
        self._bell.tell(self.kick)
        try:
            self._doze(seconds)
        finally:
            self._bell.untell(self.kick)

    def _doze(self, seconds: float) -> None:
        until = clock.now() + seconds
        while True:
            self._refuse()
            left = until - clock.now()
            if self._cancel is not None:
                if self._cancel.is_set():
                    raise Cancelled
                left = min(left, self._slice)
            if self._kicked.wait(max(0.0, left)) or clock.now() >= until:
                break
        self._kicked.clear()
        self._refuse()


class TaskNap(Nap):
    """How a task rests, without a thread."""

    def __init__(self, refuse: Callable[[], None]) -> None:
        super().__init__(refuse)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken: asyncio.Event | None = None

    def kick(self) -> None:
        """Wake it, from any thread."""
        self._kicked.set()
        loop, woken = self._loop, self._woken
        if loop is not None and woken is not None:
            try:
                loop.call_soon_threadsafe(woken.set)
            except RuntimeError:  # the loop is closed; nobody rests there any more
                return

    async def arest(self, seconds: float) -> None:
        """Rest for so long, or less."""
        import asyncio

        self._refuse()
        if self._woken is None:
            self._woken, self._loop = asyncio.Event(), asyncio.get_running_loop()
        if not self._kicked.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await self._woken.wait()
            except TimeoutError:
                pass
        self._kicked.clear()
        self._woken.clear()
        self._refuse()
