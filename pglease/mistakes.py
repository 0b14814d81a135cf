"""What people do by mistake in their first hour, answered with the sentence that says what to do instead.

Without these a forgotten `with` is worse than an error: a block that was not entered is true. Type checkers refuse all
of it by themselves, as long as they do not see the methods below: hence `TYPE_CHECKING`.
"""

from __future__ import annotations

import inspect
import sys
from opcode import opmap
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:

    class NotTheBlockItself:
        """For what `acquire` returns."""

    class OnlyWith:
        """For what is entered by `with`."""

    class OnlyAsyncWith:
        """For what is entered by `async with`."""

    class NotHeld:
        """For the answer that somebody else has the lease."""

        __slots__ = ()

else:

    class NotTheBlockItself:
        """For what `acquire` returns: it is no lease, and neither true nor false."""

        def __bool__(self) -> NoReturn:
            raise TypeError(f"nothing is acquired yet: {_ENTER}, or ask by `try_acquire`, which is True or False")

        def __await__(self) -> NoReturn:
            raise TypeError(f"a block is entered, not awaited, and nothing is acquired yet: {_ENTER}")

        def __getattr__(self, name: str) -> NoReturn:
            what = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{what}: nothing is acquired yet; {_ENTER}" if name in _of_a_lease() else what)

    class OnlyWith:
        """For what is entered by `with`."""

        async def __aenter__(self) -> NoReturn:
            raise TypeError("`async with` needs an AsyncPGLease: this belongs to a PGLease, which is for plain `with`")

        async def __aexit__(self, *error: object) -> None:
            """Python looks for it before it enters."""

    class OnlyAsyncWith:
        """For what is entered by `async with`."""

        def __enter__(self) -> NoReturn:
            raise TypeError("plain `with` needs a PGLease: this belongs to an AsyncPGLease, which is for `async with`")

        def __exit__(self, *error: object) -> None:
            """Python looks for it before it enters."""

    class NotHeld:
        """For the answer that somebody else has the lease."""

        __slots__ = ()

        def __getattr__(self, name: str) -> NoReturn:
            what = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name not in _of_a_lease():
                raise AttributeError(what)
            raise AttributeError(f"{what}: {self.held_by!r} has the lease {self.name!r}; look first, by `if lease:`")


def refuse_to_be_awaited() -> None:
    """Raise if whoever called our caller is about to await the answer; call it before anything is done.

    `True` cannot be awaited, which Python says when the lease is held already, and by nobody who would give it back.
    What the calling code is about to do with the answer stands behind the call, in its byte code.
    """
    frame = sys._getframe(1).f_back  # noqa: SLF001  # there is no other door to it, and `inspect` uses this one
    if frame is None or not frame.f_code.co_flags & _ASYNCHRONOUS:
        return
    code = frame.f_code.co_code
    behind = frame.f_lasti + 2
    while behind < len(code) and code[behind] == _CACHE:
        behind += 2
    if behind < len(code) and code[behind] == _AWAIT:
        raise TypeError(
            "`await` needs an AsyncPGLease: this belongs to a PGLease, which is not awaited. Nothing was acquired"
        )


_ASYNCHRONOUS = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_CACHE, _AWAIT = opmap.get("CACHE", -1), opmap.get("GET_AWAITABLE", -1)
_ENTER = "write `with leases.acquire(…) as lease:` (`async with` on asyncio) and ask `lease`"


def _of_a_lease() -> frozenset[str]:
    """Return what a lease that is held can be asked."""
    from pglease.handles import HeldLease  # it knows us

    return frozenset(name for name in dir(HeldLease) if not name.startswith("_"))
