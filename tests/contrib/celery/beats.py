"""A scheduler whose lease a test can wait for."""

from __future__ import annotations

from pglease.contrib.celery import LeasedScheduler


class Leased(LeasedScheduler):
    lease_ttl = "6s"
