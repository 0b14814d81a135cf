"""The lease table as Django sees it: to look at. It is written by pglease alone."""

from __future__ import annotations

from typing import Any, NoReturn

from django.db import models
from django.db.models import Case, Value, When
from django.db.models.functions import Now

from pglease.contrib.django.conf import conf

HELD, EXPIRED, RELEASED = "held", "expired", "released"


def refuse(*_: Any, **__: Any) -> NoReturn:
    """Refuse to write: also what a fixture holds, whose leases are of another time or place."""
    raise TypeError(
        "leases are written by pglease alone: use acquire, release, force_release, cleanup_expired; and leave them out "
        "of fixtures (dumpdata --exclude pglease)"
    )


class LeaseQuerySet(models.QuerySet):
    """Rows of the lease table. None can be written: a row that is deleted takes its fencing token along."""

    def with_state(self) -> LeaseQuerySet:
        """Add `state`, by the database's clock: `held`, `expired` or `released`."""
        state = Case(
            When(expires_at__gt=Now(), then=Value(HELD)),
            When(lease_id__isnull=True, then=Value(RELEASED)),
            default=Value(EXPIRED),
        )
        rows: LeaseQuerySet = self.annotate(state=state)
        return rows

    delete = update = bulk_create = bulk_update = refuse


class LeaseManager(models.Manager.from_queryset(LeaseQuerySet)):  # type: ignore[misc]
    """Reads where the leases are, whatever the routers say."""

    def get_queryset(self) -> LeaseQuerySet:
        """Return all rows."""
        rows: LeaseQuerySet = super().get_queryset()
        return rows if self._db else rows.using(conf().database)


class Lease(models.Model):
    """The last hold of one name. `pglease.get_lease(name)` tells the same, on any store."""

    task_name = models.TextField("name", primary_key=True)
    owner_id = models.TextField("holder")
    fencing_token = models.BigIntegerField()
    acquired_at = models.DateTimeField()
    heartbeat_at = models.DateTimeField("renewed at")
    expires_at = models.DateTimeField()
    transitions = models.BigIntegerField()
    metadata = models.JSONField(null=True)
    lease_id = models.UUIDField("hold", null=True)

    objects = LeaseManager()

    class Meta:
        """The table is made by a migration of SQL, and by the first use."""

        managed = False
        db_table = conf().db_table
        default_permissions = ("view", "delete")

    def __str__(self) -> str:
        return str(self.task_name)

    save = delete = refuse
