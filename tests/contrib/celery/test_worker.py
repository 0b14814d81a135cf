"""Tasks under leases, on a real prefork worker behind a real broker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from pglease import AcquisitionError, PGLease
from tests.support.worlds import wait_until

pytestmark = [pytest.mark.matrix, pytest.mark.xdist_group("celery")]

PATIENCE = 120.0


@pytest.fixture(scope="module")
def tasks(shop: ModuleType, worker: subprocess.Popen[str]) -> ModuleType:
    """The tasks, with somebody who works on them."""
    return shop


@pytest.fixture
def leases(database_url: str) -> Iterator[PGLease]:
    """Somebody else, on the worker's database."""
    with PGLease(database_url, owner_id="somebody-else") as client:
        yield client


def get(result: Any) -> Any:
    return result.get(timeout=PATIENCE)


def test_a_task_runs_under_its_lease_whose_record_says_which_message_it_is(tasks: Any, leases: PGLease) -> None:
    result = tasks.skipping.delay("a")

    found = get(result)

    assert (found["name"], found["token"]) == ("skip:a", 1)
    assert found["metadata"]["task_id"] == result.id
    assert leases.get_lease("skip:a").metadata["task"] == "tests.contrib.celery.shop.skipping"
    assert leases.try_acquire("skip:a"), "it was not given back"


@pytest.mark.parametrize(("task", "name"), [("skipping", "skip:b"), ("decorated", "decorated:b")])
def test_a_task_whose_lease_is_held_is_skipped_and_says_by_whom(
    tasks: Any, leases: PGLease, task: Any, name: str
) -> None:
    assert leases.try_acquire(name, ttl=60)

    task = tasks.app.tasks[f"tests.contrib.celery.shop.{task}"]

    result = task.delay("b")

    wait_until(lambda: result.state == "SKIPPED", PATIENCE)
    assert (result.info["lease"], result.info["held_by"]) == (name, "somebody-else")
    leases.release(name)
    assert get(task.delay(tenant="b"))["token"] == 2


def test_a_task_whose_lease_is_held_fails_where_that_is_wanted(tasks: Any, leases: PGLease) -> None:
    assert leases.try_acquire("raise:c", ttl=60)

    with pytest.raises(AcquisitionError, match="'raise:c' is held by somebody-else"):
        get(tasks.raising.delay("c"))


def test_a_task_whose_lease_is_held_comes_again_and_runs_once_it_is_free(tasks: Any, leases: PGLease) -> None:
    assert leases.try_acquire("retry:d", ttl=5)

    result = tasks.retrying.delay("d")
    wait_until(lambda: result.state == "RETRY", PATIENCE)
    leases.release("retry:d")

    found = get(result)
    assert found["token"] == 2
    assert found["retries"] >= 1


def test_a_killed_pool_child_frees_its_lease_after_the_ttl_and_the_message_is_worked_on_again(
    tasks: Any, broker: Any, leases: PGLease
) -> None:
    result = tasks.mortal.delay()
    began = wait_until(lambda: broker.execute("LRANGE", "mortal", 0, -1), PATIENCE)

    first = leases.get_lease("mortal")
    os.kill(int(began[0]), signal.SIGKILL)

    assert get(result)["token"] == first.fencing_token + 1
    assert leases.get_lease("mortal").acquired_at >= first.expires_at


def test_a_handed_over_lease_goes_to_the_task_without_a_gap_and_once(tasks: Any, leases: PGLease) -> None:
    with leases.acquire("raise:e", ttl=60, metadata={"file": "e.csv"}) as lease:
        handover = lease.transfer("celery", ttl="2m")

    assert not leases.try_acquire("raise:e"), "somebody else could have had it in between"
    found = get(tasks.raising.apply_async(("e",), handover=handover))

    assert found["token"] > lease.fencing_token + 1
    assert found["metadata"] == {"file": "e.csv"}
    with leases.acquire("raise:e"), pytest.raises(AcquisitionError):
        get(tasks.raising.apply_async(("e",), handover=str(handover)))


def test_a_task_of_any_base_adopts_what_it_is_sent(tasks: Any, leases: PGLease) -> None:
    with leases.acquire("import:f", ttl=60) as lease:
        message = str(lease.transfer("celery"))

    assert get(tasks.adopting.delay(message))["name"] == "import:f"
    assert get(tasks.adopting.delay(message)) is None


def test_a_handed_over_lease_that_is_spent_is_asked_for_by_a_retry(tasks: Any, leases: PGLease) -> None:
    with leases.acquire("retry:g", ttl=60) as lease:
        handover = lease.transfer("celery")
    with leases.adopt(handover):
        pass  # somebody was quicker

    found = get(tasks.retrying.apply_async(("g",), handover=handover))

    assert found["retries"] == 1


def test_a_forked_pool_child_has_none_of_its_parents_leases_and_gets_its_own(tasks: Any, leases: PGLease) -> None:
    found = get(tasks.forked.delay())

    parent = leases.get_lease("held by the parent")
    assert not parent.is_expired()
    assert found == {"owner": found["owner"], "held": False, "got": False, "own": True}
    assert found["owner"] != parent.owner_id


def test_the_example_imports_once_and_says_when_an_import_is_under_way(
    tasks: Any, leases: PGLease, capsys: pytest.CaptureFixture[str]
) -> None:
    example = sys.modules["examples.celery_import"]

    example.main("acme")
    with leases.acquire("import:acme"), pytest.raises(SystemExit, match="somebody-else has been importing acme since"):
        example.main("acme")

    assert capsys.readouterr().out == "acme was imported under fencing token 3\n"


@pytest.mark.long
@pytest.mark.parametrize("pool", ["threads", "solo", "gevent"])
def test_other_pools_keep_to_the_leases_too(shop: Any, spawn: Any, leases: PGLease, pool: str) -> None:
    queue = f"of-{pool}"
    spawn("celery", "-A", "tests.contrib.celery.shop", "worker", "--pool", pool, "--queues", queue, "--without-mingle")
    task = shop.app.tasks["tests.contrib.celery.shop.skipping"]

    found = get(task.apply_async((pool,), queue=queue))

    assert found["token"] == 1
    with leases.acquire(f"skip:{pool}"):
        result = task.apply_async((pool,), queue=queue)
        wait_until(lambda: result.state == "SKIPPED", PATIENCE)
