"""The table as a migration: the package's own SQL, and for Django a model that it does not manage."""

from __future__ import annotations

import json
from io import StringIO

import pytest

from pglease.backends.render import render_migrations
from pglease.schema import table_names
from tests.contrib.django.conftest import Project, ended
from tests.support import django_site
from tests.support.worlds import execute

pytestmark = pytest.mark.matrix

TABLES = "SELECT count(*) FROM pg_class WHERE relkind = 'r' AND relname LIKE 'pglease%%'"


def manage(*words, **options) -> str:
    """Run a management command in this process; return what it says."""
    from django.core.management import call_command

    said = StringIO()
    call_command(*words, stdout=said, no_color=True, **options)
    return said.getvalue()


def test_it_goes_forth_and_back_and_leaves_nothing_for_makemigrations(default_database) -> None:
    from pglease.contrib.django import pglease

    manage("migrate", "pglease", verbosity=0)
    assert pglease.backend.schema_diff() == []
    assert execute(default_database, TABLES) == [(4,)]

    assert manage("makemigrations", "--check", "--dry-run") == "No changes detected\n"

    manage("migrate", "pglease", "zero", verbosity=0)
    assert execute(default_database, TABLES) == [(0,)]


def test_sqlmigrate_prints_the_packages_sql(default_database) -> None:
    printed = manage("sqlmigrate", "pglease", "0001")

    script = render_migrations(table_names())["sql/0001_pglease.sql"]
    assert script.strip().splitlines()[-1] in printed
    assert "CREATE TABLE" in printed
    assert "DO $pglease$" in printed


def test_a_table_that_is_there_already_is_kept(default_database) -> None:
    from pglease.contrib.django import pglease

    with pglease.acquire("job") as lease:
        manage("migrate", "pglease", verbosity=0)

        assert lease.held
        assert pglease.get_lease("job").fencing_token == lease.fencing_token


def test_it_makes_no_table_on_another_kind_of_database(default_database) -> None:
    from django.db import connections

    with django_site.lite() as lite:
        manage("migrate", "pglease", database=lite, verbosity=0)
        assert connections[lite].introspection.table_names() == ["django_migrations"]
        manage("migrate", "pglease", "zero", database=lite, verbosity=0)


ELSEWHERE = """
import django
from django.conf import settings
from pglease.contrib.django import pglease

print(pglease, settings.configured)
django.setup()
from django.core.management import call_command
from pglease.contrib.django.models import Lease

call_command("migrate", "pglease", verbosity=0)
call_command("makemigrations", check=True, dry_run=True)
with pglease.acquire("job") as lease:
    print(Lease.objects.with_state().get(task_name="job").state)
print(Lease.objects.with_state().get(pk="job").state)
pglease.close()
"""


def test_the_table_may_have_another_name_in_another_schema(project: Project, dsn: str) -> None:
    wanted = json.dumps({"OPTIONS": {"schema": "coordination", "table_name": "held", "auto_initialize": False}})

    said = ended(project.python("-c", ELSEWHERE, PGLEASE=wanted, DJANGO_SETTINGS_MODULE="settings"))

    assert said == "<pglease, not used yet> False\nNo changes detected\nheld\nreleased\n"
    assert execute(dsn, "SELECT task_name FROM coordination.held") == [("job",)]


def test_it_is_written_into_a_squashed_migration_without_the_sql() -> None:
    django_site.set_up()
    from django.db.migrations.writer import OperationWriter

    from pglease.contrib.django.operations import LeaseTable

    lines, imports = OperationWriter(LeaseTable([])).serialize()

    assert "pglease.contrib.django.operations.LeaseTable(" in lines
    assert imports == {"import pglease.contrib.django.operations"}


def test_the_model_cannot_be_written(default_database) -> None:
    from django.core import serializers

    from pglease.contrib.django import pglease
    from pglease.contrib.django.models import Lease

    with pglease.acquire("job"):
        row = Lease.objects.get(pk="job")
        (dumped,) = serializers.deserialize("json", serializers.serialize("json", [row]))
        assert str(row) == "job"
        everything = Lease.objects.all()
        for write in (row.save, row.delete, everything.delete, lambda: everything.update(owner_id="me"), dumped.save):
            with pytest.raises(TypeError, match="written by pglease alone"):
                write()
