"""What the README of 0.0.3 shows for Flask, FastAPI and webhooks, served by the frameworks themselves."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pglease import PGLease
from tests.documented_0_0_x.workers import Worker

FLASK = """
    # app/__init__.py
    from flask import Flask
    from pglease import PGLease
    import os

    app = Flask("app")

    # Initialize coordinator
    pglease = PGLease(
        os.environ.get('DATABASE_URL'),
        owner_id=os.environ.get('DYNO', 'flask-worker'),  # Heroku
    )

    # Use in scheduled tasks (e.g., with Flask-APScheduler)
    @app.route('/tasks/cleanup')
    def cleanup_task():
        with pglease.acquire("cleanup", ttl=300) as acquired:
            if acquired:
                # Do cleanup work
                return {"status": "completed"}
            return {"status": "skipped", "reason": "another worker is running"}
"""
"""Without its per-request `close()`: see docs/flask.md."""

FASTAPI = """
    # app/main.py
    from fastapi import FastAPI
    from pglease import AsyncPGLease  # Use async version
    import os

    app = FastAPI()
    pglease = None

    @app.on_event("startup")
    async def startup():
        global pglease
        pglease = AsyncPGLease(os.environ['DATABASE_URL'])

    @app.on_event("shutdown")
    async def shutdown():
        await pglease.close()

    @app.post("/tasks/sync")
    async def sync_task():
        async with pglease.acquire("data-sync", ttl=600) as acquired:
            if acquired:
                await perform_sync()
                return {"status": "completed"}
            return {"status": "skipped"}
"""

INJECTED = """
from contextlib import contextmanager
import psycopg2.pool

# Shared connection pool, created once at application startup
_pool = psycopg2.pool.ThreadedConnectionPool(2, 10, dsn=DATABASE_URL)

@contextmanager
def get_db_conn():
    conn = _pool.getconn()
    try:
        yield conn
    finally:
        _pool.putconn(conn)

# Single PGLease instance reused across all requests
pglease = PGLease(PostgresBackend.from_connection_factory(get_db_conn))

# ─── FastAPI endpoint ─────────────────────────────────────────────────────────
@app.post("/run-job")
async def run_job():
    with pglease.acquire("my-job", ttl=60) as acquired:
        if acquired:
            do_work()
    return {"ok": True}
"""

WEBHOOK = """
    @app.post("/webhook/payment")
    def payment_webhook(payload: dict):
        webhook_id = payload['id']

        # Prevent duplicate processing if webhook is retried
        with pglease.acquire(f"webhook-{webhook_id}", ttl=300) as acquired:
            if acquired:
                process_payment(payload)
                return {"status": "processed"}
            return {"status": "duplicate", "message": "Already processing"}
"""
"""`payload` has a type, by which FastAPI knows that it is the body."""


@pytest.fixture(autouse=True)
def _in_the_environment(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", dsn)


@contextmanager
def serving(worker: Worker) -> Iterator:
    from fastapi.testclient import TestClient

    with TestClient(worker.names["app"]) as browser:
        yield browser


def test_a_task_of_flasks_runs_on_one_worker(here: Worker, there: Worker) -> None:
    browser = here.run(FLASK).names["app"].test_client()

    assert browser.get("/tasks/cleanup").json == {"status": "completed"}
    assert browser.get("/tasks/cleanup").json == {"status": "completed"}  # and once more: nothing was closed meanwhile
    assert there.pglease.try_acquire("cleanup")
    assert browser.get("/tasks/cleanup").json == {"status": "skipped", "reason": "another worker is running"}


def test_a_task_of_fastapis_runs_on_one_worker(here: Worker, there: Worker) -> None:
    async def perform_sync() -> None:
        here.did.append("perform_sync")

    here.names["perform_sync"] = perform_sync
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # `on_event` is FastAPI's old way; ours is a lifespan
        here.run(FASTAPI)

    with serving(here) as browser:
        assert browser.post("/tasks/sync").json() == {"status": "completed"}
        assert there.pglease.try_acquire("data-sync")
        assert browser.post("/tasks/sync").json() == {"status": "skipped"}
    assert here.did == ["perform_sync"]
    here.names["pglease"] = None  # closed by the application


def test_an_endpoint_on_an_injected_pool_works(here: Worker, there: Worker, dsn: str) -> None:
    pytest.importorskip("psycopg2")
    here.names["DATABASE_URL"] = dsn
    here.can("do_work").run(
        "from fastapi import FastAPI; from pglease import PGLease; "
        "from pglease.backends.postgres import PostgresBackend; app = FastAPI()"
    )

    with serving(here.run(INJECTED)) as browser:
        assert browser.post("/run-job").json() == {"ok": True}
        assert there.pglease.try_acquire("my-job")
        assert browser.post("/run-job").json() == {"ok": True}
    assert here.did == ["do_work"]
    here.pglease.close()
    here.run("_pool.closeall()")


def test_a_webhook_that_is_retried_meanwhile_is_a_duplicate(
    here: Worker, there: Worker, worker: Callable[[], Worker]
) -> None:
    retried = []

    def retry() -> None:
        with serving(there) as browser:
            retried.extend(browser.post("/webhook/payment", json={"id": number}).json() for number in (7, 8))

    for each in (here.start(), there):
        each.run("from fastapi import FastAPI; app = FastAPI()")
    here.can("process_payment", meanwhile=retry).run(WEBHOOK)
    there.can("process_payment").run(WEBHOOK)

    with serving(here) as browser:
        first = browser.post("/webhook/payment", json={"id": 7}).json()

    assert first == {"status": "processed"}
    assert retried == [{"status": "duplicate", "message": "Already processing"}, {"status": "processed"}]
    assert isinstance(here.pglease, PGLease)
