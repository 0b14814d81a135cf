"""What every store promises: the contract, said once here and enforced by one suite (`pglease.testing.contract`).

C1   Exclusive. While a name is held by the store's clock, another `try_acquire` is refused and changes nothing, and
     learns the holder's record.
C2   Not re-entrant. That includes the same owner: one grant, one handle.
C3   Rising token. Each new hold's `fencing_token` exceeds every earlier one of that name, across release, expiry,
     force, cleanup, restart; +1 where nothing was cleaned up. A renewal keeps it.
C4   Renewal sets `expires_at` to store-now + ttl and keeps token and `acquired_at`.
C5   Renewal is scoped to one hold. Released, taken or lapsed: refused, nothing changed, nothing created, nothing
     revived.
C6   Release frees at once (or at `acquired_at + min_hold`), keeps the name's token, and is scoped to one hold; a second
     release is a harmless `Gone`.
C7   Expiry needs nobody: no janitor has to run.
C8   Expiry is judged by the clock the trait names. A client's wall clock never matters.
C9   Names are independent, and any legal name survives the round trip byte for byte.
C10  Looking changes nothing.
C11  Every verb may be called from many threads at once.
C12  Trouble is not an answer: transport failure is `BackendUnavailable`, wrong setup `BackendMisconfigured`; nothing
     foreign escapes.
C13  Ambiguity is resolved: a retry with the same `lease_id` recognises its own grant, and an acquire that raises leaves
     at most a hold that lapses by itself.
C14  Every verb is time-boxed: connect, pool wait, statement, lock wait and socket together end within the budget.
C15  `close` is idempotent, frees what it opened, ends no hold.
C16  Waking, where the trait `wakes_waiters` is true. While a name is marked, open subscriptions hear of each release
     (also one into `min_hold`, also a forced one) and of each grant; a mark outlives holds and ends by itself. What is
     heard is a hint: it may come late, twice, merged with a later one, or be lost with the link, and never comes
     because of a renewal. Whoever listens first, marks then and looks afterwards misses nothing on a link that holds.
C17  Order, where the trait `fair` is true. Tickets are numbered in the order of their arrival and count while they are
     renewed. A live ticket at the head of the queue reserves a free name: every other try is refused and learns when
     to ask again. The grant takes its ticket away in the same step. A cleanup leaves a name with live tickets alone.
C18  Fenced, where the trait `transactional_fencing` is true. A guard passes only for the current hold, unexpired by the
     store's clock, and then nobody else is granted the name until the guarded transaction ends. Once a takeover, a
     release (also into `min_hold`) or a forced release is committed, no guard of that hold passes; a refused guard
     takes the whole transaction with it.
C19  Prompt, where the trait `prompt_failover` is true. Each grant comes with a `Bond`. While it is loose the hold rests
     on its ttl alone; once it is tied, the death of what it is tied to breaks it at once, also while nobody asks, and
     frees the name long before its ttl, but not before whoever holds it has had a moment to hear of it. A hold whose
     bond broke is not renewed: `Gone("session_died")`. Nobody is granted a name while its bond holds and its ttl runs.
C20  Handed over. `adopt` ends a running hold and begins the name's next one in one step: another id, owner and
     beginning, a larger token, the same metadata. Nobody is granted the name in between, whoever waits or queues for
     it. Scoped to the one hold it names: once that is over, or was adopted before, it is `Gone` and nothing changes.
     It does not pass a guarded transaction of that hold; no guard of that hold passes afterwards.
C21  Described. `set_metadata` replaces a running hold's metadata and changes nothing else about it; scoped like a
     renewal.
C22  All or none, where the trait `groups` is true. `try_acquire_many` grants each of several names, as `try_acquire`
     would, in one step, or writes nothing and names one that is in the way. Two who ask for the same names, in
     whatever order, never wait for each other. It may decline (None) what it cannot answer in one step just now.
C23  Remembered, where the trait `history` is true and the backend was told to keep some. The end of a hold is kept in
     the step that ends it: who held it, under which token, from when to when, and how it ended. A hold that lapsed or
     died has nobody to write that, so whoever takes over, or gives it back late, does; until then it is read from the
     record. Each name keeps its last ones, as many as was said, and as long as it has a record: a cleanup takes both.

C24  In two halves, where the trait `in_two_halves` is true. The first half of a verb sends its question and waits for
     nothing; the other is finished on any thread, and every clause holds for both together as it does for the verb.
     What nobody finishes ends with the budget.

A backend is synchronous and never hears of asyncio. A verb that a store cannot keep is a trait; asking for it there is
a `ConfigurationError` that names it (`WakesNobody`, `KeepsNoQueue`, `FencesNothing`, `TakesNoGroups`,
`RemembersNothing`, `AsksInOne`). Nothing above this floor branches on the kind of store.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, Self, TypeAlias, TypeVar, cast, runtime_checkable

from pglease.errors import ConfigurationError
from pglease.records import (
    Adoption,
    Change,
    Claim,
    Gone,
    Granted,
    Held,
    InTheWay,
    Lease,
    Place,
    Refused,
    ReleaseOutcome,
    Renewal,
    RenewalOutcome,
    Request,
    Tenure,
    Ticket,
)


class Budget:
    """How long one verb may take, and when its request went out.

    Args:
        now: reads the boot clock, in seconds.
        until: the moment on that clock by which the verb must have ended, with an answer or with `BackendUnavailable`.
        begun: that clock now. Default None: it is read.

    Attributes:
        sent_at: that clock before the try that was answered.
        forsaken: whether a try was given up for another one. It may reach the store yet, after whatever comes next.
    """

    __slots__ = ("_now", "_sent", "forsaken", "sent_at", "until")

    def __init__(self, now: Callable[[], float], until: float, begun: float | None = None) -> None:
        self._now = now
        self.until = until
        self.sent_at = now() if begun is None else begun
        self.forsaken = self._sent = False

    @classmethod
    def of(cls, seconds: float, now: Callable[[], float]) -> Budget:
        """Return a budget that ends `seconds` from now."""
        begun = now()
        return cls(now, begun + seconds, begun)

    def left(self) -> float:
        """Return the seconds left, negative once it is over."""
        return self.until - self._now()

    def sending(self) -> None:
        """Note that the request is about to leave: call it after connecting, before the first byte, for each try.

        A holder's belief is counted from here. A backend that never calls it loses a little of each lease, never its
        safety: then belief is counted from the call.
        """
        self.sent_at = self._now()
        self.forsaken, self._sent = self._sent, True


@dataclass(frozen=True, slots=True)
class Traits:
    """What a store can promise. The table in the README is printed from these.

    Attributes:
        kind: the store's name for people.
        clock: whose clock judges expiry. By `observed change`, each client counts the ttl on its own boot clock from
            when it first saw the hold as it is: a newcomer waits a whole ttl behind what had lapsed before it came, and
            tells a retry of somebody else's request that nothing is left of it.
        shared_by: how far the exclusion reaches.
        durable: whether leases and tokens survive a restart of the store; a few words where its settings decide.
        prompt_failover: whether a dead holder's lease is free before its ttl; grants carry a `Bond`, refusals a
            `look_every`.
        wakes_waiters: whether a release wakes those who wait.
        fair: whether waiters can be served in the order of their arrival.
        transactional_fencing: whether the store itself can refuse a stale holder's write.
        token_survives_loss: whether tokens go on rising after the store lost acknowledged writes.
        groups: whether several names can be taken in one step, all or none.
        history: whether the store can remember holds that have ended.
        in_two_halves: whether questions can be sent without waiting for the answer: event loops ask without a thread.
        slots: whether the store's own clock writes the times of a record, so that `once_per` slots can be judged.
        caveat: what is to be known before this store is chosen, in a few words; empty when the rest says it all.
    """

    kind: str
    clock: Literal["server", "host boot clock", "process", "observed change"]
    shared_by: Literal["threads", "processes", "hosts"]
    durable: bool | str
    prompt_failover: bool = False
    wakes_waiters: bool = False
    fair: bool = False
    transactional_fencing: bool = False
    token_survives_loss: bool = False
    groups: bool = False
    history: bool = False
    in_two_halves: bool = False
    slots: bool = False
    caveat: str = ""


@runtime_checkable
class Backend(Protocol):
    """A store of leases. See the module for the clauses."""

    @property
    def traits(self) -> Traits:
        """What this store can promise."""

    def try_acquire(self, request: Request, budget: Budget) -> Granted | Refused:
        """Ask for a name once, without waiting behind anybody. C1 C2 C3 C13.

        Raises:
            BackendUnavailable: with `outcome_unknown` when a grant may exist; release it by its `lease_id`.
            BackendMisconfigured: nothing was granted.
        """

    def renew(self, renewals: Sequence[Renewal], budget: Budget) -> list[RenewalOutcome]:
        """Extend many holds in one conversation; the outcomes stand in the order of `renewals`. C4 C5.

        A row that somebody else has locked is `Unknown`; the others are renewed all the same.

        Raises:
            BackendUnavailable: every one of them is unknown.
        """

    def release(self, name: str, lease_id: str, budget: Budget, *, min_hold: float = 0.0) -> ReleaseOutcome:
        """End one hold, at once or at `acquired_at + min_hold`. C6.

        Raises:
            BackendUnavailable: the store could not confirm; safe to repeat.
        """

    def force_release(self, name: str, fencing_token: int, budget: Budget) -> bool:
        """End whoever holds `name` under that token. False when the token is no longer current or the hold is over."""

    def adopt(self, adoption: Adoption, budget: Budget) -> Granted | Gone:
        """Let a running hold go on as the next one, under another id, owner and token. C20.

        Raises:
            BackendUnavailable: with `outcome_unknown` when it may have been done; also while a guarded transaction of
                the hold runs: then nothing was changed.
        """

    def set_metadata(self, name: str, lease_id: str, metadata: Mapping[str, Any], budget: Budget) -> Held | Gone:
        """Replace the metadata of a running hold. C21.

        Raises:
            BackendUnavailable: the store could not confirm; safe to repeat.
        """

    def get(self, name: str, budget: Budget) -> Lease | None:
        """Read the record of the present or the last hold. None when the store does not know the name. C10."""

    def list(self, prefix: str, budget: Budget, *, ended: bool = False) -> list[Lease]:
        """Read the records of all names that begin with `prefix`, ordered by name.

        Holds that were given back are left out unless `ended`; holds that lapsed are shown until they are cleaned up.
        """

    def cleanup(self, older_than: float, budget: Budget) -> int:
        """Delete the records of holds that ended more than `older_than` seconds ago; return how many.

        Tokens never go back.
        """

    def forget(self) -> None:
        """Drop, in a forked child, what belongs to the parent: connections are neither used nor closed."""

    def close(self) -> None:
        """Free what this backend opened. Idempotent; ends no hold. C15."""


class Subscription(Protocol):
    """What one client hears of the store's marked names. One thread listens; any thread may close."""

    def next(self, seconds: float) -> Sequence[Change]:
        """Return what came since the last call, in its order, waiting for something for at most `seconds`.

        Empty when nothing came. Hints about names that this client, or nobody, has marked may be among them.

        Raises:
            BackendUnavailable: the link broke: what was missed is unknown, and this subscription is over.
            BackendClosed: it was closed, by `close` or with its backend.
        """

    def close(self) -> None:
        """End it, from any thread: a `next` that waits is woken. Idempotent."""


class WakingBackend(Backend, Protocol):
    """What a store with the trait `wakes_waiters` adds."""

    def listen(self, budget: Budget) -> Subscription | None:
        """Begin to hear of marked names; what is announced after the return is heard. C16.

        None: nothing can be heard from here, though the store could wake others (a transaction pooler in between, lent
        connections, switched off). Callers then look on their own and need not ask again.

        Raises:
            BackendUnavailable: worth another try.
        """

    def mark(self, name: str, seconds: float, budget: Budget) -> bool:
        """Note that somebody waits for `name`, or watches it, for the next `seconds`. C16.

        Writes only if the present mark ends within half of that, so that many waiters cost one write. A longer mark is
        never shortened.

        Returns:
            False when the store has no record of the name or could not mark it just now: look again.
        """


class FairBackend(Backend, Protocol):
    """What a store with the trait `fair` adds."""

    def queue(self, ticket: Ticket, budget: Budget) -> Place | None:
        """Take a place in the queue for a name, or renew it: until the store's now + `ticket.ttl`. C17.

        A ticket that has run out is numbered anew, behind everybody.

        Returns:
            the place; None when the store has no record of the name, so that there is nothing to wait for.
        """

    def leave_queue(self, name: str, ticket_id: str, budget: Budget) -> bool:
        """Give a place up; False when there was none. Heard as "released" where the name is marked."""

    def queued(self, name: str, budget: Budget) -> builtins.list[str]:
        """Return the labels of those who queue for a name, the head first. C17 C10."""

    def queues(self, prefix: str, budget: Budget) -> dict[str, builtins.list[str]]:
        """Return every queue in which somebody stands, of the names that begin with `prefix`. C17 C10."""


class GroupBackend(Backend, Protocol):
    """What a store with the trait `groups` adds."""

    def try_acquire_many(self, requests: Sequence[Request], budget: Budget) -> list[Granted] | InTheWay | None:
        """Ask for several different names at once. C22 C13.

        Returns:
            the grants, in the order of `requests`; one name that is in the way; None where it has to be asked for one
            name after the other, since a rival is at work, say, or somebody queues. Then nothing was written.

        Raises:
            BackendUnavailable: as for `try_acquire`, of all of them.
        """


class RememberingBackend(Backend, Protocol):
    """What a store with the trait `history` adds."""

    def history(self, name: str, budget: Budget, *, limit: int, prefix: bool = False) -> builtins.list[Tenure]:
        """Read the last `limit` holds of a name, the present one among them, in the order in which they began. C23 C10.

        Args:
            name: whose; all names that begin with it if `prefix`.
            budget: how long it may take.
            limit: how many at most, counted from the last.
            prefix: see `name`.
        """


AnswerT_co = TypeVar("AnswerT_co", covariant=True)


class Begun(Protocol[AnswerT_co]):
    """A verb whose question was sent and whose answer nobody has read. It is one thread's at a time. C24.

    It is ended by `finish` or `drop`.

    Attributes:
        watch: what an event loop keeps for this connection from one answer to the next; None at first.
    """

    watch: object

    @property
    def done(self) -> bool:
        """Whether the answer was read and says it all: then `finish` waits for nothing."""

    def fileno(self) -> int:
        """Return the socket's descriptor: it turns readable when something comes, or when the budget is spent.

        Not to be asked once `arrived` was true: by then it may be another's.

        Raises:
            OSError: there is none.
        """

    def arrived(self) -> bool:
        """Read what has come, without waiting; tell whether there is nothing more to wait for."""

    def finish(self) -> AnswerT_co:
        """Return what the verb comes to, and do what is left of it: waits, within the budget, unless `done`.

        Raises:
            BackendError: as for the verb.
        """

    def drop(self) -> None:
        """Give the answer up. Whether the verb was carried out stays unknown. Waits for nothing."""


class SplitBackend(Backend, Protocol):
    """What a store with the trait `in_two_halves` adds: verbs that an event loop asks without a thread."""

    def begin_try_acquire(self, request: Request, budget: Budget) -> Begun[Granted | Refused] | None:
        """Send the question of `try_acquire` and wait for nothing. C24.

        The budget is for both halves.

        Returns:
            the other half; None where it takes waiting just now (for a connection, say). Then nothing was sent.
        """

    def begin_release(
        self, name: str, lease_id: str, budget: Budget, *, min_hold: float = 0.0
    ) -> Begun[ReleaseOutcome] | None:
        """Do the same for `release`. C24."""


ParamStyle: TypeAlias = Literal["format", "pyformat", "named", "qmark", "numeric", "numeric_dollar"]
"""How a driver writes parameters: `%s`, `%(name)s`, `:name`, `?`, `:1`, `$1`."""


class Fence(NamedTuple):
    """A predicate for the WHERE of one statement, true only while the hold is current.

    Attributes:
        sql: the predicate, in parentheses where it needs them.
        params: what it takes: a dict for the styles with names, a list in order for the others.
    """

    sql: str
    params: Mapping[str, Any] | Sequence[Any]


class Guard(Protocol):
    """A proof inside the caller's transaction. Made by the call, on a synchronous connection; else by awaiting it.

    As a block (`with`, or `async with`) it is proved once more on leaving, if what was proved may have been undone
    meanwhile by rolling back to an older savepoint. Entering proves nothing a second time.
    """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __await__(self) -> Generator[Any, None, Self]: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class FencingBackend(Backend, Protocol):
    """What a store with the trait `transactional_fencing` adds."""

    def guard(self, claim: Claim, connection: Any, *, idle: float = 60.0) -> Guard:
        """Prove inside the caller's transaction that the hold is current, and keep it so until that ends. C18.

        Args:
            claim: the hold.
            connection: the caller's, of a kind that the store names.
            idle: seconds that the transaction may lie idle afterwards, where the store can see to that: so long may a
                holder that stopped in its middle keep others from taking over.

        Raises:
            FencedError: it is not; the caller's transaction is aborted.
            ConfigurationError: the connection, or the state it is in, is not one that can be guarded.
            BackendUnavailable: unknown, for instance since somebody has the record locked; the transaction is aborted.
        """

    def fence_sql(self, claim: Claim, paramstyle: ParamStyle, *, start: int = 1) -> Fence:
        """Return the same as a predicate. C18.

        Args:
            claim: the hold.
            paramstyle: how the caller's driver writes parameters.
            start: the number of the first parameter, for the numbered styles.
        """


class WakesNobody:
    """For a store without the trait `wakes_waiters`."""

    traits: Traits

    def listen(self, budget: Budget) -> NoReturn:  # noqa: ARG002
        """Say that this store cannot."""
        raise lacks(self.traits, "wakes_waiters", "listen")

    def mark(self, name: str, seconds: float, budget: Budget) -> NoReturn:  # noqa: ARG002
        """Say that this store cannot."""
        raise lacks(self.traits, "wakes_waiters", "mark")


class KeepsNoQueue:
    """For a store without the trait `fair`."""

    traits: Traits

    def queue(self, ticket: Ticket, budget: Budget) -> NoReturn:  # noqa: ARG002
        """Say that this store cannot."""
        raise lacks(self.traits, "fair", "queue")

    def leave_queue(self, name: str, ticket_id: str, budget: Budget) -> NoReturn:  # noqa: ARG002
        """Say that this store cannot."""
        raise lacks(self.traits, "fair", "leave_queue")

    def queued(self, name: str, budget: Budget) -> NoReturn:  # noqa: ARG002
        """Say that this store cannot."""
        raise lacks(self.traits, "fair", "queued")

    def queues(self, prefix: str, budget: Budget) -> NoReturn:  # noqa: ARG002
        """See `FairBackend.queues`."""
        raise lacks(self.traits, "fair", "queues")


class TakesNoGroups:
    """For a store without the trait `groups`."""

    traits: Traits

    def try_acquire_many(self, requests: Sequence[Request], budget: Budget) -> NoReturn:  # noqa: ARG002
        """Say that this store cannot."""
        raise lacks(self.traits, "groups", "try_acquire_many")


class RemembersNothing:
    """For a store without the trait `history`."""

    traits: Traits

    def history(self, name: str, budget: Budget, *, limit: int, prefix: bool = False) -> NoReturn:  # noqa: ARG002
        """Say that this store cannot."""
        raise lacks(self.traits, "history", "history")


class AsksInOne:
    """For a store without the trait `in_two_halves`."""

    traits: Traits

    def begin_try_acquire(self, request: Request, budget: Budget) -> NoReturn:  # noqa: ARG002
        """Say that this store cannot."""
        raise lacks(self.traits, "in_two_halves", "begin_try_acquire")

    def begin_release(self, name: str, lease_id: str, budget: Budget, *, min_hold: float = 0.0) -> NoReturn:  # noqa: ARG002
        """Say that this store cannot."""
        raise lacks(self.traits, "in_two_halves", "begin_release")


class FencesNothing:
    """For a store without the trait `transactional_fencing`."""

    traits: Traits

    def guard(self, claim: Claim, connection: Any, *, idle: float = 60.0) -> NoReturn:  # noqa: ARG002
        """Say that this store cannot."""
        raise lacks(self.traits, "transactional_fencing", "guard")

    def fence_sql(self, claim: Claim, paramstyle: ParamStyle, *, start: int = 1) -> NoReturn:  # noqa: ARG002
        """Say that this store cannot."""
        raise lacks(self.traits, "transactional_fencing", "fence_sql")


def fencing(backend: Backend, asked: str) -> FencingBackend:
    """Return a store that can fence; one that cannot, or never heard of it, is refused.

    Raises:
        ConfigurationError: it has not got the trait.
    """
    if not backend.traits.transactional_fencing:
        raise lacks(backend.traits, "transactional_fencing", asked)
    return cast("FencingBackend", backend)


def remembering(backend: Backend) -> RememberingBackend:
    """Return a store that can remember; one that cannot, or never heard of it, is refused.

    Raises:
        ConfigurationError: it has not got the trait.
    """
    if not backend.traits.history:
        raise lacks(backend.traits, "history", "history")
    return cast("RememberingBackend", backend)


def lacks(traits: Traits, trait: str, asked: str) -> ConfigurationError:
    """Return the error for asking a store for what it cannot do."""
    return ConfigurationError(f"{asked} needs a store with the trait {trait!r}, which {traits.kind} lacks")
