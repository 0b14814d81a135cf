"""The suite's own guards: a leaked password fails its test, and a test that cannot run here is told by name."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from pglease.testing.local_postgres import find_bindir
from tests.support import rewritten, scratch

ROOT = Path(__file__).parent.parent
WORD = "a-word-nobody-says"

CONFTEST = f"""
def pytest_configure(config):
    from tests.support import canary
    canary.start(config, "{WORD}")
"""


@pytest.fixture
def run_inner(tmp_path):
    """A function that runs pytest on a module, with our plugins, and returns its exit code and output."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = needs(*things)\n")

    def run(source, *options, **environment):
        (tmp_path / "test_inner.py").write_text(source)
        plugins = ["-p", "tests.support.needs", "-p", "tests.support.canary", "-p", "no:cacheprovider"]
        plugins += ["-p", "xdist.plugin"] if "-n" in options else []
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PGLEASE_"))}
        inherited["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # what is installed takes longer to load than ours
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *plugins, *options, str(tmp_path)],
            env=inherited | {"PYTHONPATH": str(ROOT)} | environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    return run


LEAKS = [
    "print(WORD)",
    "sys.stderr.write(WORD)",
    "os.write(1, WORD.encode())",
    "logging.getLogger('pglease.any').debug('all is well', extra={'lease_name': WORD})",
    "logging.getLogger('pglease.any').debug('%s', WORD)",
    "subprocess.run([sys.executable, '-c', 'import sys; print(sys.argv[1])', WORD], stdout=subprocess.PIPE)",
    "with pytest.raises(ValueError): raise ValueError(WORD)",
    "with pytest.raises(ValueError): raise ValueError('all is well') from KeyError(WORD)",
]


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_every_way_to_leak_the_password_fails_its_test(run_inner, options):
    imports = f"import logging, os, subprocess, sys, pytest\nWORD = '{WORD}'\n"
    tests = [f"def test_leak_{number}():\n    {leak}\n" for number, leak in enumerate(LEAKS)]

    code, said = run_inner(imports + "\n".join(tests), *options)

    assert code == 1
    assert f"{len(LEAKS)} failed in" in said
    assert "the canary password came out in" in said


def test_a_test_that_only_knows_the_password_passes(run_inner):
    source = f"import logging\ndef test_quiet():\n    dsn = '{WORD}'\n    logging.getLogger('pglease').info('well')\n"

    code, said = run_inner(source)

    assert (code, "1 passed" in said) == (0, True)


NEEDY = """
import pytest
from tests.support import needs
needs.NEEDS["wings"] = needs.Need(lambda: False, "ask a bird")
needs.NEEDS["air"] = needs.Need(lambda: True, "open a window")

@pytest.mark.needs("wings", "air")
def test_flight(): pass

@pytest.mark.needs("air")
def test_breath(): pass
"""


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_what_cannot_run_here_is_named_at_the_end_with_the_way_to_get_it(run_inner, options):
    # The controller of a distributed run does not import the module: it knows what is in the table.
    source = NEEDY.replace('"wings"', '"root"') if options else NEEDY
    thing, how = ("root", "run as root") if options else ("wings", "ask a bird")

    code, said = run_inner(source, *options)

    assert code == 0
    assert "1 passed, 1 skipped" in said
    assert f"1 for want of {thing} ({how}):" in said
    assert "test_inner.py::test_flight" in said


def test_where_everything_is_required_it_fails(run_inner):
    code, said = run_inner(NEEDY, PGLEASE_REQUIRE_ALL="1")

    assert code == 1
    assert "1 passed, 1 error" in said
    assert "this machine lacks wings: ask a bird" in said


def test_a_need_that_nobody_described_is_an_error(run_inner):
    code, said = run_inner("import pytest\n@pytest.mark.needs('wnigs')\ndef test_flight(): pass\n")

    assert code != 0
    assert "wnigs" in said


def test_the_database_of_a_test_is_its_own(dsn, database, admin, canary):
    assert canary in dsn
    assert admin.execute("SELECT current_database()").fetchone() == (database,)


def test_libpq_finds_the_server_by_the_database_name_alone(postgresql):
    import psycopg

    with psycopg.connect(f"postgresql://localhost/{postgresql.info.dbname}") as connection:
        assert connection.execute("SELECT current_database()").fetchone() == (postgresql.info.dbname,)


def test_the_servers_log_can_be_read_by_test(server_log, admin):
    import psycopg

    with pytest.raises(psycopg.errors.UndefinedColumn):
        admin.execute("SELECT nonsense")

    assert any("nonsense" in line for line in server_log())


def test_a_server_of_a_tests_own_is_a_copy_with_an_identity_of_its_own(fresh_postgres, server, admin):
    who, roles = "SELECT system_identifier FROM pg_control_system()", "SELECT rolname FROM pg_roles WHERE rolcanlogin"

    copies = [fresh_postgres(user="postgres", password=None) for _ in range(2)]

    assert {str(copy.bindir) for copy in copies} == {server.copying or str(find_bindir())}
    assert len({*admin.execute(who), *copies[0].execute(who), *copies[1].execute(who)}) == 3
    assert copies[0].execute(roles) == copies[1].execute(roles) == [("postgres",)]


@pytest.mark.xdist_group("one worker")
def test_a_group_stays_on_one_worker(request):
    """Else every worker would start what a group shares, and nobody would notice but by the time it takes."""
    if request.config.getoption("loadgroup", False):  # set in workers alone
        assert request.node.nodeid.endswith("@one worker")


def test_what_is_rewritten_ahead_is_what_the_workers_find(pytestconfig, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "cache"))
    (tmp_path / "deep").mkdir()
    modules = [tmp_path / "conftest.py", tmp_path / "test_one.py", tmp_path / "deep" / "test_other.py"]
    for module in modules:
        module.write_text("assert True\n")
    kept = [rewrite.get_cache_dir(module) / f"{module.stem}{rewrite.PYC_TAIL}" for module in modules]

    rewritten.ahead(pytestconfig, tmp_path, processes=2)

    assert all(rewrite._read_pyc(module, found) for module, found in zip(modules, kept, strict=True))
    written = kept[0].stat().st_ino
    modules[1].write_text("assert not False\n")
    os.utime(modules[1], (2_000_000_000, 2_000_000_000))
    rewritten.ahead(pytestconfig, tmp_path)
    assert rewrite._read_pyc(modules[1], kept[1])
    assert kept[0].stat().st_ino == written


@pytest.fixture
def memory(monkeypatch, tmp_path):
    """A directory that would do, while nobody has chosen one."""
    monkeypatch.setenv("TMPDIR", "restored at the end, whatever the test sets")
    monkeypatch.delenv("TMPDIR")
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())
    monkeypatch.setattr(scratch, "ROOM", 0)
    place = tmp_path / "memory"
    place.mkdir()
    place.chmod(0o1777)
    return place


def test_temporary_files_are_held_in_memory_where_there_is_room(memory):
    scratch.use_memory(memory)

    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(memory)


def test_temporary_files_stay_where_somebody_wants_them(memory, monkeypatch):
    monkeypatch.setenv("TMPDIR", "/somewhere")

    scratch.use_memory(memory)

    assert os.environ["TMPDIR"] == "/somewhere"


@pytest.mark.parametrize("lack", ["none", "no entrance for others", "no room"])
def test_a_memory_that_will_not_do_is_left_alone(memory, monkeypatch, lack):
    if lack == "none":
        memory.rmdir()
    elif lack == "no entrance for others":
        memory.chmod(0o700)
    else:
        monkeypatch.setattr(scratch, "ROOM", 1 << 60)

    scratch.use_memory(memory)

    assert "TMPDIR" not in os.environ
