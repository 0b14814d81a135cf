"""One holder at a time, in the PostgreSQL you already run.

    import pglease

    with pglease.acquire("daily-report", ttl="5m") as lease:
        if lease:
            generate_report(fencing_token=lease.fencing_token)

The client is `PGLease`; what `with` binds is a `HeldLease` or a `NotAcquired`; what the store says is a `Lease`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pglease.backends import Backend, open_backend
from pglease.blocks import LeaseContext
from pglease.client import PGLease
from pglease.current import assert_held, current_lease
from pglease.decorator import SKIPPED
from pglease.default import (
    acquire,
    acquire_many,
    adopt,
    cleanup_expired,
    configure,
    default_client,
    force_release,
    get_lease,
    held,
    holding,
    leader_election,
    list_leases,
    lock,
    read_write_lock,
    release,
    renew,
    semaphore,
    singleton_task,
    task_lock,
    try_acquire,
    wait_for_lease,
)
from pglease.errors import (
    AcquireTimeout,
    AcquisitionError,
    BackendClosed,
    BackendError,
    BackendMisconfigured,
    BackendUnavailable,
    ConfigurationError,
    FencedError,
    HeartbeatError,
    LeaseLostError,
    MissingDependencyError,
    NotOwnedError,
    PgleaseError,
    ReentrantError,
    ReleaseError,
)
from pglease.events import Event, LeaseChange, Observer, Waiting
from pglease.handles import HeldLease, NotAcquired
from pglease.records import Handover, Lease, Loss, LossReason, Tenure
from pglease.slots import Cron

if TYPE_CHECKING:
    from pglease.aio import AsyncHeldLease, AsyncLeaseContext, AsyncPGLease
    from pglease.backends.hybrid import HybridPostgresBackend
    from pglease.backends.memory import MemoryBackend
    from pglease.backends.postgres import PostgresBackend
    from pglease.backends.redis import RedisBackend
    from pglease.backends.sqlite import SQLiteBackend
    from pglease.primitives.configs import (
        LeaderElectionConfig,
        LockConfig,
        ReadWriteLockConfig,
        SemaphoreConfig,
        TaskLockConfig,
    )
    from pglease.primitives.election import LeaderElection
    from pglease.primitives.lock import Lock
    from pglease.primitives.many import LeaseGroup
    from pglease.primitives.read_write import ReadWriteLock
    from pglease.primitives.semaphore import Semaphore
    from pglease.primitives.task_lock import TaskLock
    from pglease.signals import cancel_on_signals, install_signal_handlers

__version__ = "0.1.0"

__all__ = [
    "SKIPPED",
    "AcquireTimeout",
    "AcquisitionError",
    "AsyncHeldLease",
    "AsyncLeaseContext",
    "AsyncPGLease",
    "Backend",
    "BackendClosed",
    "BackendError",
    "BackendMisconfigured",
    "BackendUnavailable",
    "ConfigurationError",
    "Cron",
    "Event",
    "FencedError",
    "Handover",
    "HeartbeatError",
    "HeldLease",
    "HybridPostgresBackend",
    "LeaderElection",
    "LeaderElectionConfig",
    "Lease",
    "LeaseChange",
    "LeaseContext",
    "LeaseGroup",
    "LeaseLostError",
    "Lock",
    "LockConfig",
    "Loss",
    "LossReason",
    "MemoryBackend",
    "MissingDependencyError",
    "NotAcquired",
    "NotOwnedError",
    "Observer",
    "PGLease",
    "PgleaseError",
    "PostgresBackend",
    "ReadWriteLock",
    "ReadWriteLockConfig",
    "RedisBackend",
    "ReentrantError",
    "ReleaseError",
    "SQLiteBackend",
    "Semaphore",
    "SemaphoreConfig",
    "TaskLock",
    "TaskLockConfig",
    "Tenure",
    "Waiting",
    "acquire",
    "acquire_many",
    "adopt",
    "assert_held",
    "cancel_on_signals",
    "cleanup_expired",
    "configure",
    "current_lease",
    "default_client",
    "force_release",
    "get_lease",
    "held",
    "holding",
    "install_signal_handlers",
    "leader_election",
    "list_leases",
    "lock",
    "open_backend",
    "read_write_lock",
    "release",
    "renew",
    "semaphore",
    "singleton_task",
    "task_lock",
    "try_acquire",
    "wait_for_lease",
]

_LAZY = {
    "cancel_on_signals": "pglease.signals",
    "install_signal_handlers": "pglease.signals",
    "AsyncHeldLease": "pglease.aio",
    "AsyncLeaseContext": "pglease.aio",
    "AsyncPGLease": "pglease.aio",
    "HybridPostgresBackend": "pglease.backends.hybrid",
    "MemoryBackend": "pglease.backends.memory",
    "PostgresBackend": "pglease.backends.postgres",
    "RedisBackend": "pglease.backends.redis",
    "SQLiteBackend": "pglease.backends.sqlite",
    "Lock": "pglease.primitives.lock",
    "TaskLock": "pglease.primitives.task_lock",
    "LeaderElection": "pglease.primitives.election",
    "ReadWriteLock": "pglease.primitives.read_write",
    "Semaphore": "pglease.primitives.semaphore",
    "LeaseGroup": "pglease.primitives.many",
    "TaskLockConfig": "pglease.primitives.configs",
    "SemaphoreConfig": "pglease.primitives.configs",
    "ReadWriteLockConfig": "pglease.primitives.configs",
    "LockConfig": "pglease.primitives.configs",
    "LeaderElectionConfig": "pglease.primitives.configs",
}


def __getattr__(name: str) -> Any:
    """Load what is not used by everybody when its name is first used: no driver, no event loop before."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'pglease' has no attribute {name!r}")
