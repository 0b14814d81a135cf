"""`singleton_task`: one call at a time among all processes."""

from __future__ import annotations

import functools
import inspect
import logging
import string
import sys
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from dataclasses import replace
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    cast,
    final,
    overload,
)

from pglease import current, options
from pglease.errors import ConfigurationError
from pglease.handles import HeldLease, NotAcquired
from pglease.options import HoldOptions
from pglease.slots import OncePer
from pglease.slots import once_per as slots_of
from pglease.taking import not_acquired

if TYPE_CHECKING:
    from pglease.client import PGLease

log = logging.getLogger("pglease")

P = ParamSpec("P")
Q = ParamSpec("Q")
S = TypeVar("S")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


Outcome: TypeAlias = Literal["ran", "raised", "skipped"]
"""What became of a call: its body ran to its end, or raised, or somebody else had the lease."""


@final
class Skipped:
    """What a skipped call answers with `on_skip=SKIPPED`, to tell it from a call that returned None. It is false."""

    def __bool__(self) -> Literal[False]:
        return False

    def __repr__(self) -> str:
        return "SKIPPED"

    def __reduce__(self) -> str:
        return "SKIPPED"  # pickled and copied, it is still the one


SKIPPED = Skipped()


class SingletonTask(Protocol[P, R_co]):
    """A decorated function."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call it, if the lease is got."""

    def last_outcome(self) -> Outcome | None:
        """Return what became of the last call from this thread or task: "ran", "raised" or "skipped"; None before."""

    @overload
    def __get__(self, instance: None, owner: type, /) -> Self: ...
    @overload
    def __get__(
        self: SingletonTask[Concatenate[S, Q], R], instance: S, owner: type | None = ..., /
    ) -> SingletonTask[Q, R]: ...


class TaskDecorator(Protocol):
    """What `singleton_task` returns: a skipped call answers None."""

    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]]
    ) -> SingletonTask[P, Coroutine[Any, Any, R | None]]: ...
    @overload
    def __call__(self, function: Callable[P, R]) -> SingletonTask[P, R | None]: ...


def late_singleton_task(
    client: Callable[[], PGLease],
    name: str | Callable[..., str],
    ttl: options.Duration = 60,
    skip_if_locked: bool = True,
    *,
    on_skip: Any = None,
    wait: options.Duration | None = None,
    min_hold: options.Duration | None = None,
    max_hold: options.Duration | None = None,
    once_per: OncePer | None = None,
) -> TaskDecorator:
    """Return the decorator of a client that is looked up at each call. Arguments as for `PGLease.singleton_task`."""
    checked = name if isinstance(name, str) and not ("{" in name or "}" in name) else "checked at each call"
    slots = None if once_per is None else slots_of(once_per)
    wanted = options.hold_options(checked, ttl, wait=wait, min_hold=min_hold, max_hold=max_hold, once_per=slots)
    return singleton_decorator(client, name, wanted, skip_if_locked=skip_if_locked, on_skip=on_skip)


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

    def decorate(function: Any = None) -> Callable[..., Any]:
        _refuse_generators(function)
        calls = _Calls(client, naming(name, function), wanted, skip_if_locked=skip_if_locked, on_skip=on_skip)
        wrap = _async_task if _is(inspect.iscoroutinefunction, function) else _sync_task
        task: Any = wrap(function, calls)
        task.last_outcome = calls.last.get
        return task  # type: ignore[no-any-return]

    return cast("TaskDecorator", decorate)


class _Calls:
    """What all calls of one decorated function share."""

    def __init__(
        self,
        client: Callable[[], PGLease],
        named: Callable[..., str],
        wanted: HoldOptions,
        *,
        skip_if_locked: bool,
        on_skip: Any,
    ) -> None:
        self.client = client
        self._named = named
        self._wanted = wanted
        self._skip_if_locked = skip_if_locked
        self._on_skip = on_skip
        self.last: ContextVar[Outcome | None] = ContextVar("pglease_last_outcome", default=None)

    def wanted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> HoldOptions:
        """Return what this call asks for."""
        return replace(self._wanted, name=options.text(self._named(*args, **kwargs), "name"))

    def skipped(self, refused: NotAcquired, wanted: HoldOptions) -> Any:
        """Return what a call answers that did not get the lease."""
        self.last.set("skipped")
        facts = {"lease_name": refused.name, "lease_outcome": "skip"}
        log.info("a call is skipped: the lease %r is held by %r", refused.name, refused.held_by, extra=facts)
        if callable(self._on_skip):
            return self._on_skip(refused)
        if self._on_skip is not None or self._skip_if_locked:
            return self._on_skip
        raise not_acquired(refused, wanted)


def _sync_task(function: Callable[..., Any], calls: _Calls) -> Callable[..., Any]:
    @functools.wraps(function)
    def task(*args: Any, **kwargs: Any) -> Any:
        wanted, client = calls.wanted(args, kwargs), calls.client()
        taken = client.taking.take(wanted)
        if isinstance(taken, NotAcquired):
            return calls.skipped(taken, wanted)
        calls.last.set("raised")  # unless it gets to its end
        with _Block(client, taken):
            result = function(*args, **kwargs)
        calls.last.set("ran")
        return result

    return task


def _async_task(function: Callable[..., Any], calls: _Calls) -> Callable[..., Any]:
    @functools.wraps(function)
    async def task(*args: Any, **kwargs: Any) -> Any:
        wanted, client = calls.wanted(args, kwargs), calls.client()
        taken = await client.taking.atake(wanted)
        if isinstance(taken, NotAcquired):
            answer = calls.skipped(taken, wanted)
            return await answer if inspect.isawaitable(answer) else answer
        calls.last.set("raised")  # unless it gets to its end
        async with _Block(client, taken):
            result = await function(*args, **kwargs)
        calls.last.set("ran")
        return result

    return task


class _Block:
    """The stretch of a call during which the lease is held."""

    def __init__(self, client: PGLease, lease: HeldLease) -> None:
        self._client = client
        self._lease = lease
        lease._hold.in_block = True

    def __enter__(self) -> None:
        current.enter(self._lease)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        current.leave(self._lease)
        self._client.taking.leave(self._lease._hold, error)

    async def __aenter__(self) -> None:
        current.enter(self._lease)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        current.leave(self._lease)
        await self._client.taking.aleave(self._lease._hold, error)


def _refuse_generators(function: Any) -> None:
    if isinstance(function, staticmethod | classmethod):
        raise ConfigurationError("singleton_task goes below @staticmethod and @classmethod, next to the function")
    if not callable(function):
        raise ConfigurationError(
            f"singleton_task decorates functions, methods and coroutine functions, not {function!r}; it is written "
            'with the name of a lease, @leases.singleton_task("report")'
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


def naming(name: str | Callable[..., str], function: Callable[..., Any]) -> Callable[..., str]:
    """Return what turns a call's arguments into the lease's name. What can be wrong about it is wrong now.

    Args:
        name: plain text; a template over the arguments by name (`"report:{tenant}"`) or by place (`"report:{0}"`, the
            first after `self`), however they are passed; or a callable that is given them.
        function: what will be called.

    Raises:
        ConfigurationError: no usable template, or it refers to what `function` does not take.
    """
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
    places = _places(signature)
    unknown = sorted({root for field in fields if not _is_taken(root := _root(field), signature, places)})
    if unknown:
        raise ConfigurationError(
            f"name {name!r} refers to {', '.join(map(repr, unknown))}, which {_called(function)}{signature} "
            "does not take"
        )

    def named(*args: Any, **kwargs: Any) -> str:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return name.format(*bound.args[places.start :], **bound.arguments)

    return named


def _root(field: str) -> str:
    return field.partition(".")[0].partition("[")[0]


def _places(signature: inspect.Signature) -> range:
    """Return which arguments can be told by their place."""
    kinds = [each.kind for each in signature.parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        end = sys.maxsize
    else:
        end = sum(
            kind in {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD} for kind in kinds
        )
    return range(next(iter(signature.parameters), "") in {"self", "cls"}, end)


def _is_taken(root: str, signature: inspect.Signature, places: range) -> bool:
    return int(root) < len(places) if root.isdecimal() else root in signature.parameters
