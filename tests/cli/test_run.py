"""`pglease run` while nothing goes wrong: exit codes, environment, signals, waiting, what is left behind."""

import json
import shlex
import signal
import subprocess
import sys

import pytest

from pglease import MemoryBackend, PGLease
from pglease.cli.run import Question, Terms
from pglease.cli.supervise import Signals

SIGNALS = ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2"]


def test_the_command_finds_its_lease_in_the_environment(pglease, leases):
    facts = ("NAME", "OWNER", "FENCING_TOKEN")
    script = f"import json, os; print(json.dumps({{k: os.environ['PGLEASE_' + k] for k in {facts}}}))"

    done = pglease("run", "job ü", "--ttl", "30s", "--owner", "night shift", "--", sys.executable, "-c", script)

    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert found["NAME"] == "job ü"
    assert found["OWNER"] == "night shift"
    record = leases.get_lease("job ü")
    assert found["FENCING_TOKEN"] == str(record.fencing_token)
    assert record.owner_id == "night shift"
    assert record.is_expired()


def test_the_commands_own_exit_code_is_passed_on(pglease):
    assert pglease("run", "job", "--", "sh", "-c", "exit 42").returncode == 42


def test_a_command_that_dies_of_a_signal_gives_128_and_its_number(pglease):
    assert pglease("run", "job", "--", "sh", "-c", "kill -KILL $$").returncode == 137


def test_a_command_that_is_not_there_is_127(pglease, leases):
    done = pglease("run", "job", "--", "no-such-command-anywhere")

    assert done.returncode == 127
    assert "no-such-command-anywhere" in done.stderr
    assert leases.get_lease("job").is_expired()


def test_a_command_that_cannot_be_executed_is_126(pglease, tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("not a program")

    assert pglease("run", "job", "--", str(plain)).returncode == 126


def test_a_script_without_an_interpreter_line_runs_as_it_would_from_a_shell(pglease, tmp_path):
    script = tmp_path / "script"
    script.write_text('echo "$1" and "$2"\n')
    script.chmod(0o755)

    assert pglease("run", "job", "--", str(script), "a b", "c").stdout == "a b and c\n"


def test_input_and_output_are_the_commands(pglease):
    done = pglease("run", "job", "--", "sh", "-c", "cat; echo oops >&2", input="through and through")

    assert (done.stdout, done.stderr) == ("through and through", "oops\n")


def test_the_command_inherits_no_descriptor_of_ours(pglease):
    done = pglease("run", "job", "--", "sh", "-c", "ls -l /proc/$$/fd", close_fds=True)

    assert "socket" not in done.stdout
    assert done.stdout.count("pipe:") == 2  # standard output and error


def test_the_lease_is_held_and_renewed_while_the_command_runs(start, leases, command, until):
    running = start("run", "job", "--ttl", "3s", "--", *command.shell("exec sleep 60"))
    until(command.has_begun)
    first = leases.get_lease("job")

    until(lambda: (leases.get_lease("job").seen_at - first.acquired_at).total_seconds() > 3.5)

    now = leases.get_lease("job")
    assert (now.fencing_token, now.is_expired()) == (first.fencing_token, False)
    assert running.poll() is None


# -- somebody else has it


def test_a_held_lease_is_75_and_says_who_has_it(pglease, leases):
    assert leases.try_acquire("job", ttl=30)

    done = pglease("run", "job", "--", "echo", "never")

    assert (done.returncode, done.stdout) == (75, "")
    assert done.stderr.count("\n") == 1
    assert "somebody-else" in done.stderr


def test_quiet_says_nothing_and_the_code_can_be_chosen(pglease, leases):
    assert leases.try_acquire("job", ttl=30)

    done = pglease("run", "job", "-q", "-E", "0", "--", "echo", "never")

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_bounded_wait_ends_in_time_with_75(pglease, leases, sql):
    assert leases.try_acquire("job", ttl=30)
    begin = sql("SELECT clock_timestamp()")[0]

    done = pglease("run", "job", "--wait", "1.5", "-E", "9", "--", "echo", "never")

    took = (sql("SELECT clock_timestamp()")[0] - begin).total_seconds()
    assert (done.returncode, done.stdout) == (9, "")
    assert 1.5 <= took < 45


def test_waiting_gets_the_lease_when_it_is_released(start, leases):
    assert leases.try_acquire("job", ttl=30)
    waiting = start("run", "--wait", "job", "--", "echo", "at last")
    assert "waiting" in waiting.stderr.readline()

    leases.release("job")

    out, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, out, err) == (0, "at last\n", "")


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_ends_the_wait(name, start, leases, sql):
    assert leases.try_acquire("job", ttl=30)
    waiting = start("run", "job", "--wait", "--", "echo", "never")
    assert "waiting" in waiting.stderr.readline()

    waiting.send_signal(signal.Signals[f"SIG{name}"])

    out, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 128 + signal.Signals[f"SIG{name}"]
    assert (out, err) == ("", "")
    leases.release("job")
    assert sql("SELECT count(*) FROM pglease_leases WHERE expires_at > clock_timestamp()") == (0,)


def test_min_hold_keeps_the_name_after_a_short_command(pglease, leases):
    assert pglease("run", "job", "--min-hold", "20s", "--", "true").returncode == 0

    record = leases.get_lease("job")
    assert not record.is_expired()
    assert abs((record.expires_at - record.acquired_at).total_seconds() - 20) < 0.1
    assert pglease("run", "job", "-q", "--", "true").returncode == 75


# -- signals


TWO_WHO_TELL = """
import os, signal, sys, time
first = os.getpid()
role = "inner" if os.fork() == 0 else "outer"
for name in sys.argv[1:]:
    signal.signal(getattr(signal, "SIG" + name), lambda number, _: os.write(1, f"{role} {number}\\n".encode()))
os.write(1, b"ready\\n")
while role == "outer" or os.getppid() == first:  # nobody would end the inner one
    time.sleep(0.05)
"""


def test_every_signal_is_passed_on_to_the_whole_group(start):
    running = start("run", "job", "--", sys.executable, "-c", TWO_WHO_TELL, *SIGNALS)
    assert [running.stdout.readline(), running.stdout.readline()] == ["ready\n", "ready\n"]

    for name in SIGNALS:
        number = int(signal.Signals[f"SIG{name}"])
        running.send_signal(number)
        assert {running.stdout.readline(), running.stdout.readline()} == {f"outer {number}\n", f"inner {number}\n"}

    assert running.poll() is None


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP"])
def test_a_command_that_is_told_to_end_takes_its_group_along_and_the_lease_is_free(name, start, command, leases, until):
    running = start("run", "job", "--ttl", "30s", "--", *command.shell("sleep 100 & wait"))
    until(command.has_begun)
    until(lambda: len(command.members()) == 2)

    running.send_signal(signal.Signals[f"SIG{name}"])

    assert running.wait(60) == 128 + signal.Signals[f"SIG{name}"]
    assert command.members() == []
    assert leases.get_lease("job").is_expired()


def test_a_command_may_answer_a_signal_in_its_own_way(start, command, until):
    running = start("run", "job", "--", *command.shell("trap 'exit 5' TERM; echo; while :; do sleep 0.02; done"))
    running.stdout.readline()

    running.send_signal(signal.SIGTERM)

    assert running.wait(60) == 5


NOHUP = "import signal, os, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"


def test_a_signal_ignored_from_the_start_does_not_end_the_wait(start, leases):
    assert leases.try_acquire("job", ttl=30)
    waiting = start("run", "job", "--wait", "--", "echo", "at last", prefix=(sys.executable, "-c", NOHUP))
    assert "waiting" in waiting.stderr.readline()

    waiting.send_signal(signal.SIGHUP)
    leases.release("job")

    assert waiting.communicate(timeout=60)[0] == "at last\n"


def test_a_signal_ignored_from_the_start_stays_ignored(start, command, until):
    running = start(
        "run", "job", "--", *command.shell("while [ ! -e end ]; do sleep 0.02; done; exit 3"),
        prefix=(sys.executable, "-c", NOHUP), cwd=command.directory,
    )  # fmt: skip
    until(command.has_begun)

    running.send_signal(signal.SIGHUP)

    (command.directory / "end").touch()
    assert running.wait(60) == 3


# -- what is left behind


def test_what_the_command_left_in_its_group_ends_before_the_lease_does(start, command, leases, until):
    stubborn = "(trap '' TERM; echo; exec sleep 100) & read nothing < /dev/null; exit 4"
    running = start("run", "job", "--ttl", "30s", "--grace", "1s", "--", *command.shell(stubborn))
    until(command.has_begun)
    running.stdout.readline()

    while not leases.get_lease("job").is_expired():
        free = leases.get_lease("job").is_expired()
        assert not (free and command.members())

    assert command.members() == []
    assert running.wait(60) == 4
    assert "left processes behind" in running.stderr.read()


def test_a_daemon_that_left_the_group_is_left_alone(start, command, until):
    script = "import os,sys,time; os.setsid(); open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    note = command.directory / "daemon"
    running = start(
        "run", "job", "--",
        *command.shell(
            f"{sys.executable} -c {shlex.quote(script)} {note} & while [ ! -s {note} ]; do sleep 0.02; done"
        ),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    assert running.wait(20) == 0

    import os

    os.kill(int(note.read_text()), signal.SIGKILL)  # it was there: otherwise this raises


# -- the store


def test_no_store_is_125_and_the_command_does_not_run(pglease):
    done = pglease("run", "job", "--", "echo", "never", env={"PGLEASE_URL": ""})

    assert (done.returncode, done.stdout) == (125, "")
    assert done.stderr.count("\n") == 1


def test_a_release_that_fails_is_a_warning_and_the_commands_code_stands(start, proxy, behind_proxy, command, until):
    script = "while [ ! -e end ]; do sleep 0.02; done; exit 5"
    running = start(
        "run", "job", "--ttl", "30s", "--", *command.shell(script),
        env=behind_proxy, cwd=command.directory,
    )  # fmt: skip
    until(command.has_begun)

    proxy.black_hole()
    (command.directory / "end").touch()

    _, err = running.communicate(timeout=60)
    assert running.returncode == 5
    assert "warning" in err
    assert "not released" in err


def test_a_lease_that_had_ended_unnoticed_is_a_warning(start, command, leases, until, sql):
    script = "while [ ! -e end ]; do sleep 0.02; done; exit 5"
    running = start("run", "job", "--ttl", "1h", "--", *command.shell(script), cwd=command.directory)
    until(command.has_begun)
    assert leases.force_release("job", leases.get_lease("job").fencing_token)

    (command.directory / "end").touch()

    _, err = running.communicate(timeout=60)
    assert running.returncode == 5
    assert "already ended" in err


def test_a_grant_that_came_in_the_moment_the_run_was_called_off_is_given_back():
    with PGLease(MemoryBackend()) as leases:
        signals, terms = Signals(), Terms("job", 60, None, None, None, 5, None)
        question = Question(lambda: leases, terms, signals, lambda _: None)
        while not question.answered():  # and nobody had asked for that yet when the signal came
            signals.wait(60)

        question.withdraw(60)

        assert leases.get_lease("job").is_expired()
        assert not question.answered()
