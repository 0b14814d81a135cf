"""The default client behind `pglease.acquire` and its like: no wiring at all.

It is made at the first use from the environment (`PGLEASE_URL`, else `DATABASE_URL`), or earlier by `configure`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Unpack

from pglease import mistakes, options
from pglease.backends import Backend
from pglease.blocks import LeaseContext
from pglease.client import PGLease
from pglease.decorator import TaskDecorator, late_singleton_task
from pglease.handles import HeldLease
from pglease.records import Handover, Lease
from pglease.slots import OncePer

if TYPE_CHECKING:
    from pglease.primitives.arguments import (
        ElectionOptions,
        GroupOptions,
        LockOptions,
        ReadWriteOptions,
        SemaphoreOptions,
        TaskLockOptions,
    )
    from pglease.primitives.election import LeaderElection
    from pglease.primitives.lock import Lock
    from pglease.primitives.many import GroupContext
    from pglease.primitives.read_write import ReadWriteLock
    from pglease.primitives.semaphore import Semaphore
    from pglease.primitives.task_lock import TaskLock

_lock = threading.RLock()
_client: PGLease | None = None


def _after_fork_in_child() -> None:
    global _lock  # noqa: PLW0603  # another thread of the parent may have held it
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def configure(backend: str | Backend, **arguments: Any) -> PGLease:
    """Make the default client; an earlier one is closed, which ends its holds.

    Args:
        backend, arguments: as for `PGLease`.

    Raises:
        ConfigurationError: as for `PGLease`; the earlier default client stays.
    """
    global _client  # the one default is the point
    fresh = PGLease(backend, **arguments)
    with _lock:
        earlier, _client = _client, fresh
    if earlier is not None:
        earlier.close()
    return fresh


def default_client() -> PGLease:
    """Return the default client, made from the environment if there is none yet.

    Raises:
        ConfigurationError: there is none, and neither PGLEASE_URL nor DATABASE_URL is set.
    """
    global _client  # noqa: PLW0603
    with _lock:
        if _client is None:
            _client = PGLease.from_env()
        return _client


def is_configured() -> bool:
    """Tell whether there is a default client, or an address to make it from."""
    return _client is not None or any(os.environ.get(name) for name in ("PGLEASE_URL", "DATABASE_URL"))


@contextmanager
def standing_in(client: PGLease) -> Iterator[None]:
    """Let `client` be the default one meanwhile; for tests. Neither it nor the usual one is closed."""
    global _client  # noqa: PLW0603
    with _lock:
        usual, _client = _client, client
    try:
        yield
    finally:
        with _lock:
            _client = usual


def acquire(name: str, ttl: options.Duration = 60, raise_on_failure: bool = False, **wanted: Any) -> LeaseContext[Any]:
    """Hold a lease for a block, with the default client. See `PGLease.acquire`."""
    mistakes.refuse_to_be_awaited()
    return default_client().acquire(name, ttl, raise_on_failure, **wanted)


def adopt(handover: Handover | str, ttl: options.Duration | None = None, **wanted: Any) -> LeaseContext[Any]:
    """Go on with a lease that was handed over, with the default client. See `PGLease.adopt`."""
    return default_client().adopt(handover, ttl, **wanted)


def try_acquire(name: str, ttl: options.Duration = 60, **wanted: Any) -> bool:
    """Ask once, with the default client. See `PGLease.try_acquire`."""
    mistakes.refuse_to_be_awaited()
    return default_client().try_acquire(name, ttl, **wanted)


def wait_for_lease(
    name: str,
    ttl: options.Duration = 60,
    timeout: options.Duration | None = 60.0,
    poll_interval: options.Duration = 5.0,
    **wanted: Any,
) -> HeldLease:
    """Wait for a lease, with the default client. See `PGLease.wait_for_lease`."""
    mistakes.refuse_to_be_awaited()
    return default_client().wait_for_lease(name, ttl, timeout, poll_interval, **wanted)


def release(name: str) -> bool:
    """End a hold of the default client. See `PGLease.release`."""
    return default_client().release(name)


def renew(name: str, ttl: options.Duration | None = None) -> None:
    """Extend a hold of the default client. See `PGLease.renew`."""
    default_client().renew(name, ttl)


def held(name: str) -> HeldLease | None:
    """Return the default client's handle. See `PGLease.held`."""
    return default_client().held(name)


def holding() -> list[HeldLease]:
    """Return all that the default client holds. See `PGLease.holding`."""
    return default_client().holding()


def get_lease(name: str) -> Lease | None:
    """Read a record, with the default client. See `PGLease.get_lease`."""
    return default_client().get_lease(name)


def list_leases(prefix: str = "", *, ended: bool = False) -> list[Lease]:
    """Read the records, with the default client. See `PGLease.list_leases`."""
    return default_client().list_leases(prefix, ended=ended)


def cleanup_expired(older_than: options.Duration = 0) -> int:
    """Delete old records, with the default client. See `PGLease.cleanup_expired`."""
    return default_client().cleanup_expired(older_than)


def force_release(name: str, fencing_token: int) -> bool:
    """End somebody's hold, with the default client. See `PGLease.force_release`."""
    return default_client().force_release(name, fencing_token)


def lock(name: str, ttl: options.Duration | None = None, **wanted: Unpack[LockOptions]) -> Lock:
    """Return a `Lock` of the default client. See `PGLease.lock`."""
    return default_client().lock(name, ttl, **wanted)


def task_lock(name: str, ttl: options.Duration | None = None, **wanted: Unpack[TaskLockOptions]) -> TaskLock:
    """Return a `TaskLock` of the default client. See `PGLease.task_lock`."""
    return default_client().task_lock(name, ttl, **wanted)


def leader_election(
    name: str, ttl: options.Duration | None = None, **wanted: Unpack[ElectionOptions]
) -> LeaderElection:
    """Return a `LeaderElection` of the default client. See `PGLease.leader_election`."""
    return default_client().leader_election(name, ttl, **wanted)


def read_write_lock(
    name: str, ttl: options.Duration | None = None, **wanted: Unpack[ReadWriteOptions]
) -> ReadWriteLock:
    """Return a `ReadWriteLock` of the default client. See `PGLease.read_write_lock`."""
    return default_client().read_write_lock(name, ttl, **wanted)


def semaphore(
    name: str, limit: int | None = None, ttl: options.Duration | None = None, **wanted: Unpack[SemaphoreOptions]
) -> Semaphore:
    """Return a `Semaphore` of the default client. See `PGLease.semaphore`."""
    return default_client().semaphore(name, limit, ttl, **wanted)


def acquire_many(names: Iterable[str], ttl: options.Duration = 60, **wanted: Unpack[GroupOptions]) -> GroupContext:
    """Hold all of several leases for a block, or none, with the default client. See `PGLease.acquire_many`."""
    return default_client().acquire_many(names, ttl, **wanted)


def singleton_task(
    name: str | Callable[..., str],
    ttl: options.Duration = 60,
    skip_if_locked: bool = True,
    *,
    on_skip: Any = None,
    wait: options.Duration | None = None,
    min_hold: options.Duration | None = None,
    max_hold: options.Duration | None = None,
    once_per: OncePer | None = None,
) -> TaskDecorator:
    """Decorate a function so that one call at a time runs, with the default client. See `PGLease.singleton_task`.

    The client is looked up at each call, so a module may decorate before the application has configured anything.
    """
    return late_singleton_task(
        default_client,
        name,
        ttl,
        skip_if_locked,
        on_skip=on_skip,
        wait=wait,
        min_hold=min_hold,
        max_hold=max_hold,
        once_per=once_per,
    )
