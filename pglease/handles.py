"""Handles: what a user holds.

`HeldLease` is the user's; `Hold` is what stands behind it and what the renewer and the watchdog know. They are two so
that a handle nobody remembers can be noticed: the renewer keeps a `Hold` alive, never a `HeldLease`.

A hold's life: live, then either *ended* (released by its holder) or *lost* (with a reason). Neither is ever undone, and
`held` turns false before a release leaves the process.
"""

from __future__ import annotations

import contextvars
import threading
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, final

from pglease import clock, exits, identity, mistakes, options, slots, watchdog
from pglease.backends.base import Fence, Guard, ParamStyle, fencing
from pglease.bell import Bell
from pglease.errors import BackendError, ConfigurationError, FencedError, LeaseLostError, NotOwnedError
from pglease.options import Duration, HoldOptions
from pglease.records import Claim, Handover, Lease, Loss, LossReason
from pglease.term import Term

if TYPE_CHECKING:
    from pglease.blocks import Unasked
    from pglease.heartbeat import HeartbeatManager

WORDS: dict[LossReason, str] = {
    "expired": "it ran out before it was renewed",
    "taken": "somebody else holds it now",
    "deleted": "its record was deleted",
    "forced": "an operator ended it",
    "unreachable": "the store could not be reached in time",
    "max_hold": "it was held for as long as it may be",
    "session_died": "the session it was bound to is gone",
    "forked": "it belongs to the parent process",
    "closed": "the client was closed",
}


_NEVER = float("inf")
_NOBODYS = "0" * 32
"""A lease id that no hold has, since they are random."""


class Hold:
    """One acquisition and what this process believes about it."""

    # A process may have tens of thousands, and a dictionary for each weighs more than all that is in it.
    __slots__ = (
        "_lock",
        "_lost",
        "_renewing",
        "began_at",
        "bond",
        "caller",
        "client_owned",
        "context",
        "doubted",
        "ended",
        "ended_at",
        "exits",
        "handle",
        "in_block",
        "keeper",
        "lease_id",
        "loss",
        "margin",
        "max_until",
        "min_hold",
        "name",
        "nested",
        "progress_at",
        "progress_within",
        "releases",
        "settled",
        "term",
        "trouble",
        "ttl",
        "wanted",
        "warning",
    )

    def __init__(
        self,
        keeper: HeartbeatManager,
        term: Term,
        lease_id: str,
        wanted: HoldOptions,
        margin: float,
    ) -> None:
        self.keeper = keeper
        self.term = term
        self.lease_id = lease_id
        self.name: Final = wanted.name
        self.wanted = wanted
        self.ttl = wanted.ttl
        self.margin = margin
        self.doubted = _NEVER
        self.caller = identity.current_caller()
        self.context = contextvars.copy_context()  # for callbacks: what they log belongs to whoever took it
        self.began_at = term.sent_at
        self.bond: Final = term.bond
        self.client_owned = False
        self.nested = 0
        self.in_block = False
        self.min_hold = wanted.min_hold
        if wanted.once_per is not None:
            self.min_hold = max(self.min_hold, slots.left_of(wanted.once_per, term.lease.acquired_at))
        self.max_until = _NEVER if wanted.max_hold is None else term.sent_at + wanted.max_hold
        self.progress_at = term.sent_at
        self.progress_within = _NEVER
        self.exits: Final = wanted.on_lost == "exit"
        self.loss: Loss | None = None
        self.trouble: Exception | None = None
        self._lost: Bell | None = None
        self.ended = False
        self.ended_at = _NEVER
        self.releases = 0
        self.settled = False
        self._renewing: threading.RLock | None = None
        self.handle: weakref.ref[HeldLease] | None = None
        self.warning: Warned | None = None
        self._lock = threading.RLock()

    @property
    def claim(self) -> Claim:
        """What guards of it are asked with."""
        return Claim(self.name, self.lease_id, self.term.lease.fencing_token)

    @property
    def due(self) -> float:
        """The boot clock when this process must stop acting; read by the watchdog."""
        until = self.deadline
        if self.exits:
            until -= exits.notice(self.span)
        return until if self.bond is None else min(until, self.bond.until)

    @property
    def deadline(self) -> float:
        """The boot clock by which whatever acts under it must be over, while the session it may rest on lives."""
        until, most = self.term.trusted_until, self.max_until
        return until if until < most else most  # noqa: FURB136  # asked for in each hold several times: `min` is felt

    @property
    def span(self) -> float:
        """Seconds for which a renewal is believed: the ttl, or less where a shorter one may be heard late."""
        return min(self.ttl, self.doubted)

    def doubt(self, ttl: float) -> None:
        """Note that a renewal by that ttl was given up without an answer.

        The store may hear it at any time, also after one by a longer ttl that was asked for later, and then the hold
        ends by the shorter one. So no longer one is believed any more.
        """
        self.doubted = min(self.doubted, ttl)

    @property
    def stalls(self) -> bool:
        """Whether its holder owes a sign of progress, so that it is not to be renewed."""
        return clock.now() - self.progress_at > self.progress_within

    @property
    def over(self) -> bool:
        """Whether it was released or lost. Says nothing about time; see `held`."""
        return self.ended or self.loss is not None

    @property
    def unconfirmed(self) -> bool:
        """Whether its holder has ended it and the store has not said yet that it knows."""
        return self.ended and not self.settled

    def held(self) -> bool:
        """Tell whether this process may still act. Computed, so it needs no thread to turn false in time."""
        return not self.ended and self.loss is None and clock.now() < self.due

    @property
    def lost(self) -> Bell:
        """Rings once it is lost. Made when somebody asks: most holds end without."""
        with self._lock:
            if self._lost is None:
                self._lost = Bell()
                if self.loss is not None:
                    self._lost.set()
            return self._lost

    @property
    def renewing(self) -> threading.RLock:
        """Lets one renewal by hand go on at a time. Made when somebody asks: most holds end without."""
        with self._lock:
            if self._renewing is None:
                self._renewing = threading.RLock()
            return self._renewing

    def _note(self, loss: Loss) -> None:
        self.loss = loss
        if self._lost is not None:
            self._lost.set()

    def remaining(self) -> float:
        """Return the seconds this process may still act."""
        return 0.0 if self.over else max(0.0, self.due - clock.now())

    def confirm(self, term: Term) -> bool:
        """Believe a renewal; False when it came too late, for what was over once stays over.

        One that was asked for by a longer ttl than the present one counts by the present one. None takes away from what
        is believed already: belief shrinks before a shorter ttl is asked for, and not when an older question is
        answered.
        """
        with self._lock:
            if self.over or clock.now() >= self.due:
                return False
            until = min(term.trusted_until, term.sent_at + self.ttl - self.margin)
            self.term = term._replace(trusted_until=max(until, self.term.trusted_until))
            self.trouble = None
            return True

    def change_ttl(self, ttl: float, margin: float) -> None:
        """Have what is asked for from now on be `ttl`; belief shrinks first, where that is shorter.

        Whoever finds the new ttl here asks by it later than now, and may do so at once, unheard by us.
        """
        with self._lock:
            if ttl < self.ttl:
                self.term = self.term.until(clock.now() + ttl - margin)
            self.ttl, self.margin = ttl, margin
        watchdog.watch(self)

    def describe(self, metadata: Mapping[str, Any]) -> None:
        """Note that its metadata was replaced; belief stays as it is."""
        with self._lock:
            self.term = self.term._replace(lease=replace(self.term.lease, metadata=metadata))

    def overdue(self) -> None:
        """Act on the deadline: called by the watchdog, or by whoever notices first."""
        with self._lock:  # and in it no other lock is taken: this may run on any thread
            if self.over:
                return
            loss = self._overdue_for(clock.now())
            if loss is not None:
                self._note(loss)
        if loss is None:
            watchdog.watch(self)  # renewed in the meantime
        else:
            self.keeper.lost(self, loss)

    def _overdue_for(self, now: float) -> Loss | None:
        if now < self.due:
            return None
        if self.bond is not None and now >= self.bond.until:
            return self.bond.loss or Loss("session_died", self.trouble, self.term.lease)
        if self.max_until <= self.term.trusted_until:
            return Loss("max_hold", lease=self.term.lease)
        unanswered = self.trouble is not None or self.keeper.is_asking(self)
        return Loss("unreachable" if unanswered else "expired", self.trouble, self.term.lease)

    def lose(self, loss: Loss) -> bool:
        """Note the loss; False when the hold is over already. The first reason stays."""
        with self._lock:
            if self.over:
                return False
            self._note(loss)
        self.keeper.lost(self, loss)
        return True

    def end(self, *, to_release: bool = False) -> bool:
        """End it in this process, before the store hears of it; False when it is over already.

        Args:
            to_release: whether a request to release it is about to leave: the first; see `release_begun`.
        """
        with self._lock:
            if self.over:
                return False
            now = clock.now()
            loss = self._overdue_for(now)
            if loss is None:
                self.ended_at, self.ended = now, True
                self.releases += to_release
            else:
                self._note(loss)
        if loss is not None:
            self.keeper.lost(self, loss)
            return False
        self.keeper.end(self)
        return True

    def nest(self) -> None:
        """Count one more acquire by its holder."""
        with self._lock:
            self.nested += 1

    def unnest(self) -> bool:
        """Count one acquire less; False when this is the outermost, which ends it."""
        with self._lock:
            inner = self.nested > 0
            self.nested -= inner
            return inner

    def release_begun(self) -> None:
        """Note that one more request to release it is about to leave; there may be several at once."""
        with self._lock:
            self.releases += 1

    def release_answered(self) -> bool:
        """Note that the store has answered; True for the first answer."""
        with self._lock:
            first, self.settled = not self.settled, True
            return first

    def limit(self, seconds: float) -> None:
        """Let it be held for so long from now on: what came before was waiting."""
        self.max_until = clock.now() + seconds
        watchdog.watch(self)

    def shorten(self, until: float) -> None:
        """Believe no longer than `until`, since the store may end it earlier than was thought."""
        with self._lock:
            self.term = self.term.until(until)
        watchdog.watch(self)

    def lose_in_release(self, loss: Loss) -> None:
        """Note that it had been gone before its holder ended it."""
        with self._lock:
            if self.loss is not None:
                return
            self._note(loss)  # first, or `held`, which takes no lock, would be true for a moment
            self.ended = False
        self.keeper.lost(self, loss)

    def current_loss(self) -> Loss | None:
        """Return the loss, noticing it here if its time has come and nobody has noticed yet."""
        if self.loss is None and not self.ended and clock.now() >= self.due:
            self.overdue()
        return self.loss

    def lost_error(self, loss: Loss) -> LeaseLostError:
        """Return the error for a loss."""
        by = f" ({loss.taken_by})" if loss.taken_by else ""
        error = LeaseLostError(
            f"the lease {self.name!r} was lost: {WORDS[loss.reason]}{by}", name=self.name, reason=loss.reason
        )
        error.__cause__ = loss.error
        return error

    def fenced_error(self) -> FencedError:
        """Return the error for a guard of what is over."""
        how = WORDS[self.loss.reason] if self.loss else "it was released"
        token = self.term.lease.fencing_token
        return FencedError(
            f"a write under the lease {self.name!r} (token {token}) was refused: {how}",
            name=self.name,
            fencing_token=token,
        )

    def forget(self, loss: Loss) -> None:
        """In a forked child: it is the parent's. Locks are replaced, nobody is told."""
        self._lock, self._renewing = threading.RLock(), None
        if self._lost is not None:
            self._lost = Bell()  # the old one has threads waiting that are not here
            if self.loss is not None:
                self._lost.set()
        if not self.over:
            self._note(loss)


class Warned:
    """Watches for the moment when little is left of a hold; until then nobody need watch for its end."""

    __slots__ = ("_hold",)

    def __init__(self, hold: Hold) -> None:
        self._hold = hold

    @property
    def due(self) -> float:
        """The boot clock when a third of the ttl is left."""
        return self._hold.due - self._hold.span / options.RENEWALS_PER_TTL

    def overdue(self) -> None:
        """Say so, unless a renewal has come in this moment."""
        if self._hold.over:
            return
        if clock.now() < self.due:
            watchdog.watch(self)
        else:
            watchdog.watch(self._hold)
            self._hold.keeper.at_risk(self._hold)


@final
class HeldLease:
    """A lease that this process holds: true, thread-safe, usable from any thread.

    Attributes:
        name: the lease.
        owner_id: the label it was taken with.
        fencing_token: larger with every hold of this name; pass it to whatever is written.

    Dropped while it is held, it is released with a `ResourceWarning`, unless the client owns it (`try_acquire`,
    `wait_for_lease`). It belongs to its process: it cannot be pickled, but handed over (`transfer`).
    """

    __slots__ = ("__weakref__", "_hold", "fencing_token", "name", "owner_id")

    def __init__(self, hold: Hold) -> None:
        lease = hold.term.lease
        self._hold = hold
        self.name: Final = hold.name
        self.owner_id: Final = lease.owner_id
        self.fencing_token: Final = lease.fencing_token
        hold.handle = weakref.ref(self)

    def __bool__(self) -> Literal[True]:
        return True

    @property
    def acquired_at(self) -> datetime:
        """When this hold began, by the store's clock."""
        return self._hold.term.lease.acquired_at

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What was attached to it, by this handle's knowledge: at the acquire, or since by `set_metadata`."""
        return self._hold.term.lease.metadata

    @property
    def lease(self) -> Lease:
        """The record as last confirmed."""
        return self._hold.term.lease

    @property
    def held(self) -> bool:
        """Whether this process may still act; asks no store. Once false, it stays false."""
        return self._hold.held()

    def remaining(self) -> float:
        """Return the seconds this process may still act, on the boot clock, margin already taken off; 0.0 once over."""
        return self._hold.remaining()

    @property
    def lost(self) -> threading.Event:
        """Set when the hold was lost; `lost.wait(seconds)` waits for it. A release by the holder does not set it."""
        self._hold.current_loss()
        return self._hold.lost

    @property
    def loss(self) -> Loss | None:
        """Why it was lost (`.reason`) and the last trouble before (`.error`), or None."""
        return self._hold.current_loss()

    def raise_if_lost(self) -> None:
        """Raise if the hold was lost; asks no store.

        Raises:
            LeaseLostError: it was. Not for a hold that its holder has released.
        """
        if (loss := self._hold.current_loss()) is not None:
            raise self._hold.lost_error(loss)

    def ensure(self, seconds: Duration) -> bool:
        """Tell whether at least `seconds` are left, renewing if that helps.

        Trouble with the store is an answer here: False, and the hold goes on as long as it is trusted.

        Args:
            seconds: seconds (or "5m"), 0 or more. What is above ttl less margin, or beyond `max_hold`, is never left.

        Raises:
            ConfigurationError: `seconds` is no duration.

        Source:
            the DynamoDB lock client's `ensure`.
        """
        needed = options.seconds(seconds, "seconds", zero=True)
        if self._hold.remaining() >= needed:
            return self.held
        return self._hold.keeper.try_to_extend(self._hold) and self._hold.remaining() >= needed

    def renew(self, ttl: Duration | None = None) -> None:
        """Extend by hand: from the store's now, for `ttl` seconds (default: as acquired), now and at later renewals.

        While a renewal by a shorter `ttl` whose answer never came may still reach the store, no more than that is
        believed (`remaining()`), and renewals come as often as it needs.

        Raises:
            ConfigurationError: `ttl` is no duration; nothing was sent.
            NotOwnedError: the hold has ended; nothing changed in the store.
            BackendUnavailable: unknown whether it was extended; belief does not grow, the hold goes on until then.
                A shorter `ttl` counts from now on all the same, since the store may have heard of it.
        """
        self._hold.keeper.renew(self._hold, None if ttl is None else options.seconds(ttl, "ttl"))

    def require_progress(self, within: Duration | None) -> None:
        """Have it renewed only while `progress` is called at least so often: work that hangs loses its lease.

        Counts from now. Where the sign does not come, renewals stop, and the lease is lost (reason `expired`) when
        its ttl is over: `within` and ttl together bound how long a hung worker keeps it.

        Args:
            within: seconds between two signs at most, more than 0; None asks for none any more.

        Raises:
            ConfigurationError: `within` is no duration; nothing changed.
        """
        seconds = float("inf") if within is None else options.seconds(within, "within")
        self._hold.progress_at, self._hold.progress_within = clock.now(), seconds

    def progress(self) -> None:
        """Say that the work goes on; see `require_progress`. Costs nothing, and may be called by any thread."""
        self._hold.progress_at = clock.now()

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace what is attached to it, while it is held; others read it in the record. Changes nothing else.

        Args:
            metadata: a JSON object of at most 8192 bytes and 16 levels.

        Raises:
            ConfigurationError: it is none; nothing was sent.
            NotOwnedError: the hold has ended; nothing changed in the store.
            BackendUnavailable: unknown whether it was replaced; the hold goes on.
        """
        self._hold.keeper.set_metadata(self._hold, options.metadata(metadata))

    def transfer(self, owner: str, ttl: Duration | None = None) -> Handover:
        """Hand the lease over: it ends here, and whoever shows the answer to `PGLease.adopt` first goes on with it.

        Nobody else can get it in between. The token rises now, and again with the adoption: a guarded write under this
        handle is refused from now on, whoever is slow to hear of it. Until it is adopted it is renewed by nobody.

        Args:
            owner: whom it is meant for, a label for people of 1 to 255 characters; the record shows it at once.
            ttl: seconds until it is free if nobody adopts it. Default None: as acquired.

        Raises:
            ConfigurationError: a broken rule; the hold goes on.
            NotOwnedError: the hold had ended before.
            BackendUnavailable: it could not be confirmed, for instance since a guarded transaction still runs. It is
                over here all the same, and is given back in the background.
        """
        with options.all_problems() as problems:
            label = problems.check(options.text, owner, "owner")
            seconds = self._hold.ttl if ttl is None else problems.check(options.seconds, ttl, "ttl")
        return self._hold.keeper.transfer(self._hold, label, seconds)

    def release(self) -> bool:
        """End the hold (or let it run until `min_hold`); True if this call ended it. Idempotent.

        `held` is false from before the request is sent.

        Raises:
            ReleaseError: the store could not confirm it; over in this process, lapses by its ttl, may be called again.
        """
        return self._hold.keeper.release(self._hold)

    def guard(self, connection: Any) -> Guard:
        """Prove inside your own transaction that this hold is current, and keep it so until that transaction ends.

        One statement on your connection, one round trip. Heartbeats and releases pass meanwhile; nobody else is granted
        the name until your transaction has ended. Where the hold is no longer current the server itself refuses, and
        with it everything that the transaction has written before. Whatever this process still believes plays no part,
        and a guard never makes it believe any longer. Where another session has the row locked against it (a takeover
        under way, a stranger's FOR UPDATE) it waits for half a second, or for as long as your `lock_timeout` if that is
        shorter.

        `lease.guard(connection)` is a call. `with lease.guard(connection):` proves once more on leaving, if what was
        proved was undone by rolling back to a savepoint older than the guard. On asynchronous connections it is awaited
        or entered: `await lease.guard(connection)`, `async with lease.guard(connection):`.

        An idle transaction holds a takeover back for no longer than the ttl (at least 1 s); then the server ends it
        (`idle_in_transaction_session_timeout`, never raised above your own). A busy one ends by your statement_timeout,
        and from PostgreSQL 17 on after an hour.

        Args:
            connection: with an open transaction: psycopg 3 (also asynchronous), psycopg2, SQLAlchemy's Connection or
                Session (also asynchronous), Django's, asyncpg's. At REPEATABLE READ and SERIALIZABLE the guard must be
                its first statement.

        Raises:
            FencedError: the hold is not current; the transaction is aborted.
            ConfigurationError: the store cannot fence (trait `transactional_fencing`); a connection of another kind, in
                autocommit mode, of another database or server than the lease's, in a READ ONLY or failed transaction,
                or with a snapshot from before the guard.
            BackendUnavailable: it could not be said, for instance since another session kept the row locked; the
                transaction is aborted.
        """
        hold = self._hold
        store = fencing(hold.keeper.backend, "guard")
        if hold.held():
            return store.guard(hold.claim, connection, idle=hold.ttl)
        hold.current_loss()
        try:
            return store.guard(
                replace(hold.claim, lease_id=_NOBODYS), connection
            )  # matches nothing, and so takes the transaction with it
        except (FencedError, ConfigurationError, BackendError) as error:
            raise hold.fenced_error() from error

    def fence_sql(self, paramstyle: ParamStyle = "format", *, start: int = 1) -> Fence:
        """Return the guard as a predicate for one statement: `UPDATE … WHERE id = %s AND <fence.sql>`.

        It is true while the hold is current, and keeps it so until the transaction ends; otherwise, and for a name that
        the store does not know, it matches no row: look at the number of rows that were written.

        Args:
            paramstyle: how your driver writes parameters: "format" (`%s`, the default), "pyformat" (`%(name)s`),
                "named" (`:name`), "qmark" (`?`), "numeric" (`:1`), "numeric_dollar" (`$1`).
            start: the number of the first parameter, for the numbered styles. Default 1.

        Returns:
            `.sql`, and `.params`: a dict for the styles with names (all begin with `pglease_`), else a list.

        Raises:
            ConfigurationError: the store cannot fence, or there is no such style.
        """
        hold = self._hold
        claim = hold.claim if hold.held() else replace(hold.claim, lease_id=_NOBODYS)
        return fencing(hold.keeper.backend, "fence_sql").fence_sql(claim, paramstyle, start=start)

    def __repr__(self) -> str:
        state = "held" if self.held else f"lost ({self._hold.loss.reason})" if self._hold.loss else "released"
        return f"<HeldLease {self.name!r} token {self.fencing_token}, {state}, {self.remaining():.1f} s left>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a HeldLease belongs to its process and is not pickled or copied: hand it over by `transfer`")

    def __del__(self) -> None:
        hold = getattr(self, "_hold", None)
        if hold is not None and not hold.client_owned and not hold.over:
            hold.keeper.dropped(hold)
            warnings.warn(
                f"the lease {hold.name!r} was dropped without a release", ResourceWarning, stacklevel=2, source=self
            )


@final
class NotAcquired(mistakes.NotHeld):
    """The answer when somebody else has the lease: false.

    Attributes:
        name: the lease that was asked for.
        lease: the holder's record, or None when the store could not say, or the name is free and kept for whoever
            waited first.
        retry_after: seconds after which asking again may help: when that hold ends unless it is renewed.
    """

    __slots__ = ("__weakref__", "_watcher", "lease", "name", "retry_after")

    def __init__(self, name: str, lease: Lease | None, retry_after: float) -> None:
        self.name: Final = name
        self.lease: Final = lease
        self.retry_after: Final = retry_after
        self._watcher: Unasked | None = None

    def __bool__(self) -> Literal[False]:
        if self._watcher is not None:
            self._watcher.looked = True
        return False

    def _watched_by(self, watcher: Unasked) -> None:
        """Let the block that this was the answer to know when somebody looks."""
        self._watcher = watcher

    @property
    def held_by(self) -> str | None:
        """The holder's label, or None when the store could not say."""
        return self.lease.owner_id if self.lease else None

    def __repr__(self) -> str:
        return f"<NotAcquired {self.name!r}, held by {self.held_by!r}, retry after {self.retry_after:.1f} s>"

    def __reduce__(self) -> tuple[type[NotAcquired], tuple[str, Lease | None, float]]:
        return NotAcquired, (self.name, self.lease, self.retry_after)


def refuse(hold: Hold, wanted: str) -> NoReturn:
    """Raise for what was wanted of a hold that has ended: to have it renewed, described, handed over."""
    how = WORDS[hold.loss.reason] if hold.loss else "it was released"
    raise NotOwnedError(f"the lease {hold.name!r} cannot be {wanted}: {how}", name=hold.name)
