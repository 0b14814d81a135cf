"""The end of a process that must not outlive its lease (`on_lost="exit"`).

A thread cannot be stopped from outside, so work that does not look at its lease goes on after a loss. This stops it
together with everything else: no `finally` runs, nothing is flushed, and whoever supervises the process starts another.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from pglease import watchdog

log = logging.getLogger("pglease")

EXIT_CODE = 76
"""Also of `pglease run`, where a lease was lost."""
LONGEST_NOTICE = 2.0
LAST_WORDS = 0.2
"""Seconds for callbacks and logs once somebody else may hold the lease already."""


@dataclass(eq=False, slots=True)
class _Exit:
    due: float

    def overdue(self) -> None:
        """End the process, here and now."""
        os._exit(EXIT_CODE)


def notice(ttl: float) -> float:
    """Return by how many seconds a loss is declared before it is time to be gone: a tenth of ttl, at most 2 s."""
    return min(LONGEST_NOTICE, ttl / 10)


def plan(name: str, at: float) -> None:
    """End this process at a moment on the boot clock. Cannot be called off."""
    log.critical("the lease %r was lost: this process ends, with code %d", name, EXIT_CODE, extra={"lease_name": name})
    watchdog.watch(_Exit(at))
