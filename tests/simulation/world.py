"""One seed: a server, a few processes that run the real client, and what goes wrong meanwhile.

Each seed turns on a random few of the faults (a swarm), so that rare ones meet each other without drowning in the
common ones. When the bad time is over everything is mended, and everybody must come to an end.
"""

from __future__ import annotations

import contextlib
import logging
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

from pglease import (
    bell,
    callers,
    client,
    clock,
    giveback,
    handles,
    heartbeat,
    identity,
    listening,
    loops,
    notices,
    taking,
    waiting,
    watchdog,
    watching,
)
from pglease.backends import hybrid_keeper
from pglease.bonds import Bond
from pglease.client import PGLease
from pglease.errors import BackendUnavailable, LeaseLostError, PgleaseError
from pglease.handles import HeldLease, Hold
from pglease.heartbeat import HeartbeatManager
from pglease.primitives import election, herald, read_write, semaphore, talk
from pglease.records import Handover, Loss
from pglease.watchdog import Watchdog
from tests.simulation import halves, sessions
from tests.simulation import kernel as virtual
from tests.simulation.elections import Candidate, Elections, Mishap
from tests.simulation.judge import Judge
from tests.simulation.kernel import Kernel, Process, Thread
from tests.simulation.loops import Tasks
from tests.simulation.sessions import Hybrid
from tests.simulation.shares import SLOTS, WAYS, Sharer, Shares
from tests.simulation.store import Link, Server, Weather

FAULTS = (
    "delays",
    "losses",
    "doubles",
    "cuts",
    "pauses",
    "crashes",
    "freezes",
    "failovers",
    "cleanups",
    "forces",
    "locks",
    "stalls",
    "steps",
    "rates",
    "cancels",
    "stragglers",
)
"""What a seed may turn on."""
CHOSEN = (
    "cuts", "pauses", "crashes", "freezes", "failovers", "cleanups", "forces", "steps", "cancels", "stragglers",
)  # fmt: skip
"""Those that come at a moment of their own."""
OFTEN = {"cleanups": 3.0, "cancels": 10.0, "stragglers": 5.0}
"""How many times as often as the others some of them come."""
SHARED = (("group",), ("slot",), ("slot",), ("read", "write"), ("read", "write"), WAYS)
"""What workers of one seed may do with what is made of several leases."""
HEAR_LATE = frozenset({"delays", "cuts", "pauses", "freezes", "stalls"})
"""Faults by which a process hears late of what happens to its connections."""
PATIENCE = 10.0
"""The box of one conversation with the store: what `PGLease` takes by default."""
LONGEST_LOOK = 40.0
"""Seconds that the judge's last looks may be ahead, and what is on its way."""
GRACE = 1.0
"""Seconds of scheduling and of last looks that an answer may come late by."""


@dataclass
class Plan:
    """What a seed has chosen."""

    faults: frozenset[str]
    ttls: tuple[float, ...]
    names: tuple[str, ...]
    processes: int
    workers: int
    seconds: float
    wakes: bool
    loops: bool = False
    shares: tuple[str, ...] = ()
    groups: bool = False
    elections: bool = False
    rushes: bool = False
    bonds: str = ""
    bound: int | None = None
    belated: bool = False
    weather: Weather = field(default_factory=Weather)
    rates: float = 0.0
    intensity: float = 3.0

    def told(self) -> str:
        """Say it, in an order that no hash decides."""
        return str(replace(self, faults=tuple(sorted(self.faults))))  # type: ignore[arg-type]

    @property
    def calm(self) -> bool:
        """Whether nothing is turned on that can cost a lease."""
        return not self.faults & {
            "delays", "losses", "cuts", "pauses", "freezes", "failovers", "forces", "locks", "stalls", "crashes",
            "stragglers",
        } and not self.bonds  # fmt: skip

    @property
    def stretches(self) -> tuple[float, ...]:
        """By how many times its ttl a lease may be renewed: by much, where renewals are late."""
        return (0.5, 2.0, 6.0) if "stragglers" in self.faults else (0.5, 2.0)

    @property
    def longest_ttl(self) -> float:
        """The longest that anybody asks for."""
        return max(self.ttls) * max(self.stretches)


def plan(random: Any) -> Plan:
    """Choose what one seed is about."""
    faults = frozenset(fault for fault in FAULTS if random.random() < 0.3)
    shortest = random.choice([1.0, 2.0, 3.0, 6.0, 10.0, 20.0])
    ttls = (shortest,) if random.random() < 0.6 else (shortest, 2 * shortest)
    weather = Weather(
        delay=random.choice([0.002, 0.02, 0.1]) if shortest >= 2 else 0.01,
        slow=random.choice([0.02, 0.1]) if "delays" in faults else 0.0,
        lost=random.choice([0.01, 0.05, 0.2]) if "losses" in faults else 0.0,
        doubled=random.choice([0.05, 0.3]) if "doubles" in faults else 0.0,
        busy=random.choice([0.02, 0.2]) if "locks" in faults else 0.0,
        waits=0.5 if "cleanups" in faults else 0.0,
    )
    shares = random.choice(SHARED) if random.random() < 0.2 else ()
    loops = random.random() < 0.2
    if loops and random.random() < 0.8:
        faults |= {"cancels"}
    return Plan(
        faults=faults,
        ttls=ttls,
        names=("a", "b", "c")[: random.choice([2, 3] if shares else [1, 1, 2, 3])],
        processes=random.choice([2, 2, 3, 4]),
        workers=random.choice([1, 1, 1, 2]),
        seconds=shortest * random.choice([4.0, 8.0]),
        wakes=random.random() < 0.3,
        weather=weather,
        rates=(0.005 if "steps" in faults else 0.04) if "rates" in faults else 0.0,
        intensity=random.choice([1.0, 3.0, 8.0]),
        loops=loops,
        shares=shares,
        groups=bool(shares) and random.random() < 0.5,
        elections=random.random() < 0.15,
        rushes="slot" in shares and random.random() < 0.7,
    )


def is_mild(seed: int) -> bool:
    """Choose whether nothing but cancellations troubles those on loops, by a stream of its own as `bonds_of`.

    Then it can be told what a cancelled task has left behind; in rough weather much may be left to lapse.
    """
    return random.Random(f"mild {seed}").random() < 0.4


def bonds_of(seed: int, faults: frozenset[str]) -> str:
    """Choose whether holds are bound to sessions, by a stream of its own: other seeds keep their course.

    Strictly where a holder may hear late of its session's end: then what the fast kind promises is less.
    """
    if random.Random(f"bonds {seed}").random() >= 0.15:
        return ""
    return "strict" if faults & HEAR_LATE else "fast"


def most_bound(seed: int) -> int | None:
    """Choose how many leases a client binds to its session at most, by a stream of its own; None is the default."""
    chosen = random.Random(f"bound {seed}")
    return chosen.choice([1, 1, 2]) if chosen.random() < 0.3 else None


def is_belated(seed: int, bonds: str) -> bool:
    """Choose whether grants are heard of late, by a stream of its own: other seeds keep their course."""
    return random.Random(f"belated {seed}").random() < (0.5 if bonds else 0.2)


class Member(Process):
    """A process that uses the library: one client, one watchdog, a few workers."""

    def __init__(self, world: World, name: str, offset: float, rate: float) -> None:
        super().__init__(name, offset, rate)
        self.world = world
        split = world.plan.loops and not world.plan.bonds and halves.are_asked(world.seed)
        self.link = halves.SplitLink(self) if split else Link(world.kernel, world.server, self)
        self.watchdog = Watchdog()
        self.wall = 0.0
        self.busy = 0
        self.sharer = Sharer(self)
        self.tasks: Tasks | None = None
        with world.as_process(self):
            bonds = world.plan.bonds
            self.client = PGLease(
                Hybrid(self.link, strict=bonds == "strict", most=world.plan.bound) if bonds else self.link,  # type: ignore[arg-type]  # its `list` hides the builtin within the class, as in the protocol
                name,
                on_lease_lost=lambda lost: world.judge.called_back(self, lost),
                on_at_risk=lambda _name: world.judge.counts.update(["warnings that little is left"]),
            )

    def begin(self, workers: int, *, in_a_loop: bool) -> None:
        """Start its workers: threads, or tasks of one."""
        self.busy = workers
        if self.world.plan.elections and self.world.kernel.random.random() < 0.8:
            self.busy += 1
            Thread(Candidate(self).run, name="candidate", process=self).start()
        if in_a_loop:
            self.tasks = Tasks(self)
            Thread(self.tasks.run, name="loop", process=self).start()
            return
        for number in range(workers):
            Thread(self.work, name=f"worker-{number}", process=self).start()

    # -- what a worker does --------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Take leases and leave them until the time is over."""
        world, random = self.world, self.world.kernel.random
        while world.kernel.now < world.until:
            name, ttl = random.choice(world.plan.names), random.choice(world.plan.ttls)
            try:
                self.choose(random)(name, ttl)
            except LeaseLostError:
                world.judge.counts["blocks that ended in a loss"] += 1
            except PgleaseError as error:
                world.judge.counts[f"refused: {type(error).__name__}"] += 1
                self.came_to_nothing(name)
            world.kernel.rest(random.expovariate(2.0 / ttl))
        self.leave()

    def leave(self) -> None:
        """Have one worker less; the last one closes the client."""
        self.busy -= 1
        if not self.busy:
            began = self.world.kernel.now
            self.client.close()
            self.in_time("close", began, 6.0)

    def choose(self, random: Any) -> Callable[[str, float], None]:
        """Return what to do next."""
        if self.world.plan.shares and random.random() < 0.8:
            return self.sharer.choose()
        ways = [self.block, self.wait, self.owned, self.patient, self.heir, self.forgetful]
        return random.choices(ways, [4, 4, 2, 2, 2, 1])[0]  # type: ignore[no-any-return]

    def block(self, name: str, ttl: float) -> None:
        """Ask once, in a block."""
        with self.client.acquire(name, ttl, **self.options(ttl)) as lease:
            if lease:
                self.use(lease)

    def wait(self, name: str, ttl: float) -> None:
        """Wait, in a block."""
        random = self.world.kernel.random
        seconds, began = random.random() * 2 * ttl, self.world.kernel.now
        fair = self.world.plan.wakes and random.random() < 0.5
        with self.client.acquire(name, ttl, wait=seconds, fair=fair, **self.options(ttl)) as lease:
            self.in_time("acquire(wait=…)", began, seconds + 2 * PATIENCE)
            if lease:
                self.use(lease)
            else:
                self.came_to_nothing(name)

    def owned(self, name: str, ttl: float) -> None:
        """Ask once; the client owns it."""
        if self.client.try_acquire(name, ttl):
            self.work_and_release(name, ttl)

    def patient(self, name: str, ttl: float) -> None:
        """Wait; the client owns it."""
        seconds, began = self.world.kernel.random.random() * 2 * ttl, self.world.kernel.now
        try:
            self.client.wait_for_lease(name, ttl, timeout=seconds, poll_interval=1.0)
        finally:
            self.in_time("wait_for_lease", began, seconds + 2 * PATIENCE)
        self.work_and_release(name, ttl)

    def work_and_release(self, name: str, ttl: float) -> None:
        """Hold an owned lease for a while."""
        self.world.kernel.rest(self.world.kernel.random.random() * 2 * ttl)
        self.client.release(name)

    def heir(self, name: str, ttl: float) -> None:
        """Go on with a lease that somebody handed over, if there is one; sometimes two want to."""
        world, random = self.world, self.world.kernel.random
        if not world.handovers:
            return self.block(name, ttl)
        handover = random.choice(world.handovers)
        if random.random() < 0.7:
            world.handovers.remove(handover)
        with self.client.adopt(handover) as lease:
            if lease:
                self.use(lease)
        return None

    def forgetful(self, name: str, ttl: float) -> None:
        """Take a lease and lose the handle."""
        context = self.client.acquire(name, ttl)
        lease = context.__enter__()
        if lease:
            self.world.kernel.rest(self.world.kernel.random.random() * ttl)
        del lease, context

    def come(self) -> None:
        """Ask for a slot beside whatever the workers do."""
        with contextlib.suppress(PgleaseError):
            self.sharer.slot("", self.world.kernel.random.choice(self.world.plan.ttls))

    def options(self, ttl: float) -> dict[str, Any]:
        """Return options for one acquisition."""
        random = self.world.kernel.random
        chosen: dict[str, Any] = {}
        if random.random() < 0.1:
            chosen["min_hold"] = random.random() * ttl
        elif random.random() < 0.1:
            chosen["max_hold"] = random.random() * 2 * ttl
        if random.random() < 0.1 and chosen.get("min_hold", 0.0) <= ttl:
            chosen["heartbeat"] = False
        return chosen

    def use(self, lease: HeldLease) -> None:
        """Work under a lease, looking at it now and then."""
        random, kernel, plan = self.world.kernel.random, self.world.kernel, self.world.plan
        ttl, undecided = min(lease._hold.ttl, max(plan.ttls)), "stragglers" in plan.faults
        for _ in range(random.choice([2, 4, 8] if undecided else [1, 2, 4])):
            kernel.rest(random.random() * ttl)
            self.world.judge.look()
            if not lease.held:
                return
            chance = random.random()
            if undecided and random.random() < 0.4:
                self.reconsider(lease, ttl)
            elif chance < 0.1:
                lease.renew()
            elif chance < 0.15:
                lease.renew(ttl * random.choice(plan.stretches))
            elif chance < 0.2:
                lease.ensure(ttl * random.random())
            elif chance < 0.25:
                lease.release()
            elif chance < 0.3:
                lease.set_metadata({"at": kernel.now})
            elif chance < 0.35:
                self.world.handovers.append(lease.transfer("whoever comes"))

    def reconsider(self, lease: HeldLease, ttl: float) -> None:
        """Renew by one ttl and then by another, while what asked for the first may be on its way still."""
        random, stretches = self.world.kernel.random, self.world.plan.stretches
        if random.random() < 0.5:
            self.link.straggles = random.random() * ttl
        with contextlib.suppress(BackendUnavailable):
            lease.renew(ttl * random.choice(stretches))
        lease.renew(ttl * random.choice(stretches))

    def came_to_nothing(self, name: str) -> None:
        """Have the judge see that nothing is left in the store, unless another worker may be asking for the same."""
        if self.world.plan.workers == 1 and not self.world.plan.rushes:
            self.world.judge.doubted(self, self.link, name, cancelled=self.tasks is not None)

    def in_time(self, what: str, began: float, seconds: float) -> None:
        """See to it that a call came back."""
        world = self.world
        took = world.kernel.now - began
        allowed = seconds / self.rate + self.stopped(began, world.kernel.now) + self.stolen + GRACE
        if took > allowed:
            world.judge.wrong("stuck", f"{what} in {self.name} took {took:.2f} s instead of {allowed:.2f} s")


class World:
    """Everything that one seed brings forth."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.kernel = Kernel(seed)
        virtual.use(self.kernel)
        self.plan = plan(self.kernel.random)
        if self.plan.loops and is_mild(seed):
            self.plan.faults, self.plan.rates = frozenset({"cancels"}), 0.0
            self.plan.weather = Weather(delay=self.plan.weather.delay)
        self.kernel.stalls = 0.02 if "stalls" in self.plan.faults else 0.0
        self.server = Server(self.kernel, self.plan.weather, keeps_history="failovers" in self.plan.faults)
        if self.plan.wakes:
            self.server.traits = replace(self.server.traits, wakes_waiters=True, fair=True)
        self.server.traits = replace(self.server.traits, groups=self.plan.groups)
        self.plan.bonds = bonds_of(seed, self.plan.faults)
        self.plan.bound = most_bound(seed)
        self.plan.belated = is_belated(seed, self.plan.bonds)
        self.sessions = self.server.bind() if self.plan.bonds else None
        self.judge = Judge(self.kernel, self.server, calm=self.plan.calm)
        if self.sessions is not None:
            self.judge.misleads = self.sessions.misleads
        self.shares, self.limit = Shares(self.judge), 3
        self.elections = Elections(self.judge)
        self.until = self.plan.seconds
        self.members: list[Member] = []
        self.handovers: list[Handover] = []
        self.knows_epochs = True

    @contextlib.contextmanager
    def as_process(self, process: Process) -> Iterator[None]:
        """Let what follows be done by that process, without a thread."""
        before, self.kernel.acting = self.kernel.acting, process
        try:
            yield
        finally:
            self.kernel.acting = before

    def run(self) -> None:
        """Let the seed happen, then mend everything, and judge."""
        for _ in range(self.plan.processes):
            self.new_member()
        self.plan_faults()
        self.kernel.run(self.until)
        self.mend()
        longest = self.plan.longest_ttl + PATIENCE  # and one conversation
        if not self.kernel.run(self.until + 5 * longest + 40.0, self.all_done):
            stuck = [f"{m.name}" for m in self.members if not m.dead and m.busy]
            self.judge.wrong("stuck", f"{', '.join(stuck)} did not come to an end")
        self.come_to_rest(self.kernel.now + 1.2 * longest)
        self.everything_is_free()
        self.judge.end(list(self.members))
        self.elections.end()

    def all_done(self) -> bool:
        """Tell whether every worker has ended."""
        return not any(member.busy and not member.dead for member in self.members)

    def come_to_rest(self, until: float) -> None:
        """Let time pass until nothing is left: for as long as a hold may last that nobody renews, if need be."""
        pause = LONGEST_LOOK
        while self.kernel.now < until and (pause == LONGEST_LOOK or any(self.left_over())):
            self.kernel.run(min(until, self.kernel.now + pause))
            pause = 5.0

    def left_over(self) -> Iterator[str]:
        """Yield what goes on though everybody has ended."""
        now = self.server.store._store.now()
        for name, row in self.server.store.rows.items():
            if row.expires_at > now:
                yield f"{name} is still held by {row.owner_id}"
        if self.sessions is not None and (left := self.sessions.left_over()):
            yield f"a lock is left over in {', '.join(left)}"
        for member, begun in self.elections.begun:
            if not member.dead and not begun._has_ended():
                yield f"the campaign of {member.name} did not end"

    def everything_is_free(self) -> None:
        """See to it that nothing is held that nobody knows of."""
        for what in self.left_over():
            self.judge.wrong("end", what)

    def new_member(self) -> None:
        """Start a process."""
        random = self.kernel.random
        rate = 1.0 + random.uniform(-1, 1) * self.plan.rates
        member = Member(self, f"p{len(self.members)}", random.random() * 1e5, rate)
        self.members.append(member)
        member.begin(self.plan.workers, in_a_loop=self.plan.loops and random.random() < 0.7)

    # -- what goes wrong -----------------------------------------------------------------------------------------------

    def plan_faults(self) -> None:
        """Scatter the faults of this seed over its time."""
        random, chosen = self.kernel.random, self.plan.faults
        for fault in CHOSEN:
            if fault in chosen:
                often = self.plan.intensity * OFTEN.get(fault, 1.0)
                for _ in range(1 + int(random.expovariate(1.0 / often))):
                    self.kernel.at(random.random() * self.until, self.fault(fault))
        for happen, times in self.plan_aimed():
            for _ in range(times):
                self.kernel.at(random.random() * self.until, happen)
        if self.plan.faults & {"steps"}:
            for member in self.members:
                self.kernel.at(random.random() * self.until, self.step_wall_clock(member))

    def plan_aimed(self) -> Iterator[tuple[Callable[[], None], int]]:
        """Choose how often happens what is aimed at one thing that may go wrong."""
        random, chosen, plan = self.kernel.random, self.plan.faults, self.plan
        if "slot" in plan.shares:
            yield self.set_limit, random.choice([1, 4])
        if plan.rushes:
            yield self.rush, random.choice([4, 10])
        if plan.bonds:
            yield self.fault("sessions"), random.choice([1, 4, 12])
        if plan.belated:
            yield self.fault("belated"), random.choice([4, 12, 30])
        if "cuts" in chosen and max(plan.ttls) >= PATIENCE:
            yield self.deafen, 6
        if plan.elections and "pauses" in chosen:
            yield self.pause_leader, 4

    def fault(self, fault: str) -> Callable[[], None]:
        """Return what makes one fault happen."""
        happen: Callable[[], None] = getattr(self, fault.rstrip("s") if fault != "crashes" else "crash")

        def do() -> None:
            self.judge.counts[f"fault: {fault}"] += 1
            self.judge.note(f"fault: {fault}")
            happen()

        return do

    def some_member(self) -> Member | None:
        alive = [member for member in self.members if not member.dead]
        return self.kernel.random.choice(alive) if alive else None

    def some_time(self) -> float:
        return self.kernel.random.random() * 1.5 * self.kernel.random.choice(self.plan.ttls)

    def cut(self) -> None:
        """Cut a process off: both ways, one way, or by refusing it."""
        if (member := self.some_member()) is not None:
            until, link = self.kernel.now + self.some_time(), member.link
            way = self.kernel.random.choice(["both", "out", "in", "refused"])
            if way != "in":
                link.cut_out_until = max(link.cut_out_until, until)
            if way in {"both", "in"}:
                link.cut_in_until = max(link.cut_in_until, until)
            link.refused = way == "refused"
            if self.sessions is not None:
                self.sessions.cut(link)
            for ear in link.ears:
                ear.break_off()

    def deafen(self) -> None:
        """Let a process hear nothing once it asks for a lease, and for longer than it asks."""
        if (member := self.some_member()) is not None:
            member.link.deaf_for = 2 * PATIENCE

    def belated(self) -> None:
        """Let the answer to the next grant of some process come too late, or the connection break in its place."""
        if (member := self.some_member()) is not None:
            member.link.belated = self.kernel.random.choice(["late", "broken"])

    def pause(self) -> None:
        """Stop a process for a while, as SIGSTOP does."""
        if (member := self.some_member()) is not None:
            self.stop(member, self.kernel.now + self.some_time())

    def pause_leader(self) -> None:
        """Stop whoever leads, for long enough that another may."""
        for member in self.elections.leaders():
            self.stop(member, self.kernel.now + (1.0 + self.kernel.random.random()) * max(self.plan.ttls))

    def stop(self, process: Process, until: float) -> None:
        """Let it stand still."""
        process.paused.append((max(self.kernel.now, process.paused_until), until))
        process.paused_until = max(process.paused_until, until)

    def crash(self) -> None:
        """Kill a process; another takes its place."""
        if (member := self.some_member()) is not None:
            member.dead = True
            if self.sessions is not None:
                self.sessions.died(member.link)
            self.kernel.after(self.some_time(), self.new_member)

    def cancel(self) -> None:
        """Cancel a task of some process's, wherever it is."""
        if (member := self.some_member()) is not None and member.tasks is not None:
            member.tasks.cancel_one()

    def straggler(self) -> None:
        """Let the next renewal of some process come through late, after what it asks for meanwhile."""
        if (member := self.some_member()) is not None:
            member.link.straggles = self.some_time()

    def session(self) -> None:
        """End some process's session, as an administrator does; it may not hear of it, where that is allowed for.

        A server that stands still ends none.
        """
        if self.sessions is None or self.server.frozen_until > self.kernel.now or not (some := self.sessions.in_use()):
            return
        line = self.kernel.random.choice(some)
        if self.plan.bonds == "strict" and self.kernel.random.random() < 0.7:
            member = line.link.process
            until = self.kernel.now + (0.5 + self.kernel.random.random()) * max(self.plan.ttls)
            if self.kernel.random.random() < 0.5:
                self.stop(member, until)
            else:
                line.link.cut_in_until = max(line.link.cut_in_until, until)
                self.sessions.cut(line.link)
        self.sessions.end(line.mark.pid)

    def freeze(self) -> None:
        """Stop the server for a while; what arrives meanwhile is applied afterwards."""
        self.server.frozen_until = max(self.server.frozen_until, self.kernel.now + self.some_time())

    def failover(self) -> None:
        """Let a replica take over that is a little behind."""
        lag = self.kernel.random.choice([0.0, 0.05, 1.0, 5.0])
        self.server.fail_over(lag, knows_epochs=self.knows_epochs)
        self.judge.failed_over_at = self.kernel.now
        if self.sessions is not None:
            self.sessions.end_all()
        for member in self.members:
            for ear in member.link.ears:
                ear.break_off()

    def cleanup(self) -> None:
        """Have some process delete old rows."""
        if (member := self.some_member()) is not None:
            Thread(self.clean, (member,), "cleanup", process=member).start()

    def clean(self, member: Member) -> None:
        with contextlib.suppress(PgleaseError):
            member.client.cleanup_expired(older_than=0.0)

    def force(self) -> None:
        """Have an operator end whatever is held."""
        known = sorted(self.server.store.rows) if self.plan.shares or self.plan.elections else self.plan.names
        name = self.kernel.random.choice(known) if known else ""
        row, member = self.server.store.rows.get(name), self.some_member()
        if row is not None and member is not None:
            Thread(self.force_out, (member, name, row.fencing_token), "operator", process=member).start()

    def force_out(self, member: Member, name: str, token: int) -> None:
        with contextlib.suppress(PgleaseError):
            member.client.force_release(name, token)

    def step(self) -> None:
        """Step the server's clock, forwards by no more than the margin has left."""
        forwards = 0.02 * min(self.plan.ttls) * 0.5
        self.server.stepped += self.kernel.random.choice([forwards * 0.1, -self.some_time() * 0.2])

    def set_limit(self) -> None:
        """Let the semaphore have another limit: whoever holds beyond it ends in its time."""
        self.limit = self.kernel.random.choice([1, 2, 3])

    def rush(self) -> None:
        """Leave room for one more, for a while, and have somebody of each process ask for a slot at this moment."""
        now = self.server.store._store.now()
        held = [name for name, row in self.server.store.rows.items() if name.startswith(SLOTS) and not row.over(now)]
        self.limit = len(held) + 1
        for member in self.members:
            if not member.dead:
                Thread(member.come, name="comer", process=member).start()
        self.kernel.after(self.some_time(), self.lift_limit)

    def lift_limit(self) -> None:
        """Let more have a slot again."""
        self.limit = 5

    def step_wall_clock(self, member: Member) -> Callable[[], None]:
        """Step a process's wall clock, which nothing reads."""

        def do() -> None:
            member.wall += self.kernel.random.choice([-1, 1]) * self.some_time()

        return do

    def mend(self) -> None:
        """End all that is wrong; a pause comes to its own end."""
        now = self.kernel.now
        self.server.frozen_until = min(self.server.frozen_until, now)
        weather = self.server.weather
        weather.slow = weather.lost = weather.doubled = weather.busy = weather.waits = 0.0
        self.kernel.stalls = 0.0
        for member in self.members:
            member.link.cut_out_until = member.link.cut_in_until = now


# -- under the real code -----------------------------------------------------------------------------------------------

MODULES = (
    bell, callers, election, giveback, handles, heartbeat, herald, hybrid_keeper, listening, notices, read_write,
    semaphore, taking, talk, waiting, watchdog, watching,
)  # fmt: skip
STAND_INS = {"threading": virtual.Threading, "queue": virtual.Queue, "time": virtual.Time, "random": virtual.Random()}


class Alarm(logging.Handler):
    """Notes what the library logs as a failure of its own: with a traceback."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0] is not Mishap:
            self.heard.append(f"{record.getMessage()}\n{''.join(traceback.format_exception(*record.exc_info))}")


class Stage:
    """Puts the stand-ins under the real code, in this interpreter, and takes them away again."""

    def __init__(self) -> None:
        self.alarm = Alarm()
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        for module in MODULES:
            for name, stand_in in STAND_INS.items():
                if hasattr(module, name):
                    self.patch(module, name, stand_in)
        self.patch(waiting, "weakref", virtual.Weakref)
        self.patch(client, "weakref", virtual.Weakref)
        self.rest_on(election.Campaign, virtual.Thread)
        self.patch(clock, "now", virtual.clock)
        self.patch(identity, "current_caller", virtual.caller)
        self.patch(loops, "_asking", lambda: self._tasks().asking)
        self.patch(loops, "_keeping", lambda: self._tasks().keeping)
        self.patch(loops, "_arrived", halves.arrived)
        self.patch(identity, "new_lease_id", lambda: f"{virtual._kernel.random.getrandbits(128):032x}")
        self.patch(watchdog, "watch", self._watch)
        self.patch(watchdog, "forget", self._forget)
        self.patch(watchdog, "LONGEST_NAP", 1e6)  # for clocks that stand still in suspend: these do not
        for thing, name, stand_in in sessions.STAND_INS:
            self.patch(thing, name, stand_in)
        self.follow()
        logger = logging.getLogger("pglease")
        logger.addHandler(self.alarm)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("pglease").removeHandler(self.alarm)
        while self._undo:
            self._undo.pop()()

    def patch(self, thing: Any, name: str, value: Any) -> None:
        """Replace an attribute until the stage is left."""
        before = thing.__dict__[name]
        self._undo.append(lambda: setattr(thing, name, before))
        setattr(thing, name, value)

    def rest_on(self, kind: Any, base: type) -> None:
        """Give a class another base until the stage is left."""
        before = kind.__bases__
        self._undo.append(lambda: setattr(kind, "__bases__", before))
        kind.__bases__ = (base,)

    def _watch(self, thing: watchdog.Watched) -> None:
        self._here().watchdog.watch(thing)

    def _forget(self, thing: watchdog.Watched) -> None:
        self._here().watchdog.forget(thing)

    def _tasks(self) -> Tasks:
        tasks = self._here().tasks
        assert tasks is not None, "only tasks have somebody else make their calls"
        return tasks

    def _here(self) -> Member:
        kernel = virtual._kernel
        process = kernel.running.process if kernel.running is not None else kernel.acting
        assert isinstance(process, Member)
        return process

    def follow(self) -> None:
        """Let the judge see each hold's beginning, each renewal that is believed, and each loss. Changes nothing."""
        begin, confirm, lost, sever = Hold.__init__, Hold.confirm, HeartbeatManager.lost, Bond.sever

        def followed_begin(hold: Hold, *args: Any, **options: Any) -> None:
            begin(hold, *args, **options)
            member = self._here()
            member.world.judge.register(hold, member, member.link)

        def followed_confirm(hold: Hold, term: Any) -> bool:
            confirmed = confirm(hold, term)
            if confirmed:
                self._here().world.judge.confirmed(hold)
            return confirmed

        def followed_lost(manager: HeartbeatManager, hold: Hold, loss: Loss) -> None:
            if not virtual._kernel.over:
                self._here().world.judge.lost(manager, hold, loss)
            lost(manager, hold, loss)

        def followed_sever(bond: Bond, loss: Loss) -> None:
            sever(bond, loss)
            if not virtual._kernel.over:
                self._here().world.judge.severed(bond)

        self.patch(Bond, "sever", followed_sever)
        self.patch(Hold, "__init__", followed_begin)
        self.patch(Hold, "confirm", followed_confirm)
        self.patch(HeartbeatManager, "lost", followed_lost)


@dataclass
class Outcome:
    """What one seed came to."""

    seed: int
    violations: list[str]
    counts: Counter[str]
    seconds: float
    trace: list[str] | None = None


def simulate(stage: Stage, seed: int, *, trace: bool = False, change: Callable[[World], None] | None = None) -> Outcome:
    """Let one seed happen on a stage."""
    stage.alarm.heard.clear()
    world = World(seed)
    world.judge.trace = [world.plan.told()] if trace else None
    if change is not None:
        change(world)
    try:
        world.run()
    finally:
        violations = [*world.judge.violations, *(f"logged: {text}" for text in stage.alarm.heard)]
        seconds, counts = world.kernel.now, Counter(world.judge.counts)
        logging.getLogger("pglease").disabled = True
        world.kernel.end()
        client._clients.clear()  # or the end of this interpreter would close them
        for member in world.members:
            if member.tasks is not None:
                with world.as_process(member):
                    member.tasks.end()
        for member in world.members:  # a crash closes nothing, and the finalizer would keep the callbacks, and so us
            member.client._finalizer.detach()
        logging.getLogger("pglease").disabled = False
    if world.sessions is not None:
        counts["takeovers from dead sessions"] = world.sessions.takeovers
    counts.update({f"call: {verb}": count for verb, count in world.server.calls.items()})
    return Outcome(seed, violations, counts, seconds, world.judge.trace)
