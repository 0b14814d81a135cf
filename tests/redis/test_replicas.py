"""Replicas, Sentinel and Clusters: what they are good for, and what nobody may promise of them."""

from __future__ import annotations

import logging
import threading

import pytest
from redis.exceptions import MovedError

from pglease import BackendUnavailable, clock
from pglease.backends.redis_connections import Link
from pglease.backends.redis_routes import Routes
from pglease.records import Granted, Held, Unknown
from pglease.testing import processes
from pglease.testing.harness import budget, new_id
from tests.support.valkeys import LocalCluster, facts, replicated, sentinel_of
from tests.support.worlds import Stopwatch, wait_until

# -- replicas ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(canary):
    with replicated(password=canary) as servers:
        yield servers


def test_a_failover_that_lost_a_grant_repeats_its_token(pair, worker):
    """What the trait warns of; a store that could rule it out would have `token_survives_loss`."""
    primary, replica = pair
    alice, bob = worker(primary.url), worker(replica.url, "bob")
    alice.hold("job").released()
    wait_until(lambda: replica.execute("EXISTS", "pglease:1:{job}:token"), 20)
    replica.freeze()
    primary.execute("CLIENT", "KILL", "TYPE", "replica")  # what is on its way to a frozen process would still arrive
    lost = alice.hold("job")
    primary.kill()
    replica.thaw()
    replica.execute("REPLICAOF", "NO", "ONE")

    again = bob.hold("job")

    assert again.token == lost.token == 2
    traits = bob.backend.traits
    assert not traits.token_survives_loss
    assert "tokens may repeat after a failover that lost writes" in traits.caveat


def test_with_wait_replicas_a_grant_that_no_replica_has_is_not_answered(pair, worker):
    primary, replica = pair
    alice = worker(primary.url, wait_replicas=1)
    hold = alice.hold("job")
    assert isinstance(hold.renew(), Held)
    replica.freeze()

    lease_id = new_id()
    with pytest.raises(BackendUnavailable, match="0 of 1 replicas") as caught:
        alice.ask("other", lease_id=lease_id, within=0.5)
    with pytest.raises(BackendUnavailable, match="0 of 1 replicas"):
        alice.backend.renew([hold.renewal()], budget(0.5))
    replica.thaw()

    assert caught.value.outcome_unknown
    assert isinstance(alice.ask("other", lease_id=lease_id), Granted)
    assert isinstance(hold.renew(), Held)


def test_with_wait_replicas_nobody_waits_for_a_refusal_or_a_release(pair, worker):
    primary, replica = pair
    alice, bob = worker(primary.url, wait_replicas=1), worker(primary.url, "bob", wait_replicas=1)
    hold = alice.hold("job")
    bob.names()
    replica.freeze()
    watch = Stopwatch()

    bob.is_refused("job")
    hold.released()

    assert watch.seconds < 9
    replica.thaw()


def test_a_retry_waits_for_the_replicas_although_the_grant_was_written_elsewhere(pair, worker):
    """The connection that wrote it is gone: WAIT on another one waits for what *it* wrote."""
    primary, replica = pair
    alice, lease_id = worker(primary.url, wait_replicas=1), new_id()
    alice.names()
    replica.freeze()
    with pytest.raises(BackendUnavailable):
        alice.ask("job", lease_id=lease_id, within=0.3)

    with pytest.raises(BackendUnavailable, match="0 of 1 replicas"):
        worker(primary.url, wait_replicas=1).ask("job", lease_id=lease_id, within=0.5)

    replica.thaw()


def test_at_the_first_use_replicas_are_warned_of(pair, worker, caplog):
    primary, _ = pair

    with caplog.at_level(logging.WARNING, "pglease"):
        worker(primary.url).names()
        worker(primary.url, wait_replicas=1).names()
        worker(primary.url, wait_replicas=2).names()

    plain, too_many = caplog.messages
    assert "repeats its token" in plain
    assert "no lease will be granted" in too_many


# -- Sentinel ----------------------------------------------------------------------------------------------------------


def test_behind_sentinel_the_primary_is_found_and_found_again(pair, worker, canary):
    primary, replica = pair
    with sentinel_of(primary, password=canary) as sentinel:
        url = f"redis+sentinel://:{canary}@127.0.0.1:1,{sentinel.host}:{sentinel.port}/leases"
        alice = worker(url)
        hold = alice.hold("job")
        ear = alice.listens()
        wait_until(lambda: replica.execute("EXISTS", "pglease:1:{job}:lease"), 20)
        wait_until(lambda: sentinel.execute("SENTINEL", "REPLICAS", "leases"), 30)

        primary.kill()
        with pytest.raises(BackendUnavailable):
            ear.listens_until_it_is_over()
        wait_until(lambda: facts(replica, "replication")["role"] == "master", 60)

        outcome = hold.renew_after_trouble(30)
        assert isinstance(outcome, Held)
        assert outcome.lease.fencing_token == hold.token
        hold.released()
        assert alice.hold("job").token == hold.token + 1
        assert canary not in repr(alice.backend)


def test_sentinels_that_know_nothing_are_trouble_within_the_budget(worker):
    watch = Stopwatch()

    with pytest.raises(BackendUnavailable, match="leases"):
        worker("redis+sentinel://127.0.0.1:1/leases").ask("job", within=0.5)

    assert watch.seconds < 10


# -- Cluster -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_cluster(canary):
    with LocalCluster(password=canary) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster):
    for node in shared_cluster.nodes:
        node.execute("FLUSHALL")
    return shared_cluster


pytestmark = pytest.mark.xdist_group("redis replicas")


def test_names_live_on_all_nodes_and_each_name_on_one(cluster, worker):
    alice = worker(cluster.url)
    holds = [alice.hold(f"job-{n}") for n in range(30)]

    keys = [set(node.execute("KEYS", "*")) for node in cluster.nodes]

    assert all(keys)
    for hold in holds:
        at = [b"pglease:1:{%s}:lease" % hold.name.encode() in found for found in keys]
        assert at == [b"pglease:1:{%s}:token" % hold.name.encode() in found for found in keys]
        assert sum(at) == 1
    assert alice.names() == sorted(hold.name for hold in holds)


def test_a_slot_that_moves_is_followed(cluster, worker):
    """Asked where it is being taken to, and then found there."""
    alice = worker(cluster.url)
    slot = cluster.nodes[0].execute("CLUSTER", "KEYSLOT", "job")
    owner = next(node for node in cluster.nodes if _owns(node, slot))
    other = next(node for node in cluster.nodes if node is not owner)
    alice.hold("job").released()
    names = {node: node.execute("CLUSTER", "MYID") for node in (owner, other)}

    other.execute("CLUSTER", "SETSLOT", slot, "IMPORTING", names[owner])
    owner.execute("CLUSTER", "SETSLOT", slot, "MIGRATING", names[other])
    keys = owner.execute("CLUSTER", "GETKEYSINSLOT", slot, 10)
    secret = other.client().get_connection_kwargs()["password"]
    owner.execute("MIGRATE", other.host, other.port, "", 0, 5000, "AUTH", secret, "KEYS", *keys)
    hold = alice.hold("job")
    hold.renewed()
    for node in cluster.nodes:
        node.execute("CLUSTER", "SETSLOT", slot, "NODE", names[other])

    assert hold.token == 2
    hold.renewed()
    hold.released()
    assert alice.hold("job").token == 3
    assert _owns(other, slot)


def _owns(node, slot):
    mine = node.execute("CLUSTER", "MYID")
    return any(
        first <= slot <= last and primary[2] == mine for first, last, primary, *_ in node.execute("CLUSTER", "SLOTS")
    )


def test_a_node_that_is_frozen_leaves_the_holds_of_the_others_alone(cluster, worker):
    alice = worker(cluster.url)
    holds = [alice.hold(f"job-{n}") for n in range(12)]
    stuck = cluster.nodes[2]
    stuck_names = {key.decode().split("{")[1].split("}")[0] for key in stuck.execute("KEYS", "*lease")}
    stuck.freeze()
    watch = Stopwatch()

    outcomes = alice.backend.renew([hold.renewal() for hold in holds], budget(1.5))
    taken = watch.seconds
    stuck.thaw()

    assert taken < 5
    assert 0 < len(stuck_names) < 12
    for hold, outcome in zip(holds, outcomes, strict=True):
        assert isinstance(outcome, Unknown if hold.name in stuck_names else Held), hold.name
    assert all(isinstance(hold.renew_after_trouble(), Held) for hold in holds)


def test_renewals_wait_for_a_part_of_their_time_for_somebody_who_reads_the_map_anew(cluster, worker):
    alice = worker(cluster.url)
    holds = [alice.hold(f"job-{n}") for n in range(6)]
    reads, over = threading.Event(), threading.Event()

    def read():
        with alice.backend._settling.turn(budget(60)):
            reads.set()
            over.wait(60)

    reader = threading.Thread(target=read)
    reader.start()
    assert reads.wait(60)
    alice.backend._routes.is_stale = True

    outcomes = alice.backend.renew([hold.renewal() for hold in holds], budget(5))

    over.set()
    reader.join(60)
    assert all(isinstance(outcome, Held) for outcome in outcomes)


def test_a_node_that_did_not_answer_is_asked_last_until_it_answers():
    one, two, three = (("node", port) for port in (1, 2, 3))
    routes = Routes(two)
    routes.learn([(0, 99, (b"node", 1)), (100, 199, (b"node", 2)), (200, 299, (b"node", 3))], two)
    assert routes.known() == [one, two, three]

    routes.doubt(one)

    assert routes.is_stale
    assert routes.known() == [two, three, one]
    routes.learn([(0, 199, (b"node", 1)), (200, 299, (b"node", 3))], three)
    assert routes.known() == [three, two, one]
    routes.trust(one)
    assert routes.known() == [one, three, two]


def test_a_release_on_one_node_is_heard_through_another(cluster, worker):
    alice, ears = worker(cluster.url), [worker(node.url).listens() for node in cluster.nodes]
    hold = alice.hold("job")
    assert alice.mark("job")

    hold.released()

    for ear in ears:
        ear.hears("job", "released")
        ear.close()


@pytest.mark.long
def test_a_node_that_died_is_replaced_by_its_replica_and_the_client_follows(canary, worker):
    with LocalCluster(password=canary, replicas=1) as cluster:
        dying = cluster.nodes[1]
        replica = cluster.add_replica(dying)
        alice = worker(cluster.url)
        holds = [alice.hold(f"job-{n}") for n in range(12)]
        wait_until(lambda: replica.execute("DBSIZE") == dying.execute("DBSIZE"), 20)

        dying.kill()
        assert processes.wait_until(lambda: facts(replica, "replication")["role"] == "master", timeout=60)

        assert all(isinstance(hold.renew_after_trouble(30), Held) for hold in holds)
        cluster.nodes.remove(dying)


def test_belief_counts_from_the_first_sending_though_one_hold_was_asked_for_elsewhere(valkey, worker, monkeypatch):
    """A white-box test: one slot of the batch has moved meanwhile, so that its renewal is sent a second time, later."""
    alice = worker(valkey.url)
    holds = [alice.hold("stays"), alice.hold("moved")]
    run_many, sent = Link.run_many, []

    def moved_meanwhile(link, script, calls):
        answers = run_many(link, script, calls)
        sent.append(clock.now())
        return [answers[0], MovedError(f"1 {valkey.host}:{valkey.port}")]

    monkeypatch.setattr(Link, "run_many", moved_meanwhile)
    box = budget()

    outcomes = alice.backend.renew([hold.renewal() for hold in holds], box)

    assert all(isinstance(outcome, Held) for outcome in outcomes)
    assert box.sent_at <= sent[0]
