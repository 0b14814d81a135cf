"""The README says what is true: its code runs, its tables are the product's own."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pglease import PGLease
from tests.support.readme import CHOOSING, PAGES, README, ROOT, timeline, written
from tests.support.shell import Shell, lines_of

TEXT = README.read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
def world(dsn: str) -> Iterator[dict[str, Any]]:
    """What the README's code finds around it."""
    done: list[Any] = []
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE report (id int PRIMARY KEY, body text)")
        connection.execute("INSERT INTO report VALUES (1, 'none')")
        connection.commit()
        yield {
            "done": done,
            "connection": connection,
            "render": lambda: "fresh",
            "generate_report": lambda **facts: done.append(facts["token"]),
        }


def test_its_line_for_a_shell_runs(dsn: str, tmp_path: Path) -> None:
    (line,) = [line for line in lines_of(TEXT) if line.startswith("pglease ")]

    Shell(tmp_path, dsn).type_in(line)


def test_every_block_of_code_runs(dsn: str, world: dict[str, Any]) -> None:
    for block in BLOCKS:
        exec(block.replace("postgresql://user:pass@localhost/db", dsn), world)

    assert world["done"] == [1]
    assert world["connection"].execute("SELECT body FROM report").fetchone() == ("fresh",)
    leases: PGLease = world["leases"]
    world["import_tenant"](tenant="acme")
    assert leases.get_lease("import:acme") is not None
    leases.close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_its_tables_are_what_the_product_says(page: Path) -> None:
    text = page.read_text("utf-8")

    assert written(text) == text, "run: python -m tests.support.readme"
    assert "<!-- /" in text


def test_the_timeline_is_what_its_page_draws() -> None:
    assert CHOOSING.with_suffix(".svg").read_text("utf-8") == timeline(), "run: python -m tests.support.readme"


def test_its_table_of_extras_has_them_all() -> None:
    section = TEXT.partition("\n## Install\n")[2].partition("\n## ")[0]
    named = {
        extra for row in re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE) for extra in re.findall(r"\w+", row)
    }
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]

    assert named == extras.keys() - {"all", "dev"}


def test_it_is_short_and_shows_code_early() -> None:
    lines = TEXT.splitlines()
    first_code = next(number for number, line in enumerate(lines, 1) if line.startswith("```python"))

    assert len(lines) < 180
    assert first_code < 30


def test_every_local_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", TEXT):
        assert (ROOT / target).exists(), target
