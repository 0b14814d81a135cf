"""Leases in Kubernetes: one `coordination.k8s.io/v1` Lease object for each name, changed by compare-and-swap.

The API server makes every write a condition (this uid, this resourceVersion), and so there is one holder at a time. It
judges no time: a hold lapses for a candidate when that candidate's own boot clock has counted the whole ttl since it
first saw the present version (`kubernetes_sightings`). So a candidate that has just arrived waits for a ttl behind a
holder that crashed, however long ago; one that asks once and goes away never gets there. Released names are free at
once.

A release empties the object and keeps it, token and all. Only `cleanup` deletes: it first raises the floor of the
tokens in an object of its own, then deletes the very version it saw. Whoever creates an object reads the floor *after*
that and lifts its token above it before it calls the lease granted.
"""

from __future__ import annotations

import builtins
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from pglease import clock as boot_clock
from pglease import forks, options
from pglease.backends import kubernetes_objects as objects
from pglease.backends.base import (
    AsksInOne,
    Budget,
    FencesNothing,
    KeepsNoQueue,
    RemembersNothing,
    TakesNoGroups,
    Traits,
)
from pglease.backends.checks import Check
from pglease.backends.kubernetes_api import Leases, Outrun
from pglease.backends.kubernetes_http import Wire
from pglease.backends.kubernetes_login import read_login, require_lightkube
from pglease.backends.kubernetes_names import checked_namespace, object_name
from pglease.backends.kubernetes_objects import NOTHING, Json, Row
from pglease.backends.kubernetes_sightings import Sighting, Sightings
from pglease.backends.kubernetes_watch import Watch
from pglease.errors import BackendClosed, BackendError, BackendMisconfigured, BackendUnavailable
from pglease.records import (
    Adoption,
    Gone,
    Granted,
    Held,
    Lease,
    Refused,
    Released,
    ReleaseOutcome,
    Renewal,
    RenewalOutcome,
    Request,
    Unknown,
)

log = logging.getLogger("pglease")

A = TypeVar("A")

_TRAITS = Traits(
    kind="Kubernetes",
    clock="observed change",
    shared_by="hosts",
    durable=True,
    wakes_waiters=True,
    caveat="a newcomer waits a whole ttl behind a holder that crashed",
)
_FEW = 4
"""So many objects one thread sees to by itself."""
_MOST_HOLDS = 10_000
"""Holds whose objects are remembered, so that a renewal is one request; those beyond are read again first."""


class _Seen(NamedTuple):
    """A row, and since when it is as it is."""

    row: Row
    since: Sighting


class KubernetesBackend(KeepsNoQueue, FencesNothing, TakesNoGroups, RemembersNothing, AsksInOne):
    """A client of the Leases in one namespace. See `Backend` for the verbs, and the module for what a crash costs.

    Args:
        namespace: where the Lease objects are. Default "": the namespace of the pod, or of the kubeconfig's context.
        context: the kubeconfig's context. Default None: its current one.
        kubeconfig: the file. Default None: the pod's service account, else what KUBECONFIG names, else ~/.kube/config.
        connect_timeout: seconds (or "10s") one connection attempt may take, more than 0. Default 10.
        pool_size: how many requests may be under way at once, 1 or more; renewals have as many of their own. Default 8:
            each hold is renewed by a request of its own.
        clock: reads the boot clock that expiry is judged by, in seconds. Default: that one. For tests.

    Building it connects to nothing, and reads no kubeconfig.

    Raises:
        ConfigurationError: every broken rule at once.
        MissingDependencyError: lightkube is not installed.
    """

    traits = _TRAITS

    def __init__(
        self,
        namespace: str = "",
        *,
        context: str | None = None,
        kubeconfig: str | os.PathLike[str] | None = None,
        connect_timeout: options.Duration = 10,
        pool_size: int = 8,
        clock: Callable[[], float] = boot_clock.now,
    ) -> None:
        require_lightkube()
        with options.all_problems() as problems:
            self._asked_namespace = problems.check(checked_namespace, namespace) if namespace else ""
            timeout = problems.check(options.seconds, connect_timeout, "connect_timeout")
            self._pool_size = problems.check(options.count, pool_size, "pool_size")
        path = os.fspath(kubeconfig) if kubeconfig else None
        self._wire = Wire(lambda: read_login(context, path), pool_size=self._pool_size, connect_timeout=timeout)
        self._now = clock
        self._leases = Leases(self._wire, self._asked_namespace, clock)
        self._fresh()
        forks.forget_in_children(self, type(self).forget)

    def _fresh(self) -> None:
        self._sightings = Sightings()
        self._mine: dict[str, _Seen] = {}
        self._unreadable: set[str] = set()
        self._watches: builtins.list[Watch] = []

    def __repr__(self) -> str:
        where = self._asked_namespace or "namespace of the credentials"
        return f"<KubernetesBackend {where}{' closed' if self._leases.closing.is_set() else ''}>"

    # -- the verbs -----------------------------------------------------------------------------------------------------

    def try_acquire(self, request: Request, budget: Budget) -> Granted | Refused:
        """See `Backend.try_acquire`."""
        while True:
            seen = self._look(request.name, budget)
            if seen is not None and seen.row.lease_id == request.lease_id and not self._over(seen):
                answer = self._recognised(seen, request, budget)
            elif seen is not None and not self._over(seen):
                return _refused(seen.row.record(self._elapsed(seen)))
            else:
                answer = self._taken(seen, request, budget)
            if answer is not None:
                return answer  # else somebody wrote in between: look again

    def _taken(self, seen: _Seen | None, request: Request, budget: Budget) -> Granted | None:
        """Make the name ours; None when somebody else was faster."""
        moment = self._wire.server_clock.now()
        if seen is None:
            row = objects.first_hold(request, self._leases.floor(budget) + 1, moment)
        else:
            floor = 0 if seen.row.settled else self._leases.floor(budget)
            row = objects.next_hold(seen.row, request, floor, moment)
        written = self._grant(row, request, budget)
        if isinstance(written, Outrun):
            return None
        return self._settled(written, request, budget)

    def _grant(self, row: Row, request: Request, budget: Budget) -> _Seen | Outrun:
        def sending() -> None:
            budget.sending()
            self._sightings.asking(request.lease_id, self._now())

        return self._written(row, budget, sending=sending)

    def _settled(self, seen: _Seen, request: Request, budget: Budget) -> Granted | None:
        """Grant; before that, lift the token of a new object above those of its predecessors that were deleted.

        They were deleted before it was created, hence the floor that is read now is above their tokens; one that was
        read earlier need not be.
        """
        if not seen.row.settled:
            try:
                token = max(seen.row.fencing_token, self._leases.floor(budget) + 1)
                written = self._grant(replace(seen.row, fencing_token=token, settled=True), request, budget)
            except BackendError as error:
                if isinstance(error, BackendUnavailable):
                    error.outcome_unknown = True
                raise
            if isinstance(written, Outrun):
                return None
            seen = written
        self._remember(seen)
        return Granted(seen.row.record(NOTHING))

    def _recognised(self, seen: _Seen, request: Request, budget: Budget) -> Granted | None:
        """Return an earlier grant to the one whose request it answers.

        Its time counts from when it was first asked for. Whoever did not ask cannot know when that was, and is told
        that nothing is left.
        """
        if not seen.row.settled:
            return self._settled(seen, request, budget)
        since = seen.since.at if seen.since.own else self._sightings.asked_at(request.lease_id)
        all_of_it = seen.row.left(NOTHING)
        elapsed = all_of_it if since is None else min(all_of_it, self._span(since))
        return Granted(seen.row.record(elapsed))

    def renew(self, renewals: Sequence[Renewal], budget: Budget) -> builtins.list[RenewalOutcome]:
        """See `Backend.renew`. One request for each hold, several at a time, on connections kept for renewals."""
        self._must_be_open()
        sending = _once(budget.sending)  # belief in each of them counts from the first
        outcomes: builtins.list[RenewalOutcome] = [Unknown()] * len(renewals)
        by_name: dict[str, builtins.list[int]] = {}
        for place, renewal in enumerate(renewals):
            by_name.setdefault(renewal.name, []).append(place)

        def renew(places: builtins.list[int]) -> None:
            for place in places:
                try:
                    outcomes[place] = self._renew(renewals[place], budget, sending)
                except BackendError as error:
                    outcomes[place] = Unknown(error)

        self._side_by_side(renew, builtins.list(by_name.values()))
        errors = [outcome.error for outcome in outcomes if isinstance(outcome, Unknown)]
        if errors and len(errors) == len(outcomes) and errors[0] is not None:
            raise errors[0]
        return outcomes

    def _renew(self, renewal: Renewal, budget: Budget, sending: Callable[[], None]) -> RenewalOutcome:
        for seen in self._mine_first(renewal.name, renewal.lease_id, budget, reserved=True):
            if seen is None:
                return Gone("deleted")
            elapsed = self._elapsed(seen)
            if not seen.row.held_by(renewal.lease_id, elapsed):
                return Gone(seen.row.why_gone(renewal.lease_id), seen.row.record(elapsed))
            row = objects.renewed(seen.row, renewal.ttl, elapsed)
            written = self._written(row, budget, sending=sending, reserved=True)
            if isinstance(written, _Seen):
                self._remember(written)
                return Held(written.row.record(NOTHING))
        raise AssertionError("looking never ends")

    def release(self, name: str, lease_id: str, budget: Budget, *, min_hold: float = 0.0) -> ReleaseOutcome:
        """See `Backend.release`."""
        unheard = False
        for seen in self._mine_first(name, lease_id, budget):
            if seen is None:
                return Gone("deleted")
            row, elapsed = seen.row, self._elapsed(seen)
            if row.lease_id != lease_id:
                return Released() if unheard else Gone(row.why_gone(lease_id), row.record(elapsed))
            written = self._written(objects.given_back(row, elapsed, min_hold), budget)
            if isinstance(written, _Seen):
                return Gone("expired", row.record(elapsed)) if row.over(elapsed) else Released()
            unheard = unheard or written.unheard
        raise AssertionError("looking never ends")

    def force_release(self, name: str, fencing_token: int, budget: Budget) -> bool:
        """See `Backend.force_release`."""
        unheard = False
        while True:
            seen = self._look(name, budget)
            if seen is None or self._over(seen) or seen.row.fencing_token != fencing_token:
                return unheard
            written = self._written(objects.given_back(seen.row, self._elapsed(seen)), budget)
            if isinstance(written, _Seen):
                return True
            unheard = unheard or written.unheard

    def adopt(self, adoption: Adoption, budget: Budget) -> Granted | Gone:
        """See `Backend.adopt`. Whoever sees the hold for the first time takes it for one that runs, as it stands there.

        It may have run out by then; while nobody else has taken it, it can be adopted all the same.
        """
        request = Request(adoption.name, adoption.owner_id, adoption.next_id, adoption.ttl)
        for seen in self._mine_first(adoption.name, adoption.lease_id, budget):
            if seen is None:
                return Gone("deleted")
            elapsed, answer = self._elapsed(seen), None
            if seen.row.held_by(adoption.next_id, elapsed):
                answer = self._recognised(seen, request, budget)
            elif not seen.row.held_by(adoption.lease_id, elapsed):
                return Gone(seen.row.why_gone(adoption.lease_id), seen.row.record(elapsed))
            else:
                row = objects.adopted(seen.row, adoption, self._wire.server_clock.now())
                written = self._grant(row, request, budget)
                answer = None if isinstance(written, Outrun) else self._settled(written, request, budget)
            if answer is not None:
                return answer
        raise AssertionError("looking never ends")

    def set_metadata(self, name: str, lease_id: str, metadata: Mapping[str, Any], budget: Budget) -> Held | Gone:
        """See `Backend.set_metadata`."""
        for seen in self._mine_first(name, lease_id, budget):
            if seen is None:
                return Gone("deleted")
            elapsed = self._elapsed(seen)
            if not seen.row.held_by(lease_id, elapsed):
                return Gone(seen.row.why_gone(lease_id), seen.row.record(elapsed))
            written = self._written(objects.described(seen.row, metadata, elapsed), budget)
            if isinstance(written, _Seen):
                self._remember(written)
                return Held(written.row.record(NOTHING))
        raise AssertionError("looking never ends")

    def get(self, name: str, budget: Budget) -> Lease | None:
        """See `Backend.get`."""
        seen = self._look(name, budget)
        return None if seen is None else seen.row.record(self._elapsed(seen))

    def list(self, prefix: str, budget: Budget, *, ended: bool = False) -> builtins.list[Lease]:
        """See `Backend.list`. Needs the right to list."""
        return [
            seen.row.record(self._elapsed(seen))
            for seen in sorted(self._look_at_all(budget), key=lambda seen: seen.row.name)
            if seen.row.name.startswith(prefix) and (ended or seen.row.lease_id is not None or not self._over(seen))
        ]

    def cleanup(self, older_than: float, budget: Budget) -> int:
        """See `Backend.cleanup`. Needs the rights to list and to delete.

        A hold that lapsed without a release is deleted by those who have watched it lapse, not by a command that has
        just been started.
        """
        doomed = [seen.row for seen in self._look_at_all(budget) if self._over_for(seen) >= older_than]
        if not doomed:
            return 0
        self._leases.raise_floor(max(row.fencing_token for row in doomed), budget)
        deleted: queue.SimpleQueue[bool] = queue.SimpleQueue()

        def delete(row: Row) -> None:
            deleted.put(self._leases.delete(object_name(row.name), row.version, budget))

        self._side_by_side(delete, doomed)
        return sum(deleted.get() for _ in range(deleted.qsize()))

    def listen(self, budget: Budget) -> Watch | None:
        """See `WakingBackend.listen`. Needs the rights to list and to watch; without them nothing is heard: None."""
        self._must_be_open()
        try:
            watch = Watch(self._leases, self._saw, budget)
        except BackendMisconfigured as error:
            log.info("releases are not heard of, only looked for: %s", error)
            return None
        self._watches = [each for each in self._watches if not each.over] + [watch]
        if self._leases.closing.is_set():
            watch.close()
        return watch

    def mark(self, name: str, seconds: float, budget: Budget) -> bool:  # noqa: ARG002  # every change is heard here
        """See `WakingBackend.mark`. Writes nothing: a watch hears of every change."""
        return self._look(name, budget) is not None

    # -- looking, and since when -----------------------------------------------------------------------------------

    def _look(self, name: str, budget: Budget, *, reserved: bool = False) -> _Seen | None:
        self._must_be_open()
        found = self._leases.get(object_name(name), budget, reserved=reserved)
        if found is None:
            self._mine.pop(name, None)
            return None
        return self._saw(objects.as_row(found, name))

    def _look_at_all(self, budget: Budget) -> builtins.list[_Seen]:
        self._must_be_open()
        rows = (self._readable(found) for found in self._leases.all(budget))
        return [self._saw(row) for row in rows if row is not None]

    def _readable(self, found: Json) -> Row | None:
        """Read an object of a list; one that somebody spoiled does not hide the others."""
        try:
            return objects.named_row(found)
        except BackendMisconfigured as error:
            name = found["metadata"]["name"]
            log.log(logging.DEBUG if name in self._unreadable else logging.WARNING, "%s", error)
            self._unreadable.add(name)
            return None

    def _saw(self, row: Row) -> _Seen:
        return _Seen(row, self._sightings.saw(row.name, row.version, self._now()))

    def _mine_first(
        self, name: str, lease_id: str, budget: Budget, *, reserved: bool = False
    ) -> Iterator[_Seen | None]:
        """Yield what is remembered of a hold of our own, if it can be used, and then what a look shows, each time."""
        self._must_be_open()
        mine = self._mine.pop(name, None)
        if mine is not None and mine.row.held_by(lease_id, self._elapsed(mine)):
            yield mine
        while True:
            yield self._look(name, budget, reserved=reserved)

    def _remember(self, seen: _Seen) -> None:
        if len(self._mine) >= _MOST_HOLDS:
            self._mine.clear()
        self._mine[seen.row.name] = seen

    def _elapsed(self, seen: _Seen) -> timedelta:
        return self._span(seen.since.at)

    def _span(self, since: float) -> timedelta:
        return timedelta(seconds=max(0.0, self._now() - since))

    def _over(self, seen: _Seen) -> bool:
        return seen.row.over(self._elapsed(seen))

    def _over_for(self, seen: _Seen) -> float:
        """Return for how many seconds a hold has been over, negative for one that runs.

        How long ago one was given back may also be read off the server's clock: nobody works under it any more.
        """
        elapsed = self._elapsed(seen)
        if seen.row.over(NOTHING):
            elapsed = max(elapsed, self._wire.server_clock.now() - seen.row.written_at)
        return -seen.row.left(elapsed).total_seconds()

    # -- writing -----------------------------------------------------------------------------------------------------

    def _written(
        self, row: Row, budget: Budget, *, sending: Callable[[], None] | None = None, reserved: bool = False
    ) -> _Seen | Outrun:
        """Make `row` the present version in place of the one it was made from."""
        body = objects.as_object(row, self._leases.namespace(budget), self._wire.server_clock.now())
        outcome = self._leases.write(body, budget, sending=sending, reserved=reserved)
        if isinstance(outcome, Outrun):
            return outcome
        done = objects.as_row(outcome.found, row.name)
        return _Seen(done, self._sightings.wrote(row.name, done.version, outcome.sent_at))

    def _side_by_side(self, act: Callable[[A], None], things: Sequence[A]) -> None:
        """Do it to each, on several threads when there are many; what one raises is raised when all are done."""
        waiting: queue.SimpleQueue[A] = queue.SimpleQueue()
        for thing in things:
            waiting.put(thing)
        errors: builtins.list[BaseException] = []

        def work() -> None:
            try:
                while True:
                    act(waiting.get_nowait())
            except queue.Empty:
                return
            except BaseException as error:  # noqa: BLE001  # raised below, on the thread that asked
                errors.append(error)

        helpers = _started(work, min(self._pool_size, -(-len(things) // _FEW)) - 1)
        work()
        for helper in helpers:
            helper.join()
        if errors:
            raise errors[0]

    # -- the end -----------------------------------------------------------------------------------------------------

    def _must_be_open(self) -> None:
        if self._leases.closing.is_set():
            raise BackendClosed("this Kubernetes store was closed")

    def forget(self) -> None:
        """See `Backend.forget`."""
        self._leases.forget()
        self._fresh()

    def close(self) -> None:
        """See `Backend.close`."""
        self._leases.closing.set()
        while self._watches:
            self._watches.pop().close()
        self._wire.close()

    # -- what operators ask for ----------------------------------------------------------------------------------------

    def grants(self) -> str:
        """Return the manifests of the Roles that workers and a janitor need."""
        from pglease.backends import kubernetes_doctor

        return kubernetes_doctor.manifests(self._asked_namespace or "default")

    def diagnose(self, *, timeout: float = 30.0) -> Iterator[Check]:
        """Yield one check after the other: what was found, and what to do about it."""
        from pglease.backends import kubernetes_doctor

        yield from kubernetes_doctor.diagnose(self._leases, lambda: Budget.of(timeout, boot_clock.now))


def _refused(lease: Lease) -> Refused:
    return Refused(lease, lease.time_remaining())


def _once(act: Callable[[], None]) -> Callable[[], None]:
    """Return what does `act` at the first call alone, whichever thread makes it."""
    todo = [act]

    def do() -> None:
        with suppress(IndexError):
            todo.pop()()

    return do


def _started(work: Callable[[], None], count: int) -> builtins.list[threading.Thread]:
    """Start helpers; fewer where threads have run out or the interpreter is going down."""
    helpers = []
    for _ in range(count):
        helper = threading.Thread(target=work, name="pglease-kubernetes", daemon=True)
        try:
            helper.start()
        except RuntimeError:
            break
        helpers.append(helper)
    return helpers
