"""Servers that freeze, die, pause, refuse and forget; links that break: every verb ends in time and in our words."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time

import pytest

from pglease import BackendClosed, BackendMisconfigured, BackendUnavailable, clock
from pglease.backends.redis_lua import FORCE_RELEASE, RELEASE, RENEW, TRY_ACQUIRE
from pglease.backends.redis_subscription import RedisSubscription
from pglease.records import Gone, Granted, Held, Released
from pglease.testing import processes
from pglease.testing.harness import budget, new_id
from tests.support.worlds import Stopwatch, wait_until

# -- the server --------------------------------------------------------------------------------------------------------


def test_a_killed_server_that_comes_back_costs_one_try_again_and_no_lease(fresh, worker):
    server = fresh()
    alice = worker(server.url)
    hold = alice.hold("job")

    server.kill()
    server.start()

    assert hold.renewed().fencing_token == hold.token
    hold.released()
    assert alice.hold("job").token == hold.token + 1


def test_a_server_that_is_away_for_a_while_is_waited_for(fresh, worker):
    server = fresh()
    hold = worker(server.url).hold("job")
    server.kill()
    coming = threading.Timer(0.3, server.start)
    coming.start()

    hold.renewed()

    coming.join()


def test_a_server_that_is_away_is_unavailable_within_the_budget_and_nothing_is_unknown(fresh, worker):
    server = fresh()
    alice = worker(server.url)
    alice.hold("job")
    server.kill()
    with contextlib.suppress(BackendUnavailable):
        alice.ask("job", within=0.3)  # the old connections are found dead: those requests may have been applied
    watch = Stopwatch()

    with pytest.raises(BackendUnavailable, match="refused") as caught:
        alice.ask("job", within=0.5)

    assert watch.seconds < 10
    assert not caught.value.outcome_unknown


def test_a_frozen_server_leaves_the_outcome_unknown(fresh, worker):
    server = fresh()
    alice, lease_id = worker(server.url), new_id()
    alice.names()
    server.freeze()
    watch = Stopwatch()

    with pytest.raises(BackendUnavailable, match="did not answer in time") as caught:
        alice.ask("job", lease_id=lease_id, within=0.5)
    server.thaw()

    assert caught.value.outcome_unknown
    assert watch.seconds < 10
    assert isinstance(alice.ask("job", lease_id=lease_id), Granted)


@pytest.mark.parametrize("command", [("DEBUG", "SLEEP", "0.5"), ("CLIENT", "PAUSE", "500", "ALL")], ids=" ".join)
def test_a_pause_is_waited_out(valkey, worker, command):
    hold = worker(valkey.url).hold("job")
    sleeping = threading.Thread(target=valkey.execute, args=command)

    sleeping.start()

    hold.renewed()
    sleeping.join()


def test_somebody_elses_endless_script_is_trouble_that_passes(fresh, worker):
    server = fresh(busy_reply_threshold=20)
    alice = worker(server.url)
    hold = alice.hold("job")
    endless = threading.Thread(target=lambda: _run_for_ever(server))
    endless.start()
    wait_until(lambda: _is_busy(server), 20)

    with pytest.raises(BackendUnavailable, match="BUSY") as caught:
        alice.ask("job", within=3)
    server.execute("SCRIPT", "KILL")
    endless.join()

    assert not caught.value.outcome_unknown
    hold.renewed()


def _run_for_ever(server):
    with contextlib.suppress(Exception):
        server.execute("EVAL", "while true do end", 0)


def _is_busy(server):
    try:
        server.execute("PING")
    except Exception as error:
        return "BUSY" in str(error)
    return False


def test_a_server_without_memory_refuses_and_changes_nothing(fresh, worker):
    server = fresh()
    alice = worker(server.url)
    hold = alice.hold("job", 60)
    server.execute("CONFIG", "SET", "maxmemory", 1)

    for verb in (lambda: alice.ask("new", within=1.5), lambda: alice.backend.renew([hold.renewal()], budget(1.5))):
        with pytest.raises(BackendUnavailable, match="memory") as caught:
            verb()
        assert not caught.value.outcome_unknown

    assert alice.sees("job").fencing_token == hold.token
    server.execute("CONFIG", "SET", "maxmemory", 0)
    hold.renewed()
    assert alice.hold("new").token == 1


def test_a_server_that_cannot_save_refuses_and_says_why(fresh, worker):
    server = fresh(appendonly="no", save=("3600", "1"))
    alice = worker(server.url)
    alice.hold("job")
    (server.base / "dump.rdb").mkdir()  # a dump is renamed into place: onto a directory it cannot be
    server.execute("BGSAVE")
    with server.client() as client:
        wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", 20)

    with pytest.raises(BackendUnavailable, match="MISCONF") as caught:
        alice.ask("new", within=1.5)

    (server.base / "dump.rdb").rmdir()  # it would not stop without having saved
    assert not caught.value.outcome_unknown


def test_a_server_that_wants_replicas_and_has_none_refuses(fresh, worker):
    server = fresh()
    alice = worker(server.url)
    alice.hold("job")
    server.execute("CONFIG", "SET", "min-replicas-to-write", 1)

    with pytest.raises(BackendUnavailable, match="NOREPLICAS"):
        alice.ask("new", within=1.5)


def test_a_full_server_is_waited_for(fresh, worker):
    server = fresh(maxclients=2)
    guests = [server.client() for _ in range(2)]
    for guest in guests:
        guest.ping()
    alice = worker(server.url)

    with pytest.raises(BackendUnavailable, match="max number of clients"):
        alice.ask("job", within=1.5)

    for guest in guests:
        guest.close()
    alice.hold("job")


def test_a_replica_is_refused_from_the_start(fresh, worker):
    primary, replica = fresh(), fresh()
    replica.execute("REPLICAOF", primary.host, primary.port)

    with pytest.raises(BackendUnavailable, match="is a replica"):
        worker(replica.url).backend.get("job", budget(1.0))


def test_a_primary_that_is_demoted_is_left(fresh, worker):
    server, other = fresh(), fresh()
    alice = worker(server.url)
    alice.hold("job")
    server.execute("REPLICAOF", other.host, other.port)

    with pytest.raises(BackendUnavailable, match="replica"):
        alice.ask("new", within=1.5)

    server.execute("REPLICAOF", "NO", "ONE")
    alice.hold("new")


def test_closed_connections_are_replaced(valkey, worker):
    alice = worker(valkey.url)
    hold = alice.hold("job")

    for _ in range(3):
        valkey.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        hold.renewed()


# -- the link ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def link(valkey, worker, before):
    """A proxy, and a worker behind it who knows every script."""
    proxy, url = before(valkey)
    alice = worker(url)
    hold = alice.hold("warm")
    hold.renewed()
    alice.force("warm", 0)
    hold.released()
    return proxy, alice


def test_a_grant_whose_reply_was_lost_is_found_again(link):
    proxy, alice = link
    lost = proxy.drop_next_reply(TRY_ACQUIRE.sha.encode())

    hold = alice.hold("job")

    assert lost.is_set()
    assert (hold.token, hold.lease.transitions) == (1, 0)


def test_a_grant_whose_reply_was_lost_at_the_last_moment_can_be_given_back(link, valkey):
    proxy, alice = link
    lease_id = new_id()
    proxy.drop_replies()

    with pytest.raises(BackendUnavailable) as caught:
        alice.ask("job", lease_id=lease_id, within=0.3)
    proxy.pass_through()
    proxy.cut()

    assert caught.value.outcome_unknown
    assert alice.sees("job").fencing_token == 1
    assert alice.backend.release("job", lease_id, budget()) == Released()


def test_a_renewal_whose_reply_was_lost_is_made_again(link):
    proxy, alice = link
    hold = alice.hold("job")
    lost = proxy.drop_next_reply(RENEW.sha.encode())

    assert isinstance(hold.renew(), Held)
    assert lost.is_set()


def test_a_release_whose_reply_was_lost_is_still_one(link):
    proxy, alice = link
    hold = alice.hold("job")
    lost = proxy.drop_next_reply(RELEASE.sha.encode())

    assert hold.release() == Released()
    assert lost.is_set()
    assert isinstance(hold.release(), Gone)


def test_a_forced_release_whose_reply_was_lost_is_still_one(link):
    proxy, alice = link
    hold = alice.hold("job")
    lost = proxy.drop_next_reply(FORCE_RELEASE.sha.encode())

    assert alice.force("job", hold.token) is True
    assert lost.is_set()
    assert alice.force("job", hold.token) is False


def test_a_black_hole_ends_in_time_and_heals(link):
    proxy, alice = link
    hold = alice.hold("job")
    proxy.black_hole()
    watch = Stopwatch()

    with pytest.raises(BackendUnavailable):
        alice.backend.renew([hold.renewal()], budget(0.5))
    taken = watch.seconds
    proxy.pass_through()

    assert taken < 3
    assert isinstance(hold.renew_after_trouble(), Held)


def test_an_answer_that_drips_is_bounded_as_a_whole(link):
    proxy, alice = link
    alice.hold("job", metadata={"long": "x" * 2000})
    proxy.drip(1, every=0.05)
    watch = Stopwatch()

    with pytest.raises(BackendUnavailable):
        alice.backend.get("job", budget(0.7))
    taken = watch.seconds
    proxy.pass_through()

    assert taken < 3
    alice.sees("job")


def test_a_resolver_that_hangs_is_bounded_too(worker, monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: over.wait(60))
    alice = worker("redis://somewhere.invalid")
    watch = Stopwatch()

    with pytest.raises(BackendUnavailable, match="in time"):
        alice.ask("job", within=0.3)

    taken = watch.seconds
    over.set()
    assert taken < 3


def test_a_name_that_nobody_knows_is_unavailable(worker):
    with pytest.raises(BackendUnavailable, match="Redis"):
        worker("redis://nowhere.invalid").ask("job", within=0.3)


# -- the pool ----------------------------------------------------------------------------------------------------------


def test_callers_wait_for_their_turn_and_the_pool_stays_within_its_bound(fresh, worker):
    server = fresh()
    alice = worker(server.url, pool_size=2)
    start = threading.Barrier(24, timeout=30)
    failed = []

    def work(number):
        start.wait()
        try:
            for _ in range(5):
                alice.hold(f"job-{number}").released()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert failed == []
    clients = server.execute("CLIENT", "LIST").decode().count("name=pglease")
    assert clients <= 2


def test_when_all_connections_are_in_use_renewals_have_one_more(valkey, worker):
    alice = worker(valkey.url, pool_size=2)
    hold = alice.hold("job")
    pool, home = alice.backend.connections, alice.backend._routes.home

    def ask_and_renew(_):
        with pytest.raises(BackendUnavailable, match="all 2 of the pool are in use"):
            alice.ask("job", within=0.2)
        hold.renewed()

    watch = Stopwatch()
    pool.converse(home, lambda _: pool.converse(home, ask_and_renew, budget()), budget())

    assert watch.seconds < 9
    alice.is_refused("job")


def test_a_conversation_that_is_interrupted_takes_its_connection_along(valkey, worker):
    alice = worker(valkey.url, pool_size=1)
    alice.hold("job")
    pool, home = alice.backend.connections, alice.backend._routes.home

    def interrupted(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.converse(home, interrupted, budget())

    assert not pool._idle[home]
    alice.is_refused("job")


def test_a_failure_on_the_way_to_the_server_gives_the_place_back(valkey, worker, monkeypatch):
    alice = worker(valkey.url, pool_size=1)
    alice.hold("job")
    box = budget()
    monkeypatch.setattr(type(box), "sending", lambda _: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        alice.backend.get("job", box)
    monkeypatch.undo()

    alice.sees("job")


def test_out_of_threads_a_connection_is_made_all_the_same(valkey, worker, monkeypatch):
    alice = worker(valkey.url)

    def no_more(_):
        raise RuntimeError("can't start new thread")

    clock.now()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        alice.hold("job")


def test_a_forked_child_has_connections_of_its_own(valkey, worker):
    alice = worker(valkey.url)
    hold = alice.hold("job")

    child = os.fork()
    if not child:
        code = 1
        try:
            alice.is_refused("job")
            alice.backend.close()
            code = 0
        finally:
            os._exit(code)

    assert os.waitpid(child, 0)[1] == 0
    hold.renewed()
    hold.released()


def test_closing_disconnects(fresh, worker):
    server = fresh()
    alice = worker(server.url)
    ear = alice.listens()
    alice.hold("job")
    assert server.execute("CLIENT", "LIST").decode().count("name=pglease") == 2

    alice.backend.close()

    assert processes.wait_until(lambda: b"name=pglease" not in server.execute("CLIENT", "LIST"), timeout=10)
    ear.close()


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_nothing_is_published_unless_somebody_waits(valkey, worker):
    alice = worker(valkey.url)
    valkey.execute("CONFIG", "RESETSTAT")
    for _ in range(3):
        alice.hold("job").released()

    assert "cmdstat_publish" not in valkey.execute("INFO", "commandstats").decode()

    hold = alice.hold("job")
    assert alice.mark("job")
    hold.released()
    assert "cmdstat_publish:calls=1" in valkey.execute("INFO", "commandstats").decode()


def test_many_marks_are_one_write(valkey, worker):
    alice = worker(valkey.url)
    alice.hold("job")
    alice.mark("job")
    valkey.execute("CONFIG", "RESETSTAT")

    for _ in range(50):
        alice.mark("job")

    assert "cmdstat_hset" not in valkey.execute("INFO", "commandstats").decode()


def test_a_subscription_whose_server_died_says_so_and_can_be_had_anew(fresh, worker):
    server = fresh()
    alice = worker(server.url)
    hold = alice.hold("job")
    ear = alice.listens()
    assert alice.mark("job")

    server.kill()
    with pytest.raises(BackendUnavailable, match="may be lost"):
        ear.listens_until_it_is_over()
    server.start()
    again = alice.listens()
    assert alice.mark("job")  # as whoever waits does: the last mark may not have reached the server's file
    hold.released()

    again.hears("job", "released")
    again.close()


def test_a_waiter_in_another_process_hears_of_a_release_at_once(valkey, worker):
    alice = worker(valkey.url)
    hold = alice.hold("job")
    ear = alice.listens()
    assert alice.mark("job")
    alice.is_refused("job")

    began = time.monotonic()
    hold.released()
    ear.hears("job", "released")

    assert time.monotonic() - began < 10
    ear.close()


def test_a_signal_to_die_reaches_the_server(fresh):
    server = fresh()

    server.signal(signal.SIGTERM)

    assert processes.wait_until(lambda: not server.running, timeout=20)


def test_misconfigured_is_no_trouble_that_is_tried_again(valkey, worker):
    valkey.execute("SET", "pglease:1:{job}:lease", "theirs")
    alice, watch = worker(valkey.url), Stopwatch()

    with pytest.raises(BackendMisconfigured):
        alice.ask("job", within=20)

    assert watch.seconds < 10


class Broken:
    """A link whose other end is gone: whoever listens finds that out while somebody else shuts it."""

    def __init__(self):
        self.cutoff, self.closed, self.closed_while_shut = self, False, None
        self.subscription, self.listener = RedisSubscription(self, lambda error: BackendUnavailable(str(error))), None

    def heard(self, _seconds):
        raise OSError("gone")

    def shut(self):
        self.listener = threading.Thread(target=self._listen)
        self.listener.start()
        self.listener.join(0.3)
        self.closed_while_shut = self.closed

    def _listen(self):
        with contextlib.suppress(BackendUnavailable, BackendClosed):
            self.subscription.next(0.0)

    def disarm(self):
        """Like a cutoff."""

    def close(self):
        self.closed = True


def test_a_subscription_that_breaks_while_it_is_closed_is_not_shut_when_its_number_may_be_a_strangers():
    link = Broken()

    link.subscription.close()
    link.listener.join(60)

    assert link.closed
    assert not link.closed_while_shut
