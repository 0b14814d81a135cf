"""The one clock beliefs are counted on: seconds since boot, suspend included.

`time.monotonic()` stands still while a Linux machine sleeps, so a laptop or a resumed VM would wake up believing in a lease
that lapsed hours ago. CLOCK_BOOTTIME goes on counting. Elsewhere (macOS, Windows) monotonic is the best there is.
"""

from __future__ import annotations

import time

if hasattr(time, "CLOCK_BOOTTIME"):

    def now(_clock: int = time.CLOCK_BOOTTIME, _read=time.clock_gettime) -> float:  # type: ignore[no-untyped-def]
        """Return the seconds since boot."""
        return _read(_clock)  # type: ignore[no-any-return]

else:  # macOS and Windows
    now = time.monotonic
