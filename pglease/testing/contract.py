"""The contract of `pglease.backends.base`, as one suite that every store runs.

A store's test file is a subclass with a fixture::

    class TestMyStore(BackendContract):
        @pytest.fixture
        def harness(self):
            harness = MyHarness()      # a `Harness`: an empty store, and how to open, age, cut off and restart it
            yield harness
            harness.close()

Every test names the clauses it stands for; `clause_map` reads them. Nothing here sleeps to let things settle, looks
into a store, or compares its clock with ours.
"""

# ruff: noqa: D102  # the names of the tests are sentences

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import pytest

from pglease import clock
from pglease.backends.base import Backend
from pglease.errors import BackendClosed, BackendUnavailable
from pglease.options import MAX_DURATION
from pglease.records import Adoption, Gone, Granted, Held, Lease, Refused, Renewal, Request
from pglease.testing.clauses import CLAUSES, clause_map, clauses
from pglease.testing.contract_fencing import FencingContract
from pglease.testing.contract_groups import GroupContract
from pglease.testing.contract_halves import HalvesContract
from pglease.testing.contract_handing import HandingContract
from pglease.testing.contract_history import HistoryContract
from pglease.testing.contract_prompt import PromptContract
from pglease.testing.contract_waiting import WaitingContract
from pglease.testing.harness import LONG, Harness, Hold, Worker, World, budget, new_id
from pglease.testing.model import compare_with_model, seeds

__all__ = ["CLAUSES", "BackendContract", "Harness", "clause_map", "clauses"]

HARD_NAMES = {
    "one character": "x",
    "255 characters": "n" * 255,
    "255 characters of four bytes": "\N{SNOWMAN}\N{ROCKET}" * 127 + "!",
    "emoji": "nightly 🌙 report 👩‍👩‍👧",
    "quotes": """it's "quoted" `here` $$and$$ there""",
    "percent": "100% %s %(name)s %%",
    "backslashes": "C:\\temp\\new\\",
    "blanks around": "  both ends  ",
    "trailing blank": "job ",
    "without it": "job",
    "composed": "caf\u00e9",
    "decomposed": "cafe\u0301",
    "upper": "JOB",
    "path": "../../etc/passwd",
    "slashes": "/a//b/",
    "JSON": '{"a": [1, null, "b"]}',
    "braces": "{tenant}:{0}",
    "a brace that closes nothing": "}{x}",
    "SQL": "x'; DROP TABLE pglease_leases; --",
    "wildcards": "a_b%c*d?[e]",
    "right to left": "\u0645\u0647\u0645\u0629 \u200f\u05ea",
    "looks like a number": "007",
    "looks like null": "NULL",
    "colons": "a:b::c",
}

HARD_METADATA: dict[str, dict[str, Any]] = {
    "empty": {},
    "text": {"greeting": "grüß 👋 '\"\\%s", "": "empty key", "blank ": " "},
    "numbers": {"zero": 0, "negative": -1, "half": 0.5, "large": 2**53, "small": 1e-9, "larger": 10**20},
    "constants": {"yes": True, "no": False, "none": None},
    "nested": {"a": {"b": [1, [2, {"c": []}], {}]}, "list": ["x", None, False]},
    "names of ours": {"task_name": "t", "lease_id": "no", "fencing_token": 99},
}

T = TypeVar("T")


def _stood_still(lease: Lease) -> Lease:
    """Return the record without the moment of its reading: what must not change."""
    return replace(lease, seen_at=lease.expires_at)


def _age(lease: Lease) -> float:
    return (lease.seen_at - lease.acquired_at).total_seconds()


def _left(lease: Lease) -> float:
    return (lease.expires_at - lease.seen_at).total_seconds()


def _granted_for(lease: Lease) -> float:
    return (lease.expires_at - lease.heartbeat_at).total_seconds()


def _at_once(count: int, act: Callable[[int], T]) -> list[T]:
    """Let `count` threads start together and return what each found; an error in one is raised here."""
    start = threading.Barrier(count, timeout=30)

    def run(index: int) -> T:
        start.wait()
        return act(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


VERBS: dict[str, Callable[[Backend, float], object]] = {
    "try_acquire": lambda backend, within: Worker(backend, "late").ask("job", within=within),
    "renew": lambda backend, within: backend.renew([Renewal("job", new_id(), LONG)], budget(within)),
    "release": lambda backend, within: backend.release("job", new_id(), budget(within)),
    "force_release": lambda backend, within: backend.force_release("job", 1, budget(within)),
    "get": lambda backend, within: backend.get("job", budget(within)),
    "list": lambda backend, within: backend.list("", budget(within)),
    "adopt": lambda backend, within: backend.adopt(Adoption("job", new_id(), new_id(), "late", LONG), budget(within)),
    "set_metadata": lambda backend, within: backend.set_metadata("job", new_id(), {}, budget(within)),
    "cleanup": lambda backend, within: backend.cleanup(0.0, budget(within)),
}
every_verb = pytest.mark.parametrize("verb", VERBS)


class BackendContract(
    WaitingContract, FencingContract, PromptContract, HandingContract, GroupContract, HistoryContract, HalvesContract
):
    """Clauses C1 to C24. Subclass it with a fixture `harness`."""

    @pytest.fixture
    def harness(self) -> Iterator[Harness]:
        """Give a `Harness` whose store is empty."""
        raise NotImplementedError("a subclass gives the harness of its store")

    @pytest.fixture
    def world(self, harness: Harness) -> Iterator[World]:
        """Three workers on the harness's store."""
        world = World(harness)
        yield world
        world.close()

    # -- C1 exclusive ------------------------------------------------------------------------------------------------

    @clauses("C1")
    def test_a_free_name_is_granted_with_its_record(self, world: World) -> None:
        hold = world.alice.hold("job", 60, metadata={"host": "a1"})

        lease = hold.lease
        assert (lease.task_name, lease.owner_id, lease.transitions) == ("job", "alice", 0)
        assert dict(lease.metadata) == {"host": "a1"}
        assert lease.acquired_at == lease.heartbeat_at <= lease.seen_at < lease.expires_at
        assert all(moment.utcoffset() is not None for moment in (lease.acquired_at, lease.expires_at, lease.seen_at))

    @clauses("C1")
    def test_a_held_name_is_refused_to_others(self, world: World) -> None:
        world.alice.hold("job")

        answers = [worker.ask("job") for worker in (world.bob, world.carol)]

        assert all(isinstance(answer, Refused) for answer in answers)

    @clauses("C1")
    def test_the_refused_learn_who_holds_it_and_for_how_long(self, world: World) -> None:
        hold = world.alice.hold("job", 60, metadata={"why": "nightly"})

        refused = world.bob.is_refused("job")

        assert refused.held_by == "alice"
        assert refused.lease is not None
        assert _stood_still(refused.lease) == _stood_still(hold.lease)
        assert world.about(refused.retry_after, 60)
        assert refused.retry_after <= 60

    @clauses("C1", "C10")
    def test_a_refused_try_changes_nothing(self, world: World) -> None:
        world.alice.hold("job", metadata={"host": "a1"})
        before = world.carol.sees("job")

        for _ in range(5):
            world.bob.ask("job", 1.0, metadata={"host": "b1"})

        assert _stood_still(world.carol.sees("job")) == _stood_still(before)

    @clauses("C1", "C3")
    def test_a_refused_try_uses_up_no_token(self, world: World) -> None:
        hold = world.alice.hold("job")
        for _ in range(5):
            world.bob.is_refused("job")
        hold.released()

        assert world.bob.hold("job").token == hold.token + 1

    @clauses("C1", "C6")
    def test_the_refused_gets_it_after_the_release(self, world: World) -> None:
        hold = world.alice.hold("job")
        world.bob.is_refused("job")

        hold.released()

        assert world.bob.hold("job").lease.owner_id == "bob"

    @clauses("C1", "C7")
    def test_the_refused_gets_it_when_the_time_it_was_told_has_passed(self, world: World) -> None:
        world.alice.hold("job", world.tick)
        refused = world.bob.is_refused("job")

        world.pass_time(refused.retry_after + 0.1 * world.tick)

        assert world.bob.hold("job").lease.owner_id == "bob"

    @clauses("C1", "C4")
    def test_a_renewed_hold_still_keeps_others_out_past_its_first_ttl(self, world: World) -> None:
        hold = world.alice.hold("job", world.tick)
        hold.renewed(10 * world.tick)

        world.pass_time(2 * world.tick)

        refused = world.bob.is_refused("job")
        assert world.about(refused.retry_after, 8 * world.tick)

    @clauses("C1", "C11")
    def test_of_many_racers_for_a_new_name_one_wins_and_all_others_learn_of_it(self, world: World) -> None:
        for round_number in range(5):
            self._race(world, f"new-{round_number}")

    @clauses("C1", "C3", "C7", "C11")
    def test_of_many_racers_for_a_lapsed_name_one_wins_and_all_others_learn_of_it(self, world: World) -> None:
        for round_number in range(5):
            name = f"lapsed-{round_number}"
            lapsed = world.lapsed_hold(name)

            assert self._race(world, name) == lapsed.token + 1

    @clauses("C1", "C3", "C6", "C11")
    def test_of_many_racers_for_a_released_name_one_wins_and_all_others_learn_of_it(self, world: World) -> None:
        for round_number in range(5):
            hold = world.alice.hold(f"given-back-{round_number}")
            hold.released()

            assert self._race(world, hold.name) == hold.token + 1

    def _race(self, world: World, name: str) -> int:
        """Let many threads of three clients ask for `name` at once; return the winner's token."""
        backends = [world.alice.backend, world.bob.backend, world.carol.backend]
        racers = [Worker(backends[index % 3], f"racer-{index}") for index in range(world.harness.racers)]

        answers = _at_once(len(racers), lambda index: racers[index].ask(name))

        (won,) = [answer for answer in answers if isinstance(answer, Granted)]
        lost = [answer for answer in answers if isinstance(answer, Refused)]
        assert len(lost) == len(racers) - 1
        assert {(loser.held_by, loser.lease and loser.lease.fencing_token) for loser in lost} == {
            (won.lease.owner_id, won.lease.fencing_token)
        }
        return won.lease.fencing_token

    @clauses("C1", "C3", "C11")
    def test_holds_of_one_name_never_overlap_and_each_has_a_token_of_its_own(self, world: World) -> None:
        inside, tokens = threading.Lock(), []
        workers = [world.alice, world.bob, world.carol, world.alice, world.bob, world.carol]

        def take_turns(index: int) -> None:
            for _ in range(8):
                hold = _sooner_or_later(workers[index], "turnstile")
                assert inside.acquire(blocking=False), "two holders at once"
                tokens.append(hold.token)
                inside.release()
                hold.released()

        _at_once(len(workers), take_turns)

        assert tokens == sorted(set(tokens))
        assert len(tokens) == 48

    # -- C2 not re-entrant -------------------------------------------------------------------------------------------

    @clauses("C2")
    def test_the_holder_itself_is_refused_a_second_time(self, world: World) -> None:
        world.alice.hold("job")

        assert world.alice.is_refused("job").held_by == "alice"

    @clauses("C2")
    def test_another_client_under_the_same_label_is_refused(self, world: World) -> None:
        world.alice.hold("job")

        assert world.worker("alice").is_refused("job").held_by == "alice"

    @clauses("C2", "C11")
    def test_two_threads_of_one_client_exclude_each_other(self, world: World) -> None:
        answers = _at_once(8, lambda _: world.alice.ask("job"))

        assert sum(isinstance(answer, Granted) for answer in answers) == 1

    @clauses("C2", "C5")
    def test_a_second_hold_under_the_same_label_does_not_bring_the_first_back(self, world: World) -> None:
        first = world.lapsed_hold("job")
        second = world.alice.hold("job")

        outcome = first.renew()

        assert isinstance(outcome, Gone)
        assert outcome.reason == "taken"
        second.renewed()

    # -- C3 rising token ---------------------------------------------------------------------------------------------

    @clauses("C3")
    def test_a_token_is_a_positive_number(self, world: World) -> None:
        assert world.alice.hold("job").token >= 1

    @clauses("C3")
    def test_the_token_rises_by_one_with_each_hold_and_never_with_a_renewal(self, world: World) -> None:
        first = world.alice.hold("job", world.tick)
        for _ in range(20):
            assert first.renewed(world.tick).fencing_token == first.token

        first.released()
        second = world.alice.hold("job", world.tick)
        world.pass_time(1.1 * world.tick)
        third = world.bob.hold("job", world.tick)
        world.pass_time(1.1 * world.tick)
        fourth = world.bob.hold("job")

        assert [hold.token - first.token for hold in (second, third, fourth)] == [1, 2, 3]

    @clauses("C3", "C6")
    def test_the_token_rises_over_fifty_releases(self, world: World) -> None:
        tokens = []
        for _ in range(50):
            hold = world.alice.hold("job")
            tokens.append(hold.token)
            hold.released()

        assert tokens == list(range(tokens[0], tokens[0] + 50))

    @clauses("C3", "C7")
    def test_the_token_rises_over_an_expiry(self, world: World) -> None:
        lapsed = world.lapsed_hold("job")

        assert world.bob.hold("job").token == lapsed.token + 1

    @clauses("C3")
    def test_the_token_rises_over_a_forced_end(self, world: World) -> None:
        hold = world.alice.hold("job")
        assert world.carol.force("job", hold.token)

        assert world.bob.hold("job").token == hold.token + 1

    @clauses("C3")
    def test_the_token_rises_over_a_cleanup(self, world: World) -> None:
        for _ in range(4):
            world.alice.hold("job").released()
        last = world.alice.hold("job")
        last.released()
        assert world.carol.cleanup() == 1
        assert world.carol.backend.get("job", budget()) is None

        assert world.bob.hold("job").token > last.token

    @clauses("C3")
    def test_the_token_rises_over_two_cleanups_in_a_row(self, world: World) -> None:
        tokens = []
        for _ in range(3):
            hold = world.alice.hold("job")
            hold.released()
            tokens.append(hold.token)
            world.alice.cleanup()
            world.alice.cleanup()

        assert tokens == sorted(set(tokens))

    @clauses("C3", "C9")
    def test_cleaning_one_name_up_lets_no_other_name_go_back(self, world: World) -> None:
        busy = world.alice.hold("busy")
        for _ in range(5):
            world.bob.hold("done").released()
        world.carol.cleanup()

        busy.released()

        assert world.bob.hold("busy").token == busy.token + 1

    @clauses("C3", "C6")
    def test_the_record_of_a_release_keeps_the_token(self, world: World) -> None:
        hold = world.alice.hold("job")
        hold.released()

        assert world.bob.sees("job").fencing_token == hold.token

    @clauses("C3")
    def test_the_token_rises_over_release_cleanup_force_and_restart_together(self, world: World) -> None:
        if not world.alice.backend.traits.durable:
            pytest.skip("this store is not durable")
        tokens = []

        def take() -> Hold:
            hold = world.alice.hold("job")
            tokens.append(hold.token)
            return hold

        take().released()
        world.bob.cleanup()
        world.bob.force("job", take().token)
        take().released()
        world.harness.restart()
        take().released()
        world.bob.cleanup()
        world.harness.restart()
        take().released()

        assert tokens == sorted(set(tokens))
        assert len(tokens) == 5

    @clauses("C3", "C11")
    def test_tokens_rise_while_others_clean_up(self, world: World) -> None:
        def work(index: int) -> list[int]:
            tokens = []
            for _ in range(30):
                if index == 3:
                    _persist(world.carol.cleanup)
                else:
                    hold = _sooner_or_later(world.alice, f"job-{index}")
                    tokens.append(hold.token)
                    hold.release()
            return tokens

        rows = _at_once(4, work)

        assert all(row == sorted(set(row)) for row in rows)
        assert [len(row) for row in rows] == [30, 30, 30, 0]

    @clauses("C3")
    def test_transitions_count_the_holds_after_the_first_also_of_one_label(self, world: World) -> None:
        counts = []
        for worker in (world.alice, world.alice, world.bob, world.alice):
            hold = worker.hold("job")
            counts.append(hold.lease.transitions)
            assert hold.renewed().transitions == counts[-1]
            hold.released()

        assert counts == [0, 1, 2, 3]

    @clauses("C3", "C7")
    def test_a_takeover_of_a_lapsed_hold_counts_as_a_transition(self, world: World) -> None:
        world.lapsed_hold("job")

        assert world.bob.hold("job").lease.transitions == 1

    # -- C4 renewal --------------------------------------------------------------------------------------------------

    @clauses("C4")
    def test_a_renewal_keeps_token_owner_metadata_and_the_beginning(self, world: World) -> None:
        hold = world.alice.hold("job", metadata={"host": "a1"})

        renewed = hold.renewed()

        for fact in ("task_name", "owner_id", "fencing_token", "acquired_at", "transitions"):
            assert getattr(renewed, fact) == getattr(hold.lease, fact)
        assert dict(renewed.metadata) == {"host": "a1"}

    @clauses("C4")
    def test_a_renewal_ends_ttl_after_the_store_read_its_clock(self, world: World) -> None:
        hold = world.alice.hold("job", world.tick)
        world.pass_time(0.5 * world.tick)

        renewed = hold.renewed(world.tick)

        assert _granted_for(renewed) == pytest.approx(world.tick, abs=0.01)
        assert world.about(_left(renewed), world.tick)
        assert _left(renewed) <= world.tick + 0.01
        assert world.about(_age(renewed), 0.5 * world.tick)

    @clauses("C4")
    def test_a_renewal_moves_the_heartbeat(self, world: World) -> None:
        hold = world.alice.hold("job", 10 * world.tick)
        world.pass_time(world.tick)
        silent = world.bob.sees("job")

        renewed = hold.renewed(10 * world.tick)

        assert (silent.seen_at - silent.heartbeat_at).total_seconds() >= world.tick
        assert renewed.heartbeat_at > renewed.acquired_at
        assert world.about((renewed.seen_at - renewed.heartbeat_at).total_seconds(), 0)

    @clauses("C4", "C10")
    def test_the_answer_to_a_renewal_is_what_everybody_sees(self, world: World) -> None:
        renewed = world.alice.hold("job", 60, metadata={"a": 1}).renewed(90)

        assert _stood_still(world.bob.sees("job")) == _stood_still(renewed)

    @clauses("C4")
    def test_many_renewals_keep_a_hold_far_beyond_its_ttl(self, world: World) -> None:
        hold = world.alice.hold("job", world.tick)
        for _ in range(5):
            world.pass_time(0.5 * world.tick)
            hold.renewed(world.tick)

        assert world.about(_age(world.bob.sees("job")), 2.5 * world.tick)
        world.bob.is_refused("job")

    @clauses("C4")
    def test_a_renewal_may_shorten_a_hold(self, world: World) -> None:
        hold = world.alice.hold("job", 100 * world.tick)

        hold.renewed(world.tick)
        world.pass_time(1.1 * world.tick)

        world.bob.hold("job")

    @clauses("C4", "C5")
    def test_a_batch_in_mixed_states_is_answered_in_its_order(self, world: World) -> None:
        lapsed = world.lapsed_hold("lapsed")
        taken = world.lapsed_hold("taken")
        world.bob.hold("taken")
        released = world.alice.hold("released")
        released.released()
        forced = world.alice.hold("forced")
        world.carol.force("forced", forced.token)
        held, also_held = world.alice.hold("z-held"), world.alice.hold("a-held")
        never = Renewal("never", new_id(), LONG)

        outcomes = world.alice.renew(
            held.renewal(),
            lapsed.renewal(),
            never,
            taken.renewal(),
            released.renewal(),
            forced.renewal(),
            also_held.renewal(),
        )

        found = [o.lease.task_name if isinstance(o, Held) else getattr(o, "reason", o) for o in outcomes]
        assert found == ["z-held", "expired", "deleted", "taken", "forced", "forced", "a-held"]

    @clauses("C4")
    def test_an_empty_batch_has_no_outcomes(self, world: World) -> None:
        assert world.alice.renew() == []

    @clauses("C4")
    def test_a_hold_that_stands_twice_in_a_batch_is_held_twice(self, world: World) -> None:
        hold, other = world.alice.hold("job"), world.alice.hold("other")

        outcomes = world.alice.renew(hold.renewal(), other.renewal(), hold.renewal())

        assert [type(outcome) for outcome in outcomes] == [Held, Held, Held]

    @clauses("C4", "C5")
    def test_a_batch_may_have_the_live_and_the_stale_hold_of_one_name(self, world: World) -> None:
        stale = world.lapsed_hold("job")
        live = world.alice.hold("job")

        first = world.alice.renew(stale.renewal(), live.renewal())
        second = world.alice.renew(live.renewal(), stale.renewal())

        assert [type(outcome) for outcome in first + second] == [Gone, Held, Held, Gone]
        assert [outcome.reason for outcome in first + second if isinstance(outcome, Gone)] == ["taken", "taken"]

    @clauses("C4")
    def test_each_hold_of_a_batch_gets_its_own_ttl(self, world: World) -> None:
        holds = [world.alice.hold(f"job-{index}") for index in range(5)]

        outcomes = world.alice.renew(*(hold.renewal(100.0 + index) for index, hold in enumerate(holds)))

        ttls = [_granted_for(outcome.lease) for outcome in outcomes if isinstance(outcome, Held)]
        assert ttls == pytest.approx([100, 101, 102, 103, 104], abs=0.01)

    @clauses("C4", "C11")
    def test_five_hundred_holds_are_renewed_in_one_batch(self, world: World) -> None:
        holds = [world.alice.hold(f"job-{index}") for index in range(500)]
        random.Random(7).shuffle(holds)

        outcomes = world.alice.renew(*(hold.renewal(900) for hold in holds))

        assert [o.lease.task_name for o in outcomes if isinstance(o, Held)] == [hold.name for hold in holds]
        assert all(_granted_for(o.lease) == pytest.approx(900, abs=0.01) for o in outcomes if isinstance(o, Held))

    @clauses("C4", "C11")
    def test_batches_in_opposite_orders_do_not_get_in_each_others_way(self, world: World) -> None:
        holds = [world.alice.hold(f"job-{index}") for index in range(40)]

        def renew_all(index: int) -> list[Any]:
            worker = (world.alice, world.bob)[index % 2]
            order = holds if index < 2 else holds[::-1]
            return [outcome for _ in range(5) for outcome in worker.renew(*(hold.renewal() for hold in order))]

        outcomes = [outcome for batch in _at_once(4, renew_all) for outcome in batch]

        assert not [outcome for outcome in outcomes if isinstance(outcome, Gone)]
        assert sum(isinstance(outcome, Held) for outcome in outcomes) >= 40

    # -- C5 renewal is scoped to one hold ----------------------------------------------------------------------------

    @clauses("C5", "C7")
    def test_a_lapsed_hold_is_not_revived(self, world: World) -> None:
        lapsed = world.lapsed_hold("job")

        outcome = lapsed.renew()

        assert isinstance(outcome, Gone)
        assert outcome.reason == "expired"
        assert world.bob.sees("job").is_expired()
        world.bob.hold("job")

    @clauses("C5")
    def test_a_renewal_of_an_unknown_name_creates_nothing(self, world: World) -> None:
        outcomes = world.alice.renew(Renewal("never", new_id(), LONG))

        assert outcomes == [Gone("deleted")]
        assert world.bob.names(ended=True) == []

    @clauses("C5")
    def test_a_renewal_of_a_released_hold_is_refused_and_leaves_it_free(self, world: World) -> None:
        hold = world.alice.hold("job")
        hold.released()
        before = world.bob.sees("job")

        assert isinstance(hold.renew(), Gone)

        assert _stood_still(world.bob.sees("job")) == _stood_still(before)
        world.bob.hold("job")

    @clauses("C5")
    def test_a_renewal_of_a_forced_hold_is_told_so(self, world: World) -> None:
        hold = world.alice.hold("job")
        world.carol.force("job", hold.token)

        outcome = hold.renew()

        assert isinstance(outcome, Gone)
        assert outcome.reason == "forced"

    @clauses("C5")
    def test_a_renewal_of_a_taken_hold_names_the_new_holder_and_changes_nothing(self, world: World) -> None:
        stale = world.lapsed_hold("job")
        taken = world.bob.hold("job")

        outcome = stale.renew()

        assert isinstance(outcome, Gone)
        assert outcome.reason == "taken"
        assert outcome.lease is not None
        assert (outcome.lease.owner_id, outcome.lease.fencing_token) == ("bob", taken.token)
        assert _stood_still(world.carol.sees("job")) == _stood_still(taken.lease)

    @clauses("C5")
    def test_a_renewal_by_somebody_who_never_held_it_changes_nothing(self, world: World) -> None:
        hold = world.alice.hold("job")

        outcomes = [world.bob.renew(Renewal("job", new_id(), LONG))[0] for _ in range(3)]

        assert [getattr(outcome, "reason", outcome) for outcome in outcomes] == ["taken"] * 3
        assert _stood_still(world.carol.sees("job")) == _stood_still(hold.lease)

    @clauses("C5", "C9")
    def test_a_hold_of_one_name_renews_no_other(self, world: World) -> None:
        mine, other = world.alice.hold("mine"), world.bob.hold("other")

        outcome = world.alice.renew(Renewal("other", mine.request.lease_id, 9 * LONG))[0]

        assert isinstance(outcome, Gone)
        assert _stood_still(world.carol.sees("other")) == _stood_still(other.lease)

    @clauses("C5")
    def test_a_renewal_after_a_cleanup_is_told_that_the_name_is_unknown(self, world: World) -> None:
        lapsed = world.lapsed_hold("job")
        assert world.bob.cleanup() == 1

        assert lapsed.renew() == Gone("deleted")
        assert world.bob.names(ended=True) == []

    @clauses("C5")
    def test_a_refused_renewal_stays_refused(self, world: World) -> None:
        lapsed = world.lapsed_hold("job")

        reasons = [outcome.reason for outcome in (lapsed.renew() for _ in range(3)) if isinstance(outcome, Gone)]

        assert reasons == ["expired"] * 3

    # -- C6 release --------------------------------------------------------------------------------------------------

    @clauses("C6")
    def test_a_release_frees_at_once_and_keeps_the_record(self, world: World) -> None:
        hold = world.alice.hold("job", metadata={"host": "a1"})

        hold.released()

        lease = world.bob.sees("job")
        assert lease.is_expired()
        assert (lease.owner_id, lease.fencing_token, lease.transitions) == ("alice", hold.token, 0)

    @clauses("C6")
    def test_a_second_release_is_a_harmless_gone(self, world: World) -> None:
        hold = world.alice.hold("job")
        hold.released()

        assert isinstance(hold.release(), Gone)
        assert isinstance(hold.release(), Gone)
        world.bob.hold("job")

    @clauses("C6")
    def test_a_late_release_leaves_the_new_holder_alone(self, world: World) -> None:
        stale = world.lapsed_hold("job")
        taken = world.bob.hold("job")

        outcome = stale.release()

        assert isinstance(outcome, Gone)
        assert outcome.reason == "taken"
        assert _stood_still(world.carol.sees("job")) == _stood_still(taken.lease)
        taken.renewed()

    @clauses("C6")
    def test_a_second_release_leaves_the_next_holder_alone(self, world: World) -> None:
        hold = world.alice.hold("job")
        hold.released()
        taken = world.alice.hold("job")

        assert isinstance(hold.release(), Gone)
        assert _stood_still(world.carol.sees("job")) == _stood_still(taken.lease)

    @clauses("C6")
    def test_a_release_of_a_lapsed_hold_says_that_it_had_lapsed(self, world: World) -> None:
        outcome = world.lapsed_hold("job").release()

        assert isinstance(outcome, Gone)
        assert outcome.reason == "expired"
        world.bob.hold("job")

    @clauses("C6", "C9")
    def test_a_release_of_an_unknown_name_creates_nothing(self, world: World) -> None:
        assert world.alice.backend.release("never", new_id(), budget()) == Gone("deleted")
        assert world.alice.names(ended=True) == []

    @clauses("C6", "C9")
    def test_a_release_frees_no_other_name(self, world: World) -> None:
        one, two = world.alice.hold("one"), world.alice.hold("two")

        one.released()
        crossed = world.alice.backend.release("two", one.request.lease_id, budget())

        assert isinstance(crossed, Gone)
        two.renewed()

    @clauses("C6")
    def test_a_release_into_min_hold_keeps_others_out_until_then(self, world: World) -> None:
        hold = world.alice.hold("job", 100 * world.tick)
        hold.released(min_hold=world.tick)

        refused = world.bob.is_refused("job")
        world.pass_time(1.1 * world.tick)

        assert world.about(refused.retry_after, world.tick)
        assert refused.retry_after <= world.tick
        assert refused.held_by == "alice"
        assert world.bob.hold("job").token == hold.token + 1

    @clauses("C6")
    def test_min_hold_is_counted_from_the_beginning_of_the_hold(self, world: World) -> None:
        hold = world.alice.hold("job", 100 * world.tick)
        world.pass_time(4 * world.tick)

        hold.released(min_hold=6 * world.tick)

        assert world.about(world.bob.is_refused("job").retry_after, 2 * world.tick)

    @clauses("C6")
    def test_a_min_hold_that_has_passed_frees_at_once(self, world: World) -> None:
        hold = world.alice.hold("job", 100 * world.tick)
        world.pass_time(1.1 * world.tick)

        hold.released(min_hold=world.tick)

        world.bob.hold("job")

    @clauses("C6")
    def test_min_hold_may_reach_beyond_the_ttl(self, world: World) -> None:
        hold = world.alice.hold("job", world.tick)
        hold.released(min_hold=5 * world.tick)

        world.pass_time(2 * world.tick)

        assert world.about(world.bob.is_refused("job").retry_after, 3 * world.tick)

    @clauses("C6")
    def test_a_second_release_within_min_hold_shortens_nothing(self, world: World) -> None:
        hold = world.alice.hold("job")
        hold.released(min_hold=LONG)
        before = world.carol.sees("job")

        assert isinstance(hold.release(), Gone)

        assert _stood_still(world.carol.sees("job")) == _stood_still(before)
        world.bob.is_refused("job")

    @clauses("C5", "C6")
    def test_a_hold_that_is_only_waited_out_cannot_be_renewed(self, world: World) -> None:
        hold = world.alice.hold("job")
        hold.released(min_hold=0.5 * LONG)
        before = world.carol.sees("job")

        assert isinstance(hold.renew(9 * LONG), Gone)

        assert _stood_still(world.carol.sees("job")) == _stood_still(before)

    @clauses("C2", "C6")
    def test_a_hold_that_is_only_waited_out_is_refused_to_its_old_holder_too(self, world: World) -> None:
        hold = world.alice.hold("job")
        hold.released(min_hold=LONG)

        world.alice.is_refused("job")
        assert isinstance(world.alice.ask("job", lease_id=hold.request.lease_id), Refused)

    @clauses("C6")
    def test_a_hold_that_is_only_waited_out_can_be_forced(self, world: World) -> None:
        hold = world.alice.hold("job")
        hold.released(min_hold=LONG)

        assert world.carol.force("job", hold.token)

        world.bob.hold("job")

    # -- force -------------------------------------------------------------------------------------------------------

    @clauses("C6")
    def test_force_frees_at_once_whoever_holds_it(self, world: World) -> None:
        hold = world.alice.hold("job")

        assert world.carol.force("job", hold.token)

        assert world.bob.sees("job").is_expired()
        assert isinstance(hold.release(), Gone)
        world.bob.hold("job")

    @clauses("C6")
    def test_force_with_a_token_that_is_no_longer_current_changes_nothing(self, world: World) -> None:
        world.alice.hold("job").released()
        taken = world.bob.hold("job")

        answers = [world.carol.force("job", token) for token in (taken.token - 1, taken.token + 1, 0)]

        assert answers == [False, False, False]
        assert _stood_still(world.carol.sees("job")) == _stood_still(taken.lease)

    @clauses("C6")
    def test_force_of_a_hold_that_is_over_is_refused(self, world: World) -> None:
        lapsed, released = world.lapsed_hold("lapsed"), world.alice.hold("released")
        released.released()

        answers = [world.carol.force(hold.name, hold.token) for hold in (lapsed, released)]

        assert answers == [False, False]

    @clauses("C6", "C9")
    def test_force_of_an_unknown_name_creates_nothing(self, world: World) -> None:
        assert world.carol.force("never", 1) is False
        assert world.carol.names(ended=True) == []

    # -- C7 expiry needs nobody --------------------------------------------------------------------------------------

    @clauses("C7")
    def test_a_lapsed_hold_is_granted_to_the_next_with_nothing_in_between(self, world: World) -> None:
        world.alice.hold("job", world.tick)

        world.pass_time(1.1 * world.tick)

        assert world.bob.hold("job").lease.owner_id == "bob"

    @clauses("C7", "C15")
    def test_a_hold_lapses_although_its_client_is_gone(self, world: World) -> None:
        gone = world.worker("gone")
        gone.hold("job", world.tick)
        gone.backend.close()
        world.bob.is_refused("job")

        world.pass_time(1.1 * world.tick)

        world.bob.hold("job")

    @clauses("C7")
    def test_a_lapsed_hold_is_shown_as_expired_until_it_is_cleaned_up(self, world: World) -> None:
        world.lapsed_hold("job")

        (lease,) = world.bob.list()

        assert lease.is_expired()
        assert lease.time_remaining() == 0
        assert world.bob.cleanup() == 1
        assert world.bob.names(ended=True) == []

    @clauses("C7")
    def test_a_takeover_of_a_lapsed_hold_starts_a_life_of_its_own(self, world: World) -> None:
        world.lapsed_hold("job")

        taken = world.bob.hold("job", 60, metadata={"by": "bob"}).lease

        assert taken.acquired_at == taken.heartbeat_at
        assert _granted_for(taken) == pytest.approx(60, abs=0.01)
        assert not taken.is_expired()
        assert dict(taken.metadata) == {"by": "bob"}

    @clauses("C7")
    def test_cleanup_leaves_running_holds_alone(self, world: World) -> None:
        hold = world.alice.hold("running", metadata={"a": 1})
        world.alice.hold("waited out").released(min_hold=LONG)
        world.alice.hold("released").released()

        assert world.bob.cleanup() == 1

        assert world.bob.names(ended=True) == ["running", "waited out"]
        assert _stood_still(world.bob.sees("running")) == _stood_still(hold.lease)

    @clauses("C7")
    def test_cleanup_counts_age_from_the_end_of_a_hold(self, world: World) -> None:
        world.lapsed_hold("old")
        world.pass_time(3 * world.tick)
        world.lapsed_hold("young")

        assert world.bob.cleanup(older_than=2 * world.tick) == 1
        assert world.bob.names(ended=True) == ["young"]

    @clauses("C7")
    def test_cleanup_of_an_empty_store_deletes_nothing(self, world: World) -> None:
        assert world.alice.cleanup() == 0

    # -- C8 clocks ---------------------------------------------------------------------------------------------------

    @clauses("C8")
    @pytest.mark.parametrize("step", [86400.0, -86400.0], ids=["a day ahead", "a day behind"])
    def test_a_clients_wall_clock_never_matters(
        self, world: World, monkeypatch: pytest.MonkeyPatch, step: float
    ) -> None:
        before = world.alice.hold("before", 60)
        wall, wall_ns = time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: wall() + step)
        monkeypatch.setattr(time, "time_ns", lambda: wall_ns() + int(step * 1e9))

        during = world.bob.hold("during", 60)

        world.bob.is_refused("before")
        assert isinstance(before.renew(60), Held)
        assert world.about(_left(world.carol.sees("before")), 60)
        assert abs((during.lease.acquired_at - before.lease.acquired_at).total_seconds()) < world.harness.slack

    @clauses("C7", "C8")
    def test_a_newcomer_gets_a_lapsed_name_at_once_or_after_watching_it_for_a_whole_ttl(self, world: World) -> None:
        lapsed = world.lapsed_hold("job")
        newcomer = world.worker("newcomer")

        if newcomer.backend.traits.clock == "observed change":
            assert world.about(newcomer.is_refused("job").retry_after, world.tick)
            world.pass_time(1.1 * world.tick)

        assert newcomer.hold("job").token == lapsed.token + 1

    @clauses("C8")
    @pytest.mark.parametrize("ttl", [0.001, 0.25, 1.5, 3600.125], ids=str)
    def test_fractions_of_a_second_are_kept(self, world: World, ttl: float) -> None:
        lease = world.alice.hold("job", ttl).lease

        assert _granted_for(lease) == pytest.approx(ttl, abs=0.000_002)

    @clauses("C8")
    def test_the_longest_ttl_is_kept(self, world: World) -> None:
        lease = world.alice.hold("job", MAX_DURATION).lease

        assert lease.expires_at - lease.heartbeat_at == timedelta(seconds=MAX_DURATION)
        assert world.bob.is_refused("job").retry_after == pytest.approx(MAX_DURATION, abs=world.harness.slack)

    @clauses("C8", "C10")
    def test_every_record_says_when_the_store_was_read(self, world: World) -> None:
        hold = world.alice.hold("job", 10 * world.tick)
        world.pass_time(world.tick)

        seen = world.bob.sees("job")
        (listed,) = world.bob.list()
        refused = world.bob.is_refused("job")

        assert refused.lease is not None
        for lease in (seen, listed, refused.lease):
            assert world.about(_age(lease), world.tick)
            assert world.about(_left(lease), 9 * world.tick)
        assert hold.lease.seen_at >= hold.lease.acquired_at

    # -- C9 names ----------------------------------------------------------------------------------------------------

    @clauses("C9")
    @pytest.mark.parametrize("name", HARD_NAMES.values(), ids=HARD_NAMES)
    def test_a_legal_name_survives_every_verb(self, world: World, name: str) -> None:
        hold = world.alice.hold(name)

        assert hold.lease.task_name == name
        assert world.bob.sees(name).task_name == name
        assert world.bob.names(name) == [name]
        assert world.bob.is_refused(name).held_by == "alice"
        assert hold.renewed().task_name == name
        hold.released()
        again = world.bob.hold(name)
        assert again.token == hold.token + 1
        assert world.carol.force(name, again.token)
        assert world.carol.cleanup() == 1

    @clauses("C9")
    def test_names_that_only_look_alike_are_different_names(self, world: World) -> None:
        holds = [world.alice.hold(name) for name in HARD_NAMES.values()]

        outcomes = world.alice.renew(*(hold.renewal() for hold in holds))

        assert [o.lease.task_name for o in outcomes if isinstance(o, Held)] == list(HARD_NAMES.values())
        assert world.bob.names() == sorted(HARD_NAMES.values())

    @clauses("C9")
    @pytest.mark.parametrize("label", HARD_NAMES.values(), ids=HARD_NAMES)
    def test_a_legal_label_survives(self, world: World, label: str) -> None:
        Worker(world.alice.backend, label).hold("job")

        assert world.bob.is_refused("job").held_by == label
        assert world.bob.sees("job").owner_id == label

    @clauses("C9")
    @pytest.mark.parametrize("metadata", HARD_METADATA.values(), ids=HARD_METADATA)
    def test_metadata_comes_back_as_it_was(self, world: World, metadata: dict[str, Any]) -> None:
        hold = world.alice.hold("job", metadata=metadata)
        refused = world.bob.is_refused("job")

        assert refused.lease is not None
        for lease in (hold.lease, world.bob.sees("job"), refused.lease, hold.renewed(), world.bob.list()[0]):
            assert dict(lease.metadata) == metadata
            assert [type(value) for value in lease.metadata.values()] == [type(metadata[key]) for key in lease.metadata]

    @clauses("C9")
    def test_the_next_hold_has_its_own_metadata(self, world: World) -> None:
        world.alice.hold("job", metadata={"host": "a1"}).released()

        assert dict(world.bob.hold("job").lease.metadata) == {}

    @clauses("C9", "C10")
    def test_changing_what_was_attached_or_read_changes_nothing_in_the_store(self, world: World) -> None:
        attached = {"hosts": ["a1"]}
        world.alice.hold("job", metadata=attached)
        attached["hosts"].append("b2")
        world.bob.sees("job").metadata["hosts"].append("c3")

        assert dict(world.carol.sees("job").metadata) == {"hosts": ["a1"]}

    @clauses("C9")
    def test_two_names_are_held_side_by_side(self, world: World) -> None:
        one, two = world.alice.hold("one"), world.bob.hold("two")

        one.released()

        two.renewed()
        world.carol.hold("one")
        world.carol.is_refused("two")

    @clauses("C9")
    def test_a_prefix_is_text_and_not_a_pattern(self, world: World) -> None:
        for name in ("a_b", "axb", "a%b", "a%bc", "ab", "a*b", "A_b", "b"):
            world.alice.hold(name)

        assert world.bob.names("a_") == ["a_b"]
        assert world.bob.names("a%b") == ["a%b", "a%bc"]
        assert world.bob.names("%") == []
        assert world.bob.names("a*") == ["a*b"]
        assert world.bob.names("a") == ["a%b", "a%bc", "a*b", "a_b", "ab", "axb"]
        assert world.bob.names("\\") == []

    # -- C10 looking -------------------------------------------------------------------------------------------------

    @clauses("C10")
    def test_looking_changes_nothing(self, world: World) -> None:
        world.alice.hold("held", metadata={"a": [1, 2]})
        world.lapsed_hold("lapsed")
        world.alice.hold("released").released()
        before = [_stood_still(lease) for lease in world.bob.list(ended=True)]

        for worker in (world.alice, world.bob, world.carol):
            for name in ("held", "lapsed", "released", "never"):
                worker.backend.get(name, budget())
            worker.list()
            worker.list("l", ended=True)

        assert [_stood_still(lease) for lease in world.bob.list(ended=True)] == before
        assert len(before) == 3

    @clauses("C10")
    def test_looking_at_an_unknown_name_finds_nothing_and_makes_nothing(self, world: World) -> None:
        assert world.alice.backend.get("never", budget()) is None
        assert world.alice.names("never") == []
        assert world.alice.names(ended=True) == []

    @clauses("C10")
    def test_looking_does_not_keep_a_hold_alive(self, world: World) -> None:
        world.alice.hold("job", world.tick)
        for _ in range(4):
            world.bob.sees("job")
            world.alice.list()
            world.pass_time(0.3 * world.tick)

        world.bob.hold("job")

    @clauses("C10")
    def test_listing_leaves_out_what_was_given_back_unless_asked(self, world: World) -> None:
        world.alice.hold("held")
        world.lapsed_hold("lapsed")
        world.alice.hold("released").released()
        world.alice.hold("waited out").released(min_hold=LONG)
        world.carol.force("forced", world.alice.hold("forced").token)

        assert world.bob.names() == ["held", "lapsed", "waited out"]
        assert world.bob.names(ended=True) == ["forced", "held", "lapsed", "released", "waited out"]

    @clauses("C10")
    def test_get_and_list_and_grant_tell_the_same(self, world: World) -> None:
        hold = world.alice.hold("job", metadata={"a": 1})

        seen = world.bob.sees("job")
        (listed,) = world.carol.list()

        assert _stood_still(seen) == _stood_still(listed) == _stood_still(hold.lease)

    @clauses("C10")
    def test_many_names_are_listed_in_the_order_of_their_code_points(self, world: World) -> None:
        names = [f"job-{index}" for index in range(30)] + ["Zebra", "apple", "ähre", "\U0001f319", "\uff5e"]
        random.Random(3).shuffle(names)
        for name in names:
            world.alice.hold(name)

        assert world.bob.names() == sorted(names)

    # -- C11 threads -------------------------------------------------------------------------------------------------

    @clauses("C11", "C9")
    def test_many_threads_share_one_client(self, world: World) -> None:
        def live(index: int) -> list[int]:
            tokens = []
            for _ in range(6):
                hold = world.alice.hold(f"job-{index}")
                tokens.append(hold.renewed().fencing_token)
                assert world.alice.sees(hold.name).fencing_token == hold.token
                world.alice.is_refused(hold.name)
                hold.released()
            return tokens

        for tokens in _at_once(12, live):
            assert tokens == list(range(tokens[0], tokens[0] + 6))

    @clauses("C11", "C5")
    def test_a_renewal_and_a_release_at_once_leave_it_free(self, world: World) -> None:
        for round_number in range(10):
            hold = world.alice.hold(f"job-{round_number}")

            _at_once(4, lambda index, hold=hold: hold.release() if index == 0 else hold.renew())  # type: ignore[misc]

            assert isinstance(hold.renew(), Gone)
            world.bob.hold(hold.name)

    @clauses("C6", "C11")
    def test_of_many_releases_at_once_one_ends_the_hold(self, world: World) -> None:
        hold = world.alice.hold("job")

        outcomes = _at_once(8, lambda _: hold.release())

        assert sum(not isinstance(outcome, Gone) for outcome in outcomes) == 1

    # -- C12 trouble is not an answer, C14 time-boxed ----------------------------------------------------------------

    @every_verb
    @clauses("C12", "C14")
    def test_with_the_link_broken_a_verb_is_unavailable_within_its_budget(self, world: World, verb: str) -> None:
        VERBS[verb](world.alice.backend, 10.0)
        world.harness.break_link()

        began = clock.now()
        with pytest.raises(BackendUnavailable):
            VERBS[verb](world.alice.backend, 1.0)

        assert clock.now() - began < 2.5

    @every_verb
    @clauses("C12", "C14")
    def test_a_client_that_never_reached_the_store_is_unavailable_within_its_budget(
        self, world: World, verb: str
    ) -> None:
        world.harness.break_link()
        stranded = world.worker("stranded")

        began = clock.now()
        with pytest.raises(BackendUnavailable):
            VERBS[verb](stranded.backend, 1.0)

        assert clock.now() - began < 2.5

    @clauses("C12")
    def test_after_mending_every_verb_works_again(self, world: World) -> None:
        hold = world.alice.hold("job")
        world.harness.break_link()
        with pytest.raises(BackendUnavailable):
            hold.worker.backend.renew([hold.renewal()], budget(1.0))

        world.harness.mend_link()

        assert isinstance(hold.renew_after_trouble(), Held)
        assert hold.worker.sees("job").fencing_token == hold.token
        hold.released()
        world.alice.hold("job")

    @clauses("C12", "C14")
    def test_many_threads_on_a_broken_link_all_end_within_their_budget(self, world: World) -> None:
        world.alice.hold("job")
        world.harness.break_link()

        def ask(_: int) -> float:
            began = clock.now()
            with pytest.raises(BackendUnavailable):
                world.alice.ask("job", within=1.0)
            return clock.now() - began

        assert max(_at_once(12, ask)) < 3.0

    @clauses("C12")
    def test_a_break_is_never_read_as_a_loss(self, world: World) -> None:
        hold = world.alice.hold("job")
        world.harness.break_link()
        with pytest.raises(BackendUnavailable):
            world.alice.backend.renew([hold.renewal()], budget(0.5))  # a release may have been applied all the same
        world.harness.mend_link()

        assert isinstance(hold.renew_after_trouble(), Held)

    @clauses("C12", "C15")
    def test_a_hold_survives_a_restart_of_a_durable_store(self, world: World) -> None:
        if not world.alice.backend.traits.durable:
            pytest.skip("this store is not durable")
        hold = world.alice.hold("job", metadata={"a": 1})

        world.harness.restart()

        assert _stood_still(world.bob.sees("job")) == _stood_still(hold.lease)
        if world.alice.backend.traits.prompt_failover:  # what it was bound to has ended
            assert hold.renew_after_trouble() == Gone("session_died")
            return
        world.carol.is_refused("job")
        hold.renewed()
        hold.released()

    @every_verb
    @clauses("C14")
    def test_a_verb_with_no_time_left_ends_at_once(self, world: World, verb: str) -> None:
        VERBS[verb](world.alice.backend, 10.0)

        began = clock.now()
        with suppress(BackendUnavailable):
            VERBS[verb](world.alice.backend, 0.0)

        assert clock.now() - began < 1.5

    @clauses("C14")
    def test_a_losing_try_does_not_wait_for_its_budget(self, world: World) -> None:
        world.alice.hold("job")

        began = clock.now()
        world.bob.ask("job", within=60.0)

        assert clock.now() - began < 2.5

    @clauses("C14")
    def test_the_request_is_sent_after_the_call_and_before_the_answer(self, world: World) -> None:
        box = budget()
        began = clock.now()
        world.alice.backend.renew([Renewal("job", new_id(), LONG)], box)

        assert box.sent_at <= clock.now()
        assert box.sent_at >= began - 0.1

    # -- C13 ambiguity -----------------------------------------------------------------------------------------------

    @clauses("C13")
    def test_a_retry_recognises_its_own_grant(self, world: World) -> None:
        lease_id = new_id()
        first = world.alice.hold("job", metadata={"a": 1}, lease_id=lease_id)

        again = world.alice.hold("job", metadata={"a": 1}, lease_id=lease_id)

        assert _stood_still(again.lease) == _stood_still(first.lease)

    @clauses("C13")
    def test_a_retry_from_another_connection_recognises_its_own_grant(self, world: World) -> None:
        lease_id = new_id()
        first = world.alice.hold("job", lease_id=lease_id)

        again = world.bob.hold("job", lease_id=lease_id)

        assert _stood_still(again.lease) == _stood_still(first.lease)

    @clauses("C13")
    def test_a_retry_recognises_its_own_grant_though_its_client_was_refused_meanwhile(self, world: World) -> None:
        lease_id = new_id()
        first = world.alice.hold("job", lease_id=lease_id)
        world.alice.is_refused("job")
        world.bob.is_refused("job")

        for worker in (world.alice, world.bob):
            assert _stood_still(worker.hold("job", lease_id=lease_id).lease) == _stood_still(first.lease)

    @clauses("C8", "C13")
    def test_a_retry_through_a_newcomer_is_told_of_no_more_than_is_left(self, world: World) -> None:
        lease_id = new_id()
        world.alice.hold("job", 10 * world.tick, lease_id=lease_id)
        world.pass_time(4 * world.tick)

        again = world.worker("newcomer").hold("job", lease_id=lease_id)

        assert again.lease.time_remaining() <= 6 * world.tick + world.harness.slack

    @clauses("C13")
    def test_a_retry_does_not_extend_its_grant(self, world: World) -> None:
        lease_id = new_id()
        world.alice.hold("job", 10 * world.tick, lease_id=lease_id)
        world.pass_time(4 * world.tick)

        again = world.alice.hold("job", 10 * world.tick, lease_id=lease_id)

        assert world.about(again.lease.time_remaining(), 6 * world.tick)
        assert _granted_for(again.lease) == pytest.approx(10 * world.tick, abs=0.01)

    @clauses("C13")
    def test_a_retry_after_the_grant_was_given_back_is_a_new_hold(self, world: World) -> None:
        lease_id = new_id()
        first = world.alice.hold("job", lease_id=lease_id)
        first.released()

        assert world.alice.hold("job", lease_id=lease_id).token == first.token + 1

    @clauses("C13", "C3")
    def test_a_retry_after_the_grant_lapsed_is_a_new_hold(self, world: World) -> None:
        lease_id = new_id()
        first = world.alice.hold("job", world.tick, lease_id=lease_id)
        world.pass_time(1.1 * world.tick)

        again = world.alice.hold("job", lease_id=lease_id)

        assert (again.token, again.lease.transitions) == (first.token + 1, 1)

    @clauses("C13")
    def test_a_retry_after_somebody_else_took_it_is_refused(self, world: World) -> None:
        lapsed = world.lapsed_hold("job")
        world.bob.hold("job")

        answer = world.alice.ask("job", lease_id=lapsed.request.lease_id)

        assert isinstance(answer, Refused)
        assert answer.held_by == "bob"

    @clauses("C13", "C11")
    def test_many_retries_at_once_are_one_hold(self, world: World) -> None:
        lease_id = new_id()

        holds = _at_once(6, lambda _: _sooner_or_later(world.alice, "job", lease_id=lease_id))

        assert len({hold.token for hold in holds}) == 1
        assert world.bob.sees("job").transitions == 0

    @clauses("C13", "C12")
    def test_an_acquire_that_raised_leaves_at_most_a_hold_that_its_id_can_end(self, world: World) -> None:
        lease_id = new_id()
        world.alice.names()
        world.harness.break_link()
        with pytest.raises(BackendUnavailable):
            world.alice.ask("job", lease_id=lease_id, within=0.5)
        world.harness.mend_link()

        world.alice.backend.release("job", lease_id, budget())

        world.bob.hold("job")

    # -- C15 close ---------------------------------------------------------------------------------------------------

    @clauses("C15")
    def test_closing_twice_is_harmless(self, world: World) -> None:
        worker = world.worker("guest")
        worker.hold("job")

        worker.backend.close()
        worker.backend.close()

    @clauses("C15")
    def test_closing_a_client_that_was_never_used_is_harmless(self, world: World) -> None:
        world.worker("guest").backend.close()

    @every_verb
    @clauses("C15")
    def test_a_closed_client_says_so(self, world: World, verb: str) -> None:
        worker = world.worker("guest")
        worker.hold("job")
        worker.backend.close()

        with pytest.raises(BackendClosed):
            VERBS[verb](worker.backend, 5.0)

    @every_verb
    @clauses("C15")
    def test_a_client_that_was_closed_before_its_first_use_says_so(self, world: World, verb: str) -> None:
        worker = world.worker("guest")
        worker.backend.close()

        with pytest.raises(BackendClosed):
            VERBS[verb](worker.backend, 5.0)

    @clauses("C15")
    def test_closing_ends_no_hold(self, world: World) -> None:
        guest = world.worker("guest")
        hold = guest.hold("job", metadata={"a": 1})

        guest.backend.close()

        assert _stood_still(world.bob.sees("job")) == _stood_still(hold.lease)
        world.bob.is_refused("job")

    @clauses("C15", "C13")
    def test_a_hold_can_be_continued_through_another_client(self, world: World) -> None:
        guest = world.worker("guest")
        hold = guest.hold("job")
        guest.backend.close()

        outcome = world.bob.renew(hold.renewal())[0]

        assert isinstance(outcome, Held)
        assert outcome.lease.owner_id == "guest"

    @clauses("C15", "C9")
    def test_closing_one_client_leaves_the_others_working(self, world: World) -> None:
        hold = world.alice.hold("job")

        world.bob.backend.close()

        hold.renewed()
        hold.released()
        world.carol.hold("job")

    @clauses("C11", "C15")
    def test_closing_while_others_ask_ends_in_answers_or_a_plain_error(self, world: World) -> None:
        guest = world.worker("guest")
        guest.names()

        def use(index: int) -> None:
            if index == 0:
                guest.backend.close()
                return
            for _ in range(20):
                try:
                    guest.ask(f"job-{index}", within=2.0)
                except (BackendClosed, BackendUnavailable):
                    return

        began = clock.now()
        _at_once(5, use)

        assert clock.now() - began < 10
        world.bob.names()

    # -- the whole ---------------------------------------------------------------------------------------------------

    @clauses("C1", "C3", "C4", "C5", "C6", "C7", "C9", "C10", "C13")
    def test_random_conversations_get_the_answers_of_the_model(self, world: World) -> None:
        for seed in seeds(world.harness.model_runs):
            clients: Sequence[Backend] = [world.alice.backend, world.bob.backend, world.carol.backend]
            compare_with_model(clients, world.pass_time, seed, unit=2 * world.tick)


def _sooner_or_later(worker: Worker, name: str, *, lease_id: str | None = None) -> Hold:
    """Ask until it is granted, for at most half a minute."""
    until = clock.now() + 30
    while clock.now() < until:
        chosen = lease_id or new_id()
        answer = worker.ask(name, lease_id=chosen)
        if isinstance(answer, Granted):
            return Hold(worker, Request(name, worker.label, chosen, LONG), answer.lease)
    raise AssertionError(f"{name!r} was never granted to {worker.label}")


def _persist(act: Callable[[], T]) -> T | None:
    """Call `act`; a store that is busy may say so."""
    try:
        return act()
    except BackendUnavailable:
        return None
