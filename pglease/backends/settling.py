"""What a backend finds out about its store before the first use: by one thread, while the others wait for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pglease.backends.base import Budget
from pglease.errors import BackendError, BackendUnavailable


class Settling:
    """Whose turn it is to look. Who waits in vain is told what the last look met, and not only that it waited.

    Args:
        what: is being looked at, for the message: "the lease table".
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._turn = threading.RLock()
        self._trouble = ""

    @contextmanager
    def turn(self, budget: Budget, *, patience: float | None = None) -> Iterator[bool]:
        """Let one thread at a time look; tell whether it is this one.

        Args:
            budget: the longest wait for that.
            patience: seconds after which it goes on without (False). None: nobody goes on without.

        Raises:
            BackendUnavailable: another thread was still looking when the budget was spent.
        """
        wait = budget.left() if patience is None else min(budget.left(), patience)
        if not self._turn.acquire(timeout=max(0.0, wait)):
            if patience is not None:
                yield False
                return
            met = f"; the last look met this: {self._trouble}" if self._trouble else ""
            raise BackendUnavailable(f"{self._what} is still being looked up by another thread{met}")
        try:
            yield True
            self._trouble = ""
        except BackendError as error:
            self._trouble = str(error)
            raise
        finally:
            self._turn.release()
