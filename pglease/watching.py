"""Watches leases without taking part: what happens to them, in order, with no duplicates.

Told by the same hints as waiters where the store gives them, and by looking beneath that. What is told is always read
from the store; a hint only says when to look.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pglease import clock, forks, options
from pglease.backends.base import Backend, Budget
from pglease.bell import Bell
from pglease.errors import BackendError, BackendUnavailable
from pglease.events import LeaseChange
from pglease.options import Duration
from pglease.records import Change, Lease
from pglease.waiting import AHEAD_OF_ITS_END, HEARD_STRETCH, Room, mark

log = logging.getLogger("pglease")

TROUBLE_PAUSE = 0.5
"""Seconds between two looks while the store cannot be reached."""
AFTER_EXPIRY = 0.01
"""Seconds after a hold's known end at which one looks whether it lapsed."""
LONGEST_NAP = 60.0


@dataclass(slots=True)
class _Seen:
    """What is known of one name: its record, whether its end was told, and until when the name is marked."""

    lease: Lease
    over: bool
    marked_until: float = 0.0


class Watch:
    """An iterator of changes. Made by `PGLease.watch`.

    Iterating waits for the next change, and ends when the watch is closed; `next(seconds)` waits so long. For one
    thread at a time; `close` from any. Outages of the store are waited out. Forgotten, it is closed.
    """

    def __init__(
        self, room: Room, name: str, *, prefix: bool, poll: float, box: float, refuse: Callable[[], None]
    ) -> None:
        self._room = room
        self._backend: Backend = room.backend
        self._name, self._prefix, self._poll, self._box = name, prefix, poll, box
        self._refuse = refuse
        self._seen: dict[str, _Seen] = {}
        self._changes: deque[LeaseChange] = deque()
        self.woken = Bell()
        self._look_at = 0.0
        self._began = False
        self._may_mark = True
        self._closed = False
        self.forget()
        forks.forget_in_children(self, type(self).forget)
        room.watch(self)

    def forget(self) -> None:
        """In a forked child: nobody looks yet."""
        self._looking = threading.RLock()

    # -- for its user --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> LeaseChange:
        change = self.next(float("inf"))
        if change is None:
            raise StopIteration
        return change

    def next(self, seconds: Duration) -> LeaseChange | None:
        """Return the next change, waiting for at most `seconds`; None when there was none, or the watch is closed.

        A look that has begun may take a few seconds more, when the store does not answer.

        Raises:
            BackendClosed: the client was closed.
            BackendMisconfigured: the store cannot be read.
        """
        for rest in self.rests(seconds):
            if rest:
                self.woken.wait(rest)
            else:
                self.look()
        return self.told()

    def close(self) -> None:
        """End it, from any thread. Idempotent."""
        self._closed = True
        self._room.unwatch(self)
        self.woken.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        what = f"prefix={self._name!r}" if self._prefix else repr(self._name)
        return f"<Watch {what}, {'closed' if self._closed else 'open'}>"

    # -- for either face -----------------------------------------------------------------------------------------------

    def rests(self, seconds: Duration) -> Iterator[float]:
        """Yield how long to rest, or 0.0 to look now, until there is something to tell or `seconds` are over."""
        until = clock.now() + options.seconds(seconds, "seconds", zero=True, forever=True)
        while not self._closed:
            self._refuse()
            now = clock.now()
            if self._changes:
                return
            if self.woken.is_set() or now >= self._look_at:
                yield 0.0
            elif now >= until:
                return
            else:
                yield min(self._look_at, until, now + LONGEST_NAP) - now

    def told(self) -> LeaseChange | None:
        """Return the next of the changes that were seen."""
        return self._changes.popleft() if self._changes and not self._closed else None

    def look(self) -> None:
        """Look what has changed. Waits for a look that goes on already: whoever asked for that one was cancelled."""
        with self._looking:
            self.woken.clear()  # before looking: what is heard from here on is looked at once more
            self._look()

    def look_later(self) -> None:
        """Wait a while for a store that is in trouble."""
        self._look_at = clock.now() + TROUBLE_PAUSE * random.uniform(0.5, 1)

    # -- for the client's ear ------------------------------------------------------------------------------------------

    def hear(self, change: Change) -> None:
        """Look soon, if a hint is about what is watched."""
        if change.name == self._name or (self._prefix and change.name.startswith(self._name)):
            self.woken.set()

    def turn(self) -> None:
        """Look soon: something may have happened unheard."""
        self.woken.set()

    # -- looking -------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        try:
            self._compare(self._read())
            if self._mark():
                self._compare(self._read())  # it was marked only now: what happened before was not announced
        except BackendUnavailable as error:
            log.debug("the watch of %r cannot look for now: %s", self._name, error)
            self.look_later()
            return
        self._look_at = clock.now() + self._pause()

    def _budget(self) -> Budget:
        return Budget.of(self._box, clock.now)

    def _read(self) -> dict[str, Lease]:
        if self._prefix:
            return {lease.task_name: lease for lease in self._backend.list(self._name, self._budget(), ended=True)}
        lease = self._backend.get(self._name, self._budget())
        return {} if lease is None else {self._name: lease}

    def _pause(self) -> float:
        """Return how long nothing needs to be looked at, as far as is known."""
        now = clock.now()
        marks = [seen.marked_until for seen in self._seen.values() if seen.marked_until > now]
        told = self._room.hearing and not self._prefix and marks
        ends = [seen.lease.time_remaining() + AFTER_EXPIRY for seen in self._seen.values() if not seen.over]
        ends += [marked - AHEAD_OF_ITS_END - now for marked in marks if told]
        longest = (HEARD_STRETCH if told else 1.0) * self._poll * random.uniform(0.9, 1)
        return max(0.0, min([longest, *ends]))

    def _mark(self) -> bool:
        """Mark what is watched; tell whether some of it was not marked before."""
        now, anew = clock.now(), False
        if not (self._room.hearing and self._may_mark):
            return False
        for name, seen in self._seen.items():
            if now >= seen.marked_until - AHEAD_OF_ITS_END:
                try:
                    until = mark(self._backend, name, self._box)
                except BackendUnavailable:
                    raise
                except BackendError as error:  # a role that may only read
                    log.info("%s; the watch of %r looks every %g s instead", error, self._name, self._poll)
                    self._may_mark = False
                    return False
                anew = anew or seen.marked_until <= now < until
                seen.marked_until = until
        return anew

    # -- what has changed ----------------------------------------------------------------------------------------------

    def _compare(self, records: Mapping[str, Lease]) -> None:
        """Turn what is different from the last look into changes, in the order in which it happened."""
        found: list[LeaseChange] = []
        for name in sorted(self._seen.keys() | records.keys()):
            found += self._changes_of(name, records.get(name))
        self._changes.extend(sorted(found, key=_moment))
        self._began = True

    def _changes_of(self, name: str, lease: Lease | None) -> Iterator[LeaseChange]:
        seen = self._seen.get(name)
        if lease is None:
            if seen is not None:
                del self._seen[name]
                yield LeaseChange("deleted", seen.lease)
            return
        over = lease.is_expired()
        self._seen[name] = _Seen(lease, over, 0.0 if seen is None else seen.marked_until)
        ended = LeaseChange("released" if lease.given_back else "expired", lease)
        if seen is None and not self._began:
            yield LeaseChange("present", lease)
        elif seen is not None and seen.lease.fencing_token == lease.fencing_token:
            if over and not seen.over:
                yield ended
        else:
            yield from self._new_hold(seen, lease, ended if over else None)

    def _new_hold(self, seen: _Seen | None, lease: Lease, ended: LeaseChange | None) -> Iterator[LeaseChange]:
        before = None if seen is None or lease.transitions <= seen.lease.transitions else seen  # or it was made anew
        if before is None and seen is not None:
            self._seen[lease.task_name].marked_until = 0.0
        missed = lease.transitions - (before.lease.transitions + 1 if before else 0)
        if missed:
            yield LeaseChange(ended.kind if ended else "acquired", lease, missed)
            return
        kind = "acquired"
        if before is not None and not before.over:
            if lease.acquired_at < before.lease.expires_at:
                yield LeaseChange("released", before.lease)
            else:
                kind = "taken over"
        yield LeaseChange(kind, lease)  # type: ignore[arg-type]  # one of the two
        if ended is not None:
            yield ended


class AsyncWatch:
    """An asynchronous iterator of changes. Made by `AsyncPGLease.watch`.

    `Watch` with `next` awaited; resting, it occupies no thread. A task that is cancelled while it waits misses nothing:
    the change is told to whoever asks next. For one task at a time; `close` from any, and from any thread.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> LeaseChange:
        change = await self.next(float("inf"))
        if change is None:
            raise StopAsyncIteration
        return change

    async def next(self, seconds: Duration) -> LeaseChange | None:
        """Return the next change, waiting for at most `seconds`. See `Watch.next`."""
        from pglease import loops

        for rest in self._watch.rests(seconds):
            if rest:
                await loops.asleep(rest, self._watch.woken)
            else:
                try:
                    await loops.ask(self._watch.look)
                except BackendUnavailable:  # its turn did not come
                    self._watch.woken.clear()
                    self._watch.look_later()
        return self._watch.told()

    def close(self) -> None:
        """End it. Idempotent, and not awaited."""
        self._watch.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._watch).replace("<Watch", "<AsyncWatch", 1)


def _moment(change: LeaseChange) -> float:
    """Return when it happened, for the order between names; what is of one name stands in order already."""
    lease = change.lease
    began = change.kind in {"acquired", "taken over", "present"}
    return (lease.acquired_at if began else min(lease.expires_at, lease.seen_at)).timestamp()
