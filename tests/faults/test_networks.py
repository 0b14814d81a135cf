"""What can happen on the way to PostgreSQL, beside the cuts and black holes of the attacks."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from pglease import BackendUnavailable, PGLease, clock
from pglease.testing.processes import free_port
from pglease.testing.proxy import Proxy
from tests.attacks.world import kill_connections


def test_while_no_reply_arrives_belief_ends_in_time_and_at_most_one_grant_is_left(
    dsn: str, proxy: Proxy, client, rival, measured
) -> None:
    holder = client(proxy.through(dsn), connect_timeout=1)
    lease = holder.wait_for_lease("job", ttl=2)
    due = clock.now() + lease.remaining()

    proxy.drop_replies()
    assert lease.lost.wait(30)
    measured("a loss is told while no reply arrives", clock.now() - due, 2 + 0.05)  # renewals may have been heard
    with pytest.raises(BackendUnavailable):
        holder.try_acquire("another", ttl=2)
    proxy.cut()
    proxy.pass_through()

    assert rival.wait_for_lease("job", timeout=30)
    assert rival.wait_for_lease("another", timeout=30)


def test_a_reply_that_drips_in_is_waited_for_no_longer_than_said(dsn: str, proxy: Proxy, client, measured) -> None:
    leases = client(proxy.through(dsn), connect_timeout=1.5)
    leases.get_lease("job")
    proxy.drip(1, 0.3)

    began = time.monotonic()
    with pytest.raises(BackendUnavailable):
        leases.try_acquire("job")

    measured("a call whose reply drips in", time.monotonic() - began, 1.5)


def test_a_host_that_nobody_knows_is_unavailable_in_time(client, measured) -> None:
    leases = client("postgresql://nobody@no-such-host.invalid/db", connect_timeout=2)

    began = time.monotonic()
    with pytest.raises(BackendUnavailable):
        leases.try_acquire("job")

    measured("a call to a host that nobody knows", time.monotonic() - began, 2.0)


SLOW_RESOLVER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <stdlib.h>
#include <unistd.h>
int getaddrinfo(const char *host, const char *port, const struct addrinfo *hints, struct addrinfo **found) {
    int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
    real = dlsym(RTLD_NEXT, "getaddrinfo");
    if (access(getenv("SLOW_RESOLVER"), F_OK) == 0 && !(hints && hints->ai_flags & AI_NUMERICHOST)) sleep(20);
    return real(host, port, hints, found);
}
"""  # fmt: skip


@pytest.mark.needs("spin", "linux")  # which brings gcc
def test_a_resolver_that_hangs_keeps_nobody_from_hearing_of_its_loss(
    child, dsn: str, rival, tmp_path: Path, monkeypatch, measured
) -> None:
    (tmp_path / "slow.c").write_text(SLOW_RESOLVER)
    library = tmp_path / "slow.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "slow.c", "-ldl"], check=True)
    flag = tmp_path / "resolves-slowly"
    monkeypatch.setenv("SLOW_RESOLVER", str(flag))
    script = """
import os, sys
from pglease import PGLease, clock
leases = PGLease.from_env(connect_timeout=2)
lease = leases.wait_for_lease("job", ttl=2)
print("held", flush=True)
lease.lost.wait(60)
due = lease._hold.deadline
print(clock.now() - due, lease.loss.reason, flush=True)
os._exit(0)
"""
    rival.get_lease("warm-up")
    monkeypatch.setenv("LD_PRELOAD", str(library))
    holder = child(script, where=dsn.replace("127.0.0.1", "localhost"))
    monkeypatch.delenv("LD_PRELOAD")
    assert holder.line() == "held"

    flag.touch()
    kill_connections(dsn)
    late, reason = holder.line().split()

    assert reason == "unreachable"
    measured("a loss is told while the resolver hangs", float(late), 0.05)


@pytest.mark.long
def test_a_server_that_hangs_up_is_not_stormed(dsn: str, proxy: Proxy, client) -> None:
    lease = client(proxy.through(dsn)).wait_for_lease("job", ttl=6)
    proxy._target = ("127.0.0.1", free_port())  # nobody listens there: whoever connects is cut
    proxy.cut()
    before, began = proxy.accepted, time.monotonic()

    assert lease.lost.wait(30)

    tries = proxy.accepted - before
    assert tries <= 10 * (time.monotonic() - began) + 10


def test_in_every_time_zone_of_the_session_a_lease_ends_at_the_same_moment(dsn: str, admin, database: str) -> None:
    remaining = []
    for number, zone in enumerate(["UTC", "Asia/Kolkata", "America/St_Johns"]):
        admin.execute(f"ALTER DATABASE {database} SET timezone = '{zone}'")
        with PGLease(dsn) as leases:
            assert leases.try_acquire(f"job-{number}", ttl=600)
            record = leases.get_lease(f"job-{number}")
            remaining.append(record.time_remaining())
            assert record.expires_at.utcoffset() is not None
            assert abs(record.expires_at.timestamp() - time.time() - 600) < 60

    assert max(remaining) - min(remaining) < 60
