"""A Django in this process, and projects of their own in others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pglease import PGLease
from tests.support import django_site

ROOT = Path(__file__).parents[3]
STEERING = {"DATABASE_URL", "PGLEASE_URL", "PYTHONDONTWRITEBYTECODE"}

SETTINGS = """
import json, os

SECRET_KEY = "of no use"
INSTALLED_APPS = ["pglease.contrib.django", "shop"]
DATABASES = {"default": json.loads(os.environ["DATABASE"])}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
PGLEASE = json.loads(os.environ.get("PGLEASE", "{}"))
"""
MANAGE = """
import os, sys
from django.core.management import execute_from_command_line

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "settings")
execute_from_command_line(sys.argv)
"""
FIRST = """
from django.db import migrations, models

class Migration(migrations.Migration):
    initial = True
    operations = [
        migrations.RunSQL("SELECT pg_sleep(0.5)"),
        migrations.CreateModel(name="Item", fields=[
            ("id", models.BigAutoField(primary_key=True, serialize=False)), ("body", models.TextField())
        ]),
    ]
"""
MODELS = """
from django.db import models

class Item(models.Model):
    id = models.BigAutoField(primary_key=True)
    body = models.TextField()
"""


class Project:
    """A project on disk with one app, `shop`, and processes of it."""

    def __init__(self, directory: Path, dsn: str) -> None:
        self.directory = directory
        self.write("manage.py", MANAGE)
        self.write("settings.py", SETTINGS)
        self.write("shop/__init__.py", "")
        self.write("shop/models.py", MODELS)
        self.write("shop/migrations/__init__.py", "")
        self.write("shop/migrations/0001_initial.py", FIRST)
        self.environment = {
            **{name: value for name, value in os.environ.items() if name not in STEERING},
            "DATABASE": django_site.as_json(dsn),
            "PYTHONPATH": str(ROOT),
            # Django is compiled once and not by each process; not beside the sources.
            "PYTHONPYCACHEPREFIX": os.environ.get("PYTHONPYCACHEPREFIX", str(ROOT / ".venv" / ".cache" / "pycache")),
            "PYTHONWARNINGS": "error",
        }
        self.running: list[subprocess.Popen[str]] = []

    def write(self, name: str, text: str) -> None:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """Start `manage.py` with these words."""
        return self.python("manage.py", *words, **environment)

    def python(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=self.directory,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.running.append(process)
        return process

    def manage(self, *words: str, code: int = 0, **environment: str) -> str:
        """Run `manage.py` to its end; return all that it says."""
        return ended(self.start(*words, **environment), code)

    def close(self) -> None:
        for process in self.running:
            process.kill()
            process.communicate()


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    """Wait for the end of a process, which must have this exit code; return what it said."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, (process.args, process.returncode, out, err)
    assert "Traceback" not in err, err
    return out + err


@pytest.fixture
def project(tmp_path: Path, dsn: str) -> Iterator[Project]:
    made = Project(tmp_path, dsn)
    yield made
    made.close()


@pytest.fixture
def default_database(dsn: str) -> Iterator[str]:
    """The test's database as Django's `default`."""
    with django_site.default_database(dsn):
        yield dsn


@pytest.fixture
def leases(dsn: str) -> Iterator[PGLease]:
    """A client that knows nothing of Django."""
    with PGLease(dsn, owner_id="somebody-else") as client:
        yield client


@pytest.fixture
def configured() -> Callable[..., object]:
    """Django's own way to change a setting for a while."""
    django_site.set_up()
    from django.test import override_settings

    @contextmanager
    def so(**setting: object) -> Iterator[None]:
        with override_settings(PGLEASE=setting):
            yield

    return so
