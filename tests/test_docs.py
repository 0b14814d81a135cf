"""Every page of docs/ says what is true: its Python blocks run, in their order, in one namespace, on a new database."""

from __future__ import annotations

import atexit
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine

from pglease import PGLease, default
from pglease.testing.api_server import ApiServer
from tests.support import django_site

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
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


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=title)
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
