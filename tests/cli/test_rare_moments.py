"""What the command line does where things are otherwise than usual: another system, nobody to tell, no end in sight."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from pglease import PGLease
from pglease.backends.memory import MemoryBackend
from pglease.cli import demo as demos
from pglease.cli import exporter as exporters
from pglease.cli import failures, main, options, printing, supervise, web
from pglease.cli import run as runs
from pglease.cli import watch as watches
from pglease.cli.supervise import Supervisor
from pglease.events import LeaseChange

# -- another system ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "environment", "place"),
    [
        ("linux", {"XDG_STATE_HOME": "/state", "HOME": "/home/me"}, "/state"),
        ("linux", {"HOME": "/home/me"}, "/home/me/.local/state"),
        ("darwin", {"HOME": "/Users/me"}, "/Users/me/Library/Application Support"),
        ("win32", {"HOME": "/me", "LOCALAPPDATA": "/me/local"}, "/me/local"),
        ("win32", {"HOME": "/me"}, "/me"),
    ],
)
def test_local_leases_are_where_the_system_keeps_such_things(monkeypatch, platform, environment, place):
    monkeypatch.setattr(options, "sys", SimpleNamespace(platform=platform))

    assert options._local_directory(environment).as_posix() == f"{place}/pglease"


def test_a_system_without_process_groups_runs_no_command(call, monkeypatch):
    monkeypatch.setattr(runs, "sys", SimpleNamespace(platform="win32"))

    code, _, err = call("run", "job", "--", "true")

    assert code == 125
    assert "Windows" in err


def test_only_linux_ties_a_command_to_its_parent_and_adopts_orphans(monkeypatch):
    monkeypatch.setattr(supervise, "sys", SimpleNamespace(platform="darwin"))

    assert supervise._tie_to_parent()() is None
    supervise.adopt_orphans()


def test_a_command_whose_parent_died_while_it_was_tied_ends_at_once(monkeypatch):
    ended = []
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: SimpleNamespace(prctl=lambda *_: None))
    system = SimpleNamespace(getpid=lambda: 4711, getppid=lambda: 4711, _exit=ended.append)
    monkeypatch.setattr(supervise, "os", system)
    tie = supervise._tie_to_parent()

    tie()
    assert ended == []
    system.getppid = lambda: 1
    tie()
    assert ended == [125]


# -- a group that is watched -------------------------------------------------------------------------------------------


@pytest.fixture
def watched(monkeypatch):
    """A supervisor of nobody, whose clock goes on by itself."""
    clock = iter(range(1000))
    handle = SimpleNamespace(lost=threading.Event(), loss=None, remaining=lambda: 60.0)
    signals = SimpleNamespace(wait=lambda _: [], nudge=lambda: None)
    made = Supervisor(
        SimpleNamespace(pid=0, failure=lambda: None), handle, signals, 5.0, now=lambda: float(next(clock))
    )
    monkeypatch.setattr(made, "_reap", lambda: None) if hasattr(made, "__dict__") else None
    monkeypatch.setattr(Supervisor, "_reap", lambda _: None)
    monkeypatch.setattr(Supervisor, "_send", lambda *_: None)
    monkeypatch.setattr(Supervisor, "_group_lives", lambda _: True)
    return made


def test_a_group_that_outlives_its_kill_is_given_up_and_told(watched):
    watched._act("kill")

    watched._watch()

    ending = watched._ending()
    assert ending.survivors
    assert ending.code == 128 + signal.SIGKILL


def test_a_command_that_stopped_where_no_shell_continues_it_goes_on_a_moment_later(watched, monkeypatch):
    continued = []

    def go_on(this):
        continued.append(1)
        this._continue_at = None
        this._act("kill")

    monkeypatch.setattr(Supervisor, "_go_on", go_on)
    watched._continue_at = 0.0

    watched._watch()

    assert continued == [1]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGTSTP])
def test_only_a_stop_from_the_keyboard_stops_us_as_well(watched, monkeypatch, number):
    stopped = []
    monkeypatch.setattr(supervise.os, "isatty", lambda _: True)
    monkeypatch.setattr(Supervisor, "_stop_like_the_command", lambda _: stopped.append(1))

    watched._note((number << 8) | 0x7F)

    assert stopped == ([1] if number == signal.SIGTSTP else [])


def a_run(**more):
    given = {
        "ctx": None, "terms": SimpleNamespace(name="job"), "command": ["work"], "child": None,
        "signals": None, "conflict": 75, "quiet": True,
    }  # fmt: skip
    return runs._Run(**{**given, **more})


def test_a_quiet_run_waits_in_silence(capsys):
    refusal = runs.Refusal("somebody", None)
    for quiet in (True, False):
        a_run(quiet=quiet)._waiting(refusal)

    assert capsys.readouterr().err == "pglease: waiting: 'job' is held by somebody\n"


def test_what_could_not_be_ended_is_told(capsys):
    ending = supervise.Ending(137, survivors=True)

    assert a_run()._verdict(ending, SimpleNamespace(name="job")) == 137
    assert "could not be ended and may still be running" in capsys.readouterr().err


def test_the_news_that_a_child_has_changed_ends_no_wait(monkeypatch):
    answers = iter([False, False, True])
    question = SimpleNamespace(
        answered=lambda: next(answers), answer=lambda: "the lease", withdraw=lambda _: pytest.fail("it is still wanted")
    )
    monkeypatch.setattr(runs, "Question", lambda *_: question)
    signals = SimpleNamespace(wait=lambda: [signal.SIGCHLD])

    assert a_run(signals=signals)._ask() == "the lease"


# -- nobody to tell, or a program --------------------------------------------------------------------------------------


def test_a_schema_and_a_release_can_be_had_for_programs_or_in_silence(call, leases):
    assert "CREATE TABLE" in json.loads(call("schema", "print", "--json")[1])["ddl"]
    assert leases.try_acquire("job")
    token = leases.get_lease("job").fencing_token

    assert call("release", "job", "--token", str(token), "-q") == (0, "", "")
    assert call("bump-epoch", "-q") == (0, "", "")


def test_a_quiet_watch_says_nothing_of_how_things_stand_and_a_program_is_told_of_all(call, monkeypatch):
    with PGLease(MemoryBackend()) as leases:
        lease = leases.wait_for_lease("job").lease
    news = [LeaseChange("present", lease), LeaseChange("released", lease)]

    @contextlib.contextmanager
    def watch(*_, **__):
        coming = iter([*news, None])
        yield SimpleNamespace(next=lambda _: next(coming))

    monkeypatch.setattr(watches, "open_client", lambda *_, **__: SimpleNamespace(watch=watch))

    assert [line.split()[2] for line in call("watch", "-q")[1].splitlines()] == ["job"]
    said = [json.loads(line) for line in call("watch", "--json")[1].splitlines()]
    assert [(each["change"], each["name"]) for each in said] == [("present", "job"), ("released", "job")]


@pytest.mark.parametrize("quiet", [True, False])
def test_an_address_is_said_unless_nobody_is_to_be_told(call, monkeypatch, quiet):
    @contextlib.contextmanager
    def serve(*_, **__):
        yield 4711

    monkeypatch.setattr("pglease.contrib.prometheus.serve", serve)
    monkeypatch.setattr("pglease.web.serving.serve", lambda *_: None)
    monkeypatch.setattr(exporters, "signal", SimpleNamespace(SIGTERM=15, SIGINT=2, signal=lambda *_: None))
    never = SimpleNamespace(Event=lambda: SimpleNamespace(set=None, wait=lambda: None))
    monkeypatch.setattr(exporters, "threading", never)
    monkeypatch.setenv(web.TOKEN, "a-token-of-ours-that-is-long-enough")
    silence = ["-q"] if quiet else []

    exported, shown = call("exporter", *silence), call("web", "--listen", "127.0.0.1:0", *silence)

    assert (exported[0], shown[0]) == (0, 0)
    assert ("http://127.0.0.1:4711/metrics" in exported[1]) != quiet
    assert ("http://127.0.0.1:" in shown[1]) != quiet


def test_an_access_token_is_made_unless_nobody_would_know_it(call, monkeypatch):
    monkeypatch.setattr("pglease.web.serving.serve", lambda *_: None)
    monkeypatch.delenv(web.TOKEN, raising=False)

    code, out, _ = call("web", "--listen", "127.0.0.1:0", "--allow-force-release")
    assert code == 0
    assert "token=" in out
    code, _, err = call("web", "--listen", "127.0.0.1:0", "--allow-force-release", "-q")
    assert code == 2
    assert "nobody who knows the access token" in err


def test_words_for_what_has_no_end_no_queue_and_no_place(capsys):
    with PGLease(MemoryBackend()) as leases:
        lease = leases.wait_for_lease("job").lease

    assert printing.duration(float("inf")) == "for ever"
    assert failures._place(ValueError()) == "nowhere"
    assert options.ListenType().convert(("localhost", 1), None, None) == ("localhost", 1)
    printing.details(lease, None)
    assert "queue" not in capsys.readouterr().out


def test_a_table_whose_time_is_over_is_not_drawn_anew(monkeypatch):
    pytest.importorskip("rich")
    from pglease.cli import live

    monkeypatch.setattr(live.Board, "look", lambda _: pytest.fail("its time is over"))
    with PGLease(MemoryBackend()) as leases:
        live.run(leases, "job", "", time.monotonic() - 1)


# -- the demo ----------------------------------------------------------------------------------------------------------


class Told:
    """A story that has been told already."""

    def __init__(self, *_, **__):
        self.facts = [SimpleNamespace(text="somebody held it", true=True, seen={})]
        self.bars, self.tenures, self.killed, self.total = [], [], None, 1.0

    def play(self):
        return True


@pytest.fixture
def told(monkeypatch):
    monkeypatch.setattr("pglease.demo.story.Story", Told)
    monkeypatch.setattr(demos, "ENDING", ("SIGTERM", "SIGNOWHERE"))
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("quiet", [True, False])
def test_a_demo_of_nothing_says_so_unless_nobody_is_to_be_told(told, capsys, quiet):
    assert main(["demo", "--dsn", "postgresql://nowhere", "--ascii", *(["-q"] if quiet else [])]) == 0

    assert ("ok   somebody held it" in capsys.readouterr().out) != quiet


def test_a_demo_draws_who_held_the_lease_into_a_file(told, tmp_path, capsys):
    assert main(["demo", "--dsn", "postgresql://nowhere", "-q", "--svg", str(tmp_path / "who.svg")]) == 0

    assert (tmp_path / "who.svg").read_text().startswith("<svg")


def test_marks_are_coloured_on_a_terminal_that_shows_colours(monkeypatch):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert demos._mark(True, False) != "✓"
    assert "✓" in demos._mark(True, False)

    monkeypatch.setenv("NO_COLOR", "1")
    assert demos._mark(False, True) == "FAIL"
    assert os.environ["NO_COLOR"]
