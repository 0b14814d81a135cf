"""The one clock beliefs are counted on: seconds since boot, suspend included.

`time.monotonic()` stands still while a Linux machine sleeps, so a laptop or a resumed VM would wake up believing in a
lease that lapsed hours ago. CLOCK_BOOTTIME goes on counting. Elsewhere (macOS, Windows) monotonic is the best there is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

now: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)
"""Return the seconds since boot."""
