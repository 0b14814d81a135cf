"""The keyword arguments of the primitives, for type checkers: what `PGLease.lock(…)` passes on to `Lock`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from pglease.handles import HeldLease
from pglease.options import Duration, OnLoss, OnLost
from pglease.records import Lease
from pglease.slots import OncePer


class LockOptions(TypedDict, total=False):
    """See `Lock`."""

    env_prefix: str
    reentrant: bool
    min_hold: Duration | None
    max_hold: Duration | None
    metadata: Mapping[str, Any] | None
    heartbeat: bool
    fair: bool
    on_lost: OnLost


class TaskLockOptions(TypedDict, total=False):
    """See `TaskLock`."""

    env_prefix: str
    min_hold: Duration | None
    max_hold: Duration | None
    once_per: OncePer | None
    metadata: Mapping[str, Any] | None
    heartbeat: bool
    on_lost: OnLost


class ElectionOptions(TypedDict, total=False):
    """See `LeaderElection`."""

    env_prefix: str
    metadata: Mapping[str, Any] | None
    on_started: Callable[[HeldLease], object] | None
    on_stopped: Callable[[], object] | None
    on_new_leader: Callable[[Lease], object] | None
    defer: Duration
    on_lost: OnLoss


class AsyncElectionOptions(TypedDict, total=False):
    """See `LeaderElection`; what is called back is a matter of threads."""

    env_prefix: str
    metadata: Mapping[str, Any] | None
    defer: Duration
    on_lost: OnLoss


class ReadWriteOptions(TypedDict, total=False):
    """See `ReadWriteLock`."""

    env_prefix: str
    max_hold: Duration | None
    metadata: Mapping[str, Any] | None
    on_lost: OnLost


class SemaphoreOptions(TypedDict, total=False):
    """See `Semaphore`."""

    env_prefix: str
    min_hold: Duration | None
    max_hold: Duration | None
    metadata: Mapping[str, Any] | None
    fair: bool
    on_lost: OnLost


class GroupOptions(TypedDict, total=False):
    """See `PGLease.acquire_many`."""

    raise_on_failure: bool
    wait: Duration | None
    max_hold: Duration | None
    metadata: Mapping[str, Any] | None
    on_lost: OnLost
