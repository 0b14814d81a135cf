"""What happened in a run, as everybody who was there wrote it down: for the checkers to judge.

A history is a file of JSON lines for each process, written before the effect, so that it survives a kill. All moments
are seconds on the boot clock: the processes of one machine share it, and no allowance for skew is needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from pglease import clock

NEVER = float("inf")

Verb: TypeAlias = Literal["acquire", "release", "renew", "get"]
Outcome: TypeAlias = Literal["ok", "denied", "gone", "unknown", "error"]
"""ok: it was done · denied: somebody else has it · gone: the hold is over · unknown: it may have been or may be done
· error: it was not done."""


@dataclass(frozen=True, slots=True)
class Op:
    """One call of one thread.

    Attributes:
        key: what stands for it; of an acquisition that was granted, it stands for the hold.
        process: who called.
        verb: what was asked.
        name: the lease.
        began: before the call.
        ended: after it; infinity when the process did not live to see it.
        outcome: what came of it.
        token: granted; or of the hold that was released, renewed, or read.
        holder: the token of whoever was in the way, None when nobody said.
        live: of a `get`, whether that hold was running.
    """

    key: str
    process: str
    verb: Verb
    name: str
    began: float
    ended: float = NEVER
    outcome: Outcome = "unknown"
    token: int | None = None
    holder: int | None = None
    live: bool = False

    @property
    def is_grant(self) -> bool:
        """Whether somebody came to hold a lease by it, and knows."""
        return self.verb == "acquire" and self.outcome == "ok"


@dataclass(frozen=True, slots=True)
class Look:
    """`held` was true at `at`, and would have been until `until` if nothing had come between."""

    hold: str
    at: float
    until: float


@dataclass(frozen=True, slots=True)
class Told:
    """The holder's callback was called.

    Attributes:
        hold: the acquisition's key.
        at: when the callback began.
        due: when the belief was to end by time.
        reason: as in `Loss`.
    """

    hold: str
    at: float
    due: float
    reason: str


@dataclass(frozen=True, slots=True)
class Over:
    """The holder saw that its hold was over, `lost` or not."""

    hold: str
    at: float
    lost: bool


@dataclass(frozen=True, slots=True)
class Fault:
    """Something was broken from `began` to `ended`; `whom` is the process it befell, empty for everybody."""

    what: str
    began: float
    ended: float
    whom: str = ""


@dataclass(frozen=True, slots=True)
class Write:
    """What a holder wrote to a register, as the register saw it.

    Attributes:
        register: `fenced` refuses tokens below the largest it has seen; `plain` takes everything.
        name: the lease that it is written under.
        hold: the writer's acquisition.
        token: what it showed.
        at: when it arrived.
        accepted: whether it was taken.
        base: of `plain`, the version that the writer had read; each accepted write makes the next version.
    """

    register: Literal["fenced", "plain"]
    name: str
    hold: str
    token: int
    at: float
    accepted: bool = True
    base: int = 0


Entry: TypeAlias = Op | Look | Told | Over | Fault | Write
_KINDS: dict[str, type[Entry]] = {kind.__name__: kind for kind in (Op, Look, Told, Over, Fault, Write)}


@dataclass(frozen=True)
class Belief:
    """One stretch of time in which a process was entitled to act under a hold."""

    hold: str
    name: str
    process: str
    token: int
    began: float
    ends: float


@dataclass
class History:
    """Everything that was written down in a run."""

    ops: list[Op] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    over: list[Over] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Self:
        """Put entries in their places; of an operation that was written twice, the later one counts."""
        history, ops = cls(), dict[str, Op]()
        places: dict[type, list[Any]] = {
            Look: history.looks,
            Told: history.told,
            Over: history.over,
            Fault: history.faults,
            Write: history.writes,
        }
        for entry in entries:
            if isinstance(entry, Op):
                ops[entry.key] = entry
            else:
                places[type(entry)].append(entry)
        history.ops.extend(sorted(ops.values(), key=lambda op: op.began))
        history.writes.sort(key=lambda write: write.at)
        return history

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Self:
        """Read files that a `Scribe` wrote; a last line that a kill cut short does not count."""
        return cls.of(entry for path in paths for entry in _entries(path))

    @property
    def grants(self) -> list[Op]:
        """The acquisitions whose callers hold a lease, by their beginning."""
        return [op for op in self.ops if op.is_grant]

    @property
    def names(self) -> list[str]:
        """All names, in order."""
        return sorted({op.name for op in self.ops})

    @cached_property
    def deaths(self) -> dict[str, float]:
        """When each process that was killed was killed."""
        return {fault.whom: fault.began for fault in self.faults if fault.what == "kill"}

    def beliefs(self) -> list[Belief]:
        """Return who was entitled to act, and until when.

        From the return of the grant, until the belief ran out, the loss was told, the release was called, or the
        process was killed, whichever came first; but not before it was last seen to be held. Where a session died, that
        is all that is known: when `held` turned false nobody wrote down.
        """
        last_seen, trusted = dict[str, float](), dict[str, float]()
        for look in self.looks:
            last_seen[look.hold] = max(last_seen.get(look.hold, 0.0), look.at)
            trusted[look.hold] = max(trusted.get(look.hold, 0.0), look.until)
        ended = {op.key.removesuffix(":release"): op.began for op in self.ops if op.verb == "release"}
        told = {each.hold: each for each in self.told}
        found = []
        for op in self.grants:
            ends = [trusted.get(op.key, op.ended), self.deaths.get(op.process, NEVER), ended.get(op.key, NEVER)]
            if op.key in told:
                loss = told[op.key]
                ends[0] = max(ends[0], loss.due) if loss.reason != "session_died" else last_seen.get(op.key, op.ended)
                ends.append(loss.at)
            assert op.token is not None
            until = max(min(ends), last_seen.get(op.key, op.ended))
            found.append(Belief(op.key, op.name, op.process, op.token, op.ended, until))
        return found

    def out_of_order(self, process: str, began: float, ended: float) -> float:
        """Return for how many of these seconds the process could not run."""
        spans = sorted(
            (max(fault.began, began), min(fault.ended, ended))
            for fault in self.faults
            if fault.whom == process and fault.began < ended and fault.ended > began
        )
        return covered(spans)

    def disturbed(self, began: float, ended: float) -> float:
        """Return for how many of these seconds anything at all was broken."""
        spans = sorted(
            (max(fault.began, began), min(fault.ended, ended))
            for fault in self.faults
            if fault.began < ended and fault.ended > began
        )
        return covered(spans)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return how much time the spans cover, which come by their beginnings and may overlap."""
    total, until = 0.0, float("-inf")
    for began, ended in spans:
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


def _entries(path: Path) -> Iterator[Entry]:
    for line in path.read_text("utf-8").splitlines():
        try:
            facts = json.loads(line)
        except ValueError:
            continue
        yield _KINDS[facts.pop("kind")](**facts)


class Scribe:
    """Appends entries to one process's file, each with one system call: a killed process has written all it said."""

    def __init__(self, path: Path, process: str) -> None:
        """Write to `path`, on behalf of `process`."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.process = process

    def note(self, entry: Entry) -> None:
        """Write one entry."""
        facts = {slot: getattr(entry, slot) for slot in type(entry).__slots__}
        os.write(self._file, (json.dumps({"kind": type(entry).__name__, **facts}) + "\n").encode())

    def begin(self, key: str, verb: Verb, name: str, token: int | None = None) -> Op:
        """Note a call that is about to be made; `key` is what stands for it."""
        op = Op(key, self.process, verb, name, clock.now(), token=token)
        self.note(op)
        return op

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
