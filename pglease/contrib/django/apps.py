"""What Django is told about this app."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.core.checks import Tags, register
from django.core.signals import setting_changed
from django.db.models.signals import pre_save


class PgleaseConfig(AppConfig):
    """Leases, as an app: a table, an admin page, two commands, checks."""

    name = "pglease.contrib.django"
    label = "pglease"
    verbose_name = "Leases"

    def ready(self) -> None:
        """Register the checks; refuse leases out of fixtures; begin anew when a test changes the settings."""
        from pglease.contrib.django.checks import check_leases
        from pglease.contrib.django.models import Lease, refuse

        register(check_leases, Tags.database)
        pre_save.connect(refuse, sender=Lease, dispatch_uid="pglease")
        setting_changed.connect(_begin_anew, dispatch_uid="pglease")


def _begin_anew(*, setting: str, **_: Any) -> None:
    if setting in {"PGLEASE", "DATABASES"}:
        from pglease.contrib.django import pglease

        pglease.close()
