"""What helps to test a backend, or code that uses leases: see docs/testing.md.

    with pglease.testing.always_acquire(): ...

Nothing is imported before it is used: pytest imports this package in every run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pglease.testing.databases import load_schema
    from pglease.testing.fake_clock import FakeClock
    from pglease.testing.switches import always_acquire, lose_after, never_acquire
    from pglease.testing.world import MovableClock, World

__all__ = ["FakeClock", "MovableClock", "World", "always_acquire", "load_schema", "lose_after", "never_acquire"]

_HOMES = {
    "FakeClock": "fake_clock",
    "MovableClock": "world",
    "World": "world",
    "always_acquire": "switches",
    "load_schema": "databases",
    "lose_after": "switches",
    "never_acquire": "switches",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
