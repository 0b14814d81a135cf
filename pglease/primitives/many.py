"""`acquire_many`: all of several leases, or none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, final

from pglease import current, mistakes, options
from pglease.blocks import Unasked
from pglease.errors import ConfigurationError
from pglease.handles import HeldLease, NotAcquired
from pglease.options import Duration, HoldOptions, OnLost
from pglease.primitives import talk
from pglease.primitives.talk import Deadline, Take, TakeMany, Talk
from pglease.taking import not_acquired

if TYPE_CHECKING:
    from pglease.client import PGLease

MOST_NAMES = 1000


@final
class LeaseGroup:
    """Several leases that were taken together: true, in the order of their names.

    `group["a"]` is the `HeldLease` of `a`, iterating yields them all. Each is renewed by itself, and may be lost alone.
    """

    def __init__(self, leases: Iterable[HeldLease]) -> None:
        self._leases = {lease.name: lease for lease in leases}

    def __bool__(self) -> Literal[True]:
        return True

    def __getitem__(self, name: str) -> HeldLease:
        return self._leases[name]

    def __iter__(self) -> Any:
        return iter(self._leases.values())

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def held(self) -> bool:
        """Whether this process may still act under all of them."""
        return all(lease.held for lease in self._leases.values())

    @property
    def fencing_tokens(self) -> dict[str, int]:
        """The token of each, by name."""
        return {name: lease.fencing_token for name, lease in self._leases.items()}

    def remaining(self) -> float:
        """Return the seconds this process may still act under all of them."""
        return min(lease.remaining() for lease in self._leases.values())

    def raise_if_lost(self) -> None:
        """Raise for the first that was lost; asks no store.

        Raises:
            LeaseLostError: with its name and reason. The others are held still.
        """
        for lease in self._leases.values():
            lease.raise_if_lost()

    def release(self) -> bool:
        """End all of them; True if this call ended every one. Idempotent.

        Raises:
            ReleaseError: the store could not confirm one; all the others were released all the same.
        """
        trouble: Exception | None = None
        ended = True
        for lease in reversed(self._leases.values()):
            try:
                ended = lease.release() and ended
            except Exception as error:  # noqa: BLE001  # raised below, when the others are released
                trouble = trouble or error
        if trouble is not None:
            raise trouble
        return ended

    def __repr__(self) -> str:
        return f"<LeaseGroup {list(self._leases)}, {'held' if self.held else 'not held'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a LeaseGroup belongs to its process and is not pickled or copied")


class GroupContext(mistakes.NotTheBlockItself, mistakes.OnlyWith):
    """The block that several leases are held for. Made by `PGLease.acquire_many`."""

    def __init__(
        self,
        leases: PGLease,
        names: Iterable[str],
        ttl: Duration = 60,
        *,
        raise_on_failure: bool = False,
        wait: Duration | None = None,
        max_hold: Duration | None = None,
        metadata: Mapping[str, Any] | None = None,
        on_lost: OnLost = "raise",
    ) -> None:
        self.leases = leases
        self._raise = options.flag(raise_on_failure, "raise_on_failure")
        with options.all_problems() as problems:
            wanted = problems.check(
                options.hold_options, "any", ttl, wait=wait, max_hold=max_hold, metadata=metadata, on_lost=on_lost
            )
            checked = problems.check(_names, names)
        self._wait = wanted.wait
        self._wanted = [replace(wanted, name=name, wait=None) for name in checked]
        self._group: LeaseGroup | None = None
        self._unasked: Unasked | None = None

    def acquire(self) -> LeaseGroup | NotAcquired:
        """Take all, or none; the group's `release` ends them.

        Raises:
            AcquisitionError, ReentrantError, BackendError: as the block does on entering. See `PGLease.acquire_many`.
        """
        mistakes.refuse_to_be_awaited()
        return self._got(talk.run(self._conversation(), self.leases))

    def _got(self, taken: LeaseGroup | NotAcquired) -> LeaseGroup | NotAcquired:
        """Return what was taken; a refusal is an error, if it was to be one."""
        if isinstance(taken, NotAcquired) and self._raise:
            raise not_acquired(taken, replace(self._wanted[0], name=taken.name, wait=self._wait))
        return taken

    def __enter__(self) -> LeaseGroup | NotAcquired:
        if self._group is not None:
            raise ConfigurationError("this acquire_many is in use: a second block needs its own")
        taken = self.acquire()
        if isinstance(taken, LeaseGroup):
            self._group = taken
            for lease in taken:
                lease._hold.in_block = True
                current.enter(lease)
        else:
            self._unasked = Unasked(taken)
        return taken

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        group, self._group = self._group, None
        unasked, self._unasked = self._unasked, None
        if group is not None:
            self._leave(group, error)
        elif unasked is not None and error is None:
            unasked.warn()

    def _leave(self, group: LeaseGroup, error: BaseException | None) -> None:
        """End every hold of a block; the first loss is raised when all are ended.

        Once the store leaves one release unconfirmed, the background has the others: it takes no longer than one.
        """
        taking, stuck = self.leases.taking, False
        trouble: Exception | None = None
        for lease in reversed(list(group)):
            current.leave(lease)
            try:
                (taking.leave_later if stuck else taking.leave)(lease._hold, error)
            except Exception as raised:  # noqa: BLE001  # raised below, when the others are ended
                trouble = trouble or raised
            stuck = stuck or lease._hold.unconfirmed
        if trouble is not None:
            raise trouble

    def _conversation(self) -> Talk[LeaseGroup | NotAcquired]:
        """Return the talk: nobody waits while it holds anything, so there is no deadlock."""
        deadline = Deadline(self._wait)
        first: HoldOptions | None = None
        while True:
            refusal, taken = yield from self._round(first, deadline)
            if refusal is None:
                return LeaseGroup(sorted(taken, key=lambda lease: lease.name))
            if deadline.over():
                return refusal
            # The next round waits for what was refused, holding nothing, and then asks for the others.
            first = next(wanted for wanted in self._wanted if wanted.name == refusal.name)
            yield deadline.pause()

    def _round(self, first: HoldOptions | None, deadline: Deadline) -> Talk[tuple[NotAcquired | None, list[HeldLease]]]:
        """Wait for `first`, if there is one, and take the others with it: in one step where the store can do that."""
        taken: list[HeldLease] = []
        rest = [wanted for wanted in self._wanted if wanted is not first]
        try:
            if first is not None and (refusal := (yield from self._take_one(first, deadline, taken))) is not None:
                return refusal, self._give_up(taken)
            if rest and self.leases.backend.traits.groups:
                answer: list[HeldLease] | NotAcquired | None = yield TakeMany(rest)
                if isinstance(answer, NotAcquired):
                    return answer, self._give_up(taken)
                if answer is not None:
                    return None, taken + answer
            for wanted in rest:
                if (refusal := (yield from self._take_one(wanted, deadline, taken))) is not None:
                    return refusal, self._give_up(taken)
        except BaseException:
            self._give_up(taken)
            raise
        return None, taken

    @staticmethod
    def _take_one(wanted: HoldOptions, deadline: Deadline, taken: list[HeldLease]) -> Talk[NotAcquired | None]:
        """Take one more; wait for it only while nothing is held."""
        answer: HeldLease | NotAcquired = yield Take(wanted if taken else deadline.of(wanted))
        if isinstance(answer, NotAcquired):
            return answer
        taken.append(answer)
        return None

    def _give_up(self, taken: list[HeldLease]) -> list[HeldLease]:
        for lease in taken:
            talk.abandon(lease, self.leases)
        return []


def _names(names: Iterable[str]) -> list[str]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ConfigurationError(f"names must be several names, not {names!r}")
    found = [options.text(name, "name") for name in names]
    if not found or len(found) > MOST_NAMES:
        raise ConfigurationError(f"names must be 1 to {MOST_NAMES} names, not {len(found)}")
    twice = sorted({name for name in found if found.count(name) > 1})
    if twice:
        raise ConfigurationError(f"names must be different, not {twice!r} twice")
    return sorted(found)
