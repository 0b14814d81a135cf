"""Which lease the running code is under, without passing the handle: a context variable.

Blocks enter it: `acquire`, the primitives, `singleton_task`. A task of asyncio inherits it, a new thread does not. Only
weak references are kept, so that a handle nobody remembers is still noticed.
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar

from pglease.errors import NotOwnedError
from pglease.handles import HeldLease

_current: ContextVar[tuple[weakref.ref[HeldLease], ...]] = ContextVar("pglease_current", default=())


def enter(lease: HeldLease) -> None:
    """Note that the code from here on is under `lease`."""
    _current.set((*_current.get(), weakref.ref(lease)))


def leave(lease: HeldLease) -> None:
    """Note that it is no more; harmless where it never was, as when a block is left by another thread."""
    under = _current.get()
    if under and under[-1]() is lease:  # as nearly always
        _current.set(under[:-1])
        return
    for place in reversed(range(len(under))):
        if under[place]() is lease:  # the innermost: a lock may be entered again in its own block
            _current.set(under[:place] + under[place + 1 :])
            return


def is_under(lease: HeldLease) -> bool:
    """Tell whether the running code is inside the block of `lease`."""
    return any(each() is lease for each in _current.get())


def current_lease(name: str | None = None) -> HeldLease | None:
    """Return the handle of the innermost block around the running code, or of the innermost for `name`; else None.

    It is returned also when the hold was lost meanwhile: ask `held`, or use `assert_held`. A task of asyncio inherits
    it, a new thread does not. In a task it is a `HeldLease`, too, whose `renew` and `release` block the loop.

    Args:
        name: the lease. Default None: whichever is the innermost.
    """
    for each in reversed(_current.get()):
        lease = each()
        if lease is not None and (name is None or lease.name == name):
            return lease
    return None


def assert_held(name: str | None = None) -> HeldLease:
    """Return the handle as `current_lease` does, if this process may still act by it.

    For functions that must never run without a lease, however they are called.

    Args:
        name: as for `current_lease`.

    Raises:
        LeaseLostError: the running code is under that lease, but it was lost.
        NotOwnedError: the running code is under no such lease, or it was released.

    Source:
        ShedLock's `LockAssert`.
    """
    lease = current_lease(name)
    if lease is not None:
        lease.raise_if_lost()
        if lease.held:
            return lease
    which = "a lease" if name is None else f"the lease {name!r}"
    how = "it was released" if lease is not None else "nothing around this call has taken it"
    raise NotOwnedError(f"this code must run under {which}: {how}", name=name or "")
