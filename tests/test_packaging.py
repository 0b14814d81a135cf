"""What people install: the wheel, from the outside."""

import ast
import email
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import pglease

# One wheel and one environment for all of these.
pytestmark = [pytest.mark.xdist_group("packaging"), pytest.mark.timeout(300)]

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DRIVERS = [
    *("psycopg", "psycopg2", "psycopg_pool", "redis", "valkey", "lightkube", "kubernetes", "sqlite3"),
    *("django", "sqlalchemy", "alembic", "celery", "apscheduler", "fastapi", "flask", "starlette"),
    *("click", "rich", "prometheus_client", "opentelemetry", "pytest"),
]
"""What `import pglease` must leave alone: each is imported by those who use it."""
IMPORT_BUDGET = 0.050
"""Seconds that `from pglease import PGLease` may add to the start of an interpreter, where asyncio takes YARDSTICK."""
YARDSTICK = 0.030
ATTEMPTS = 7


def run(*argv, **options):
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{argv}\n{done.stdout}{done.stderr}"
    return done


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the tree: building leaves files beside the sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    options = ["--no-deps", "--no-build-isolation", "-qq", "--wheel-dir", out]
    run(sys.executable, "-m", "pip", "wheel", *options, source)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory, wheel):
    """The interpreter of an environment that holds the wheel, what it depends on, and nothing else."""
    home = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", home)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-qq", wheel)
    return python


def in_package(suffix):
    return {str(path.relative_to(ROOT)) for path in (ROOT / "pglease").rglob(f"*{suffix}")}


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())

    assert {name.split("/")[0] for name in names} == {"pglease", "pglease-0.1.0.dist-info"}
    assert in_package(".py") <= names


def test_the_wheel_holds_the_type_marker_and_every_file_that_is_no_module(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())

    assert "pglease/py.typed" in names
    for suffix in (".sql", ".html", ".css", ".js", ".svg"):
        assert in_package(suffix)
        assert in_package(suffix) <= names


def test_the_metadata_says_what_people_need_to_know(wheel):
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read("pglease-0.1.0.dist-info/METADATA"))
        entry_points = archive.read("pglease-0.1.0.dist-info/entry_points.txt").decode()

    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    base = {word.split(">")[0] for word in metadata.get_all("Requires-Dist") if "extra ==" not in word}
    assert base == {"psycopg[binary]", "psycopg-pool", "tenacity", "click", "durationpy"}
    command, plugin = ["pglease", "=", "pglease.cli:main"], ["pglease", "=", "pglease.testing.plugin"]
    assert entry_points.split() == ["[console_scripts]", *command, "[pytest11]", *plugin]


def test_the_extra_dev_is_the_dependency_group_dev():
    assert PROJECT["project"]["optional-dependencies"]["dev"] == PROJECT["dependency-groups"]["dev"]


def test_the_extra_all_names_every_extra_but_dev():
    extras = PROJECT["project"]["optional-dependencies"]

    named = {extra for line in extras["all"] for extra in line.removeprefix("pglease[").removesuffix("]").split(",")}

    assert named == extras.keys() - {"all", "dev"}


def test_the_version_is_said_once(elsewhere):
    code = "import importlib.metadata as m, pglease; print(pglease.__version__, m.version('pglease'))"

    assert run(elsewhere, "-I", "-c", code).stdout.split() == [PROJECT["project"]["version"]] * 2


def test_the_command_runs(elsewhere):
    said = run(elsewhere.parent / "pglease", "--version").stdout

    assert PROJECT["project"]["version"] in said


def test_the_sql_files_can_be_read_where_they_are_installed(elsewhere):
    code = (
        "import pglease, pathlib;"
        "root = pathlib.Path(pglease.__file__).parent;"
        "print(sorted(str(path.relative_to(root.parent)) for path in root.rglob('*.sql')))"
    )

    assert run(elsewhere, "-I", "-c", code).stdout.strip() == str(sorted(in_package(".sql")))


def test_importing_pglease_imports_no_driver_and_no_framework(elsewhere):
    use = "import sys, pglease; pglease.PGLease, pglease.acquire"
    code = f"{use}; print(*[name for name in {DRIVERS} if name in sys.modules])"

    assert run(elsewhere, "-I", "-c", code).stdout.split() == []


def test_importing_the_testing_package_imports_nothing(elsewhere):
    code = (
        "import sys, pglease; before = set(sys.modules); import pglease.testing;"
        "print(*(set(sys.modules) - before - {'pglease.testing'}))"
    )

    assert run(elsewhere, "-I", "-c", code).stdout.split() == []


def test_importing_pglease_alone_imports_nothing_else_of_it(elsewhere):
    code = "import sys, pglease; print(*[name for name in sys.modules if name.startswith('pglease.')])"

    assert run(elsewhere, "-I", "-c", code).stdout.split() == []


def test_what_a_type_checker_reads_is_what_is_loaded_and_what_is_public():
    """The package names everything three times: for type checkers, for loading on first use, and as public."""
    tree = ast.parse((ROOT / "pglease" / "__init__.py").read_text())
    typed = {
        (node.module, alias.name)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert typed == {(module, name) for module, names in pglease._HOMES.items() for name in names}
    assert sorted(name for _, name in typed) == sorted(pglease.__all__)


def test_every_public_name_is_there_when_it_is_asked_for():
    assert all(getattr(pglease, name) is getattr(pglease, name) for name in pglease.__all__)
    assert set(pglease.__all__) <= set(dir(pglease))


def test_a_module_with_public_names_is_there_when_it_is_asked_for(elsewhere):
    code = "import pglease; print(pglease.errors.FencedError is pglease.FencedError, hasattr(pglease, 'elephants'))"

    assert run(elsewhere, "-I", "-c", code).stdout.split() == ["True", "False"]


def test_importing_the_client_is_quick(elsewhere):
    """The best of several, beside a yardstick: what is measured is our import, not how slow or busy the machine is."""
    code = "import time; start = time.process_time(); {}; print(time.process_time() - start)"
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}

    def took(statement: str) -> float:
        return float(run(elsewhere, "-I", "-c", code.format(statement), env=environment).stdout)

    ours, yardstick = [], []
    for _ in range(ATTEMPTS):
        ours.append(took("from pglease import PGLease"))
        yardstick.append(took("import asyncio"))
        if min(ours) < IMPORT_BUDGET * max(1.0, min(yardstick) / YARDSTICK):
            return
    raise AssertionError((ours, yardstick))
