"""FastAPI as it is: dependencies, lifespans, and the threads that endpoints run on."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Annotated, Any

import anyio.to_thread
import pytest
from fastapi import BackgroundTasks, Depends, FastAPI, Query
from fastapi.testclient import TestClient

from pglease import AsyncHeldLease, AsyncPGLease, BackendClosed, ConfigurationError, HeldLease, LeaseLostError, PGLease
from pglease.contrib.fastapi import async_client, client, lease, lifespan, sync_lease
from tests.support.worlds import always, is_free, steal, wait_until


@pytest.fixture
def other(dsn: str) -> Iterator[PGLease]:
    """Another process's client, as far as anybody can tell."""
    with PGLease(dsn, owner_id="the other") as made:
        yield made


@pytest.fixture
def app(dsn: str) -> FastAPI:
    return FastAPI(lifespan=lifespan(dsn, owner_id="the app"))


@pytest.fixture
def seen(dsn: str) -> list[Any]:
    """What endpoints note."""
    return []


ENDPOINTS = ["async", "sync"]


def add_endpoint(app: FastAPI, kind: str, note: Callable[[Any], object], **wanted: Any) -> None:
    """Add `/sync/{tenant}`, of either kind."""
    if kind == "async":
        held = Depends(lease("sync:{tenant}", ttl="1m", **wanted), scope="function")

        @app.post("/sync/{tenant}")
        async def sync(tenant: str, held: Annotated[AsyncHeldLease, held]) -> str:
            note(held)
            return tenant
    else:
        held = Depends(sync_lease("sync:{tenant}", ttl="1m", **wanted), scope="function")

        @app.post("/sync/{tenant}")
        def sync_on_a_thread(tenant: str, held: Annotated[HeldLease, held]) -> str:
            note(held)
            return tenant


# -- dependencies


@pytest.mark.parametrize("kind", ENDPOINTS)
def test_whoever_comes_while_it_is_held_is_told_when_to_come_again(
    app: FastAPI, other: PGLease, seen: list[Any], dsn: str, kind: str
) -> None:
    add_endpoint(app, kind, lambda held: seen.append((type(held), held.name, held.held)))
    other.try_acquire("sync:acme", ttl=40)

    with TestClient(app) as browser:
        refused = browser.post("/sync/acme")
        assert browser.post("/sync/globex").json() == "globex"
        assert is_free(dsn, "sync:globex")  # before the answer left

        other.release("sync:acme")
        assert browser.post("/sync/acme").json() == "acme"

    assert refused.status_code == 423
    assert 1 <= int(refused.headers["Retry-After"]) <= 40
    assert "the other" not in refused.text  # who holds what is nobody's business outside
    handle = AsyncHeldLease if kind == "async" else HeldLease
    assert seen == [(handle, "sync:globex", True), (handle, "sync:acme", True)]


def test_the_status_of_a_refusal_can_be_chosen(app: FastAPI, other: PGLease, seen: list[Any]) -> None:
    add_endpoint(app, "async", seen.append, status_code=409)
    other.try_acquire("sync:acme")

    with TestClient(app) as browser:
        refused = browser.post("/sync/acme")

    assert refused.status_code == 409
    assert "Retry-After" in refused.headers


@pytest.mark.parametrize("kind", ENDPOINTS)
def test_a_request_may_wait_for_its_turn(app: FastAPI, other: PGLease, seen: list[Any], kind: str) -> None:
    add_endpoint(app, kind, lambda held: seen.append(held.fencing_token), wait=60)
    other.try_acquire("sync:acme")

    with TestClient(app) as browser, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(browser.post, "/sync/acme")
        wait_until(app.state.pglease.waiting)
        other.release("sync:acme")

        assert waiting.result(60).status_code == 200
    assert seen == [2]


@pytest.mark.parametrize("kind", ENDPOINTS)
def test_an_endpoint_that_fails_leaves_nothing_held(app: FastAPI, dsn: str, kind: str) -> None:
    def fail(_held: object) -> None:
        raise RuntimeError("the endpoint's own")

    add_endpoint(app, kind, fail)

    with TestClient(app) as browser:
        with pytest.raises(RuntimeError, match="the endpoint's own"):
            browser.post("/sync/acme")
        assert is_free(dsn, "sync:acme")


@pytest.mark.parametrize("kind", ENDPOINTS)
def test_an_endpoint_that_lost_its_lease_does_not_answer_well(app: FastAPI, dsn: str, kind: str) -> None:
    def lose(held: Any) -> None:
        steal(dsn, held.name)

    add_endpoint(app, kind, lose)

    with TestClient(app) as browser, pytest.raises(LeaseLostError, match="sync:acme"):
        browser.post("/sync/acme")


@pytest.mark.parametrize("scope", ["function", "request"])
def test_background_tasks_run_under_it_or_after_it(app: FastAPI, seen: list[Any], dsn: str, scope: Any) -> None:
    @app.post("/sync")
    async def sync(
        held: Annotated[AsyncHeldLease, Depends(lease("sync"), scope=scope)], tasks: BackgroundTasks
    ) -> None:
        tasks.add_task(lambda: seen.append(is_free(dsn, held.name)))

    with TestClient(app) as browser:
        browser.post("/sync")
        wait_until(lambda: is_free(dsn, "sync"))

    assert seen == [scope == "function"]


def test_the_name_may_be_a_dependency_of_ones_own(app: FastAPI, other: PGLease) -> None:
    def name_of(tenant: Annotated[str, Query(min_length=3)]) -> str:
        return f"sync:{tenant}"

    @app.post("/sync", dependencies=[Depends(lease(name_of), scope="function")])
    async def sync() -> None: ...

    other.try_acquire("sync:acme")
    with TestClient(app) as browser:
        codes = [browser.post("/sync", params={"tenant": tenant}).status_code for tenant in ("acme", "globex", "x")]

    assert codes == [423, 200, 422]


def test_a_path_that_makes_no_name_is_the_callers_mistake_and_a_missing_parameter_ours(app: FastAPI) -> None:
    @app.post("/long/{tenant}", dependencies=[Depends(lease("sync:{tenant}"))])
    @app.post("/missing", dependencies=[Depends(lease("sync:{tenant}"))])
    async def sync() -> None: ...

    with TestClient(app) as browser:
        assert browser.post(f"/long/{'x' * 300}").status_code == 422
        with pytest.raises(ConfigurationError, match="'tenant', which the path does not have"):
            browser.post("/missing")


@pytest.mark.parametrize(
    ("name", "wanted"), [("sync:{tenant", {}), (7, {}), ("sync", {"ttl": "soon"}), ("sync", {"on_lost": "forget"})]
)
@pytest.mark.parametrize("make", [lease, sync_lease])
def test_what_could_only_fail_is_refused_when_it_is_written_down(make: Any, name: Any, wanted: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        make(name, **wanted)


# -- threads


@pytest.mark.parametrize("take", ["acquire", "reentrant lock"])
def test_a_sync_dependency_of_ones_own_is_entered_on_a_thread_that_the_next_request_is_served_by(
    app: FastAPI, dsn: str, seen: list[Any], take: str
) -> None:
    """Ownership must not hang on the thread: the next request would wait for itself, or take itself for the first."""
    inside: list[str] = []
    entering = threading.Semaphore(0)
    go = asyncio.Event()

    def held(leases: Annotated[PGLease, Depends(client)]) -> Iterator[None]:
        block = (
            leases.acquire("job", wait=60, raise_on_failure=True)
            if take == "acquire"
            else leases.lock("job", reentrant=True).hold(60)
        )
        seen.append(threading.get_ident())
        entering.release()
        with block:
            yield
            seen.append(threading.get_ident())

    @app.post("/job", dependencies=[Depends(held, scope="function")])
    async def job() -> int:
        anyio.to_thread.current_default_thread_limiter().total_tokens = 1
        inside.append("one more")
        most = len(inside)
        await go.wait()
        inside.pop()
        return most

    @app.post("/go")
    async def let_go() -> None:
        go.set()

    with TestClient(app) as browser, ThreadPoolExecutor(2) as pool:
        first = pool.submit(browser.post, "/job")
        assert entering.acquire(timeout=60)
        wait_until(lambda: inside)
        second = pool.submit(browser.post, "/job")
        assert entering.acquire(timeout=60)
        try:
            always(lambda: len(inside) == 1 and not second.done(), 0.3)
        finally:
            browser.post("/go")

        assert [first.result(60).json(), second.result(60).json()] == [1, 1]
    assert seen[0] == seen[1], "the second request was entered on another thread: this proves nothing"
    assert len(set(seen)) > 1, "all was left on the thread it was entered on: this proves nothing"
    assert is_free(dsn, "job")


def test_many_requests_at_once_run_one_at_a_time_on_whatever_threads(app: FastAPI, seen: list[Any]) -> None:
    inside = threading.Semaphore(1)

    def be_alone(_held: HeldLease) -> None:
        assert inside.acquire(blocking=False), "two at once"
        seen.append(threading.get_ident())
        inside.release()

    add_endpoint(app, "sync", be_alone, wait=100)

    with TestClient(app) as browser, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(browser.post, "/sync/acme") for _ in range(16)]
        assert [answer.result(120).status_code for answer in answers] == [200] * 16
    assert len(seen) == 16


# -- the lifespan


def test_the_client_lives_as_long_as_the_application(app: FastAPI, other: PGLease) -> None:
    @app.get("/")
    async def names(leases: Annotated[AsyncPGLease, Depends(async_client)]) -> list[str]:
        return [each.name for each in await leases.list_leases()]

    other.try_acquire("theirs")
    for _ in range(2):  # as often as the application is started
        with TestClient(app) as browser:
            assert browser.get("/").json() == ["theirs"]
            lived = app.state.pglease
        with pytest.raises(BackendClosed):
            lived.client.list_leases()


def test_it_goes_around_the_applications_own_lifespan(dsn: str, other: PGLease, seen: list[Any]) -> None:
    @asynccontextmanager
    async def own(app: FastAPI) -> Any:
        async with app.state.pglease.acquire("start-up") as held:
            seen.append(held.held)
            yield {"answer": 42}
        seen.append(other.get_lease("start-up").is_expired())  # type: ignore[union-attr]

    app = FastAPI(lifespan=lifespan(dsn, inner=own))

    with TestClient(app) as browser:
        assert browser.app_state == {"answer": 42}
        assert seen == [True]
    assert seen == [True, True]


def test_a_client_that_is_given_stays_open(dsn: str) -> None:
    with PGLease(dsn) as mine:
        for given in (mine, AsyncPGLease(mine)):
            app = FastAPI(lifespan=lifespan(given))
            with TestClient(app):
                assert app.state.pglease.client is mine

        assert mine.list_leases() == []


def test_without_an_address_the_environment_says_it(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGLEASE_URL", dsn)
    app = FastAPI(lifespan=lifespan(owner_id="me"))

    with TestClient(app):
        assert app.state.pglease.client.try_acquire("job")
        assert app.state.pglease.client.get_lease("job").owner_id == "me"


def test_what_is_wrong_with_the_address_is_said_at_start_up() -> None:
    app = FastAPI(lifespan=lifespan("nothing://here"))

    with pytest.raises(ConfigurationError, match="nothing"), TestClient(app):
        pass
