"""`pglease run` on the hybrid backend: a dead session means KILL at once, since somebody else may have the lease."""

import signal

import pytest

from tests.support.hybrid import clients, end_session_of, is_bound
from tests.support.worlds import Stopwatch

STUBBORN = "trap '' TERM; sleep 1000 & while :; do sleep 1000; done"


@pytest.fixture
def on_hybrid(dsn):
    """An environment that names the hybrid backend."""
    return {"PGLEASE_URL": f"hybrid+{dsn}"}


def test_a_dead_session_kills_the_whole_group_without_grace(start, on_hybrid, dsn, command, until):
    running = start("run", "job", "--ttl", "60s", "--grace", "15s", "--", *command.shell(STUBBORN), env=on_hybrid)
    until(lambda: command.has_begun() and len(command.members()) >= 2 and is_bound(dsn, "job"))

    watch = Stopwatch()
    end_session_of(dsn, "job")
    until(lambda: command.members() == [], 20)

    assert watch.seconds < 15
    assert running.wait(20) == 76
    assert "session" in running.stderr.read()


def test_a_killed_pglease_frees_its_lease_within_moments(start, on_hybrid, dsn, command, until):
    running = start("run", "job", "--ttl", "60s", "--", *command.shell("exec sleep 1000"), env=on_hybrid)
    until(lambda: command.has_begun() and is_bound(dsn, "job"))
    with clients(dsn, "heir") as (heir,):
        assert not heir.try_acquire("job")

        running.send_signal(signal.SIGKILL)
        watch = Stopwatch()
        lease = heir.wait_for_lease("job", timeout=30)

        assert watch.seconds < 15
        assert lease.fencing_token == 2
        assert command.members() == []


def test_the_facts_are_those_of_the_table(pglease, on_hybrid, dsn):
    with clients(dsn, "holder") as (holder,):
        holder.try_acquire("job")

        assert pglease("check", "job").returncode == 0
        assert "holder" in pglease("list", env=on_hybrid).stdout
        assert "session" in pglease("doctor", env=on_hybrid).stdout
