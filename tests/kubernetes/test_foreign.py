"""Side by side with other tools: an elector of client-go on the same object, kubectl, an operator's edits."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest

from pglease.backends.kubernetes_names import object_name
from pglease.records import Gone
from pglease.testing.api_leases import Json, StatusError

NAMESPACE = "jobs"


@dataclass
class Elector:
    """client-go's `tryAcquireOrRenew`, told again: what it reads, when it takes over, and what it writes."""

    leases: object
    now: Callable[[], float]
    identity: str
    duration: int = 15
    observed: Json | None = None
    observed_at: float = 0.0
    wall: Callable[[], datetime] = field(default=lambda: datetime.now(UTC))

    def try_acquire_or_renew(self, name: str) -> bool:
        found = self.leases.get(NAMESPACE, object_name(name))
        spec = found["spec"]
        if self.observed != spec:
            self.observed, self.observed_at = spec, self.now()
        holder = spec.get("holderIdentity", "")
        valid = self.observed_at + spec.get("leaseDurationSeconds", 0) > self.now()
        if holder and valid and holder != self.identity:
            return False
        mine = holder == self.identity
        stamp = self.wall().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        found["spec"] = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": self.duration,
            "acquireTime": spec["acquireTime"] if mine else stamp,
            "renewTime": stamp,
            "leaseTransitions": spec.get("leaseTransitions", 0) + (not mine),
        }
        return self._update(name, found)

    def release(self, name: str) -> bool:
        found = self.leases.get(NAMESPACE, object_name(name))
        stamp = self.wall().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        transitions = found["spec"]["leaseTransitions"]
        found["spec"] = {
            "holderIdentity": "",
            "leaseDurationSeconds": 1,
            "acquireTime": stamp,
            "renewTime": stamp,
            "leaseTransitions": transitions,
        }
        return self._update(name, found)

    def _update(self, name: str, found: Json) -> bool:
        try:
            self.observed = self.leases.replace(NAMESPACE, object_name(name), found)["spec"]
        except StatusError:
            return False
        self.observed_at = self.now()
        return True


@pytest.fixture
def elector(cluster) -> Elector:
    return Elector(cluster.server.leases, cluster.now, "elector")


def test_an_elector_respects_our_hold_and_follows_us_when_we_are_silent(cluster, alice, elector) -> None:
    hold = alice.hold("job", 20.5)
    assert not elector.try_acquire_or_renew("job")

    cluster.pass_time(15)
    hold.renewed(20.5)
    assert not elector.try_acquire_or_renew("job")
    cluster.pass_time(20.7)
    assert not elector.try_acquire_or_renew("job"), "whole seconds, rounded up"
    cluster.pass_time(0.5)
    assert elector.try_acquire_or_renew("job")

    outcome = hold.renew()
    assert isinstance(outcome, Gone)
    assert outcome.reason in {"forced", "taken"}
    assert outcome.lease is not None
    assert outcome.lease.owner_id == "elector"


def test_an_elector_takes_what_we_gave_back_at_once_and_counts_on(cluster, alice, elector) -> None:
    alice.hold("job").released()

    assert elector.try_acquire_or_renew("job")

    spec = cluster.object("job")["spec"]
    assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("elector", 1)
    assert alice.is_refused("job").held_by == "elector"


def test_we_respect_an_elector_and_follow_it_when_it_is_silent(cluster, alice, elector) -> None:
    first = alice.hold("job")
    first.released()
    elector.try_acquire_or_renew("job")
    assert alice.is_refused("job").retry_after == pytest.approx(15, abs=1)

    cluster.pass_time(10)
    assert elector.try_acquire_or_renew("job")
    assert alice.is_refused("job").retry_after == pytest.approx(15, abs=1)
    cluster.pass_time(15.1)
    taken = alice.hold("job")

    assert taken.token > first.token + 1, "the elector's hold was one, too"
    assert taken.lease.transitions == 2
    assert not elector.try_acquire_or_renew("job")


@pytest.mark.parametrize("year", ["2001", "2099"], ids=["long ago", "far in the future"])
def test_what_an_electors_clock_says_is_for_people(cluster, alice, elector, year: str) -> None:
    alice.hold("job").released()
    elector.wall = lambda: datetime(int(year), 1, 1, tzinfo=UTC)
    elector.try_acquire_or_renew("job")

    assert alice.is_refused("job").retry_after == pytest.approx(15, abs=1)
    cluster.pass_time(15.1)
    assert alice.hold("job").lease.transitions == 2


def test_what_an_elector_gave_back_is_free_at_once(cluster, alice, elector) -> None:
    alice.hold("job").released()
    elector.try_acquire_or_renew("job")

    elector.release("job")

    lease = alice.hold("job").lease
    assert (lease.fencing_token, lease.transitions) == (3, 2)


def test_an_electors_hold_is_shown_and_can_be_ended(cluster, alice, bob, elector) -> None:
    alice.hold("job").released()
    elector.try_acquire_or_renew("job")

    (lease,) = bob.list()
    assert (lease.owner_id, lease.fencing_token) == ("elector", 2)
    assert not bob.force("job", 1), "that was alice's"
    assert bob.force("job", 2)

    assert alice.hold("job").token == 3


def test_an_electors_hold_is_not_cleaned_up(cluster, alice, elector) -> None:
    alice.hold("job").released()
    elector.try_acquire_or_renew("job")

    assert alice.cleanup() == 0


def test_our_release_never_ends_an_electors_hold(cluster, alice, elector) -> None:
    hold = alice.hold("job", 10)
    elector.try_acquire_or_renew("job")
    cluster.pass_time(10.5)
    elector.try_acquire_or_renew("job")

    assert isinstance(hold.release(), Gone)

    assert cluster.object("job")["spec"]["holderIdentity"] == "elector"


def test_an_operator_may_free_a_lease_by_emptying_its_holder(cluster, alice, bob) -> None:
    hold = alice.hold("job")
    found = cluster.object("job")
    found["spec"]["holderIdentity"] = ""
    cluster.put(found)

    assert bob.hold("job").token > hold.token

    assert isinstance(hold.renew(), Gone)


def test_what_kubectl_shows_is_who_holds_it_and_nobody_once_it_is_free(cluster, alice, bob) -> None:
    hold = alice.hold("job", 90.25)
    spec = cluster.object("job")["spec"]
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == ("alice", 91, 0)

    hold.released()
    spec = cluster.object("job")["spec"]
    assert (spec.get("holderIdentity"), spec["leaseDurationSeconds"], spec["leaseTransitions"]) == ("", 1, 0)

    bob.hold("job")
    spec = cluster.object("job")["spec"]
    assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("bob", 1)


@pytest.mark.needs("kubectl")
def test_kubectl_itself_reads_our_leases(cluster, alice, tmp_path) -> None:
    alice.hold("job", 90.25)
    alice.hold("other")

    def kubectl(*words: str) -> str:
        where = ("--kubeconfig", str(cluster.kubeconfig), "--cache-dir", str(tmp_path / "cache"), "--namespace", "jobs")
        done = subprocess.run(["kubectl", *where, *words], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    listed = kubectl("get", "leases").splitlines()
    name = object_name("job")
    described = kubectl("describe", "lease", name)

    assert len(listed) == 3
    assert any(line.startswith(name) for line in listed)
    assert (
        kubectl("get", "lease", name, "-o", "jsonpath={.spec.holderIdentity} {.spec.leaseDurationSeconds}")
        == "alice 91"
    )
    assert "Holder Identity:" in described
    assert "alice" in described


def test_a_hold_that_is_waited_out_keeps_electors_away_too(cluster, alice, elector) -> None:
    alice.hold("job", 60).released(min_hold=30)

    assert not elector.try_acquire_or_renew("job")
    cluster.pass_time(31.1)
    assert elector.try_acquire_or_renew("job")


def test_the_times_are_the_servers_and_have_six_digits(cluster, alice) -> None:
    lease = alice.hold("job").lease

    spec = cluster.object("job")["spec"]
    assert abs((lease.acquired_at - datetime.now(UTC)).total_seconds()) < 30
    assert datetime.fromisoformat(spec["acquireTime"]) == lease.acquired_at
    assert all(len(spec[moment]) == len("2026-01-02T03:04:05.000006Z") for moment in ("acquireTime", "renewTime"))


def test_owner_references_finalizers_and_others_annotations_outlive_every_verb(cluster, alice, bob) -> None:
    hold = alice.hold("job")
    found = cluster.object("job")
    reference = {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "1"}
    theirs = {"ownerReferences": [reference], "finalizers": ["example.com/mine"]}
    found["metadata"] |= theirs
    found["metadata"]["annotations"]["example.com/note"] = "ours"
    cluster.put(found)

    hold.renewed()
    hold.released()
    bob.hold("job")

    metadata = cluster.object("job")["metadata"]
    assert {key: metadata[key] for key in theirs} == theirs
    assert metadata["annotations"]["example.com/note"] == "ours"
