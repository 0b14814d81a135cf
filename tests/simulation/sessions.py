"""The hybrid in virtual time: its real backend, keeper and session, over sessions and locks of the simulated server.

Beneath them a connection is a stand-in: what is sent on it is sent again until it comes through or the link counts as
broken, as TCP does. The statements are not SQL but words, which the server's `Sessions` answer over the memory store's
rows. What the SQL says is shown by the contract suite.
"""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import psycopg

from pglease import clock, options
from pglease.backends import hybrid_keeper, hybrid_session, postgres
from pglease.backends.hybrid import HANDOVER_DELAY, HybridPostgresBackend, _Seen
from pglease.backends.hybrid_keeper import Errands, Keeper
from pglease.backends.hybrid_session import Mark, Session
from pglease.backends.hybrid_sql import key_of
from pglease.backends.postgres import PostgresBackend
from pglease.errors import BackendUnavailable
from pglease.records import Adoption, Gone, Granted, Held, Lease, Refused, Renewal, RenewalOutcome, Request
from pglease.schema import table_names
from tests.simulation import kernel as virtual
from tests.simulation.store import Call, Store

if TYPE_CHECKING:
    from pglease.backends.base import Budget
    from tests.simulation.kernel import Thread
    from tests.simulation.store import Link, Server

T = TypeVar("T")

CLIENT_NOTICES, SERVER_NOTICES = (1.0, 1.3), (1.5, 2.0)
"""Seconds after a cut, at least and at most, at which each end counts the link as broken: a cut holder hears first."""
AGAIN = 0.1
"""Seconds until what was lost on the way is sent again."""
STRICT_DELAY = 1.5
"""The handover delay in seconds where holders believe strictly: shorter than most ttls here, or it would not matter."""
LONGEST_CONNECT = 10.0
"""Seconds that one connection attempt may take."""
ERRANDS = Errands(tie="tie", untie="untie", end="end")
USUAL, TAKING_OVER = "usual", "taking over"
_DEAD = object()


class Awaited:
    """What a selector may wait for."""

    def __init__(self) -> None:
        self.ready = False
        self.watching: list[Thread] = []

    def fileno(self) -> Any:
        """Return what is to be waited for: itself."""
        return self

    def rouse(self) -> None:
        """Be ready, and wake who waits."""
        self.ready = True
        watching, self.watching = self.watching, []
        for thread in watching:
            virtual._kernel.wake(thread)


class End(Awaited):
    """Stands in for one end of a pair of sockets, which only wake each other."""

    other: End

    @classmethod
    def pair(cls) -> tuple[End, End]:
        """Stand in for `socket.socketpair`."""
        one, two = cls(), cls()
        one.other, two.other = two, one
        return one, two

    def setblocking(self, _: bool) -> None: ...

    def close(self) -> None: ...

    def send(self, _: bytes) -> None:
        self.other.rouse()

    def recv(self, _: int) -> None:
        self.ready = False


class Key(NamedTuple):
    """Stands in for a selector's key."""

    fileobj: Any


class Selector:
    """Stands in for `selectors.DefaultSelector`."""

    def __init__(self) -> None:
        self._files: list[tuple[Any, Awaited]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def register(self, file: Any, _: int) -> None:
        self._files.append((file, file.fileno()))

    def select(self, timeout: float | None) -> list[tuple[Key, int]]:
        kernel, me = virtual._kernel, virtual._kernel.running
        assert me is not None
        if not any(wait.ready for _, wait in self._files):
            for _, wait in self._files:
                wait.watching.append(me)
            kernel.block(timeout)
            for _, wait in self._files:
                if me in wait.watching:
                    wait.watching.remove(me)
        return [(Key(file), 1) for file, wait in self._files if wait.ready]


class Selectors:
    """Stands in for the module `selectors`."""

    DefaultSelector, EVENT_READ = Selector, 1


class Sockets:
    """Stands in for the module `socket`."""

    socketpair = End.pair


class Line(Awaited):
    """Stands in for psycopg's connection: one session's way to the server. Ready to be read once it is broken."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self.link, self.server = link, link.server
        self.closed = False
        self.mark = Mark(0, "")
        self.cut_at = virtual.FOREVER
        self._asker: Thread | None = None
        self.pgconn = self.info = self.socket = self

    @classmethod
    def connect(cls, _: str, *, link: Link, **__: Any) -> Self:
        """Stand in for `psycopg.Connection.connect`."""
        line = cls(link)
        line.cut_at = clock.now() + LONGEST_CONNECT
        line.ask("begin", {})
        line.cut_at = virtual.FOREVER
        return line

    @property
    def backend_pid(self) -> int:
        """What the other end said about its process."""
        return self.mark.pid

    def execute(self, _: str, *, prepare: bool) -> Rows:  # asked once, before there is a session
        """Answer who it is."""
        return Rows([(self.mark.pid, self.mark.started, False, 1000)])

    def rows(self, statement: str, params: Mapping[str, Any] | None) -> list[Any]:
        """Run one statement."""
        return self.ask(statement, params or {})  # type: ignore[no-any-return]

    def ask(self, statement: str, params: Mapping[str, Any]) -> Any:
        """Ask the server; the link lives until somebody notices that it is dead."""
        kernel = self.link.kernel
        if self.closed or self.ready:
            raise self._broken()
        call = Call("converse", (self, statement, params), {}, thread=kernel.running)
        self._asker = kernel.running
        kernel.after(self.link._delay(), lambda: self._arrive(call, self.server.generation))
        kernel.block(self.cut_at - clock.now())
        self._asker = call.thread = None
        if call.answer is None or call.answer[0] is _DEAD:
            raise self._broken()
        return call.answer[0]

    def _arrive(self, call: Call, generation: int) -> None:
        kernel = self.link.kernel
        if self.closed or call.thread is None:
            return
        if kernel.now < self.link.cut_out_until:
            kernel.after(AGAIN, lambda: self._arrive(call, generation))
        else:
            self.server.arrive(call, generation, self._reply)

    def _reply(self, call: Call) -> None:
        self.link.kernel.after(self.link._delay(), lambda: self._come_back(call))

    def _come_back(self, call: Call) -> None:
        kernel = self.link.kernel
        if call.thread is None or call.answer is not None:
            return
        if kernel.now < self.link.cut_in_until:
            kernel.after(AGAIN, lambda: self._come_back(call))
        else:
            call.answer = call.value, None
            kernel.wake(call.thread)

    def consume_input(self) -> None:
        """Read the end of file that made it ready."""
        if self.ready:
            raise self._broken()

    def _broken(self) -> psycopg.OperationalError:
        self.close()
        return psycopg.OperationalError("the connection is lost")

    def hear_of_its_end(self) -> None:
        """Be told that the session is over, as soon as the way is open."""
        kernel = self.link.kernel
        if kernel.now < self.link.cut_in_until:
            kernel.after(AGAIN, self.hear_of_its_end)
        else:
            kernel.after(self.link._delay(), self.break_off)

    def break_off(self) -> None:
        """Find the link dead."""
        asker, self._asker = self._asker, None
        self.rouse()
        if asker is not None:
            self.link.kernel.wake(asker)

    def close(self) -> None:
        """Leave: the server hears of it, unless it is cut off."""
        if not self.closed:
            self.closed = True
            self.server.store.sessions.left(self)


class Rows(list[Any]):
    """Stands in for a cursor."""

    def fetchall(self) -> Self:
        return self


class Cutoff:
    """Stands in for `Cutoff`: the line looks at it itself."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def arm(self, due: float) -> None:
        self._line.cut_at = due

    def disarm(self) -> None:
        self._line.cut_at = virtual.FOREVER


class Driver:
    """Stands in for the module `psycopg`, as far as the session uses it."""

    Connection, Error = Line, psycopg.Error


class BoundStore(Store):
    """The store whose rows may be bound to a session."""

    def __init__(self, server: Server) -> None:
        super().__init__(server.clock)
        self.sessions = Sessions(server)

    def try_acquire(
        self, request: Request, budget: Budget, *, mark: Mark | None = None, rival: tuple[str, Mark] | None = None
    ) -> Granted | Refused:
        """Grant a name that is free, or whose hold is the one that was seen to have lost its session."""
        row, now = self.rows.get(request.name), self._store.now()
        runs_until = None if row is None else row.expires_at
        if row is not None and rival == (row.lease_id, self.sessions.mark_of(request.name, row.lease_id)):
            row.expires_at = min(now, row.expires_at)
        answer = super().try_acquire(request, budget)
        if isinstance(answer, Refused) and row is not None:
            row.expires_at = runs_until  # somebody else is at the head of the queue: nothing was written
        elif row is not None and now < runs_until:
            self.sessions.takeovers += 1
        if isinstance(answer, Granted) and answer.lease.acquired_at == now:
            self.sessions.write(request.name, request.lease_id, mark)
        return answer

    def renew(
        self, renewals: Sequence[Renewal], budget: Budget, *, mark: Mark | None = None, bound: Sequence[str] = ()
    ) -> builtins.list[RenewalOutcome]:
        """Extend; a hold's mark says how things stand now."""
        outcomes = super().renew(renewals, budget)
        for renewal, outcome in zip(renewals, outcomes, strict=True):
            if isinstance(outcome, Held):
                self.sessions.write(renewal.name, renewal.lease_id, mark if renewal.lease_id in bound else None)
        return outcomes

    def adopt(self, adoption: Adoption, budget: Budget, *, mark: Mark | None = None) -> Granted | Gone:
        """Let a hold go on as the next one, bound to whom its new holder says."""
        answer = super().adopt(adoption, budget)
        if isinstance(answer, Granted) and answer.lease.acquired_at == answer.lease.seen_at:
            self.sessions.write(adoption.name, adoption.next_id, mark)
        return answer

    def glance(self, name: str, lease_id: str, _: Budget) -> tuple[str, Lease, str | None, Mark | None] | None:
        """Look who has a name, and whose session it is bound to."""
        row, now = self.rows.get(name), self._store.now()
        if row is None:
            return None
        verdict = "over" if row.over(now) else "granted" if row.lease_id == lease_id else "held"
        return verdict, row.record(name, now), row.lease_id, self.sessions.mark_of(name, row.lease_id)

    def converse(self, line: Line, statement: str, params: Mapping[str, Any], _: Budget) -> Any:
        """Answer on a session."""
        return self.sessions.answer(line, statement, params)

    def errand(self, statement: str, params: Mapping[str, Any], _: Budget) -> builtins.list[tuple[int]]:
        """Write marks."""
        return self.sessions.errand(statement, params)

    def copy(self) -> Any:
        """Return the whole of it."""
        return super().copy(), dict(self.sessions.marks)

    def restore(self, state: Any) -> None:
        """Go back to what it once was."""
        rows, self.sessions.marks = state
        super().restore(rows)


class Sessions:
    """The server's sessions, their advisory locks, and which row says that it is bound to which."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._living: dict[int, Line] = {}
        self.locks: dict[int, int] = {}
        self.marks: dict[str, tuple[str, Mark]] = {}
        self.takeovers = 0
        self._pids = itertools.count(1)

    # -- their lives ---------------------------------------------------------------------------------------------------

    def some(self) -> list[Line]:
        """Return those that live."""
        return list(self._living.values())

    def in_use(self) -> list[Line]:
        """Return those that have locks."""
        return [line for pid, line in self._living.items() if pid in self.locks.values()]

    def end(self, pid: int) -> bool:
        """End one, as an administrator does; its locks are free at once."""
        line = self._living.pop(pid, None)
        if line is None:
            return False
        self.locks = {key: owner for key, owner in self.locks.items() if owner != pid}
        if not line.closed:
            line.hear_of_its_end()
        return True

    def end_all(self) -> None:
        """End them all: the server is no more."""
        for pid in list(self._living):
            self.end(pid)

    def left(self, line: Line) -> None:
        """Notice that the client has closed one, or died, once the way is open or the link counts as broken."""
        kernel, cut_until = self._server.kernel, line.link.cut_out_until
        late = min(max(0.0, cut_until - kernel.now), kernel.random.uniform(*SERVER_NOTICES))
        kernel.after(late + line.link._delay(), lambda: self.end(line.mark.pid))

    def died(self, link: Link) -> None:
        """A process is dead: its connections are closed by its system."""
        for line in self.some():
            if line.link is link:
                line.closed = True
                self.left(line)

    def cut(self, link: Link) -> None:
        """A process was cut off: if that lasts, both ends notice, the holder first."""
        after, random = self._server.kernel.after, self._server.kernel.random
        for line in self.some():
            if line.link is link:
                after(random.uniform(*CLIENT_NOTICES), partial(self._if_cut, line, line.break_off))
                after(random.uniform(*SERVER_NOTICES), partial(self._if_cut, line, partial(self.end, line.mark.pid)))

    def _if_cut(self, line: Line, give_up: Callable[[], object]) -> None:
        if max(line.link.cut_out_until, line.link.cut_in_until) > self._server.kernel.now:
            give_up()

    def left_over(self) -> list[str]:
        """Return the processes whose sessions have a lock still, though nothing is held."""
        return sorted({
            line.link.process.name for line in self.in_use() if not line.link.process.dead
        })  # fmt: skip

    # -- what they ask -------------------------------------------------------------------------------------------------

    def answer(self, line: Line, statement: str, params: Mapping[str, Any]) -> Any:
        """Answer a statement on a session."""
        if statement == "begin":
            pid = next(self._pids)
            self._living[pid] = line
            line.mark = Mark(pid, f"{self._server.kernel.now:.6f}")
            return []
        pid = line.mark.pid
        if pid not in self._living:
            return _DEAD
        if statement == hybrid_session._PING:
            return [(pid,)]
        if statement == hybrid_session._TRY_LOCK:
            return [(self.locks.setdefault(params["key"], pid) == pid,)]
        if statement == hybrid_session._UNLOCK:
            had = self.locks.get(params["key"]) == pid
            if had:
                del self.locks[params["key"]]
            return [(had,)]
        if statement == ERRANDS.end:
            return [(True,)] if self._end_rival(params) else []
        return self.errand(statement, params) if statement in {ERRANDS.tie, ERRANDS.untie} else []

    def errand(self, statement: str, params: Mapping[str, Any]) -> list[tuple[int]]:
        """Say in rows which session has their locks."""
        mark = Mark(params["session_pid"], params["session_started"]) if statement == ERRANDS.tie else None
        found = []
        for place, (name, lease_id) in enumerate(zip(params["names"], params["lease_ids"], strict=True), 1):
            row = self._server.store.rows.get(name)
            if row is not None and row.lease_id == lease_id:
                self.write(name, lease_id, mark)
                found.append((place,))
        return found

    def write(self, name: str, lease_id: str, mark: Mark | None) -> None:
        """Write a mark, or none, into a row."""
        self.marks.pop(name, None)
        if mark is not None:
            self.marks[name] = lease_id, mark

    def mark_of(self, name: str, lease_id: str | None) -> Mark | None:
        """Return the mark of a row, if it is of this hold."""
        owner, mark = self.marks.get(name, (None, None))
        return mark if owner == lease_id else None

    def misleads(self, name: str, lease_id: str) -> bool:
        """Tell whether a row says that a session has the lock for its hold, and that session lives and has it not."""
        mark = self.mark_of(name, lease_id)
        key = key_of(table_names(), name)
        return mark is not None and mark.pid in self._living and self.locks.get(key) != mark.pid

    def _end_rival(self, params: Mapping[str, Any]) -> bool:
        pid, store = params["pid"], self._server.store
        bound = [name for name, (_, mark) in self.marks.items() if mark.pid == pid]
        runs = any(not store.rows[name].over(store._store.now()) for name in bound if name in store.rows)
        return self.locks.get(params["key"]) == pid and not runs and self.end(pid)


class Wire(NamedTuple):
    """Stands in for a connection of the pool."""

    link: Link
    budget: Budget

    def rows(self, statement: str, params: Mapping[str, Any]) -> list[Any]:
        """Run an errand."""
        return self.link._ask(Call("errand", (statement, params), {}), self.budget)  # type: ignore[no-any-return]

    def renewed(self, _: object, params: Mapping[str, Any]) -> list[Any]:
        """Renew."""
        wanted = zip(params["names"], params["lease_ids"], params["ttls"], strict=True)
        renewals = [Renewal(*each) for each in wanted]
        self.link.attempts.update(renewal.lease_id for renewal in renewals)
        options = {"mark": _mark_in(params), "bound": params["bound"]}
        return self.link._ask(Call("renew", (renewals,), options), self.budget)  # type: ignore[no-any-return]


def _mark_in(params: Mapping[str, Any]) -> Mark | None:
    pid = params["session_pid"]
    return None if pid is None else Mark(pid, params["session_started"])


class Hybrid(HybridPostgresBackend):
    """The real hybrid backend, whose statements are asked of the simulated server."""

    def __init__(self, link: Link, *, strict: bool, most: int | None) -> None:  # there is no address
        self.link = link
        self.traits = replace(link.traits, kind="simulated, hybrid", prompt_failover=True, groups=False)
        self._names = table_names()
        self._delay = STRICT_DELAY if strict else HANDOVER_DELAY
        self._known_held = {}
        self._closing = virtual.Event()  # type: ignore[assignment]
        self._statements = USUAL  # type: ignore[assignment]
        self._hybrid: Any = _Words()
        silence = self._delay - options.margin_for(self._delay, None) if strict else virtual.FOREVER
        self._keeper = Keeper(lambda: {"link": link}, str, silence=silence, most=most)
        self._keeper.errands = ERRANDS

    def _vetted(self, session: Session, budget: Budget) -> None:
        if not session.vetted:
            self._keeper.accept(budget)

    def _persist(self, act: Callable[[], T], budget: Budget, *, unknown: bool = False) -> T:
        while True:
            try:
                return act()
            except BackendUnavailable as trouble:
                trouble.outcome_unknown = unknown = trouble.outcome_unknown or unknown
                if budget.left() < 0.1:
                    raise
            virtual.Time.sleep(0.05)

    def _once(self, talk: Callable[[Any, Any], T], budget: Budget, *, reserved: bool = False) -> T:
        self.link.connect(budget)
        return talk(Wire(self.link, budget), self._statements)

    def _ask(self, link: Any, sql: Any, request: Any, budget: Budget, **more: Any) -> Any:
        rival = (more["rival_id"], Mark(more["rival_pid"], more["rival_started"])) if sql == TAKING_OVER else None
        self.link.asked[request.name] = request.lease_id, self.link.kernel.now
        return self.link._ask(Call("try_acquire", (request,), {"mark": _mark_in(more), "rival": rival}), budget)

    def _glance(self, request: Any, budget: Budget) -> _Seen | None:
        seen = self.link._ask(Call("glance", (request.name, request.lease_id), {}), budget)
        return None if seen is None else _Seen(*seen, queued=False)

    def _adopted(self, link: Any, sql: Any, adoption: Any, **more: Any) -> Any:
        return link.link._ask(Call("adopt", (adoption,), {"mark": _mark_in(more)}), link.budget)

    def force_release(self, name: str, fencing_token: int, budget: Budget) -> bool:
        return self.link.force_release(name, fencing_token, budget)

    def set_metadata(self, name: str, lease_id: str, metadata: Any, budget: Budget) -> Any:
        return self.link.set_metadata(name, lease_id, metadata, budget)

    def get(self, name: str, budget: Budget) -> Any:
        return self.link.get(name, budget)

    def list(self, prefix: str, budget: Budget, *, ended: bool = False) -> Any:
        return self.link.list(prefix, budget, ended=ended)

    def cleanup(self, older_than: float, budget: Budget) -> int:
        return self.link.cleanup(older_than, budget)

    def listen(self, budget: Budget) -> Any:
        return self.link.listen(budget)

    def mark(self, name: str, seconds: float, budget: Budget) -> bool:
        return self.link.mark(name, seconds, budget)

    def queue(self, ticket: Any, budget: Budget) -> Any:
        return self.link.queue(ticket, budget)

    def leave_queue(self, name: str, ticket_id: str, budget: Budget) -> bool:
        return self.link.leave_queue(name, ticket_id, budget)


STAND_INS: Sequence[tuple[Any, str, Any]] = (
    (hybrid_keeper, "selectors", Selectors),
    (hybrid_keeper, "socket", Sockets),
    (hybrid_session, "psycopg", Driver),
    (hybrid_session, "Cutoff", Cutoff),
    (hybrid_session, "OwnLink", lambda line, **_: line),
    (postgres, "_renewed", Wire.renewed),
    (PostgresBackend, "release", lambda hybrid, *wanted, **more: hybrid.link.release(*wanted, **more)),
)
"""What lies beneath the hybrid's own code: where, under which name, and what stands in for it."""


class _Words:
    """Stands in for `HybridStatements`."""

    take_over, glance, errands = TAKING_OVER, "glance", ERRANDS
