"""Elections: what a candidate does, and the rules for who leads.

A process campaigns on threads of its own, beside whatever else its workers do, and ends each campaign in one of the
ways there are: by `stop`, by the work's end or its error, by closing the client while somebody leads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pglease import current
from pglease.errors import PgleaseError
from pglease.handles import HeldLease
from pglease.primitives.configs import LeaderElectionConfig
from pglease.primitives.election import LeaderElection
from pglease.records import Lease, Released
from tests.simulation.judge import WATCHDOG, Judge
from tests.simulation.kernel import Thread

if TYPE_CHECKING:
    from tests.simulation.store import Call
    from tests.simulation.world import Member

ROLE = "chair"
LONGEST_LEAVE = 32.0
"""Seconds that the end of a campaign may take beside its work: three conversations with the store, and a release."""


class Mishap(Exception):
    """What a leader's work raises."""


@dataclass(eq=False)
class Work:
    """One piece of a leader's work."""

    candidate: Candidate
    election: LeaderElection
    lease: HeldLease


@dataclass
class Elections:
    """Judges who leads. One for a simulation."""

    judge: Judge
    at_work: list[Work] = field(default_factory=list)
    begun: list[tuple[Member, LeaderElection]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.judge.server.audit = self.audit

    def audit(self, call: Call, before: dict[str, Any]) -> None:
        """Look at what a request has changed: one leads, and nobody gives the role back while its work goes on."""
        self.judge.audit(call, before)
        self._one_leads()
        if call.verb == "release" and call.args[0] == ROLE and isinstance(call.value, Released):
            for work in self._at_work():
                if work.lease._hold.lease_id == call.args[1] and work.lease._hold.loss is None:
                    self.judge.wrong("order", f"{_who(work)} gave the role back while its work went on")

    @contextlib.contextmanager
    def working(self, work: Work) -> Iterator[None]:
        """Let somebody work; nobody else leads at this moment, and whoever works on has been told of its loss."""
        self.judge.counts["pieces of a leader's work"] += 1
        self._one_leads()
        promised = not self.judge.promises_nothing(self.judge.belief(work.lease._hold))
        for other in self._at_work() if promised else ():
            if other.lease._hold is not work.lease._hold:
                self._was_told(other)
        self.at_work.append(work)
        try:
            yield
        finally:
            self.at_work.remove(work)

    def _one_leads(self) -> None:
        leaders = self.leaders()
        if len(leaders) > 1:
            self.judge.wrong("leads", f"{' and '.join(member.name for member in leaders)} lead")

    def leaders(self) -> list[Member]:
        """Return the processes that say they lead, one for each election of theirs that does."""
        return [
            member
            for member, election in self.begun
            if election._term is not None and not member.dead and self._leads(member, election)
        ]

    def _leads(self, member: Member, election: LeaderElection) -> bool:
        """Ask the real code, by that process's clock; what promises nothing is left out."""
        term = election._term
        leads = self.judge.ask(member, lambda: election.is_leader)
        return leads and term is not None and not self.judge.promises_nothing(self.judge.belief(term.lease._hold))

    def _was_told(self, work: Work) -> None:
        hold, process, now = work.lease._hold, work.candidate.member, self.judge.kernel.now
        told = hold.loss is not None and (hold._lost is None or hold._lost.is_set())
        if told or self.judge.promises_nothing(self.judge.belief(hold)):
            return
        due = process.moment(hold.due)
        excused = now <= due + WATCHDOG or process.stopped(due - 0.001, now) or self.judge.kernel.stalls
        if hold.loss is not None or now < due or not excused:
            self.judge.wrong("told", f"{_who(work)} works on, and was not told that it leads no more")

    def over(self, election: LeaderElection) -> None:
        """A term of an election is over, or all of it is: nothing of its work goes on."""
        for work in self._at_work():
            if work.election is election:
                self.judge.wrong("order", f"{_who(work)} was done with the role while its work went on")

    def end(self) -> None:
        """All is over."""
        for work in self._at_work():
            self.judge.wrong("stuck", f"the work of {_who(work)} did not end")

    def _at_work(self) -> list[Work]:
        return [work for work in self.at_work if not work.candidate.member.dead]


def _who(work: Work) -> str:
    return f"{work.candidate.member.name} (token {work.lease.fencing_token})"


class Candidate:
    """One process that stands for the role, again and again."""

    def __init__(self, member: Member) -> None:
        self.member, self.world = member, member.world
        self.done: set[LeaderElection] = set()

    def run(self) -> None:
        """Stand for it in one way after the other, until the time is over."""
        world, random = self.world, self.world.kernel.random
        while world.kernel.now < world.until:
            ttl = random.choice(world.plan.ttls)
            way = random.choice([self.campaign, self.campaign, self.lead_here, self.once, self.until_stopped])
            election = self._election(ttl)
            with contextlib.suppress(PgleaseError, Mishap):
                way(election, ttl)
            self.done.add(election)
            world.kernel.rest(random.expovariate(2.0 / ttl))
        self.member.leave()

    def _election(self, ttl: float) -> LeaderElection:
        random = self.world.kernel.random
        election = LeaderElection(
            self.member.client,
            ROLE,
            ttl,
            on_started=lambda lease: self.lead(election, lease),
            on_stopped=lambda: self.world.elections.over(election),
            on_new_leader=self._hear if random.random() < 0.5 else None,
            defer=random.choice([0.0, 0.0, 0.3 * ttl]),
        )
        self.world.elections.begun.append((self.member, election))
        return election

    def _hear(self, record: Lease) -> None:
        self.world.judge.counts["leaders heard of"] += 1
        if record.task_name != ROLE:
            self.world.judge.wrong("leads", f"{self.member.name} was told of {record.task_name}")

    # -- ways to campaign ----------------------------------------------------------------------------------------------

    def campaign(self, election: LeaderElection, ttl: float) -> None:
        """Begin, meddle, and end it; or leave that to whoever closes the client."""
        random, kernel = self.world.kernel.random, self.world.kernel
        election.start()
        for _ in range(random.choice([1, 2, 4])):
            kernel.rest(random.random() * 1.5 * ttl)
            if kernel.now >= self.world.until:
                break
            with contextlib.suppress(PgleaseError):
                self._meddle(election, ttl)
        if random.random() < 0.8:
            self.stop(election)

    def lead_here(self, election: LeaderElection, ttl: float) -> None:
        """Lead on this thread, once or again and again."""
        self._stop_later(election, ttl)
        election.lead(lambda lease: self.lead(election, lease), repeat=self.world.kernel.random.random() < 0.3)

    def once(self, election: LeaderElection, ttl: float) -> None:
        """Campaign until it has led once."""
        self._stop_later(election, ttl)
        election.run_once(lambda lease: self.lead(election, lease), lambda: self.world.elections.over(election))

    def until_stopped(self, election: LeaderElection, ttl: float) -> None:
        """Campaign on this thread."""
        self._stop_later(election, ttl)
        election.run(lambda lease: self.lead(election, lease))

    def _stop_later(self, election: LeaderElection, ttl: float) -> None:
        seconds = self.world.kernel.random.random() * 3 * ttl

        def stop() -> None:
            self.world.kernel.rest(seconds)
            while election not in self.done:  # it may not have begun yet
                self.stop(election)
                self.world.kernel.rest(1.0)

        Thread(stop, name="stopper", process=self.member).start()

    def stop(self, election: LeaderElection) -> None:
        """End a campaign; that takes no longer than was said, or than its work."""
        world, began = self.world, self.world.kernel.now
        timeout = world.kernel.random.choice([None, None, 0.0, 1.0])
        ended = election.stop(timeout)
        longest = LONGEST_LEAVE + 2 * max(world.plan.ttls)
        self.member.in_time(f"stop({timeout})", began, longest if timeout is None else timeout)
        if ended:
            world.elections.over(election)

    def _meddle(self, election: LeaderElection, ttl: float) -> None:
        """Do something of all that one may do meanwhile."""
        random = self.world.kernel.random
        ways: list[Callable[[], object]] = [
            lambda: election.step_down(random.choice([None, 0.0, random.random() * ttl])),
            election.request_step_down,
            lambda: election.reconfigure(LeaderElectionConfig(ttl=ttl * random.choice([0.5, 2.0]))),
            election.leader_only(lambda: self.lead(election, current.current_lease(ROLE))),
            lambda: election.wait_for_leader(ttl),
            lambda: election.wait_until_lost(ttl),
        ]
        random.choice(ways)()

    # -- leading -------------------------------------------------------------------------------------------------------

    def lead(self, election: LeaderElection, lease: HeldLease | None) -> None:
        """Work until it is done or told to end; sometimes a little longer, or it fails."""
        random, kernel, world = self.world.kernel.random, self.world.kernel, self.world
        assert lease is not None
        ttl = lease._hold.ttl
        with world.elections.working(Work(self, election, lease)):
            for _ in range(random.choice([1, 3, 30])):
                if lease.lost.wait(random.random() * ttl) or kernel.now >= world.until:
                    break
                world.judge.look()
            if random.random() < 0.2:
                kernel.rest(random.random() * ttl)
            if random.random() < 0.1:
                raise Mishap
