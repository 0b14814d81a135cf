"""A web application with a scheduler in each of its workers, whose jobs run in one of them. Its own gunicorn settings.

    DATABASE_URL=postgresql://me@db/app gunicorn --config examples/apscheduler_gunicorn.py

When the worker that runs the jobs dies, another goes on within the ttl, and runs what came due meanwhile: the jobs are
in the database, which knows what was run. `pglease show scheduler` says which worker it is.
"""

import contextlib
import os
import sys
from pathlib import Path

from apscheduler.jobstores.base import ConflictingIdError
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.background import BackgroundScheduler

from pglease import PGLease
from pglease.contrib.apscheduler import election_for

URL = os.environ["DATABASE_URL"]
leases = PGLease(URL)  # connects at its first use, and forgets its parent's connections in a forked worker


def report() -> None:
    """Do the job: here it only says that it has run."""
    print(f"a report by worker {os.getpid()}", flush=True)


def app(environ, start_response):  # noqa: ANN001, ANN201, ARG001  # WSGI
    """Answer every request."""
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"it works\n"]


class Jobs:
    """The scheduler of one worker."""

    def __init__(self) -> None:
        store = SQLAlchemyJobStore(URL.replace("postgresql://", "postgresql+psycopg://", 1))
        defaults = {"misfire_grace_time": 3600, "coalesce": False, "max_instances": 10}
        self.scheduler = BackgroundScheduler(jobstores={"default": store}, job_defaults=defaults)
        self.election = election_for(self.scheduler, leases=leases, ttl=os.environ.get("TTL", "15s"), catch_up=True)

    def start(self) -> None:
        """Stand for the election; called in each worker, after the fork."""
        # One after the other: the job store makes its table, and of several that do that at once all but one fail.
        with leases.acquire("scheduler:start", ttl="10s", wait="1m", raise_on_failure=True):
            self.scheduler.start(paused=True)
            with contextlib.suppress(ConflictingIdError):  # a worker before us has added it
                self.scheduler.add_job("apscheduler_gunicorn:report", "interval", seconds=1, id="report")
        self.election.start()

    def stop(self) -> None:
        """Let running jobs end, then another worker lead."""
        self.election.stop()
        self.scheduler.shutdown()


# What follows are gunicorn's settings.

wsgi_app = "apscheduler_gunicorn:app"
pythonpath = str(Path(__file__).parent)
control_socket_disable = True
workers = int(os.environ.get("WEB_CONCURRENCY", "4"))
running: list[Jobs] = []


def post_worker_init(worker) -> None:  # noqa: ANN001, ARG001  # gunicorn's signature
    """Begin, once the worker is there."""
    running.append(Jobs())
    running[-1].start()


def worker_exit(server, worker) -> None:  # noqa: ANN001, ARG001  # gunicorn's signature
    """End in order."""
    while running:
        running.pop().stop()


if __name__ == "__main__":
    sys.exit(__doc__)
