"""What a forked child must forget: it owns none of its parent's connections, threads, locks or leases.

Whoever has such things registers here how to forget them; that is called in the child, before other code runs there.
Locks are replaced, not released: a thread that held one at the fork does not exist in the child.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

log = logging.getLogger("pglease")

T = TypeVar("T")


class Restless(Protocol):
    """Something that must not be at work while the process forks."""

    def rest(self) -> None:
        """Come to rest, before the fork. Takes a bounded time and raises nothing."""

    def resume(self) -> None:
        """Go on, in the parent."""


_inheritance: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()
_restless: weakref.WeakSet[Restless] = weakref.WeakSet()


class _Here(threading.local):
    """What this thread brought to rest: two threads may fork at once."""

    def __init__(self) -> None:
        self.resting: list[Restless] = []


_here = _Here()
_graveyard: list[object] = []


def forget_in_children(thing: T, forget: Callable[[T], None]) -> None:
    """Call `forget(thing)` in every child that is forked from now on. Keeps no strong reference to `thing`.

    Args:
        thing: something that belongs to the process that made it.
        forget: drops what is the parent's, without using or closing it; a function of the class, not a bound method.
    """
    _inheritance[thing] = forget


def rest_at_forks(thing: Restless) -> None:
    """Call `thing.rest()` before every fork from now on and `thing.resume()` after it. Keeps no strong reference."""
    _restless.add(thing)


def bury(thing: object) -> None:
    """Keep an inherited object for ever: its finalizer would act on sockets that are the parent's."""
    _graveyard.append(thing)


def _before_fork() -> None:
    _here.resting = list(_restless)
    for thing in _here.resting:
        thing.rest()


def _after_fork_in_parent() -> None:
    while _here.resting:
        _here.resting.pop().resume()


def _after_fork_in_child() -> None:
    _here.resting = []
    for thing, forget in list(_inheritance.items()):
        try:
            forget(thing)
        except Exception:  # whoever comes after it would keep its parent's locks
            log.exception("a forked child could not forget what its parent has in %s", type(thing).__name__)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
