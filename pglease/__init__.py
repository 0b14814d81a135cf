"""One holder at a time, in the PostgreSQL you already run.

    import pglease

    with pglease.acquire("daily-report", ttl="5m") as lease:
        if lease:
            generate_report(fencing_token=lease.fencing_token)

The client is `PGLease`; what `with` binds is a `HeldLease` or a `NotAcquired`; what the store says is a `Lease`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pglease.aio import AsyncHeldLease, AsyncLeaseContext, AsyncPGLease
    from pglease.backends import Backend, open_backend
    from pglease.backends.base import Fence, Guard
    from pglease.backends.hybrid import HybridPostgresBackend
    from pglease.backends.memory import MemoryBackend
    from pglease.backends.postgres import PostgresBackend
    from pglease.backends.redis import RedisBackend
    from pglease.backends.sqlite import SQLiteBackend
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
    from pglease.primitives.aio import (
        AsyncLeaderElection,
        AsyncLeaseGroup,
        AsyncLock,
        AsyncReadWriteLock,
        AsyncSemaphore,
        AsyncTaskLock,
    )
    from pglease.primitives.configs import (
        LeaderElectionConfig,
        LockConfig,
        ReadWriteLockConfig,
        SemaphoreConfig,
        TaskLockConfig,
    )
    from pglease.primitives.election import Health, LeaderElection
    from pglease.primitives.lock import Lock
    from pglease.primitives.many import LeaseGroup
    from pglease.primitives.read_write import ReadWriteLock
    from pglease.primitives.semaphore import Semaphore
    from pglease.primitives.task_lock import TaskLock
    from pglease.records import Handover, Lease, Loss, LossReason, Tenure
    from pglease.signals import cancel_on_signals, install_signal_handlers
    from pglease.slots import Cron
    from pglease.watching import AsyncWatch, Watch

__version__ = "0.1.0"

__all__ = [
    "SKIPPED",
    "AcquireTimeout",
    "AcquisitionError",
    "AsyncHeldLease",
    "AsyncLeaderElection",
    "AsyncLeaseContext",
    "AsyncLeaseGroup",
    "AsyncLock",
    "AsyncPGLease",
    "AsyncReadWriteLock",
    "AsyncSemaphore",
    "AsyncTaskLock",
    "AsyncWatch",
    "Backend",
    "BackendClosed",
    "BackendError",
    "BackendMisconfigured",
    "BackendUnavailable",
    "ConfigurationError",
    "Cron",
    "Event",
    "Fence",
    "FencedError",
    "Guard",
    "Handover",
    "Health",
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
    "Watch",
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

# Where each public name lives. None is loaded before it is used: `import pglease` at the top of a module that seldom
# needs a lease costs next to nothing, and nobody pays for a driver, an event loop or a primitive of others.
_HOMES = {
    "pglease.aio": ("AsyncHeldLease", "AsyncLeaseContext", "AsyncPGLease"),
    "pglease.backends": ("Backend", "open_backend"),
    "pglease.backends.base": ("Fence", "Guard"),
    "pglease.backends.hybrid": ("HybridPostgresBackend",),
    "pglease.backends.memory": ("MemoryBackend",),
    "pglease.backends.postgres": ("PostgresBackend",),
    "pglease.backends.redis": ("RedisBackend",),
    "pglease.backends.sqlite": ("SQLiteBackend",),
    "pglease.blocks": ("LeaseContext",),
    "pglease.client": ("PGLease",),
    "pglease.current": ("assert_held", "current_lease"),
    "pglease.decorator": ("SKIPPED",),
    "pglease.default": (
        "acquire",
        "acquire_many",
        "adopt",
        "cleanup_expired",
        "configure",
        "default_client",
        "force_release",
        "get_lease",
        "held",
        "holding",
        "leader_election",
        "list_leases",
        "lock",
        "read_write_lock",
        "release",
        "renew",
        "semaphore",
        "singleton_task",
        "task_lock",
        "try_acquire",
        "wait_for_lease",
    ),
    "pglease.errors": (
        "AcquireTimeout",
        "AcquisitionError",
        "BackendClosed",
        "BackendError",
        "BackendMisconfigured",
        "BackendUnavailable",
        "ConfigurationError",
        "FencedError",
        "HeartbeatError",
        "LeaseLostError",
        "MissingDependencyError",
        "NotOwnedError",
        "PgleaseError",
        "ReentrantError",
        "ReleaseError",
    ),
    "pglease.events": ("Event", "LeaseChange", "Observer", "Waiting"),
    "pglease.handles": ("HeldLease", "NotAcquired"),
    "pglease.primitives.aio": (
        "AsyncLeaderElection",
        "AsyncLeaseGroup",
        "AsyncLock",
        "AsyncReadWriteLock",
        "AsyncSemaphore",
        "AsyncTaskLock",
    ),
    "pglease.primitives.configs": (
        "LeaderElectionConfig",
        "LockConfig",
        "ReadWriteLockConfig",
        "SemaphoreConfig",
        "TaskLockConfig",
    ),
    "pglease.primitives.election": ("Health", "LeaderElection"),
    "pglease.primitives.lock": ("Lock",),
    "pglease.primitives.many": ("LeaseGroup",),
    "pglease.primitives.read_write": ("ReadWriteLock",),
    "pglease.primitives.semaphore": ("Semaphore",),
    "pglease.primitives.task_lock": ("TaskLock",),
    "pglease.records": ("Handover", "Lease", "Loss", "LossReason", "Tenure"),
    "pglease.signals": ("cancel_on_signals", "install_signal_handlers"),
    "pglease.slots": ("Cron",),
    "pglease.watching": ("AsyncWatch", "Watch"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a public name, or a module that has some, when it is first used."""
    module = f"{__name__}.{name}"
    if name not in _HOME_OF and module not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if module in _HOMES:
        return import_module(module)
    value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    """Name what is public, loaded or not: for completion in a shell."""
    return sorted({*globals(), *__all__})
