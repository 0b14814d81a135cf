"""Judges a simulation while it runs: what reliability demands, said as assertions over everything that happens.

It sees both sides, which nobody else does: what the server did, and what each process believes at the same moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pglease import options
from pglease.handles import Hold
from pglease.records import Granted, Loss, Refused, Released
from tests.simulation.kernel import Kernel, Process
from tests.simulation.store import Call, Link, Server

if TYPE_CHECKING:
    from pglease.bonds import Bond
    from pglease.heartbeat import HeartbeatManager

T = TypeVar("T")

WATCHDOG = 0.05
"""Seconds after its deadline by which a loss is told, however bad the network is."""

LONGEST_BOX = 5.0
"""Seconds that renewals may take which were begun before a hold was there to be considered."""
TOO_LATE = 0.5
"""Seconds that are left of a hold when it begins, or it was asked for too long before to be renewed in time."""
GIVEN_BACK = 1.0
"""Seconds after which, over a good network, nothing is left of an acquisition that came to nothing."""
WITHOUT_AN_ANSWER = 4.0
"""Seconds by which it comes later behind two others whose answers do not come through."""
LONGEST_CALL = 10.0
"""Seconds for which a call may wait for an answer that is lost."""
GIVEN_BACK_AT_LAST = 16.0
"""The same over one that loses messages: then all four tries are over, of up to three requests each."""
SERVED = 2.0
"""Seconds after its thaw within which a server serves what was waiting for it."""
THAW = 20.0
"""Seconds for which a request may be older than the end of the conversation that it belongs to, and more."""
REMEMBERED = 8
"""How many holds of a name are followed; those that are over among them, for they must stay over."""


@dataclass(eq=False)
class Belief:
    """One hold, as the judge follows it."""

    hold: Hold
    process: Process
    link: Link
    began: float
    over: bool = False
    losses: int = 0
    callbacks: int = 0
    attempts_before: int = 0


class Judge:
    """Knows every grant and every hold, and writes down what must not be."""

    def __init__(self, kernel: Kernel, server: Server, *, calm: bool) -> None:
        self.kernel, self.server, self.calm = kernel, server, calm
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.trace: list[str] | None = None
        self.failed_over_at = float("-inf")
        self.misleads: Callable[[str, str], bool] = lambda _name, _lease_id: False
        self._beliefs: dict[Hold, Belief] = {}
        self._by_name: dict[str, list[Belief]] = {}
        self._grants: set[tuple[str, str, int]] = set()
        self._forced: set[tuple[Any, ...]] = set()
        self._released: set[tuple[Any, ...]] = set()
        self._severed: dict[Bond, float] = {}
        self._last_token: dict[str, int] = {}
        self._called_for: dict[tuple[str, str], int] = {}
        self._lost_of: Counter[tuple[str, str]] = Counter()
        server.audit = self.audit

    def note(self, what: str) -> None:
        """Write down what happened, if somebody reads it."""
        if self.trace is not None:
            who = self.kernel.running
            by = f"{who.process.name}/{who.name}" if who else "world"
            self.trace.append(f"{self.kernel.now:10.4f}  {by:24} {what}")

    def wrong(self, rule: str, what: str) -> None:
        """Note a violation."""
        self.violations.append(f"{rule}: {what}, at {self.kernel.now:.4f}")
        self.note(f"VIOLATION {rule}: {what}")

    # -- what the server does ------------------------------------------------------------------------------------------

    def audit(self, call: Call, before: dict[str, tuple[str | None, int, Any]]) -> None:
        """Look at what a request has changed."""
        if self.trace is not None:
            self.note(f"server: {call.verb}{call.args} -> {call.value}")
        if isinstance(call.value, Refused):
            return
        rows, now = self.server.store.rows, self.server.store._store.now()
        for name in _granted_by(call):
            old, row = before.get(name), rows[name]
            if old is None or old[1] != row.fencing_token:
                self._granted(name, row.lease_id, row.fencing_token)
                if call.verb == "adopt" and (old is None or old[0] != call.args[0].lease_id or old[2] <= now):
                    self.wrong("S2", f"{name} was handed over by somebody who did not hold it")
        mine = {renewal.name: renewal.lease_id for renewal in call.args[0]} if call.verb == "renew" else {}
        if call.verb == "release":
            mine = {call.args[0]: call.args[1]}
        for name, lease_id in mine.items():
            self._only_own(call, name, lease_id, before.get(name), now)
            if isinstance(call.value, Released):
                self._released.add(call.args)
        if call.verb == "force_release" and call.value:
            self.counts["forced"] += 1
            self._forced.add(call.args)
        self.look()

    def _granted(self, name: str, lease_id: str, token: int) -> None:
        self.counts["grants"] += 1
        if token <= self._last_token.get(name, 0):
            self.wrong("S3", f"{name} was granted under token {token} after {self._last_token[name]}")
        self._last_token[name] = max(token, self._last_token.get(name, 0))
        self._grants.add((name, lease_id, token))
        for belief in self._believers(name):
            if belief.hold.lease_id != lease_id:
                self.wrong("S1", f"{name} was granted anew while {belief.process.name} believes in it")

    def _only_own(self, call: Call, name: str, lease_id: str, old: Any, now: Any) -> None:
        row = self.server.store.rows.get(name)
        if old is None:
            return
        if row is None:
            self.wrong("S3", f"{call.verb} deleted {name}, and its token with it")
        elif (row.fencing_token, row.expires_at) != (old[1], old[2]) and (old[0] != lease_id or old[2] <= now):
            self.wrong("S2", f"{call.verb} of {name} touched a hold that is not its own")

    # -- what processes believe ----------------------------------------------------------------------------------------

    def register(self, hold: Hold, process: Process, link: Link) -> None:
        """Follow a hold from its first moment on."""
        belief = Belief(hold, process, link, self.kernel.now)
        self._beliefs[hold] = belief
        self._by_name.setdefault(hold.name, []).append(belief)
        if (hold.name, hold.lease_id, hold.claim.fencing_token) not in self._grants:
            self.wrong("S4", f"{process.name} has {hold.name} though nobody granted it")
        self.note(f"holds {hold.name}, token {hold.claim.fencing_token}")
        self.look()

    def look(self) -> None:
        """Compare every belief with the facts."""
        for name, beliefs in self._by_name.items():
            believers = [belief for belief in beliefs if self.believes(belief)]
            if len(believers) > 1:
                who = ", ".join(f"{b.process.name} (token {b.hold.claim.fencing_token})" for b in believers)
                self.wrong("S1", f"{name} is held by {who}")
            for belief in believers:
                self._is_fact(belief)
            self._by_name[name] = [belief for belief in beliefs if not belief.process.dead][-REMEMBERED:]

    def _is_fact(self, belief: Belief) -> None:
        hold, row = belief.hold, self.server.store.rows.get(belief.hold.name)
        now = self.server.store._store.now()
        if row is None or row.lease_id != hold.lease_id or row.expires_at <= now:
            self.wrong("S1", f"{belief.process.name} believes in {hold.name}, which the server does not know as its")
        elif self.misleads(hold.name, hold.lease_id):
            self.wrong("mark", f"{hold.name} is bound to a session of {belief.process.name}'s that has not its lock")

    def _believers(self, name: str) -> list[Belief]:
        return [belief for belief in self._by_name.get(name, ()) if self.believes(belief)]

    def believes(self, belief: Belief) -> bool:
        """Tell whether a process may act on a hold now, by the real code; what promises nothing is left out."""
        process, hold = belief.process, belief.hold
        if process.dead:
            return False
        held = self.ask(process, hold.held)
        if held and belief.over:
            self.wrong("S2", f"{process.name} holds {hold.name} again after it was over")
        belief.over = belief.over or not held
        return held and not self.promises_nothing(belief)

    def ask(self, process: Process, question: Callable[[], T]) -> T:
        """Ask the real code something by the clock of that process."""
        running, self.kernel.running, self.kernel.acting = self.kernel.running, None, process
        try:
            return question()
        finally:
            self.kernel.running, self.kernel.acting = running, None

    def promises_nothing(self, belief: Belief) -> bool:
        """Tell whether an operator ended a hold or a failover lost it: it goes on until it is told, or its deadline."""
        hold = belief.hold
        forced = (hold.name, hold.claim.fencing_token) in self._forced
        return forced or belief.process.moment(hold.term.sent_at) <= self.failed_over_at

    def belief(self, hold: Hold) -> Belief:
        """Return how a hold is followed."""
        return self._beliefs[hold]

    def beliefs_of(self, name: str) -> list[Belief]:
        """Return the last holds of a name, those that are over among them."""
        return list(self._by_name.get(name, ()))

    def confirmed(self, hold: Hold) -> None:
        """Look after a renewal that the holder believes in."""
        self.counts["renewals"] += 1
        belief = self._beliefs[hold]
        belief.attempts_before = belief.link.attempts[hold.lease_id]
        self.note(f"renewed {hold.name}, token {hold.claim.fencing_token}, until {hold.due:.3f} of its clock")
        self.look()

    def doubted(self, process: Process, link: Link, name: str, *, cancelled: bool) -> None:
        """Look a while after an acquisition that came to nothing: what it may have been granted is given back."""
        since, peaceful = self.kernel.now, self._in_peace(process, link)
        after = GIVEN_BACK_AT_LAST if self.server.weather.lost else GIVEN_BACK
        # What a cut has left may come first; cancelled tasks may have left much more to be given back before it.
        if link.cut_in_until > since - LONGEST_CALL:
            after = max(after, GIVEN_BACK_AT_LAST if cancelled else GIVEN_BACK + WITHOUT_AN_ANSWER)

        def look() -> None:
            row, store = self.server.store.rows.get(name), self.server.store._store
            if not peaceful() or row is None or row.owner_id != process.name or self._may_be_left(name, row):
                return
            if name in link.asked and row.lease_id != link.asked[name][0]:
                return  # left from an earlier acquisition, which was looked after then
            age = (store.now() - row.acquired_at).total_seconds()
            known = any(belief.hold.lease_id == row.lease_id for belief in self._beliefs.values())
            if not known and age > self.kernel.now - since:
                self.wrong("S4", f"{name} is held by {process.name}, which was told that it failed")

        self.kernel.after(after, look)

    def given_back(self, process: Process, link: Link, name: str, lease_id: str) -> None:
        """Look a while after somebody let go of what it had, or of what it was asking for."""
        peaceful = self._in_peace(process, link)
        after = GIVEN_BACK_AT_LAST + LONGEST_CALL if self.server.weather.lost else GIVEN_BACK
        if max(link.cut_out_until, link.cut_in_until) > self.kernel.now - LONGEST_CALL:
            return  # the call that asked for it may be waiting for its answer still

        def look() -> None:
            row = self.server.store.rows.get(name)
            if not peaceful() or row is None or row.lease_id != lease_id or self._is_left_to_lapse(row):
                return
            if not self._may_be_left(name, row):
                self.wrong("S4", f"{name} is still held by {process.name}, which let go of it")

        self.kernel.after(after, look)

    def _is_left_to_lapse(self, row: Any) -> bool:
        """Tell whether nobody gives a hold back: it was lost with its session, or by time, and lapses in a moment."""
        left = (row.expires_at - self.server.store._store.now()).total_seconds()
        for belief in self._beliefs.values():
            hold = belief.hold
            if hold.lease_id == row.lease_id and hold.loss is not None:
                return hold.loss.reason == "session_died" or left <= 2 * hold.margin
        return False

    def _in_peace(self, process: Process, link: Link) -> Callable[[], bool]:
        """Return what tells whether nothing has kept a process from giving back what it did from now on."""
        since, generation, weather = self.kernel.now, self.server.generation, self.server.weather
        rough = weather.busy or weather.slow or self.kernel.stalls

        def look() -> bool:
            troubled = (
                process.dead or process.stopped(since, self.kernel.now) or link.cut_out_until > since - GIVEN_BACK
            )
            # A server that was frozen may serve what was asked before after what was asked later: that lapses.
            thawed = self.server.frozen_until > since - THAW
            waiting = link.late_until > since  # for an answer that comes late, or with a try that does
            return not (rough or troubled or thawed or waiting or generation != self.server.generation)

        return look

    def _may_be_left(self, name: str, row: Any) -> bool:
        """Tell whether a row holds nothing, or what is only given back by its ttl."""
        store = self.server.store._store
        if row.expires_at <= store.now():
            return True
        if (name, row.lease_id) in self._released:
            return True  # a copy of the request came after the give-back of what it asked for: that lapses, too
        age = (store.now() - row.acquired_at).total_seconds()
        # Was it asked for before the server froze, longer ago than anybody gives back? That lapses, too.
        return bool(abs(self.kernel.now - age - self.server.frozen_until) < SERVED)

    # -- losses --------------------------------------------------------------------------------------------------------

    def lost(self, manager: HeartbeatManager, hold: Hold, loss: Loss) -> None:
        """Judge a loss as it is declared."""
        belief = self._beliefs[hold]
        belief.over = True
        belief.losses += 1
        self.counts[f"lost: {loss.reason}"] += 1
        self.note(f"lost {hold.name}: {loss.reason}")
        if belief.losses > 1:
            self.wrong("once", f"{hold.name} was lost twice in {belief.process.name}")
        if loss.reason == "closed":
            return
        self._lost_of[belief.process.name, hold.name] += 1
        lapsed = self.kernel.clock() >= hold.deadline
        if hold.releases:  # it had ended here before, and the release found out
            return
        if (since := self._severed.get(hold.bond)) is not None:  # type: ignore[arg-type]
            self._at_once(belief, since)
        if loss.reason in {"unreachable", "max_hold"} or (loss.reason == "expired" and lapsed):
            self._in_time(belief)
            if loss.reason != "max_hold":
                self._with_cause(belief)

    def severed(self, bond: Bond) -> None:
        """Note that what holds rest on has broken."""
        self.counts["bonds that broke"] += 1
        self._severed[bond] = self.kernel.now
        self.note("a bond broke")

    def _at_once(self, belief: Belief, since: float) -> None:
        """The holder is told in the moment in which its bond breaks."""
        process, late = belief.process, self.kernel.now - max(since, belief.began)
        if late > WATCHDOG + process.stopped(since, self.kernel.now) + process.stolen / process.rate:
            self.wrong("notice", f"the loss of {belief.hold.name} was told {late:.3f} s after its bond had broken")

    def _in_time(self, belief: Belief) -> None:
        """The notice of a deadline comes at it: neither before nor long after."""
        process, due = belief.process, belief.process.moment(belief.hold.deadline)
        late = self.kernel.now - max(due, belief.began)
        if self.kernel.now < due - 1e-6:
            self.wrong("notice", f"{belief.hold.name} was given up {due - self.kernel.now:.3f} s before its deadline")
        allowed = WATCHDOG + process.stopped(due - 0.001, self.kernel.now) + process.stolen / process.rate
        if late > allowed:
            self.wrong("notice", f"the loss of {belief.hold.name} was told {late:.3f} s after its deadline")

    def _with_cause(self, belief: Belief) -> None:
        """A lease that is renewed is lost for a reason: in calm weather never, else not before it was tried."""
        hold, process = belief.hold, belief.process
        if not hold.wanted.heartbeat:
            return
        if self.calm and process.moment(hold.deadline) - belief.began > TOO_LATE:
            self.wrong("needless", f"{hold.name} was lost though nothing was wrong")
        since = max(belief.began, process.moment(hold.term.sent_at))
        tries = belief.link.attempts[hold.lease_id] - belief.attempts_before
        # The thread that renews may be in a conversation about other leases, for so long.
        box = options.renewal_box(hold.ttl, hold.margin, options.interval_for(hold.ttl)) / process.rate
        busy = self.kernel.now - since <= max(box, LONGEST_BOX) + 0.01 and bool(hold.keeper._asking)
        if not (tries or busy or process.stopped(since - box, self.kernel.now) or self.kernel.stalls):
            self.wrong("needless", f"{hold.name} was lost though nobody tried to renew it")

    def called_back(self, process: Process, name: str) -> None:
        """Count a call of `on_lease_lost`."""
        key = (process.name, name)
        self._called_for[key] = self._called_for.get(key, 0) + 1
        if self._called_for[key] > self._lost_of[key]:
            self.wrong("once", f"{process.name} was told of a loss of {name} that there was not")

    # -- the end -------------------------------------------------------------------------------------------------------

    def end(self, processes: list[Process]) -> None:
        """Judge what can be said only at the end."""
        alive = {process.name for process in processes if not process.dead}
        for key, losses in self._lost_of.items():
            if key[0] in alive and self._called_for.get(key, 0) != losses:
                self.wrong(
                    "once", f"{key[0]} lost {key[1]} {losses} times, and was told {self._called_for.get(key, 0)}"
                )
        for belief in self._beliefs.values():
            if belief.process.name in alive and self.believes(belief):
                self.wrong("end", f"{belief.process.name} still believes in {belief.hold.name}")
        for failure in self.kernel.failures:
            self.wrong("died", failure)


def _granted_by(call: Call) -> list[str]:
    """Return the names that a request was granted."""
    if isinstance(call.value, Granted):
        return [call.args[0].name]
    if call.verb == "try_acquire_many" and isinstance(call.value, list):
        return [request.name for request in call.args[0]]
    return []
