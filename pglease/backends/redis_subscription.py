"""What one client hears of marked names: one connection, whatever the number of those who wait.

A hint may be lost with the link, and a Cluster passes messages on among its nodes without any promise. Nothing rests on
them: whoever waits also wakes at the expiry that it knows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal, cast

from redis.exceptions import NoPermissionError

from pglease import forks
from pglease.backends.base import Budget
from pglease.backends.redis_connections import Link
from pglease.errors import BackendClosed, BackendError, BackendUnavailable
from pglease.records import Change


class RedisSubscription:
    """An open subscription; see `Subscription`. Made by `begin`."""

    def __init__(self, link: Link, explained: Callable[[Exception], BackendError]) -> None:
        self._link: Link | None = link
        self._explained = explained
        self._fresh_locks()
        self._closed = False
        self.is_over = False

    def _fresh_locks(self) -> None:
        self._listening = threading.Lock()  # whoever holds it may close the socket: nobody else reads from it then
        # Held by whoever shuts or closes it: shut after it was closed, its number may be a stranger's. Reentrant, since
        # a signal handler may close.
        self._ending = threading.RLock()

    @classmethod
    def begin(
        cls, link: Link, channel: str, budget: Budget, explained: Callable[[Exception], BackendError]
    ) -> RedisSubscription | None:
        """Subscribe on a connection that is ours from now on; None when this user may not."""
        try:
            link.cutoff.arm(budget.until)
            budget.sending()
            link.call("SUBSCRIBE", channel)
        except NoPermissionError:
            link.close()
            return None
        except Exception as error:  # noqa: BLE001  # whatever redis-py raises becomes one of ours
            link.close()
            raise explained(error) from None
        except BaseException:
            link.close()
            raise
        finally:
            link.cutoff.disarm()
        return cls(link, explained)

    def next(self, seconds: float) -> Sequence[Change]:
        """See `Subscription.next`."""
        with self._listening:
            if self._closed or self._link is None:
                self._end()
                raise BackendClosed("this subscription was closed")
            try:
                return self._heard(self._link, seconds)
            except Exception as error:  # noqa: BLE001  # as above
                trouble = self._explained(error)
            closed = self._closed
            self._end()
        if closed:
            raise BackendClosed("this subscription was closed")
        raise BackendUnavailable(f"what was said of marked names may be lost: {trouble}")

    @staticmethod
    def _heard(link: Link, seconds: float) -> list[Change]:
        changes: list[Change] = []
        message = link.heard(seconds)
        while message is not None:
            if message[0] == b"message" and (change := _change(message[2])) is not None:
                changes.append(change)
            message = link.heard(0.0)
        return changes

    def close(self) -> None:
        """See `Subscription.close`."""
        self._closed = True
        with self._ending:
            if self._link is None:
                return
            self._link.shut()
        if self._listening.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._listening.release()

    def _end(self) -> None:
        self._closed = self.is_over = True
        with self._ending:
            link, self._link = self._link, None
            if link is not None:
                link.cutoff.disarm()
                link.close()

    def forget(self) -> None:
        """Leave it, in a forked child, to the parent."""
        forks.bury(self._link)
        self._link, self._closed, self.is_over = None, True, True
        self._fresh_locks()


def _change(message: bytes) -> Change | None:
    """Read what a script announced: what, the microseconds left, and the name, which may have blanks."""
    what, _, rest = message.decode(errors="replace").partition(" ")
    left, _, name = rest.partition(" ")
    if what not in ("released", "granted") or not left.isdigit():
        return None
    return Change(name, cast("Literal['released', 'granted']", what), int(left) / 1e6)
