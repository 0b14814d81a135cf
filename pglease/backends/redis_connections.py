"""Where connections come from: a bounded pool that callers wait for, and a cutoff that ends what outlasts its budget.

redis-py makes the connections and logs in. Its clients and pools are left out: they retry, re-ask and time out by rules
of their own, and a verb of ours has one budget for all of it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from redis.exceptions import NoScriptError, ResponseError

from pglease import forks
from pglease.backends.base import Budget
from pglease.backends.cutoff import Cutoff
from pglease.backends.redis_address import Address
from pglease.backends.redis_errors import Node, OutOfTime, is_answered, translated
from pglease.backends.redis_lua import Script
from pglease.backends.redis_reader import Reader
from pglease.errors import BackendClosed, BackendError, BackendUnavailable

T = TypeVar("T")

_NAME = "pglease"


class Link:
    """One connection that is ours until it is given back: commands out, answers in."""

    __slots__ = ("_connection", "_reader", "_send", "cutoff", "node")

    def __init__(self, connection: Any, node: Node) -> None:
        self._connection = connection
        self._send = connection.source.sendall
        self._reader = Reader(connection.source, connection.explained)
        self.node = node
        self.cutoff = Cutoff(connection.source.fileno())

    def call(self, *command: Any) -> Any:
        """Send one command and return its answer; an error of the server's is raised."""
        return self._answered(_packed(command))

    def _answered(self, request: bytes) -> Any:
        self._send(request)
        return _raised(self._reader.next())

    def run(self, script: Script, keys: Sequence[bytes], args: Sequence[Any]) -> list[bytes]:
        """Run a script: one round trip, and two more where the server does not know it (restarted, SCRIPT FLUSH)."""
        request = _packed((*keys, *args), script.head, 3)
        try:
            answer = self._answered(request)
        except NoScriptError:
            self.call("SCRIPT", "LOAD", script.text)
            answer = self._answered(request)
        return answer.split(b"\n")  # type: ignore[no-any-return]

    def run_many(self, script: Script, calls: Sequence[tuple[Sequence[bytes], Sequence[Any]]]) -> list[Any]:
        """Run one script many times in one round trip; an answer may be an error."""
        requests = [_packed((*keys, *args), script.head, 3) for keys, args in calls]
        answers = self._all_answered(requests)
        missed = [place for place, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if missed:
            self.call("SCRIPT", "LOAD", script.text)
            for place, answer in zip(missed, self._all_answered([requests[place] for place in missed]), strict=True):
                answers[place] = answer
        return [answer.split(b"\n") if isinstance(answer, bytes) else answer for answer in answers]

    def call_many(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send many commands at once and return their answers, errors among them."""
        return self._all_answered([_packed(command) for command in commands])

    def _all_answered(self, requests: Sequence[bytes]) -> list[Any]:
        self._send(b"".join(requests))
        return [self._reader.next() for _ in requests]

    def heard(self, seconds: float) -> Any:
        """Return what the server pushed, waiting for at most so long; None when nothing came."""
        return _raised(self._reader.next()) if self._reader.begun_within(seconds) else None

    def shut(self) -> None:
        """Wake whoever waits for an answer here, from any thread; the descriptor stays."""
        self.cutoff.arm(0.0)
        self.cutoff.overdue()

    def scan(self, pattern: bytes) -> Iterator[list[bytes]]:
        """Yield the keys that match, a batch at a time; one may come twice. KEYS would block the server."""
        cursor = b"0"
        while True:
            cursor, keys = self.call("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            if keys:
                yield keys
            if cursor == b"0":
                return

    def close(self) -> None:
        """Close it."""
        self._connection.disconnect()


def _raised(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


def _packed(command: Sequence[Any], head: str = "", words: int = 0) -> bytes:
    """Write a command as the server reads it, after a head of so many words that are written already.

    redis-py's own way takes ten times as long: it serves far more types.
    """
    rest = [word.decode() if isinstance(word, bytes) else str(word) for word in command]
    written = "".join([f"${len(word)}\r\n{word}\r\n" for word in rest])
    if not written.isascii():  # then a word has more bytes than characters
        written = "".join([f"${len(word.encode())}\r\n{word}\r\n" for word in rest])
    return f"*{words + len(rest)}\r\n{head}{written}".encode()


class _Attempt:
    """One try to connect, on a thread of its own: a resolver has no time-out, and neither has a chain of sentinels."""

    def __init__(self, address: Address, node: Node, timeout: float) -> None:
        self._address = address
        self._node = node
        self._timeout = timeout
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._abandoned = False
        self._link: Link | None = None
        self._error: BackendError | None = None

    def wait(self, seconds: float) -> Link:
        """Connect within so many seconds."""
        try:
            threading.Thread(target=self._run, name="pglease-redis-connect", daemon=True).start()
        except RuntimeError:  # out of threads, or the interpreter is going down: then without the bound of a thread
            self._run()
        try:
            self._is_over.wait(seconds)
        finally:
            with self._lock:
                self._abandoned = self._link is None
        if self._link is not None:
            return self._link
        raise self._error or OutOfTime(f"no connection to Redis ({self._address}) was made in time")

    def _run(self) -> None:
        link: Link | None = None
        try:
            link = Link(self._address.connect(self._node, self._timeout), self._node)
            _introduce(link)
        except Exception as error:  # noqa: BLE001  # told to the one who waits, who raises it
            self._error = (
                error if isinstance(error, BackendError) else translated(error, self._address.scrub, sent=False)
            )
            self._error.__context__ = None
        with self._lock:
            if self._error is None and not self._abandoned:
                self._link = link
            elif link is not None:
                link.close()
        self._is_over.set()


def _introduce(link: Link) -> None:
    """Say who we are, and look whether this is a primary: a replica answers looks with what it had a while ago."""
    named, role = link.call_many([("CLIENT", "SETNAME", _NAME), ("ROLE",)])
    del named  # may be forbidden, like ROLE: then a replica is noticed by its first refusal to write
    if not isinstance(role, ResponseError) and role[0] != b"master":
        raise BackendUnavailable(f"Redis at {link.node[0]}:{link.node[1]} is a replica; leases need the primary")


class Connections:
    """A bounded pool; nothing is opened before the first use.

    Args:
        address: where to.
        pool_size: how many conversations may go on at once; one more is kept for renewals.
        connect_timeout: seconds one connection attempt may take.
    """

    def __init__(self, address: Address, *, pool_size: int, connect_timeout: float) -> None:
        self.address = address
        self.pool_size = pool_size
        self._connect_timeout = connect_timeout
        self._closed = False
        self._fresh()
        forks.forget_in_children(self, type(self).forget)

    def _fresh(self) -> None:
        self._places: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(self.pool_size):
            self._places.put(None)
        self._reserve: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._reserve.put(None)
        self._idle: dict[Node, list[Link]] = {}

    def converse(self, node: Node, talk: Callable[[Link], T], budget: Budget, *, reserved: bool = False) -> T:
        """Hold one conversation with `node` that ends within the budget; return what it came to.

        `reserved` may also take the place that is kept for renewals. When it begins, `budget.sending()` has been
        called; an error of redis-py's comes out as ours.
        """
        link, places = self._take(node, budget, reserved=reserved)
        try:
            answer = talk(link)
        except BaseException as error:
            ours = self._put_back(link, places, error)
            if ours is not None:
                raise ours from None
            raise
        self._put_back(link, places, None)
        return answer

    def _take(self, node: Node, budget: Budget, *, reserved: bool) -> tuple[Link, queue.SimpleQueue[None]]:
        places = self._take_place(budget, reserved=reserved)
        link = None
        try:
            link = self._idle_link(node) or self._new_link(node, budget)
            link.cutoff.arm(budget.until)
            budget.sending()
        except BaseException:
            if link is not None:
                link.cutoff.disarm()
                link.close()
            places.put(None)
            raise
        return link, places

    def _put_back(
        self, link: Link, places: queue.SimpleQueue[None], error: BaseException | None
    ) -> BackendError | None:
        """Let others use it; return our error for one of redis-py's."""
        usable = False
        try:
            link.cutoff.disarm()
            usable = error is None or isinstance(error, BackendError) or is_answered(error)
            return None if error is None else self._explained(link, error)
        finally:
            if not usable or link.cutoff.fired or self._closed:
                link.cutoff.disarm()  # interrupted right here: armed, it would shut whoever has that number next
                link.close()
            else:
                self._keep(link)
            places.put(None)

    def _take_place(self, budget: Budget, *, reserved: bool) -> queue.SimpleQueue[None]:
        if self._closed:
            raise BackendClosed("the backend is closed")
        places = self._places
        try:
            if reserved:
                return self._any_place(budget)
            places.get(timeout=max(0.0, budget.left()))
        except queue.Empty:
            raise OutOfTime(f"no connection was free in time: all {self.pool_size} of the pool are in use") from None
        return places

    def _any_place(self, budget: Budget) -> queue.SimpleQueue[None]:
        try:
            self._places.get_nowait()
        except queue.Empty:
            self._reserve.get(timeout=max(0.0, budget.left()))
            return self._reserve
        return self._places

    def _idle_link(self, node: Node) -> Link | None:
        try:
            return self._idle[node].pop()
        except (KeyError, IndexError):
            return None

    def _keep(self, link: Link) -> None:
        idle = self._idle.setdefault(link.node, [])
        if len(idle) <= self.pool_size:
            idle.append(link)
        else:
            link.close()
        if self._closed:  # meanwhile
            self.drop_idle()

    def _new_link(self, node: Node, budget: Budget) -> Link:
        left = min(budget.left(), self._connect_timeout)
        if left <= 0:
            raise OutOfTime(f"no connection to Redis ({self.address}) was made in time")
        return _Attempt(self.address, node, left).wait(left)

    def one_more(self, node: Node, budget: Budget) -> Link:
        """Return a connection that is not one of the pool's and stays the caller's."""
        if self._closed:
            raise BackendClosed("the backend is closed")
        return self._new_link(node, budget)

    def _explained(self, link: Link, error: BaseException) -> BackendError | None:
        if isinstance(error, BackendError) or not isinstance(error, Exception):
            return None
        if link.cutoff.fired:
            return BackendUnavailable("Redis did not answer in time", outcome_unknown=True)
        if not is_answered(error):
            self.drop_idle()  # whatever ended one has most likely ended them all
        return translated(error, self.address.scrub, sent=True)

    def drop_idle(self) -> None:
        """Close the idle connections."""
        for node in list(self._idle):
            while (link := self._idle_link(node)) is not None:
                link.close()

    def forget(self) -> None:
        """Drop, in a forked child, what is the parent's."""
        forks.bury(self._idle)
        self._fresh()

    def close(self) -> None:
        """Close what is idle; conversations under way end by their own budgets."""
        self._closed = True
        self.drop_idle()
