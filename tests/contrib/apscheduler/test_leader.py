"""A scheduler in every worker, the jobs in one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from apscheduler.events import EVENT_JOB_SUBMITTED
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.base import STATE_PAUSED
from apscheduler.triggers.combining import OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

from pglease import SKIPPED, ConfigurationError, LeaderElection, PGLease
from pglease.contrib.apscheduler import _running, election_for
from tests.support.worlds import always, steal, wait_until

pytestmark = pytest.mark.matrix

Worker = tuple[BackgroundScheduler, LeaderElection]


@pytest.fixture
def worker(dsn: str) -> Iterator[Callable[..., Worker]]:
    """Start workers, each with a scheduler and a client of its own; `jobs` is called to add jobs."""
    running: list[tuple[BackgroundScheduler, LeaderElection, PGLease]] = []

    def start(jobs: Callable[[BackgroundScheduler], object], **wanted: Any) -> Worker:
        leases = PGLease(dsn)
        scheduler = BackgroundScheduler(timezone=UTC)
        election = election_for(scheduler, leases=leases, **wanted)
        running.append((scheduler, election, leases))
        jobs(scheduler)
        scheduler.start(paused=True)
        election.start()
        return scheduler, election

    yield start
    for scheduler, election, leases in running:
        election.stop(30)
        if scheduler.running:
            scheduler.shutdown()
        leases.close()


def often(ran: list[int], number: int) -> Callable[[BackgroundScheduler], object]:
    """A job that notes its worker, twenty times a second."""
    return lambda scheduler: scheduler.add_job(ran.append, "interval", args=[number], seconds=0.05)


def test_the_jobs_run_in_the_leader_alone_and_after_it_in_the_next(worker: Callable[..., Worker]) -> None:
    ran: list[int] = []
    _, first = worker(often(ran, 1))
    assert first.wait_for_leader(30)
    _, second = worker(often(ran, 2))
    wait_until(lambda: len(ran) >= 3)
    assert set(ran) == {1}

    first.stop()

    wait_until(lambda: 2 in ran)
    assert second.is_leader
    assert ran == sorted(ran)


def test_whoever_lost_the_lease_runs_no_jobs_until_it_leads_again(worker: Callable[..., Worker], dsn: str) -> None:
    ran: list[int] = []
    scheduler, election = worker(often(ran, 1), ttl=3)
    wait_until(lambda: ran)

    steal(dsn, "scheduler")

    assert election.wait_until_lost(30)
    wait_until(lambda: scheduler.state == STATE_PAUSED)
    scheduler.get_jobs()  # waits for a pass that is under way
    wait_until(lambda: not _running(scheduler))
    before = len(ran)
    always(lambda: len(ran) == before, 0.3)


class Away(MemoryJobStore):  # type: ignore[misc]  # APScheduler ships no types
    """A job store that stops answering."""

    answers = True

    def get_all_jobs(self) -> Any:
        if not self.answers:
            raise OSError("the job store is away")
        return super().get_all_jobs()


def test_the_lease_is_kept_until_the_jobs_of_the_term_have_ended(worker: Callable[..., Worker]) -> None:
    begun, go_on, store = threading.Event(), threading.Event(), Away()

    def long() -> None:
        begun.set()
        go_on.wait(60)

    def jobs(scheduler: BackgroundScheduler) -> None:
        scheduler.add_jobstore(store)
        scheduler.add_job(long, "interval", seconds=0.05)

    _, first = worker(jobs)
    assert begun.wait(30)
    _, second = worker(lambda _: None)

    store.answers = False
    first._request_stop()

    always(lambda: not second.is_leader, 0.3)
    go_on.set()
    assert second.wait_for_leader(30)


def test_a_new_leader_leaves_out_what_came_due_while_it_stood_by(worker: Callable[..., Worker]) -> None:
    ran: list[str] = []
    submitted: list[datetime] = []
    now = datetime.now(UTC)

    def jobs(scheduler: BackgroundScheduler) -> None:
        scheduler.add_listener(lambda event: submitted.extend(event.scheduled_run_times), EVENT_JOB_SUBMITTED)
        late = {"misfire_grace_time": None, "coalesce": False}
        scheduler.add_job(ran.append, "date", run_date=now + timedelta(seconds=0.1), args=["once"], id="once", **late)
        scheduler.add_job(ran.append, "date", run_date=now + timedelta(hours=1), args=["later"], id="later", **late)
        scheduler.add_job(ran.append, "interval", seconds=0.1, args=["often"], id="often", **late)
        scheduler.add_job(ran.append, "cron", second="*", args=["tick"], id="tick", **late)
        scheduler.add_job(ran.append, "cron", second="*", args=["paused"], id="paused", next_run_time=None)

    leader, first = worker(lambda _: None)
    assert first.wait_for_leader(30)
    scheduler, second = worker(jobs)
    wait_until(lambda: datetime.now(UTC) > now + timedelta(seconds=1.2))

    taken_over = datetime.now(UTC)
    first.stop()

    wait_until(lambda: {"often", "tick"} <= set(ran))
    assert min(submitted) >= taken_over
    assert "once" not in ran
    assert {job.id for job in scheduler.get_jobs()} == {"often", "tick", "later", "paused"}
    assert scheduler.get_job("later").next_run_time == now + timedelta(hours=1)
    assert scheduler.get_job("paused").next_run_time is None
    assert leader.running
    assert second.is_leader


def test_what_came_due_is_run_where_the_job_stores_are_shared(worker: Callable[..., Worker]) -> None:
    ran: list[str] = []
    _, first = worker(lambda _: None)
    assert first.wait_for_leader(30)
    run_date = datetime.now(UTC)
    worker(
        lambda scheduler: scheduler.add_job(
            ran.append, "date", run_date=run_date, args=["once"], misfire_grace_time=None
        ),
        catch_up=True,
    )

    first.stop()

    wait_until(lambda: ran == ["once"])


@pytest.mark.parametrize(
    "trigger",
    [
        IntervalTrigger(hours=1, start_date=datetime(2020, 1, 1, 0, 20, tzinfo=UTC), timezone=UTC),
        CronTrigger(minute=20, timezone=UTC),
        OrTrigger([CronTrigger(minute=20, timezone=UTC), DateTrigger(datetime(2020, 1, 1, tzinfo=UTC))]),
    ],
    ids=["interval", "cron", "combined"],
)
def test_leaving_out_keeps_the_times_of_the_clock(worker: Callable[..., Worker], trigger: Any) -> None:
    scheduler, election = worker(
        lambda scheduler: scheduler.add_job(
            print, trigger, id="job", next_run_time=datetime(2020, 1, 1, 0, 20, tzinfo=UTC)
        )
    )

    assert election.wait_for_leader(30)

    wait_until(lambda: scheduler.get_job("job").next_run_time > datetime.now(UTC))
    due = scheduler.get_job("job").next_run_time
    assert (due.minute, due.second) == (20, 0)
    assert due - datetime.now(UTC) <= timedelta(hours=1)


def test_an_asyncio_scheduler_is_led_from_the_elections_thread(dsn: str) -> None:
    async def main() -> None:
        ran = asyncio.Event()

        async def job() -> None:
            ran.set()

        with PGLease(dsn) as leases:
            scheduler = AsyncIOScheduler(timezone=UTC)
            election = election_for(scheduler, leases=leases)
            scheduler.add_job(job, "interval", seconds=0.05)
            scheduler.start(paused=True)
            with election:
                await asyncio.wait_for(ran.wait(), 30)
                election._request_stop()
                await asyncio.wait_for(asyncio.to_thread(election.stop), 30)
            scheduler.shutdown()

    asyncio.run(main())


def test_each_job_with_a_lease_of_its_own_runs_once_per_slot_among_all_workers(dsn: str) -> None:
    ran: list[int] = []
    answers: list[object] = []
    clients = [PGLease(dsn) for _ in range(3)]
    schedulers = []
    at = datetime.now(UTC) + timedelta(seconds=1)
    for number, leases in enumerate(clients):
        once = leases.singleton_task("report", ttl="1m", once_per="1h", on_skip=SKIPPED)(lambda n=number: ran.append(n))
        scheduler = BackgroundScheduler(timezone=UTC)
        scheduler.add_job(lambda once=once: answers.append(once()), "date", run_date=at, misfire_grace_time=None)
        scheduler.start()
        schedulers.append(scheduler)

    wait_until(lambda: len(answers) == 3)

    for scheduler in schedulers:
        scheduler.shutdown()
    for leases in clients:
        leases.close()
    # Where an hour begins between two of them, there are two slots.
    assert len(ran) == 1 or datetime.now(UTC).hour != at.hour


def test_nonsense_is_refused() -> None:
    with PGLease("memory://") as leases, pytest.raises(ConfigurationError, match="catch_up"):
        election_for(BackgroundScheduler(), leases=leases, catch_up="yes")  # type: ignore[arg-type]
