"""Celery: tasks that run under a lease, and one beat at a time. Needs the extra `celery`; docs/celery.md tells.

    @app.task(base=LeaseTask, lease="import:{0}", lease_ttl="5m", lease_on_conflict="retry")
    def import_tenant(tenant): ...

Prefork is safe without any wiring: a client connects at its first use, and a pool child forgets its parent's
connections and leases before any code of yours runs there.
"""

from __future__ import annotations

import functools
import inspect
import logging
import random
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, TypeAlias, TypeVar, get_args

from celery import Task, current_task
from celery.beat import PersistentScheduler, Scheduler
from celery.exceptions import Ignore

from pglease import options
from pglease.decorator import SKIPPED, naming
from pglease.default import default_client
from pglease.errors import AcquisitionError, BackendUnavailable, ConfigurationError
from pglease.handles import HeldLease, NotAcquired
from pglease.options import Duration, OnLost
from pglease.records import Handover

if TYPE_CHECKING:
    from pglease.blocks import LeaseContext
    from pglease.client import PGLease

log = logging.getLogger("pglease")

P = ParamSpec("P")
R = TypeVar("R")

OnConflict: TypeAlias = Literal["skip", "retry", "raise"]
"""What becomes of a call while somebody else has the lease. See `LeaseTask`."""

HANDOVER_HEADER = "pglease_handover"
"""The message header that carries a `Handover`, as text."""
SKIPPED_STATE = "SKIPPED"
"""The state of a task that was skipped. It is none of those that `AsyncResult.get` waits for."""
SPREAD = 1.0
"""Seconds over which retries are spread, so that those who were refused together do not come back together."""
LOOK = 5.0
"""Seconds between two looks of a beat that stands by whether it is to end, and between tries when the store is down."""


@dataclass(frozen=True, slots=True)
class _Terms:
    """Under which lease calls run, and what becomes of those that do not get it."""

    named: Callable[..., str]
    ttl: Duration
    on_conflict: OnConflict
    hold: Mapping[str, Any]
    leases: PGLease | None

    def check(self) -> None:
        """Refuse what can never be right, when the task is made rather than when it is called."""
        with options.all_problems() as problems:
            problems.check(options.choice, self.on_conflict, "on_conflict", get_args(OnConflict))
            problems.check(options.hold_options, "named at each call", self.ttl, **self.hold)

    def perform(
        self, task: Task | None, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call `body` under the lease, or do what was chosen for a conflict."""
        with ExitStack() as stack:
            try:
                lease = stack.enter_context(self._block(task, self.named(*args, **kwargs)))
            except BackendUnavailable as trouble:
                if task is None or self.on_conflict != "retry":
                    raise
                # A grant whose answer was lost lapses by itself within a ttl.
                _retry(task, trouble, options.seconds(self.ttl, "ttl"))
            if lease:
                return body(*args, **kwargs)
        return self._conflict(task, lease)

    def _block(self, task: Task | None, name: str) -> LeaseContext[HeldLease | NotAcquired]:
        leases = self.leases or default_client()
        handover = _take_handover(task)
        if handover is None:
            return leases.acquire(name, self.ttl, metadata=_facts(task), **self.hold)
        _check_same(handover, name)
        return leases.adopt(handover, self.ttl, **self.hold)

    def _conflict(self, task: Task | None, refused: NotAcquired) -> Any:
        busy = AcquisitionError(
            f"the lease {refused.name!r} is held by {refused.held_by or 'somebody else'}",
            name=refused.name,
            held_by=refused.held_by,
            retry_after=refused.retry_after,
        )
        if task is not None and (
            self.on_conflict == "retry" or (self.on_conflict == "skip" and _is_own(task, refused))
        ):
            _retry(task, busy, refused.retry_after)
        if self.on_conflict != "skip":
            raise busy
        facts = {"lease_name": refused.name, "lease_outcome": "skip"}
        log.info("a task is skipped: the lease %r is held by %r", refused.name, refused.held_by, extra=facts)
        if task is None or task.request.called_directly:
            return SKIPPED
        meta = {"lease": refused.name, "held_by": refused.held_by, "retry_after": refused.retry_after}
        task.update_state(state=SKIPPED_STATE, meta=meta)
        raise Ignore(str(busy))


def _retry(task: Task, reason: Exception, after: float) -> NoReturn:
    """Send the task again. Called directly it cannot be, and Celery raises the reason."""
    raise task.retry(exc=reason, countdown=after + random.uniform(0, SPREAD))


def _facts(task: Task | None) -> dict[str, Any]:
    """Return what others read in the record: which message is worked on, and where."""
    if task is None or task.request.id is None:
        return {}
    return {"task": task.name, "task_id": task.request.id, "worker": task.request.hostname}


def _is_own(task: Task, refused: NotAcquired) -> bool:
    """Tell whether the same message has it: its child was killed, or has sent it again and is about to end.

    Skipped in favour of itself, the work would be lost.
    """
    holder = refused.lease.metadata.get("task_id") if refused.lease is not None else None
    return holder is not None and holder == task.request.id


def _take_handover(task: Task | None) -> Handover | None:
    """Take the handover out of the message: a retry of it asks for the lease by its name."""
    headers = None if task is None else task.request.headers
    text = headers.pop(HANDOVER_HEADER, None) if headers else None
    return None if text is None else Handover.read(text)


def _check_same(handover: Handover, name: str) -> None:
    if handover.name != name:
        raise ConfigurationError(f"this call needs the lease {name!r}, and was handed over {handover.name!r}")


class LeaseTask(Task):  # type: ignore[misc]  # Celery ships no types
    """A task whose body runs under a lease: `@app.task(base=LeaseTask, lease="import:{tenant}")`.

    The body finds the handle by `pglease.current_lease()`. Operators read in the record which message is worked on. The
    lease is given back when the body ends, also by an error, a retry or a soft time limit; if the pool child is killed
    it is free after its ttl.

    Attributes:
        lease: the lease's name; a template over the call's arguments (`"import:{0}"`, `"import:{tenant}"`), or a
            callable that is given them. None (default): no lease, so that this may be the base of all tasks.
        lease_ttl: seconds (or "5m") until it is free if the child is killed. Default 60.
        lease_on_conflict: what becomes of a call while somebody else has it. "skip" (default): the state `SKIPPED`, and
            the message is done; unless it is the message itself that has it, from a child that was killed or has just
            sent it again: then as "retry". "retry": sent again for when the hold would end, counted by the task's
            `max_retries`; also where the store is unreachable. "raise": `AcquisitionError`, a failure. A task that is
            called directly answers `pglease.SKIPPED` for "skip", and raises for "retry".
        lease_on_lost: "raise" (default), "log", or "exit", which ends the pool child before anybody else can have the
            lease. See `PGLease.acquire`.
        lease_min_hold, lease_max_hold: see `PGLease.acquire`.
        leases: the client. Default: the default client (`PGLEASE_URL`, `DATABASE_URL`, `pglease.configure`).

    Raises:
        ConfigurationError: when the task is bound to its app, for every broken rule.
    """

    abstract = True
    lease: str | Callable[..., str] | None = None
    lease_ttl: Duration = 60
    lease_on_conflict: OnConflict = "skip"
    lease_on_lost: OnLost = "raise"
    lease_min_hold: Duration | None = None
    lease_max_hold: Duration | None = None
    leases: PGLease | None = None

    _terms: _Terms | None = None

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Check what the task asks for, once it and the app's annotations are known."""
        super().on_bound(app)
        lease = inspect.getattr_static(cls, "lease")  # a callable is no method
        if lease is None:
            return
        hold = {"on_lost": cls.lease_on_lost, "min_hold": cls.lease_min_hold, "max_hold": cls.lease_max_hold}
        named = naming(getattr(lease, "__func__", lease), _body_of(cls))
        cls._terms = _Terms(named, cls.lease_ttl, cls.lease_on_conflict, hold, cls.leases)
        cls._terms.check()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body under the lease; the worker calls this, and so may you."""
        # Celery's own __call__ stacks a request for direct calls; under a worker's it would hide that one.
        body = super().__call__ if self.request.called_directly else self.run
        if self._terms is None:
            return body(*args, **kwargs)
        return self._terms.perform(self, body, args, kwargs)

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        *more: Any,
        handover: Handover | str | None = None,
        **wanted: Any,
    ) -> Any:
        """Send the task, as Celery does.

        Args:
            args, kwargs, more, wanted: as for Celery's `Task.apply_async`.
            handover: a lease to go on with (`HeldLease.transfer`), which the task then adopts instead of asking for it.
                Default None. Adopted once: where it is spent or has lapsed, that is a conflict.

        Raises:
            ConfigurationError: it is of another lease than this call needs; nothing was sent.
        """
        if handover is not None:
            text = str(handover)
            if self._terms is not None:
                _check_same(Handover.read(text), self._terms.named(*(args or ()), **(kwargs or {})))
            wanted["headers"] = {**(wanted.get("headers") or {}), HANDOVER_HEADER: text}
        return super().apply_async(args, kwargs, *more, **wanted)


def _body_of(task: type[Task]) -> Callable[..., Any]:
    """Return the body as calls see it, without `self`."""
    run = inspect.getattr_static(task, "run")
    return run.__func__ if isinstance(run, staticmethod) else functools.partial(run, None)


def leased(
    lease: str | Callable[..., str],
    ttl: Duration = 60,
    *,
    on_conflict: OnConflict = "skip",
    on_lost: OnLost = "raise",
    min_hold: Duration | None = None,
    max_hold: Duration | None = None,
    leases: PGLease | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate the function beneath `@app.task` or `@shared_task`: what `LeaseTask` does, for tasks of another base.

    Args:
        lease, ttl, on_conflict, on_lost, min_hold, max_hold, leases: as the attributes of `LeaseTask`.

    Raises:
        ConfigurationError: at decoration, for every broken rule.
    """
    hold = {"on_lost": on_lost, "min_hold": min_hold, "max_hold": max_hold}

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        terms = _Terms(naming(lease, function), ttl, on_conflict, hold, leases)
        terms.check()

        @functools.wraps(function)
        def body(*args: P.args, **kwargs: P.kwargs) -> R:
            answer: R = terms.perform(current_task or None, function, args, kwargs)
            return answer

        return body

    return decorate


class LeasedBeat(Scheduler):  # type: ignore[misc]  # Celery ships no types
    """Mixin for a beat's scheduler: the beat that has the lease schedules, the others stand by.

    `class Leased(LeasedBeat, DatabaseScheduler)` leases the scheduler of django-celery-beat. One that stands by has not
    even opened the schedule. One that loses the lease ends its process with code 76, before another can have it: let
    something start it again.

    Attributes:
        lease_name: one for each application that shares the store. Default "celery-beat".
        lease_ttl: seconds until another beat goes on if this one dies. Default 30.
        leases: the client. Default: the default client.

    It is built by Celery, as for `celery.beat.Scheduler`.
    """

    lease_name: str = "celery-beat"
    lease_ttl: Duration = 30
    leases: PGLease | None = None

    _block: LeaseContext[HeldLease | NotAcquired] | None = None

    def setup_schedule(self) -> None:
        """Leave the schedule alone: it is opened when the lease is had."""

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send what is due, if this beat has the lease; else wait for it, for a while."""
        if self._block is not None or self._wait():
            pause: float = super().tick(*args, **kwargs)
            return pause
        return 0.0  # at once again: the waiting is done

    def _wait(self) -> bool:
        leases = self.leases or default_client()
        facts = {"worker": socket.gethostname()}
        block = leases.acquire(self.lease_name, self.lease_ttl, wait=LOOK, on_lost="exit", metadata=facts)
        try:
            if not block.__enter__():
                return False
        except BackendUnavailable as trouble:  # it has waited for the store as well
            log.warning("no beat at present: %s", trouble, extra={"lease_name": self.lease_name})
            return False
        self._block = block
        log.info("this beat schedules under %r", self.lease_name, extra={"lease_name": self.lease_name})
        super().setup_schedule()
        return True

    def should_sync(self) -> bool:
        """Tell whether the schedule is to be written; never while standing by."""
        return self._block is not None and bool(super().should_sync())

    def close(self) -> None:
        """Close the schedule, then give the lease back. Idempotent."""
        block, self._block = self._block, None
        if block is None:
            return
        try:
            super().close()
        finally:
            block.__exit__(None, None, None)


class LeasedScheduler(LeasedBeat, PersistentScheduler):  # type: ignore[misc]  # Celery ships no types
    """Celery's own scheduler under a lease: `celery -A app beat -S pglease.contrib.celery:LeasedScheduler`."""
