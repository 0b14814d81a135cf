"""What earlier documentation told people to write in a Django project, as they wrote it."""

from __future__ import annotations

import pytest

from pglease import PGLease
from tests.contrib.django.conftest import FIRST, Project, ended
from tests.support.worlds import execute

MIGRATION = '''
# shop/migrations/0002_create_pglease_table.py
from django.db import migrations

class Migration(migrations.Migration):
    dependencies = [
        ('shop', '0001_initial'),
    ]

    operations = [
        migrations.RunSQL(
            sql="""
                CREATE TABLE IF NOT EXISTS pglease_leases (
                    task_name VARCHAR(255) PRIMARY KEY,
                    owner_id VARCHAR(255) NOT NULL,
                    acquired_at TIMESTAMPTZ NOT NULL,
                    expires_at TIMESTAMPTZ NOT NULL,
                    heartbeat_at TIMESTAMPTZ NOT NULL
                );
            """,
            reverse_sql="DROP TABLE IF EXISTS pglease_leases;"
        ),
    ]
'''
COORDINATION = """
# shop/coordination.py
import os
from pglease import PGLease
from django.conf import settings

# Create a singleton instance
_pglease = None

def get_coordinator():
    global _pglease
    if _pglease is None:
        db_url = settings.DATABASES['default']
        connection_string = (
            f"postgresql://{db_url['USER']}:{db_url['PASSWORD']}"
            f"@{db_url['HOST']}:{db_url['PORT']}/{db_url['NAME']}"
        )
        _pglease = PGLease(
            connection_string,
            owner_id=os.environ.get('HOSTNAME', 'django-worker'),
        )
    return _pglease
"""
COMMAND = """
from shop.coordination import get_coordinator

# Use in your management commands
from django.core.management.base import BaseCommand

class Command(BaseCommand):
    def handle(self, *args, **options):
        coordinator = get_coordinator()

        with coordinator.acquire("daily-report", ttl=300) as acquired:
            if acquired:
                self.generate_report()
            else:
                self.stdout.write("Another worker is generating the report")

    def generate_report(self):
        self.stdout.write("generated")
"""


@pytest.fixture
def seeded(project: Project) -> Project:
    """A project as the documentation of 0.0.x has it, beside our app."""
    project.write("shop/migrations/0001_initial.py", FIRST.replace("0.5", "0"))
    project.write("shop/migrations/0002_create_pglease_table.py", MIGRATION)
    project.write("shop/coordination.py", COORDINATION)
    project.write("shop/management/__init__.py", "")
    project.write("shop/management/commands/__init__.py", "")
    project.write("shop/management/commands/daily_report.py", COMMAND)
    return project


EVERYTHING = """
import django
django.setup()
from django.core.management import call_command
from pglease.contrib.django import pglease
from shop.coordination import get_coordinator

call_command("migrate", no_color=True)
call_command("daily_report")
with pglease.acquire("daily-report"):
    call_command("daily_report")
get_coordinator().close()
pglease.close()
"""


def test_the_migration_the_coordinator_and_the_command_work_together_and_with_our_app(
    seeded: Project, dsn: str
) -> None:
    said = ended(seeded.python("-c", EVERYTHING, DJANGO_SETTINGS_MODULE="settings"))

    assert "Applying shop.0002_create_pglease_table... OK" in said
    assert said.endswith("generated\nAnother worker is generating the report\n")
    assert execute(dsn, "SELECT name FROM django_migrations WHERE app = 'pglease'") == [("0001_initial",)]
    with PGLease(dsn, auto_initialize=False) as other:
        assert other.get_lease("daily-report") is not None
