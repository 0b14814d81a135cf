"""Leases in a Django project, in the database it already has.

    INSTALLED_APPS += ["pglease.contrib.django"]

    from pglease.contrib.django import pglease

    with pglease.acquire("daily-report") as lease:
        if lease:
            generate_report()

`pglease` is the client that the setting `PGLEASE` describes, on connections of its own: it never touches the ORM's, so
a request's transaction neither holds a lease back nor undoes one. `guarded(lease)` is `transaction.atomic()` in which
PostgreSQL itself refuses a holder whose lease is over.
"""

from __future__ import annotations

from typing import cast

from pglease.client import PGLease
from pglease.contrib.django.client import LazyClient
from pglease.contrib.django.conf import connection_parameters
from pglease.contrib.django.transactions import guarded

__all__ = ["connection_parameters", "guarded", "pglease"]

pglease: PGLease = cast("PGLease", LazyClient())
"""The client of the setting `PGLEASE`, made at its first use. See `LazyClient`."""
