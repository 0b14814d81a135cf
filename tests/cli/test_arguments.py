"""How `run` reads its arguments."""

import click
import pytest

from pglease.cli.run import default_grace, run


def read(*arguments):
    return run.make_context("run", list(arguments)).params


@pytest.mark.parametrize(
    "arguments",
    [
        ("--ttl", "5m", "job", "--", "cmd", "--ttl", "x", "-v"),
        ("job", "--ttl", "5m", "--", "cmd", "--ttl", "x", "-v"),
        ("job", "--ttl=5m", "cmd", "--ttl", "x", "-v"),
        ("--ttl", "5m", "--", "job", "cmd", "--ttl", "x", "-v"),
    ],
)
def test_options_stand_before_or_after_the_name_and_the_command_keeps_its_own(arguments):
    params = read(*arguments)

    assert (params["name"], params["ttl"], params["command"]) == ("job", 300, ("cmd", "--ttl", "x", "-v"))


@pytest.mark.parametrize(
    ("arguments", "wait"),
    [
        (("job", "--", "cmd"), None),
        (("--wait", "job", "--", "cmd"), float("inf")),
        (("job", "--wait", "--", "cmd"), float("inf")),
        (("job", "--wait", "--ttl", "5m", "--", "cmd"), float("inf")),
        (("job", "--wait", "cmd"), float("inf")),
        (("--wait", "30s", "job", "--", "cmd"), 30),
        (("--wait=30s", "job", "--", "cmd"), 30),
        (("job", "--wait", "1m30s", "--", "cmd"), 90),
        (("job", "--wait", "3", "-q", "--", "cmd"), 3),
        (("--wait=0", "job", "--", "cmd"), 0),
    ],
)
def test_wait_takes_a_duration_but_never_the_name(arguments, wait):
    params = read(*arguments)

    assert (params["name"], params["wait"], params["command"]) == ("job", wait, ("cmd",))


def test_a_second_double_dash_belongs_to_the_command():
    assert read("job", "--", "git", "log", "--", "file")["command"] == ("git", "log", "--", "file")


def test_wait_of_the_command_is_the_commands():
    params = read("job", "cmd", "--wait", "-E", "3")

    assert params["command"] == ("cmd", "--wait", "-E", "3")
    assert params["wait"] is None
    assert params["conflict"] == 75


def test_short_options_take_their_value_with_or_without_a_blank():
    for spelling in (("-E", "0"), ("-E0",), ("-qE0",), ("-q", "-E", "0")):
        params = read(*spelling, "job", "cmd")

        assert (params["conflict"], params["name"], params["command"]) == (0, "job", ("cmd",))


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("job",),
        ("job", "--"),
        ("job", "--ttl", "soon", "--", "cmd"),
        ("job", "--ttl", "0", "--", "cmd"),
        ("job", "--ttl", "-3s", "--", "cmd"),
        ("job", "--grace", "nan", "--", "cmd"),
        ("job", "--wait=later", "--", "cmd"),
        ("job", "-E", "256", "--", "cmd"),
        ("jo\nb", "--", "cmd"),
        ("", "--", "cmd"),
        ("x" * 256, "--", "cmd"),
        ("job", "--no-such-option", "--", "cmd"),
    ],
)
def test_bad_usage_is_refused(arguments):
    with pytest.raises(click.UsageError):
        read(*arguments)


def test_the_default_grace_always_leaves_room_in_the_ttl():
    for ttl in (3, 5, 11, 12, 15, 20, 60, 3600):
        assert ttl >= 3 * (default_grace(ttl) + 1) - 1e-9
    assert default_grace(300) == 5
    assert default_grace(16) == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--ttl", "17s", "--grace", "5s"), "18 s"),
        (("--ttl", "2s",), "3 s"),
        (("--ttl", "60s", "--min-hold", "2m", "--max-hold", "1m"), "min_hold"),
        (("--ttl", "60s", "--owner", "a\tb"), "--owner"),
        (("--ttl", "60s", "--max-hold", "1s"), "--max-hold"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_before_anything_is_sent(arguments, said, monkeypatch, capsys):
    from pglease.cli import main

    monkeypatch.setenv("PGLEASE_URL", "postgresql://nobody@127.0.0.1:1/nothing")

    code = main(["run", "job", *arguments, "--", "true"])

    assert code == 2
    assert said in capsys.readouterr().err
