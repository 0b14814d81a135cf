"""The part of the contract that handing over and describing rest on: C20 and C21."""

# ruff: noqa: D102  # the names of the tests are sentences

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from pglease.errors import BackendUnavailable, FencedError
from pglease.records import Gone, Granted, Held, Released
from pglease.testing.clauses import clauses
from pglease.testing.harness import LONG, Hold, World, budget, new_id


def _given_back(world: World) -> Hold:
    hold = world.alice.hold("job")
    hold.released()
    return hold


def _forced(world: World) -> Hold:
    hold = world.alice.hold("job")
    assert world.bob.force("job", hold.token)
    return hold


def _taken_over(world: World) -> Hold:
    hold = world.lapsed_hold("job")
    world.bob.hold("job")
    return hold


def _adopted(world: World) -> Hold:
    hold = world.alice.hold("job")
    hold.adopted_by(world.bob)
    return hold


def _unknown(world: World) -> Hold:
    hold = _given_back(world)
    world.alice.cleanup()
    return hold


OVER: dict[str, tuple[Callable[[World], Hold], str]] = {
    "given back": (_given_back, "forced"),
    "forced": (_forced, "forced"),
    "lapsed": (lambda world: world.lapsed_hold("job"), "expired"),
    "taken over": (_taken_over, "taken"),
    "adopted": (_adopted, "taken"),
    "cleaned up": (_unknown, "deleted"),
}
"""Holds that are over, each with how it came to be so, and why the store says it is gone."""
every_end = pytest.mark.parametrize("end", OVER)


class HandingContract:
    """Clauses C20 and C21."""

    # -- C20 handed over ---------------------------------------------------------------------------------------------

    @clauses("C20", "C3")
    def test_a_hold_goes_on_as_the_next_one_under_another_id_owner_and_token(self, world: World) -> None:
        hold = world.alice.hold("job", 2 * world.tick, metadata={"n": 1})

        next_hold = hold.adopted_by(world.bob, 9 * world.tick)

        lease = next_hold.lease
        assert (lease.owner_id, lease.fencing_token, lease.transitions) == ("bob", hold.token + 1, 1)
        assert dict(lease.metadata) == {"n": 1}
        assert lease.acquired_at == lease.heartbeat_at >= hold.lease.acquired_at
        assert world.about((lease.expires_at - lease.acquired_at).total_seconds(), 9 * world.tick)
        assert world.carol.sees("job").fencing_token == lease.fencing_token
        world.carol.is_refused("job")
        next_hold.renewed()
        next_hold.released()
        assert world.carol.hold("job").token == hold.token + 2

    @clauses("C20", "C5", "C6")
    def test_the_one_that_was_handed_over_is_over(self, world: World) -> None:
        hold = world.alice.hold("job")
        next_hold = hold.adopted_by(world.bob)

        renewal, release = hold.renew(), hold.release()

        assert isinstance(renewal, Gone)
        assert isinstance(release, Gone)
        assert renewal.reason == release.reason == "taken"
        assert not world.carol.force("job", hold.token)
        next_hold.renewed()

    @clauses("C20", "C10")
    @every_end
    def test_what_is_over_cannot_be_adopted_and_nothing_changes(self, world: World, end: str) -> None:
        how, reason = OVER[end]
        hold = how(world)
        before = world.alice.backend.get("job", budget())

        answer = hold.adopt(world.alice)

        assert isinstance(answer, Gone)
        assert answer.reason == reason
        after = world.alice.backend.get("job", budget())
        assert (before is None) == (after is None)
        if before is not None and after is not None:
            assert (after.owner_id, after.fencing_token) == (before.owner_id, before.fencing_token)
            assert after.given_back == before.given_back

    @clauses("C20", "C11")
    def test_of_many_who_adopt_at_once_one_goes_on(self, world: World) -> None:
        hold, workers = world.alice.hold("job"), [world.alice, world.bob, world.carol] * 2

        with ThreadPoolExecutor(len(workers)) as pool:
            answers = list(pool.map(hold.adopt, workers))

        (won,) = [answer for answer in answers if isinstance(answer, Granted)]
        assert all(answer.reason == "taken" for answer in answers if isinstance(answer, Gone))
        assert world.carol.sees("job").fencing_token == won.lease.fencing_token == hold.token + 1

    @clauses("C20", "C13")
    def test_whoever_asks_again_finds_what_it_was_granted(self, world: World) -> None:
        hold, next_id = world.alice.hold("job"), new_id()
        first = hold.adopt(world.bob, next_id=next_id)

        again = hold.adopt(world.bob, next_id=next_id)

        assert isinstance(first, Granted)
        assert isinstance(again, Granted)
        assert again.lease.fencing_token == first.lease.fencing_token
        assert world.bob.backend.release("job", next_id, budget()) == Released()

    @clauses("C20", "C7")
    def test_what_nobody_attends_to_lapses_and_can_be_adopted_until_then(self, world: World) -> None:
        first = world.alice.hold("job").adopted_by(world.bob, world.tick, unattended=True)
        second = world.alice.hold("other").adopted_by(world.bob, LONG, unattended=True)

        world.pass_time(1.1 * world.tick)

        assert world.carol.hold("job").token == first.token + 1
        assert second.adopted_by(world.carol).token == second.token + 1

    @clauses("C20", "C17")
    def test_whoever_queues_is_not_asked_and_keeps_its_place(self, world: World) -> None:
        world.needs("fair")
        hold = world.alice.hold("job")
        ticket = world.carol.queue("job")

        next_hold = hold.adopted_by(world.bob)

        assert ticket.is_refused().held_by == "bob"
        next_hold.released()
        assert ticket.hold().token == next_hold.token + 1

    @clauses("C20", "C16")
    def test_whoever_watches_hears_of_it(self, world: World) -> None:
        world.needs("wakes_waiters")
        hold, ear = world.alice.hold("job"), world.carol.listens()
        assert world.carol.mark("job")

        hold.adopted_by(world.bob)

        ear.hears("job", "granted")
        ear.close()

    @clauses("C20", "C18")
    def test_it_does_not_pass_a_guarded_transaction_and_no_guard_passes_afterwards(self, world: World) -> None:
        world.needs("transactional_fencing")
        hold = world.alice.hold("job")
        with world.harness.transaction() as connection:
            hold.guard(connection)
            with pytest.raises(BackendUnavailable):
                hold.adopt(world.bob, within=0.5)
        hold.renewed()

        next_hold = hold.adopted_by(world.bob)

        with world.harness.transaction() as connection, pytest.raises(FencedError):
            hold.guard(connection)
        with world.harness.transaction() as connection:
            next_hold.guard(connection)

    # -- C21 described -----------------------------------------------------------------------------------------------

    @clauses("C21")
    def test_metadata_of_a_running_hold_is_replaced_and_nothing_else_changes(self, world: World) -> None:
        hold = world.alice.hold("job", 9 * world.tick, metadata={"old": True})

        outcome = hold.describe({"done": 40, "who": "gr\u00fc\u00df"})

        assert isinstance(outcome, Held)
        seen, before = world.bob.sees("job"), hold.lease
        assert dict(seen.metadata) == dict(outcome.lease.metadata) == {"done": 40, "who": "gr\u00fc\u00df"}
        assert (seen.owner_id, seen.fencing_token, seen.transitions) == ("alice", hold.token, before.transitions)
        assert seen.acquired_at == before.acquired_at
        assert world.about((seen.expires_at - seen.heartbeat_at).total_seconds(), 9 * world.tick)
        assert not seen.given_back
        assert dict(hold.renewed().metadata) == dict(seen.metadata)
        assert isinstance(hold.describe({}), Held)
        assert dict(world.bob.sees("job").metadata) == {}

    @clauses("C21", "C7")
    def test_a_description_does_not_extend_a_hold(self, world: World) -> None:
        hold = world.alice.hold("job", world.tick)
        world.pass_time(0.6 * world.tick)
        hold.describe({"late": True})

        world.pass_time(0.6 * world.tick)

        assert world.bob.hold("job").token == hold.token + 1

    @clauses("C21")
    def test_a_description_is_scoped_to_one_hold(self, world: World) -> None:
        former = world.lapsed_hold("job")
        world.bob.hold("job", metadata={"mine": True})

        assert isinstance(former.describe({"theirs": True}), Gone)
        assert dict(world.bob.sees("job").metadata) == {"mine": True}

    @clauses("C21", "C10")
    @every_end
    def test_what_is_over_cannot_be_described(self, world: World, end: str) -> None:
        how, reason = OVER[end]
        hold = how(world)

        outcome = hold.describe({"too": "late"})

        assert isinstance(outcome, Gone)
        assert outcome.reason == reason
        seen = world.alice.backend.get("job", budget())
        assert seen is None or "too" not in seen.metadata

    @clauses("C6", "C21")
    def test_a_record_tells_what_was_given_back_from_what_ran_out(self, world: World) -> None:
        assert not world.alice.hold("runs").lease.given_back
        world.alice.hold("released").released()
        world.alice.hold("waited out").released(min_hold=LONG)
        world.lapsed_hold("lapsed")

        assert not world.bob.sees("runs").given_back
        assert world.bob.sees("released").given_back
        assert world.bob.sees("waited out").given_back
        assert not world.bob.sees("lapsed").given_back
        assert {lease.task_name: lease.given_back for lease in world.bob.list(ended=True)} == {
            "runs": False,
            "released": True,
            "waited out": True,
            "lapsed": False,
        }
