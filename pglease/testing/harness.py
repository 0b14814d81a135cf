"""The contract suite's only door to a store, and the small world its tests are told in."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, cast

import pytest

from pglease import clock
from pglease.backends.base import Backend, Budget, FairBackend, ParamStyle, Subscription, WakingBackend, fencing
from pglease.bonds import Bond
from pglease.errors import BackendClosed, BackendUnavailable
from pglease.records import (
    Adoption,
    Change,
    Claim,
    Gone,
    Granted,
    Held,
    Lease,
    Place,
    Refused,
    Released,
    ReleaseOutcome,
    Renewal,
    RenewalOutcome,
    Request,
    Ticket,
    Unknown,
)

LONG = 600.0
"""Seconds of a ttl that does not run out while a test looks."""
PATIENCE = 10.0
"""Seconds a verb may take on a store that is well."""


class Harness(ABC):
    """An empty store, and what can be done to it.

    Attributes:
        tick: seconds of a ttl that a test can wait out. Where `pass_time` takes no time, take a large one (30 s) and no
            slow machine spoils a test; where it really waits, the smallest that store and machine keep (0.3 s).
        slack: seconds by which two readings of one duration may differ, since the store's own clock went on meanwhile.
        hears: whether `listen` can work from here, on a store with the trait `wakes_waiters`.
        racers: how many threads race for a name.
        history: how many holds that have ended the store keeps for each name; 0 for none.
        model_runs: how many random conversations are compared with the model.
        paramstyle: how the connections of `transaction` write parameters.
    """

    tick: float = 0.3
    slack: float = 5.0
    hears: bool = True
    racers: int = 30
    model_runs: int = 20
    history: int = 0
    paramstyle: ParamStyle = "format"

    @abstractmethod
    def open(self) -> Backend:
        """Return another client of the same store. The suite closes it."""

    @abstractmethod
    def pass_time(self, seconds: float) -> None:
        """Return when that much time has passed for the store: wait, step its fake clock, or shift back what it noted.

        The suite compares durations within one record (`expires_at - seen_at`), never moments before and after.
        """

    def break_link(self) -> None:
        """Make the store unreachable, without a word, for clients opened before and after."""
        pytest.skip("this store has no link that could break")

    def mend_link(self) -> None:
        """Make the store reachable again."""
        pytest.skip("this store has no link that could break")

    def restart(self) -> None:
        """Stop the store and start it again; what it has written stays."""
        pytest.skip("this store cannot be restarted")

    def end_session(self, backend: Backend) -> None:  # noqa: ARG002
        """Have the store end what this client's holds are bound to, as it does when the client's process dies.

        A hold may depend on that before its record says so, and without the record nobody can tell that it ended with
        it: what is still being written down is waited for first. Returns when it is gone for the store.
        """
        pytest.skip("this store binds nothing to a session")

    def transaction(self) -> AbstractContextManager[Any]:
        """Begin a transaction of an application's, on a connection that `guard` takes; at the end it is rolled back.

        What it gives has an `execute` that returns what has a `fetchall`.
        """
        pytest.skip("this store cannot fence")

    @abstractmethod
    def close(self) -> None:
        """Take the store away."""


def new_id() -> str:
    """Return a lease id, as the library chooses it for each acquisition."""
    return secrets.token_hex(16)


def budget(seconds: float = PATIENCE) -> Budget:
    """Return a budget that ends `seconds` from now."""
    return Budget.of(seconds, clock.now)


@dataclass(frozen=True)
class Hold:
    """One grant, and what its holder may ask."""

    worker: Worker
    request: Request
    lease: Lease
    bond: Bond | None = None

    @property
    def name(self) -> str:
        """The name that is held."""
        return self.request.name

    @property
    def token(self) -> int:
        """Its fencing token."""
        return self.lease.fencing_token

    @property
    def claim(self) -> Claim:
        """What it shows to be let write."""
        return Claim(self.name, self.request.lease_id, self.token)

    def guard(self, connection: Any) -> None:
        """Prove inside a transaction that it is current."""
        fencing(self.worker.backend, "guard").guard(self.claim, connection)

    def renewal(self, ttl: float = LONG) -> Renewal:
        """Return what a batch asks for this hold."""
        return Renewal(self.name, self.request.lease_id, ttl)

    def renew(self, ttl: float = LONG) -> RenewalOutcome:
        """Ask for `ttl` more seconds."""
        return self.worker.renew(self.renewal(ttl))[0]

    def renew_after_trouble(self, within: float = 5.0) -> RenewalOutcome:
        """Ask until the store says something: a request from before the trouble may still be at work on the record."""
        until = clock.now() + within
        while True:
            try:
                outcome = self.renew()
            except BackendUnavailable as error:  # which says of all that was asked that it is unknown
                outcome = Unknown(error)
            if not isinstance(outcome, Unknown) or clock.now() >= until:
                return outcome
            time.sleep(0.01)

    def renewed(self, ttl: float = LONG) -> Lease:
        """Renew; anything but success fails the test."""
        outcome = self.renew(ttl)
        assert isinstance(outcome, Held), outcome
        return outcome.lease

    def adopt(
        self,
        worker: Worker,
        ttl: float = LONG,
        *,
        next_id: str | None = None,
        unattended: bool = False,
        within: float = PATIENCE,
    ) -> Granted | Gone:
        """Let `worker` go on with it."""
        adoption = Adoption(
            self.name, self.request.lease_id, next_id or new_id(), worker.label, ttl, unattended=unattended
        )
        return worker.backend.adopt(adoption, budget(within))

    def adopted_by(self, worker: Worker, ttl: float = LONG, *, unattended: bool = False) -> Hold:
        """Let `worker` go on with it; anything but success fails the test."""
        next_id = new_id()
        answer = self.adopt(worker, ttl, next_id=next_id, unattended=unattended)
        assert isinstance(answer, Granted), answer
        return Hold(worker, Request(self.name, worker.label, next_id, ttl), answer.lease, answer.bond)

    def describe(self, metadata: Mapping[str, Any]) -> Held | Gone:
        """Replace its metadata."""
        return self.worker.backend.set_metadata(self.name, self.request.lease_id, metadata, budget())

    def release(self, *, min_hold: float = 0.0) -> ReleaseOutcome:
        """Give it back."""
        return self.worker.backend.release(self.name, self.request.lease_id, budget(), min_hold=min_hold)

    def released(self, *, min_hold: float = 0.0) -> None:
        """Give it back; anything but success fails the test."""
        outcome = self.release(min_hold=min_hold)
        assert outcome == Released(), outcome


@dataclass(frozen=True)
class Worker:
    """Somebody who wants leases: a client of the store, and a label."""

    backend: Backend
    label: str

    def ask(
        self,
        name: str,
        ttl: float = LONG,
        *,
        metadata: Mapping[str, Any] | None = None,
        lease_id: str | None = None,
        ticket_id: str | None = None,
        within: float = PATIENCE,
    ) -> Granted | Refused:
        """Ask once, each time under a new id unless one is given."""
        request = Request(name, self.label, lease_id or new_id(), ttl, metadata or {}, ticket_id)
        return self.backend.try_acquire(request, budget(within))

    def hold(
        self,
        name: str,
        ttl: float = LONG,
        *,
        metadata: Mapping[str, Any] | None = None,
        lease_id: str | None = None,
        ticket_id: str | None = None,
    ) -> Hold:
        """Ask once; anything but a grant fails the test."""
        request = Request(name, self.label, lease_id or new_id(), ttl, metadata or {}, ticket_id)
        answer = self.backend.try_acquire(request, budget())
        assert isinstance(answer, Granted), answer
        return Hold(self, request, answer.lease, answer.bond)

    def is_refused(self, name: str, *, ticket_id: str | None = None) -> Refused:
        """Ask once; anything but a refusal fails the test."""
        answer = self.ask(name, ticket_id=ticket_id)
        assert isinstance(answer, Refused), answer
        return answer

    def renew(self, *renewals: Renewal) -> list[RenewalOutcome]:
        """Ask for more time for many holds."""
        return self.backend.renew(renewals, budget())

    def force(self, name: str, token: int) -> bool:
        """End whoever holds `name` under `token`."""
        return self.backend.force_release(name, token, budget())

    def sees(self, name: str) -> Lease:
        """Read the record; its absence fails the test."""
        lease = self.backend.get(name, budget())
        assert lease is not None, f"{name!r} is not known"
        return lease

    def list(self, prefix: str = "", *, ended: bool = False) -> Sequence[Lease]:
        """Read the records under `prefix`."""
        return self.backend.list(prefix, budget(), ended=ended)

    def names(self, prefix: str = "", *, ended: bool = False) -> Sequence[str]:
        """Read the names under `prefix`."""
        return [lease.task_name for lease in self.list(prefix, ended=ended)]

    def cleanup(self, older_than: float = 0.0) -> int:
        """Delete what is over."""
        return self.backend.cleanup(older_than, budget())

    def listens(self) -> Ear:
        """Begin to hear of marked names."""
        subscription = cast("WakingBackend", self.backend).listen(budget())
        assert subscription is not None, "nothing can be heard from here"
        return Ear(subscription)

    def mark(self, name: str, seconds: float = LONG) -> bool:
        """Note that somebody waits for a name."""
        return cast("WakingBackend", self.backend).mark(name, seconds, budget())

    def queue(self, name: str, ttl: float = LONG, ticket_id: str | None = None) -> Queued:
        """Take or renew a place; a name without a record fails the test."""
        ticket = Ticket(name, ticket_id or new_id(), self.label, ttl)
        place = cast("FairBackend", self.backend).queue(ticket, budget())
        assert place is not None, f"{name!r} has no record"
        return Queued(self, ticket, place)


@dataclass(frozen=True)
class Queued:
    """One place in a queue."""

    worker: Worker
    ticket: Ticket
    place: Place

    @property
    def ticket_id(self) -> str:
        """What a request names."""
        return self.ticket.ticket_id

    def renewed(self, ttl: float = LONG) -> Queued:
        """Renew the place, or take a new one at the end if it was lost."""
        return self.worker.queue(self.ticket.name, ttl, self.ticket_id)

    def leave(self) -> bool:
        """Give it up."""
        backend = cast("FairBackend", self.worker.backend)
        return backend.leave_queue(self.ticket.name, self.ticket_id, budget())

    def hold(self, ttl: float = LONG) -> Hold:
        """Ask with this ticket; anything but a grant fails the test."""
        return self.worker.hold(self.ticket.name, ttl, ticket_id=self.ticket_id)

    def is_refused(self) -> Refused:
        """Ask with this ticket; anything but a refusal fails the test."""
        return self.worker.is_refused(self.ticket.name, ticket_id=self.ticket_id)


class Ear:
    """A subscription, and all it has heard."""

    def __init__(self, subscription: Subscription) -> None:
        self.subscription = subscription
        self.heard: list[Change] = []

    def hears(self, name: str, what: str, within: float = PATIENCE) -> Change:
        """Wait for such a change, among what was not waited for yet; its absence fails the test.

        What was heard of this name before it is forgotten. What was heard of others is kept: a cluster's nodes tell of
        theirs in any order.
        """
        until = clock.now() + within
        while True:
            for place, change in enumerate(self.heard):
                if (change.name, change.what) == (name, what):
                    self.heard[: place + 1] = [other for other in self.heard[:place] if other.name != name]
                    return change
            left = until - clock.now()
            assert left > 0, f"{name!r} was not heard to be {what}"
            self.heard.extend(self.subscription.next(left))

    def hears_next(self, within: float = PATIENCE) -> Change:
        """Wait for the next change, whatever it is."""
        until = clock.now() + within
        while not self.heard:
            left = until - clock.now()
            assert left > 0, "nothing was heard"
            self.heard.extend(self.subscription.next(left))
        return self.heard.pop(0)

    def listens_until_it_is_over(self) -> None:
        """Listen until that raises."""
        while True:
            self.heard.extend(self.subscription.next(PATIENCE))

    def close(self) -> None:
        """Hear no more."""
        self.subscription.close()


class World:
    """Three workers, each with a client of its own, on one store."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self._opened: list[Backend] = []
        self.alice, self.bob, self.carol = self.worker("alice"), self.worker("bob"), self.worker("carol")

    @property
    def tick(self) -> float:
        """Seconds of a ttl that can be waited out."""
        return self.harness.tick

    def worker(self, label: str) -> Worker:
        """Let one more worker in, with a client of its own."""
        backend = self.harness.open()
        self._opened.append(backend)
        return Worker(backend, label)

    def pass_time(self, seconds: float) -> None:
        """Let time pass for the store, and for all who judge it: by observed change, only what was seen before ages."""
        for backend in self._opened:
            if backend.traits.clock == "observed change":
                with suppress(BackendClosed):
                    backend.list("", budget(), ended=True)
        self.harness.pass_time(seconds)

    def lapsed_hold(self, name: str, worker: Worker | None = None) -> Hold:
        """Return a hold of alice's (or `worker`'s) whose ttl has run out."""
        hold = (worker or self.alice).hold(name, self.tick)
        self.pass_time(1.1 * self.tick)
        return hold

    def needs(self, trait: str) -> None:
        """Skip the test where the store lacks the trait."""
        if not getattr(self.alice.backend.traits, trait):
            pytest.skip(f"this store lacks the trait {trait!r}")
        if trait == "wakes_waiters" and not self.harness.hears:
            pytest.skip("nothing can be heard from here")

    def about(self, found: float, wanted: float) -> bool:
        """Tell whether a duration is what it should be, but for the time that the test itself took."""
        return wanted - self.harness.slack <= found <= wanted + self.harness.slack

    def close(self) -> None:
        """Close every client."""
        for backend in self._opened:
            backend.close()
