"""`pglease run` when the lease is lost: the whole group is dead before anybody else can have it.

"In time" is judged by the server: when the command's group is gone, the row that the last good renewal wrote must not
have expired yet.
"""

import os
import signal
import sys
from pathlib import Path

import pytest

STUBBORN = "trap '' TERM; sleep 1000 & while :; do sleep 1000; done"
"""Ignores TERM, and so does its child."""
OBEDIENT = "sleep 1000 & wait"


def left_in_store(sql, name="job"):
    return sql(
        "SELECT extract(epoch FROM expires_at - clock_timestamp()) FROM pglease_leases WHERE task_name = %s", name
    )[0]


def steal(sql):
    """What another holder's takeover leaves in the row."""
    sql(
        "UPDATE pglease_leases SET owner_id = 'thief', fencing_token = fencing_token + 1, "
        "lease_id = gen_random_uuid(), acquired_at = now(), expires_at = now() + interval '1 hour'"
    )


@pytest.mark.parametrize("script", [OBEDIENT, STUBBORN], ids=["obedient", "stubborn"])
def test_a_silent_store_ends_the_whole_group_while_the_lease_still_lasts(
    script, start, proxy, behind_proxy, command, sql, until
):
    running = start("run", "job", "--ttl", "4.5s", "--grace", "0.5s", "--", *command.shell(script), env=behind_proxy)
    until(lambda: command.has_begun() and len(command.members()) >= 2)

    proxy.black_hole()
    until(lambda: command.members() == [])

    assert left_in_store(sql) > 0
    assert running.wait(60) == 76
    err = running.stderr.read()
    assert "lost the lease 'job'" in err
    assert "Traceback" not in err


def test_a_store_that_refuses_connections_ends_the_group_in_time_too(start, proxy, behind_proxy, command, sql, until):
    running = start("run", "job", "--ttl", "4.5s", "--grace", "0.5s", "--", *command.shell(STUBBORN), env=behind_proxy)
    until(lambda: command.has_begun() and len(command.members()) >= 2)

    proxy.refuse()
    proxy.cut()
    until(lambda: command.members() == [])

    assert left_in_store(sql) > 0
    assert running.wait(60) == 76


def test_the_command_is_told_before_it_is_killed(start, proxy, behind_proxy, command, sql, until):
    script = "trap 'echo told; exit 0' TERM; while :; do sleep 0.05; done"
    running = start("run", "job", "--ttl", "4.5s", "--grace", "0.5s", "--", *command.shell(script), env=behind_proxy)
    until(command.has_begun)

    proxy.black_hole()

    assert running.stdout.readline() == "told\n"
    assert left_in_store(sql) > 0.5
    assert running.wait(60) == 76


@pytest.mark.parametrize("script", [OBEDIENT, STUBBORN], ids=["obedient", "stubborn"])
def test_a_stolen_lease_ends_the_whole_group_within_the_grace(script, start, command, sql, until):
    running = start("run", "job", "--ttl", "4.5s", "--grace", "0.5s", "--", *command.shell(script))
    until(lambda: command.has_begun() and len(command.members()) >= 2)

    steal(sql)  # heard of with the next renewal, at most 1.5 s later
    assert running.wait(60) == 76

    assert command.members() == []
    assert "somebody else holds it" in running.stderr.read()


def test_a_forced_release_is_a_loss(start, pglease, command, leases, until):
    running = start("run", "job", "--ttl", "3s", "--", *command.shell(OBEDIENT))
    until(command.has_begun)
    token = leases.get_lease("job").fencing_token

    assert pglease("release", "job", "--token", str(token)).returncode == 0

    assert running.wait(60) == 76
    assert command.members() == []
    assert "an operator ended it" in running.stderr.read()


def test_a_deleted_record_is_a_loss(start, command, sql, until):
    running = start("run", "job", "--ttl", "3s", "--", *command.shell(OBEDIENT))
    until(command.has_begun)

    sql("DELETE FROM pglease_leases")

    assert running.wait(60) == 76
    assert command.members() == []


def test_max_hold_ends_the_command_by_then(start, command, leases, until):
    running = start(
        "run", "job", "--ttl", "30s", "--max-hold", "2.5s", "--grace", "0.5s", "--", *command.shell(STUBBORN)
    )
    until(command.has_begun)
    begun = leases.get_lease("job").acquired_at

    assert running.wait(60) == 76

    ended = leases.get_lease("job")
    assert command.members() == []
    assert (ended.seen_at - begun).total_seconds() < 15  # its ttl alone is 30
    assert ended.is_expired()
    assert "--max-hold" in running.stderr.read()


def test_a_killed_pglease_takes_its_command_along_and_the_lease_lapses(start, command, leases, until):
    running = start("run", "job", "--ttl", "3s", "--", *command.shell("exec sleep 1000"))
    until(command.has_begun)
    held = leases.get_lease("job")

    os.kill(running.pid, signal.SIGKILL)

    until(lambda: command.members() == [])
    assert not leases.get_lease("job").is_expired()
    until(lambda: leases.get_lease("job").is_expired())
    assert leases.wait_for_lease("job", timeout=60).fencing_token > held.fencing_token


def test_a_pglease_that_was_stopped_past_its_ttl_kills_the_command_when_it_wakes(start, command, leases, until):
    running = start("run", "job", "--ttl", "3s", "--", *command.shell(STUBBORN))
    until(lambda: command.has_begun() and len(command.members()) >= 2)

    running.send_signal(signal.SIGSTOP)
    until(lambda: leases.get_lease("job").is_expired())
    assert leases.try_acquire("job")
    assert command.members()  # nobody was there to end them: this is what the fencing token is for
    running.send_signal(signal.SIGCONT)

    assert running.wait(60) == 76
    assert command.members() == []


def test_a_pglease_killed_while_waiting_leaves_nothing(start, leases, until):
    assert leases.try_acquire("job", ttl=30)
    waiting = start("run", "job", "--wait", "--", "echo", "never")
    assert "waiting" in waiting.stderr.readline()
    (child,) = Path(f"/proc/{waiting.pid}/task/{waiting.pid}/children").read_text().split()

    waiting.kill()

    until(lambda: not Path(f"/proc/{child}").exists())


def test_a_blocked_standard_error_does_not_save_the_command(start, proxy, behind_proxy, command, sql, until):
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    try:
        while os.write(write_end, b"x" * 4096):
            pass
    except BlockingIOError:
        pass
    os.set_blocking(write_end, True)
    running = start(
        "-v", "run", "job", "--ttl", "4.5s", "--grace", "0.5s", "--", *command.shell(STUBBORN),
        env=behind_proxy, stderr=write_end,
    )  # fmt: skip
    try:
        until(lambda: command.has_begun() and len(command.members()) >= 2)

        proxy.black_hole()
        until(lambda: command.members() == [])

        assert left_in_store(sql) > 0
    finally:
        running.kill()
        os.close(read_end)
        os.close(write_end)


def test_a_busy_interpreter_in_the_command_changes_nothing(start, proxy, behind_proxy, command, sql, until):
    script = f"exec {sys.executable} -c 'import signal; signal.signal(15, signal.SIG_IGN)\nwhile True: pass'"
    running = start("run", "job", "--ttl", "4.5s", "--grace", "0.5s", "--", *command.shell(script), env=behind_proxy)
    until(command.has_begun)

    proxy.black_hole()
    until(lambda: command.members() == [])

    assert left_in_store(sql) > 0
    assert running.wait(60) == 76
