"""The part of the contract that waiters and watchers rest on: C16 and C17, for stores with the traits."""

# ruff: noqa: D102  # the names of the tests are sentences

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from pglease import clock
from pglease.errors import BackendClosed, BackendUnavailable, ConfigurationError
from pglease.records import Granted, Refused, Ticket
from pglease.testing.clauses import clauses
from pglease.testing.harness import LONG, Ear, Queued, World, budget, new_id

LACKING: dict[str, tuple[str, Callable[[Any], object]]] = {
    "listen": ("wakes_waiters", lambda backend: backend.listen(budget())),
    "mark": ("wakes_waiters", lambda backend: backend.mark("job", LONG, budget())),
    "queue": ("fair", lambda backend: backend.queue(Ticket("job", new_id(), "late", LONG), budget())),
    "leave_queue": ("fair", lambda backend: backend.leave_queue("job", new_id(), budget())),
}
BOXED: dict[str, tuple[str, Callable[[Any, float], object]]] = {
    "listen": ("wakes_waiters", lambda backend, within: backend.listen(budget(within)).close()),
    "mark": ("wakes_waiters", lambda backend, within: backend.mark("job", LONG, budget(within))),
    "queue": ("fair", lambda backend, within: backend.queue(Ticket("job", new_id(), "late", 1.0), budget(within))),
    "leave_queue": ("fair", lambda backend, within: backend.leave_queue("job", new_id(), budget(within))),
}
every_waiting_verb = pytest.mark.parametrize("verb", LACKING)


class WaitingContract:
    """Clauses C16 and C17, and what the verbs of both owe to C11, C12, C14 and C15."""

    @pytest.fixture
    def ear(self, world: World) -> Iterator[Ear]:
        """Carol listens."""
        world.needs("wakes_waiters")
        ear = world.carol.listens()
        yield ear
        ear.close()

    @every_waiting_verb
    @clauses("C16", "C17")
    def test_a_store_that_lacks_a_trait_says_so(self, world: World, verb: str) -> None:
        trait, ask = LACKING[verb]
        if getattr(world.alice.backend.traits, trait):
            pytest.skip(f"this store has the trait {trait!r}")

        with pytest.raises(ConfigurationError, match=trait):
            ask(world.alice.backend)

    # -- C16 waking --------------------------------------------------------------------------------------------------

    @clauses("C16")
    def test_a_release_of_a_marked_name_is_heard(self, world: World, ear: Ear) -> None:
        hold = world.alice.hold("job")
        assert world.bob.mark("job")

        hold.released()

        assert not ear.hears("job", "released").left
        world.bob.hold("job")

    @clauses("C16", "C6")
    def test_a_release_into_min_hold_is_heard_too(self, world: World, ear: Ear) -> None:
        hold = world.alice.hold("job", 100 * world.tick)
        assert world.bob.mark("job")

        hold.released(min_hold=50 * world.tick)

        left = ear.hears("job", "released").left
        assert left is None or world.about(left, 50 * world.tick)

    @clauses("C16")
    def test_a_forced_release_is_heard(self, world: World, ear: Ear) -> None:
        hold = world.alice.hold("job")
        assert world.bob.mark("job")

        assert world.bob.force("job", hold.token)

        ear.hears("job", "released")

    @clauses("C16")
    def test_a_grant_of_a_marked_name_is_heard(self, world: World, ear: Ear) -> None:
        world.alice.hold("job", 60).released()  # some stores tell of names that nobody has marked, too
        assert world.carol.mark("job")

        world.bob.hold("job", 60)

        left = ear.hears("job", "granted").left
        assert left is None or world.about(left, 60)

    @clauses("C16", "C7")
    def test_a_grant_after_a_hold_that_lapsed_is_heard(self, world: World, ear: Ear) -> None:
        world.alice.hold("job", world.tick)
        assert world.carol.mark("job")
        world.pass_time(1.1 * world.tick)

        world.bob.hold("job")

        ear.hears("job", "granted")

    @clauses("C16", "C4")
    def test_nothing_is_heard_of_renewals_refusals_and_looks(self, world: World, ear: Ear) -> None:
        hold = world.alice.hold("job")
        assert world.bob.mark("job")

        for _ in range(5):
            hold.renewed()
            world.bob.is_refused("job")
            world.bob.sees("job")
        hold.released()

        heard = [ear.hears_next().what]
        while heard[-1] != "released":
            heard.append(ear.hears_next().what)
        assert heard in (["released"], ["granted", "released"])  # of the grant, where unmarked names are heard of too

    @clauses("C16", "C3")
    def test_a_mark_outlives_the_hold_it_was_set_in(self, world: World, ear: Ear) -> None:
        hold = world.alice.hold("job")
        assert world.carol.mark("job")

        for worker in (world.bob, world.alice, world.bob):
            hold.released()
            ear.hears("job", "released")
            hold = worker.hold("job")
            ear.hears("job", "granted")

    @clauses("C16", "C10")
    def test_marking_changes_no_record_and_keeps_the_longer_mark(self, world: World, ear: Ear) -> None:
        hold = world.alice.hold("job", metadata={"a": 1})
        before = world.bob.sees("job")

        assert world.bob.mark("job", 100 * world.tick)
        assert world.carol.mark("job", world.tick)

        after = world.bob.sees("job")
        assert (after.fencing_token, after.expires_at, after.metadata) == (hold.token, before.expires_at, {"a": 1})
        world.pass_time(2 * world.tick)
        hold.released()
        ear.hears("job", "released")

    @clauses("C16", "C9")
    def test_a_name_without_a_record_cannot_be_marked(self, world: World) -> None:
        world.needs("wakes_waiters")

        assert world.bob.mark("never") is False
        assert world.bob.names(ended=True) == []

    @clauses("C16", "C9")
    def test_names_are_heard_as_they_are(self, world: World, ear: Ear) -> None:
        names = ["job", "job ", "Job", "  both ends  ", 'it\'s 100% \\ "quoted"', "🌙" * 255, "released 0 job"]
        holds = [world.alice.hold(name) for name in names]
        assert all(world.bob.mark(name) for name in names)

        for hold in holds:
            hold.released()

        for name in names:
            ear.hears(name, "released")

    @clauses("C16", "C11")
    def test_everybody_who_listens_hears_it(self, world: World, ear: Ear) -> None:
        others = [world.alice.listens(), world.bob.listens(), world.bob.listens()]
        hold = world.alice.hold("job")
        assert world.bob.mark("job")

        hold.released()

        for each in [ear, *others]:
            each.hears("job", "released")
            each.close()

    @clauses("C16", "C11")
    def test_whoever_listens_marks_and_looks_misses_no_release(self, world: World) -> None:
        world.needs("wakes_waiters")
        for turn in range(10):
            name = f"job-{turn}"
            hold = world.alice.hold(name)
            ear = world.bob.listens()
            started = threading.Barrier(2, timeout=30)

            def release(hold: Any = hold, started: threading.Barrier = started) -> None:
                started.wait()
                hold.released()

            with ThreadPoolExecutor(1) as pool:
                releasing = pool.submit(release)
                started.wait()
                waiting = True
                while waiting:  # a mark that could not be set says so: whoever wanted it looks again
                    marked = world.bob.mark(name)
                    waiting = isinstance(world.bob.ask(name), Refused)
                    if waiting and marked:
                        ear.hears(name, "released")
                        waiting = False
                releasing.result()
            ear.close()

    @clauses("C14", "C16")
    def test_listening_in_silence_ends_in_its_time(self, world: World, ear: Ear) -> None:  # noqa: ARG002
        began = clock.now()

        while list(ear.subscription.next(0.2)):  # of what was done before, and comes late
            assert clock.now() - began < 20

        assert clock.now() - began < 20

    @clauses("C15", "C16")
    def test_closing_a_subscription_wakes_whoever_listens(self, world: World) -> None:
        world.needs("wakes_waiters")
        ear = world.bob.listens()
        listening = threading.Event()

        def listen() -> None:
            listening.set()
            with pytest.raises((BackendClosed, BackendUnavailable)):
                ear.listens_until_it_is_over()

        began = clock.now()
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(listen)
            assert listening.wait(10)
            ear.close()
            ended.result(30)
        ear.close()

        assert clock.now() - began < 10

    @clauses("C15", "C16")
    def test_closing_a_client_ends_its_subscriptions_alone(self, world: World, ear: Ear) -> None:
        guest = world.worker("guest")
        heard = guest.listens()
        hold = world.alice.hold("job")
        assert world.carol.mark("job")

        guest.backend.close()
        hold.released()

        with pytest.raises((BackendClosed, BackendUnavailable)):
            heard.listens_until_it_is_over()
        ear.hears("job", "released")

    @clauses("C12", "C16")
    def test_after_a_break_one_may_listen_again(self, world: World) -> None:
        world.needs("wakes_waiters")
        hold = world.alice.hold("job")
        ear = world.bob.listens()
        assert world.bob.mark("job")
        try:
            world.harness.break_link()
            world.harness.mend_link()
        except pytest.skip.Exception:
            ear.close()
            raise
        ear.close()

        ear = world.bob.listens()
        hold.renew_after_trouble()
        hold.released()

        ear.hears("job", "released")
        ear.close()

    @every_waiting_verb
    @clauses("C15", "C16", "C17")
    def test_a_closed_client_says_so_to_waiters(self, world: World, verb: str) -> None:
        trait, ask = BOXED[verb]
        world.needs(trait)
        guest = world.worker("guest")
        guest.backend.close()

        with pytest.raises(BackendClosed):
            ask(guest.backend, 5.0)

    @every_waiting_verb
    @clauses("C14", "C16", "C17")
    def test_a_waiters_verb_with_no_time_left_ends_at_once(self, world: World, verb: str) -> None:
        trait, ask = BOXED[verb]
        world.needs(trait)
        world.alice.hold("job")
        ask(world.alice.backend, 10.0)

        began = clock.now()
        with suppress(BackendUnavailable):
            ask(world.alice.backend, 0.0)

        assert clock.now() - began < 1.5

    @every_waiting_verb
    @clauses("C12", "C14", "C16", "C17")
    def test_with_the_link_broken_a_waiters_verb_is_unavailable_within_its_budget(
        self, world: World, verb: str
    ) -> None:
        trait, ask = BOXED[verb]
        world.needs(trait)
        world.alice.hold("job")
        ask(world.alice.backend, 10.0)
        world.harness.break_link()

        began = clock.now()
        with pytest.raises(BackendUnavailable):
            ask(world.alice.backend, 1.0)

        assert clock.now() - began < 2.5

    # -- C17 order ---------------------------------------------------------------------------------------------------

    @clauses("C17")
    def test_tickets_are_numbered_in_the_order_of_their_arrival(self, world: World) -> None:
        world.needs("fair")
        world.alice.hold("job")

        queued = [worker.queue("job") for worker in (world.bob, world.carol, world.alice)]

        assert [each.place.ahead for each in queued] == [0, 1, 2]
        assert queued[0].place.number < queued[1].place.number < queued[2].place.number
        assert [each.renewed().place for each in queued] == [each.place for each in queued]

    @clauses("C17", "C7", "C10")
    def test_who_queues_can_be_read_in_order_and_the_dead_do_not_count(self, world: World) -> None:
        world.needs("fair")

        def queued() -> list[str]:
            backend: Any = world.carol.backend
            found: list[str] = backend.queued("job", budget())
            return found

        assert queued() == []
        world.alice.hold("job", 1000 * world.tick)
        world.bob.queue("job", world.tick)
        second = world.carol.queue("job", 100 * world.tick)
        world.alice.queue("job", 100 * world.tick)
        assert queued() == ["bob", "carol", "alice"]

        world.pass_time(1.1 * world.tick)
        assert queued() == ["carol", "alice"]
        assert second.leave()
        assert queued() == ["alice"]

    @clauses("C17", "C7", "C10")
    def test_every_queue_can_be_read_at_once_and_one_of_the_dead_is_none(self, world: World) -> None:
        world.needs("fair")
        for name in ("shop:job", "shop:other", "shop:dead", "shop%job"):
            world.alice.hold(name, 1000 * world.tick)

        world.bob.queue("shop:job", 100 * world.tick)
        world.carol.queue("shop:job", 100 * world.tick)
        world.bob.queue("shop%job", 100 * world.tick)
        world.carol.queue("shop:dead", world.tick)
        world.pass_time(1.1 * world.tick)

        backend: Any = world.carol.backend
        assert backend.queues("shop:", budget()) == {"shop:job": ["bob", "carol"]}
        assert backend.queues("shop%", budget()) == {"shop%job": ["bob"]}
        assert len(backend.queues("", budget())) == 2

    @clauses("C17", "C1")
    def test_a_ticket_does_not_end_a_hold(self, world: World) -> None:
        world.needs("fair")
        hold = world.alice.hold("job")
        queued = world.bob.queue("job")

        assert queued.is_refused().held_by == "alice"
        hold.renewed()

    @clauses("C17")
    def test_a_free_name_goes_to_the_head_of_the_queue_and_to_nobody_else(self, world: World) -> None:
        world.needs("fair")
        hold = world.alice.hold("job")
        first, second = world.bob.queue("job"), world.carol.queue("job")

        hold.released()

        for refused in (world.alice.is_refused("job"), second.is_refused(), world.bob.is_refused("job")):
            assert (refused.lease, refused.reserved_for) == (None, "bob")
            assert 0 < refused.retry_after <= LONG
        taken = first.hold()
        assert taken.token == hold.token + 1
        taken.released()
        assert second.hold().token == hold.token + 2

    @clauses("C17", "C7")
    def test_a_lapsed_name_is_reserved_too(self, world: World) -> None:
        world.needs("fair")
        world.alice.hold("job", world.tick)
        queued = world.bob.queue("job")

        world.pass_time(1.1 * world.tick)

        world.carol.is_refused("job")
        queued.hold()

    @clauses("C17")
    def test_a_grant_takes_its_ticket_away(self, world: World) -> None:
        world.needs("fair")
        hold = world.alice.hold("job")
        first, second = world.bob.queue("job"), world.carol.queue("job")
        hold.released()

        first.hold().released()

        assert first.leave() is False
        assert second.renewed().place.ahead == 0
        world.bob.is_refused("job")

    @clauses("C17", "C13")
    def test_a_retry_recognises_its_own_grant_though_others_wait(self, world: World) -> None:
        world.needs("fair")
        hold = world.alice.hold("job")
        first, _ = world.bob.queue("job"), world.carol.queue("job")
        hold.released()
        taken = first.hold()

        again = world.bob.ask("job", lease_id=taken.request.lease_id, ticket_id=first.ticket_id)

        assert isinstance(again, Granted)
        assert again.lease.fencing_token == taken.token

    @clauses("C17", "C7")
    def test_a_ticket_that_is_not_renewed_holds_nobody_up(self, world: World) -> None:
        world.needs("fair")
        hold = world.alice.hold("job")
        dead, alive = world.bob.queue("job", world.tick), world.carol.queue("job")
        hold.released()
        assert 0 < alive.is_refused().retry_after <= world.tick

        world.pass_time(1.1 * world.tick)

        alive.hold().released()
        assert dead.renewed().place.ahead == 0

    @clauses("C17")
    def test_a_ticket_that_came_back_stands_behind_those_who_stayed(self, world: World) -> None:
        world.needs("fair")
        world.alice.hold("job")
        stalled, alive = world.bob.queue("job", world.tick), world.carol.queue("job")

        world.pass_time(1.1 * world.tick)

        assert stalled.renewed().place.ahead == 1
        assert alive.renewed().place.ahead == 0

    @clauses("C17", "C8")
    def test_a_renewed_ticket_keeps_its_place(self, world: World) -> None:
        world.needs("fair")
        hold = world.alice.hold("job")
        first, second = world.bob.queue("job", world.tick), world.carol.queue("job")
        for _ in range(4):
            world.pass_time(0.5 * world.tick)
            assert first.renewed(world.tick).place == first.place

        hold.released()

        second.is_refused()
        first.hold()

    @clauses("C17")
    def test_whoever_leaves_lets_the_next_in(self, world: World) -> None:
        world.needs("fair")
        hold = world.alice.hold("job")
        first, second = world.bob.queue("job"), world.carol.queue("job")
        hold.released()

        assert first.leave() is True
        assert first.leave() is False

        second.hold()

    @clauses("C16", "C17")
    def test_leaving_is_heard(self, world: World, ear: Ear) -> None:
        world.needs("fair")
        hold = world.alice.hold("job")
        queued = world.bob.queue("job")
        assert world.carol.mark("job")
        hold.released()
        ear.hears("job", "released")

        queued.leave()

        ear.hears("job", "released")

    @clauses("C17")
    def test_with_the_queue_empty_the_name_is_anybodys_again(self, world: World) -> None:
        world.needs("fair")
        hold = world.alice.hold("job")
        queued = [world.bob.queue("job"), world.carol.queue("job")]
        hold.released()
        for each in queued:
            each.leave()

        world.alice.hold("job")

    @clauses("C9", "C17")
    def test_a_queue_is_of_one_name(self, world: World) -> None:
        world.needs("fair")
        one, two = world.alice.hold("one"), world.alice.hold("two")
        ticket_id = new_id()
        world.bob.queue("one", ticket_id=ticket_id)
        assert world.carol.queue("two").place.ahead == 0
        one.released()
        two.released()

        world.alice.is_refused("one")
        assert world.bob.is_refused("two", ticket_id=ticket_id).reserved_for == "carol"
        world.bob.hold("one", ticket_id=ticket_id)

    @clauses("C9", "C17")
    def test_there_is_no_queue_for_a_name_without_a_record(self, world: World) -> None:
        world.needs("fair")
        backend: Any = world.bob.backend

        assert backend.queue(Ticket("never", new_id(), "bob", LONG), budget()) is None
        assert backend.leave_queue("never", new_id(), budget()) is False
        assert world.bob.names(ended=True) == []

    @clauses("C17")
    def test_a_cleanup_leaves_a_name_that_somebody_queues_for(self, world: World) -> None:
        world.needs("fair")
        hold = world.alice.hold("job")
        queued = world.bob.queue("job")
        hold.released()

        assert world.carol.cleanup() == 0
        world.carol.is_refused("job")
        assert queued.hold().token == hold.token + 1

    @clauses("C10", "C17")
    def test_queueing_changes_no_record(self, world: World) -> None:
        world.needs("fair")
        hold = world.alice.hold("job")

        world.bob.queue("job").leave()

        after = world.bob.sees("job")
        assert (after.fencing_token, after.expires_at, after.transitions) == (hold.token, hold.lease.expires_at, 0)

    @clauses("C11", "C17")
    def test_many_who_arrive_at_once_are_served_by_number_and_one_at_a_time(self, world: World) -> None:
        world.needs("fair")
        hold = world.alice.hold("job")
        workers = [world.bob, world.carol] * 6
        start = threading.Barrier(len(workers), timeout=30)

        def arrive(place: int) -> Queued:
            start.wait()
            return workers[place].queue("job")

        with ThreadPoolExecutor(len(workers)) as pool:
            queued = sorted(pool.map(arrive, range(len(workers))), key=lambda each: each.place.number)

        numbers = [each.place.number for each in queued]
        assert len(set(numbers)) == len(numbers)
        for place, each in enumerate(queued):
            hold.released()
            for later in queued[place + 1 :]:
                later.is_refused()
            hold = each.hold()
