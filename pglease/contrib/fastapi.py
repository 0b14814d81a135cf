"""FastAPI: a client that lives as long as the application, and leases as dependencies.

    from pglease.contrib.fastapi import lease, lifespan

    app = FastAPI(lifespan=lifespan("postgresql://user:pass@host/db"))
    Sync = Depends(lease("sync:{tenant}", ttl="1m"), scope="function")

    @app.post("/sync/{tenant}")
    async def sync(tenant: str, held: Annotated[AsyncHeldLease, Sync]):
        ...

Whoever comes while it is held is answered 423 with `Retry-After`. A lease belongs to the request, never to a thread:
the dependency is asynchronous for endpoints of both kinds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeVar, Unpack

from fastapi import Depends
from fastapi.requests import HTTPConnection

from pglease.aio import AsyncHeldLease, AsyncPGLease
from pglease.client import PGLease
from pglease.contrib.starlette import LOCKED, Wanted, check, leased, leases_of, lifespan
from pglease.current import assert_held
from pglease.handles import HeldLease
from pglease.options import Duration

__all__ = ["async_client", "client", "lease", "leased", "lifespan", "sync_lease"]

T = TypeVar("T")


def lease(
    name: str | Callable[..., Any], ttl: Duration = 60, *, status_code: int = LOCKED, **wanted: Unpack[Wanted]
) -> Callable[..., AsyncIterator[AsyncHeldLease]]:
    """Return a dependency that holds a lease for the endpoint: `Depends(lease("sync:{tenant}"), scope="function")`.

    With `scope="function"` it is released before the answer leaves, and a loss turns the answer into an error; with the
    default, `"request"`, after it has left, background tasks included, and a loss is for the server's log alone.

    Args:
        name: the lease; a template over the path's parameters, or a dependency of your own that returns the name: a
            function with parameters as an endpoint has them.
        ttl, status_code, wanted: as for `pglease.contrib.starlette.leased`.

    Raises:
        ConfigurationError: at once, for every broken rule.
        HTTPException: in the request; see `leased`.
    """
    check(name, ttl, wanted)
    return _dependency(name, partial(leased, ttl=ttl, status_code=status_code, **wanted))


def sync_lease(
    name: str | Callable[..., Any], ttl: Duration = 60, *, status_code: int = LOCKED, **wanted: Unpack[Wanted]
) -> Callable[..., AsyncIterator[HeldLease]]:
    """Return the same for `def` endpoints, a `HeldLease`, whose calls are not awaited. See `lease`."""
    check(name, ttl, wanted)

    @asynccontextmanager
    async def take(connection: HTTPConnection, name: Any) -> AsyncIterator[HeldLease]:
        async with leased(connection, name, ttl, status_code=status_code, **wanted) as held:
            yield assert_held(held.name)  # the other face of what was entered here

    return _dependency(name, take)


def _dependency(
    name: str | Callable[..., Any], take: Callable[[HTTPConnection, Any], AbstractAsyncContextManager[T]]
) -> Callable[..., AsyncIterator[T]]:
    if isinstance(name, str):

        async def by_path(connection: HTTPConnection) -> AsyncIterator[T]:
            async with take(connection, name) as held:
                yield held

        return by_path

    async def by_dependency(connection: HTTPConnection, made: Any = Depends(name)) -> AsyncIterator[T]:  # noqa: B008
        async with take(connection, lambda _: made) as held:
            yield held

    return by_dependency


def async_client(connection: HTTPConnection) -> AsyncPGLease:
    """Return the application's client: `Annotated[AsyncPGLease, Depends(async_client)]`. See `leases_of`."""
    return leases_of(connection)


def client(connection: HTTPConnection) -> PGLease:
    """Return its synchronous face, for `def` endpoints: `Annotated[PGLease, Depends(client)]`. See `leases_of`."""
    return leases_of(connection).client
