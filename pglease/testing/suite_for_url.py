"""What `pytest --pglease-backend=URL` runs: the contract suite on the store of that address."""

# ruff: noqa: D102  # the names of the tests are sentences

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module

import pytest

from pglease.backends import Backend, open_backend
from pglease.testing.contract import BackendContract
from pglease.testing.harness import Harness, budget


class UrlHarness(Harness):
    """A store of which no more than its address is known: time passes by waiting for it.

    Args:
        url: its address. A `{}` in it becomes a word that no other test has: the name of a table, a file, a prefix.
            Without one, every lease in the store is ended and deleted.
    """

    tick = 0.5
    racers = 10
    model_runs = 1

    def __init__(self, url: str) -> None:
        self._url = url.replace("{}", f"t{secrets.token_hex(6)}")
        if self._url == url:
            self._empty()

    def _empty(self) -> None:
        with closing(self.open()) as backend:
            if backend.traits.fair:
                pytest.fail("a store that keeps queues is only empty when it is new: write {} in its address")
            for lease in backend.list("", budget(), ended=True):
                backend.force_release(lease.task_name, lease.fencing_token, budget())
            backend.cleanup(0.0, budget())

    def open(self) -> Backend:
        """See `Harness.open`."""
        return open_backend(self._url)

    def pass_time(self, seconds: float) -> None:
        """See `Harness.pass_time`."""
        time.sleep(seconds)

    def close(self) -> None:
        """See `Harness.close`. What the store keeps of the test is left where it is."""


class TestBackend(BackendContract):
    """The suite."""

    @pytest.fixture
    def harness(self, request: pytest.FixtureRequest) -> Iterator[Harness]:
        harness = _harness_class(request.config.getoption("pglease_harness"))(
            request.config.getoption("pglease_backend")
        )
        yield harness
        harness.close()


def _harness_class(named: str | None) -> type[UrlHarness]:
    if named is None:
        return UrlHarness
    module, _, name = named.partition(":")
    try:
        found: type[UrlHarness] = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise pytest.UsageError(f"--pglease-harness must be like mystore.testing:MyHarness: {error}") from None
    return found
