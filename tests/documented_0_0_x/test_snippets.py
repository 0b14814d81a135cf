"""Quick start, patterns, usage, waiting, configuration and error handling."""

from __future__ import annotations

import logging
import os
import signal
import threading
import types
from collections.abc import Callable

import psycopg
import pytest

from pglease import AcquireTimeout, AcquisitionError, LeaseLostError
from tests.documented_0_0_x.workers import Worker
from tests.support.worlds import child, steal, wait_until

THIRTY_SECONDS = """
    from pglease import PGLease

    # Connect to your PostgreSQL database
    pglease = PGLease("postgresql://user:pass@localhost/db")

    # Only one worker executes this across your entire cluster
    with pglease.acquire("daily-report", ttl=300) as acquired:
        if acquired:
            generate_daily_report()  # This runs on exactly one worker
"""


def test_the_30_second_example_runs_on_exactly_one_worker_and_all_others_skip(worker: Callable[[], Worker]) -> None:
    others = [worker().can("generate_daily_report") for _ in range(3)]

    def all_others_try() -> None:
        for other in others:
            other.run(THIRTY_SECONDS)

    here = worker().can("generate_daily_report", meanwhile=all_others_try).run(THIRTY_SECONDS)

    assert here.did == ["generate_daily_report"]
    assert [other.did for other in others] == [[], [], []]
    assert others[0].run(THIRTY_SECONDS).did == ["generate_daily_report"]


MIGRATION = """
    # Ensure migration runs only once across all pods
    with pglease.acquire("db-migration-v2", ttl=600, raise_on_failure=True):
        apply_migration()
"""


def test_the_migration_form_raises_for_all_but_one(here: Worker, there: Worker) -> None:
    def try_there() -> None:
        with pytest.raises(AcquisitionError, match="db-migration-v2") as refusal:
            there.run(MIGRATION)
        assert refusal.value.held_by == here.pglease.owner_id

    there.can("apply_migration")
    here.start().can("apply_migration", meanwhile=try_there).run(MIGRATION)

    assert (here.did, there.did) == (["apply_migration"], [])


DECORATED = """
    # Cron job that should run on one worker only
    @pglease.singleton_task("hourly-sync", ttl=3600)
    def hourly_data_sync():
        sync_external_api()

    # Call from all workers - only one executes
    hourly_data_sync()
"""
BEAT = """
    # Before: Single Celery Beat instance (SPOF)
    # After: All workers can try, one executes
    @pglease.singleton_task("daily-task", ttl=3600)
    def daily_task():
        generate_report()
"""


def test_a_decorated_job_that_all_workers_call_at_once_runs_on_one(here: Worker, there: Worker) -> None:
    there.can("sync_external_api")

    here.start().can("sync_external_api", meanwhile=lambda: there.run(DECORATED)).run(DECORATED)

    assert (here.did, there.did) == (["sync_external_api"], [])


def test_a_decorated_job_is_one_at_a_time_and_not_one_a_period(here: Worker, there: Worker) -> None:
    here.start().can("generate_report").run(BEAT)
    there.can("generate_report").run(BEAT)

    here.names["daily_task"]()
    there.names["daily_task"]()

    assert (here.did, there.did) == (["generate_report"], ["generate_report"])


CELERY = """
    # tasks.py
    from celery import Celery
    from pglease import PGLease
    import os

    app = Celery('tasks')
    pglease = PGLease(os.environ['DATABASE_URL'])

    @app.task
    def process_batch():
        \"\"\"Ensure only one worker processes batches at a time\"\"\"
        with pglease.acquire("batch-processing", ttl=1800) as acquired:
            if acquired:
                # Process the batch
                do_batch_work()
            else:
                # Another worker is processing, safe to skip
                pass
"""


def test_of_two_celery_workers_one_processes_the_batch_and_the_other_skips(
    here: Worker, there: Worker, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", dsn)
    for worker in (here, there):
        worker.names["__name__"] = "tasks"  # which Celery names its tasks after
        worker.run(CELERY)

    def meanwhile() -> None:
        assert there.can("do_batch_work").names["process_batch"].apply().successful()

    assert here.can("do_batch_work", meanwhile=meanwhile).names["process_batch"].apply().successful()
    assert (here.did, there.did) == (["do_batch_work"], [])

    there.names["process_batch"].apply()
    assert there.did == ["do_batch_work"]
    for worker in (here, there):
        worker.names["app"].close()


EXPLICIT = """
    if pglease.try_acquire("{name}", ttl={ttl}):
        try:
            {work}()
        finally:
            pglease.release("{name}")
"""
"""Three times in the README: a cache to warm, a model to load, data to synchronise."""


@pytest.mark.parametrize(
    ("name", "ttl", "work"),
    [("cache-warmup", 300, "warm_cache"), ("ml-model-load", 120, "load_ml_model"), ("sync-job", 120, "sync_data")],
)
def test_explicit_control_keeps_the_others_out_until_it_is_released(
    here: Worker, there: Worker, name: str, ttl: int, work: str
) -> None:
    snippet = EXPLICIT.format(name=name, ttl=ttl, work=work)
    there.can(work)

    here.start().can(work, meanwhile=lambda: there.run(snippet)).run(snippet)
    assert (here.did, there.did) == ([work], [])

    there.run(snippet)
    assert there.did == [work]


def test_explicit_control_is_released_when_the_work_fails(here: Worker, there: Worker) -> None:
    snippet = EXPLICIT.format(name="cache-warmup", ttl=300, work="warm_cache")

    def fail() -> None:
        raise RuntimeError("cold")

    with pytest.raises(RuntimeError, match="cold"):
        here.start().can("warm_cache", meanwhile=fail).run(snippet)

    assert there.can("warm_cache").run(snippet).did == ["warm_cache"]


LEADER = """
    # One worker becomes the leader
    def run_as_leader():
        if pglease.try_acquire("leader", ttl=30):
            try:
                while True:
                    do_leader_work()
                    time.sleep(10)
                    # Heartbeat keeps lease alive
            finally:
                pglease.release("leader")
"""


def test_a_leader_leads_past_its_ttl_until_it_steps_down(
    here: Worker, there: Worker, operator: psycopg.Connection
) -> None:
    class SteppedDownError(Exception):
        pass

    def sleep(_seconds: float) -> None:
        """Outlive the ttl, all the while with a rival at the door; then step down."""
        query = "SELECT expires_at <= clock_timestamp() FROM (VALUES (%s::timestamptz)) AS first (expires_at)"
        first = operator.execute("SELECT expires_at FROM pglease_leases").fetchone()

        def is_past_the_first_expiry() -> bool:
            there.names["run_as_leader"]()
            assert there.did == []
            return operator.execute(query, first).fetchone() == (True,)

        wait_until(is_past_the_first_expiry)
        raise SteppedDownError

    for each in (here.start(), there):
        each.can("do_leader_work").names["time"] = types.SimpleNamespace(sleep=sleep)
        each.run(LEADER, instead={"ttl=30": "ttl=2"})

    with pytest.raises(SteppedDownError):
        here.names["run_as_leader"]()

    assert here.did == ["do_leader_work"]
    assert there.pglease.try_acquire("leader", ttl=30) is True


WEBHOOK = """
    @app.post("/webhook/payment")
    def payment_webhook(payload):
        webhook_id = payload['id']

        # Prevent duplicate processing if webhook is retried
        with pglease.acquire(f"webhook-{webhook_id}", ttl=300) as acquired:
            if acquired:
                process_payment(payload)
                return {"status": "processed"}
            return {"status": "duplicate", "message": "Already processing"}
"""


def test_a_webhook_that_is_retried_meanwhile_is_a_duplicate(here: Worker, there: Worker) -> None:
    app = types.SimpleNamespace(post=lambda _path: lambda function: function)
    retried = []

    def retry() -> None:
        retried.append(there.names["payment_webhook"]({"id": 7}))
        retried.append(there.names["payment_webhook"]({"id": 8}))

    here.start().can("process_payment", meanwhile=retry).names["app"] = app
    there.can("process_payment").names["app"] = app
    for each in (here, there):
        each.run(WEBHOOK)

    assert here.names["payment_webhook"]({"id": 7}) == {"status": "processed"}
    assert retried == [{"status": "duplicate", "message": "Already processing"}, {"status": "processed"}]
    assert there.did == ["process_payment"]


FROM_REDIS = """
    # After (with pglease)
    from pglease import PGLease
    pglease = PGLease(db_url)

    with pglease.acquire("my-task", ttl=60, raise_on_failure=True):
        do_work()
"""


def test_what_replaces_a_redis_lock_raises_where_it_is_held(here: Worker, there: Worker, dsn: str) -> None:
    def try_there() -> None:
        with pytest.raises(AcquisitionError):
            there.run(FROM_REDIS)

    here.names["db_url"] = there.names["db_url"] = dsn
    there.can("do_work")
    here.can("do_work", meanwhile=try_there).run(FROM_REDIS)

    assert (here.did, there.did) == (["do_work"], [])


USAGE = """
    from pglease import PGLease

    pglease = PGLease("postgresql://user:pass@localhost/db")

    # Context manager (recommended)
    with pglease.acquire("my-task", ttl=60) as acquired:
        if acquired:
            run_migration()

    # Raise on failure instead of silently skipping
    with pglease.acquire("my-task", ttl=60, raise_on_failure=True):
        run_migration()

    # Decorator
    @pglease.singleton_task("cleanup", ttl=300)
    def cleanup_old_data():
        # Only one worker executes this
        pass

    # Explicit control
    if pglease.try_acquire("sync-job", ttl=120):
        try:
            sync_data()
        finally:
            pglease.release("sync-job")
"""


def test_all_forms_of_use_follow_each_other_and_leave_nothing_held(here: Worker, there: Worker) -> None:
    here.can("run_migration", "sync_data").run(USAGE)
    here.names["cleanup_old_data"]()

    assert here.did == ["run_migration", "run_migration", "sync_data"]
    assert here.pglease.holding() == []
    assert there.pglease.list_leases() == []


def test_where_it_is_held_the_block_is_skipped_and_the_raising_form_raises(here: Worker, there: Worker) -> None:
    assert there.pglease.try_acquire("my-task", ttl=60)

    with pytest.raises(AcquisitionError, match="there"):
        here.can("run_migration").run(USAGE)

    assert here.did == []


# -- waiting

WAIT = """
    # Wait up to 2 minutes, polling every 5 seconds
    pglease.wait_for_lease("nightly-report", ttl=300, timeout=120, poll_interval=5)
    generate_report()
"""
WAIT_FOR_EVER = """
    # Wait indefinitely
    pglease.wait_for_lease("nightly-report", ttl=300, timeout=None)
"""


def test_waiting_ends_with_the_lease_once_a_dead_holders_ttl_is_over(here: Worker, there: Worker) -> None:
    assert there.pglease.try_acquire("nightly-report", ttl=1, heartbeat=False)

    here.start().can("generate_report").run(WAIT)

    assert here.did == ["generate_report"]
    assert here.pglease.held("nightly-report")
    here.pglease.release("nightly-report")


def test_waiting_ends_with_the_lease_once_a_living_holder_releases_it(here: Worker, there: Worker) -> None:
    assert there.pglease.try_acquire("nightly-report", ttl=300)
    waiting = threading.Thread(
        target=here.start().can("generate_report").run, args=(WAIT,), kwargs={"instead": {"=5": "=0.05"}}
    )

    waiting.start()
    there.pglease.release("nightly-report")

    waiting.join(20)
    assert here.did == ["generate_report"]


def test_waiting_without_a_timeout_goes_on_while_the_holder_lives(here: Worker, there: Worker) -> None:
    assert there.pglease.try_acquire("nightly-report", ttl=2)  # renewed: its first expiry frees nothing
    waiting = threading.Thread(target=here.start().run, args=(WAIT_FOR_EVER,), daemon=True)

    waiting.start()
    waiting.join(3.0)
    assert waiting.is_alive()
    there.pglease.release("nightly-report")

    waiting.join(20)
    assert here.pglease.held("nightly-report")


def test_waiting_in_vain_raises_an_acquisition_error_that_is_a_timeout_too(here: Worker, there: Worker) -> None:
    assert there.pglease.try_acquire("nightly-report", ttl=300)

    with pytest.raises(AcquisitionError, match="nightly-report") as refusal:
        here.start().can("generate_report").run(WAIT, instead={"timeout=120": "timeout=0.2"})

    assert isinstance(refusal.value, AcquireTimeout)
    assert isinstance(refusal.value, TimeoutError)
    assert refusal.value.held_by == "there"
    assert here.did == []


def test_a_timeout_of_zero_is_a_value_error_and_nothing_is_taken(here: Worker) -> None:
    with pytest.raises(ValueError, match="timeout"):
        here.start().run(WAIT, instead={"timeout=120": "timeout=0"})

    assert here.pglease.list_leases() == []


# -- errors and losses

ERRORS = """
    from pglease import PGLease, AcquisitionError

    pglease = PGLease(url)

    # Option 1: Silent skip if can't acquire
    with pglease.acquire("task", ttl=60) as acquired:
        if acquired:
            do_work()
        else:
            logger.info("Another worker is handling this")

    # Option 2: Raise exception if can't acquire (fail-fast)
    try:
        with pglease.acquire("critical-task", ttl=60, raise_on_failure=True):
            do_critical_work()
    except AcquisitionError:
        logger.error("Could not acquire lease - another worker has it")
        sys.exit(1)
"""
NEEDED = "import sys, logging; logger = logging.getLogger('application')"


def test_a_free_task_is_done_and_nothing_is_said(here: Worker, dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    here.names["url"] = dsn

    here.can("do_work", "do_critical_work").run(NEEDED).run(ERRORS)

    assert here.did == ["do_work", "do_critical_work"]
    assert [record for record in caplog.records if record.name == "application"] == []


def test_a_held_task_is_skipped_and_a_held_critical_one_ends_the_process(
    here: Worker, there: Worker, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert there.pglease.try_acquire("task", ttl=60)
    assert there.pglease.try_acquire("critical-task", ttl=60)
    here.names["url"] = dsn

    with caplog.at_level(logging.INFO, "application"), pytest.raises(SystemExit) as ended:
        here.can("do_work", "do_critical_work").run(NEEDED).run(ERRORS)

    assert ended.value.code == 1
    assert here.did == []
    said = [record.getMessage() for record in caplog.records if record.name == "application"]
    assert said == ["Another worker is handling this", "Could not acquire lease - another worker has it"]


def test_an_error_of_the_works_own_comes_out_and_the_lease_is_free(here: Worker, there: Worker, dsn: str) -> None:
    def fail() -> None:
        raise RuntimeError("the work's own")

    here.names["url"] = dsn

    with pytest.raises(RuntimeError, match="the work's own"):
        here.can("do_work", "do_critical_work", meanwhile=fail).run(NEEDED).run(ERRORS)

    assert there.pglease.try_acquire("task", ttl=60) is True


def test_leaving_a_block_whose_lease_was_lost_raises(here: Worker, there: Worker, dsn: str) -> None:
    def lose() -> None:
        steal(dsn, "daily-report")
        wait_until(lambda: here.pglease.held("daily-report") is None)

    with pytest.raises(LeaseLostError, match="daily-report"):
        here.can("generate_daily_report", meanwhile=lose).run(THIRTY_SECONDS, instead={"ttl=300": "ttl=1.2"})

    assert here.did == ["generate_daily_report"]


HANDLE_LOST = """
def handle_lost(task_name: str) -> None:
    logging.critical("Lost lease %s — aborting!", task_name)
    os.abort()

pglease = PGLease(url, on_lease_lost=handle_lost)
"""


def test_a_callback_that_aborts_the_process_does(dsn: str) -> None:
    taking = 'import logging, os; url = dsn\n{}\nassert pglease.try_acquire("job", ttl=1.2)\nsay("taken")\nhear()'
    with child(taking.format(HANDLE_LOST), dsn) as process:
        assert process.hear() == "taken"

        steal(dsn, "job")

        code, errors = process.end()
    assert code == -signal.SIGABRT
    assert "Lost lease job — aborting!" in errors


# -- configuration

CONFIGURATION = """
    pglease = PGLease(
        "postgresql://user:pass@localhost/db",
        owner_id="pod-xyz-123",       # Auto-generated if not provided
        heartbeat_interval=10,         # Heartbeat every 10 seconds
        on_lease_lost=handle_lost,     # Called when a heartbeat fails (see below)
    )
"""


def test_the_configured_owner_beats_as_often_as_configured_and_hears_of_its_loss(
    here: Worker, dsn: str, operator: psycopg.Connection
) -> None:
    told = threading.Event()
    here.can("handle_lost", meanwhile=told.set)
    here.run("from pglease import PGLease").run(CONFIGURATION, instead={"interval=10": "interval=0.2"})
    beats = "SELECT owner_id FROM pglease_leases WHERE heartbeat_at > acquired_at + interval '0.5 s'"
    assert here.pglease.try_acquire("job", ttl=300)

    assert wait_until(lambda: operator.execute(beats).fetchone()) == ("pod-xyz-123",)

    steal(dsn, "job")
    assert told.wait(10)
    assert here.did == ["handle_lost"]


def test_an_owner_is_made_up_where_none_is_given(worker: Callable[[], Worker]) -> None:
    owners = [worker().start().pglease.owner_id for _ in range(3)]

    assert len(set(owners)) == 3
    assert all(str(os.getpid()) in owner for owner in owners)


TEST_TABLE = """
    # Use a separate database or table for testing
    pglease = PGLease(
        os.environ.get('TEST_DATABASE_URL', 'postgresql://localhost/test'),
        table_name='pglease_test_leases'  # Separate table
    )
"""


def test_a_separate_table_for_tests_knows_nothing_of_the_other(
    here: Worker, there: Worker, dsn: str, operator: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_DATABASE_URL", dsn)
    assert there.pglease.try_acquire("job", ttl=60)

    here.run("import os; from pglease import PGLease").run(TEST_TABLE)

    assert here.pglease.try_acquire("job", ttl=60)
    held = operator.execute("SELECT task_name, owner_id FROM pglease_test_leases").fetchall()
    assert held == [("job", here.pglease.owner_id)]


KUBERNETES = """
    import os
    from pglease import PGLease

    # Use pod name as owner_id for traceability
    pglease = PGLease(
        os.environ["DATABASE_URL"],
        owner_id=os.environ.get("HOSTNAME"),  # e.g., "web-pod-xyz-123"
        heartbeat_interval=10,
        on_lease_lost=lambda task: logger.critical(f"Lost lease: {task}")
    )

    @pglease.singleton_task("db-migration", ttl=600)
    def run_migration():
        \"\"\"Only runs on one pod even if 10 replicas are deployed\"\"\"
        apply_schema_changes()

    run_migration()  # Safe to call from all pods
"""


def test_ten_replicas_with_one_hostname_migrate_on_one_of_them(
    worker: Callable[[], Worker], here: Worker, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", dsn)
    monkeypatch.setenv("HOSTNAME", "web-pod-xyz-123")
    replicas = [worker().can("apply_schema_changes") for _ in range(9)]

    def all_replicas_start() -> None:
        for replica in replicas:
            replica.run(KUBERNETES)
        lease = replicas[0].pglease.get_lease("db-migration")
        here.did.append(lease and lease.owner_id)

    here.can("apply_schema_changes", meanwhile=all_replicas_start).run(KUBERNETES)

    assert here.did == ["apply_schema_changes", "web-pod-xyz-123"]
    assert [replica.did for replica in replicas] == [[]] * 9
    assert {replica.pglease.owner_id for replica in replicas} == {"web-pod-xyz-123"}
    assert here.names["run_migration"].__doc__ == "Only runs on one pod even if 10 replicas are deployed"


def test_a_pod_that_loses_its_lease_says_so(
    here: Worker, dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DATABASE_URL", dsn)
    monkeypatch.delenv("HOSTNAME", raising=False)
    here.can("apply_schema_changes").run(NEEDED).run(KUBERNETES)
    assert here.pglease.try_acquire("job", ttl=1.2)

    steal(dsn, "job")

    wait_until(lambda: "Lost lease: job" in caplog.messages)
