"""`list`, `show`, `check`, `wait`, `release`, `cleanup`: for people, for programs, for shells."""

import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from pglease import PGLease, clock
from pglease.backends.base import Budget
from pglease.records import Ticket


@pytest.fixture
def held(leases):
    """A lease that somebody else holds."""
    assert leases.try_acquire("job", ttl=60, metadata={"why": "ü"})
    return leases.get_lease("job")


@pytest.fixture
def given_back(leases):
    assert leases.try_acquire("old", ttl=60)
    assert leases.release("old")


def objects(out):
    return [json.loads(line) for line in out.splitlines()]


def test_list_shows_who_holds_what(call, held, given_back):
    code, out, err = call("list")

    assert (code, err) == (0, "")
    heading, line = out.splitlines()
    assert heading.split() == ["NAME", "STATE", "HOLDER", "TOKEN", "SINCE", "RENEWED", "LEFT"]
    assert line.split()[:4] == ["job", "held", "somebody-else", "1"]


def test_list_as_json_is_one_object_a_line(call, held, given_back):
    code, out, _ = call("list", "--all", "--json")

    assert code == 0
    job, old = objects(out)
    assert (job["name"], job["held"], job["owner_id"], job["fencing_token"]) == ("job", True, "somebody-else", 1)
    assert job["metadata"] == {"why": "ü"}
    assert 0 < job["remaining"] <= 60
    assert job["expires_at"] == held.expires_at.isoformat()
    assert (old["name"], old["held"], old["remaining"]) == ("old", False, 0)


def test_list_takes_a_prefix_and_says_when_there_is_nothing(call, held):
    assert objects(call("list", "jo", "--json")[1])[0]["name"] == "job"

    assert call("list", "x") == (0, "", "pglease: no leases begin with 'x'\n")
    assert call("list", "x", "-q") == (0, "", "")
    assert call("list", "x", "--json") == (0, "", "")


def test_show_tells_everything(call, held):
    code, out, _ = call("show", "job")

    assert code == 0
    for fact in ("somebody-else", "held for another", "fencing token  1", '{"why": "ü"}'):
        assert fact in out


def test_show_says_whether_it_is_renewed_and_who_queues(call, held, leases):
    budget = Budget.of(30, clock.now)
    assert "queue          nobody" in call("show", "job")[1]
    for number, label in enumerate(("first", "second")):
        assert leases.backend.queue(Ticket("job", f"{number:032x}", label, 60.0), budget)

    out = call("show", "job")[1]

    assert "queue          first, second" in out
    assert "in time" in out
    (shown,) = objects(call("show", "job", "--json")[1])
    assert (shown["queue"], shown["late"]) == (["first", "second"], False)


def test_show_of_an_unknown_name_is_1(call, leases):
    assert call("show", "nobody") == (1, "", "pglease: the store knows no lease 'nobody'\n")
    code, out, _ = call("show", "nobody", "--json")
    assert (code, objects(out)) == (1, [{"name": "nobody", "held": False, "known": False}])


def test_show_of_a_name_that_was_given_back_names_the_last_holder(call, given_back):
    code, out, _ = call("show", "old")

    assert code == 0
    assert "last holder" in out


def test_check_is_0_for_held_and_1_for_free(call, held, given_back):
    assert call("check", "job", "-q") == (0, "", "")
    assert call("check", "old", "-q") == (1, "", "")
    assert call("check", "nobody")[:2] == (1, "'nobody' is free\n")
    assert "somebody-else" in call("check", "job")[1]
    assert objects(call("check", "job", "--json")[1])[0]["held"] is True
    assert objects(call("check", "old", "--json")[1]) == [{"name": "old", "held": False}]


def test_check_by_owner_is_0_for_that_owner_alone(call, held, given_back):
    assert call("check", "job", "-q", "--owner", "somebody-else")[0] == 0
    assert call("check", "job", "-q", "--owner", "pod-a")[0] == 1
    assert call("check", "old", "-q", "--owner", "somebody-else")[0] == 1


def test_looking_on_a_store_that_was_never_used(call):
    assert call("check", "job", "-q")[0] == 1
    assert call("show", "job", "-q")[0] == 1
    assert call("list", "-q") == (0, "", "")
    assert call("wait", "job", "-q") == (0, "", "")


def test_wait_is_0_when_free_and_75_when_time_ran_out(call, held):
    assert call("wait", "nobody")[0] == 0

    code, out, err = call("wait", "job", "--timeout", "0.2")

    assert (code, out) == (75, "")
    assert "somebody-else" in err
    assert objects(call("wait", "job", "--timeout", "0", "--json")[1])[0]["held"] is True


def test_wait_ends_when_the_lease_is_released(call, held, leases):
    threading.Timer(0.3, leases.release, ["job"]).start()

    code, out, _ = call("wait", "job", "--timeout", "20s")

    assert (code, out) == (0, "'job' is free\n")


def test_wait_ends_with_the_hold_though_another_began_before_anybody_looked(call, held, leases, monkeypatch):
    def watch(self, *args, real=PGLease.watch, **kwargs):
        assert leases.release("job")
        assert leases.try_acquire("job", ttl="10m")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(PGLease, "watch", watch)

    assert call("wait", "job", "-q", "--timeout", "20s")[0] == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_wait_can_be_interrupted(number, code, start, held, until):
    waiting = start("wait", "job")
    until(lambda: len([*Path(f"/proc/{waiting.pid}/task").iterdir()]) > 1)  # it talks to the store

    waiting.send_signal(number)

    out, err = waiting.communicate(timeout=60)
    assert waiting.returncode == code
    assert (out, err.strip()) == ("", "")


def test_release_ends_a_hold_under_its_token_only(call, held):
    code, out, err = call("release", "job", "--token", "7")
    assert (code, out) == (1, "")
    assert "token 7" in err
    assert call("check", "job", "-q")[0] == 0

    assert call("release", "job", "--token", "1") == (0, "'job' was taken from its holder (token 1)\n", "")

    assert call("check", "job", "-q")[0] == 1
    again = call("release", "job", "--token", "1", "--json")
    assert (again[0], objects(again[1])) == (1, [{"name": "job", "fencing_token": 1, "released": False}])


@pytest.mark.parametrize(
    "arguments", [("release", "job"), ("release", "job", "--token", "x"), ("wait",), ("nonsense",)]
)
def test_bad_usage_is_2(arguments, call):
    code, out, err = call(*arguments)

    assert (code, out) == (2, "")
    assert err.startswith("pglease: ")
    assert err.count("\n") == 1


def test_cleanup_removes_what_has_ended(call, held, given_back):
    assert call("cleanup", "--older-than", "1h") == (0, "0 records removed\n", "")
    assert objects(call("cleanup", "--json")[1]) == [{"removed": 1}]
    assert call("cleanup", "-q") == (0, "", "")
    assert call("check", "job", "-q")[0] == 0


def test_what_a_stranger_wrote_cannot_steer_the_terminal(call, held, sql):
    sql("UPDATE pglease_leases SET owner_id = E'evil\\x1b[2J\\u202e'")

    for command in (("list",), ("show", "job"), ("check", "job")):
        out = call(*command)[1]
        assert "\x1b" not in out
        assert "\u202e" not in out
        assert "evil" in out


def test_a_terminal_without_unicode_gets_escapes(pglease, leases):
    assert leases.try_acquire("bücher-✓")

    done = pglease("list", env={"PYTHONIOENCODING": "latin-1"}, encoding="latin-1")

    assert done.returncode == 0
    assert "bücher-\\u2713" in done.stdout


def test_a_reader_that_has_gone_is_no_trouble(start, held):
    listing = start("list")
    listing.stdout.close()

    assert listing.wait(20) in (0, 141)
    assert listing.stderr.read() == ""


def test_a_reader_that_closes_early_is_141(environment, held, tmp_path):
    import sys

    script = f"{sys.executable} -m pglease list --json; echo $? > {tmp_path}/code"
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as nowhere:
        done = subprocess.run(
            ["sh", "-c", script],
            env=environment,
            stdout=nowhere,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
            check=True,
        )

    assert (tmp_path / "code").read_text() == "141\n"
    assert done.stderr == ""


def test_the_program_alone_shows_its_help_and_is_bad_usage(call):
    code, _, err = call()

    assert code == 2
    for command in (
        "run",
        "list",
        "show",
        "wait",
        "watch",
        "check",
        "release",
        "cleanup",
        "schema",
        "doctor",
        "bump-epoch",
        "demo",
        "completion",
    ):
        assert f"  {command} " in err


@pytest.mark.parametrize(
    "command",
    [
        *("run", "list", "show", "wait", "watch", "check", "release", "cleanup"),
        *("schema", "doctor", "bump-epoch", "demo", "completion"),
    ],
)
def test_every_command_has_a_help_text_with_examples(command, call):
    code, out, _ = call(command, "--help")

    assert code == 0
    assert "Examples:" in out
    assert f"pglease {command}" in out


def test_the_help_of_run_says_what_it_cannot_do(call):
    out = " ".join(call("run", "--help")[1].split())

    for limit in ("grandchildren", "stopped", "fencing token", "sudo"):
        assert limit in out


def test_the_version_is_printed(call):
    code, out, _ = call("--version")

    assert code == 0
    assert out.startswith("pglease ")
