"""`manage.py pglease …`: the command line on the store of the settings, with its exit codes."""

from __future__ import annotations

from io import StringIO

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from pglease import PGLease
from tests.contrib.django.conftest import Project, ended

pytestmark = pytest.mark.matrix


def said(*words: str) -> str:
    out = StringIO()
    call_command("pglease", *words, stdout=out, stderr=out)
    return out.getvalue()


def code_of(*words: str) -> int:
    with pytest.raises(CommandError) as ended:
        call_command("pglease", *words, stdout=StringIO(), stderr=StringIO())
    return ended.value.returncode


def test_it_looks_at_the_store_of_the_settings(default_database, leases: PGLease) -> None:
    assert leases.try_acquire("job")

    lines = said("list").splitlines()

    assert [line.split()[:3] for line in lines] == [["NAME", "STATE", "HOLDER"], ["job", "held", "somebody-else"]]
    assert '"fencing_token": 1' in said("show", "job", "--json")
    assert "server version: PostgreSQL" in said("doctor")
    assert said("release", "job", "--token", "1") == "'job' was taken from its holder (token 1)\n"


def test_it_ends_with_the_code_of_the_command_line(default_database, leases: PGLease) -> None:
    assert leases.try_acquire("job")

    assert code_of("check", "free") == 1
    assert code_of("wait", "job", "--timeout", "0") == 75
    assert code_of("release", "job", "--token", "7") == 1
    assert code_of("list", "--no-such-option") == 2


def test_the_environment_does_not_decide_and_an_option_does(default_database, monkeypatch, leases: PGLease) -> None:
    monkeypatch.setenv("PGLEASE_URL", "memory://elsewhere")
    assert leases.try_acquire("job")

    assert "job" in said("list")
    assert said("list", "-q", "--dsn", "memory://another") == ""


def test_a_command_that_chooses_its_own_patience_leaves_the_store_of_the_settings_as_it_is(default_database) -> None:
    from click import Context

    from pglease.cli.app import app
    from pglease.cli.options import Host, open_client
    from pglease.contrib.django.conf import conf

    with Context(app, obj=Host("manage.py pglease", conf().open_store, list)) as ctx:
        assert open_client(ctx, connect_timeout=5, owner_id="exporter").try_acquire("job")


def test_a_missing_table_is_made_for_it(default_database, configured) -> None:
    with configured(OPTIONS={"auto_initialize": False}):
        assert said("list", "-q") == ""

    assert "nothing was done" in said("schema", "apply")


def test_a_management_command_or_any_other_runs_under_a_lease(project: Project, dsn: str, leases: PGLease) -> None:
    """One that is none of Django's is run as it is."""
    report = """
import os
from django.core.management.base import BaseCommand

class Command(BaseCommand):
    def add_arguments(self, parser):
        parser.add_argument("--tenant")

    def handle(self, **options):
        self.stdout.write(f"{options['tenant']} {os.environ['PGLEASE_NAME']} {os.environ['PGLEASE_FENCING_TOKEN']}")
        raise SystemExit(3)
"""
    for folder in ("shop/management", "shop/management/commands"):
        project.write(f"{folder}/__init__.py", "")
    project.write("shop/management/commands/report.py", report)
    project.write("other.py", "from settings import *")

    run = project.start("pglease", "--settings", "other", "run", "job", "--ttl", "30s", "--", "report", "--tenant", "a")
    own = project.start("pglease", "run", "another", "--", "sh", "-c", "exit 4")
    assert ended(run, code=3) == "a job 1\n"
    assert ended(own, code=4) == ""

    assert leases.try_acquire("job")
    refused = project.manage("pglease", "run", "job", "--", "report", code=75)
    assert "'job' is held by somebody-else" in refused


@pytest.mark.parametrize("words", [["--help"], ["--pythonpath", ".", "--help"], ["list", "--settings=site", "--help"]])
def test_asked_for_help_it_tells_what_there_is(default_database, capsys, words: list[str]) -> None:
    """Options that Django has read already are not for us."""
    from pglease.contrib.django.management.commands.pglease import Command

    with pytest.raises(SystemExit) as ended:
        Command().run_from_argv(["manage.py", "pglease", *words])

    assert ended.value.code == 0
    assert "Usage: manage.py pglease" in capsys.readouterr().out


def test_settings_that_make_no_sense_are_a_failure_of_its_own(default_database, configured) -> None:
    with configured(DATABASE="nowhere"):
        assert code_of("list") == 125
