"""What waiters hear by watch: over the end of a watch, cuts, restarts, and a server that has forgotten."""

from __future__ import annotations

import threading
import time

import pytest

from pglease.backends import kubernetes_watch
from pglease.errors import BackendUnavailable
from pglease.testing.api_server import ALL_VERBS, Fault
from pglease.testing.harness import Worker, budget
from tests.kubernetes.conftest import WORKERS_VERBS


def _held(worker: Worker, name: str = "job"):
    hold = worker.hold(name)
    assert worker.mark(name)
    return hold


def test_a_watch_that_the_server_ended_is_continued_and_nothing_is_missed(cluster, alice, bob, monkeypatch) -> None:
    monkeypatch.setattr(kubernetes_watch, "WATCH_SECONDS", 1)
    ear = bob.listens()
    for turn in range(3):
        hold = _held(alice, f"job-{turn}")
        time.sleep(0.6)  # so that the ends of watches fall everywhere
        hold.released()

    for turn in range(3):
        ear.hears(f"job-{turn}", "released")
    assert sum("watch=1" in path for _, path in cluster.server.asked) >= 2
    ear.close()


def test_a_watch_is_continued_over_a_restart_and_what_happened_meanwhile_is_heard(cluster, alice, bob) -> None:
    hold = _held(alice)
    ear = bob.listens()

    cluster.server.stop()
    cluster.server.start()
    hold.released()

    ear.hears("job", "released")
    ear.close()


def test_what_happened_while_the_watch_was_away_is_heard_afterwards(cluster, alice, bob) -> None:
    hold = _held(alice)
    ear = bob.listens()
    cluster.server.next(Fault("GET", within="watch=1", status=503, times=2))

    cluster.server.cut()
    hold.released()

    ear.hears("job", "released")
    ear.close()


def test_when_the_server_has_forgotten_the_subscription_is_over_and_says_so(cluster, alice, bob) -> None:
    hold = _held(alice)
    ear = bob.listens()
    cluster.server.stop()
    let_versions_go_on(cluster)
    cluster.server.leases.compact()
    cluster.server.start()

    with pytest.raises(BackendUnavailable, match="410"):
        ear.listens_until_it_is_over()
    with pytest.raises(BackendUnavailable, match="410"):
        ear.subscription.next(0)

    again = bob.listens()
    hold.released()
    again.hears("job", "released")
    again.close()


def let_versions_go_on(cluster) -> None:
    """Write something, by somebody else, while nobody is served."""
    body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "else"}, "spec": {}}
    cluster.server.leases.create("jobs", body)


def test_without_the_right_to_watch_nothing_is_heard_and_waiting_goes_on_by_looking(cluster) -> None:
    cluster.only(*WORKERS_VERBS)
    bob = cluster.worker("bob")

    assert bob.backend.listen(budget()) is None
    cluster.only(*(ALL_VERBS - {"watch"}), token="token-2")
    assert bob.backend.listen(budget()) is None


def test_a_mark_writes_nothing(cluster, alice) -> None:
    alice.hold("job")
    before = cluster.object("job")

    assert alice.mark("job")

    assert cluster.object("job") == before


def test_a_deletion_by_somebody_who_knows_no_better_is_heard_as_a_release(cluster, alice, bob) -> None:
    _held(alice)
    ear = bob.listens()

    cluster.delete("job")

    assert ear.hears("job", "released").left == 0
    ear.close()


def test_what_is_heard_begins_the_wait_for_a_renewed_hold(cluster, alice, bob) -> None:
    """Bob never looks: he has seen the renewal pass by, and follows when it has stood for its ttl."""
    hold = alice.hold("job", 30)
    ear = bob.listens()
    hold.renewed(30)
    other = _held(alice, "other")
    other.released()
    ear.hears("other", "released")

    cluster.pass_time(31)

    assert bob.hold("job").token == 2
    ear.close()


def test_closing_leaves_no_thread_behind(cluster, bob) -> None:
    before = set(threading.enumerate())
    ears = [bob.listens() for _ in range(3)]
    watching = set(threading.enumerate()) - before

    for ear in ears:
        ear.close()

    ours = [thread for thread in watching if thread.name == "pglease-kubernetes-watch"]
    assert len(ours) == 3
    for thread in ours:
        thread.join(10)
        assert not thread.is_alive()
