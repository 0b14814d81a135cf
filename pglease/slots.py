"""Slots of time for work that runs once per slot: every hour, every night at three.

Pure, and in the store's time only: a slot is found from the moment the store wrote as the beginning of a hold. So a
worker whose own clock is in another year changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol, TypeAlias

from pglease import options
from pglease.errors import ConfigurationError, MissingDependencyError

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LEAST = 1e-6
ROUNDING = 0.001
"""Seconds added to what is left of a slot: a store may round, and the next grant must not fall into the same slot."""


class Slots(Protocol):
    """A partition of time."""

    def end(self, moment: datetime) -> datetime:
        """Return when the slot with `moment` in it ends: the next one's beginning."""


OncePer: TypeAlias = "options.Duration | Slots"
"""A duration ("1h"), a cron expression ("0 3 * * *", in UTC), or `Cron("0 3 * * *", "Europe/Berlin")`."""


@dataclass(frozen=True, slots=True)
class Every:
    """Slots of equal length, counted from 1970-01-01 00:00 UTC: `Every(3600)` are the hours of the day."""

    seconds: float

    def __post_init__(self) -> None:
        if self.seconds < _LEAST:
            raise ConfigurationError(f"once_per must be at least a microsecond, not {self.seconds!r} seconds")

    def end(self, moment: datetime) -> datetime:
        """See `Slots.end`."""
        since = (moment - _EPOCH) // timedelta(seconds=self.seconds)
        return _EPOCH + (since + 1) * timedelta(seconds=self.seconds)


@dataclass(frozen=True, slots=True)
class Cron:
    """Slots that begin when a cron expression fires.

    Args:
        expression: five fields, as Debian's cron reads them, its handling of summer time included.
        timezone: an IANA name. Default "UTC".

    Raises:
        ConfigurationError: an expression that never fires or cannot be read, a zone that nobody knows.
        MissingDependencyError: `cronsim` is not installed; the extra `cron` brings it.
    """

    expression: str
    timezone: str = "UTC"

    def __post_init__(self) -> None:
        self.end(_EPOCH)

    def end(self, moment: datetime) -> datetime:
        """See `Slots.end`."""
        from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

        try:
            from cronsim import CronSim, CronSimError
        except ImportError:
            raise MissingDependencyError(
                "a cron expression needs the package cronsim: install the extra, pglease[cron]"
            ) from None
        try:
            local = moment.astimezone(ZoneInfo(self.timezone))
            return next(CronSim(self.expression, local)).astimezone(UTC)
        except (ZoneInfoNotFoundError, ValueError):
            raise ConfigurationError(f"timezone must be an IANA name, not {self.timezone!r}") from None
        except (CronSimError, StopIteration):
            raise ConfigurationError(f"once_per is no usable cron expression: {self.expression!r}") from None


def once_per(value: OncePer) -> Slots:
    """Read what `once_per=` was given.

    Raises:
        ConfigurationError: neither a duration nor a cron expression.
    """
    if isinstance(value, str) and len(value.split()) > 1:
        return Cron(value)
    if isinstance(value, int | float | str | timedelta):
        return Every(options.seconds(value, "once_per"))
    if callable(getattr(value, "end", None)):
        return value
    raise ConfigurationError(f"once_per must be a duration, a cron expression or Cron(…), not {value!r}")


def left_of(slots: Slots, begin: datetime) -> float:
    """Return the seconds from `begin` (store time) to the end of its slot."""
    return (slots.end(begin) - begin).total_seconds() + ROUNDING
