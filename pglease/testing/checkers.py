"""Judges of a history: each looks for violations of one promise, and says what it has seen.

Tests show the presence of errors, never their absence; so a checker counts what it looked at, and one that looked at
nothing has shown nothing. `tests/test_checkers.py` has a bad history for each.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from pglease.testing.histories import NEVER, Belief, History, Op, Told, Write, covered
from pglease.testing.linearizable import explain

NOTICE = 0.25
"""Seconds after its deadline within which a loss is told, besides the time in which the process could not run."""
BY_TIME = {"expired", "unreachable", "max_hold"}
"""Reasons of losses whose moment was known beforehand."""
STORE_TELLS_SOONER = {"fail over", "step the clock"}
"""Faults after which a store may say that a hold is over before its holder would have."""
EPOCH = 32
"""The bits of a token below its epoch."""
BAD_LINES = re.compile(r"deadlock detected|you don't own a lock|current transaction is aborted|PANIC|TRAP:")
"""What a server's log must not say: deadlocks, unlocks of what was not locked, statements after a failed one."""

Span: TypeAlias = tuple[float, float]


@dataclass
class Verdict:
    """What one checker found.

    Attributes:
        checker: its id.
        complaints: a sentence for each violation.
        seen: what it looked at, by kind.
    """

    checker: str
    complaints: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    def __bool__(self) -> bool:
        """Whether nothing is wrong."""
        return not self.complaints


def one_believer(history: History, allowed: Sequence[Span] = ()) -> Verdict:
    """C1: no two stretches of belief in a name overlap.

    Args:
        history: what happened.
        allowed: stretches of time in which an overlap that begins there is counted, but no violation: after a failover
            that lost commits, until the beliefs from before it have ended.
    """
    verdict = Verdict("C1")
    for name, beliefs in _by_name(history.beliefs()).items():
        verdict.seen["beliefs"] += len(beliefs)
        latest: Belief | None = None
        for belief in sorted(beliefs, key=lambda each: each.began):
            if latest is not None and belief.began < min(latest.ends, belief.ends):
                if _within(belief.began, allowed):
                    verdict.seen["overlaps that were not promised away"] += 1
                else:
                    verdict.complaints.append(
                        f"{name}: {belief.process} (token {belief.token}) from {belief.began:.3f}, while "
                        f"{latest.process} (token {latest.token}) believed until {latest.ends:.3f}"
                    )
            if latest is None or belief.ends > latest.ends:
                latest = belief
    return verdict


def rising_tokens(history: History, apart: Sequence[Span] = ()) -> Verdict:
    """C2: the tokens of a name are unique, and a grant that returned before another was asked for has the smaller one.

    Args:
        history: what happened.
        apart: stretches of time in which two servers granted: there the order holds within an epoch only.
    """
    verdict = Verdict("C2")
    for name, grants in _by_name(history.grants).items():
        verdict.seen["grants"] += len(grants)
        for token, times in Counter(grant.token for grant in grants).items():
            if times > 1:
                verdict.complaints.append(f"{name}: token {token} was granted {times} times")
        together = [grant for grant in grants if not _within(grant.began, apart)]
        verdict.complaints.extend(_falling(name, together))
        for epoch in _grouped(grants, lambda grant: (grant.token or 0) >> EPOCH).values():
            verdict.complaints.extend(_falling(name, epoch))
    verdict.complaints = sorted(set(verdict.complaints))
    return verdict


def _falling(name: str, grants: Iterable[Op]) -> list[str]:
    """Return complaints about tokens below one that was out before they were asked for."""
    moments = [(op.began, 1, op) for op in grants] + [(op.ended, 0, op) for op in grants]
    largest, complaints = 0, []
    for _, asking, op in sorted(moments, key=lambda each: each[:2]):
        assert op.token is not None
        if not asking:
            largest = max(largest, op.token)
        elif op.token < largest:
            complaints.append(f"{name}: token {op.token} was granted after {largest} was out")
    return complaints


def fence_holds(history: History) -> Verdict:
    """C3: the fenced register took tokens that never fall, and refused only what was below one that it had taken."""
    verdict = Verdict("C3")
    largest: dict[str, int] = defaultdict(int)
    for write in history.writes:
        if write.register != "fenced":
            continue
        verdict.seen["accepted" if write.accepted else "refused"] += 1
        if write.accepted and write.token < largest[write.name]:
            verdict.complaints.append(f"{write.name}: {write.token} was taken after {largest[write.name]}")
        if not write.accepted and write.token >= largest[write.name]:
            verdict.complaints.append(
                f"{write.name}: {write.token} was refused, and {largest[write.name]} was the largest"
            )
        if write.accepted:
            largest[write.name] = max(largest[write.name], write.token)
    return verdict


def updates_are_kept(history: History) -> Verdict:
    """C4: an update of the plain register was lost only to a write that came after its writer's belief had ended.

    So is told apart what a lease cannot prevent, a write that was under way when its holder was stopped, from two
    holders at a time. A run with pauses whose count of lost updates is zero has had no teeth.
    """
    verdict = Verdict("C4")
    ends = {belief.hold: belief.ends for belief in history.beliefs()}
    for name, writes in _by_name([write for write in history.writes if write.register == "plain"]).items():
        verdict.seen["updates"] += len(writes)
        for place, write in enumerate(writes):
            missed = [other for other in writes[write.base : place] if other.hold != write.hold]
            if not missed:
                continue
            verdict.seen["lost updates"] += len(missed)
            verdict.complaints.extend(
                f"{name}: {write.hold} overwrote {other.hold} at {write.at:.3f}, and both believed"
                for other in missed
                if not any(_was_late(each, ends) for each in (write, other))
            )
    return verdict


def _was_late(write: Write, ends: dict[str, float]) -> bool:
    return write.at > ends.get(write.hold, NEVER)


def told_in_time(history: History, notice: float = NOTICE) -> Verdict:
    """C5: a loss by time was told within `notice` of its deadline, less the time in which its process could not run.

    Nor was it told sooner, unless the store itself may have said that the hold was over: one that lost renewals in a
    failover, or whose clock was stepped.
    """
    verdict = Verdict("C5")
    processes = {op.key: op.process for op in history.grants}
    sooner = min((fault.began for fault in history.faults if fault.what in STORE_TELLS_SOONER), default=NEVER)
    for told in history.told:
        if told.reason not in BY_TIME or told.hold not in processes:
            continue
        verdict.seen["losses by time"] += 1
        late = told.at - told.due - history.out_of_order(processes[told.hold], told.due, told.at)
        verdict.seen["latest, in ms"] = max(verdict.seen["latest, in ms"], round(1000 * late))
        if late > notice:
            verdict.complaints.append(f"{told.hold}: told {late:.3f} s after its deadline")
        if told.at < told.due and told.at < sooner:
            verdict.complaints.append(f"{told.hold}: told {told.due - told.at:.3f} s before its deadline")
    return verdict


def succeeded_in_time(history: History, bound: float, slack: float = 1.0) -> Verdict:
    """C6: what a killed process held is not asked for in vain when `bound` seconds have passed since its death.

    Time in which anything else was broken does not count.

    Args:
        history: what happened.
        bound: seconds: ttl and a poll for a store of leases, the handover delay and a poll for one of sessions.
        slack: seconds for a machine that has other things to do.
    """
    verdict = Verdict("C6")
    took = []
    for belief in history.beliefs():
        death = history.deaths.get(belief.process, NEVER)
        if belief.ends != death:
            continue
        asked = [
            op for op in history.ops if op.verb == "acquire" and op.name == belief.name and death < op.ended < NEVER
        ]
        until = min((op.ended for op in asked if op.is_grant), default=max((op.ended for op in asked), default=death))
        in_vain = _asking(asked, death + bound + history.disturbed(death, until), until)
        took.append(_asking(asked, death, until))
        verdict.seen["deaths of holders"] += 1
        if in_vain > slack:
            verdict.complaints.append(
                f"{belief.name}: asked for in vain for {in_vain:.3f} s after {belief.process} was long dead"
            )
    if took:
        verdict.seen["median, in ms"] = round(1000 * sorted(took)[len(took) // 2])
        verdict.seen["longest, in ms"] = round(1000 * max(took))
    return verdict


def _asking(ops: Iterable[Op], began: float, ended: float) -> float:
    """Return for how many of these seconds somebody was asking."""
    return covered(sorted((max(op.began, began), min(op.ended, ended)) for op in ops if op.began < ended))


def linearizable(history: History) -> Verdict:
    """C7: each name's calls can be put in an order in which one mutex with fencing tokens would have answered so."""
    verdict = Verdict("C7")
    for name in history.names:
        ops = [op for op in history.ops if op.name == name]
        verdict.seen["calls"] += len(ops)
        if (stuck := explain(ops)) is not None:
            verdict.complaints.append(f"{name}: no order explains {stuck}")
    return verdict


@dataclass(frozen=True)
class Footprint:
    """What is in use at a moment of rest.

    Attributes:
        held: leases that are held, in the store.
        locks: advisory locks.
        idle_in_transaction: sessions that left a transaction open.
        threads: of the process.
        descriptors: of the process.
        connections: to the server.
    """

    held: int = 0
    locks: int = 0
    idle_in_transaction: int = 0
    threads: int = 0
    descriptors: int = 0
    connections: int = 0


def comes_to_rest(before: Footprint, after: Footprint, allowance: int = 0) -> Verdict:
    """C8: when all is over, nothing is held or left open, and no more is in use than before.

    Args:
        before: after the first acquisitions.
        after: when everybody has rested for three ttl.
        allowance: how many more threads, descriptors or connections are no growth: a pool has room.
    """
    verdict = Verdict("C8", seen=Counter({"moments of rest": 1}))
    for what in ("held", "locks", "idle_in_transaction"):
        if getattr(after, what):
            verdict.complaints.append(f"{getattr(after, what)} {what.replace('_', ' ')} at the end")
    for what in ("threads", "descriptors", "connections"):
        grown = getattr(after, what) - getattr(before, what)
        if grown > allowance:
            verdict.complaints.append(f"{grown} more {what} than in the beginning")
    return verdict


def told_once(history: History) -> Verdict:
    """C9: each lost hold was told of exactly once, and none after its release had succeeded."""
    verdict = Verdict("C9")
    counts = Counter(told.hold for told in history.told)
    lost = {over.hold for over in history.over if over.lost}
    verdict.seen["losses"] += len(lost | counts.keys())
    processes = {op.key: op.process for op in history.grants}
    verdict.complaints += [f"{hold} was told of {times} times" for hold, times in counts.items() if times > 1]
    verdict.complaints += [
        f"{hold} was lost, and nobody was told"
        for hold in sorted(lost - counts.keys())
        if processes.get(hold) not in history.deaths
    ]
    first: dict[str, Told] = {}
    for told in history.told:
        first.setdefault(told.hold, told)
    for op in history.ops:
        told_of = first.get(op.key.removesuffix(":release"))
        if op.verb == "release" and op.outcome == "ok" and told_of is not None and told_of.at > op.ended:
            verdict.complaints.append(f"{told_of.hold} was told of after it was released")
    return verdict


def quiet_log(lines: Iterable[str], bad: re.Pattern[str] = BAD_LINES) -> Verdict:
    """C10: the server's log has no line that only a mistake of ours can cause."""
    verdict = Verdict("C10")
    for line in lines:
        verdict.seen["lines"] += 1
        if bad.search(line):
            verdict.complaints.append(line.strip())
    return verdict


N = TypeVar("N", Belief, Op, Write)
T = TypeVar("T")
K = TypeVar("K")


def _by_name(entries: Iterable[N]) -> dict[str, list[N]]:
    return _grouped(entries, lambda entry: entry.name)


def _grouped(entries: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    groups: dict[K, list[T]] = defaultdict(list)
    for entry in entries:
        groups[key(entry)].append(entry)
    return groups


def _within(moment: float, spans: Iterable[Span]) -> bool:
    return any(began <= moment <= ended for began, ended in spans)
