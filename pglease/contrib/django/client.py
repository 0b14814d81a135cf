"""The client of a Django project: made when it is first used, anew when the settings change."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from pglease import forks
from pglease.client import PGLease
from pglease.contrib.django.conf import conf
from pglease.decorator import TaskDecorator, late_singleton_task
from pglease.options import Duration

_TIMED = frozenset({"acquire", "try_acquire", "wait_for_lease", "acquire_many"})
"""The calls that take the ttl of the settings where they are given none."""


class LazyClient:
    """Stands for the `PGLease` that the setting `PGLEASE` describes: everything that one can, this can.

    Importing it reads no setting, and making the client connects to nothing, so it may be imported anywhere and a task
    may be decorated before the settings are there. Safe on any thread, and in a forked child, which begins with
    nothing of its parent's.
    """

    def __init__(self) -> None:
        self._making = threading.RLock()  # a handler of a signal may need the client while it is made
        self._made: PGLease | None = None
        self._ttl: Duration = 60
        forks.forget_in_children(self, type(self).forget)

    @property  # type: ignore[misc]  # isinstance() asks for it
    def __class__(self) -> type[Any]:
        return PGLease

    def _client(self) -> PGLease:
        with self._making:
            if self._made is None:
                wanted = conf()
                client = PGLease(wanted.open_store(), owner_id=wanted.owner_id)
                if self._made is None:  # else such a handler was there first, and may hold leases with its own
                    self._made, self._ttl = client, wanted.ttl
            return self._made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by copy, pickle and inspect, which want nothing of a client
            raise AttributeError(name)
        found = getattr(self._client(), name)
        return _timed(found, self._ttl) if name in _TIMED else found

    def singleton_task(
        self, name: str | Callable[..., str], ttl: Any = None, skip_if_locked: bool = True, **wanted: Any
    ) -> TaskDecorator:
        """Decorate a function so that one call at a time runs. See `PGLease.singleton_task`.

        The client is looked up at each call.
        """
        ttl = conf().ttl if ttl is None else ttl
        return late_singleton_task(self._client, name, ttl, skip_if_locked, **wanted)

    def close(self) -> None:
        """Release what is held and close the connections; the next use begins anew.

        For the end of a test run, before Django drops the test database. Nobody else has to: a client closes itself at
        the exit.
        """
        with self._making:
            made, self._made = self._made, None
        if made is not None:
            made.close()
            made.backend.close()

    def forget(self) -> None:
        """In a forked child: the lock may be held by a thread of the parent's."""
        self._making = threading.RLock()

    def __repr__(self) -> str:
        return "<pglease, not used yet>" if self._made is None else repr(self._made)


def _timed(call: Callable[..., Any], ttl: Duration) -> Callable[..., Any]:
    @functools.wraps(call)
    def with_ttl(name: Any, *args: Any, **wanted: Any) -> Any:
        if not args:
            wanted.setdefault("ttl", ttl)
        return call(name, *args, **wanted)

    return with_ttl
