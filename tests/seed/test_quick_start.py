"""The 0.0.3 README, told again: quick start, usage, waiting, error handling, Kubernetes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pglease import AcquisitionError, PGLease

ROOT = Path(__file__).resolve().parents[2]
logger = logging.getLogger("application")


@pytest.fixture
def pglease(dsn: str) -> Iterator[PGLease]:
    """The README's module-level object."""
    with PGLease(dsn) as leases:
        yield leases


@pytest.fixture
def other_worker(dsn: str) -> Iterator[PGLease]:
    """Another pod."""
    with PGLease(dsn) as leases:
        yield leases


def test_the_30_second_example_runs_on_one_worker_while_the_others_skip(
    pglease: PGLease, other_worker: PGLease
) -> None:
    reports = []

    with pglease.acquire("daily-report", ttl=300) as acquired:
        if acquired:
            with other_worker.acquire("daily-report", ttl=300) as acquired_there:
                if acquired_there:
                    reports.append("there")
            reports.append("here")
    with other_worker.acquire("daily-report", ttl=300) as acquired:
        if acquired:
            reports.append("afterwards")

    assert reports == ["here", "afterwards"]


def test_raise_on_failure_raises_instead_of_skipping(pglease: PGLease, other_worker: PGLease) -> None:
    migrated = []

    with pglease.acquire("db-migration-v2", ttl=600, raise_on_failure=True):
        migrated.append(1)
        with pytest.raises(AcquisitionError):  # noqa: SIM117
            with other_worker.acquire("db-migration-v2", ttl=600, raise_on_failure=True):
                migrated.append(2)

    assert migrated == [1]


def test_the_decorator_runs_one_call_at_a_time_and_skips_the_rest(pglease: PGLease, other_worker: PGLease) -> None:
    inside, go_on = threading.Event(), threading.Event()

    @pglease.singleton_task("cleanup", ttl=300)
    def cleanup_old_data() -> str:
        inside.set()
        assert go_on.wait(20)
        return "cleaned"

    @other_worker.singleton_task("cleanup", ttl=300)
    def cleanup_there() -> str:
        return "cleaned there"

    answers: list[str | None] = []
    running = threading.Thread(target=lambda: answers.append(cleanup_old_data()))
    running.start()
    assert inside.wait(20)
    skipped = cleanup_there()
    go_on.set()
    running.join(20)

    assert (answers, skipped) == (["cleaned"], None)
    assert cleanup_there() == "cleaned there"


def test_one_at_a_time_is_not_once_a_period_and_min_hold_is(pglease: PGLease, other_worker: PGLease) -> None:
    ran = []

    @pglease.singleton_task("hourly-sync", ttl=3600)
    def hourly_data_sync() -> None:
        ran.append("at a time")

    @pglease.singleton_task("hourly-sync-once", ttl=3600, min_hold=3600)
    def here() -> None:
        ran.append("a period")

    @other_worker.singleton_task("hourly-sync-once", ttl=3600, min_hold=3600)
    def there() -> None:
        ran.append("a period")

    hourly_data_sync()
    hourly_data_sync()
    here()
    there()

    assert ran == ["at a time", "at a time", "a period"]


def test_explicit_control_is_renewed_until_it_is_released(pglease: PGLease, other_worker: PGLease) -> None:
    if pglease.try_acquire("sync-job", ttl=1):
        try:
            until = time.monotonic() + 2.5
            while time.monotonic() < until:
                assert not other_worker.try_acquire("sync-job", ttl=1)
        finally:
            assert pglease.release("sync-job")

    assert other_worker.try_acquire("sync-job", ttl=120)


def test_wait_for_lease_waits_for_its_turn(pglease: PGLease, other_worker: PGLease) -> None:
    assert other_worker.try_acquire("nightly-report", ttl=300)
    releasing = threading.Timer(0.3, other_worker.release, ["nightly-report"])
    releasing.start()

    pglease.wait_for_lease("nightly-report", ttl=300, timeout=120, poll_interval=0.1)

    assert pglease.held("nightly-report")
    releasing.join()


def test_wait_for_lease_without_a_timeout_waits_as_long_as_it_takes(pglease: PGLease, other_worker: PGLease) -> None:
    assert other_worker.try_acquire("nightly-report", ttl=1.5)  # renewed, so only the release frees it
    waiting = threading.Thread(
        target=lambda: pglease.wait_for_lease("nightly-report", ttl=300, timeout=None, poll_interval=0.1), daemon=True
    )
    waiting.start()
    waiting.join(2.5)
    assert waiting.is_alive()

    other_worker.release("nightly-report")

    waiting.join(10)
    assert pglease.held("nightly-report")


def test_wait_for_lease_raises_acquisition_error_on_timeout_and_value_error_for_zero(
    pglease: PGLease, other_worker: PGLease
) -> None:
    assert other_worker.try_acquire("nightly-report", ttl=300)

    with pytest.raises(AcquisitionError):
        pglease.wait_for_lease("nightly-report", ttl=300, timeout=0.3, poll_interval=5)
    with pytest.raises(ValueError, match="timeout"):
        pglease.wait_for_lease("nightly-report", ttl=300, timeout=0)


def test_a_table_of_its_own_is_made_for_tests(dsn: str, other_worker: PGLease) -> None:
    assert other_worker.try_acquire("job", ttl=60)

    with PGLease(dsn, table_name="pglease_test_leases") as pglease:
        assert pglease.try_acquire("job", ttl=60)
        assert [lease.owner_id for lease in pglease.list_leases()] == [pglease.owner_id]


def test_the_pod_name_is_a_label_that_two_workers_may_share(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", dsn)
    monkeypatch.setenv("HOSTNAME", "web-pod-xyz-123")
    critical: list[str] = []

    def worker() -> PGLease:
        return PGLease(
            os.environ["DATABASE_URL"],
            owner_id=os.environ.get("HOSTNAME"),
            heartbeat_interval=10,
            on_lease_lost=lambda task: critical.append(f"Lost lease: {task}"),
        )

    with worker() as one, worker() as other:
        assert one.try_acquire("db-migration", ttl=600)
        assert not other.try_acquire("db-migration", ttl=600)
        lease = other.get_lease("db-migration")
        assert lease is not None
        assert lease.owner_id == "web-pod-xyz-123"


def test_an_unset_hostname_is_a_generated_label(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOSTNAME", raising=False)

    with PGLease(dsn, owner_id=os.environ.get("HOSTNAME")) as pglease:
        assert str(os.getpid()) in pglease.owner_id


def test_silent_skip_and_fail_fast(pglease: PGLease, other_worker: PGLease, caplog: pytest.LogCaptureFixture) -> None:
    assert other_worker.try_acquire("task", ttl=60)
    assert other_worker.try_acquire("critical-task", ttl=60)

    with caplog.at_level(logging.INFO, "application"), pglease.acquire("task", ttl=60) as acquired:
        if acquired:
            pytest.fail("it is held elsewhere")
        else:
            logger.info("Another worker is handling this")
    with pytest.raises(SystemExit) as ended:
        try:
            with pglease.acquire("critical-task", ttl=60, raise_on_failure=True):
                pytest.fail("it is held elsewhere")
        except AcquisitionError:
            sys.exit(1)

    assert "Another worker is handling this" in caplog.text
    assert ended.value.code == 1


def test_a_redis_lock_is_replaced_by_a_block_that_raises_when_it_is_taken(dsn: str, other_worker: PGLease) -> None:
    db_url = dsn
    done = []
    pglease = PGLease(db_url)

    with pglease.acquire("my-task", ttl=60, raise_on_failure=True):
        done.append("work")
        assert not other_worker.try_acquire("my-task")

    assert done == ["work"]
    pglease.close()


def test_a_retried_webhook_is_not_processed_beside_itself(pglease: PGLease, other_worker: PGLease) -> None:
    def payment_webhook(worker: PGLease, payload: dict[str, str], retry: bool = False) -> dict[str, str]:
        webhook_id = payload["id"]
        with worker.acquire(f"webhook-{webhook_id}", ttl=300) as acquired:
            if acquired:
                if not retry:
                    assert payment_webhook(other_worker, payload, retry=True)["status"] == "duplicate"
                return {"status": "processed"}
            return {"status": "duplicate", "message": "Already processing"}

    assert payment_webhook(pglease, {"id": "42"}) == {"status": "processed"}


def test_leadership_is_kept_by_heartbeats_and_left_in_the_end(pglease: PGLease, other_worker: PGLease) -> None:
    led = 0
    if pglease.try_acquire("leader", ttl=1):
        try:
            while led < 4:
                led += 1
                time.sleep(0.5)
                assert not other_worker.try_acquire("leader", ttl=1)
        finally:
            pglease.release("leader")

    assert led == 4
    assert other_worker.try_acquire("leader", ttl=30)


def test_the_environment_file_of_the_readme_is_enough(dsn: str) -> None:
    program = (
        "import os\nfrom pglease import PGLease\n"
        "pglease = PGLease(os.environ['DATABASE_URL'], owner_id=os.environ.get('HOSTNAME'))\n"
        "@pglease.singleton_task('db-migration', ttl=600)\n"
        "def run_migration():\n    print('migrated by', pglease.get_lease('db-migration').owner_id)\n"
        "run_migration()\n"
    )
    environment = {**os.environ, "DATABASE_URL": dsn, "HOSTNAME": "my-app-pod-xyz-123", "PYTHONPATH": str(ROOT)}

    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], env=environment, capture_output=True, text=True, check=False
    )

    assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", "migrated by my-app-pod-xyz-123\n")
