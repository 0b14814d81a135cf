"""What a forked child must forget: it owns none of its parent's connections, threads, locks or leases.

Whoever has such things registers here and gets its `forget` called in the child, before any other code runs there.
Locks are replaced, not released: a thread that held one at the fork does not exist in the child.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forgetful(Protocol):
    """Something that belongs to the process that made it."""

    def forget(self) -> None:
        """Drop what belongs to the parent, without using or closing it."""


_inheritance: weakref.WeakSet[Forgetful] = weakref.WeakSet()
_graveyard: list[object] = []


def forget_in_children(thing: Forgetful) -> None:
    """Call `thing.forget()` in every child that is forked from now on. Keeps no strong reference."""
    _inheritance.add(thing)


def bury(thing: object) -> None:
    """Keep an inherited object for ever: its finalizer would act on sockets that are the parent's."""
    _graveyard.append(thing)


def _after_fork_in_child() -> None:
    for thing in list(_inheritance):
        thing.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
