"""`PGLease`: what users talk to. Takes leases, keeps them alive, gives them back.

It knows no kind of store: every rule about who holds what is the backend's, every rule about belief is `Term`'s.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import random
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, cast, overload

from pglease import clock, drive, forks, identity, options, steps
from pglease.backends import Backend, open_backend
from pglease.backends.base import Budget
from pglease.decorator import TaskDecorator, singleton_decorator
from pglease.errors import (
    AcquireTimeout,
    AcquisitionError,
    BackendClosed,
    BackendError,
    BackendUnavailable,
    ConfigurationError,
    NotOwnedError,
    ReentrantError,
)
from pglease.events import Event, Observer
from pglease.handles import HeldLease, Hold, NotAcquired
from pglease.heartbeat import HASTY_RELEASE_BOX, RELEASE_BOX, HeartbeatManager
from pglease.options import Duration, HoldOptions
from pglease.records import Lease, Loss, Refused, Released, Request
from pglease.schema import DEFAULT_TABLE
from pglease.term import Term

log = logging.getLogger("pglease")

LeaseT_co = TypeVar("LeaseT_co", bound="HeldLease | NotAcquired", covariant=True)

SHORT_TTL = 1.0
"""Seconds below which a lease leaves little room for anything to go wrong."""
POLL = 1.0
"""The longest pause of `acquire(wait=…)` between two looks, in seconds."""
CLOSING_BOX = 5.0
EXIT_BOX = 2.0
_KNOBS: dict[str, Any] = {
    "table_name": DEFAULT_TABLE,
    "schema": None,
    "auto_initialize": True,
    "connect_timeout": 10,
    "pool_size": 4,
}


class PGLease:
    """Leases for one application: one holder at a time for each name.

    Thread-safe, fork-safe, a context manager, and cheap to keep as a module-level object. Building it connects to
    nothing.

    Args:
        backend: `postgresql://user:pass@host/db`, `memory://`, or a `Backend` object.
        owner_id: a label for people, 1 to 255 characters; default `host:pid:random`. Ownership is never judged by it:
            two workers with the same label exclude each other.
        heartbeat_interval: seconds between renewals at most. Default None: a third of each ttl. A lease is renewed at
            least three times per ttl whatever this says.
        on_lease_lost: called with the lease's name, once for each loss, on a thread of its own; may call back into the
            client. Not called for what `close` ends.
        margin: seconds by which a holder stops believing before the store's expiry. Default: 5 % of ttl, at least 0.25
            s, never more than a quarter of ttl.
        connect_timeout: seconds one connection attempt may take, and one conversation with the store (`try_acquire`,
            `get_lease`…), restarts and failovers included. Default 10.
        table_name, schema, auto_initialize, pool_size: for addresses of PostgreSQL; see
            `PostgresBackend`.
        observers: objects whose `notify(event)` is called for what happens to leases, each on a thread of its own.

    Raises:
        ConfigurationError: every broken rule at once, without showing the address.
    """

    def __init__(
        self,
        backend: str | Backend,
        owner_id: str | None = None,
        heartbeat_interval: Duration | None = None,
        on_lease_lost: Callable[[str], object] | None = None,
        *,
        margin: Duration | None = None,
        table_name: str = DEFAULT_TABLE,
        schema: str | None = None,
        auto_initialize: bool = True,
        connect_timeout: Duration = 10,
        pool_size: int = 4,
        observers: Iterable[Observer] = (),
    ) -> None:
        knobs = {
            "table_name": table_name,
            "schema": schema,
            "auto_initialize": auto_initialize,
            "connect_timeout": connect_timeout,
            "pool_size": pool_size,
        }
        given = {name: value for name, value in knobs.items() if value is not _KNOBS[name] and value != _KNOBS[name]}
        with options.all_problems() as problems:
            interval = (
                None
                if heartbeat_interval is None
                else problems.check(options.seconds, heartbeat_interval, "heartbeat_interval")
            )
            pause = None if margin is None else problems.check(options.seconds, margin, "margin")
            label = None if owner_id is None else problems.check(options.text, owner_id, "owner_id")
            if on_lease_lost is not None and not callable(on_lease_lost):
                problems.note(f"on_lease_lost must be callable, not {on_lease_lost!r}")
            box = problems.check(options.seconds, connect_timeout, "connect_timeout")
            store, self._opened = problems.check(_store, backend, given) or (None, False)
        self.backend: Backend = store
        self._owner = label
        self._box = box
        self._warned_of_short_ttl = False
        self.heartbeat_manager = HeartbeatManager(
            self.backend,
            heartbeat_interval=interval,
            margin=pause,
            on_lease_lost=on_lease_lost,
            on_over=_dropper(weakref.ref(self)),
            observers=observers,
        )
        self._fresh()
        forks.forget_in_children(self)
        _clients.add(self)
        # Dropped without close(): the finalizer must not refer to the client, or it would never be dropped.
        self._finalizer = weakref.finalize(
            self, _abandon, self.heartbeat_manager, self.backend if self._opened else None
        )
        self._finalizer.atexit = False

    def _fresh(self) -> None:
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._holds: dict[str, Hold] = {}
        self._owned: dict[str, HeldLease] = {}
        self._default_owner: str | None = None

    @classmethod
    def from_env(cls, **arguments: Any) -> Self:
        """Build a client from `PGLEASE_URL`, else `DATABASE_URL`. Arguments as for the class.

        Raises:
            ConfigurationError: neither is set.
        """
        url = os.environ.get("PGLEASE_URL") or os.environ.get("DATABASE_URL")
        if not url:
            raise ConfigurationError("set PGLEASE_URL or DATABASE_URL to the address of your PostgreSQL")
        return cls(url, **arguments)

    @classmethod
    def from_engine(cls, engine: Any, **arguments: Any) -> Self:
        """Build a client on a SQLAlchemy engine's connections. See `PostgresBackend.from_connection_factory`."""
        from pglease.backends.postgres import PostgresBackend

        return cls(PostgresBackend.from_engine(engine), **arguments)

    @classmethod
    def from_pool(cls, pool: Any, **arguments: Any) -> Self:
        """Build a client on a `psycopg_pool.ConnectionPool`. See `PostgresBackend.from_connection_factory`."""
        from pglease.backends.postgres import PostgresBackend

        return cls(PostgresBackend.from_pool(pool), **arguments)

    @property
    def owner_id(self) -> str:
        """The label for people; the default one is made anew in a forked child."""
        if self._owner is not None:
            return self._owner
        if self._default_owner is None:
            self._default_owner = identity.default_owner()
        return self._default_owner

    # -- taking --------------------------------------------------------------------------------------------------------

    @overload
    def acquire(
        self,
        name: str,
        ttl: Duration = ...,
        *,
        raise_on_failure: Literal[True],
        wait: Duration | None = ...,
        min_hold: Duration | None = ...,
        max_hold: Duration | None = ...,
        metadata: Mapping[str, Any] | None = ...,
        heartbeat: bool = ...,
        fair: bool = ...,
        on_lost: options.OnLost = ...,
    ) -> LeaseContext[HeldLease]: ...
    @overload
    def acquire(
        self,
        name: str,
        ttl: Duration,
        raise_on_failure: Literal[True],
        *,
        wait: Duration | None = ...,
        min_hold: Duration | None = ...,
        max_hold: Duration | None = ...,
        metadata: Mapping[str, Any] | None = ...,
        heartbeat: bool = ...,
        fair: bool = ...,
        on_lost: options.OnLost = ...,
    ) -> LeaseContext[HeldLease]: ...
    @overload
    def acquire(
        self,
        name: str,
        ttl: Duration = ...,
        raise_on_failure: bool = ...,
        *,
        wait: Duration | None = ...,
        min_hold: Duration | None = ...,
        max_hold: Duration | None = ...,
        metadata: Mapping[str, Any] | None = ...,
        heartbeat: bool = ...,
        fair: bool = ...,
        on_lost: options.OnLost = ...,
    ) -> LeaseContext[HeldLease | NotAcquired]: ...
    def acquire(
        self,
        name: str,
        ttl: Duration = 60,
        raise_on_failure: bool = False,
        *,
        wait: Duration | None = None,
        min_hold: Duration | None = None,
        max_hold: Duration | None = None,
        metadata: Mapping[str, Any] | None = None,
        heartbeat: bool = True,
        fair: bool = False,
        on_lost: options.OnLost = "raise",
    ) -> LeaseContext[Any]:
        """Return a context manager that holds the lease for its block.

        It binds a `HeldLease` (true), or a `NotAcquired` (false) when somebody else has it. The lease is renewed in the
        background. Leaving the block releases it; if the store cannot be reached then, that is logged, tried again in
        the background, and the lease lapses by itself. An error of the block's own always comes out as it is.

        Args:
            name: 1 to 255 characters without control characters.
            ttl: seconds (or "5m", a timedelta) until the lease is free if this process dies. Default 60.
            raise_on_failure: raise `AcquisitionError` instead of binding a `NotAcquired`.
            wait: None asks once; seconds wait that long; `float("inf")` for ever.
            min_hold: seconds from the grant during which nobody else gets it even if the block is short. Binds the
                release, not a crash; above ttl it needs renewal.
            max_hold: seconds from the grant after which it is lost (reason `max_hold`) though renewals work.
            metadata: a JSON object of at most 8192 bytes that others can read.
            heartbeat: False: not renewed; the block must end within ttl.
            fair: serve waiters in the order of their arrival, on stores that can (`traits.fair`).
            on_lost: "raise": leaving the block after a loss raises `LeaseLostError`, unless the block raised already
                (then a note is added to its error). "log": only the log says so.

        Raises:
            ConfigurationError: at once, for every broken rule.
            ReentrantError: on entering, by a waiting call of the thread that has the lease through this client.
            AcquisitionError: on entering, with `raise_on_failure`; nothing is held.
            BackendError: on entering; nothing is held, or lapses by itself.
        """
        wanted = options.hold_options(
            name,
            ttl,
            wait=wait,
            min_hold=min_hold,
            max_hold=max_hold,
            metadata=metadata,
            heartbeat=heartbeat,
            fair=fair,
            on_lost=on_lost,
        )
        self._check_traits(wanted)
        return LeaseContext(self, wanted, raise_on_failure=raise_on_failure)

    def try_acquire(
        self,
        name: str,
        ttl: Duration = 60,
        *,
        min_hold: Duration | None = None,
        max_hold: Duration | None = None,
        metadata: Mapping[str, Any] | None = None,
        heartbeat: bool = True,
    ) -> bool:
        """Ask once, without waiting behind anybody: True if the lease is ours now.

        The client owns it: it is renewed until `release(name)`, `close()` or the end of the process. A second call for
        a held name is False, also on the same client. Arguments as for `acquire`.

        Raises:
            ConfigurationError: for every broken rule.
            BackendError: nothing is held, or lapses by itself.
        """
        wanted = options.hold_options(
            name, ttl, min_hold=min_hold, max_hold=max_hold, metadata=metadata, heartbeat=heartbeat
        )
        return self._own(self.take(wanted)) is not None

    def wait_for_lease(
        self,
        name: str,
        ttl: Duration = 60,
        timeout: Duration | None = 60.0,
        poll_interval: Duration = 5.0,
        *,
        fair: bool = False,
        cancel: threading.Event | None = None,
        min_hold: Duration | None = None,
        max_hold: Duration | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> HeldLease:
        """Wait until the lease is ours; the client owns it, as after `try_acquire`.

        Between looks it sleeps until the holder's known expiry, or `poll_interval`, whichever comes first, with jitter.
        A look that finds it taken writes nothing. Restarts and outages of the store are waited out too.

        Args:
            name, ttl, min_hold, max_hold, metadata, fair: as for `acquire`.
            timeout: seconds for the whole wait; None waits for ever; 0 is refused (`try_acquire` asks once).
            poll_interval: the longest pause between two looks, in seconds.
            cancel: an event that ends the wait when it is set.

        Raises:
            AcquireTimeout: the time ran out or `cancel` was set; says who has it and until when. Nothing is held.
            ReentrantError: this thread has the lease through this client and would wait for itself.
            BackendUnavailable: the store never answered.
        """
        with options.all_problems() as problems:
            until = (
                float("inf") if timeout is None else problems.check(options.seconds, timeout, "timeout", forever=True)
            )
            poll = problems.check(options.seconds, poll_interval, "poll_interval")
            wanted = problems.check(
                options.hold_options,
                name,
                ttl,
                wait=until,
                min_hold=min_hold,
                max_hold=max_hold,
                metadata=metadata,
                fair=fair,
            )
        self._check_traits(wanted)
        taken = self.take(wanted, poll=poll, cancel=cancel)
        if isinstance(taken, NotAcquired):
            raise not_acquired(taken, wanted, cancelled=cancel is not None and cancel.is_set())
        return cast("HeldLease", self._own(taken))

    def singleton_task(
        self,
        name: str | Callable[..., str],
        ttl: Duration = 60,
        skip_if_locked: bool = True,
        *,
        on_skip: Any = None,
        wait: Duration | None = None,
        min_hold: Duration | None = None,
        max_hold: Duration | None = None,
        once_per: Duration | None = None,
    ) -> TaskDecorator:
        """Decorate a function, method or coroutine function so that one call at a time runs, among all processes.

        Args:
            name: the lease; a template over the call's arguments (`"report:{tenant}"`), or a callable that is given
                them.
            ttl: as for `acquire`.
            skip_if_locked: a call that does not get the lease returns None (or what `on_skip` says); False raises
                `AcquisitionError`.
            on_skip: what a skipped call returns; a callable is called with the `NotAcquired`.
            wait: seconds a call waits before it is skipped; None asks once.
            min_hold: one call per so many seconds: `singleton_task` alone means one *at a time*.
            max_hold: as for `acquire`.
            once_per: one call per slot of time, on stores that can judge slots (`traits.slots`).

        Raises:
            ConfigurationError: at decoration; also for generator functions, whose body would run without the lease.
        """
        checked = name if isinstance(name, str) and not ("{" in name or "}" in name) else "checked at each call"
        wanted = options.hold_options(checked, ttl, wait=wait, min_hold=min_hold, max_hold=max_hold)
        if once_per is not None:
            options.seconds(once_per, "once_per")
            self._need_trait("slots", "once_per")
        return singleton_decorator(lambda: self, name, wanted, skip_if_locked=skip_if_locked, on_skip=on_skip)

    def _check_traits(self, wanted: HoldOptions) -> None:
        if wanted.fair:
            self._need_trait("fair", "fair=True")

    def _need_trait(self, trait: str, argument: str) -> None:
        if not getattr(self.backend.traits, trait):
            raise ConfigurationError(
                f"{argument} needs a store with the trait {trait!r}, which {self.backend.traits.kind} lacks"
            )

    # -- what acquire, try_acquire, wait_for_lease and the decorator are made of ---------------------------------------

    def take(
        self, wanted: HoldOptions, *, poll: float = POLL, cancel: threading.Event | None = None
    ) -> HeldLease | NotAcquired:
        """Take a lease by checked options; the caller owns the handle."""
        request, margin = self._request(wanted)
        asked = [request]
        try:
            found = drive.run(self._conversation(asked, wanted, margin, poll), self.backend, self._pause(cancel))
            return self._taken(found, asked[-1], wanted, margin)
        except BackendUnavailable as error:
            return self._refused_before(asked[-1], error)
        except (BackendError, ConfigurationError):
            raise
        except BaseException as error:  # interrupted: nobody knows whether it was granted
            request = asked[-1]
            hold = self._holds.get(request.name)
            if hold is not None and hold.lease_id == request.lease_id:
                hold.end()  # it was, and we were on our way to tell
                self._drop(hold)
            self.heartbeat_manager.give_back.add(request.name, request.lease_id)
            if isinstance(error, _Cancelled):
                return NotAcquired(request.name, None, 0.0)
            raise

    async def atake(self, wanted: HoldOptions, *, poll: float = POLL) -> HeldLease | NotAcquired:
        """Take a lease by checked options without blocking the event loop; a cancelled task leaves nothing behind."""
        request, margin = self._request(wanted)
        asked = [request]
        give_back = self.heartbeat_manager.give_back

        def give_back_unless_nothing_is_left(call: Any) -> None:
            if not _left_nothing(call):
                give_back.add(request.name, asked[-1].lease_id)

        def return_late_grant(call: Any) -> None:
            call.add_done_callback(give_back_unless_nothing_is_left)

        try:
            found = await drive.arun(self._conversation(asked, wanted, margin, poll), self.backend, return_late_grant)
        except BackendUnavailable as error:
            return self._refused_before(asked[-1], error)
        return self._taken(found, asked[-1], wanted, margin)

    def _request(self, wanted: HoldOptions) -> tuple[Request, float]:
        self._refuse_if_closed()
        if wanted.wait:
            self._refuse_to_wait_for_oneself(wanted.name)
        if wanted.ttl < SHORT_TTL:
            self._warn_of_short_ttl(wanted)
        request = Request(wanted.name, self.owner_id, identity.new_lease_id(), wanted.ttl, wanted.metadata)
        return request, self.heartbeat_manager.margin_for(wanted.ttl)

    def _warn_of_short_ttl(self, wanted: HoldOptions) -> None:
        if not self._warned_of_short_ttl:
            self._warned_of_short_ttl = True
            log.warning(
                "the ttl of %r is %g s: a pause or a restart of the store of about half of that loses the lease",
                wanted.name,
                wanted.ttl,
                extra={"lease_name": wanted.name},
            )

    def _conversation(self, asked: list[Request], wanted: HoldOptions, margin: float, poll: float) -> Any:
        """Return the steps; `asked` ends with what was asked last."""

        def anew(request: Request) -> Request:
            asked.append(replace(request, lease_id=identity.new_lease_id()))
            return asked[-1]

        now = clock.now()
        until = None if not wanted.wait else now + wanted.wait
        patience = steps.Patience(until, poll, self._box)
        return steps.acquire(asked[0], margin=margin, patience=patience, now=now, spread=random.random, anew=anew)

    def _taken(
        self, found: Term | Refused, request: Request, wanted: HoldOptions, margin: float
    ) -> HeldLease | NotAcquired:
        manager = self.heartbeat_manager
        if isinstance(found, Refused):
            facts = {"lease_name": request.name, "lease_outcome": "busy"}
            log.debug("the lease %r is held by %r", request.name, found.held_by, extra=facts)
            if manager.notices:
                manager.notices.tell(Event("busy", request.name, found.held_by))
            return NotAcquired(request.name, found.lease, found.retry_after)
        hold = Hold(manager, found, request.lease_id, wanted, margin=margin, caller=identity.current_caller())
        lease = HeldLease(hold)
        with self._lock:
            earlier, self._holds[hold.name] = self._holds.get(hold.name), hold
            closed = self._closed.is_set()
        if earlier is not None and earlier.current_loss() is None:
            earlier.lose(Loss("taken", lease=found.lease))  # by ourselves, after somebody had ended it in the store
        try:
            manager.begin(hold)
        except RuntimeError as error:  # no more threads, or the interpreter is going down: it could not be renewed
            manager.release(hold)
            raise BackendUnavailable(f"{hold.name!r} was given back, for nothing could renew it: {error}") from None
        if manager.notices:
            manager.notices.tell(
                Event("acquired", hold.name, request.owner_id, lease.fencing_token, seconds=clock.now() - found.sent_at)
            )
        if closed:  # between our asking and the answer
            with contextlib.suppress(BackendError):  # unconfirmed, it lapses by itself
                manager.release(hold)
            raise BackendClosed("the client is closed")
        return lease

    def _refused_before(self, request: Request, error: BackendUnavailable) -> NotAcquired:
        """Let go of a grant that may exist; a wait that was refused before its last look failed has simply run out."""
        self._give_back_if_unknown(request, error)
        if error.refused is None:
            raise error
        return NotAcquired(request.name, error.refused.lease, error.refused.retry_after)

    def _give_back_if_unknown(self, request: Request, error: BackendUnavailable) -> None:
        if error.outcome_unknown:
            self.heartbeat_manager.give_back.add(request.name, request.lease_id)

    def _own(self, taken: HeldLease | NotAcquired) -> HeldLease | None:
        if isinstance(taken, NotAcquired):
            return None
        with self._lock:
            self._owned[taken.name] = taken
            taken._hold.client_owned = True  # last: interrupted before, it is nobody's and given back
        return taken

    def _pause(self, cancel: threading.Event | None) -> Callable[[float], None]:
        """Return how a waiting call sleeps: until its time, a cancellation or the client's end."""
        if cancel is None:
            return self._nap

        def nap(seconds: float) -> None:
            until = time.monotonic() + seconds
            while True:
                if cancel.wait(max(0.0, min(until - time.monotonic(), 0.5))):
                    raise _Cancelled
                self._refuse_if_closed()
                if time.monotonic() >= until:
                    return

        return nap

    def _nap(self, seconds: float) -> None:
        if self._closed.wait(seconds):
            self._refuse_if_closed()

    def _refuse_if_closed(self) -> None:
        if self._closed.is_set():
            raise BackendClosed("the client is closed")

    def _refuse_to_wait_for_oneself(self, name: str) -> None:
        hold = self._holds.get(name)
        if hold is not None and hold.held() and hold.caller == identity.current_caller():
            raise ReentrantError(
                f"this thread already holds {name!r} through this client; waiting for it would never end", name=name
            )

    def leave(self, hold: Hold, body_error: BaseException | None) -> None:
        """End the hold of a block; say loudly what went wrong, but never instead of the block's own error."""
        hold.in_block = False
        trouble: BackendError | ConfigurationError | None = None
        try:
            self.heartbeat_manager.settle(hold, RELEASE_BOX if body_error is None else HASTY_RELEASE_BOX)
        except BackendError as error:
            trouble = error
        except ConfigurationError as error:  # the lent connection was of no use; the background tries another
            if body_error is None:
                raise
            trouble = error
        self._drop(hold)
        loss = hold.loss
        if loss is not None and hold.wanted.on_lost == "raise":
            if body_error is None:
                raise hold.lost_error(loss)
            body_error.add_note(f"pglease: {hold.lost_error(loss)}")
        elif trouble is not None:
            _tell_unconfirmed(hold, trouble, body_error)

    # -- what one has --------------------------------------------------------------------------------------------------

    def release(self, name: str) -> bool:
        """End this client's hold of `name`; True if this call ended it, False if there was none. Idempotent.

        Raises:
            ReleaseError: the store could not confirm it; over in this process, lapses by its ttl, may be called again.
        """
        hold = self._hold_of(name)
        if hold is None:
            return False
        ended = self.heartbeat_manager.release(hold)
        self._drop(hold)
        return ended

    def renew(self, name: str, ttl: Duration | None = None) -> None:
        """Extend this client's hold of `name`. See `HeldLease.renew`.

        Raises:
            NotOwnedError: this client does not hold it.
        """
        seconds = None if ttl is None else options.seconds(ttl, "ttl")
        hold = self._hold_of(name)
        if hold is None:
            raise NotOwnedError(f"this client does not hold {name!r}", name=name)
        self.heartbeat_manager.renew(hold, seconds)

    def held(self, name: str) -> HeldLease | None:
        """Return the handle this client has for `name`, or None when it holds nothing by that name."""
        hold = self._hold_of(name)
        if hold is None or not hold.held() or hold.handle is None:
            return None
        return hold.handle()

    def holding(self) -> list[HeldLease]:
        """Return the handles of all that this client holds, ordered by name."""
        self._refuse_if_closed()
        with self._lock:
            names = sorted(self._holds)
        return [lease for name in names if (lease := self.held(name)) is not None]

    def _hold_of(self, name: str) -> Hold | None:
        self._refuse_if_closed()
        return self._holds.get(options.text(name, "name"))

    def _drop(self, hold: Hold) -> None:
        """Forget a hold that is over, unless another has taken its place."""
        with self._lock:
            if self._holds.get(hold.name) is hold:
                del self._holds[hold.name]
            owned = self._owned.get(hold.name)
            if owned is not None and owned._hold is hold:
                del self._owned[hold.name]

    # -- what the store says -------------------------------------------------------------------------------------------

    def get_lease(self, name: str) -> Lease | None:
        """Return the record of the present or the last hold of `name`; None when the store knows none.

        A hold that is over stays readable (`is_expired()` is true) until it is cleaned up.
        """
        return self.backend.get(options.text(name, "name"), self._budget())

    def list_leases(self, prefix: str = "", *, ended: bool = False) -> list[Lease]:
        """Return the records of all names that begin with `prefix`, ordered by name.

        Holds that were given back are left out unless `ended`; those that lapsed are shown until they are cleaned up.
        """
        return self.backend.list(options.prefix(prefix), self._budget(), ended=ended)

    def cleanup_expired(self, older_than: Duration = 0) -> int:
        """Delete the records of holds that ended more than `older_than` seconds ago; return how many.

        Fencing tokens never go back because of it. On PostgreSQL it needs the DELETE right.
        """
        age = options.seconds(older_than, "older_than", zero=True)
        return self.backend.cleanup(age, self._budget(6 * self._box))

    def force_release(self, name: str, fencing_token: int) -> bool:
        """End somebody's hold, as an operator: False if the token is no longer current or the hold is over.

        Its holder learns of it at its next renewal (reason `forced`) and may work on until then; a guarded write of its
        is refused at once.
        """
        options.text(name, "name")
        options.count(fencing_token, "fencing_token")
        return self.backend.force_release(name, fencing_token, self._budget())

    def _budget(self, seconds: float | None = None) -> Budget:
        self._refuse_if_closed()
        return Budget.of(self._box if seconds is None else seconds, clock.now)

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release what is held, stop the heartbeats, close what this client opened and nothing else. Idempotent.

        Holds whose block is still running are marked lost with the reason `closed`. Releases that the store does not
        confirm within 5 seconds are left to lapse. Afterwards every call answers `BackendClosed`.
        """
        self._close(CLOSING_BOX)

    def _close(self, seconds: float, *, blocks: bool = True) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            holds = list(self._holds.values())  # a grant that comes later sees that we are closed
        until = clock.now() + seconds
        manager = self.heartbeat_manager
        for hold in holds:
            if blocks or not hold.in_block:
                self._end_for_good(hold, until)
        manager.give_back.settle(max(0.1, until - clock.now()))
        manager.stop(max(0.1, until - clock.now()))
        manager.notices.close(max(0.1, until - clock.now()))
        self._finalizer.detach()
        _clients.discard(self)
        if self._opened:
            self.backend.close()

    def _end_for_good(self, hold: Hold, until: float) -> None:
        left = until - clock.now()
        if hold.in_block and hold.lose(Loss("closed")):
            self.heartbeat_manager.give_back.add(hold.name, hold.lease_id, min_hold=hold.wanted.min_hold)
        elif left > 0:
            try:
                self.heartbeat_manager.settle(hold, left)
            except (BackendError, ConfigurationError) as error:
                log.warning(
                    "the lease %r is left to lapse by itself: %s", hold.name, error, extra={"lease_name": hold.name}
                )
        else:
            hold.end()

    def _close_at_exit(self) -> None:
        """Release what no running block holds: work that goes on in a daemon thread keeps its lease until it lapses."""
        self._close(EXIT_BOX, blocks=False)

    def forget(self) -> None:
        """In a forked child: start with nothing; the parent's holds are the parent's."""
        was_closed = self._closed.is_set()
        self._fresh()
        if was_closed:
            self._closed.set()
        self.heartbeat_manager.forget()
        self.backend.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed.is_set() else f"holding {len(self._holds)}"
        return f"<PGLease on {self.backend.traits.kind} as {self.owner_id!r}, {state}>"

    def __reduce__(self) -> Any:
        raise TypeError("a PGLease client belongs to its process and is not pickled or copied")


def _left_nothing(call: Any) -> bool:
    """Tell whether a call whose task was cancelled surely left no lease behind."""
    return call.cancelled() or (call.exception() is None and isinstance(call.result().value, Refused | Released))


class _Cancelled(Exception):
    """The caller's event was set while it waited."""


_clients: weakref.WeakSet[PGLease] = weakref.WeakSet()


@atexit.register
def _close_clients() -> None:
    for client in list(_clients):
        try:
            client._close_at_exit()
        except Exception:
            log.exception("%r could not be closed", client)


def _store(backend: str | Backend, given: Mapping[str, Any]) -> tuple[Backend, bool]:
    """Return the store and whether we opened it."""
    if isinstance(backend, str):
        return open_backend(backend, **given), True
    if given:
        raise ConfigurationError(
            *(f"{name} is for addresses; give it to the Backend object instead" for name in sorted(given))
        )
    if isinstance(backend, type) or not isinstance(backend, Backend):
        raise ConfigurationError(f"backend must be an address or a Backend object, not {type(backend).__name__}")
    return backend, False


def _dropper(client: weakref.ref[PGLease]) -> Callable[[Hold], None]:
    """Return what makes the client forget a lost hold, without keeping the client alive."""

    def drop(hold: Hold) -> None:
        if (this := client()) is not None:
            this._drop(hold)

    return drop


def _abandon(manager: HeartbeatManager, opened: Backend | None) -> None:
    """Let go of everything of a client that was dropped without `close`."""
    # Called by the garbage collector, at any moment on any thread, whatever lock that has: so no lock is taken here.
    if held := manager.number_of_holds():
        warnings.warn(f"a PGLease client was dropped while it held {held} leases", ResourceWarning, stacklevel=2)
    with contextlib.suppress(RuntimeError):  # the interpreter is going down: they lapse by themselves
        threading.Thread(target=_wind_up, args=(manager, opened), name="pglease-wind-up", daemon=True).start()


def _wind_up(manager: HeartbeatManager, opened: Backend | None) -> None:
    for hold in manager.holds():
        if hold.end():
            manager.give_back.add(hold.name, hold.lease_id, min_hold=hold.wanted.min_hold)
    manager.give_back.settle(CLOSING_BOX)
    manager.stop(CLOSING_BOX)
    if opened is not None:
        opened.close()


def not_acquired(refused: NotAcquired, wanted: HoldOptions, *, cancelled: bool = False) -> AcquisitionError:
    """Return the error for a refusal: who has it, and until when."""
    holder = f"held by {refused.held_by!r}" if refused.held_by else "held by somebody else"
    until = ""
    if refused.lease is not None and refused.retry_after:
        until = f" until {refused.lease.expires_at:%Y-%m-%d %H:%M:%S} UTC ({refused.retry_after:.1f} s left)"
    facts: dict[str, Any] = {"name": refused.name, "held_by": refused.held_by, "retry_after": refused.retry_after}
    if not wanted.wait:
        return AcquisitionError(f"the lease {refused.name!r} is {holder}{until}", **facts)
    how = "the wait was cancelled" if cancelled else f"{timedelta(seconds=wanted.wait)} were not enough"
    return AcquireTimeout(f"the lease {refused.name!r} is still {holder}{until}: {how}", **facts)


class LeaseContext(Generic[LeaseT_co]):
    """The block that a lease is held for. Made by `PGLease.acquire`; may be entered again once it was left."""

    def __init__(self, client: PGLease, wanted: HoldOptions, *, raise_on_failure: bool) -> None:
        self._client = client
        self._wanted = wanted
        self._raise = raise_on_failure
        self._lease: HeldLease | None = None
        self._entered = False

    def __enter__(self) -> LeaseT_co:
        if self._entered:
            raise ConfigurationError(f"this acquire({self._wanted.name!r}) is in use: a second block needs its own")
        self._entered = True  # already while waiting, or whoever gives up first would release the other's lease
        try:
            taken = self._client.take(self._wanted)
        except BaseException:
            self._entered = False
            raise
        if isinstance(taken, HeldLease):
            taken._hold.in_block = True
            self._lease = taken
        elif self._raise:
            self._entered = False
            raise not_acquired(taken, self._wanted)
        return cast("LeaseT_co", taken)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease, self._lease, self._entered = self._lease, None, False
        if lease is not None:
            self._client.leave(lease._hold, error)


def _tell_unconfirmed(hold: Hold, trouble: Exception, body_error: BaseException | None) -> None:
    after = "it lapses by itself" if isinstance(trouble, BackendClosed) else "it goes on in the background"
    text = f"the release of {hold.name!r} could not be confirmed, {after}: {trouble}"
    log.warning("%s", text, extra={"lease_name": hold.name})
    if body_error is not None:
        body_error.add_note(f"pglease: {text}")
