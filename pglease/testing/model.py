"""Seeded random conversations, held with a store and with the memory backend: both must give the same answers.

Time moves on a grid of whole units, and every hold ends between two of its points, so that the time a real store takes
to answer never decides who holds a lease. Compared are kinds of outcomes, tokens, owners, transitions, reasons,
metadata, and durations within a tolerance. Where a name was cleaned up, a store may go on at any larger token; from
then on its tokens must rise by one again.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pglease import clock
from pglease.backends.base import Backend, Budget
from pglease.backends.memory import MemoryBackend
from pglease.records import Adoption, Gone, Granted, Held, Lease, Refused, Renewal, Request
from pglease.testing.fake_clock import FakeClock

NAMES = ("job", "job_2", "j%b")
PREFIXES = ("", "job", "job_", "j%", "x")
OWNERS = ("alice", "bob", "carol")
PATIENCE = 10.0
"""Seconds a verb may take."""
SEEDS_VARIABLE = "PGLEASE_MODEL_SEEDS"


def seeds(count: int) -> Sequence[int]:
    """Return the seeds 0 to count - 1, or those in the variable PGLEASE_MODEL_SEEDS: "17", or "100-299"."""
    chosen = os.environ.get(SEEDS_VARIABLE)
    if not chosen:
        return range(count)
    first, _, last = chosen.partition("-")
    return range(int(first), int(last or first) + 1)


def compare_with_model(
    clients: Sequence[Backend],
    pass_time: Callable[[float], None],
    seed: int,
    *,
    steps: int = 60,
    unit: float = 60.0,
) -> None:
    """Hold one random conversation with a store and with the model, and compare every answer.

    Args:
        clients: clients of one store, three by preference. Whatever the store holds is ended and cleaned up first.
        pass_time: lets seconds pass for the store.
        seed: chooses the conversation.
        steps: how many verbs it has.
        unit: seconds between two points of the grid; the whole conversation must take less than an eighth of it, but
            for the time passed on purpose. Default: a minute, for stores whose `pass_time` takes no time.

    Raises:
        AssertionError: with the step, both answers, what came before, and the command that replays it.
    """
    _empty(clients[0])
    Conversation(clients, pass_time, seed, unit).run(steps)


def _budget() -> Budget:
    return Budget.of(PATIENCE, clock.now)


def _empty(client: Backend) -> None:
    for lease in client.list("", _budget(), ended=True):
        client.force_release(lease.task_name, lease.fencing_token, _budget())
    client.cleanup(0.0, _budget())


@dataclass
class Tokens:
    """How far each name's tokens are ahead of the model's: after a cleanup a store may have gone on further up."""

    ahead: dict[str, int] = field(default_factory=dict)
    greatest: dict[str, int] = field(default_factory=dict)

    def learn(self, model: Lease, store: Lease) -> None:
        """Take the first grant after a cleanup as the name's new starting point; it must lie above all earlier ones."""
        name, token = model.task_name, store.fencing_token
        if model.transitions == 0 and token > self.greatest.get(name, 0):
            self.ahead[name] = token - model.fencing_token
        self.greatest[name] = max(token, self.greatest.get(name, 0))

    def as_stores(self, name: str, token: int) -> int:
        """Return the store's token for one of the model's."""
        return token + self.ahead.get(name, 0)


Verb = Callable[[Backend, Budget], Any]


class Conversation:
    """The same random questions to a store and to the model."""

    def __init__(self, clients: Sequence[Backend], pass_time: Callable[[float], None], seed: int, unit: float) -> None:
        self.clients, self.pass_time, self.seed, self.unit = clients, pass_time, seed, unit
        self.random = random.Random(seed)
        self.clock = FakeClock()
        first = MemoryBackend(clock=self.clock)
        self.models = [first, *(first.another() for _ in clients[1:])]
        self.tokens = Tokens()
        self.ids = {name: [self._new_id()] for name in NAMES}
        self.writers: dict[str, int] = {}
        self.said: list[str] = []

    def run(self, steps: int) -> None:
        """Hold it; the last step looks at everything."""
        choices = [
            self._acquire,
            self._renew,
            self._release,
            self._adopt,
            self._describe,
            self._force,
            self._look,
            self._cleanup,
            self._pass_time,
        ]
        weights = [30, 20, 12, 6, 5, 5, 8, 4, 15]
        for step in self.random.choices(choices, weights, k=steps):
            step()
        self._list("", ended=True)

    # -- the questions -----------------------------------------------------------------------------------------------

    def _acquire(self) -> None:
        name, who = self.random.choice(NAMES), self.random.randrange(len(self.clients))
        lease_id = self._some_id(name) if self.random.random() < 0.15 else self._new_id()
        if self.clients[0].traits.clock == "observed change":  # only who wrote a hold last knows what is left of it
            who = self.writers.setdefault(lease_id, who)
        self.ids[name].append(lease_id)
        metadata: dict[str, Any] = self.random.choice(
            [{}, {"n": len(self.said), "who": OWNERS[who % 3]}, {"deep": [1, {"ü": None}]}]
        )
        request = Request(name, OWNERS[who % 3], lease_id, self._ttl(), metadata)
        self._ask(who, f"try_acquire({request})", lambda b, box: b.try_acquire(request, box))

    def _renew(self) -> None:
        names = self.random.choices(NAMES, k=self.random.choice([0, 1, 1, 2, 3, 5]))
        # One id for each name: whether a stale id sees its name before or after the live one was renewed is left open.
        ids = {name: self._some_id(name) for name in NAMES}
        batch = [Renewal(name, ids[name], 1.5 * self.unit) for name in names]
        if self.random.random() < 0.1:
            batch.append(Renewal("never", self._new_id(), self.unit))
        who = self._anybody()
        outcomes = self._ask(who, f"renew({batch})", lambda b, box: b.renew(batch, box))
        for renewal, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Held):
                self.writers[renewal.lease_id] = who

    def _release(self) -> None:
        name = self.random.choice(NAMES)
        lease_id = self._some_id(name)
        min_hold = self.random.choice([0.0, 0.0, 0.5, 1.5, 3.5]) * self.unit
        said = f"release({name!r}, {lease_id}, min_hold={min_hold:g})"
        self._ask(self._anybody(), said, lambda b, box: b.release(name, lease_id, box, min_hold=min_hold))

    def _adopt(self) -> None:
        name, who, next_id = self.random.choice(NAMES), self._anybody(), self._new_id()
        lease_id = self._some_id(name)
        if self.clients[0].traits.clock == "observed change":  # who has not seen it run out takes it for one that runs
            who = self.writers.setdefault(lease_id, who)
        adoption = Adoption(name, lease_id, next_id, OWNERS[who % 3], self._ttl())
        answer = self._ask(who, f"adopt({adoption})", lambda b, box: b.adopt(adoption, box))
        if isinstance(answer, Granted):
            self.ids[name].append(next_id)
            self.writers[next_id] = who

    def _describe(self) -> None:
        name, metadata = self.random.choice(NAMES), {"n": len(self.said)}
        lease_id, who = self._some_id(name), self._anybody()
        said = f"set_metadata({name!r}, {lease_id}, {metadata})"
        outcome = self._ask(who, said, lambda b, box: b.set_metadata(name, lease_id, metadata, box))
        if isinstance(outcome, Held):
            self.writers[lease_id] = who

    def _force(self) -> None:
        name = self.random.choice(NAMES)
        current = self.models[0].get(name, _budget())
        token = (current.fencing_token if current else 1) + self.random.choice([0, 0, 0, -1, 1])
        said = f"force_release({name!r}, {token})"
        who = self._anybody()
        model = self.models[who].force_release(name, token, _budget())
        store = self.clients[who].force_release(name, self.tokens.as_stores(name, token), _budget())
        self._compare(said, model, store)

    def _look(self) -> None:
        if self.random.random() < 0.5:
            name = self.random.choice((*NAMES, "never"))
            self._ask(self._anybody(), f"get({name!r})", lambda b, box: b.get(name, box))
        else:
            self._list(self.random.choice(PREFIXES), ended=self.random.random() < 0.5)

    def _list(self, prefix: str, *, ended: bool) -> None:
        said = f"list({prefix!r}, ended={ended})"
        self._ask(self._anybody(), said, lambda b, box: b.list(prefix, box, ended=ended))

    def _cleanup(self) -> None:
        # A quarter beyond the grid: holds end on it (released) or half way (lapsed), so none is on the edge.
        older_than = self.random.choice([0.0, 1.25, 2.25]) * self.unit
        self._ask(self._anybody(), f"cleanup({older_than:g})", lambda b, box: b.cleanup(older_than, box))

    def _pass_time(self) -> None:
        seconds = self.random.choice([1, 1, 2, 3]) * self.unit
        self.said.append(f"{seconds:g} s pass")
        self.pass_time(seconds)
        self.clock.advance(seconds)

    def _ttl(self) -> float:
        return self.random.choice([0.5, 1.5, 2.5, 5.5]) * self.unit

    def _anybody(self) -> int:
        return self.random.randrange(len(self.clients))

    def _new_id(self) -> str:
        return f"{self.random.getrandbits(128):032x}"

    def _some_id(self, name: str) -> str:
        """Return an id used for this name: mostly a recent one, sometimes one of long ago."""
        known = self.ids[name]
        return self.random.choice(known[-2:] if self.random.random() < 0.7 else known)

    # -- the answers -------------------------------------------------------------------------------------------------

    def _ask(self, who: int, said: str, verb: Verb) -> Any:
        model = verb(self.models[who], _budget())
        store = verb(self.clients[who], _budget())
        if isinstance(model, Granted) and isinstance(store, Granted):
            self.tokens.learn(model.lease, store.lease)
        self._compare(f"{OWNERS[who % 3]}: {said}", model, store)
        return model

    def _compare(self, said: str, model: object, store: object) -> None:
        wanted, found = self._plain(model, ahead=True), self._plain(store)
        self.said.append(f"{said} -> {wanted}")
        if not _alike(wanted, found, self.unit / 8):
            raise AssertionError(self._report(found))

    def _plain(self, answer: object, *, ahead: bool = False) -> Any:
        """Return an answer as tuples of plain values, moments as durations, the model's tokens as the store's."""
        match answer:
            case Granted(lease) | Held(lease):
                return (type(answer).__name__, self._plain(lease, ahead=ahead))
            case Refused(lease, retry_after):
                return ("Refused", self._plain(lease, ahead=ahead), retry_after)
            case Gone(reason, lease):
                return ("Gone", reason, self._plain(lease, ahead=ahead))
            case Lease():
                token = answer.fencing_token
                token = self.tokens.as_stores(answer.task_name, token) if ahead else token
                return (answer.task_name, answer.owner_id, token, answer.transitions, *_details(answer))
            case list():
                return tuple(self._plain(one, ahead=ahead) for one in answer)
            case _:
                return answer

    def _report(self, found: object) -> str:
        test = os.environ.get("PYTEST_CURRENT_TEST", "tests").rsplit(" ", 1)[0]
        before = "\n  ".join(self.said[-13:-1])
        return (
            f"seed {self.seed}, step {len(self.said)}\n  {before}\nthen {self.said[-1]}\n"
            f"  was wanted, but the store said\n  {found}\n"
            f"replay:  {SEEDS_VARIABLE}={self.seed} python -m pytest '{test}'"
        )


def _details(lease: Lease) -> tuple[Any, ...]:
    ages = [(lease.seen_at - moment).total_seconds() for moment in (lease.acquired_at, lease.heartbeat_at)]
    return (*ages, (lease.expires_at - lease.seen_at).total_seconds(), dict(lease.metadata), lease.given_back)


def _alike(wanted: Any, found: Any, tolerance: float) -> bool:
    if isinstance(wanted, tuple) and isinstance(found, tuple):
        return len(wanted) == len(found) and all(
            _alike(one, other, tolerance) for one, other in zip(wanted, found, strict=True)
        )
    if isinstance(wanted, float) and isinstance(found, float):
        return math.isclose(wanted, found, rel_tol=0, abs_tol=tolerance)
    return type(wanted) is type(found) and bool(wanted == found)
