"""`LeaderElection`: one leads; when it is gone another does; work ends before the lease does."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from pglease import BackendClosed, ConfigurationError, client, current_lease
from tests.support.worlds import wait_until

SOON = 20
"""Seconds within which everything here happens, on however busy a machine."""


@pytest.fixture
def candidates(store) -> Iterator[list]:
    """Two elections of two clients, running."""
    with ExitStack() as life:
        yield [
            life.enter_context(store.client(owner).leader_election("role", metadata={"pod": owner}))
            for owner in ("web-1", "web-2")
        ]


def leader_of(candidates) -> tuple:
    """Return who leads and who does not."""
    wait_until(lambda: any(each.is_leader for each in candidates), within=SOON)
    return tuple(sorted(candidates, key=lambda each: not each.is_leader))


def test_one_leads_and_everybody_can_read_who(candidates):
    leader, other = leader_of(candidates)

    assert leader.is_leader
    assert not other.is_leader
    assert leader.lease.held
    assert other.lease is None
    assert other.record.holder == leader.leases.owner_id
    assert other.record.metadata == {"pod": leader.leases.owner_id}
    assert leader.is_leader_confirmed_within(60)
    assert not other.is_leader_confirmed_within(60)
    assert not leader.is_leader_confirmed_within(1e-9)


def test_a_span_that_is_none_is_refused_whether_one_leads_or_not(leases):
    election = leases.leader_election("role")

    with pytest.raises(ConfigurationError, match="seconds must be"):
        election.is_leader_confirmed_within("soon")


def test_an_election_of_a_closed_client_says_so_instead_of_never_leading(leases):
    election = leases.leader_election("role")
    leases.close()

    with pytest.raises(BackendClosed):
        election.start()
    assert election.over


def test_closing_the_client_tells_the_work_to_end_and_gives_the_lease_back_after_it(leases, rival, monkeypatch):
    monkeypatch.setattr(client, "CLOSING_BOX", 240.0)
    begun, got_meanwhile = threading.Event(), []

    def work(lease):
        begun.set()
        assert lease.lost.wait(60)
        got_meanwhile.append(rival.try_acquire("role"))

    election = leases.leader_election("role", on_started=work).start()
    assert begun.wait(60)

    leases.close()

    assert got_meanwhile == [False]
    assert rival.try_acquire("role")
    assert election.over
    assert election.stop(60)


def test_work_that_does_not_end_when_the_client_is_closed_has_lost_its_lease(leases, monkeypatch):
    monkeypatch.setattr(client, "CLOSING_BOX", 0.2)
    begun, go_on, found = threading.Event(), threading.Event(), []

    def work(lease):
        begun.set()
        go_on.wait(60)
        found.append(lease.loss.reason)

    election = leases.leader_election("role", on_started=work).start()
    assert begun.wait(60)

    leases.close()
    go_on.set()

    assert election.stop(60)
    assert found == ["closed"]


def test_a_leader_that_gives_its_lease_back_by_hand_has_led_and_may_lead_again(leases):
    terms = []

    def work(lease):
        terms.append(lease.fencing_token)
        if len(terms) == 1:
            lease.release()
        assert lease.lost.wait(60)

    election = leases.leader_election("role", ttl=1.5, on_started=work).start()

    wait_until(lambda: len(terms) == 2)
    assert terms[1] > terms[0]
    assert election.stop(60)


def test_for_ever_may_be_written_as_a_number_wherever_one_waits(leases):
    election = leases.leader_election("role").start()

    assert election.wait_for_leader(float("inf"))
    assert election.stop(float("inf"))
    assert election.wait_until_lost(float("inf"))


def test_when_it_stops_another_leads_with_a_larger_token(candidates):
    leader, other = leader_of(candidates)
    token = leader.lease.fencing_token

    assert leader.stop()

    assert other.wait_for_leader(SOON)
    assert other.lease.fencing_token == token + 1
    assert other.record.transitions == 1
    assert not leader.is_leader


def test_the_record_outlives_a_resignation(leases):
    election = leases.leader_election("role", metadata={"pod": "web-1"})
    assert election.record is None
    with election:
        assert election.wait_for_leader(SOON)

    assert election.record.is_expired()
    assert election.record.holder == "ours"


def test_it_campaigns_again_after_a_loss(leases, rival, store):
    with leases.leader_election("role", ttl=1) as election:
        assert election.wait_for_leader(SOON)
        first = election.lease.fencing_token
        store.delete("role")
        assert rival.wait_for_lease("role", timeout=SOON, poll_interval=0.01)

        assert election.wait_until_lost(SOON)
        rival.release("role")

        assert election.wait_for_leader(SOON)
        assert election.lease.fencing_token >= first


def test_waiting_is_by_level_not_by_edge(leases):
    with leases.leader_election("role") as election:
        assert election.wait_for_leader(SOON)
        for _ in range(3):
            assert election.wait_for_leader(0)
        assert not election.wait_until_lost(0)
    assert election.wait_until_lost(0)


def test_a_wait_ends_with_the_election(leases, rival):
    rival.try_acquire("role")
    election = leases.leader_election("role").start()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(election.wait_for_leader)
        election.stop()
        assert waiting.result(SOON) is False


# -- work --------------------------------------------------------------------------------------------------------------


def test_lead_runs_the_work_in_this_thread_and_returns_its_result(leases, rival):
    def work(lease) -> tuple:
        assert current_lease() is lease
        return lease.fencing_token, threading.current_thread()

    assert leases.leader_election("role").lead(work) == (1, threading.current_thread())
    assert rival.try_acquire("role")


def test_work_that_is_told_to_end_returns_none(leases, store):
    def work(lease) -> str:
        store.delete("role")
        assert not lease.ensure(1000)
        return "too late"

    assert leases.leader_election("role").lead(work) is None


def test_lead_runs_again_in_a_later_term(leases, store):
    tokens: list[int] = []
    election = leases.leader_election("role", ttl=1)

    def work(lease) -> None:
        tokens.append(lease.fencing_token)
        if len(tokens) == 3:
            election.stop()
            return
        store.lapse("role")
        assert lease.lost.wait(SOON)

    assert election.lead(work, repeat=True) is None
    assert len(tokens) == 3
    assert tokens == sorted(set(tokens))


def test_work_that_raises_ends_the_term_and_the_error_comes_out(leases, rival):
    with pytest.raises(ZeroDivisionError):
        leases.leader_election("role").lead(lambda _lease: 1 / 0)

    assert rival.try_acquire("role")


def test_work_ends_before_anybody_else_leads(store):
    inside: list[str] = []
    together: list[list[str]] = []
    terms: list[str] = []

    def work_of(owner: str):
        def work(lease) -> None:
            inside.append(owner)
            together.append(list(inside))
            terms.append(owner)
            lease.lost.wait(SOON)
            time.sleep(0.002)  # it takes a moment to put things away
            inside.remove(owner)

        return work

    clients = {owner: store.client(owner) for owner in ("a", "b")}
    elections = {o: c.leader_election("role", ttl=30, on_started=work_of(o)) for o, c in clients.items()}
    with ExitStack() as life:
        for election in elections.values():
            life.enter_context(election)
        for number in range(20):
            wait_until(lambda number=number: len(terms) > number, within=SOON)
            elections[terms[-1]].step_down(cooldown=0.01)

    assert all(len(those) == 1 for those in together)
    assert inside == []


def test_started_and_stopped_alternate_in_their_order(leases, rival):
    told: list[str] = []

    def started(lease) -> None:
        told.append("started")
        lease.lost.wait(SOON)
        told.append("work ended")

    def stopped() -> None:
        told.append(f"stopped, {'free' if rival.try_acquire('role') else 'not free'}")
        rival.release("role")

    election = leases.leader_election("role", on_started=started, on_stopped=stopped)
    with election:
        for number in range(3):
            wait_until(lambda number=number: told.count("started") == number + 1, within=SOON)
            election.step_down(cooldown=0)

        wait_until(lambda: told.count("started") == 4, within=SOON)
    assert told == ["started", "work ended", "stopped, free"] * 4


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.long)])
def test_changes_are_terms_one_after_the_other_and_everybody_sees_each_once_and_in_order(store, count):
    told: dict[str, list[str]] = {"web-1": [], "web-2": []}
    inside, together, seen = [], [], []
    watch = store.rival("watcher").watch("role")
    proclaimed: list[int] = []

    def candidate(owner: str):
        def started(lease) -> None:
            told[owner].append("started")
            inside.append(owner)
            together.append(len(inside))
            lease.lost.wait(SOON)
            inside.remove(owner)
            told[owner].append("work ended")

        return store.rival(owner).leader_election(
            "role",
            on_started=started,
            on_stopped=lambda: told[owner].append("stopped"),
            on_new_leader=None if owner == "web-2" else lambda record: proclaimed.append(record.fencing_token),
        )

    with candidate("web-1") as one, candidate("web-2") as two:
        while len(seen) < count:
            change = watch.next(SOON)
            assert change is not None, "no next leader"
            if change.kind in {"present", "acquired", "taken over"}:
                seen.append(change.lease.fencing_token)
                wait_until(lambda: proclaimed and proclaimed[-1] == seen[-1], within=SOON)
                wait_until(lambda: one.is_leader or two.is_leader, within=SOON)
                (one if one.is_leader else two).step_down(cooldown=0.05)
        watch.close()

    assert together == [1] * len(together)
    assert len(together) >= count
    for story in told.values():
        assert story == ["started", "work ended", "stopped"] * (len(story) // 3)
        assert story, "each of the two has led"
    assert seen == list(range(1, count + 1))
    assert proclaimed[:count] == seen


def test_a_candidate_that_never_led_is_never_stopped(leases, rival):
    told: list[str] = []
    rival.try_acquire("role")
    election = leases.leader_election("role", on_stopped=lambda: told.append("stopped"))

    with election:
        assert not election.wait_for_leader(0.05)

    assert told == []


def test_failing_work_ends_the_term_and_is_logged(leases, caplog):
    ran: list[int] = []

    def started(lease) -> None:
        ran.append(lease.fencing_token)
        raise SystemExit(3)

    with leases.leader_election("role", on_started=started):
        wait_until(lambda: len(ran) == 2, within=SOON)

    assert "the work of the leader of 'role' failed" in caplog.text
    assert ran[1] > ran[0]


def test_a_failing_callback_does_not_end_the_campaign(leases, caplog):
    def stopped() -> None:
        raise KeyError("callback")

    with leases.leader_election("role", on_stopped=stopped) as election:
        assert election.wait_for_leader(SOON)
        election.step_down(cooldown=0)
        wait_until(lambda: "on_stopped failed" in caplog.text, within=SOON)
        assert election.wait_for_leader(SOON)


def test_stop_waits_for_the_work_or_says_that_it_goes_on(leases, rival):
    finish = threading.Event()
    election = leases.leader_election("role", on_started=lambda _lease: finish.wait(SOON)).start()
    assert election.wait_for_leader(SOON)

    assert election.stop(timeout=0.1) is False
    assert not election.is_leader
    assert not rival.try_acquire("role")
    finish.set()
    assert election.stop() is True
    assert rival.try_acquire("role")


def test_the_work_may_stop_its_own_election(leases):
    answers: list[bool] = []
    election = leases.leader_election("role", on_started=lambda _lease: answers.append(election.stop()))

    election.start()
    wait_until(lambda: answers == [False], within=SOON)

    assert election.stop() is True


def test_run_campaigns_until_it_is_stopped(leases):
    told: list[object] = []
    election = leases.leader_election("role")

    def started(lease) -> None:
        told.append(lease.fencing_token)
        election.stop()

    election.run(started, lambda: told.append("stopped"))

    assert told == [1, "stopped"]


def test_leader_only_runs_while_this_worker_leads(candidates):
    leader, other = leader_of(candidates)
    calls = [each.leader_only(lambda x: (x, current_lease() is not None)) for each in (leader, other)]

    assert calls[0](7) == (7, True)
    assert calls[1](7) is None


# -- stepping down -----------------------------------------------------------------------------------------------------


def test_stepping_down_lets_another_lead_and_stands_back(candidates):
    leader, other = leader_of(candidates)

    assert leader.step_down(cooldown=600) is True

    assert other.wait_for_leader(SOON)
    other.stop()
    assert not leader.wait_for_leader(0.2)


def test_a_candidate_that_steps_down_did_not_lead(candidates):
    _, other = leader_of(candidates)

    assert other.step_down() is False


def test_anybody_may_ask_the_leader_to_step_down(store):
    client, asker = store.client("leader"), store.client("asker")
    with client.leader_election("role", ttl=0.9) as election:
        assert election.wait_for_leader(SOON)
        observer = asker.leader_election("role")

        assert observer.request_step_down() is True
        assert observer.request_step_down() is False

        assert election.wait_until_lost(SOON)


def test_nobody_can_be_asked_when_nobody_leads(leases):
    assert leases.leader_election("role").request_step_down() is False


def test_a_candidate_that_defers_lets_others_go_first(store):
    late = store.client("late").leader_election("role", defer=0.5).start()
    early = store.client("early").leader_election("role").start()
    assert early.wait_for_leader(SOON)

    early.stop()

    assert late.wait_for_leader(SOON)
    late.stop()


def test_a_campaign_begun_after_a_stop_whose_work_went_on_begins_when_that_has_ended(leases):
    finish, begun = threading.Event(), threading.Semaphore(0)
    stopped, go_on = threading.Event(), threading.Event()

    def work(lease) -> None:
        begun.release()
        finish.wait(SOON)

    def stop() -> None:
        stopped.set()
        go_on.wait(SOON)

    election = leases.leader_election("role", on_started=work, on_stopped=stop).start()
    assert begun.acquire(timeout=SOON)
    assert election.stop(timeout=0) is False

    election.start()
    election.start()  # changes nothing
    assert not begun.acquire(blocking=False)
    finish.set()
    assert stopped.wait(SOON)
    assert not begun.acquire(timeout=0.3)  # the lease is free, and the first campaign not over
    go_on.set()

    assert begun.acquire(timeout=SOON)
    assert election.wait_for_leader(SOON)
    assert election.stop(SOON)
    assert election._has_ended()


def test_to_lead_once_is_to_campaign_no_more(leases, rival):
    order: list[str] = []
    election = leases.leader_election("role")

    def work(lease) -> None:
        order.append("begins")
        election.step_down(0)

    assert election.run_once(work, lambda: order.append("stopped")) is True

    assert order == ["begins", "stopped"]
    assert election._has_ended()
    assert rival.get_lease("role").transitions == 0


def test_whoever_stops_before_it_led_has_not_led_once(leases, rival):
    assert rival.try_acquire("role")
    election = leases.leader_election("role")

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(election.run_once, lambda _lease: None)
        wait_until(lambda: not election.over, within=SOON)
        election.stop()

        assert running.result(SOON) is False


def test_a_leader_may_end_its_process_on_a_loss(leases):
    election = leases.leader_election("role", on_lost="exit")
    assert election._wanted.on_lost == "exit"
    with pytest.raises(ConfigurationError, match="on_lost must be one of 'log', 'exit'"):
        leases.leader_election("role", on_lost="raise")


# -- probes, trouble, misuse -------------------------------------------------------------------------------------------


def test_a_probe_is_well_when_leading_and_when_not(candidates):
    leader, other = leader_of(candidates)

    assert leader.health()
    assert leader.health().reason == "leads"
    assert other.health()


def test_a_probe_is_not_well_while_work_goes_on_without_the_lease(leases, store):
    finish = threading.Event()
    with leases.leader_election("role", ttl=0.6, on_started=lambda _lease: finish.wait(SOON)) as election:
        assert election.wait_for_leader(SOON)
        store.lapse("role")

        wait_until(lambda: not election.health(), within=SOON)
        assert "work goes on" in election.health().reason
        finish.set()


def test_an_election_ends_with_its_client(store):
    client = store.client("web-1")
    election = client.leader_election("role").start()
    assert election.wait_for_leader(SOON)

    client.close()

    wait_until(lambda: election.stop(timeout=0), within=SOON)
    assert not election.is_leader


def test_a_forked_child_is_no_candidate(candidates):
    leader, _ = leader_of(candidates)
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(writer, b"leads" if leader.is_leader else b"does not")
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)

    assert os.read(reader, 100) == b"does not"
    os.close(reader)
    assert leader.is_leader


def test_starting_twice_is_one_campaign(leases):
    election = leases.leader_election("role")
    with election:
        before = set(threading.enumerate())
        election.start()
        assert not [each for each in threading.enumerate() if each.name == "pglease-election" and each not in before]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"ttl": 0}, "ttl"), ({"name": "n" * 241}, "240"), ({"on_started": 7}, "on_started"), ({"defer": -1}, "defer")],
)
def test_what_is_wrong_is_said_when_it_is_built(leases, arguments, named):
    with pytest.raises(ConfigurationError, match=named):
        leases.leader_election(**{"name": "role", **arguments})


def test_a_signal_handler_may_stop_it_whatever_it_has_interrupted(leases):
    election = leases.leader_election("role").start()
    assert election.wait_for_leader(SOON)

    def interrupted() -> bool:
        with election._changed:  # as in the middle of `begin_work`
            return election.stop()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(interrupted).result(SOON)


# -- who leads ---------------------------------------------------------------------------------------------------------


def test_everybody_who_campaigns_is_told_of_each_new_leader(store):
    told: dict[str, list[tuple[str, int]]] = {"web-1": [], "web-2": []}
    with ExitStack() as life:
        candidates = [
            life.enter_context(
                store.client(owner).leader_election(
                    "role",
                    on_new_leader=lambda record, owner=owner: told[owner].append((record.holder, record.fencing_token)),
                )
            )
            for owner in told
        ]
        leader, other = leader_of(candidates)
        terms = [(leader.leases.owner_id, 1), (other.leases.owner_id, 2)]
        wait_until(lambda: all(heard == terms[:1] for heard in told.values()), within=SOON)

        leader.step_down()

        wait_until(lambda: all(heard == terms for heard in told.values()), within=SOON)
    assert list(told.values()) == [terms, terms]


def test_a_callback_that_fails_is_called_for_the_next_leader_and_not_after_the_end(store, caplog):
    told = []

    def fail(record) -> None:
        told.append(record.fencing_token)
        raise ValueError("a defect")

    election = store.client("web").leader_election("role", on_new_leader=fail)
    with election:
        wait_until(lambda: told == [1] and election.is_leader, within=SOON)
        election.step_down(cooldown=0)
        wait_until(lambda: told == [1, 2], within=SOON)
    assert "on_new_leader failed for 'role'" in caplog.text

    assert store.rival("other").try_acquire("role")

    assert election._herald is None
    assert told == [1, 2]


def test_an_observer_sees_who_leads_and_never_does(store):
    observer = store.rival("observer").leader_election("role")
    with observer.observe() as changes, store.client("web").leader_election("role") as election:
        assert election.wait_for_leader(SOON)
        change = changes.next(SOON)
        assert (change.kind in {"present", "acquired"}, change.lease.holder) == (True, "web")
        election.stop()
        assert changes.next(SOON).kind == "released"

    assert not observer.is_leader
    assert observer.record.holder == "web"
