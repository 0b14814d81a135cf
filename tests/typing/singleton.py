"""What type checkers know about decorated functions. Never run: mypy reads it, with the package."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, assert_type

import pglease
from pglease import PGLease

leases = PGLease("memory://")


@leases.singleton_task("job")
def task(a: int, *, b: str = "x") -> float:
    return 1.0


@leases.singleton_task("job:{tenant}", wait="5s", on_skip="busy")
async def later(tenant: str) -> list[int]:
    return []


@pglease.singleton_task(lambda tenant: f"import:{tenant}")
def of_the_module(tenant: str) -> str:
    return tenant


class Report:
    @leases.singleton_task("report:{self.tenant}")
    def run(self, day: str) -> int:
        return 1

    @staticmethod
    @leases.singleton_task("static")
    def static(n: int) -> bytes:
        return b""

    @leases.singleton_task("async")
    async def later(self) -> str:
        return ""


def a_call_may_be_skipped_and_then_answers_none() -> None:
    assert_type(task(1, b="y"), float | None)
    assert_type(of_the_module("acme"), str | None)
    assert_type(Report().run("mon"), int | None)
    assert_type(Report.static(1), bytes | None)


async def so_may_a_coroutine() -> None:
    coroutine = assert_type(later("acme"), Coroutine[Any, Any, list[int] | None])
    assert_type(await coroutine, list[int] | None)
    assert_type(await Report().later(), str | None)
    await later()  # type: ignore[call-arg]


def the_signature_is_kept() -> None:
    task("1")  # type: ignore[arg-type]
    task(1, c=2)  # type: ignore[call-arg]
    Report().run()  # type: ignore[call-arg]
    Report.static("x")  # type: ignore[arg-type]
