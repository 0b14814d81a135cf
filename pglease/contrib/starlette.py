"""Starlette: a client that lives as long as the application, and leases for the length of a request.

    from pglease.contrib.starlette import leased, lifespan

    async def sync(request):
        async with leased(request, "sync:{tenant}", ttl="1m") as lease:
            ...

    app = Starlette(routes=[Route("/sync/{tenant}", sync, methods=["POST"])], lifespan=lifespan("postgresql://…"))

Whoever comes while it is held is answered 423 with `Retry-After`. A lease belongs to the request, never to a thread.
"""

from __future__ import annotations

import math
import string
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, TypedDict, TypeVar, Unpack

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from pglease import options
from pglease.aio import AsyncHeldLease, AsyncPGLease
from pglease.backends import Backend
from pglease.blocks import LeaseContext
from pglease.client import PGLease
from pglease.errors import ConfigurationError
from pglease.handles import HeldLease, NotAcquired
from pglease.options import Duration

H = TypeVar("H", AsyncHeldLease, HeldLease)

LOCKED = 423
UNPROCESSABLE = 422

Name = str | Callable[[HTTPConnection], str]
"""A lease's name; a template over the path's parameters; or what is asked for the name with the request."""
Lifespan = Callable[[Any], AbstractAsyncContextManager[Any]]


class Wanted(TypedDict, total=False):
    """What `AsyncPGLease.acquire` takes beside name and ttl, as far as it makes sense for a request."""

    wait: Duration | None
    min_hold: Duration | None
    max_hold: Duration | None
    metadata: Mapping[str, Any] | None
    fair: bool
    on_lost: options.AsyncOnLost


def lifespan(
    backend: str | Backend | PGLease | AsyncPGLease | None = None, inner: Lifespan | None = None, **arguments: Any
) -> Lifespan:
    """Return a lifespan that sets `app.state.pglease` to an `AsyncPGLease`, and closes what it has made at the end.

    Args:
        backend: an address, a store or a client; a client stays open at the end. Default: PGLEASE_URL, else
            DATABASE_URL. Nothing is connected before the first use; a forked worker has connections of its own.
        inner: the application's own lifespan, which begins after this one and ends before it. Its state is passed on.
            Default None.
        arguments: as for `AsyncPGLease`; not together with a client.

    Raises:
        ConfigurationError: at start-up, for every broken rule.
    """

    @asynccontextmanager
    async def around(app: Any) -> AsyncIterator[Any]:
        async with _client(backend, arguments) as leases:
            app.state.pglease = leases
            if inner is None:
                yield None
            else:
                async with inner(app) as state:
                    yield state

    return around


@asynccontextmanager
async def _client(
    backend: str | Backend | PGLease | AsyncPGLease | None, arguments: Mapping[str, Any]
) -> AsyncIterator[AsyncPGLease]:
    if isinstance(backend, AsyncPGLease):
        yield AsyncPGLease(backend.client, **arguments)  # another face, which leaves that one open
        return
    async with AsyncPGLease.from_env(**arguments) if backend is None else AsyncPGLease(backend, **arguments) as leases:
        yield leases


def leases_of(connection: HTTPConnection) -> AsyncPGLease:
    """Return the client of the application that serves a request; its `client` is the synchronous face.

    Args:
        connection: the request, or a websocket.

    Raises:
        ConfigurationError: the application has none: its lifespan does not run, or it is mounted in another one.
    """
    found = getattr(connection.app.state, "pglease", None)
    if isinstance(found, AsyncPGLease):
        return found
    raise ConfigurationError(
        "this application has no app.state.pglease: give it lifespan=pglease.contrib.starlette.lifespan(…), and run it "
        "by a server that runs lifespans (in tests: `with TestClient(app)`); a mounted one needs a state of its own"
    )


def leased(
    connection: HTTPConnection,
    name: Name,
    ttl: Duration = 60,
    *,
    status_code: int = LOCKED,
    **wanted: Unpack[Wanted],
) -> Leased:
    """Return a block that holds a lease, for an endpoint: `async with` on the loop, `with` in a `def` endpoint.

    Args:
        connection: the request (or websocket).
        name: the lease; a template over the path's parameters (`"sync:{tenant}"`), or a callable that is given the
            request.
        ttl: as for `PGLease.acquire`.
        status_code: the answer while somebody else has it. Default 423 (Locked); or 409, 429, 503.
        wanted: `wait`, `min_hold`, `max_hold`, `metadata`, `fair`, `on_lost`, as for `AsyncPGLease.acquire`.

    Raises:
        HTTPException: on entering: `status_code` with `Retry-After` (whole seconds until that hold ends unless it is
            renewed, at least 1) while somebody else has it; 422 where the path makes no name that a lease can have.
            Neither says who holds what.
        ConfigurationError: at once, for every broken rule; also for a parameter that the path does not have.
        LeaseLostError, BackendError: as for `AsyncPGLease.acquire`.
    """
    check(name, ttl, wanted)
    return Leased(leases_of(connection), named(name, connection), ttl, status_code, wanted)


def named(name: Name, connection: HTTPConnection) -> str:
    """Return the name that a request asks for. See `leased`."""
    made = name(connection) if callable(name) else _filled_in(name, connection.path_params)
    try:
        return options.text(made, "name")
    except ConfigurationError:
        raise HTTPException(UNPROCESSABLE, "this is nothing that could be leased") from None


def _filled_in(template: str, parameters: Mapping[str, Any]) -> str:
    try:
        return template.format_map(parameters)
    except (KeyError, IndexError) as missing:
        raise ConfigurationError(f"name {template!r} refers to {missing}, which the path does not have") from None


def check(name: Any, ttl: Duration, wanted: Mapping[str, Any]) -> None:
    """Refuse at definition what could only fail at each request."""
    if isinstance(name, str):
        try:
            list(string.Formatter().parse(name))
        except ValueError as error:
            raise ConfigurationError(f"name is no usable template: {name!r} ({error})") from None
    elif not callable(name):
        raise ConfigurationError(f"name must be text or a callable, not {name!r}")
    options.hold_options("checked at each request", ttl, in_a_task=True, **wanted)


class Leased:
    """A lease for the length of a block in an endpoint. Made by `leased`; for one block."""

    def __init__(self, leases: AsyncPGLease, name: str, ttl: Duration, status_code: int, wanted: Wanted) -> None:
        self._leases = leases
        self._name, self._ttl, self._wanted = name, ttl, wanted
        self._status_code = status_code

    async def __aenter__(self) -> AsyncHeldLease:
        self._awaited = self._leases.acquire(self._name, self._ttl, **self._wanted)
        return self._admitted(await self._awaited.__aenter__())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._awaited.__aexit__(kind, error, trace)

    def __enter__(self) -> HeldLease:
        wanted: Any = self._wanted  # `on_lost="cancel"` is refused there: no task could be cancelled
        self._block: LeaseContext[HeldLease | NotAcquired]
        self._block = self._leases.client.acquire(self._name, self._ttl, **wanted)
        return self._admitted(self._block.__enter__())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._block.__exit__(kind, error, trace)

    def _admitted(self, taken: H | NotAcquired) -> H:
        if not isinstance(taken, NotAcquired):
            return taken
        seconds = max(1, math.ceil(taken.retry_after))
        raise HTTPException(
            self._status_code,
            f"somebody else is at it; try again in {seconds} s",
            headers={"Retry-After": str(seconds)},
        )
