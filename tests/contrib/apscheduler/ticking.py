"""A web application that counts ticks, and its gunicorn settings: a scheduler in each worker, preloaded and forked."""

from __future__ import annotations

import contextlib
import os
from datetime import UTC, datetime, timedelta

import psycopg
from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.jobstores.base import ConflictingIdError
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.background import BackgroundScheduler

from pglease import PGLease
from pglease.contrib.apscheduler import election_for

URL = os.environ["DATABASE_URL"]
TICK = 0.5
LENGTH = timedelta(seconds=TICK * (int(os.environ["TICKS"]) - 0.5))

leases = PGLease(os.environ["PGLEASE_URL"])
leases.get_lease("scheduler")  # the parent has connections that its children must not use

workers = int(os.environ["WORKERS"])
wsgi_app = "tests.contrib.apscheduler.ticking:app"
preload_app = True
control_socket_disable = True


def tick():
    """What is done twice a second."""


def note(event):
    """Write down which tick was run, and by whom."""
    with psycopg.connect(URL) as database:
        database.execute("INSERT INTO runs VALUES (%s, %s)", [event.scheduled_run_time, os.getpid()])


def app(environ, start_response):
    start_response("200 OK", [])
    return [b""]


def post_worker_init(worker):
    store = SQLAlchemyJobStore(URL.replace("postgresql://", "postgresql+psycopg://", 1))
    defaults = {"misfire_grace_time": None, "coalesce": False, "max_instances": 100}
    scheduler = BackgroundScheduler(jobstores={"default": store}, job_defaults=defaults, timezone=UTC)
    scheduler.add_listener(note, EVENT_JOB_EXECUTED)
    with leases.acquire("scheduler:start", wait=60, raise_on_failure=True):  # the store makes its table
        scheduler.start(paused=True)
        start = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=3)
        times = {"start_date": start, "end_date": start + LENGTH, "next_run_time": start}
        with contextlib.suppress(ConflictingIdError):
            scheduler.add_job("tests.contrib.apscheduler.ticking:tick", "interval", seconds=TICK, id="tick", **times)
    worker.election = election_for(scheduler, leases=leases, ttl=float(os.environ["TTL"]), catch_up=True).start()


def worker_exit(server, worker):
    worker.election.stop(10)
