"""Time in a lease file: the host's boot clock decides, wall times are for people, a reboot frees everything."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pglease import clock
from pglease.backends import sqlite_host
from pglease.backends.sqlite_host import Host, this_host
from pglease.errors import BackendMisconfigured
from pglease.records import Gone
from pglease.testing.harness import budget
from tests.support.sqlite_files import plain

DAY = 86400.0


@pytest.fixture
def reboot(monkeypatch):
    """Let the next clients be on a host that was started again: another boot id, a clock that begins anew."""

    def start_again(up_for: float = 30.0) -> None:
        started = clock.now()
        host = Host(f"boot-{started}", round((started - up_for) * 1e9))
        monkeypatch.setattr("pglease.backends.sqlite_file.this_host", lambda: host)

    return start_again


def now() -> datetime:
    return datetime.now(UTC)


def test_a_reboot_frees_everything(alice, worker, reboot) -> None:
    hold = alice.hold("job", DAY)
    waited_out = alice.hold("waited out")
    waited_out.released(min_hold=DAY)

    reboot()
    bob = worker("bob")

    assert bob.hold("job").token == hold.token + 1
    assert bob.hold("waited out").token == waited_out.token + 1


def test_looking_after_a_reboot_shows_that_it_is_over_and_changes_nothing(path, alice, worker, reboot) -> None:
    lease = alice.hold("job", DAY).lease
    with plain(path) as connection:
        before = connection.execute("SELECT * FROM pglease_leases, pglease_leases_meta").fetchall()

    reboot()
    bob = worker("bob")
    (listed,) = bob.list()
    seen = bob.sees("job")

    for found in (listed, seen):
        assert found.is_expired()
        assert abs(found.acquired_at - lease.acquired_at).total_seconds() < 1
        assert found.expires_at <= found.seen_at
        assert abs((found.seen_at - now()).total_seconds()) < 5
    with plain(path) as connection:
        assert connection.execute("SELECT * FROM pglease_leases, pglease_leases_meta").fetchall() == before


def test_wall_times_of_an_earlier_boot_are_kept_by_its_first_writer(alice, worker, reboot) -> None:
    lease = alice.hold("old").lease

    reboot()
    bob = worker("bob")
    bob.hold("new")
    seen = bob.sees("old")

    assert seen.is_expired()
    assert abs((seen.acquired_at - lease.acquired_at).total_seconds()) < 1


def test_a_hold_of_before_the_reboot_is_not_revived(alice, worker, reboot) -> None:
    """As of a process that a snapshot of the machine brought back."""
    hold = alice.hold("job", DAY)

    reboot()
    (outcome,) = worker("bob").renew(hold.renewal())

    assert isinstance(outcome, Gone)
    assert outcome.reason == "expired"


def test_nothing_of_before_a_reboot_counts_however_long_the_host_was_up(alice, worker, reboot) -> None:
    """The new clock stands far below the old one, or above it."""
    for up_for in (1.0, 400 * DAY):
        token = worker("before").hold("job", DAY).token
        reboot(up_for)

        assert worker("after").hold("job", DAY).token == token + 1
        reboot(up_for / 2)


def test_cleanup_after_a_reboot_takes_what_is_over_and_tokens_go_on(alice, worker, reboot) -> None:
    for _ in range(3):
        hold = alice.hold("job", DAY)
        hold.released()
    alice.hold("running", DAY)

    reboot()
    bob = worker("bob")

    assert bob.cleanup() == 2
    assert bob.hold("job").token > hold.token


@pytest.mark.parametrize("step", [DAY, -DAY, 40000 * DAY], ids=["ahead", "behind", "a century ahead"])
def test_stepping_the_wall_clock_changes_nothing(alice, worker, monkeypatch, step) -> None:
    hold = alice.hold("job", 60)
    before = alice.sees("job")
    wall, wall_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: wall() + step)
    monkeypatch.setattr(time, "time_ns", lambda: wall_ns() + int(step * 1e9))
    bob = worker("bob")

    assert 50 < bob.is_refused("job").retry_after <= 60
    assert bob.cleanup() == 0
    assert bob.sees("job").acquired_at == before.acquired_at
    assert bob.sees("job").expires_at == before.expires_at
    hold.renewed()


def test_times_are_what_a_wall_clock_shows(alice) -> None:
    began = now()

    lease = alice.hold("job", 60).lease

    assert abs((lease.acquired_at - began).total_seconds()) < 5
    assert abs((lease.expires_at - began).total_seconds() - 60) < 5


def test_people_can_read_wall_times_in_the_file_itself(path, alice) -> None:
    alice.hold("job", 60)

    with plain(path) as connection:
        ((name, owner, acquired, given_back),) = connection.execute(
            "SELECT task_name, owner_id, acquired_at, given_back FROM pglease_leases_for_people"
        ).fetchall()

    assert (name, owner, given_back) == ("job", "alice", 0)
    assert abs((datetime.fromisoformat(acquired).replace(tzinfo=UTC) - now()).total_seconds()) < 5


@pytest.mark.parametrize("up_for", [2**31, 2**53 / 1e9, 68 * 366 * DAY])
def test_a_host_may_be_up_for_long(worker, reboot, up_for) -> None:
    reboot(up_for)
    alice = worker("alice")

    hold = alice.hold("job", 100 * 365 * DAY)

    assert hold.renewed(60).time_remaining() == pytest.approx(60, abs=1)
    assert worker("bob").is_refused("job").retry_after == pytest.approx(60, abs=5)


def test_all_processes_of_a_host_agree_about_it() -> None:
    code = "from pglease.backends.sqlite_host import this_host; host = this_host(); print(host.boot_id, host.now())"

    before = this_host().now()
    boot_id, told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()

    assert boot_id == this_host().boot_id
    assert before < int(told) < this_host().now()


@pytest.mark.needs("root", "linux")
def test_a_time_namespace_is_seen_through(path, alice) -> None:
    """A container may have a boot clock of its own; the file's time is the host's."""
    if subprocess.run(["unshare", "-T", "--boottime", "5", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this kernel has no time namespaces")
    alice.hold("job", 600)
    code = f"""
from pglease.backends.sqlite import SQLiteBackend
from pglease.testing.harness import Worker
worker = Worker(SQLiteBackend({str(path)!r}), "inside")
print(worker.is_refused("job").retry_after, worker.hold("other", 600).token)
"""

    done = subprocess.run(
        ["unshare", "-T", "--boottime", "1000000", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout.split()[0]) <= 600
    assert 0 < alice.is_refused("other").retry_after <= 600


def test_the_offset_of_a_time_namespace_is_read(tmp_path, monkeypatch) -> None:
    offsets = tmp_path / "timens_offsets"
    monkeypatch.setattr(sqlite_host, "_TIME_NAMESPACE", offsets)
    offsets.write_text("monotonic           7         0\nboottime         -100 250000000\n")

    assert this_host().ahead == -99_750_000_000


def test_a_system_that_does_not_say_which_boot_it_is_in_is_refused(alice, monkeypatch) -> None:
    monkeypatch.setattr(sqlite_host, "_BOOT_ID", Path("/does/not/exist"))

    with pytest.raises(BackendMisconfigured, match="which boot"):
        alice.backend.get("job", budget())
