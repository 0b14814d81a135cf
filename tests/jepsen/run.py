"""One run: processes take leases while nemeses break things; then all comes to rest, and the checkers judge."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pglease import PGLease, clock
from pglease.testing import checkers
from pglease.testing.checkers import Footprint, Verdict
from pglease.testing.histories import History, Scribe
from tests.jepsen.crew import Crew
from tests.jepsen.nemeses import Chaos, nemeses_of
from tests.jepsen.picture import picture
from tests.jepsen.registers import Registers
from tests.jepsen.worker import Orders
from tests.jepsen.worlds import TTL, WORLDS, World

PROCESSES = 6
NAMES = [f"job-{number}" for number in range(8)]
AT_A_TIME = 3
ALLOWANCE = 6
"""Threads and descriptors that a process may have more in the end: callbacks, give-back, a pool that has filled up."""
EXCLUSION = {"C1", "C2", "C3", "C4", "C7", "C9"}
"""The checkers whose rules hold however slow a machine is. The others also see how long something took."""
HELD = "SELECT count(*) FROM pglease_leases WHERE expires_at > clock_timestamp()"
LOCKS = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
WHOSE = """
SELECT k.locktype, a.pid, a.application_name, a.client_port, a.state, a.state_change, a.query
FROM pg_locks k JOIN pg_stat_activity a USING (pid) WHERE k.locktype = 'advisory'
"""
IDLE = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"
WHO_IDLES = """
SELECT pid, application_name, client_port, clock_timestamp() - state_change, query
FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'
"""


@dataclass
class Report:
    """What a run came to.

    Attributes:
        world: where it took place.
        seed: of its choices.
        seconds: for how long things were broken.
        verdicts: the checkers'.
        faults: how many of each kind.
        history: what happened.
        folder: where it is written; gone if nothing was wrong.
    """

    world: str
    seed: int
    seconds: float
    verdicts: list[Verdict] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    history: History = field(default_factory=History)
    folder: Path | None = None

    @property
    def fine(self) -> bool:
        """Whether no checker complains."""
        return all(self.verdicts)

    @property
    def safe(self) -> bool:
        """Whether none complains of the checkers whose rules no slow machine breaks."""
        return all(verdict for verdict in self.verdicts if verdict.checker in EXCLUSION)

    @property
    def replay(self) -> str:
        """What runs it again: the same choices, though not the same moments."""
        return f"python -m tests.jepsen --worlds {self.world} --seconds {self.seconds:g} --seed {self.seed}"

    def complaint(self) -> str:
        """Say what is wrong, where the history is, and how to run it again."""
        lines = [f"{v.checker}: {complaint}" for v in self.verdicts for complaint in v.complaints[:5]]
        return "\n".join(
            [
                f"{self.world}, seed {self.seed}:",
                *lines,
                f"history and picture: {self.folder}",
                f"replay: {self.replay}",
            ]
        )

    def seen(self, checker: str, what: str) -> int:
        """Return one count of one checker."""
        return next(verdict.seen[what] for verdict in self.verdicts if verdict.checker == checker)


def table(reports: list[Report], when: str) -> str:
    """Return what runs came to, for people."""
    faults: Counter[str] = sum((report.faults for report in reports), Counter())
    heads = [
        "world",
        "asked for a lease",
        "grants",
        "renewed, read, released",
        "holds lost",
        "told, at the latest, after",
        "dead holder succeeded after: median, longest",
        "stale writes that the fence refused",
        "updates lost where there is none",
    ]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for report in reports:
        verbs = Counter(op.verb for op in report.history.ops)
        asked = verbs.pop("acquire", 0)
        lines.append(
            f"| {report.world} | {asked:,} | {report.seen('C2', 'grants'):,} | {verbs.total():,} "
            f"| {report.seen('C9', 'losses'):,} | {report.seen('C5', 'latest, in ms')} ms "
            f"| {report.seen('C6', 'median, in ms')}, {report.seen('C6', 'longest, in ms')} ms "
            f"| {report.seen('C3', 'refused'):,} | {report.seen('C4', 'lost updates'):,} |"
        )
    kinds = ", ".join(f"{count} {what}" for what, count in sorted(faults.items()))
    return (
        f"Seed {reports[0].seed}, {reports[0].seconds:.0f} s a world, on {when}: {PROCESSES} processes of two threads, "
        f"{len(NAMES)} names, ttl {TTL:g} s.\n{faults.total():,} faults: {kinds}.\n\n"
        + "\n".join(lines)
        + "\n\nViolations: 0."
    )


def run(name: str, seed: int, seconds: float, *, mistake: str = "", calm: bool = False) -> Report:
    """Run once.

    Args:
        name: which world.
        seed: of all choices.
        seconds: for how long nemeses are at work.
        mistake: one that is put into the library in every worker.
        calm: whether to break nothing.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"pglease-jepsen-{name}-"))
    report = Report(name, seed, seconds, folder=folder)
    with WORLDS[name]() as world:
        with PGLease(world.server.admin_dsn) as first:
            first.get_lease("warm-up")  # the table is there before anybody races for it
        scribe = Scribe(folder / "driver.jsonl", "driver")
        with Registers(scribe) as registers:

            def orders(process: str) -> Orders:
                return Orders(str(folder), process, world.url, str(seed), TTL, NAMES, registers.port, mistake)

            with Crew(PROCESSES, NAMES, orders) as crew:
                chaos = Chaos(world, crew, scribe, random.Random(f"{name}/{seed}"))
                _break(chaos, seconds, calm=calm)
                crew.rest()
                footprints = list(_rest(world, crew, folder))
                report.faults = chaos.counts
        report.history = History.read(sorted(folder.glob("*.jsonl")))
        report.verdicts = [*_judge(world, report.history, calm=calm), *footprints]
    if report.fine:
        shutil.rmtree(folder)
        report.folder = None
    else:
        (folder / "timeline.svg").write_text(picture(report.history, report.replay), encoding="utf-8")
    return report


def _break(chaos: Chaos, seconds: float, *, calm: bool) -> None:
    """Break things, a few at a time, until the time is over and everything is mended."""
    until, wanted = clock.now() + TTL + seconds, nemeses_of(chaos.world)
    at_work: list[threading.Thread] = []
    failed_over = chaos.world.replica is None
    chaos.over.wait(TTL)
    while not calm and clock.now() < until:
        at_work = [thread for thread in at_work if thread.is_alive()]
        if not failed_over and clock.now() > until - 0.6 * seconds:
            failed_over = True
            with chaos.server, chaos.fault("fail over"):
                chaos.world.fail_over(chaos.rng)
        if len(at_work) < AT_A_TIME:
            at_work.append(threading.Thread(target=chaos.rng.choice(wanted), args=(chaos,)))
            at_work[-1].start()
        chaos.over.wait(chaos.rng.uniform(0.3, 1.0))
    chaos.over.wait(max(0.0, until - clock.now()))
    chaos.over.set()
    for thread in at_work:
        thread.join()
    for line in chaos.world.lines[-1:]:
        line.pass_through()


def _rest(world: World, crew: Crew, folder: Path) -> Iterator[Verdict]:
    """Let three ttl pass; look at what is left over, in the store and in each process."""
    deadline = clock.now() + 3 * TTL + 10
    time.sleep(3 * TTL)
    left = _left(world)
    while (left.held or left.locks or left.idle_in_transaction) and clock.now() < deadline:
        time.sleep(0.2)
        left = _left(world)
    verdict = checkers.comes_to_rest(Footprint(), left)
    if left.locks:
        verdict.complaints += map(str, world.server.execute(WHOSE))
    if left.idle_in_transaction:
        verdict.complaints += map(str, world.server.execute(WHO_IDLES))
    crew.end()
    begun = [_read(path) for path in folder.glob("*.before")]
    for name in crew.processes:
        if begun and (after := folder / f"{name}.after").exists():
            grown = checkers.comes_to_rest(_most(begun), _read(after), ALLOWANCE)
            verdict.complaints += [f"{name}: {complaint}" for complaint in grown.complaints]
            verdict.seen += grown.seen
    yield verdict


def _left(world: World) -> Footprint:
    held, locks, idle = (world.server.execute(query)[0][0] for query in (HELD, LOCKS, IDLE))
    return Footprint(held=held, locks=locks, idle_in_transaction=idle)


def _most(footprints: Sequence[Footprint]) -> Footprint:
    """Return the most that any process had in the beginning: one that began under a fault had nothing to do yet."""
    return Footprint(
        threads=max(each.threads for each in footprints), descriptors=max(each.descriptors for each in footprints)
    )


def _read(path: Path) -> Footprint:
    return Footprint(**json.loads(path.read_text()))


def _judge(world: World, history: History, *, calm: bool) -> Iterator[Verdict]:
    yield checkers.one_believer(history, allowed=world.frail)
    yield checkers.rising_tokens(history, apart=world.apart)
    yield checkers.fence_holds(history)
    yield _counted_only(checkers.updates_are_kept(history)) if world.frail else checkers.updates_are_kept(history)
    yield checkers.told_in_time(history)
    yield checkers.succeeded_in_time(history, world.succession, slack=3.0)
    if not world.frail:
        yield checkers.linearizable(history)
    yield checkers.told_once(history)
    yield checkers.quiet_log(world.logs())
    if calm:
        yield _nothing_lost(history)


def _counted_only(verdict: Verdict) -> Verdict:
    """Return what was seen, without judging it."""
    return Verdict(verdict.checker, seen=verdict.seen)


def _nothing_lost(history: History) -> Verdict:
    """In calm weather nothing is lost."""
    return Verdict("calm", [f"{told.hold}: {told.reason}" for told in history.told])
