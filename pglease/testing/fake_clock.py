"""A clock that stands still until it is told to go on."""

from __future__ import annotations


class FakeClock:
    """Stands in for the boot clock: `MemoryBackend(clock=FakeClock())`.

    Args:
        start: seconds it shows at first. Default 1000.
    """

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start

    def __call__(self) -> float:
        """Return the seconds it shows."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Go on by `seconds`; never back.

        Raises:
            ValueError: they are negative.
        """
        if seconds < 0:
            raise ValueError(f"time does not go back: {seconds!r}")
        self._now += seconds
