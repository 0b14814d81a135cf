"""What people copy from `migrations/`: equal to what the package says, and each run for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import URL

from pglease.backends import postgres_schema as schema
from pglease.backends.postgres_link import Link
from pglease.backends.render import render_migrations, write
from pglease.schema import table_names

NAMES = table_names()
ROOT = Path(__file__).parents[2]
COPIES = ROOT / "migrations"

PUBLISHED = """
CREATE TABLE pglease_leases (
    task_name VARCHAR(255) PRIMARY KEY,
    owner_id VARCHAR(255) NOT NULL,
    acquired_at TIMESTAMPTZ NOT NULL,
    expires_at TIMESTAMPTZ NOT NULL,
    heartbeat_at TIMESTAMPTZ NOT NULL
);
INSERT INTO pglease_leases VALUES ('a', 'o', now() - interval '2 h', now() - interval '1 h', now() - interval '2 h');
"""


@contextmanager
def linked(dsn: str) -> Iterator[Link]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield Link(connection)


def run(directory: Path, *command: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def is_in_order(dsn: str) -> bool:
    with linked(dsn) as link:
        return schema.diff(link, NAMES) == [] and schema.ensure(link, NAMES, create=False).schema == "public"


def is_gone(dsn: str) -> bool:
    with linked(dsn) as link:
        return link.rows("SELECT 1 FROM pg_catalog.pg_class WHERE relname LIKE 'pglease%%'", {}) == []


def test_the_copies_are_what_the_package_says() -> None:
    copies = {
        str(path.relative_to(COPIES)): path.read_text(encoding="utf-8")
        for path in COPIES.rglob("*")
        if path.is_file() and path.suffix in {".py", ".sql"}
    }

    assert copies == render_migrations(), "run `python -m pglease.backends.render`"


def test_they_are_written_where_asked(tmp_path: Path) -> None:
    write(tmp_path)

    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")} == set(render_migrations())


def test_the_sql_makes_the_tables_and_takes_them_away(dsn: str) -> None:
    forward, backward = (COPIES / "sql" / name for name in ("0001_pglease.sql", "0001_pglease.down.sql"))
    with linked(dsn) as link:
        link.script(forward.read_text(encoding="utf-8"))
        link.script(forward.read_text(encoding="utf-8"))

        assert is_in_order(dsn)

        link.script(backward.read_text(encoding="utf-8"))
        assert is_gone(dsn)


# Django

SETTINGS = """
import json, os

DATABASES = {"default": json.loads(os.environ["DATABASE"])}
INSTALLED_APPS = ["shop"]
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""


@contextmanager
def django_project(tmp_path: Path, dsn: str) -> Iterator[dict[str, str]]:
    """A Django project with one app, whose only migration is the copy."""
    migrations = tmp_path / "shop" / "migrations"
    migrations.mkdir(parents=True)
    (tmp_path / "settings.py").write_text(SETTINGS)
    for package in (tmp_path / "shop", migrations):
        (package / "__init__.py").touch()
    copy = (COPIES / "django" / "0001_pglease.py").read_text(encoding="utf-8")
    (migrations / "0001_pglease.py").write_text(copy, encoding="utf-8")
    yield {
        "DJANGO_SETTINGS_MODULE": "settings",
        "PYTHONPATH": f"{tmp_path}",
        "DATABASE": json.dumps(django_database(dsn)),
    }


def django_database(dsn: str) -> dict[str, object]:
    parts = conninfo_to_dict(dsn)
    known = {"HOST": "host", "PORT": "port", "USER": "user", "PASSWORD": "password", "NAME": "dbname"}
    return {
        "ENGINE": "django.db.backends.postgresql",
        **{setting: str(parts[part]) for setting, part in known.items() if part in parts},
    }


def test_the_django_migration_goes_forth_and_back(dsn: str, tmp_path: Path) -> None:
    with django_project(tmp_path, dsn) as project:
        run(tmp_path, "-m", "django", "migrate", "shop", **project)
        assert is_in_order(dsn)

        run(tmp_path, "-m", "django", "migrate", "shop", "zero", **project)
        with linked(dsn) as link:
            assert link.rows("SELECT pg_catalog.to_regclass('pglease_leases')::text") == [(None,)]

        run(tmp_path, "-m", "django", "migrate", "shop", **project)
        assert is_in_order(dsn)


def test_the_django_migration_leaves_nothing_for_makemigrations(dsn: str, tmp_path: Path) -> None:
    with django_project(tmp_path, dsn) as project:
        run(tmp_path, "-m", "django", "migrate", "shop", **project)

        run(tmp_path, "-m", "django", "makemigrations", "--check", "--dry-run", **project)
        assert "DO $pglease$" in run(tmp_path, "-m", "django", "sqlmigrate", "shop", "0001", **project)


def test_the_django_migration_upgrades_the_table_that_an_earlier_one_made(dsn: str, tmp_path: Path) -> None:
    with linked(dsn) as link, django_project(tmp_path, dsn) as project:
        link.script(PUBLISHED)

        run(tmp_path, "-m", "django", "migrate", "shop", **project)

        assert link.rows("SELECT task_name, fencing_token FROM pglease_leases") == [("a", 1)]
        assert is_in_order(dsn)


# Alembic

ALEMBIC_INI = "[alembic]\nscript_location = here\n"

ENV = """
import os
from alembic import context
from sqlalchemy import create_engine

url = os.environ["DATABASE"]
if context.is_offline_mode():
    context.configure(url=url, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()
else:
    with create_engine(url).connect() as connection:
        context.configure(connection=connection)
        with context.begin_transaction():
            context.run_migrations()
"""


@contextmanager
def alembic_project(tmp_path: Path, dsn: str, driver: str) -> Iterator[dict[str, str]]:
    """An Alembic environment whose only revision is the copy."""
    pytest.importorskip(driver)
    versions = tmp_path / "here" / "versions"
    versions.mkdir(parents=True)
    (tmp_path / "alembic.ini").write_text(ALEMBIC_INI)
    (tmp_path / "here" / "env.py").write_text(ENV)
    copy = (COPIES / "alembic" / "0001_pglease.py").read_text(encoding="utf-8")
    (versions / "0001_pglease.py").write_text(copy, encoding="utf-8")
    parts = conninfo_to_dict(dsn)
    url = URL.create(
        f"postgresql+{driver}",
        username=parts.get("user"),
        password=parts.get("password"),
        database=parts.get("dbname"),
        query={part: str(parts[part]) for part in ("host", "port") if part in parts},
    )
    yield {"DATABASE": url.render_as_string(hide_password=False)}


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_the_alembic_revision_goes_forth_and_back(dsn: str, tmp_path: Path, driver: str) -> None:
    with alembic_project(tmp_path, dsn, driver) as project:
        run(tmp_path, "-m", "alembic", "upgrade", "head", **project)
        assert is_in_order(dsn)

        run(tmp_path, "-m", "alembic", "downgrade", "base", **project)
        assert is_gone(dsn)


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_the_alembic_revision_prints_sql_that_runs(dsn: str, tmp_path: Path, driver: str) -> None:
    with alembic_project(tmp_path, dsn, driver) as project, linked(dsn) as link:
        printed = run(tmp_path, "-m", "alembic", "upgrade", "head", "--sql", **project)

        link.script(printed)

        assert is_in_order(dsn)


def test_the_alembic_revision_upgrades_the_table_that_an_earlier_one_made(dsn: str, tmp_path: Path) -> None:
    with linked(dsn) as link, alembic_project(tmp_path, dsn, "psycopg") as project:
        link.script(PUBLISHED)

        run(tmp_path, "-m", "alembic", "upgrade", "head", **project)

        assert link.rows("SELECT task_name, fencing_token FROM pglease_leases") == [("a", 1)]
        assert is_in_order(dsn)
