"""What the adapters for the web, for Alembic and for tests give to whoever writes `typing`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import assert_type

from flask import Flask
from sqlalchemy import Engine, MetaData, Table
from starlette.requests import Request

import pglease.testing
from pglease import AsyncHeldLease, AsyncPGLease, HeldLease, PGLease
from pglease.contrib.alembic import once
from pglease.contrib.fastapi import async_client, client, lease, sync_lease
from pglease.contrib.flask import PGLeaseExtension, client_of
from pglease.contrib.sqlalchemy import table
from pglease.contrib.starlette import leased


def a_dependency_knows_its_handle() -> None:
    assert_type(lease("sync:{tenant}", ttl="1m"), Callable[..., AsyncIterator[AsyncHeldLease]])
    assert_type(sync_lease("sync:{tenant}", wait=5), Callable[..., AsyncIterator[HeldLease]])
    lease("sync", ttl=object())  # type: ignore[arg-type]
    lease("sync", waits=5)  # type: ignore[call-arg]


async def an_endpoint_of_either_kind_knows_it(request: Request) -> None:
    async with leased(request, "sync:{tenant}") as held:
        assert_type(held, AsyncHeldLease)
    with leased(request, lambda asked: asked.url.path) as held_here:
        assert_type(held_here, HeldLease)


def clients_are_clients(request: Request, app: Flask) -> None:
    assert_type(async_client(request), AsyncPGLease)
    assert_type(client(request), PGLease)
    assert_type(client_of(app), PGLease)
    assert_type(PGLeaseExtension(app).client, PGLease)


def alembic_and_sqlalchemy(engine: Engine) -> None:
    with once(engine, wait="10m") as held:
        assert_type(held, HeldLease | None)
    assert_type(table(MetaData()), Table)


def switches_are_blocks() -> None:
    block: AbstractContextManager[None] = pglease.testing.always_acquire()
    block = pglease.testing.never_acquire("who")
    block = pglease.testing.lose_after("job", calls=2, reason="expired")
    with block:
        pglease.testing.lose_after("job", reason="bored")  # type: ignore[arg-type]
