"""Leases in Redis or Valkey: one script and one round trip per verb, judged by the server's clock.

What decides is in `redis_lua`; where connections come from in `redis_connections`; what an error means in
`redis_errors`. Here they are put together: a verb is a conversation, retried within its budget while trouble is of the
kind that passes.

One primary that keeps its memory gives what PostgreSQL gives. A failover to a replica that had not yet received the
last writes does not: a lease may be granted twice then, and a token with it. `wait_replicas` narrows that gap and does
not close it. This is no consensus among servers, and is not offered as one.
"""

from __future__ import annotations

import builtins
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

import tenacity

from pglease import clock, forks, options
from pglease.backends.base import AsksInOne, Budget, FencesNothing, RemembersNothing, TakesNoGroups, Traits
from pglease.errors import (
    BackendError,
    BackendMisconfigured,
    BackendUnavailable,
    ConfigurationError,
    MissingDependencyError,
)

try:
    import redis  # noqa: F401
except ImportError:
    raise MissingDependencyError("Redis needs the package redis: install the extra, pglease[redis]") from None

from pglease.backends import redis_doctor
from pglease.backends.redis_address import Address
from pglease.backends.redis_connections import Connections, Link
from pglease.backends.redis_errors import Elsewhere, Node, NotReplicated, OutOfTime, is_elsewhere, translated
from pglease.backends.redis_lua import (
    ADOPT,
    CLEAN_UP,
    DESCRIBE,
    FORCE_RELEASE,
    KEYS,
    LEAVE_QUEUE,
    LOOK,
    MARK,
    QUEUE,
    QUEUED,
    RELEASE,
    RENEW,
    TRY_ACQUIRE,
    TRY_ACQUIRE_IN_QUEUE,
    Script,
)
from pglease.backends.redis_routes import Routes
from pglease.backends.redis_subscription import RedisSubscription
from pglease.backends.settling import Settling
from pglease.records import (
    Adoption,
    Gone,
    Granted,
    Held,
    Lease,
    LossReason,
    Place,
    Refused,
    Released,
    ReleaseOutcome,
    Renewal,
    RenewalOutcome,
    Request,
    Ticket,
    Unknown,
    lease_of,
)

if TYPE_CHECKING:
    from pglease.backends.checks import Check

log = logging.getLogger("pglease")

T = TypeVar("T")

TRAITS = Traits(
    kind="Redis, Valkey",
    clock="server",
    shared_by="hosts",
    durable="with AOF",
    wakes_waiters=True,
    fair=True,
    slots=True,
    caveat="tokens may repeat after a failover that lost writes",
)
LAYOUT = 1
_PREFIX = re.compile(r"[^\x00-\x20\x7f{}]{1,64}\Z")
_TAGGED = str.maketrans({"%": "%25", "{": "%7B", "}": "%7D"})
"""What could end a hash tag early, and the sign that marks it."""
_GLOB = re.compile(rb"([*?\[\]\\^-])")
_ENDS = tuple(f"}}:{key}".encode() for key in KEYS)
_RECORD = _ENDS[0]
_REASONS: dict[bytes, LossReason] = {
    b"taken": "taken",
    b"deleted": "deleted",
    b"forced": "forced",
    b"expired": "expired",
}


class RedisBackend(FencesNothing, TakesNoGroups, RemembersNothing, AsksInOne):
    """Leases in Redis (6 or newer) or Valkey: one server, one behind Sentinel, or a Cluster.

    Args:
        url: `redis://user:pass@host:port/db`, `rediss://` for TLS, both also as `valkey://` and `valkeys://`, or
            `redis+sentinel://user:pass@host1,host2/service/db`. A Cluster is recognised; any of its nodes will do.
        prefix: what all keys begin with; 1 to 64 characters without blanks and braces. Default `pglease`.
        wait_replicas: how many replicas must have a grant or a renewal before it is answered (Redis' WAIT). Default 0.
            It makes it less likely that a failover loses a lease, not impossible.
        connect_timeout: seconds (or "10s") for one connection attempt, the look-up of the name included. Default 10.
        pool_size: how many conversations may go on at once; callers wait for their turn. One more connection is kept
            for renewals. Default 4.

    Building it connects to nothing. At the first use it warns, by the log, of settings of the server that weaken what
    leases promise.

    Raises:
        ConfigurationError: for what is wrong with the arguments, all of it, without showing the address.
        MissingDependencyError: redis-py is not installed.
    """

    traits = TRAITS

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "pglease",
        wait_replicas: int = 0,
        connect_timeout: options.Duration = 10,
        pool_size: int = 4,
    ) -> None:
        with options.all_problems() as problems:
            address = problems.check(Address, url)
            timeout = problems.check(options.seconds, connect_timeout, "connect_timeout")
            size = problems.check(options.count, pool_size, "pool_size")
            replicas = problems.check(options.count, wait_replicas, "wait_replicas", least=0)
            keys = problems.check(_Keys, prefix)
        self.connections = Connections(address, pool_size=size, connect_timeout=timeout)
        self._keys = keys
        self._wait_replicas = replicas
        self._routes = Routes(address.home)
        self._is_settled = False
        self._fresh_locks()
        forks.forget_in_children(self, type(self).forget)

    def _fresh_locks(self) -> None:
        self._settling = Settling("the server")
        self._closing = threading.Event()
        self._subscriptions: builtins.list[RedisSubscription] = []

    def __repr__(self) -> str:
        return f"<RedisBackend {self.connections.address}>"

    # -- the verbs -----------------------------------------------------------------------------------------------------

    def try_acquire(self, request: Request, budget: Budget) -> Granted | Refused:
        """See `Backend.try_acquire`."""
        metadata = _written(request.metadata)
        args: tuple[Any, ...] = (request.name, request.lease_id, request.owner_id, _microseconds(request.ttl), metadata)
        args += (request.ticket_id or "", self._keys.channel)
        script = TRY_ACQUIRE_IN_QUEUE if request.ticket_id else TRY_ACQUIRE
        answer = self._ask(script, args, budget, safe_with=b"granted")
        if answer[0] == b"queued":
            answer = self._ask(TRY_ACQUIRE_IN_QUEUE, args, budget, safe_with=b"granted")
        if answer[0] == b"reserved":
            return Refused(None, int(answer[2]) / 1e6, answer[1].decode(errors="replace"))
        lease = _lease(request.name, answer)
        return Granted(lease) if answer[0] == b"granted" else Refused(lease, lease.time_remaining())

    def renew(self, renewals: Sequence[Renewal], budget: Budget) -> builtins.list[RenewalOutcome]:
        """See `Backend.renew`. May use the connection that is kept for renewals.

        In a Cluster it is one round trip for each node that has some of the holds. A node that does not answer costs
        its share of the budget, and its holds are `Unknown`; the next time the others come first.
        """
        if not renewals:
            return []
        outcomes: dict[int, RenewalOutcome] = {}
        troubles: builtins.list[BackendError] = []
        groups = self._by_node(renewals, budget)
        for done, (node, places) in enumerate(groups.items()):
            share = budget if len(groups) == 1 else Budget.of(budget.left() / (len(groups) - done), clock.now)
            try:
                found = self._renewed(node, [renewals[place] for place in places], share)
            except BackendError as error:
                troubles.append(error)
                found = [Unknown(error)] * len(places)
            outcomes.update(zip(places, found, strict=True))
            budget.sent_at = share.sent_at if not done else min(budget.sent_at, share.sent_at)
        if len(troubles) == len(groups):
            raise troubles[-1]
        return [outcomes[place] for place in range(len(renewals))]

    def _by_node(self, renewals: Sequence[Renewal], budget: Budget) -> dict[Node, builtins.list[int]]:
        self._retried(lambda: self._settle(budget, reserved=True), budget)
        groups: dict[Node, builtins.list[int]] = {}
        for place, renewal in enumerate(renewals):
            groups.setdefault(self._routes.of(self._keys.of(renewal.name)[0]), []).append(place)
        return dict(sorted(groups.items(), key=lambda group: self._routes.is_doubted(group[0])))

    def _renewed(self, node: Node, renewals: Sequence[Renewal], budget: Budget) -> builtins.list[RenewalOutcome]:
        calls = [
            (self._keys.of(renewal.name)[:1], (renewal.name, renewal.lease_id, _microseconds(renewal.ttl)))
            for renewal in renewals
        ]

        def ask(link: Link) -> builtins.list[Any]:
            answers = link.run_many(RENEW, calls)
            if all(isinstance(answer, Exception) and not is_elsewhere(answer) for answer in answers):
                raise answers[0]
            self._await_replicas(link, budget)
            return answers

        answers = self._retried(lambda: self._at(node, ask, budget, reserved=True), budget)
        sent_at = budget.sent_at
        outcomes: builtins.list[RenewalOutcome] = []
        for renewal, (_, args), answer in zip(renewals, calls, answers, strict=True):
            try:
                found = self._ask(RENEW, args, budget, safe_with=b"held") if is_elsewhere(answer) else answer
                outcomes.append(self._renewal(renewal, found))
            except BackendError as error:
                outcomes.append(Unknown(error))
        budget.sent_at = sent_at  # of the first of them: belief is counted from there for all
        return outcomes

    def _renewal(self, renewal: Renewal, answer: Any) -> RenewalOutcome:
        if isinstance(answer, Exception):
            raise self._explained(answer)
        verdict = answer[0]
        if verdict == b"held":
            return Held(_lease(renewal.name, answer))
        if verdict == b"foreign":
            raise self._foreign(renewal.name)
        return _gone(renewal.name, answer)

    def release(self, name: str, lease_id: str, budget: Budget, *, min_hold: float = 0.0) -> ReleaseOutcome:
        """See `Backend.release`."""
        answer = self._ask(RELEASE, (name, lease_id, round(min_hold * 1e6), self._keys.channel), budget, repeated=True)
        return Released() if answer[0] == b"released" else _gone(name, answer)

    def force_release(self, name: str, fencing_token: int, budget: Budget) -> bool:
        """See `Backend.force_release`."""
        args = (name, fencing_token, self._keys.channel)
        return bool(self._ask(FORCE_RELEASE, args, budget, repeated=True)[0] == b"forced")

    def adopt(self, adoption: Adoption, budget: Budget) -> Granted | Gone:
        """See `Backend.adopt`."""
        name, ttl = adoption.name, _microseconds(adoption.ttl)
        args = (name, adoption.lease_id, adoption.next_id, adoption.owner_id, ttl, self._keys.channel)
        answer = self._ask(ADOPT, args, budget, safe_with=b"granted")
        return Granted(_lease(name, answer)) if answer[0] == b"granted" else _gone(name, answer)

    def set_metadata(self, name: str, lease_id: str, metadata: Mapping[str, Any], budget: Budget) -> Held | Gone:
        """See `Backend.set_metadata`."""
        answer = self._ask(DESCRIBE, (name, lease_id, _written(metadata)), budget)
        return Held(_lease(name, answer)) if answer[0] == b"held" else _gone(name, answer)

    def get(self, name: str, budget: Budget) -> Lease | None:
        """See `Backend.get`."""
        answer = self._ask(LOOK, (name,), budget)
        return None if answer[0] == b"deleted" else _lease(name, answer)

    def list(self, prefix: str, budget: Budget, *, ended: bool = False) -> builtins.list[Lease]:
        """See `Backend.list`. Walks over the whole database by SCAN: not for every second of the day."""
        found = self._everywhere(LOOK, prefix, (), budget)
        leases = [(answer[0], _lease(name, answer)) for name, answer in found if len(answer) > 1]
        shown = [lease for verdict, lease in leases if ended or verdict == b"held" or not lease.is_expired()]
        return sorted(shown, key=lambda lease: lease.task_name)

    def cleanup(self, older_than: float, budget: Budget) -> int:
        """See `Backend.cleanup`. Deletes records; the counters of the tokens stay, some 60 bytes and the name each."""
        found = self._everywhere(CLEAN_UP, "", (round(older_than * 1e6),), budget)
        return sum(answer[0] == b"deleted" for _, answer in found)

    # -- waiting -------------------------------------------------------------------------------------------------------

    def listen(self, budget: Budget) -> RedisSubscription | None:
        """See `WakingBackend.listen`. One connection of its own, however many wait; None without the right to."""
        subscription = self._retried(lambda: self._subscribed(budget), budget)
        if subscription is None:
            log.info("this user of Redis may not listen on %r: waiters look on their own", self._keys.channel)
            return None
        self._subscriptions = [each for each in self._subscriptions if not each.is_over]
        self._subscriptions.append(subscription)
        if self._closing.is_set():
            subscription.close()
        return subscription

    def _subscribed(self, budget: Budget) -> RedisSubscription | None:
        self._settle(budget)
        link = self.connections.one_more(self._routes.home, budget)
        return RedisSubscription.begin(link, self._keys.channel, budget, self._explained)

    def mark(self, name: str, seconds: float, budget: Budget) -> bool:
        """See `WakingBackend.mark`."""
        return bool(self._ask(MARK, (name, _microseconds(seconds)), budget)[0] == b"marked")

    def queue(self, ticket: Ticket, budget: Budget) -> Place | None:
        """See `FairBackend.queue`."""
        args = (ticket.name, ticket.ticket_id, ticket.owner_id, _microseconds(ticket.ttl))
        answer = self._ask(QUEUE, args, budget)
        return Place(int(answer[1]), int(answer[2])) if answer[0] == b"queued" else None

    def leave_queue(self, name: str, ticket_id: str, budget: Budget) -> bool:
        """See `FairBackend.leave_queue`."""
        return bool(self._ask(LEAVE_QUEUE, (name, ticket_id, self._keys.channel), budget)[0] == b"left")

    def queued(self, name: str, budget: Budget) -> builtins.list[str]:
        """See `FairBackend.queued`."""
        return [label.decode() for label in self._ask(QUEUED, (name,), budget)[1:]]

    def queues(self, prefix: str, budget: Budget) -> dict[str, builtins.list[str]]:
        """See `FairBackend.queues`. Walks over the whole database, as `list` does."""
        found = self._everywhere(QUEUED, prefix, (), budget)
        return {name: [label.decode() for label in answer[1:]] for name, answer in found if len(answer) > 1}

    # -- conversations -------------------------------------------------------------------------------------------------

    def _ask(
        self, script: Script, args: tuple[Any, ...], budget: Budget, *, safe_with: bytes = b"", repeated: bool = False
    ) -> builtins.list[Any]:
        """Run a script on one name, again while trouble passes.

        Args:
            script: which.
            args: the name first.
            budget: for all of it.
            safe_with: the verdict that has to reach replicas before it counts.
            repeated: whether the script is told that an earlier try may have been applied.
        """
        keys = self._keys.of(args[0])
        tried: builtins.list[str] = []

        def ask(link: Link) -> builtins.list[Any]:
            again = (tried[-1] if tried else "",) if repeated else ()
            tried.append("again")
            answer = link.run(script, keys[: script.keys], (*args, *again))
            if answer[0] in (b"foreign", b"foreign token"):
                raise self._foreign(args[0], token=answer[0] == b"foreign token")
            if answer[0] == safe_with:
                self._await_replicas(link, budget)
            return answer

        return self._retried(lambda: self._routed(keys[0], ask, budget), budget)

    def _everywhere(
        self, script: Script, prefix: str, args: tuple[Any, ...], budget: Budget
    ) -> builtins.list[tuple[str, Any]]:
        """Run a script on every name that begins with `prefix`, on every primary."""

        def ask_all() -> dict[str, Any]:
            self._settle(budget)
            found: dict[str, Any] = {}
            for node in self._routes.primaries():
                found.update(self._at(node, lambda link: self._scanned(link, script, prefix, args), budget))
            return found

        return [*self._retried(ask_all, budget).items()]

    def _scanned(self, link: Link, script: Script, prefix: str, args: tuple[Any, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for keys in link.scan(self._keys.pattern(prefix)):
            names = [name for name in map(self._keys.name, keys) if name is not None and name not in found]
            answers = link.run_many(script, [(self._keys.of(name)[: script.keys], (name, *args)) for name in names])
            for name, answer in zip(names, answers, strict=True):
                if isinstance(answer, Exception):
                    raise answer
                if answer[0] == b"foreign":
                    log.debug("%s", self._foreign(name))
                else:
                    found[name] = answer
        return found

    def _retried(self, once: Callable[[], T], budget: Budget) -> T:
        """Hold one conversation; while trouble is of the kind that passes, hold it again until the budget is spent."""
        try:
            return once()
        except BackendUnavailable as trouble:
            if budget.left() <= 0 or isinstance(trouble, NotReplicated):
                raise
            first = trouble
        # The first try again is made at once: a restart had left a dead connection, or a slot of the Cluster has moved.
        retrying = tenacity.Retrying(
            wait=tenacity.wait_random_exponential(multiplier=0.02, max=0.5),
            stop=lambda state: self._closing.is_set() or budget.left() <= state.upcoming_sleep,
            retry=tenacity.retry_if_exception(_may_pass),
            sleep=self._sleep,
            reraise=True,
        )
        try:
            answer: T = retrying(once)
        except BackendUnavailable as last:
            told = first if isinstance(last, OutOfTime) else last
            told.outcome_unknown = last.outcome_unknown or first.outcome_unknown
            told.__context__ = None  # the driver's own error, whose frames know the password
            raise told from None
        return answer

    def _sleep(self, seconds: float) -> None:
        self._closing.wait(seconds)

    def _routed(self, key: bytes, talk: Callable[[Link], T], budget: Budget) -> T:
        """Talk to the node that has `key`, or to the one it says has it for this once."""
        self._settle(budget)
        try:
            return self._at(self._routes.of(key), talk, budget)
        except Elsewhere as elsewhere:
            if not elsewhere.asking:
                raise
            importing = elsewhere.node

        def ask_for_once(link: Link) -> T:
            link.call("ASKING")
            return talk(link)

        return self._at(importing, ask_for_once, budget)

    def _at(self, node: Node, talk: Callable[[Link], T], budget: Budget, *, reserved: bool = False) -> T:
        try:
            answer = self.connections.converse(node, talk, budget, reserved=reserved)
        except Elsewhere as elsewhere:
            if not elsewhere.asking:
                self._routes.follow(elsewhere, node)
            raise
        except BackendUnavailable:
            self._routes.doubt(node)
            raise
        self._routes.trust(node)
        return answer

    def _await_replicas(self, link: Link, budget: Budget) -> None:
        """Wait until enough replicas have what was written on this connection."""
        if not self._wait_replicas:
            return
        # The server counts this time in tenths of a second, and answers a little late.
        patience = max(1, round((0.9 * budget.left() - 0.15) * 1000))
        reached = link.call("WAIT", self._wait_replicas, patience)
        if reached < self._wait_replicas:
            raise NotReplicated(
                f"only {reached} of {self._wait_replicas} replicas have the lease: a failover could lose it",
                outcome_unknown=True,
            )

    def _explained(self, error: Exception) -> BackendError:
        return translated(error, self.connections.address.scrub, sent=True)

    def _foreign(self, name: str, *, token: bool = False) -> BackendMisconfigured:
        key = self._keys.of(name)[token].decode()
        return BackendMisconfigured(
            f"the key {key!r} holds something that pglease did not write, or a token that cannot be raised; nothing "
            "was changed. Rename or delete it, or choose another `prefix`"
        )

    # -- the first use -------------------------------------------------------------------------------------------------

    def _settle(self, budget: Budget, *, reserved: bool = False) -> None:
        """Look at the server once, and at the map of a Cluster whenever it may have changed.

        One thread reads the map anew. The others wait for it for a part of their time and then go on by the one there
        is: a node that does not answer must not keep who has business with the other nodes, renewals above all.
        """
        if self._is_settled and not self._routes.is_stale:
            return
        may_go_on = self._is_settled and self._routes.has_map
        with self._settling.turn(budget, patience=budget.left() / 4 if may_go_on else None) as ours:
            if ours and not self._is_settled:
                self._look_once(budget, reserved=reserved)
            if ours and self._routes.is_stale:
                self._read_map(budget, reserved=reserved)

    def _look_once(self, budget: Budget, *, reserved: bool) -> None:
        server = self._at(self._routes.home, redis_doctor.look, budget, reserved=reserved)
        self._routes.is_cluster = self._routes.is_stale = server.is_cluster
        self._is_settled = True
        for check in redis_doctor.settings(server, self._wait_replicas):
            if check.status != "ok" and check.name in redis_doctor.TOLD_AT_FIRST_USE:
                log.warning("%s at %s: %s; %s", server.kind, self.connections.address, check.text, check.remedy)

    def _read_map(self, budget: Budget, *, reserved: bool) -> None:
        """Ask one node after the other for the map of the Cluster; where none tells, go on by the one there is."""
        nodes = self._routes.known()
        trouble = BackendError("a Cluster without nodes")  # there is always one: the address's own
        for place, node in enumerate(nodes):
            share = Budget.of(budget.left() / (len(nodes) - place + 1), clock.now)  # one for whatever it is read for
            try:
                slots = self.connections.converse(
                    node, lambda link: link.call("CLUSTER", "SLOTS"), share, reserved=reserved
                )
                self._routes.learn(slots, node)
                return
            except BackendError as error:
                self._routes.doubt(node)
                trouble = error
        if not self._routes.has_map:
            raise trouble

    def forget(self) -> None:
        """See `Backend.forget`."""
        for subscription in self._subscriptions:
            subscription.forget()
        self._fresh_locks()
        self.connections.forget()

    def close(self) -> None:
        """See `Backend.close`."""
        self._closing.set()
        self.connections.close()
        while self._subscriptions:
            self._subscriptions.pop().close()

    # -- what operators ask for ----------------------------------------------------------------------------------------

    def diagnose(self, *, timeout: float = 30.0) -> Iterator[Check]:
        """Yield one check after the other: what was found, and what to do about it."""
        budget = Budget.of(timeout, clock.now)

        def take_and_return() -> None:
            request = Request(redis_doctor.PROBE_NAME, "pglease doctor", os.urandom(16).hex(), 5.0)
            if isinstance(self.try_acquire(request, budget), Granted):  # else another doctor is at work
                self.release(request.name, request.lease_id, budget)

        yield from redis_doctor.diagnose(
            lambda look: self._at(self._routes.home, look, budget), take_and_return, self._wait_replicas
        )


class _Keys:
    """Where a name lives.

    A name that held a brace could end its hash tag early, and its two keys would live on two nodes: braces are encoded,
    and the sign that marks what is encoded. Everything else stands as it is.
    """

    def __init__(self, prefix: object) -> None:
        if not isinstance(prefix, str) or not _PREFIX.match(prefix):
            raise ConfigurationError(f"prefix must be 1 to 64 characters without blanks and braces, not {prefix!r}")
        self._head = f"{prefix}:{LAYOUT}:{{".encode()
        self.channel = f"{prefix}:{LAYOUT}:changes"
        self.of = lru_cache(maxsize=1024)(self._of)
        """Returns the keys of a name: that of its record first, that of its counter second."""

    def _of(self, name: str) -> tuple[bytes, ...]:
        tag = self._head + name.translate(_TAGGED).encode()
        return tuple([tag + end for end in _ENDS])

    def pattern(self, prefix: str) -> bytes:
        """Return what SCAN is to look for: the records of names that begin with `prefix`, which is no pattern."""
        return _GLOB.sub(rb"\\\1", self._head + prefix.translate(_TAGGED).encode()) + b"*" + _RECORD

    def name(self, key: bytes) -> str | None:
        """Return the name whose record has this key; None for somebody else's key that looks like one of ours."""
        try:
            name = unquote(key[len(self._head) : -len(_RECORD)].decode(), errors="strict")
        except UnicodeDecodeError:
            return None
        return name if self.of(name)[0] == key else None


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, BackendUnavailable) and not isinstance(error, NotReplicated)


def _microseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e6))


def _gone(name: str, answer: Sequence[Any]) -> Gone:
    return Gone(_REASONS[answer[0]], _lease(name, answer) if len(answer) > 1 else None)


def _lease(name: str, answer: Sequence[Any]) -> Lease:
    """Read what `tell` in `redis_lua` returns, the verdict first."""
    _, owner, token, transitions, acquired, heartbeat, expires, metadata, seen, ended = answer
    # What was granted or renewed in this moment says the same time several times: read once.
    now = _moment(seen)
    renewed = now if heartbeat == seen else _moment(heartbeat)
    return lease_of(
        task_name=name,
        owner_id=owner.decode(errors="replace"),
        fencing_token=int(token),
        acquired_at=renewed if acquired == heartbeat else _moment(acquired),
        heartbeat_at=renewed,
        expires_at=_moment(expires),
        transitions=int(transitions),
        seen_at=now,
        metadata=_metadata(metadata),
        given_back=ended == b"ended",
    )


def _written(metadata: Mapping[str, Any]) -> str:
    return json.dumps(dict(metadata), ensure_ascii=False) if metadata else ""


def _moment(microseconds: bytes) -> datetime:
    try:
        return datetime.fromtimestamp(int(microseconds) / 1e6, UTC)  # exact: a double holds more than that until 2242
    except (OverflowError, ValueError, OSError):  # a record written by hand; reading it must not fail
        return datetime.max.replace(tzinfo=UTC)


def _metadata(written: bytes) -> dict[str, Any]:
    if not written:
        return {}
    try:
        read = json.loads(written)
    except ValueError:  # as above
        return {}
    return read if isinstance(read, dict) else {}
