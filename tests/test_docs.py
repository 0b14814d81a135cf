"""Every page of docs/ says what is true: its Python blocks run, in their order, in one namespace, on a new database."""

from __future__ import annotations

import atexit
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

from pglease import MemoryBackend, PGLease, default
from pglease.contrib.prometheus import LeaseCollector, LeaseMetrics
from pglease.events import EventKind
from pglease.testing.api_server import ApiServer
from tests.support import book, django_site

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TUTORIAL = ROOT / "docs" / "tutorial.md"
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ADDRESS = "//user:pass@localhost/db"
"""How every page writes the address of the reader's database, after `postgresql:` or `postgresql+driver:`."""


def blocks(page: Path) -> list[tuple[int, str]]:
    """Return a page's blocks, each with the number of the line before it."""
    text = page.read_text("utf-8")
    return [(text.count("\n", 0, found.start(1)), found[1]) for found in BLOCK.finditer(text)]


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
}
"""What a page takes for granted beyond the library."""


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page) and page != TUTORIAL], ids=title)
def test_the_blocks_of_a_page_run_in_their_order(page: Path, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Callable[[], object]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(default, "_client", None)  # a page finds a program that has just begun

    with HELPERS.get(title(page), nothing_more)(dsn) as names:
        names["__name__"] = "page"
        for line, block in blocks(page):
            # The empty lines before it make a traceback point into the page.
            exec(
                compile("\n" * line + block.replace(ADDRESS, dsn.removeprefix("postgresql:")), title(page), "exec"),
                names,
            )

        for function in at_exit:
            function()
        for client in [each for each in (default._client, *names.values()) if isinstance(each, PGLease)]:
            client.close()
        for engine in [each for each in names.values() if isinstance(each, Engine)]:
            engine.dispose()


def test_the_tutorial_is_true_as_it_is_written(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code and its commands, in their order."""
    monkeypatch.setenv("DATABASE_URL", dsn)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    names: dict[str, Any] = {"__name__": "page"}

    for language, block in FENCED.findall(TUTORIAL.read_text("utf-8")):
        if language == "console":
            type_in(block, tmp_path)
        elif language == "python":
            code = block.replace(ADDRESS, dsn.removeprefix("postgresql:"))
            if "__main__" in code:
                (tmp_path / "nightly.py").write_text(code, "utf-8")
            exec(compile(code, title(TUTORIAL), "exec"), names)


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


def test_a_page_that_asks_another_host_for_something_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "good.html").write_text('<a href="https://host/"><script src="own.js"></script><img src="own.svg">')
    (tmp_path / "bad.html").write_text('<script src="https://host/a.js"></script><link rel="stylesheet" href="//host">')
    (tmp_path / "bad.css").write_text("@import url(https://host/font.css);")

    found = list(book.requests(tmp_path))

    assert sorted(line.partition(":")[0] for line in found) == ["bad.css", "bad.html", "bad.html"]


def test_an_operators_queries_run(dsn: str) -> None:
    page = (ROOT / "docs" / "schema.md").read_text("utf-8")
    queries = re.findall(r"^```sql\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)

    with PGLease(dsn) as leases, psycopg.connect(dsn) as connection:
        leases.wait_for_lease("daily-report")
        found = [connection.execute(query).fetchall() for query in queries]

    assert len(queries) == 8
    assert [row[0] for row in found[0]] == ["daily-report"]


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
