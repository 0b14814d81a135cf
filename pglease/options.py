"""What users may ask for, checked once, every broken rule named with its value.

Pure: text and numbers in, floats of seconds out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args

import durationpy

from pglease.errors import ConfigurationError
from pglease.records import Handover

if TYPE_CHECKING:
    from pglease.slots import Slots

Duration: TypeAlias = float | str | timedelta
"""Seconds as a number, a `timedelta`, or text such as "90s", "5m", "1h30m", "500ms"."""

OnLost: TypeAlias = Literal["raise", "log", "exit"]
"""What a loss does to a block: leaving it raises, or only the log tells; or the process ends. See `PGLease.acquire`."""
AsyncOnLost: TypeAlias = Literal["raise", "cancel", "log", "exit"]
"""The same where there is a task to cancel. See `AsyncPGLease.acquire`."""
OnLoss: TypeAlias = Literal["log", "exit"]
"""The same where there is no block to leave. See `LeaderElection`."""

MAX_NAME = 255
MAX_STEM = 240
MOST_SLOTS = 10_000
MAX_METADATA_BYTES = 8192
MAX_METADATA_DEPTH = 16
MAX_DURATION = 100 * 365 * 86400.0
"""A hundred years: far beyond any lease, far below where timestamps overflow."""
RENEWALS_PER_TTL = 3
"""Two may fail before the deadline."""
WARN_AFTER = 60.0
"""Seconds after which the log tells whom a waiter waits for."""
_PLAIN_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?\Z")
_DURATION = re.compile(r"-?([0-9.]+[a-zA-Z\u00b5\u03bc]+)+\Z")
_UNFIT_CHARACTER = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

T = TypeVar("T")


class Problems:
    """Collects broken rules so that the caller hears of all of them at once."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def check(self, reading: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call `reading`; a broken rule is noted, and the (then unusable) None comes back."""
        try:
            return reading(*args, **kwargs)
        except ConfigurationError as broken:
            self._found.extend(broken.problems)
            return None  # type: ignore[return-value]  # never used: `settle` raises before anybody reads it

    def note(self, sentence: str) -> None:
        """Note a broken rule."""
        self._found.append(sentence)

    def settle(self) -> None:
        """Raise `ConfigurationError` with all that was noted, if anything was."""
        if self._found:
            raise ConfigurationError(*self._found)


@contextmanager
def all_problems() -> Iterator[Problems]:
    """Yield a `Problems` and settle it at the end."""
    problems = Problems()
    yield problems
    problems.settle()


def seconds(value: Duration, argument: str, *, zero: bool = False, forever: bool = False) -> float:
    """Read a duration.

    Args:
        value: seconds as int or float, a `timedelta`, or text ("90s", "5m", "1h30m", "500ms", "90").
        argument: its name, for the message.
        zero: whether 0 is allowed.
        forever: whether infinity is allowed.

    Raises:
        ConfigurationError: for anything else, naming the argument, the value and the rule.
    """
    number = _as_number(value, argument)
    if math.isnan(number):
        raise ConfigurationError(f"{argument} must be a duration, not {value!r}")
    if number == math.inf:
        if forever:
            return number
        raise ConfigurationError(f"{argument} must be finite, not {value!r}")
    if number < 0 or (number == 0 and not zero):
        raise ConfigurationError(f"{argument} must be {'0 or more' if zero else 'more than 0'} seconds, not {value!r}")
    if number > MAX_DURATION:
        raise ConfigurationError(f"{argument} must be at most 100 years, not {value!r}")
    return number


def _as_number(value: Duration, argument: str) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigurationError(
            f"{argument} must be seconds, a timedelta or text such as '90s' or '5m', not {value!r}"
        )
    if isinstance(value, str):
        return _from_text(value.strip(), argument)
    try:
        return float(value)
    except OverflowError:
        raise ConfigurationError(f"{argument} must be at most 100 years, not {value!r}") from None


def _from_text(text: str, argument: str) -> float:
    if _PLAIN_NUMBER.match(text):
        return float(text)
    if text.lower() in ("inf", "infinity", "forever"):
        return math.inf
    duration: timedelta | None = None
    if _DURATION.match(text):  # durationpy also takes signs in the middle and digits of other scripts
        with suppress(ValueError, OverflowError, durationpy.DurationError):
            duration = durationpy.from_str(text)
    if duration is None:
        raise ConfigurationError(f"{argument} must be a duration such as '90s', '5m' or '1h30m', not {text!r}")
    return duration.total_seconds()


def wait(timeout: Duration | None, argument: str) -> float:
    """Read how long a call may wait: None is for ever, 0 asks once."""
    return math.inf if timeout is None else seconds(timeout, argument, zero=True, forever=True)


def text(value: str, argument: str) -> str:
    """Check a name or a label: 1 to 255 characters, no control characters, no lone surrogates; nothing is changed."""
    if not isinstance(value, str):
        raise ConfigurationError(f"{argument} must be text, not {value!r}")
    if not value:
        raise ConfigurationError(f"{argument} must not be empty")
    if len(value) > MAX_NAME:
        shown = f"{value[:40]!r}…"
        raise ConfigurationError(f"{argument} must have at most {MAX_NAME} characters, not {len(value)} ({shown})")
    if (unfit := _UNFIT_CHARACTER.search(value)) is not None:
        raise ConfigurationError(
            f"{argument} must have no control characters and no lone surrogates, not {unfit.group()!r} ({value!a})"
        )
    return value


def stem(value: str, argument: str) -> str:
    """Check a name that others are made of, by appending to it: 1 to 240 characters."""
    if len(text(value, argument)) > MAX_STEM:
        raise ConfigurationError(f"{argument} must have at most {MAX_STEM} characters here, not {len(value)}")
    return value


def prefix(value: str, argument: str = "prefix") -> str:
    """Check the beginning of a name; empty means all names."""
    return value if value == "" else text(value, argument)


def count(value: object, argument: str, *, least: int = 1) -> int:
    """Check a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{argument} must be a whole number of at least {least}, not {value!r}")
    return value


def limit(value: object, argument: str) -> int:
    """Check how many may hold a semaphore at a time: 1 to 10,000."""
    number = count(value, argument)
    if number > MOST_SLOTS:
        raise ConfigurationError(f"{argument} must be at most {MOST_SLOTS}, not {value!r}")
    return number


def choice(value: str, argument: str, allowed: tuple[str, ...]) -> str:
    """Check one of a few words."""
    if value not in allowed:
        raise ConfigurationError(f"{argument} must be one of {', '.join(map(repr, allowed))}, not {value!r}")
    return value


def metadata(value: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Check what a holder attaches: a JSON object of at most 8192 bytes and 16 levels, without NaN; returns a copy."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"metadata must be a mapping of text to JSON values, not {value!r}")
    _check_levels(value, 1)
    try:
        written = json.dumps(value, default=dict, allow_nan=False, ensure_ascii=False)
        size = len(written.encode("utf-8"))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"metadata must be JSON without NaN or lone surrogates: {error}") from None
    if size > MAX_METADATA_BYTES:
        raise ConfigurationError(f"metadata must have at most {MAX_METADATA_BYTES} bytes as JSON, not {size}")
    copy: dict[str, Any] = json.loads(written)
    return copy


def _check_levels(value: Any, level: int) -> None:
    """Refuse what JSON or PostgreSQL would change in silence or not take at all."""
    if isinstance(value, str) and "\0" in value:
        raise ConfigurationError("metadata must have no NUL characters")
    if not isinstance(value, Mapping | list | tuple):
        return
    if level > MAX_METADATA_DEPTH:
        raise ConfigurationError(f"metadata must have at most {MAX_METADATA_DEPTH} levels")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigurationError(f"metadata must have text for keys, not {key!r}")
            _check_levels(key, level)
    for inner in value.values() if isinstance(value, Mapping) else value:
        _check_levels(inner, level + 1)


@lru_cache(maxsize=64)  # the same few of thousands of leases, asked at each renewal
def margin_for(ttl: float, margin: float | None = None) -> float:
    """Return how long before the store a holder stops believing.

    5 % of ttl, at least 0.25 s, never more than a quarter of ttl. It pays for clocks that run at different rates; 5 %
    covers a server clock that is being slewed as fast as ntpd ever does.
    """
    wanted = max(0.25, 0.05 * ttl) if margin is None else margin
    return min(wanted, ttl / 4)


def interval_for(ttl: float, heartbeat_interval: float | None = None) -> float:
    """Return the seconds between renewals: a third of ttl, or `heartbeat_interval` if that is sooner."""
    third = ttl / RENEWALS_PER_TTL
    return third if heartbeat_interval is None else min(heartbeat_interval, third)


def renewal_box(ttl: float, margin: float, interval: float) -> float:
    """Return how long one renewal may take, so that after a good one two whole tries fit before the deadline."""
    return min(5.0, 0.45 * (ttl - margin - interval))


@lru_cache(maxsize=64)
def rhythm(ttl: float, margin: float, heartbeat_interval: float | None = None) -> tuple[float, float]:
    """Return `interval_for` and `renewal_box`."""
    interval = interval_for(ttl, heartbeat_interval)
    return interval, renewal_box(ttl, margin, interval)


@dataclass(frozen=True, slots=True)
class HoldOptions:
    """One acquisition's options, checked and in seconds."""

    name: str
    ttl: float
    wait: float | None = None
    min_hold: float = 0.0
    max_hold: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    heartbeat: bool = True
    fair: bool = False
    on_lost: str = "raise"
    once_per: Slots | None = None
    warn_after: float | None = WARN_AFTER
    adopts: str | None = None
    """The id of the hold that is gone on with, instead of asking for a free name."""


def hold_options(
    name: str,
    ttl: Duration,
    *,
    wait: Duration | None = None,
    min_hold: Duration | None = None,
    max_hold: Duration | None = None,
    metadata: Mapping[str, Any] | None = None,
    heartbeat: bool = True,
    fair: bool = False,
    on_lost: str = "raise",
    once_per: Slots | None = None,
    in_a_task: bool = False,
    warn_after: Duration | None = WARN_AFTER,
) -> HoldOptions:
    """Check one acquisition's arguments; all that is wrong is said at once.

    Args:
        in_a_task: whether there is a task that could be cancelled.
        name, ttl, wait, min_hold, max_hold, metadata, heartbeat, fair, on_lost, once_per: as for `PGLease.acquire` and
            `singleton_task`.

    Raises:
        ConfigurationError: with one sentence for each broken rule.
    """
    if (
        wait is None
        and min_hold is None
        and max_hold is None
        and metadata is None
        and heartbeat is True
        and fair is False
        and on_lost == "raise"
        and once_per is None
        and warn_after == WARN_AFTER
    ):
        try:  # `suppress` takes longer than the look
            return _usual(name, ttl)
        except (TypeError, ConfigurationError):
            pass  # what has no hash is no name and no duration either; the checks below say all that is wrong
    outcomes = get_args(AsyncOnLost if in_a_task else OnLost)
    return _checked(
        name, ttl, wait, min_hold, max_hold, metadata, heartbeat, fair, on_lost, outcomes, once_per, warn_after
    )


def adoption(handover: Handover | str, ttl: Duration | None = None, **hold: Any) -> HoldOptions:
    """Check the arguments of `adopt`."""
    found = Handover.read(handover) if isinstance(handover, str) else handover
    if not isinstance(found, Handover):
        raise ConfigurationError(f"handover must be what `transfer` answered, or its text, not {type(found).__name__}")
    return replace(hold_options(found.name, found.ttl if ttl is None else ttl, **hold), adopts=found.lease_id)


def waiting_options(
    name: str, ttl: Duration, timeout: Duration | None, poll_interval: Duration, **hold: Any
) -> tuple[HoldOptions, float]:
    """Check the arguments of `wait_for_lease`; return what is wanted, and the longest pause between two looks.

    Raises:
        ConfigurationError: with one sentence for each broken rule.
    """
    with all_problems() as problems:
        until = float("inf") if timeout is None else problems.check(seconds, timeout, "timeout", forever=True)
        poll = problems.check(seconds, poll_interval, "poll_interval")
        wanted = problems.check(hold_options, name, ttl, wait=until, **hold)
    return wanted, poll


def are_usual(name: str, ttl: Duration) -> bool:
    """Tell at little cost whether a hold may be asked for by this name and ttl alone; False for what breaks a rule."""
    try:
        text(name, "name")
        _check_ttl(ttl)
    except (TypeError, ConfigurationError):  # what has no hash is no duration either
        return False
    return True


@lru_cache(maxsize=64, typed=True)
def _check_ttl(ttl: Duration) -> None:
    seconds(ttl, "ttl")


@lru_cache(maxsize=1024, typed=True)  # typed, since True is 1 otherwise
def _usual(name: str, ttl: Duration) -> HoldOptions:
    """Check the usual call: the same few names are asked for over and over, and a loser should pay for one look."""
    return HoldOptions(text(name, "name"), seconds(ttl, "ttl"))


def _checked(  # noqa: PLR0917  # called once, from right above, in the same order
    name: str,
    ttl: Duration,
    wait: Duration | None,
    min_hold: Duration | None,
    max_hold: Duration | None,
    attached: Mapping[str, Any] | None,
    heartbeat: bool,
    fair: bool,
    on_lost: str,
    outcomes: tuple[str, ...],
    once_per: Slots | None,
    warn_after: Duration | None,
) -> HoldOptions:
    with all_problems() as problems:
        options = HoldOptions(
            name=problems.check(text, name, "name"),
            ttl=problems.check(seconds, ttl, "ttl"),
            wait=None if wait is None else problems.check(seconds, wait, "wait", zero=True, forever=True),
            min_hold=0.0 if min_hold is None else problems.check(seconds, min_hold, "min_hold", zero=True),
            max_hold=None if max_hold is None else problems.check(seconds, max_hold, "max_hold"),
            metadata=problems.check(metadata, attached),
            heartbeat=problems.check(flag, heartbeat, "heartbeat"),
            fair=problems.check(flag, fair, "fair"),
            on_lost=problems.check(choice, on_lost, "on_lost", outcomes),
            once_per=once_per,
            warn_after=None if warn_after is None else problems.check(seconds, warn_after, "warn_after"),
        )
        if options.min_hold and options.max_hold and options.min_hold > options.max_hold:
            problems.note(f"min_hold ({options.min_hold:g} s) must not exceed max_hold ({options.max_hold:g} s)")
        if options.ttl and options.min_hold and options.min_hold > options.ttl and heartbeat is False:
            problems.note(
                f"min_hold ({options.min_hold:g} s) above ttl ({options.ttl:g} s) needs renewal, not heartbeat=False"
            )
    return options


def flag(value: bool, argument: str) -> bool:
    """Check a switch."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{argument} must be True or False, not {value!r}")
    return value
