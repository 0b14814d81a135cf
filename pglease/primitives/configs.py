"""The options of the primitives as frozen records: built and checked once, used for many names, changed live.

`Lock.from_config(leases, name, config)` takes what code says and reads no environment. The name is no option: who one
is cannot be reconfigured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeAlias, get_args

from pglease import options
from pglease.errors import ConfigurationError, NotOwnedError
from pglease.handles import HeldLease
from pglease.options import Duration, OnLoss, OnLost
from pglease.slots import OncePer
from pglease.slots import once_per as slots_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LockConfig:
    """What a `Lock` may be told; see there.

    Raises:
        ConfigurationError: every broken rule at once, when it is built.
    """

    ttl: Duration = 60
    reentrant: bool = False
    min_hold: Duration | None = None
    max_hold: Duration | None = None
    metadata: Mapping[str, Any] | None = None
    heartbeat: bool = True
    fair: bool = False
    on_lost: OnLost = "raise"

    def __post_init__(self) -> None:
        _check(self, flags=("reentrant",))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLockConfig:
    """What a `TaskLock` may be told; see there.

    Raises:
        ConfigurationError: every broken rule at once, when it is built.
    """

    ttl: Duration = 60
    min_hold: Duration | None = None
    max_hold: Duration | None = None
    once_per: OncePer | None = None
    metadata: Mapping[str, Any] | None = None
    heartbeat: bool = False
    on_lost: OnLost = "raise"

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderElectionConfig:
    """What a `LeaderElection` may be told, but for what it calls; see there.

    Raises:
        ConfigurationError: every broken rule at once, when it is built.
    """

    ttl: Duration = 15
    metadata: Mapping[str, Any] | None = None
    defer: Duration = 0
    on_lost: OnLoss = "log"

    def __post_init__(self) -> None:
        _check(self, on_lost=get_args(OnLoss))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadWriteLockConfig:
    """What a `ReadWriteLock` may be told; see there.

    Raises:
        ConfigurationError: every broken rule at once, when it is built.
    """

    ttl: Duration = 60
    max_hold: Duration | None = None
    metadata: Mapping[str, Any] | None = None
    on_lost: OnLost = "raise"

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SemaphoreConfig:
    """What a `Semaphore` may be told; see there.

    Raises:
        ConfigurationError: every broken rule at once, when it is built.
    """

    limit: int
    ttl: Duration = 60
    min_hold: Duration | None = None
    max_hold: Duration | None = None
    metadata: Mapping[str, Any] | None = None
    fair: bool = False
    on_lost: OnLost = "raise"

    def __post_init__(self) -> None:
        _check(self)


Config: TypeAlias = LockConfig | TaskLockConfig | LeaderElectionConfig | ReadWriteLockConfig | SemaphoreConfig


def _check(config: Config, *, flags: tuple[str, ...] = (), on_lost: tuple[str, ...] = ()) -> None:
    """Check all but the name, by the rules that a hold is checked by."""
    given = arguments(config)
    with options.all_problems() as problems:
        if on_lost:
            problems.check(options.choice, config.on_lost, "on_lost", on_lost)
        for name in flags:
            problems.check(options.flag, given.pop(name), name)
        if "limit" in given:
            problems.check(options.limit, given.pop("limit"), "limit")
        if "defer" in given:
            problems.check(options.seconds, given.pop("defer"), "defer", zero=True)
        if (slots := given.pop("once_per", None)) is not None:
            problems.check(slots_of, slots)
        problems.check(options.hold_options, "any", **given)


def arguments(config: Config) -> dict[str, Any]:
    """Return a record as keyword arguments."""
    return {name: getattr(config, name) for name in config.__slots__}


def arguments_of(config: object, wanted: type) -> dict[str, Any]:
    """Return a record of the wanted kind as keyword arguments.

    Raises:
        ConfigurationError: it is of another kind.
    """
    if not isinstance(config, wanted):
        raise ConfigurationError(f"config must be a {wanted.__name__}, not {config!r}")
    return arguments(config)  # type: ignore[arg-type]  # all that are wanted are ours


def renew_by(ttl: float, lease: HeldLease | None) -> None:
    """Renew a hold by another ttl; one that is over is left alone."""
    if lease is not None and lease.held and lease._hold.ttl != ttl:
        with contextlib.suppress(NotOwnedError):  # it ended in this moment
            lease.renew(ttl)


def defaults(config: type) -> dict[str, Any]:
    """Return the default of each option that has one."""
    return {field.name: field.default for field in fields(config) if field.default is not MISSING}


KINDS: dict[str, type] = {
    "lock": LockConfig,
    "task_lock": TaskLockConfig,
    "leader_election": LeaderElectionConfig,
    "read_write_lock": ReadWriteLockConfig,
    "semaphore": SemaphoreConfig,
}
"""By the name of the client's method."""
