"""APScheduler 3: a scheduler in every worker, the jobs in one. Extra `apscheduler`; docs/apscheduler.md tells.

scheduler = BackgroundScheduler()
election = election_for(scheduler, "scheduler")

scheduler.start(paused=True)
election.start()
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from apscheduler.job import Job
from apscheduler.schedulers.base import BaseScheduler

from pglease import options
from pglease.default import default_client

if TYPE_CHECKING:
    from pglease.client import PGLease
    from pglease.handles import HeldLease
    from pglease.primitives.election import LeaderElection

LOOK = 0.05
"""Seconds between two looks whether the last jobs of a term have ended."""


def election_for(
    scheduler: BaseScheduler,
    name: str = "scheduler",
    *,
    leases: PGLease | None = None,
    catch_up: bool = False,
    **wanted: Any,
) -> LeaderElection:
    """Return an election whose leader runs the scheduler's jobs; it does not campaign yet.

    Start the scheduler paused, then the election. The leader resumes the scheduler. When it leads no more it pauses it,
    and waits for the jobs that still run; only then is the lease released, and only then can another begin. After a
    loss somebody else may have begun already: give jobs that must never overlap a lease of their own.

    Args:
        scheduler: any scheduler of APScheduler 3, started paused in every worker.
        name: the election, 1 to 240 characters. Default "scheduler": one for each application that shares the store.
        leases: the client. Default: the default client.
        catch_up: what becomes of runs that came due while this worker stood by. False (default): they are left out,
            since the leader of that time has seen to them, and nobody has where there was none. True: each job's
            `misfire_grace_time` and `coalesce` decide; only where all workers share the job stores, which remember what
            was run. With jobs in memory it would run them twice.
        wanted: `ttl`, `metadata`, `on_new_leader`, `defer`, `on_lost`, as for `LeaderElection`.

    Raises:
        ConfigurationError: for every broken rule.
    """
    options.flag(catch_up, "catch_up")

    def lead(lease: HeldLease) -> None:
        if not catch_up:
            _leave_out_the_past(scheduler)
        scheduler.resume()
        try:
            lease.lost.wait()
        finally:
            _come_to_rest(scheduler)

    return (leases or default_client()).leader_election(name, on_started=lead, **wanted)


def _leave_out_the_past(scheduler: BaseScheduler) -> None:
    now = datetime.now(UTC)
    for job in scheduler.get_jobs():
        if job.next_run_time is None or job.next_run_time >= now:  # None: somebody has paused this job
            continue
        following = _next_after(now, job)
        if following is None:
            job.remove()
        else:
            job.modify(next_run_time=following)


def _next_after(now: datetime, job: Job) -> datetime | None:
    """Return when a job is due again. It may have come due a million times: no use going through all of them."""
    at = now.astimezone(job.next_run_time.tzinfo)
    following: datetime | None = job.trigger.get_next_fire_time(None, at)
    if following is not None and following < at:  # a date, which is over
        following = job.trigger.get_next_fire_time(at, at)
    return following


def _come_to_rest(scheduler: BaseScheduler) -> None:
    if scheduler.running:
        scheduler.pause()
    with scheduler._jobstores_lock:  # noqa: SLF001  # held by a pass that is under way, and submits what it found due
        pass
    while _running(scheduler):
        time.sleep(LOOK)


def _running(scheduler: BaseScheduler) -> int:
    """Return how many jobs run. No event tells of all of them: a worker of a process pool may die."""
    executors = list(scheduler._executors.values())  # noqa: SLF001
    return sum(sum(list(executor._instances.values())) for executor in executors)  # noqa: SLF001
