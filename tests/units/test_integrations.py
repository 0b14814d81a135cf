"""What the integrations do where there is nothing to do, or too much."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pglease.contrib.apscheduler import _come_to_rest
from pglease.contrib.opentelemetry import _Notes
from pglease.events import Event


def test_of_a_hold_that_runs_for_long_a_trace_keeps_a_few_notes() -> None:
    notes = _Notes()
    for _ in range(1000):
        notes.add(Event("renewed", "job"))
    for _ in range(1000):
        notes.add(Event("unknown", "job", error=KeyError()))

    kinds = [kind for kind, _, _ in notes.taken]
    assert kinds.count("renewed") == 10
    assert len(kinds) == 64


def test_a_scheduler_that_does_not_run_is_at_rest() -> None:
    scheduler: Any = SimpleNamespace(
        running=False, pause=lambda: pytest.fail("it does not run"), _jobstores_lock=threading.RLock(), _executors={}
    )

    _come_to_rest(scheduler)


def test_a_connection_of_djangos_that_was_never_made_has_no_statement_to_cancel() -> None:
    from pglease.contrib.django.management.commands import pglease_migrate

    cancelled: list[int] = []
    pglease_migrate._cancel(SimpleNamespace(connection=None))
    pglease_migrate._cancel(SimpleNamespace(connection=SimpleNamespace(cancel=lambda: cancelled.append(1))))

    assert cancelled == [1]


def test_djangos_client_is_closed_by_settings_of_its_own_alone(monkeypatch: Any) -> None:
    from pglease.contrib.django import apps, client

    closed: list[int] = []
    monkeypatch.setattr(client.LazyClient, "close", lambda _: closed.append(1), raising=False)

    apps._begin_anew(setting="LANGUAGE_CODE")
    assert closed == []
    apps._begin_anew(setting="DATABASES")
    assert closed == [1]


def test_what_asks_for_an_objects_inside_makes_no_client_of_djangos() -> None:
    from pglease.contrib.django.client import LazyClient

    lazy = LazyClient()

    assert not hasattr(lazy, "__deepcopy__")
    assert vars(lazy)["_made"] is None
