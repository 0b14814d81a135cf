"""Questions that a loop sends itself, in virtual time: what a store with the trait `in_two_halves` has, and who hears.

What a socket, the system and the watchdog do for a real one is done by a thread of the kernel's for each question: it
waits for the answer, or for the end of the budget, and tells the loop.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pglease import loops
from pglease.backends.base import Budget
from pglease.errors import BackendUnavailable
from pglease.records import Granted, Released, Request
from tests.simulation import kernel as virtual
from tests.simulation.store import Call, Link

if TYPE_CHECKING:
    from tests.simulation.world import Member

IN_USE = 0.2
"""How often no connection lies idle."""
TAKES_MORE = 0.1
"""How often an answer does not say it all, so that the verb is said from the beginning."""


def are_asked(seed: int) -> bool:
    """Choose whether loops ask in halves, by a stream of its own: other seeds keep their course."""
    return random.Random(f"halves {seed}").random() < 0.6


class SplitLink(Link):
    """A way to the server on which a process may send and leave."""

    def __init__(self, member: Member) -> None:
        super().__init__(member.world.kernel, member.world.server, member)
        self.member = member
        self.traits = replace(self.traits, in_two_halves=True)

    def begin_try_acquire(self, request: Request, budget: Budget) -> Half | None:
        """Send what `try_acquire` does."""
        self.asked[request.name] = request.lease_id, self.kernel.now
        if self.member.tasks is not None:
            self.member.tasks.asks()
        return self._begin(Call("try_acquire", (request,), {}), budget)

    def begin_release(self, name: str, lease_id: str, budget: Budget, *, min_hold: float = 0.0) -> Half | None:
        """Send what `release` does."""
        return self._begin(Call("release", (name, lease_id), {"min_hold": min_hold}), budget)

    def _begin(self, call: Call, budget: Budget) -> Half | None:
        return None if self.kernel.random.random() < IN_USE else Half(self, call, budget)

    def whole(self, call: Call, budget: Budget, *, unknown: bool) -> Any:
        """Do the verb from its beginning; `unknown` says that an earlier try may have been carried out."""
        try:
            return self._ask(call, budget)
        except BackendUnavailable as error:
            error.outcome_unknown = error.outcome_unknown or unknown
            raise


class Half:
    """Stands in for a `Begun`."""

    def __init__(self, link: SplitLink, call: Call, budget: Budget) -> None:
        self._link, self._call, self._budget = link, call, budget
        self._takes_more = link.kernel.random.random() < TAKES_MORE
        self._heard: list[Any] = []
        self._over = virtual.Event()
        budget.sending()
        virtual.Thread(self._wait_for_it, name="answer", process=link.process).start()

    def _wait_for_it(self) -> None:
        self._link._send(self._call, max(0.0, self._budget.left()))
        self._over.set()
        for tell in self._heard:
            tell()

    @property
    def done(self) -> bool:
        """See `base.Begun.done`. What was granted or released needs no second question."""
        value, error = self._call.answer or (None, None)
        return (
            error is None
            and isinstance(value, (Granted, Released) if self._takes_more else object)
            and value is not None
        )

    def arrived(self) -> bool:
        """See `base.Begun.arrived`."""
        return self._over.is_set()

    def finish(self) -> Any:
        """See `base.Begun.finish`."""
        self._over.wait()
        if self.done:
            assert self._call.answer is not None
            return self._call.answer[0]
        call = Call(self._call.verb, self._call.args, self._call.options)
        error = None if self._call.answer is None else self._call.answer[1]
        unknown = self._call.answer is None or getattr(error, "outcome_unknown", False)
        return self._link.whole(call, self._budget, unknown=unknown)

    def drop(self) -> None:
        """See `base.Begun.drop`."""
        raise AssertionError("there is always a thread")

    async def hear(self) -> None:
        """Wait on the loop."""
        loop = asyncio.get_running_loop()
        heard = loop.create_future()
        self._heard.append(lambda: loops.tell_loop(loop, partial(loops._wake, heard)))
        await heard


async def arrived(begun: Half) -> None:
    """Stand in for `pglease.loops._arrived`: there is no descriptor here."""
    if not begun.arrived():
        await begun.hear()
