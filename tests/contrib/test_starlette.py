"""Starlette without FastAPI."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from pglease import ConfigurationError, PGLease
from pglease.contrib.starlette import leased, lifespan
from tests.support.worlds import is_free


@pytest.fixture
def other(dsn: str) -> Iterator[PGLease]:
    with PGLease(dsn, owner_id="the other") as made:
        yield made


async def on_the_loop(request: Request) -> Response:
    async with leased(request, "sync:{tenant}", ttl="1m") as lease:
        return PlainTextResponse(f"{lease.name} {lease.held}")


def on_a_thread(request: Request) -> Response:
    with leased(request, "sync:{tenant}", ttl="1m") as lease:
        return PlainTextResponse(f"{lease.name} {lease.held}")


async def by_header(request: Request) -> Response:
    async with leased(request, lambda asked: f"sync:{asked.headers['x-tenant']}", status_code=409):
        return PlainTextResponse("done")


ROUTES = [
    Route("/loop/{tenant}", on_the_loop, methods=["POST"]),
    Route("/thread/{tenant}", on_a_thread, methods=["POST"]),
    Route("/header", by_header, methods=["POST"]),
]


@pytest.mark.parametrize("kind", ["loop", "thread"])
def test_an_endpoint_of_either_kind_holds_it_for_its_block(dsn: str, other: PGLease, kind: str) -> None:
    other.try_acquire("sync:acme", ttl=40)

    with TestClient(Starlette(routes=ROUTES, lifespan=lifespan(dsn))) as browser:
        refused = browser.post(f"/{kind}/acme")
        done = browser.post(f"/{kind}/globex")
        unnameable = browser.post(f"/{kind}/{'x' * 300}")

    assert refused.status_code == 423
    assert 1 <= int(refused.headers["Retry-After"]) <= 40
    assert done.text == "sync:globex True"
    assert is_free(dsn, "sync:globex")
    assert unnameable.status_code == 422


def test_the_name_may_be_asked_of_the_request(dsn: str, other: PGLease) -> None:
    other.try_acquire("sync:acme")

    with TestClient(Starlette(routes=ROUTES, lifespan=lifespan(dsn))) as browser:
        codes = [browser.post("/header", headers={"x-tenant": tenant}).status_code for tenant in ("acme", "globex")]

    assert codes == [409, 200]


def test_an_application_without_the_lifespan_says_what_is_missing(dsn: str) -> None:
    bare = TestClient(Starlette(routes=ROUTES))
    with pytest.raises(ConfigurationError, match="give it lifespan="):
        bare.post("/loop/acme")

    inner = Starlette(routes=ROUTES)
    outer = Starlette(routes=[Mount("/inner", inner)], lifespan=lifespan(dsn))
    with TestClient(outer) as browser:
        with pytest.raises(ConfigurationError, match="a mounted one"):
            browser.post("/inner/loop/acme")

        inner.state.pglease = outer.state.pglease
        assert browser.post("/inner/loop/acme").status_code == 200
