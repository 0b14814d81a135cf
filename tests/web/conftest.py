"""Worlds for the pages: a store in memory that counts what it is asked and can fall silent, and a browser."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from pglease import PGLease
from pglease.backends.memory import MemoryBackend
from pglease.errors import BackendMisconfigured, BackendUnavailable
from pglease.web import web_app

TOKEN = "correct-horse-battery-staple"


class Store(MemoryBackend):
    """Counts what it is asked, and answers nothing while `trouble` is set."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.asked: Counter[str] = Counter()
        self.trouble: dict[str, Exception] = {}

    def heed(self, verb: str) -> None:
        self.asked[verb] += 1
        if error := self.trouble.get(verb, self.trouble.get("all")):
            raise error

    def list(self, *arguments: Any, **keywords: Any) -> Any:
        self.heed("list")
        return super().list(*arguments, **keywords)

    def queues(self, *arguments: Any, **keywords: Any) -> Any:
        self.heed("queues")
        return super().queues(*arguments, **keywords)

    def history(self, *arguments: Any, **keywords: Any) -> Any:
        self.heed("history")
        return super().history(*arguments, **keywords)

    def force_release(self, *arguments: Any, **keywords: Any) -> Any:
        self.heed("force_release")
        return super().force_release(*arguments, **keywords)

    def fall_silent(self, says: str = "nobody answers at 127.0.0.1:5432", *, outcome_unknown: bool = False) -> None:
        self.trouble["all"] = BackendUnavailable(says, outcome_unknown=outcome_unknown)

    def refuse(self, verb: str, says: str) -> None:
        self.trouble[verb] = BackendMisconfigured(says)

    def answer_again(self) -> None:
        self.trouble.clear()


@pytest.fixture
def store() -> Store:
    return Store(history=10)


@pytest.fixture
def leases(store: Store) -> Iterator[PGLease]:
    """The client that the pages look through."""
    with PGLease(store, owner_id="the page") as client:
        yield client


@pytest.fixture
def worker(store: Store) -> Iterator[PGLease]:
    """Somebody who takes leases."""
    with PGLease(store, owner_id="worker-1") as client:
        yield client


@pytest.fixture
def browse(leases: PGLease) -> Iterator[Callable[..., TestClient]]:
    """Open the pages, made with some options; every request looks anew unless they say otherwise."""
    opened: list[TestClient] = []

    def begin(**options: Any) -> TestClient:
        app = web_app(leases, **{"every": 1e-6, **options})
        browser = TestClient(app, base_url="http://127.0.0.1:9910", headers={"accept": "text/html"})
        browser.__enter__()
        opened.append(browser)
        return browser

    yield begin
    for browser in opened:
        browser.__exit__(None, None, None)


@pytest.fixture
def operator(browse: Callable[..., TestClient]) -> TestClient:
    """A browser that has shown the access token, to pages that may end holds."""
    browser = browse(access_token=TOKEN, allow_force_release=True)
    assert browser.post("/sign-in", data={"token": TOKEN}).url.path == "/"
    return browser
