"""What is made of several leases: groups, semaphores, read-write locks. What workers do, and the rules for it.

Each rule looks at the moment at which somebody is handed something: in between, beliefs only end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pglease.errors import PgleaseError
from pglease.handles import HeldLease, Hold
from pglease.primitives.many import LeaseGroup
from pglease.primitives.read_write import ReadWriteLock
from pglease.primitives.semaphore import SLOT, Semaphore
from tests.simulation import kernel as virtual

if TYPE_CHECKING:
    from tests.simulation.judge import Belief, Judge
    from tests.simulation.world import Member

SEMAPHORE, LOCK = "slots", "book"
SLOTS = SEMAPHORE + SLOT
WAYS = ("group", "slot", "read", "write")
"""What a seed may have its workers do."""
LONGEST_TALK = 80.0
"""Seconds that the last tries may take once the time to wait is over: some eight conversations with the store."""


@dataclass(eq=False)
class Ask:
    """One wait for a slot: its limit, and the largest under which anybody asked meanwhile."""

    limit: int
    largest: int


@dataclass
class Shares:
    """Judges what several share. One for a simulation."""

    judge: Judge
    slots: list[Belief] = field(default_factory=list)
    readers: list[Belief] = field(default_factory=list)
    writers: list[Belief] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)

    @contextlib.contextmanager
    def asking(self, limit: int) -> Iterator[Ask]:
        """Note under which limit somebody asks for a slot, and who asks meanwhile under a larger one."""
        ask = Ask(limit, max([limit, *(other.limit for other in self.asks)]))
        for other in self.asks:
            other.largest = max(other.largest, limit)
        self.asks.append(ask)
        try:
            yield ask
        finally:
            self.asks.remove(ask)

    def got_slot(self, lease: HeldLease, ask: Ask) -> None:
        """No more hold a slot than the limit allows: the largest under which anybody asked meanwhile."""
        self.slots = self._live([*self.slots, self._belief(lease)])
        self.judge.counts["slots"] += 1
        if len(self.slots) > ask.largest:
            self.judge.wrong("slots", f"{_who(self.slots)} hold slots, where the limit is {ask.largest}")

    def got_reading(self, lease: HeldLease, *, after: Hold | None = None) -> None:
        """No writer beside a reader; after a downgrade, none in between."""
        belief = self._belief(lease)
        self.readers = [*self._live(self.readers), belief]
        self.judge.counts["readings"] += 1
        self._nobody_writes_beside_readers()
        if after is not None and self.writers[-1].hold is not after and self._live([belief]):
            self.judge.wrong("write", f"{_who(self.writers[-1:])} wrote before a writer had become a reader")

    def got_writing(self, lease: HeldLease) -> None:
        """No reader beside a writer."""
        self.writers = [*self._live(self.writers), self._belief(lease)]
        self.judge.counts["writings"] += 1
        self._nobody_writes_beside_readers()

    def _nobody_writes_beside_readers(self) -> None:
        readers, writers = self._live(self.readers), self._live(self.writers)
        if len(writers) > 1 or (readers and writers):
            self.judge.wrong("write", f"{_who(writers)} write beside {_who(readers) or 'each other'}")

    def got_group(self, group: LeaseGroup, names: list[str]) -> None:
        """All of them."""
        self.judge.counts["groups"] += 1
        if [lease.name for lease in group] != sorted(names):
            self.judge.wrong("all", f"{group!r} was given for {names}")

    def got_none(self, member: Member, names: list[str], since: float) -> None:
        """None of them: nothing is believed, and what was taken meanwhile is given back."""
        here = virtual.caller()
        for name in names:
            for belief in self.judge.beliefs_of(name):
                if belief.process is member and belief.hold.caller == here and belief.began >= since:
                    if self._live([belief]):
                        self.judge.wrong("all", f"{member.name} holds {name}, though it did not get {names}")
                    self.judge.given_back(member, member.link, name, belief.hold.lease_id)
            member.came_to_nothing(name)

    def _belief(self, lease: HeldLease) -> Belief:
        return self.judge.belief(lease._hold)

    def _live(self, beliefs: list[Belief]) -> list[Belief]:
        return [belief for belief in beliefs if self.judge.believes(belief)]


def _who(beliefs: list[Belief]) -> str:
    return " and ".join(f"{belief.process.name} ({belief.hold.name})" for belief in beliefs)


class Sharer:
    """What a worker does with leases that are made of several."""

    def __init__(self, member: Member) -> None:
        self.member, self.world = member, member.world

    def choose(self) -> Callable[[str, float], None]:
        """Return what to do next."""
        way: Callable[[str, float], None] = getattr(self, self.world.kernel.random.choice(self.world.plan.shares))
        return way

    def group(self, name: str, ttl: float) -> None:
        """Take some names or none, at once or waiting."""
        random, shares, kernel = self.world.kernel.random, self.world.shares, self.world.kernel
        names = random.sample(self.world.plan.names, random.choice([1, 2, len(self.world.plan.names)]))
        wait, began = self._wait(ttl), kernel.now
        try:
            with self._in_time(f"acquire_many(wait={wait})", wait or 0.0):
                context = self.member.client.acquire_many(names, ttl, wait=wait)
                group = context.acquire()
        except PgleaseError:
            shares.got_none(self.member, names, began)
            raise
        if not isinstance(group, LeaseGroup):
            shares.got_none(self.member, names, began)
            return
        shares.got_group(group, names)
        self._use(next(iter(group)))
        group.release()

    def slot(self, name: str, ttl: float) -> None:
        """Take a slot of the semaphore."""
        random, shares, wait = self.world.kernel.random, self.world.shares, self._wait(ttl)
        fair = self.world.plan.wakes and random.random() < 0.3
        semaphore = Semaphore(self.member.client, SEMAPHORE, self.world.limit, ttl, fair=fair)
        with shares.asking(self.world.limit) as ask:
            with self._in_time(f"Semaphore.acquire({wait})", wait or 0.0):
                lease = semaphore.acquire(wait or 0)
            shares.got_slot(lease, ask)
        self._use(lease)
        lease.release()

    def read(self, name: str, ttl: float) -> None:
        """Read under the lock."""
        wait, lock = self._wait(ttl), ReadWriteLock(self.member.client, LOCK, ttl)
        with self._in_time(f"acquire_read({wait})", wait or 0.0):
            lease = lock.acquire_read(wait or 0)
        self.world.shares.got_reading(lease)
        self._use(lease)
        lease.release()

    def write(self, name: str, ttl: float) -> None:
        """Write under the lock; sometimes go on as a reader."""
        wait, lock = self._wait(ttl), ReadWriteLock(self.member.client, LOCK, ttl)
        with self._in_time(f"acquire_write({wait})", wait or 0.0):
            writing = lock.acquire_write(wait or 0)
        self.world.shares.got_writing(writing)
        self._use(writing)
        if self.world.kernel.random.random() < 0.3 and writing.held:
            reading = lock.downgrade(writing)
            self.world.shares.got_reading(reading, after=writing._hold)
            self._use(reading)
            reading.release()
        writing.release()

    def _wait(self, ttl: float) -> float | None:
        random = self.world.kernel.random
        return None if random.random() < 0.3 else random.random() * 2 * ttl

    @contextlib.contextmanager
    def _in_time(self, what: str, seconds: float) -> Iterator[None]:
        began = self.world.kernel.now
        try:
            yield
        except PgleaseError:
            for name in self.world.server.store.rows:
                if name.startswith((SEMAPHORE, LOCK)):
                    self.member.came_to_nothing(name)
            raise
        finally:
            self.member.in_time(what, began, seconds + LONGEST_TALK)

    def _use(self, lease: HeldLease) -> None:
        """Work for a while."""
        random, kernel = self.world.kernel.random, self.world.kernel
        for _ in range(random.choice([1, 2, 3])):
            kernel.rest(random.random() * 0.7 * lease._hold.ttl)
            self.world.judge.look()
            if not lease.held:
                return
            if random.random() < 0.1:
                lease.renew()
