"""`manage.py report`: started on every host at the same minute, written by one."""

import time

from django.core.management.base import BaseCommand

from pglease.contrib.django import guarded, pglease
from reports.models import Report


class Command(BaseCommand):
    """Writes the report, unless somebody else is at it."""

    def add_arguments(self, parser):
        parser.add_argument("--takes", type=float, default=1.0, help="seconds")

    def handle(self, *, takes, **_):
        with pglease.acquire("report", min_hold="5s") as lease:  # whoever comes a moment later finds it held
            if not lease:
                self.stdout.write(f"skipped: {lease.held_by} is at it")
                return
            time.sleep(takes)  # the work
            with guarded(lease):  # refused by PostgreSQL, should the lease be somebody else's by now
                facts = {"body": "all is well", "written_under": lease.fencing_token}
                Report.objects.update_or_create(name="daily", defaults=facts)
            self.stdout.write(f"written under fencing token {lease.fencing_token}")
