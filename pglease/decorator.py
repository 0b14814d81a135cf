"""`singleton_task`: one call at a time among all processes."""

from __future__ import annotations

import functools
import inspect
import logging
import string
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, overload

from pglease import drive, options
from pglease.errors import ConfigurationError
from pglease.handles import HeldLease, NotAcquired
from pglease.options import HoldOptions

if TYPE_CHECKING:
    from pglease.client import PGLease

log = logging.getLogger("pglease")

P = ParamSpec("P")
R = TypeVar("R")


class TaskDecorator(Protocol):
    """What `singleton_task` returns: a skipped call answers None."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R | None]]: ...
    @overload
    def __call__(self, function: Callable[P, R]) -> Callable[P, R | None]: ...


def singleton_decorator(
    client: Callable[[], PGLease],
    name: str | Callable[..., str],
    wanted: HoldOptions,
    *,
    skip_if_locked: bool,
    on_skip: Any,
) -> TaskDecorator:
    """Return the decorator. `client` is asked at each call, so that a default client may be configured later."""
    options.flag(skip_if_locked, "skip_if_locked")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _refuse_generators(function)
        named = _naming(name, function)
        skipped = functools.partial(_skipped, skip_if_locked=skip_if_locked, on_skip=on_skip)
        wrap = _async_task if _is(inspect.iscoroutinefunction, function) else _sync_task
        return wrap(function, client, named, wanted, skipped)

    return decorate


def _sync_task(
    function: Callable[..., Any],
    client: Callable[[], PGLease],
    named: Callable[..., str],
    wanted: HoldOptions,
    skipped: Callable[[NotAcquired, HoldOptions], Any],
) -> Callable[..., Any]:
    @functools.wraps(function)
    def task(*args: Any, **kwargs: Any) -> Any:
        this = _with_name(wanted, named(*args, **kwargs))
        leases = client()
        taken = leases.taking.take(this)
        if isinstance(taken, NotAcquired):
            return skipped(taken, this)
        with _Block(leases, taken):
            return function(*args, **kwargs)

    return task


def _async_task(
    function: Callable[..., Any],
    client: Callable[[], PGLease],
    named: Callable[..., str],
    wanted: HoldOptions,
    skipped: Callable[[NotAcquired, HoldOptions], Any],
) -> Callable[..., Any]:
    @functools.wraps(function)
    async def task(*args: Any, **kwargs: Any) -> Any:
        this = _with_name(wanted, named(*args, **kwargs))
        leases = client()
        taken = await leases.taking.atake(this)
        if isinstance(taken, NotAcquired):
            answer = skipped(taken, this)
            return await answer if inspect.isawaitable(answer) else answer
        async with _Block(leases, taken):
            return await function(*args, **kwargs)

    return task


class _Block:
    """The stretch of a call during which the lease is held."""

    def __init__(self, client: PGLease, lease: HeldLease) -> None:
        self._client = client
        self._lease = lease
        lease._hold.in_block = True

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._client.taking.leave(self._lease._hold, error)

    async def __aenter__(self) -> None:
        return

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, GeneratorExit):  # closed rather than cancelled: nobody is there to wait with
            self._client.taking.leave(self._lease._hold, error)
            return
        await drive.in_executor(lambda: self._client.taking.leave(self._lease._hold, error))


def _skipped(refused: NotAcquired, wanted: HoldOptions, *, skip_if_locked: bool, on_skip: Any) -> Any:
    facts = {"lease_name": refused.name, "lease_outcome": "skip"}
    log.info("a call is skipped: the lease %r is held by %r", refused.name, refused.held_by, extra=facts)
    if callable(on_skip):
        return on_skip(refused)
    if on_skip is not None or skip_if_locked:
        return on_skip
    from pglease.taking import not_acquired

    raise not_acquired(refused, wanted)


def _with_name(wanted: HoldOptions, name: str) -> HoldOptions:
    from dataclasses import replace

    return replace(wanted, name=options.text(name, "name"))


def _refuse_generators(function: Callable[..., Any]) -> None:
    if isinstance(function, staticmethod | classmethod):
        raise ConfigurationError("singleton_task goes below @staticmethod and @classmethod, next to the function")
    if not callable(function):
        raise ConfigurationError(
            f"singleton_task decorates functions, methods and coroutine functions, not {function!r}"
        )
    if _is(inspect.isgeneratorfunction, function) or _is(inspect.isasyncgenfunction, function):
        raise ConfigurationError(
            f"singleton_task cannot decorate the generator {_called(function)!r}: its body runs after the call "
            "returns, when the lease would be gone. Put `with acquire(…)` inside it"
        )


def _is(kind: Callable[[object], bool], function: Callable[..., Any]) -> bool:
    """Tell whether a function, or an object with such a `__call__`, is of that kind."""
    return kind(function) or kind(getattr(function, "__call__", None))  # noqa: B004  # the function itself is wanted


def _called(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _naming(name: str | Callable[..., str], function: Callable[..., Any]) -> Callable[..., str]:
    """Return what turns a call's arguments into the lease's name. What can be wrong about it is wrong now."""
    if callable(name):
        return name
    if not isinstance(name, str):
        raise ConfigurationError(f"name must be text or a callable, not {name!r}")
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(name) if field is not None]
    except ValueError as error:
        raise ConfigurationError(f"name is no usable template: {name!r} ({error})") from None
    if not fields:
        plain = options.text(name.format(), "name")
        return lambda *_args, **_kwargs: plain
    signature = inspect.signature(function)
    unknown = sorted({root for field in fields if (root := _root(field)) not in signature.parameters})
    if unknown:
        raise ConfigurationError(
            f"name {name!r} refers to {', '.join(map(repr, unknown))}, which {_called(function)}{signature} "
            "does not take"
        )

    def named(*args: Any, **kwargs: Any) -> str:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return name.format(**bound.arguments)

    return named


def _root(field: str) -> str:
    return field.partition(".")[0].partition("[")[0]
