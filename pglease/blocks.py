"""The block that a lease is held for."""

from __future__ import annotations

import warnings
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from pglease import current, mistakes
from pglease.errors import ConfigurationError
from pglease.handles import HeldLease, NotAcquired
from pglease.options import HoldOptions
from pglease.taking import not_acquired

if TYPE_CHECKING:
    from pglease.client import PGLease

LeaseT_co = TypeVar("LeaseT_co", bound="HeldLease | NotAcquired", covariant=True)


class Unasked:
    """Notices that a block ran without the lease and nobody looked: no `as`, no `if`.

    Who binds the answer to a name may look at it in ways that leave no trace (`isinstance`, `match`), so that is taken
    for a look.
    """

    def __init__(self, refused: NotAcquired) -> None:
        self._answer = weakref.ref(refused)
        holder = repr(refused.held_by) if refused.held_by else "somebody else"
        self._sentence = f"the block ran without the lease {refused.name!r}, which {holder} has"
        self.looked = False
        refused._watched_by(self)

    def warn(self) -> None:
        """Say so, in the name of whoever leaves the block; call it from `__exit__` itself."""
        if not self.looked and self._answer() is None:
            sentence = f"{self._sentence}: write `with … as lease:` and `if lease:`, or say raise_on_failure=True"
            warnings.warn(sentence, RuntimeWarning, stacklevel=3)


class Block(mistakes.NotTheBlockItself):
    """What entering and leaving a block means, on a thread or in a task."""

    def __init__(self, client: PGLease, wanted: HoldOptions, *, raise_on_failure: bool) -> None:
        self._client = client
        self._wanted = wanted
        self._raise = raise_on_failure
        self._lease: HeldLease | None = None
        self._entered = False
        self._unasked: Unasked | None = None

    def _enter(self) -> None:
        if self._entered:
            raise ConfigurationError(f"this acquire({self._wanted.name!r}) is in use: a second block needs its own")
        self._entered = True  # already while waiting, or whoever gives up first would release the other's lease

    def _admit(self, taken: HeldLease | NotAcquired) -> None:
        """Let the body run with what was taken, or raise."""
        if isinstance(taken, HeldLease):
            taken._hold.in_block = True
            self._lease = taken
            current.enter(taken)
        elif self._raise:
            raise not_acquired(taken, self._wanted)
        else:
            self._unasked = Unasked(taken)

    def _leave(self) -> HeldLease | None:
        """Return the lease to give back, if there is one. The block may be entered again."""
        lease, self._lease, self._entered = self._lease, None, False
        if lease is not None:
            current.leave(lease)
        return lease


class LeaseContext(Block, mistakes.OnlyWith, Generic[LeaseT_co]):
    """The block that a lease is held for. Made by `PGLease.acquire`; may be entered again once it was left."""

    def __enter__(self) -> LeaseT_co:
        self._enter()
        try:
            taken = self._client.taking.take(self._wanted)
            self._admit(taken)
        except BaseException:
            self._entered = False
            raise
        return taken  # type: ignore[return-value]  # what is bound is what was asked for

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease, unasked, self._unasked = self._leave(), self._unasked, None
        if lease is not None:
            self._client.taking.leave(lease._hold, error)
        elif unasked is not None and error is None:
            unasked.warn()
