"""`pglease demo`: it plays to its end, notices when something did not happen, and leaves nothing."""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest

from pglease.backends.memory import MemoryBackend
from pglease.cli import main
from pglease.demo import story as stories
from pglease.demo import worker as workers
from pglease.demo.story import Story, StoryError
from pglease.demo.timeline import ASCII, UNICODE, Bar, draw
from tests.support.readme import README, played, plot

DEMO = (sys.executable, "-B", "-m", "pglease", "demo")


def processes_of(mark):
    """The command lines of all processes that carry `mark` in their environment."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (directory / "environ").read_bytes():
                found.append((directory / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.fixture
def alone(tmp_path):
    """An environment by which everything that is started can be found, with a temporary directory of its own."""
    mark = f"PGLEASE_TEST_MARK={tmp_path}"
    name, _, value = mark.partition("=")
    return mark, {**os.environ, name: value, "TMPDIR": str(tmp_path), "PGLEASE_URL": "postgresql://must.not.be.used/"}


def in_the_readme():
    """What the README says that the demo says."""
    return re.search(r"<!-- demo:.*?-->\n(.*?)\n<!-- /demo -->", README.read_text("utf-8"), re.DOTALL)[1]


def schemas(dsn):
    with psycopg.connect(dsn) as connection:
        return connection.execute("SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'pglease_demo%'").fetchone()[0]


@pytest.mark.timeout(100)
def test_the_demo_plays_to_its_end_on_a_server_of_its_own_and_leaves_nothing(alone, tmp_path):
    mark, environment = alone

    done = subprocess.run(DEMO, env=environment, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "✗ " not in done.stdout.partition("kill -9   ")[2]
    assert done.stdout.count("✓") == 8
    assert plot(played(done.stdout)) == plot(in_the_readme()), "run: python -m tests.support.readme --demo"
    assert processes_of(mark) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(number, alone, tmp_path):
    mark, environment = alone
    playing = subprocess.Popen(DEMO, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "gets it" not in playing.stdout.readline():
        assert playing.poll() is None

    playing.send_signal(number)

    _, err = playing.communicate(timeout=30)
    assert playing.returncode == 128 + number
    assert err.strip() == ""
    assert processes_of(mark) == []
    assert list(tmp_path.iterdir()) == []


def test_a_demo_on_an_existing_server_cleans_up_and_speaks_json(dsn, admin, database, capsys):
    admin.execute(f"GRANT CREATE ON DATABASE {database} TO PUBLIC")

    code = main(["demo", "--dsn", dsn, "--json"])

    facts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (code, [fact["fact"] for fact in facts if not fact["true"]]) == (0, [])
    assert len(facts) == 8
    assert schemas(dsn) == 0


class Saboteur(Story):
    """A story in which the stale write is let through: the demo must notice."""

    def _perform(self, leases, table):
        table.execute(
            f"CREATE FUNCTION {self._schema}.meddle() RETURNS trigger LANGUAGE plpgsql AS "
            "$$BEGIN NEW.author := 'meddler'; RETURN NEW; END$$"
        )
        table.execute(
            f"CREATE TRIGGER meddle BEFORE UPDATE ON {self._schema}.report "
            f"FOR EACH ROW EXECUTE FUNCTION {self._schema}.meddle()"
        )
        super()._perform(leases, table)


def test_a_demo_that_goes_wrong_says_so(dsn, admin, database, monkeypatch):
    admin.execute(f"GRANT CREATE ON DATABASE {database} TO PUBLIC")
    monkeypatch.setattr("pglease.demo.story.PATIENCE", 6.0)
    story = Saboteur(dsn, say=lambda _: None)

    assert story.play() is False

    assert [fact.text for fact in story.facts if not fact.true] == ["the new holder wrote nothing"]
    assert schemas(dsn) == 0


def test_a_demo_whose_guard_lets_everything_through_says_so(dsn, admin, database, monkeypatch):
    admin.execute(f"GRANT CREATE ON DATABASE {database} TO PUBLIC")
    monkeypatch.setattr("pglease.backends.postgres.PostgresBackend.guard", lambda *_, **__: None)
    story = Story(dsn, say=lambda _: None)

    assert story.play() is False

    assert ["late write" in fact.text for fact in story.facts if not fact.true] == [True]
    assert schemas(dsn) == 0


def test_without_a_server_package_one_sentence_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PGLEASE_PG_BIN", str(tmp_path))

    code = main(["demo"])

    err = capsys.readouterr().err
    assert code == 125
    assert "pglease[demo]" in err
    assert err.count("\n") == 1


def test_a_server_that_is_not_there_is_one_sentence(capsys):
    code = main(["demo", "--dsn", "postgresql://me:c4n4ry@127.0.0.1:1/db"])

    out, err = capsys.readouterr()
    assert code == 125
    assert "c4n4ry" not in out + err
    assert err.count("\n") == 1


def test_the_timeline_is_drawn_to_scale():
    bars = [
        Bar("a", "held", 0, 5, " token 1 "),
        Bar("a", "running out", 5, 8),
        Bar("b", "waiting", 0, 8),
        Bar("b", "held", 8, 10),
    ]

    picture = draw(("a", "b"), bars, killed=("a", 5), total=10, ink=UNICODE)

    assert picture[0] == "   0 s         2           4           6           8           10"
    assert picture[1] == "a  █ token 1 ████████████████████✗░░░░░░░░░░░░░░░░░░"
    assert picture[2] == "b  " + "·" * 48 + "█" * 12


def test_the_timeline_needs_no_unicode():
    picture = draw(("a",), [Bar("a", "held", 0, 5)], killed=("a", 5), total=10, ink=ASCII)

    assert "\n".join(picture).isascii()


@pytest.fixture
def untold(monkeypatch):
    """A story of which nothing was told yet, about a database that has nothing."""
    story = object.__new__(Story)
    story._schema, story._began, story.bars = "nowhere", 0.0, []
    story._held_since, story._waiting_since = {}, {}
    return story


def test_a_story_of_which_a_part_is_missing_is_not_told(untold):
    empty = SimpleNamespace(execute=lambda _: SimpleNamespace(fetchone=lambda: None))

    with pytest.raises(StoryError, match="knows no lease"):
        untold._record(SimpleNamespace(get_lease=lambda _: None))
    with pytest.raises(StoryError, match="the report is gone"):
        untold._report(empty)
    with pytest.raises(StoryError, match="no id"):
        untold._claim(empty, None)


def test_the_end_of_what_a_worker_never_held_is_no_bar(untold):
    untold._hear("worker-1", {"event": "lost", "at": 1.0, "token": 1})

    assert untold.bars == []


@pytest.mark.parametrize("prefix", [None, "/somewhere"])
def test_a_worker_leaves_no_compiled_files_beside_the_code(monkeypatch, prefix):
    started = []

    def popen(argv, *, env, **_):
        started.append(env)
        return SimpleNamespace(stdin=None, stdout=iter(()), kill=lambda: None, wait=lambda: 0)

    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setattr(stories.sys, "pycache_prefix", prefix)
    monkeypatch.setattr(stories.subprocess, "Popen", popen)
    worker = stories.Worker("worker-1", "postgresql://nowhere", "schema", queue.Queue())
    worker.process.stdout = None
    worker.clear_away()

    assert ("PYTHONDONTWRITEBYTECODE" in started[0]) == (prefix is None)


def test_a_worker_that_is_told_to_stop_while_it_waits_stops(monkeypatch, capsys):
    handlers = {}

    def wait(*_):
        handlers[signal.SIGTERM]()

    monkeypatch.setattr(workers, "die_with_the_story", lambda: None)
    monkeypatch.setattr(workers, "signal", SimpleNamespace(SIGTERM=signal.SIGTERM, signal=handlers.__setitem__))
    monkeypatch.setattr(workers, "_wait", wait)
    monkeypatch.setattr(workers, "open_backend", lambda *_, **__: MemoryBackend())
    monkeypatch.setattr(workers, "psycopg", SimpleNamespace(connect=lambda *_, **__: contextlib.nullcontext()))
    for name in ("URL", "SCHEMA", "LEASE", "WORKER"):
        monkeypatch.setenv(f"DEMO_{name}", "x")
    monkeypatch.setenv("DEMO_TTL", "5")

    workers.main()

    assert [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()] == ["ready"]
