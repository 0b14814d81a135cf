"""What the primitives with more than one lease say to a client, as generators; carried out with threads or on a loop.

A generator yields what it wants and gets the answer sent back. It never blocks and reads no clock but the one it is
sent, so the same rules serve both faces.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Generator, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from pglease import clock
from pglease.errors import BackendUnavailable
from pglease.handles import HeldLease, NotAcquired
from pglease.options import HoldOptions

if TYPE_CHECKING:
    from pglease.client import PGLease
    from pglease.primitives.vigil import Vigil
    from pglease.records import Lease

T = TypeVar("T")


class Take(NamedTuple):
    """Ask for a lease, waiting as its options say: a `HeldLease` or a `NotAcquired`."""

    wanted: HoldOptions


class TakeMany(NamedTuple):
    """Ask for several leases in one step: handles, a `NotAcquired`, or None where the store declines."""

    wanted: list[HoldOptions]


class Look(NamedTuple):
    """Read one record, or None."""

    name: str


class List(NamedTuple):
    """Read the records that begin with a prefix, in the order of their names."""

    prefix: str
    ended: bool = False


class Renew(NamedTuple):
    """Extend a hold by hand; an error is raised into the generator."""

    lease: HeldLease
    ttl: float


class Pause(NamedTuple):
    """Let so many seconds pass."""

    seconds: float


class Rest(NamedTuple):
    """Let so many seconds pass, or less: until one of `names` is released, as far as `vigil` hears of it.

    Arranging to hear of it takes no longer than `at_most`: what is left of the wait.
    """

    vigil: Vigil
    names: tuple[str, ...]
    seconds: float
    at_most: float


Wish: TypeAlias = Take | TakeMany | Look | List | Renew | Pause | Rest
Talk: TypeAlias = Generator[Wish, Any, T]


class Deadline:
    """The end of a wait.

    Args:
        seconds: None asks once.
    """

    def __init__(self, seconds: float | None) -> None:
        self.until = clock.now() + (seconds or 0.0)
        self._once = not seconds

    def left(self) -> float:
        """Return the seconds left, never below 0."""
        return max(0.0, self.until - clock.now())

    def over(self) -> bool:
        """Tell whether there is no time for another try."""
        return self._once or self.left() <= 0

    def of(self, wanted: HoldOptions) -> HoldOptions:
        """Return the same options with what is left as their wait."""
        return replace(wanted, wait=None if self._once else self.left())

    def pause(self) -> Pause:
        """Return a pause of a few milliseconds, not in step with others, within the time that is left."""
        return Pause(min(self.left(), 0.005 * random.uniform(0.8, 1.0)))  # to spread, not to hide

    def rest(self, vigil: Vigil, records: Iterable[Lease]) -> Rest:
        """Return a rest until one of these holds may be over, within the time that is left."""
        holds = list(records)
        over = min((record.time_remaining() for record in holds), default=0.0) + 0.005
        left = self.left()
        return Rest(vigil, tuple(record.task_name for record in holds), min(left, over), left)


def run(talk: Talk[T], leases: PGLease) -> T:
    """Carry a talk out in this thread."""
    try:
        wish = next(talk)
        while True:
            try:
                answer = _grant(wish, leases)
            except BaseException as error:  # noqa: BLE001  # the talk lets go of what it has, and raises it
                wish = talk.throw(error)
            else:
                wish = talk.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        talk.close()


def _grant(wish: Wish, leases: PGLease) -> Any:
    if isinstance(wish, Take):
        return leases.taking.take(wish.wanted)
    if isinstance(wish, TakeMany):
        return leases.taking.take_many(wish.wanted)
    if isinstance(wish, Pause):
        return leases.taking.nap(wish.seconds)
    if isinstance(wish, Rest):
        if not wish.vigil.mark(wish.names, wish.at_most):
            wish.vigil.bell.wait(_length(wish))
        wish.vigil.about_to_look()
        return leases.taking.refuse_if_closed()
    return look(wish, leases)


def _length(rest: Rest) -> float:
    return min(rest.seconds, rest.vigil.longest()) * random.uniform(0.8, 1.0)  # not in step with others


def look(wish: Look | List | Renew, leases: PGLease) -> Any:
    """Grant a wish that takes one round trip."""
    if isinstance(wish, Look):
        return leases.get_lease(wish.name)
    if isinstance(wish, List):
        return leases.list_leases(wish.prefix, ended=wish.ended)
    return wish.lease.renew(wish.ttl)


async def arun(talk: Talk[T], leases: PGLease) -> T:
    """Carry a talk out on the running event loop: a waiting task parks no thread."""
    from pglease import loops

    try:
        wish = next(talk)
        while True:
            try:
                if isinstance(wish, Take):
                    answer: Any = await leases.taking.atake(wish.wanted)
                elif isinstance(wish, TakeMany):
                    answer = await leases.taking.atake_many(wish.wanted)
                elif isinstance(wish, Pause):
                    answer = None
                    await leases.taking.anap(wish.seconds)
                elif isinstance(wish, Rest):
                    answer = None
                    if not await _marked(wish):
                        await loops.asleep(_length(wish), wish.vigil.bell)
                    wish.vigil.about_to_look()
                    leases.taking.refuse_if_closed()
                else:
                    answer = await loops.ask(functools.partial(look, wish, leases))
            except BaseException as error:  # noqa: BLE001  # as above
                wish = talk.throw(error)
            else:
                wish = talk.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        talk.close()


async def _marked(rest: Rest) -> bool:
    from pglease import loops

    try:
        return await loops.ask(functools.partial(rest.vigil.mark, rest.names, rest.at_most))
    except BackendUnavailable:  # its turn did not come: nothing is heard of, and looked at the more often
        return False


def abandon(lease: HeldLease, leases: PGLease) -> None:
    """Let go of a hold at once, without waiting for the store: it is given back in the background."""
    hold = lease._hold
    if hold.end():
        leases.taking.drop(hold)
        leases.heartbeat_manager.give_back.add(hold.name, hold.lease_id)


def refused(name: str, record: Any) -> NotAcquired:
    """Return the refusal of a primitive, with the record of one who stands in the way."""
    left = record.time_remaining() if record is not None else 0.0
    return NotAcquired(name, record, left)
