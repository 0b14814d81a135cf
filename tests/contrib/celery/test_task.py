"""What can be said of a leased task without a worker: what it refuses, and what a direct or eager call does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, current_task

from pglease import SKIPPED, AcquisitionError, BackendUnavailable, ConfigurationError, PGLease, current_lease
from pglease.contrib.celery import HANDOVER_HEADER, LeaseTask, leased


@pytest.fixture
def leases(dsn: str) -> Iterator[PGLease]:
    with PGLease(dsn) as client:
        yield client


@pytest.fixture
def other(dsn: str) -> Iterator[PGLease]:
    with PGLease(dsn, owner_id="somebody-else") as client:
        yield client


pytestmark = pytest.mark.matrix


class Unshared(Celery):  # type: ignore[misc]  # Celery ships no types
    """An application whose tasks stay its own: Celery makes them again in every other one."""

    def task(self, *args: Any, **wanted: Any) -> Any:
        return super().task(*args, **{**wanted, "shared": False})


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Unshared("eager", set_as_current=False, broker="memory://", backend="cache+memory://")
    app.conf.update(task_always_eager=True, task_store_eager_result=True)
    yield app
    app.close()


def token() -> int:
    lease = current_lease()
    assert lease is not None
    return lease.fencing_token


def token_for(tenant: str) -> int:
    return token()


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ({"lease": "import:{nobody}"}, "refers to 'nobody'"),
        ({"lease": "import:{1}"}, "refers to '1'"),
        ({"lease": 7}, "name must be text or a callable"),
        ({"lease": "a", "lease_ttl": "soon"}, "ttl"),
        ({"lease": "a", "lease_on_conflict": "wait"}, "on_conflict must be one of 'skip', 'retry', 'raise'"),
        ({"lease": "a", "lease_on_lost": "cancel"}, "on_lost must be one of"),
        ({"lease": "a", "lease_max_hold": -1}, "max_hold"),
    ],
)
def test_what_can_never_be_right_is_refused_when_the_task_is_made(app: Celery, wanted: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        app.task(base=LeaseTask, **wanted)(token_for).name  # noqa: B018  # Celery makes it at its first use


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigurationError) as refused:
        leased("a", ttl=0, on_conflict="wait")(print)  # type: ignore[arg-type]

    assert len(refused.value.problems) == 2


@pytest.mark.parametrize(
    "lease",
    ["import:{0}:{1}", "import:{tenant}:{file[name]}", lambda tenant, file: f"import:{tenant}:{file}", "import:x:y"],
)
def test_the_name_is_made_of_the_calls_arguments(app: Celery, leases: PGLease, lease: Any) -> None:
    expected = {"import:{tenant}:{file[name]}": "import:a:b"}.get(lease, "import:x:y")

    @app.task(base=LeaseTask, lease=lease, leases=leases, bind=True)
    def work(self, tenant, file):
        assert self.name
        return current_lease().name

    arguments = ("a", {"name": "b"}) if expected == "import:a:b" else ("x", "y")
    assert work.delay(*arguments).get() == expected
    assert work(*arguments) == expected
    assert work(tenant=arguments[0], file=arguments[1]) == expected


def test_a_base_of_all_tasks_leases_those_that_ask_for_it(leases: PGLease) -> None:
    app = Unshared("eager", set_as_current=False, task_cls=LeaseTask)

    @app.task
    def free():
        return current_lease()

    @app.task(lease="one", leases=leases)
    def one():
        return token()

    assert (free(), one()) == (None, 1)
    app.close()


def test_a_task_that_is_a_class_is_leased_too(app: Celery, leases: PGLease) -> None:
    class Import(LeaseTask):
        name = "import"
        lease = "import:{0}"

        def run(self, tenant):
            return current_lease().name

    Import.leases = leases
    task = app.register_task(Import())

    assert task.delay("a").get() == "import:a"


def test_the_lease_is_given_back_however_the_body_ends(app: Celery, leases: PGLease, other: PGLease) -> None:
    tries = []

    @app.task(base=LeaseTask, bind=True, lease="job", leases=leases, max_retries=2)
    def job(self, how):
        tries.append(other.try_acquire("job"))
        if how == "retry" and len(tries) == 1:
            raise self.retry(countdown=0)
        if how == "error":
            raise KeyError(how)
        return token()

    assert job.delay("retry").get() == 2
    with pytest.raises(KeyError):
        job.delay("error").get()
    assert job.delay("well").get() == 4
    assert tries == [False] * 4


def test_a_direct_call_is_skipped_or_raises_like_any_function(app: Celery, leases: PGLease, other: PGLease) -> None:
    made = {
        on_conflict: app.task(
            base=LeaseTask, name=on_conflict, lease="job", lease_on_conflict=on_conflict, leases=leases
        )(token)
        for on_conflict in ("skip", "retry", "raise")
    }

    with other.acquire("job"):
        assert made["skip"]() is SKIPPED
        for on_conflict in ("retry", "raise"):
            with pytest.raises(AcquisitionError) as refused:
                made[on_conflict]()
            assert (refused.value.name, refused.value.held_by) == ("job", "somebody-else")

    assert made["skip"]() == 2


def test_a_decorated_function_that_is_called_outside_of_celery_goes_by_its_lease(
    leases: PGLease, other: PGLease
) -> None:
    @leased("job:{number}", leases=leases)
    def job(number: int) -> int:
        return token() + number

    assert job(10) == 11
    with other.acquire("job:10"):
        assert job(10) is SKIPPED


def test_an_eager_call_is_skipped_with_the_same_state(app: Celery, leases: PGLease, other: PGLease) -> None:
    task = app.task(base=LeaseTask, name="job", lease="job", leases=leases)(token)

    with other.acquire("job"):
        result = task.delay()

    assert result.state == "IGNORED"
    assert app.AsyncResult(result.id).state == "SKIPPED"


def test_no_message_is_skipped_in_favour_of_itself(app: Celery, leases: PGLease, other: PGLease) -> None:
    task = app.task(base=LeaseTask, name="job", lease="job", max_retries=1, leases=leases)(token)

    with other.acquire("job", metadata={"task_id": "mine"}):
        with pytest.raises(AcquisitionError):  # when it was sent again and again
            task.apply_async(task_id="mine").get()
        assert task.apply_async(task_id="another").state == "IGNORED"


def test_retries_are_counted_by_the_tasks_own_max_retries(app: Celery, leases: PGLease, other: PGLease) -> None:
    task = app.task(base=LeaseTask, name="job", lease="job", lease_on_conflict="retry", max_retries=2, leases=leases)(
        token
    )

    with other.acquire("job"), pytest.raises(AcquisitionError, match="held by somebody-else"):
        task.delay().get()


def test_a_store_that_is_away_is_a_reason_to_retry_and_else_an_error(app: Celery, proxy: Any, dsn: str) -> None:
    with PGLease(proxy.through(dsn), connect_timeout=1) as leases:
        proxy.refuse()
        seen = []

        class Retrying(LeaseTask):
            name = "retrying"
            lease = "job"
            lease_on_conflict = "retry"
            lease_ttl = "7s"
            max_retries = 1

            def run(self):
                return token()

            def retry(self, **wanted):
                seen.append(wanted["countdown"])
                proxy.pass_through()
                return super().retry(**wanted)

        Retrying.leases = leases
        assert app.register_task(Retrying()).delay().get() >= 1
        assert 7 <= seen[0] <= 8

        proxy.refuse()
        proxy.cut()
        failing = app.task(base=LeaseTask, name="failing", lease="job2", leases=leases)(token)
        with pytest.raises(BackendUnavailable):
            failing.delay().get()


def test_a_handover_of_another_lease_is_refused_before_anything_is_sent(app: Celery, leases: PGLease) -> None:
    task = app.task(base=LeaseTask, name="job", lease="import:{0}", leases=leases)(token_for)

    with leases.acquire("import:a") as lease:
        handover = lease.transfer("celery")

    with pytest.raises(ConfigurationError, match=r"needs the lease 'import:b', and was handed over 'import:a'"):
        task.apply_async(("b",), handover=handover)
    assert task.apply_async(("a",), handover=handover).get() == 3


def test_a_handover_of_another_lease_is_refused_by_the_worker_too(app: Celery, leases: PGLease) -> None:
    @app.task
    @leased("import:{tenant}", leases=leases)
    def imported(tenant):
        return token()

    def headers(name: str) -> dict[str, str]:
        with leases.acquire(name) as lease:
            return {HANDOVER_HEADER: str(lease.transfer("celery"))}

    with pytest.raises(ConfigurationError, match=r"needs the lease 'import:b', and was handed over 'import:a'"):
        imported.apply_async(("b",), headers=headers("import:a")).get()
    assert imported.apply_async(("c",), headers=headers("import:c")).get() == 3


def test_a_direct_call_is_the_current_task_and_has_a_request_of_its_own(app: Celery, leases: PGLease) -> None:
    @app.task(base=LeaseTask, bind=True, lease="job", leases=leases)
    def job(self, *words):
        return current_task.name == self.name, tuple(self.request.args)

    assert job("a", "b") == (True, ("a", "b"))
    assert job.delay("a", "b").get() == (True, ("a", "b"))


def test_a_signature_carries_a_handover(app: Celery, leases: PGLease) -> None:
    task = app.task(base=LeaseTask, name="job", lease="import:{0}", leases=leases)(token_for)

    with leases.acquire("import:a") as lease:
        signature = task.s("a").set(handover=str(lease.transfer("celery")))

    assert signature.apply_async().get() == 3


def test_a_handover_to_a_task_without_a_lease_goes_with_the_message(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr("celery.Task.apply_async", lambda *_, **wanted: sent.append(wanted["headers"]))

    @app.task(base=LeaseTask)
    def plain() -> None:
        """No lease is asked for."""

    plain.apply_async(handover="a lease to go on with")

    assert sent == [{HANDOVER_HEADER: "a lease to go on with"}]
