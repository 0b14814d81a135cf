"""The simulated server and the network to it.

The rules are those of `pglease.backends.memory`, the reference model that every real store is compared with. Added is
what one process's memory does not have: an insert that has read the token floor and is not done yet, epochs, a replica
that is behind.
"""

from __future__ import annotations

import copy
import queue
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pglease.backends.base import Budget, FencesNothing, Traits
from pglease.backends.memory import MemoryBackend
from pglease.errors import BackendUnavailable
from pglease.records import Change, Granted, Refused, Request, Unknown
from tests.simulation.kernel import Kernel, Process, SimpleQueue, Thread

if TYPE_CHECKING:
    from tests.simulation.sessions import Sessions

EPOCH = 32
"""The bits of a token below its epoch."""
BEGAN = 5000.0


class Store(MemoryBackend):
    """The memory backend, with the tokens of a store that may fail over."""

    def _next_hold(self, last: Any, request: Request, now: Any) -> Any:
        row = super()._next_hold(last, request, now)
        floor = self._store.token_floor
        row.fencing_token = (max(last.fencing_token, floor >> EPOCH << EPOCH) if last else floor) + 1
        return row

    def next_epoch(self, timeline: int) -> None:
        """Begin a new epoch, as the first grant on another timeline does."""
        self._store.token_floor = max((self._store.token_floor >> EPOCH) + 1, timeline) << EPOCH

    @property
    def rows(self) -> dict[str, Any]:
        """Every name's row."""
        return self._store.rows

    @property
    def floor(self) -> int:
        """What new names start above."""
        return self._store.token_floor

    @floor.setter
    def floor(self, floor: int) -> None:
        self._store.token_floor = floor

    def copy(self) -> tuple[dict[str, Any], int]:
        """Return the whole of it."""
        rows = {}
        for name, row in self.rows.items():
            rows[name] = copy.copy(row)
            rows[name].line = copy.copy(row.line)
            rows[name].line.places = [copy.copy(place) for place in row.line.places]
        return rows, self.floor

    def restore(self, state: tuple[dict[str, Any], int]) -> None:
        """Go back to what it once was."""
        self._store.rows, self._store.token_floor = state

    def hear(self, listener: Any) -> None:
        """Tell a listener of changes."""
        self._store.listeners.append(listener)

    def unhear(self, listener: Any) -> None:
        """Tell it no more."""
        if listener in self._store.listeners:
            self._store.listeners.remove(listener)


@dataclass(slots=True)
class Call:
    """One request on its way: what it asks, and what became of it."""

    verb: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    thread: Thread | None = None
    value: Any = None
    error: Exception | None = None
    answer: tuple[Any, Exception | None] | None = None


@dataclass(slots=True)
class Weather:
    """How the network is, for one seed."""

    delay: float = 0.01
    slow: float = 0.0
    lost: float = 0.0
    doubled: float = 0.0
    busy: float = 0.0
    waits: float = 0.0


class Server:
    """The store's process: applies requests in the order of their arrival, and may stop, fall silent or be replaced."""

    def __init__(self, kernel: Kernel, weather: Weather, *, keeps_history: bool) -> None:
        self.kernel, self.weather = kernel, weather
        self.rate = 1.0
        self.stepped = 0.0
        self.store = Store(self.clock)
        self.generation = 0
        self.frozen_until = 0.0
        self.births = 0
        self.history: list[tuple[float, Any]] | None = [] if keeps_history else None
        self.calls: Counter[str] = Counter()
        self._changed = True
        self._always = Budget(self.clock, float("inf"))
        self.audit: Callable[[Call, dict[str, Any]], None] = lambda _call, _before: None
        self.traits = Traits(kind="simulated", clock="server", shared_by="hosts", durable=True)

    def bind(self) -> Sessions:
        """Let rows be bound to sessions from now on."""
        from tests.simulation.sessions import BoundStore

        store = self.store = BoundStore(self)
        return store.sessions

    def clock(self) -> float:
        """Return the store's time."""
        return BEGAN + self.kernel.now * self.rate + self.stepped

    def arrive(self, call: Call, generation: int, reply: Callable[[Call], None]) -> None:
        """Take a request that has come through."""
        kernel = self.kernel
        if generation != self.generation:
            return  # it was sent to a server that is no more
        if call.verb == "renew" and call.answer is not None:
            return  # no transport brings a copy after the answer: whoever tries again asks anew
        if self.frozen_until > kernel.now:
            kernel.at(self.frozen_until, lambda: self.arrive(call, generation, reply))
        elif call.verb == "cleanup" and self.births and self.locks_for_cleanup:
            kernel.after(0.1, lambda: self.arrive(call, generation, reply))  # it waits for the table
        elif self._is_birth(call) and kernel.random.random() < self.weather.waits:
            self._give_birth(call, generation, reply)
        else:
            self.apply(call)
            reply(call)

    locks_for_cleanup = True
    """Whether a cleanup takes the lock that keeps out inserts which have read the old floor."""

    def _is_birth(self, call: Call) -> bool:
        return call.verb == "try_acquire" and call.args[0].name not in self.store.rows

    def _give_birth(self, call: Call, generation: int, reply: Callable[[Call], None]) -> None:
        """Read the floor now and insert later, as a statement does whose snapshot is older than its wait."""
        floor = self.store.floor
        self.births += 1

        def insert() -> None:
            if generation != self.generation:
                return
            self.births -= 1
            if call.args[0].name in self.store.rows:
                call.value = Refused(None, 0.01)  # somebody else was faster
            else:
                now, self.store.floor = self.store.floor, floor
                self.apply(call)
                self.store.floor = now
            reply(call)

        self.kernel.after(self.kernel.random.random() * 3.0, insert)

    def apply(self, call: Call) -> None:
        """Do what a request asks, and let the auditor see the rows before and after."""
        self.calls[call.verb] += 1
        call.value = call.error = None
        if self.weather.busy and self.kernel.random.random() < self.weather.busy and self._is_locked(call):
            return
        before = {name: (row.lease_id, row.fencing_token, row.expires_at) for name, row in self.store.rows.items()}
        self._remember()
        call.value = getattr(self.store, call.verb)(*call.args, self._always, **call.options)
        self._changed = not isinstance(call.value, Refused)
        self.audit(call, before)

    def _is_locked(self, call: Call) -> bool:
        """Answer as a server does whose row somebody has locked."""
        if call.verb == "renew":
            call.value = [Unknown(None)] * len(call.args[0])
        elif call.verb == "release":
            call.error = BackendUnavailable("the row is locked")
        elif call.verb == "try_acquire":
            call.value = Refused(None, 0.05)
        elif call.verb == "try_acquire_many":
            return True  # declined
        return call.value is not None or call.error is not None

    def _remember(self) -> None:
        """Keep what a replica may go back to, unless the last request has changed nothing."""
        if self.history is not None and self._changed:
            self.history.append((self.kernel.now, self.store.copy()))
            del self.history[:-40]

    def fail_over(self, lag: float, *, knows_epochs: bool = True) -> None:
        """Let a replica take over that has not heard of the last `lag` seconds."""
        self.generation += 1
        self.births = 0
        lost = [state for when, state in self.history or () if when > self.kernel.now - lag]
        if lost:
            self.store.restore(lost[0])  # as it was before the first that is lost
            assert self.history is not None
            del self.history[len(self.history) - len(lost) :]
        if knows_epochs:
            self.store.next_epoch(self.generation)


class Link(FencesNothing):
    """One process's way to the server: a `Backend`."""

    def __init__(self, kernel: Kernel, server: Server, process: Process) -> None:
        self.kernel, self.server, self.process = kernel, server, process
        self.traits = server.traits
        self.cut_out_until = self.cut_in_until = float("-inf")
        self.refused = False
        self.straggles = self.deaf_for = 0.0
        self.belated, self.late_until = "", float("-inf")
        self._echo: tuple[str, float] | None = None
        self._slow: dict[Thread | None, tuple[float, float]] = {}
        self.attempts: Counter[str] = Counter()
        self.asked: dict[str, tuple[str, float]] = {}
        self.ears: list[Ear] = []

    # -- the verbs -----------------------------------------------------------------------------------------------------

    def try_acquire(self, request: Request, budget: Budget) -> Granted | Refused:
        self.asked[request.name] = request.lease_id, self.kernel.now
        return self._ask(Call("try_acquire", (request,), {}), budget)

    def try_acquire_many(self, requests: Sequence[Request], budget: Budget) -> Any:
        return self._ask(Call("try_acquire_many", (tuple(requests),), {}), budget)

    def renew(self, renewals: Sequence[Any], budget: Budget) -> list[Any]:
        self.attempts.update(renewal.lease_id for renewal in renewals)
        return self._ask(Call("renew", (list(renewals),), {}), budget)

    def release(self, name: str, lease_id: str, budget: Budget, *, min_hold: float = 0.0) -> Any:
        return self._ask(Call("release", (name, lease_id), {"min_hold": min_hold}), budget)

    def force_release(self, name: str, fencing_token: int, budget: Budget) -> bool:
        return self._ask(Call("force_release", (name, fencing_token), {}), budget)

    def adopt(self, adoption: Any, budget: Budget) -> Any:
        return self._ask(Call("adopt", (adoption,), {}), budget)

    def set_metadata(self, name: str, lease_id: str, metadata: Any, budget: Budget) -> Any:
        return self._ask(Call("set_metadata", (name, lease_id, metadata), {}), budget)

    def get(self, name: str, budget: Budget) -> Any:
        return self._ask(Call("get", (name,), {}), budget)

    def list(self, prefix: str, budget: Budget, *, ended: bool = False) -> Any:
        return self._ask(Call("list", (prefix,), {"ended": ended}), budget)

    def cleanup(self, older_than: float, budget: Budget) -> int:
        return self._ask(Call("cleanup", (older_than,), {}), budget)

    def mark(self, name: str, seconds: float, budget: Budget) -> bool:
        return self._ask(Call("mark", (name, seconds), {}), budget)

    def queue(self, ticket: Any, budget: Budget) -> Any:
        return self._ask(Call("queue", (ticket,), {}), budget)

    def leave_queue(self, name: str, ticket_id: str, budget: Budget) -> bool:
        return self._ask(Call("leave_queue", (name, ticket_id), {}), budget)

    def listen(self, budget: Budget) -> Ear:
        self._ask(Call("get", ("nobody",), {}), budget)
        ear = Ear(self)
        self.ears.append(ear)
        return ear

    def forget(self) -> None:
        raise AssertionError("nobody forks here")

    def close(self) -> None:
        raise AssertionError("a client closes only what it has opened")

    # -- the way -------------------------------------------------------------------------------------------------------

    def _ask(self, call: Call, budget: Budget) -> Any:
        """Send a request, up to three times within its budget, and wait for the answer."""
        kernel, sent = self.kernel, False
        for _ in range(3):
            if kernel.over:
                kernel.block()
            if self.refused and kernel.now < self.cut_out_until:
                kernel.rest(0.002)
                raise BackendUnavailable("the connection was refused", outcome_unknown=sent)
            self.connect(budget)
            kernel.rest(kernel.random.random() * 0.002)
            budget.sending()
            left = budget.left()
            if left <= 0:
                raise BackendUnavailable("no time is left", outcome_unknown=sent)
            sent = True
            call = Call(call.verb, call.args, call.options)
            if self._send(call, min(left, left * 0.6 if kernel.random.random() < 0.5 else left)):
                assert call.answer is not None
                value, error = call.answer
                if error is not None:
                    raise error
                return value
        raise BackendUnavailable("no answer in time", outcome_unknown=True)

    def connect(self, budget: Budget) -> None:
        """Wait for another connection, after one broke that had brought a grant."""
        asker = self.kernel.running
        if asker in self._slow:
            seconds, transit = self._slow[asker]
            self._slow[asker] = 0.0, transit
            self.kernel.rest(max(0.0, min(seconds, budget.left())))

    def _send(self, call: Call, seconds: float) -> bool:
        kernel = self.kernel
        call.thread = kernel.running
        generation = self.server.generation
        for _ in range(2 if kernel.random.random() < self.server.weather.doubled else 1):
            if not self._loses(self.cut_out_until):
                kernel.after(self._way_of(call), lambda: self.server.arrive(call, generation, self._reply))
        if call.verb == "release" and self._echo is not None and self._echo[0] == call.args[1]:
            (_, late), self._echo = self._echo, None
            kernel.after(late, lambda: self.server.arrive(call, generation, self._reply))
        kernel.block(seconds)
        call.thread = None
        return call.answer is not None

    def _reply(self, call: Call) -> None:
        """Bring an answer back, if the way is open."""
        if call.answer is not None or call.thread is None or self._loses(self.cut_in_until):
            return
        answer, delay = (call.value, call.error), self._delay()
        if self.belated and call.verb == "try_acquire" and isinstance(call.value, Granted):
            answer, delay = self._belate(call.args[0], call.thread, answer, delay)

        def come_back() -> None:
            if call.thread is not None and call.answer is None:
                call.answer = answer
                self.kernel.wake(call.thread)

        self.kernel.after(delay, come_back)

    def _belate(self, request: Request, asker: Thread, answer: Any, delay: float) -> tuple[Any, float]:
        """Let a grant be heard of when it is of no use any more, or not at all.

        What gives the late one back comes twice. After a connection that breaks, the next try waits for another one
        until the grant of which nobody knows has nearly lapsed, and is under way when it does.
        """
        way, self.belated = self.belated, ""
        self.late_until = self.kernel.now + 2 * request.ttl
        chance = self.kernel.random.random
        if way == "late":
            self._echo = request.lease_id, chance() * request.ttl
            return answer, request.ttl
        self._slow[asker] = request.ttl * (1.0 - 0.2 * chance()), request.ttl * 0.6 * chance()
        return (None, BackendUnavailable("the connection broke", outcome_unknown=True)), delay

    def _loses(self, cut_until: float) -> bool:
        return self.kernel.now < cut_until or self.kernel.random.random() < self.server.weather.lost

    def _way_of(self, call: Call) -> float:
        """Return how long a request takes to the server; a straggler comes after what is asked for in its place."""
        if call.verb == "try_acquire" and self.deaf_for:
            self.cut_in_until = max(self.cut_in_until, self.kernel.now + self.deaf_for)
            self.deaf_for = 0.0
        if call.verb == "try_acquire" and call.thread in self._slow:
            return self._slow.pop(call.thread)[1]
        if call.verb == "renew" and self.straggles:
            late, self.straggles = self.straggles, 0.0
            return late
        return self._delay()

    def _delay(self) -> float:
        weather, chance = self.server.weather, self.kernel.random.random
        return weather.delay * chance() if chance() >= weather.slow else chance() ** 2 * 8.0


class Ear:
    """A subscription: hints come late, twice or not at all, and the link may break."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._heard = SimpleQueue()
        link.server.store.hear(self)

    def put(self, change: Change) -> None:
        """Called by the store."""
        link = self._link
        for _ in range(2 if link.kernel.random.random() < link.server.weather.doubled else 1):
            if not link._loses(link.cut_in_until):
                link.kernel.after(link._delay(), lambda: self._come(change))

    def _come(self, what: Change | Exception) -> None:
        if not self._link.process.dead:
            self._heard.put(what)

    def break_off(self) -> None:
        """Break the link, as seen from outside."""
        self._link.server.store.unhear(self)
        self._come(BackendUnavailable("the link broke"))

    def next(self, seconds: float) -> Sequence[Change]:
        try:
            what = self._heard.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return []
        if isinstance(what, Exception):
            raise what
        return [what]

    def close(self) -> None:
        self._link.server.store.unhear(self)
