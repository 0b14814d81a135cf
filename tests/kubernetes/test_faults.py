"""What goes wrong between a client and an API server, and what becomes of it (X-77)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from pglease import clock
from pglease.errors import BackendMisconfigured, BackendUnavailable
from pglease.records import Gone, Granted, Held, Refused, Released
from pglease.testing.harness import LONG, Hold, Worker, budget, new_id
from pglease.testing.proxy import Proxy

LOST_REPLIES: dict[str, dict[str, Any]] = {
    "cut after the commit": {"commit": True, "status": 0},
    "500 after the commit": {"commit": True, "status": 500},
    "503 after the commit": {"commit": True, "status": 503},
    "504 after the commit": {"commit": True, "status": 504},
    "cut before the commit": {"commit": False, "status": 0},
    "500 before the commit": {"commit": False, "status": 500},
    "429": {"commit": False, "status": 429},
}
whatever_became_of_it = pytest.mark.parametrize("fault", LOST_REPLIES.values(), ids=LOST_REPLIES)


@whatever_became_of_it
def test_a_new_name_is_granted_once_whatever_became_of_its_creation(cluster, alice, bob, fault) -> None:
    cluster.next("POST", **fault)

    hold = alice.hold("job")

    assert (hold.token, hold.lease.transitions) == (1, 0)
    assert bob.is_refused("job").held_by == "alice"
    hold.released()


@whatever_became_of_it
def test_the_second_write_of_a_new_name_may_get_lost_too(cluster, alice, bob, fault) -> None:
    cluster.next("PUT", **fault)

    hold = alice.hold("job")

    assert hold.token == 1
    hold.released()
    assert bob.hold("job").token == 2


@whatever_became_of_it
def test_a_takeover_burns_one_token_whatever_became_of_its_write(cluster, alice, bob, fault) -> None:
    alice.hold("job").released()
    cluster.next("PUT", **fault)

    hold = bob.hold("job")

    assert (hold.token, hold.lease.transitions) == (2, 1)
    assert alice.is_refused("job").held_by == "bob"


@whatever_became_of_it
def test_a_renewal_holds_whatever_became_of_its_write(cluster, alice, bob, fault) -> None:
    hold = alice.hold("job", 30)
    cluster.next("PUT", **fault)

    assert hold.renewed(60).fencing_token == hold.token

    assert 55 < bob.is_refused("job").retry_after <= 60


@whatever_became_of_it
def test_a_release_is_our_own_whatever_became_of_its_write(cluster, alice, bob, fault) -> None:
    hold = alice.hold("job")
    cluster.next("PUT", **fault)

    assert hold.release() == Released()

    assert bob.hold("job").token == 2


@whatever_became_of_it
def test_a_forced_release_is_one_whatever_became_of_its_write(cluster, alice, bob, fault) -> None:
    hold = alice.hold("job")
    cluster.next("PUT", **fault)

    assert bob.force("job", hold.token)

    assert isinstance(hold.renew(), Gone)


@whatever_became_of_it
def test_a_cleanup_counts_what_is_gone_whatever_became_of_the_delete(cluster, alice, bob, fault) -> None:
    alice.hold("job").released()
    cluster.next("DELETE", **fault)

    assert bob.cleanup() == 1

    assert not cluster.exists("job")
    assert alice.hold("job").token == 2


@whatever_became_of_it
def test_looking_is_done_again(cluster, alice, fault) -> None:
    alice.hold("job")
    cluster.next("GET", **fault)

    assert alice.sees("job").owner_id == "alice"
    cluster.next("GET", **fault)
    assert alice.names() == ["job"]


def test_a_release_whose_reply_was_lost_is_our_own_although_a_rival_took_the_name_at_once(cluster, alice, bob) -> None:
    hold = alice.hold("job")
    cluster.next("PUT", commit=True, status=0, after=lambda: bob.hold("job"))

    assert hold.release() == Released()

    assert cluster.worker("carol").is_refused("job").held_by == "bob"


def test_belief_in_a_grant_whose_reply_was_lost_counts_from_before_it_was_sent(cluster, alice) -> None:
    alice.hold("job").released()
    request_id = new_id()
    cluster.next("PUT", commit=True, status=0, after=lambda: cluster.pass_time(20))

    lease = alice.hold("job", 60, lease_id=request_id).lease

    assert lease.time_remaining() <= 40
    assert alice.hold("job", 60, lease_id=request_id).lease.time_remaining() <= 40


def test_a_grant_found_by_a_later_call_has_only_what_is_left_since_the_first_was_sent(cluster, alice) -> None:
    alice.hold("job").released()
    request_id = new_id()
    cluster.next("PUT", commit=True, status=0)
    cluster.next("GET", status=503, times=1000)
    with pytest.raises(BackendUnavailable) as raised:
        _ask_after_a_look(cluster, alice, request_id)
    assert raised.value.outcome_unknown
    cluster.server._faults.clear()
    cluster.pass_time(45)

    again = alice.hold("job", 60, lease_id=request_id).lease

    assert again.time_remaining() <= 15


def _ask_after_a_look(cluster, worker: Worker, lease_id: str) -> None:
    """Ask with a budget that ends while the outcome is still unknown; the first look is let through."""
    faults = cluster.server._faults
    trouble = faults.pop()
    cluster.server.next(type(trouble)("GET", commit=True, status=None))
    faults.append(trouble)
    worker.ask("job", 60, lease_id=lease_id, within=0.6)


def test_many_renewals_in_one_batch_count_from_the_first(cluster, alice) -> None:
    holds = [alice.hold(f"job-{index}") for index in range(20)]
    sent: list[float] = []
    for _ in holds:
        cluster.meanwhile("PUT", lambda: sent.append(clock.now()))
    box = budget()

    outcomes = alice.backend.renew([hold.renewal() for hold in holds], box)

    assert all(isinstance(outcome, Held) for outcome in outcomes)
    assert len(sent) == 20
    assert box.sent_at <= min(sent)


def test_a_rival_who_writes_first_wins_and_is_named(cluster, alice, bob) -> None:
    alice.hold("job").released()
    cluster.meanwhile("PUT", lambda: bob.hold("job"))

    refused = alice.is_refused("job")

    assert refused.held_by == "bob"


def test_a_rival_who_creates_first_wins_and_is_named(cluster, alice, bob) -> None:
    cluster.meanwhile("POST", lambda: bob.hold("job"))

    assert alice.is_refused("job").held_by == "bob"


def test_a_holder_who_renews_at_the_last_moment_keeps_its_lease(cluster, alice, bob) -> None:
    hold = alice.hold("job", 30)
    bob.is_refused("job")
    cluster.pass_time(31)
    cluster.meanwhile("PUT", lambda: _renew_late(cluster, hold))

    assert bob.is_refused("job").held_by == "alice"


def _renew_late(cluster, hold: Hold) -> None:
    cluster.pass_time(-31)  # its own clock is behind: it has not lapsed in its eyes
    hold.renewed(60)
    cluster.pass_time(31)


def test_a_change_by_a_bystander_costs_a_renewal_one_more_look(cluster, alice) -> None:
    hold = alice.hold("job")
    found = cluster.object("job")
    found["metadata"].setdefault("annotations", {})["team"] = "billing"
    found["metadata"]["labels"]["tier"] = "gold"
    cluster.put(found)

    assert hold.renewed().fencing_token == hold.token

    metadata = cluster.object("job")["metadata"]
    assert (metadata["annotations"]["team"], metadata["labels"]["tier"]) == ("billing", "gold")


# -- when the server is busy -------------------------------------------------------------------------------------------


def test_it_waits_as_long_as_the_server_asks(cluster, alice) -> None:
    cluster.next("GET", status=429, headers=(("Retry-After", "1"),))

    began = clock.now()
    alice.hold("job")

    assert clock.now() - began >= 1


def test_a_wait_beyond_the_budget_is_not_begun(cluster, alice) -> None:
    alice.hold("job").released()
    cluster.next("PUT", status=429, headers=(("Retry-After", "60"),))

    began = clock.now()
    with pytest.raises(BackendUnavailable, match="429") as raised:
        alice.ask("job", within=5)

    assert clock.now() - began < 2
    assert not raised.value.outcome_unknown, "it was refused before it was looked at"


def test_a_server_that_stays_in_trouble_leaves_the_outcome_unknown(cluster, alice) -> None:
    alice.hold("job").released()
    cluster.next("PUT", status=504, times=1000)

    with pytest.raises(BackendUnavailable, match="504") as raised:
        alice.ask("job", within=0.5)

    assert raised.value.outcome_unknown


def test_a_server_that_cannot_be_reached_leaves_nothing_unknown(cluster, alice) -> None:
    alice.hold("job").released()
    cluster.server.stop()

    with pytest.raises(BackendUnavailable, match="reached") as raised:
        alice.ask("job", within=0.5)

    assert not raised.value.outcome_unknown


def test_one_hold_in_trouble_leaves_the_rest_of_its_batch_alone(cluster, alice) -> None:
    holds = [alice.hold(name) for name in ("a", "b", "c")]
    cluster.next("PUT", status=503, times=1000, within="pglease-b-")

    outcomes = alice.backend.renew([hold.renewal() for hold in holds], budget(1.0))

    assert [type(outcome).__name__ for outcome in outcomes] == ["Held", "Unknown", "Held"]


def test_a_reply_that_drips_in_ends_with_the_budget(cluster, alice, tmp_path) -> None:
    with Proxy("127.0.0.1", cluster.server.port) as proxy:
        path = cluster.server.kubeconfig(tmp_path / "dripping", server=f"http://127.0.0.1:{proxy.port}")
        slow = cluster.worker("slow", kubeconfig=path, namespace="jobs")
        slow.hold("job")
        proxy.drip(1, 0.05)

        began = clock.now()
        with pytest.raises(BackendUnavailable):
            slow.ask("job", within=1.0)

        assert clock.now() - began < 3


def test_a_name_that_does_not_resolve_in_time_ends_with_the_budget(cluster, tmp_path, monkeypatch) -> None:
    import socket

    real, leave = socket.getaddrinfo, threading.Event()

    def stuck(host: str, *args: Any, flags: int = 0, **kwargs: Any) -> Any:
        if host == "stuck.invalid" and not flags:
            leave.wait(30)
        return real(host, *args, flags=flags, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", stuck)
    path = cluster.server.kubeconfig(tmp_path / "stuck", server="http://stuck.invalid:6443")

    began = clock.now()
    with pytest.raises(BackendUnavailable):
        cluster.worker("alice", kubeconfig=path).ask("job", within=0.5)
    leave.set()

    assert clock.now() - began < 3


def test_renewals_wait_for_no_place_behind_others(cluster) -> None:
    alice = cluster.worker("alice", pool_size=1)
    hold = alice.hold("job")
    inside, leave = threading.Event(), threading.Event()
    cluster.meanwhile("GET", lambda: (inside.set(), leave.wait(20)), within="pglease-other-")
    stuck = threading.Thread(target=alice.ask, args=("other",))
    stuck.start()
    assert inside.wait(10)

    outcome = hold.renew()
    with pytest.raises(BackendUnavailable, match="pool_size"):
        alice.ask("third", within=0.3)
    leave.set()
    stuck.join(20)

    assert isinstance(outcome, Held)


def test_a_list_whose_pages_expired_is_read_anew(cluster, alice, monkeypatch) -> None:
    monkeypatch.setattr("pglease.backends.kubernetes_api.PAGE", 4)
    for index in range(10):
        alice.hold(f"job-{index}")
    cluster.next("GET", status=410, within="continue=")

    assert len(alice.names()) == 10


# -- objects that are not what they were -------------------------------------------------------------------------------


def test_a_deleted_lease_is_lost_and_stays_deleted(cluster, alice) -> None:
    hold, other = alice.hold("job"), alice.hold("other")
    cluster.delete("job")
    cluster.delete("other")

    assert hold.renew() == Gone("deleted")
    assert other.release() == Gone("deleted")

    assert not cluster.exists("job")
    assert not cluster.exists("other")


def test_a_lease_that_was_deleted_and_made_anew_is_somebody_elses(cluster, alice, bob) -> None:
    hold = alice.hold("job")
    cluster.delete("job")
    bob.hold("job")

    outcome = hold.renew()

    assert isinstance(outcome, Gone)
    assert outcome.reason == "taken"
    assert isinstance(hold.release(), Gone)
    bob.is_refused("job")


def test_an_object_under_our_name_that_is_not_ours_is_refused_and_left_alone(cluster, alice) -> None:
    alice.hold("job").released()
    found = cluster.object("job")
    del found["metadata"]["annotations"]
    made = cluster.put(found)

    for verb in (lambda: alice.ask("job"), lambda: alice.sees("job")):
        with pytest.raises(BackendMisconfigured, match="not the lease 'job'"):
            verb()

    assert cluster.object("job") == made
    assert alice.names(ended=True) == []


GARBLED: dict[str, Callable[[dict[str, str]], Any]] = {
    "a token that is no number": lambda ours: ours.update({"pglease/fencing-token": "many"}),
    "a span that is no number": lambda ours: ours.update({"pglease/expires-after": "soon"}),
    "an endless span": lambda ours: ours.update({"pglease/expires-after": "inf"}),
    "no owner": lambda ours: ours.pop("pglease/owner"),
    "metadata that is no JSON": lambda ours: ours.update({"pglease/metadata": "{"}),
    "no time of writing": lambda ours: ours.update({"pglease/written-at": "yesterday"}),
    "a protocol to come": lambda ours: ours.update({"pglease/protocol": "2"}),
}


@pytest.mark.parametrize("garble", GARBLED.values(), ids=GARBLED)
def test_annotations_that_cannot_be_read_are_no_grant_and_no_crash(cluster, alice, garble) -> None:
    alice.hold("job").released()
    alice.hold("sound")
    found = cluster.object("job")
    garble(found["metadata"]["annotations"])
    cluster.put(found)

    with pytest.raises(BackendMisconfigured):
        alice.ask("job")

    assert alice.names(ended=True) == ["sound"]


def test_a_token_at_its_end_is_refused(cluster, alice) -> None:
    alice.hold("job").released()
    found = cluster.object("job")
    found["metadata"]["annotations"]["pglease/fencing-token"] = str(2**63 - 1)
    cluster.put(found)

    with pytest.raises(BackendMisconfigured, match="at its end"):
        alice.ask("job")


# -- clocks ------------------------------------------------------------------------------------------------------------


def test_a_holder_of_whom_nothing_is_heard_for_its_ttl_is_followed(cluster, alice, bob) -> None:
    alice.hold("job", 30)
    assert bob.is_refused("job").retry_after == pytest.approx(30, abs=1)

    cluster.pass_time(29)
    assert isinstance(bob.ask("job"), Refused)
    cluster.pass_time(1.1)
    assert isinstance(bob.ask("job"), Granted)


def test_each_renewal_that_is_seen_begins_the_wait_anew(cluster, alice, bob) -> None:
    hold = alice.hold("job", 30)
    bob.is_refused("job")
    for _ in range(4):
        cluster.pass_time(20)
        hold.renewed(30)
        assert bob.is_refused("job").retry_after == pytest.approx(30, abs=1)


def test_times_that_a_wrong_clock_wrote_decide_nothing(cluster, alice, bob) -> None:
    """A holder's renewTime an hour ahead or behind neither keeps nor ends its hold."""
    for hours in (1, -1):
        name = f"job {hours}"
        hold = alice.hold(name, 30)
        found = cluster.object(name)
        for field in ("renewTime", "acquireTime"):
            hour = int(found["spec"][field][11:13])
            found["spec"][field] = f"{found['spec'][field][:11]}{(hour + hours) % 24:02}{found['spec'][field][13:]}"
        found["metadata"]["annotations"]["pglease/written-at"] = found["spec"]["renewTime"]
        cluster.put(found)

        assert bob.is_refused(name).retry_after == pytest.approx(30, abs=1)
        hold.renewed(30)
        bob.is_refused(name)
        cluster.pass_time(31)
        assert bob.hold(name).token == 2


def test_a_short_ttl_is_kept_beside_its_whole_seconds(cluster, alice, bob) -> None:
    alice.hold("job", 0.4)

    assert cluster.object("job")["spec"]["leaseDurationSeconds"] == 1
    assert bob.is_refused("job").retry_after <= 0.4
    cluster.pass_time(0.5)
    assert bob.hold("job", LONG).token == 2
