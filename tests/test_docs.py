"""Every page of docs/ says what is true: its blocks run, in their order, in one namespace, on a new database."""

from __future__ import annotations

import atexit
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import psycopg
import pytest
from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.script import ScriptDirectory
from prometheus_client import CollectorRegistry
from sqlalchemy import Engine

from pglease import MemoryBackend, PGLease, default, open_backend
from pglease.backends import PLUGS
from pglease.contrib.prometheus import LeaseCollector, LeaseMetrics
from pglease.events import EventKind
from pglease.options import seconds
from pglease.settings import Settings
from pglease.testing.api_server import ApiServer
from tests.support import book, django_site
from tests.support.server import RunServer
from tests.support.shell import Shell, lines_of

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TUTORIAL = ROOT / "docs" / "tutorial.md"
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ADDRESS = "//user:pass@localhost/db"
"""How every page writes the address of the reader's database, after `postgresql:` or `postgresql+driver:`."""


NOT_RUN = {
    "celery ": "needs a broker",
    "pglease run celery-beat ": "the same; tests/contrib/celery has one",
    "flask --app shop pglease run ": "there is no such command of the application",
    "pglease doctor --dsn redis:": "needs such a server; tests/redis has one",
    "pglease exporter ": "goes on until it is stopped; tests/cli starts and stops it",
    "pglease web": "the same",
    "pip ": "is what `make install` has done",
    "pytest ": "is a whole suite; tests/test_plugin.py runs it",
    "python manage.py pglease release ": "has nothing to end here; docs/stuck.md has",
    "python manage.py pglease run ": "needs a manage.py; tests/contrib/django has one",
    "python manage.py pglease_migrate ": "takes over the process's signals; tests/contrib/django gives it a process",
}
"""Lines that only have to be taken by their program (`test_shell_lines.py`), by their beginning, and why."""


def parts(page: Path) -> list[tuple[int, str, str]]:
    """Return a page's blocks, each with the number of the line before it and its language."""
    text = page.read_text("utf-8")
    return [(text.count("\n", 0, found.start(2)), found[1], found[2]) for found in FENCED.finditer(text)]


def blocks(page: Path) -> list[str]:
    """Return a page's Python."""
    return [text for _, language, text in parts(page) if language == "python"]


def typed(text: str) -> list[str]:
    """Return the lines of a block that are run."""
    return [line for line in lines_of(text) if not line.startswith(tuple(NOT_RUN))]


def title(page: Path) -> str:
    return str(page.relative_to(ROOT))


@contextmanager
def nothing_more(_dsn: str) -> Iterator[dict[str, Any]]:
    """A page that needs no helpers."""
    yield {}


@contextmanager
def a_dead_worker_and_another(dsn: str) -> Iterator[dict[str, Any]]:
    """A worker that died while it held `my-task`, and `other`, which lives."""
    with PGLease(dsn) as dead, PGLease(dsn) as other:
        assert dead.try_acquire("my-task", ttl=600, heartbeat=False)
        yield {"other": other}


@contextmanager
def the_seventeenth_hold(dsn: str, name: str) -> Iterator[dict[str, Any]]:
    """A lease that is held under token 17 and not renewed."""
    with PGLease(dsn) as stuck:
        for _ in range(16):
            assert stuck.try_acquire(name)
            stuck.release(name)
        assert stuck.try_acquire(name, ttl=600, heartbeat=False)
        yield {}


@contextmanager
def a_cluster(_dsn: str) -> Iterator[dict[str, Any]]:
    """A kubeconfig whose current context is a cluster with the namespace `jobs`."""
    with TemporaryDirectory() as folder, ApiServer(("jobs",)) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(server.kubeconfig(Path(folder) / "config")))
        yield {}


@contextmanager
def a_django_project(dsn: str) -> Iterator[dict[str, Any]]:
    """A project whose default database this is, with a model `Report`."""
    with django_site.default_database(dsn):
        from django.core.management import call_command

        call_command("migrate", "pglease", verbosity=0)
        yield {"Report": django_site.report_model()}


@contextmanager
def inside_env_py(_dsn: str) -> Iterator[dict[str, Any]]:
    """What Alembic has set up when it runs env.py for `upgrade head`."""
    config = Config()
    config.set_main_option("script_location", str(ROOT / "examples" / "alembic_pods"))
    config.set_main_option("path_separator", "os")
    scripts = ScriptDirectory.from_config(config)

    def upgrade(present: Any, _context: Any) -> Any:
        return scripts._upgrade_revs("head", present)

    with EnvironmentContext(config, scripts, fn=upgrade, destination_rev="head"):
        yield {}


HELPERS: dict[str, Callable[[str], Any]] = {
    "docs/migration.md": a_dead_worker_and_another,
    "docs/kubernetes.md": a_cluster,
    "docs/django.md": a_django_project,
    "docs/coming-from-django-pglock.md": a_django_project,
    "docs/sqlalchemy.md": inside_env_py,
    "docs/stuck.md": partial(the_seventeenth_hold, name="nightly-import"),
}
"""What a page takes for granted beyond the library."""


def within_its_slots(page: Path, tell: Callable[[], None], now: Callable[[], float] = time.time) -> None:
    """Tell a page; once more, if a slot of its `once_per` ended under it: what is done once was rightly done twice."""
    slots = {seconds(each, "once_per") for each in re.findall(r'once_per="([^" ]+)"', page.read_text("utf-8"))}
    begun_in = [now() // slot for slot in slots]
    try:
        tell()
    except AssertionError:
        if begun_in == [now() // slot for slot in slots]:
            raise
        tell()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page) and page != TUTORIAL], ids=title)
def test_the_blocks_of_a_page_run_in_their_order(
    page: Path, server: RunServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Callable[[], object]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)

    def tell() -> None:
        monkeypatch.setattr(default, "_client", None)  # a page finds a program that has just begun
        with server.database() as database, HELPERS.get(title(page), nothing_more)(server.dsn(database)) as names:
            names["__name__"] = "page"
            try:
                run(page, names, Shell(tmp_path, server.dsn(database), programs(names)))
                for function in at_exit:
                    function()
            finally:
                at_exit.clear()
                close(default._client, *names.values())

    within_its_slots(page, tell)


def run(page: Path, names: dict[str, Any], shell: Shell) -> None:
    """Run a page's code and type its lines in."""
    for line, language, text in parts(page):
        if language == "python":
            code = text.replace(ADDRESS, shell.dsn.removeprefix("postgresql:"))
            # The empty lines before it make a traceback point into the page.
            exec(compile("\n" * line + code, title(page), "exec"), names)
        else:
            for command in typed(text):
                shell.type_in(command)


def programs(names: dict[str, Any]) -> dict[str, Callable[[list[str]], int]]:
    """Return what the frameworks of a page run, by how a line begins."""

    def of_django(words: list[str]) -> int:
        from django.core.management import call_command

        call_command(*words)  # raises for other codes
        return 0

    def of_flask(words: list[str]) -> int:
        code: int = names["app"].test_cli_runner().invoke(args=words).exit_code
        return code

    return {"python manage.py": of_django, "flask --app shop": of_flask}


def close(*things: object) -> None:
    """Close what a page left open."""
    for thing in things:
        if isinstance(thing, PGLease):
            thing.close()
        elif isinstance(thing, Engine):
            thing.dispose()


def test_the_tutorial_is_true_as_it_is_written(
    server: RunServer, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code and its commands, in their order."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

    def tell() -> None:
        with server.database() as database:
            dsn, folder = server.dsn(database), tmp_path_factory.mktemp("tutorial")
            monkeypatch.setenv("DATABASE_URL", dsn)
            names: dict[str, Any] = {"__name__": "page"}
            try:
                for _, language, text in parts(TUTORIAL):
                    if language == "console":
                        type_in(text, folder)
                    elif language == "python":
                        code = text.replace(ADDRESS, dsn.removeprefix("postgresql:"))
                        if "__main__" in code:
                            (folder / "nightly.py").write_text(code, "utf-8")
                        exec(compile(code, title(TUTORIAL), "exec"), names)
            finally:
                close(*names.values())

    within_its_slots(TUTORIAL, tell)


def test_a_page_is_told_again_where_its_day_ended_under_it_and_only_there() -> None:
    day, told = 86400.0, []

    def tell() -> None:
        told.append("told")
        assert len(told) > 1

    with pytest.raises(AssertionError):
        within_its_slots(TUTORIAL, tell, iter([5.0, 6.0]).__next__)
    told.clear()
    within_its_slots(TUTORIAL, tell, iter([day - 1, day + 1]).__next__)
    assert told == ["told", "told"]


def type_in(console: str, folder: Path) -> None:
    """Run commands in a shell. What a page shows below one is what it prints, in whichever order."""
    for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", console, re.MULTILINE):
        done = subprocess.run(["bash", "-c", command], check=False, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, (command, done)
        assert not shown or sorted(done.stdout.splitlines()) == sorted(shown.splitlines()), (command, done)


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_every_block_of_a_page_is_in_a_language_or_is_no_code(page: Path) -> None:
    """A block that says `py`, or is indented, would be run by nobody."""
    fences = re.findall(r"^\s*```(\S*)", page.read_text("utf-8"), re.MULTILINE)

    assert set(fences[::2]) <= {"python", "console", "sql", "yaml", "toml", "ini", "json", "text", ""}
    assert len(re.findall(r"^```python$", page.read_text("utf-8"), re.MULTILINE)) == len(blocks(page))


def test_a_page_without_code_shows_no_line_that_is_run_nowhere() -> None:
    run, shown = (
        {line for page in PAGES if bool(blocks(page)) is has_code for line in typed(page.read_text("utf-8"))}
        for has_code in (True, False)
    )

    assert shown - run == set()


def test_what_is_not_run_is_in_some_page() -> None:
    lines = [line for page in PAGES for line in lines_of(page.read_text("utf-8"))]

    assert [each for each in NOT_RUN if not any(line.startswith(each) for line in lines)] == []


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_every_local_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), target


def test_every_page_is_in_the_navigation_of_the_site_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]

    pages = re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)

    assert sorted(page for page in pages if not page.startswith("source/")) == sorted(
        ["index.md", *(page.name for page in PAGES)]
    )


def test_every_variable_that_is_read_is_on_the_page_of_configuration() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    sources = [path.read_text("utf-8") for path in (ROOT / "pglease").rglob("*.py") if "demo" not in path.parts]

    read = {name for text in sources for name in re.findall(r'environ\w*(?:\.get\(|\[)"([A-Z_]+)"', text)}

    assert {"PGLEASE_URL", "NO_COLOR"} <= read
    of_the_system = {"HOME", "LOCALAPPDATA", "PATH", "PYTEST_CURRENT_TEST"}
    assert {name for name in read - of_the_system if f"`{name}`" not in page} == set()


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_what_a_page_has_printed_is_printed(page: Path) -> None:
    for part in book.PRINTED.findall(page.read_text("utf-8")):
        assert book.PARTS[part]().count("\n") > 3, part


def test_links_lead_to_the_places_that_files_have_in_the_site() -> None:
    assert book.relinked("[a](docs/redis.md#x) [b](LICENSE)", "README.md") == "[a](redis.md#x) [b](source/LICENSE)"
    assert book.relinked("[a](../README.md) [b](redis.md)", "docs/flask.md") == "[a](index.md) [b](redis.md)"
    assert book.relinked("[a](../deploy)", "docs/flask.md") == "[a](source/deploy/index.md)"
    assert book.relinked("[a](https://host/x) [b](#y)", "README.md") == "[a](https://host/x) [b](#y)"


def test_a_page_that_asks_another_host_for_something_or_may_is_found_out(tmp_path: Path) -> None:
    def write(name: str, head: str) -> None:
        (tmp_path / name).write_text(book.on_post_page(f"<html><head>{head}</head></html>"))

    write("good.html", '<a href="https://host/"><script src="own.js"></script><img src="own.svg">')
    write("bad.html", '<script src="https://host/a.js"></script><link rel="stylesheet" href="//host">')
    (tmp_path / "bad.css").write_text("@import url(https://host/font.css);")
    (tmp_path / "free.html").write_text("<html><head><script src='own.js'></script></head></html>")

    found = list(book.requests(tmp_path))

    assert sorted(line.partition(":")[0] for line in found) == ["bad.css", "bad.html", "bad.html", "free.html"]


def test_an_operators_queries_run(dsn: str) -> None:
    page = (ROOT / "docs" / "schema.md").read_text("utf-8")
    queries = re.findall(r"^```sql\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)

    with PGLease(dsn) as leases, psycopg.connect(dsn) as connection:
        leases.wait_for_lease("daily-report")
        found = [connection.execute(query).fetchall() for query in queries]

    assert len(queries) == 8
    assert [row[0] for row in found[0]] == ["daily-report"]


def test_the_sketch_of_a_statement_is_made_of_the_statements_own_clauses() -> None:
    (sketch,) = [text for _, language, text in parts(ROOT / "docs" / "statements.md") if language == "sql"]
    real = (ROOT / "pglease" / "backends" / "postgres_sql.py").read_text("utf-8")

    clauses = re.findall(r"\w+ AS MATERIALIZED|FOR UPDATE SKIP LOCKED|clock_timestamp\(\) AS seen_at", sketch)
    assert len(clauses) == 4
    assert [clause for clause in clauses if clause not in real] == []


def test_an_address_that_a_page_shows_by_itself_is_one() -> None:
    shown = [
        line
        for page in PAGES
        for _, language, text in parts(page)
        for line in text.splitlines()
        if language == "text" and re.match(r"\w+://\S+$", line)
    ]

    assert len(shown) >= 1
    for address in shown:
        open_backend(address).close()


def test_the_variables_that_a_page_shows_do_what_stands_beside_them() -> None:
    (block,) = [text for _, _, text in parts(ROOT / "docs" / "primitives.md") if text.startswith("PGLEASE_")]

    for line in block.splitlines():
        said, where = line.split(None, 1)
        variable, _, value = said.partition("=")
        kind, name, prefix = re.fullmatch(
            r'(?:every |leases\.)(\w+(?: \w+)?)(?:\("(\w+)"(?:, env_prefix="(\w+)")?\))?', where.strip()
        ).groups()  # type: ignore[union-attr]  # otherwise the line is not understood
        kind = {"election": "leader_election"}.get(kind, kind)
        found = Settings({variable: value}).explain(kind, name or "any", env_prefix=prefix)
        assert [(each.source, str(each.value)) for each in found if each.source != "default"] == [(variable, value)]


def test_the_entry_point_of_a_store_is_shown_as_it_is_read() -> None:
    (block,) = [text for _, language, text in parts(ROOT / "docs" / "backends.md") if language == "toml"]

    assert list(tomllib.loads(block)["project"]["entry-points"]) == [PLUGS]


def test_the_page_on_seeing_names_every_event_and_every_metric() -> None:
    page = (ROOT / "docs" / "seeing.md").read_text("utf-8")
    registry = CollectorRegistry()
    LeaseMetrics(registry)

    with PGLease(MemoryBackend()) as leases:
        leases.wait_for_lease("job")
        families = [*registry.collect(), *LeaseCollector(leases).collect()]

    told = [
        line.split("`")[1]
        for line in page.splitlines()
        if re.match(r"\| `\w+` \|.*\| (DEBUG|INFO|WARNING|ERROR)", line)
    ]
    assert told == list(get_args(EventKind))
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert len(names) == 12
    assert names == set(re.findall(r"`(pglease_[a-z_]+)`", page))
