"""Each checker turns red at a history that is bad in its way, and stays green at the good one."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pglease.testing import checkers
from pglease.testing.checkers import Footprint, Verdict
from pglease.testing.histories import Fault, History, Look, Op, Over, Scribe, Told, Write
from tests import stress
from tests.jepsen.run import Report

TTL = 2.0
FIRST = Op("a", "p1", "acquire", "job", 10.0, 10.1, "ok", token=1)
SECOND = Op("b", "p2", "acquire", "job", 12.0, 12.4, "ok", token=2)
THIRD = Op("c", "p3", "acquire", "job", 13.1, 14.0, "ok", token=3)
GOOD = [
    FIRST,
    Look("a", 10.2, 12.1),
    Op("d", "p2", "acquire", "job", 10.3, 10.4, "denied", holder=1),
    Op("g", "p3", "get", "job", 10.3, 10.35, "ok", token=1, live=True),
    Write("fenced", "job", "a", 1, 10.5),
    Write("plain", "job", "a", 1, 10.6, base=0),
    Fault("stop", 11.0, 12.2, "p1"),
    Told("a", 12.25, 12.1, "expired"),
    Over("a", 12.3, lost=True),
    SECOND,
    Look("b", 12.5, 14.0),
    Write("fenced", "job", "b", 2, 12.6),
    Write("plain", "job", "b", 2, 12.7, base=1),
    Write("fenced", "job", "a", 1, 12.8, accepted=False),
    Fault("kill", 13.0, 13.0, "p2"),
    THIRD,
    Look("c", 14.1, 16.0),
    Op("c:renew", "p3", "renew", "job", 14.2, 14.3, "ok", token=3),
    Op("c:release", "p3", "release", "job", 14.4, 14.5, "ok", token=3),
    Op("x", "p1", "acquire", "job", 14.6, 15.0, "unknown"),
    Op("h", "p3", "get", "job", 15.0, 15.1, "ok", token=4, live=True),
]
REST = Footprint(threads=5, descriptors=20, connections=4)

CHECKS: dict[str, Callable[[History], Verdict]] = {
    "C1": checkers.one_believer,
    "C2": checkers.rising_tokens,
    "C3": checkers.fence_holds,
    "C4": checkers.updates_are_kept,
    "C5": checkers.told_in_time,
    "C6": lambda history: checkers.succeeded_in_time(history, TTL, slack=0.0),
    "C7": checkers.linearizable,
    "C9": checkers.told_once,
}


def but(*changes: object, without: tuple[object, ...] = ()) -> History:
    """The good history with some entries more, and some less."""
    return History.of([*(entry for entry in GOOD if entry not in without), *changes])  # type: ignore[list-item]


BAD = {
    "two believe at a time": ("C1", but(replace(SECOND, began=11.0, ended=11.5), without=(SECOND,))),
    "one believes for longer than it told": ("C1", but(Look("a", 10.9, 13.0), without=(GOOD[7],))),
    "a token twice": ("C2", but(replace(THIRD, token=2), without=(THIRD,))),
    "a token that falls": ("C2", but(replace(SECOND, token=2 << 32), without=(SECOND,))),
    "a stale write is taken": ("C3", but(Write("fenced", "job", "a", 1, 12.9))),
    "a good write is refused": ("C3", but(Write("fenced", "job", "b", 2, 12.9, accepted=False))),
    "an update is lost between two holders": (
        "C4",
        but(Write("plain", "job", "b", 2, 12.8, base=0), without=(GOOD[12],)),
    ),
    "nobody is told for a second": ("C5", but(Told("a", 13.2, 12.1, "expired"), without=(GOOD[7],))),
    "told too early": ("C5", but(Told("a", 12.0, 12.1, "unreachable"), without=(GOOD[7],))),
    "a dead holder is not succeeded": ("C6", but(replace(THIRD, ended=16.0), without=(THIRD, *GOOD[16:19]))),
    "a hold that was released is in the way": (
        "C7",
        but(Op("e", "p2", "acquire", "job", 14.55, 14.58, "denied", holder=3)),
    ),
    "a hold is seen before it was granted": (
        "C7",
        but(Op("e", "p1", "get", "job", 10.5, 10.6, "ok", token=3, live=True)),
    ),
    "a hold is renewed after the next one": ("C7", but(Op("e", "p1", "renew", "job", 12.5, 12.6, "ok", token=1))),
    "a lapsed hold is seen to run again": (
        "C7",
        but(
            Op("e", "p3", "get", "job", 11.0, 11.1, "ok", token=1, live=False),
            Op("f", "p3", "get", "job", 11.2, 11.3, "ok", token=1, live=True),
        ),
    ),
    "a token that nobody asked for": ("C7", but(Op("e", "p3", "get", "job", 9.0, 9.1, "ok", token=9, live=True))),
    "a loss is told twice": ("C9", but(Told("a", 12.3, 12.1, "expired"))),
    "a loss is not told": ("C9", but(without=(GOOD[7],))),
    "a loss is told after the release": ("C9", but(Told("c", 14.7, 16.0, "taken"))),
}  # fmt: skip


@pytest.mark.parametrize("checker", CHECKS)
def test_a_good_history_is_good_to_every_checker(checker: str) -> None:
    verdict = CHECKS[checker](but())

    assert verdict.complaints == []
    assert verdict.checker == checker
    assert verdict.seen.total() > 0


@pytest.mark.parametrize("how", BAD)
def test_a_bad_history_is_bad_to_its_checker(how: str) -> None:
    checker, history = BAD[how]

    assert CHECKS[checker](history).complaints, how


def test_every_checker_has_a_bad_history() -> None:
    assert {checker for checker, _ in BAD.values()} == CHECKS.keys()


@pytest.mark.parametrize(
    "after",
    [
        replace(REST, held=1),
        replace(REST, locks=1),
        replace(REST, idle_in_transaction=1),
        replace(REST, threads=9),
        replace(REST, descriptors=24),
        replace(REST, connections=8),
    ],
)
def test_what_is_left_over_is_noticed(after: Footprint) -> None:
    assert checkers.comes_to_rest(REST, REST).complaints == []
    assert checkers.comes_to_rest(replace(REST, held=3), REST).complaints == []
    assert len(checkers.comes_to_rest(REST, after, allowance=3).complaints) == 1


@pytest.mark.parametrize(
    "line",
    [
        "ERROR:  deadlock detected",
        "WARNING:  you don't own a lock of type ExclusiveLock",
        "ERROR:  current transaction is aborted, commands ignored until end of transaction block",
        "PANIC:  could not write to file",
    ],
)
def test_what_only_a_mistake_writes_into_the_log_is_noticed(line: str) -> None:
    verdict = checkers.quiet_log(["LOG:  ready", line])

    assert verdict.complaints == [line]
    assert checkers.quiet_log(["ERROR:  canceling statement due to user request"])


def test_an_overlap_that_was_not_promised_away_is_counted() -> None:
    overlapping = BAD["two believe at a time"][1]

    verdict = checkers.one_believer(overlapping, allowed=[(11.0, 13.0)])

    assert verdict
    assert verdict.seen["overlaps that were not promised away"] == 1


def test_two_servers_that_grant_at_a_time_keep_their_own_order() -> None:
    behind = replace(SECOND, token=(1 << 32) + 1)
    ahead = replace(THIRD, token=2)
    history = but(behind, ahead, without=(SECOND, THIRD))

    assert not checkers.rising_tokens(history)
    assert checkers.rising_tokens(history, apart=[(13.0, 13.5)])


def test_a_lost_update_of_a_late_writer_is_counted_and_no_fault() -> None:
    late = Write("plain", "job", "a", 1, 12.9, base=1)

    verdict = checkers.updates_are_kept(but(late))

    assert verdict
    assert verdict.seen["lost updates"] == 1


@pytest.mark.parametrize("what", sorted(checkers.STORE_TELLS_SOONER))
def test_a_store_that_lost_renewals_or_time_may_tell_of_a_loss_sooner(what: str) -> None:
    early = Told("a", 12.0, 12.1, "expired")

    assert not checkers.told_in_time(but(early, Fault(what, 11.5, 11.9, ""), without=(GOOD[7],))).complaints
    assert checkers.told_in_time(but(early, Fault(what, 12.05, 12.3, ""), without=(GOOD[7],))).complaints


def test_a_hold_whose_session_died_ends_where_it_was_last_seen() -> None:
    told = Told("b", 12.9, 14.0, "session_died")

    ends = {belief.hold: belief.ends for belief in but(told).beliefs()}

    assert ends["b"] == 12.5


def random_history(seed: int, calls: int) -> list[Op]:
    """Calls of eight threads on one correct lease; each takes effect at some moment while it is under way."""
    rng = random.Random(seed)
    moments = sorted(rng.uniform(0, calls / 8) for _ in range(calls))
    token, holder, known, ops = 0, None, True, list[Op]()
    for number, moment in enumerate(moments):
        began, ended = moment - rng.random(), moment + rng.random()
        key, kind = str(number), rng.random()
        if holder is not None and known and kind < 0.3:
            verb = "release" if kind < 0.2 else "renew"
            ops.append(Op(f"{key}:{verb}", "p", verb, "job", began, ended, "ok", token=token))
            holder = None if verb == "release" else holder
        elif kind < 0.4:
            ops.append(Op(key, "p", "get", "job", began, ended, "ok", token=token or None, live=holder is not None))
        elif holder is None or kind < 0.45:  # 5 % lapse
            token, holder = token + 1, key
            known = rng.random() < 0.95
            ops.append(Op(key, "p", "acquire", "job", began, ended, "ok", token=token) if known else
                       Op(key, "p", "acquire", "job", began, outcome="unknown"))  # fmt: skip
        else:
            ops.append(Op(key, "p", "acquire", "job", began, ended, "denied", holder=token))
    return ops


def test_three_thousand_calls_at_once_are_put_in_order() -> None:
    assert checkers.linearizable(History.of(random_history(1, 3000)))


def test_what_is_told_gone_is_over_from_then_on_and_an_older_hold_is_nobodys_business() -> None:
    def renewal(token: int, at: float, outcome: str) -> Op:
        return Op(f"renewal at {at}", "p", "renew", "job", at, at + 0.1, outcome, token=token)

    first, second = (Op(key, "p", "acquire", "job", at, at + 0.1, "ok", token=at) for key, at in (("a", 1), ("b", 3)))

    assert checkers.linearizable(History.of([first, renewal(1, 2, "gone"), second, renewal(1, 4, "gone")]))
    assert not checkers.linearizable(History.of([first, renewal(1, 2, "gone"), renewal(1, 3, "ok")]))


def test_a_loss_for_another_reason_and_one_of_an_unknown_hold_were_not_told_by_time() -> None:
    seen = checkers.told_in_time(but()).seen["losses by time"]

    for told in (Told("a", 12.25, 12.1, "forced"), Told("nobody's", 30.0, 12.1, "expired")):
        verdict = checkers.told_in_time(but(told))
        assert (verdict.seen["losses by time"], verdict.complaints) == (seen, [])


def test_where_no_holder_died_there_is_nothing_to_measure() -> None:
    verdict = checkers.succeeded_in_time(History.of([FIRST]), TTL)

    assert (verdict.complaints, verdict.seen["deaths of holders"]) == ([], 0)
    assert "median, in ms" not in verdict.seen


@pytest.mark.parametrize("seed", range(20))
def test_one_wrong_answer_among_many_is_noticed(seed: int) -> None:
    ops = random_history(seed, 200)
    grants = [op for op in ops if op.is_grant]
    wrong = replace(grants[len(grants) // 2], key="wrong", verb="renew", began=200.0, ended=201.0)

    assert checkers.linearizable(History.of(ops))
    assert not checkers.linearizable(History.of([*ops, wrong]))


def test_a_history_survives_its_file_and_a_line_that_was_cut_short(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "one", "p1")
    begun = scribe.begin("k", "acquire", "job")
    for entry in GOOD:
        scribe.note(entry)
    scribe.close()
    with (tmp_path / "one").open("a") as file:
        file.write('{"kind": "Op", "key": "half')

    read = History.read([tmp_path / "one"])

    assert begun in read.ops
    assert replace(read, ops=[op for op in read.ops if op != begun]) == but()


def test_time_is_counted_once_where_faults_overlap() -> None:
    history = History.of(
        [Fault("stop", 1, 3, "p"), Fault("gil", 2, 4, "p"), Fault("cut", 5, 6), Fault("stop", 0, 9, "q")]
    )

    assert history.out_of_order("p", 0, 10) == 3
    assert history.disturbed(0.5, 5.5) == 5


@pytest.mark.parametrize(("checker", "safe"), [("C1", False), ("C7", False), ("C5", True), ("C6", True)])
def test_what_came_late_is_told_from_what_must_not_be_on_any_machine(checker: str, safe: bool) -> None:
    report = Report("plain", 1, 20.0, verdicts=[Verdict("C2"), Verdict(checker, ["something was wrong"])])

    assert report.fine is False
    assert report.safe is safe


@pytest.mark.parametrize(("checker", "decided"), [("C1", False), ("C4", False), ("C5", True), ("C8", True)])
def test_over_a_change_decides_what_the_runs_say_of_exclusion(
    monkeypatch: pytest.MonkeyPatch, checker: str, decided: bool
) -> None:
    def run(world: str, seed: int, seconds: float) -> Report:
        return Report(world, seed, seconds, verdicts=[Verdict(checker, ["something was wrong"])])

    monkeypatch.setattr(stress.runs, "run", run)

    fine, told = stress.under_faults(argparse.Namespace(whole=False, write=False, run_seed=1))

    assert fine is decided
    assert "something was wrong" in told
