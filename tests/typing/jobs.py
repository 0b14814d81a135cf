"""Read by mypy only: what the adapters for Celery and APScheduler promise."""

from __future__ import annotations

from typing import assert_type

from apscheduler.schedulers.background import BackgroundScheduler

from pglease import LeaderElection
from pglease.contrib.apscheduler import election_for
from pglease.contrib.celery import leased


@leased("import:{tenant}", ttl="5m", on_conflict="retry")
def import_tenant(tenant: str, *, fast: bool = False) -> int:
    return len(tenant) + fast


def check() -> None:
    assert_type(import_tenant("acme", fast=True), int)
    import_tenant(7)  # type: ignore[arg-type]
    leased("import", on_conflict="wait")  # type: ignore[arg-type]
    assert_type(election_for(BackgroundScheduler(), catch_up=True), LeaderElection)
