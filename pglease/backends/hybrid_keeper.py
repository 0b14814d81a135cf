"""The keeper of the session, and of the book of what rests on it.

All that happens on the session happens on one thread: it waits for the end of file, pings, tries and returns locks for
whoever asks, and ties holds that were granted without the lock. So the account of the locks is exact, and whoever is
interrupted in the middle of something leaves it to that thread to put right.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import selectors
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg

from pglease import clock, forks
from pglease.backends.base import Budget
from pglease.backends.hybrid_session import Mark, Session, SessionDied
from pglease.backends.postgres_errors import translated
from pglease.bonds import Bond
from pglease.errors import BackendClosed, BackendError, BackendUnavailable
from pglease.records import Loss

log = logging.getLogger("pglease")

_TIE_AFTER = (0.02, 0.1, 0.5, 1.0)
"""Seconds after which a hold without the lock tries for it again; the last pause is repeated. The first is for a
predecessor that is just giving the lock back."""
_END_AFTER = 3
"""Fruitless tries after which the session that has the lock of a lapsed hold is ended: its process stands still."""
_TIED_AT_ONCE = 50
_RECONNECT_EVERY = 1.0
_SWEEP_EVERY = 1.0
_CLOSING = 1.5
"""Seconds the keeper's thread may take for its last words."""
_WARN_EVERY = 60.0


@dataclass(eq=False, slots=True)
class Seat:
    """One acquisition's place in the book.

    Attributes:
        name, lease_id: whose.
        key: of its advisory lock.
        bond: what its holder is told by.
        session: the one that has the lock for it; None without.
        until: the boot clock when the hold will have lapsed at the latest; None while nothing was granted.
        asking: how many tries of it are under way.
        tried: whether the lock was ever asked for.
        tying: whether the keeper is at writing its mark, and gives the lock back if that does not succeed.
        rival: whose session had the lock of the lapsed hold before, if it has to be ended.
    """

    name: str
    lease_id: str
    key: int
    bond: Bond = field(default_factory=Bond)
    session: Session | None = None
    until: float | None = None
    asking: int = 0
    tried: bool = False
    tying: bool = False
    rival: Mark | None = None
    tries: int = 0
    try_at: float = float("inf")

    @property
    def is_tied(self) -> bool:
        """Whether a living session has the lock for it."""
        return self.session is not None and self.bond.loss is None


@dataclass(frozen=True, slots=True)
class Errands:
    """The statements of the keeper's own; `hybrid_sql` says them."""

    tie: str
    untie: str
    end: str


class _Job:
    """Something to do on the session's thread. `read` makes our error of a driver's."""

    __slots__ = ("_act", "_done", "_error", "_read", "_value")

    def __init__(self, act: Callable[[], Any], read: Callable[[BaseException], BaseException]) -> None:
        self._act = act
        self._read = read
        self._done = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do it, on the thread."""
        try:
            self._value = self._act()
        except BaseException as error:  # noqa: BLE001  # the asker's
            self._error = self._read(error)
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """Answer with an error."""
        self._error = error
        self._done.set()

    def result(self, budget: Budget) -> Any:
        """Return what came of it."""
        if not self._done.wait(max(0.0, budget.left())):
            raise BackendUnavailable("the session did not answer in time")
        if self._error is not None:
            raise self._error
        return self._value


class Keeper:
    """Keeps one session alive, and knows which hold has which lock.

    Args:
        params: returns libpq's parameters of a session that is about to be opened.
        scrub: takes secrets out of a driver's texts.
        silence: seconds after a sign of life for which holds are believed; infinity unless strict.
        most: how many locks at most; None for a quarter of what the server has room for.
    """

    def __init__(
        self, params: Callable[[], Mapping[str, Any]], scrub: Callable[[str], str], *, silence: float, most: int | None
    ) -> None:
        self._params = params
        self._scrub = scrub
        self._silence = silence
        self._most = most
        self.errands: Errands | None = None
        self._closing = threading.Event()
        self._had_one = self._direct = False
        self._warned_at = float("-inf")
        self._fresh()
        forks.forget_in_children(self, type(self).forget)

    def _fresh(self) -> None:
        self._lock = threading.RLock()
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._seats: dict[str, Seat] = {}
        self._loose: dict[Seat, None] = {}
        self._locks: dict[int, Seat] = {}
        self._session: Session | None = None
        self._thread: threading.Thread | None = None
        self._wake: socket.socket | None = None
        self._reconnect_at = float("-inf")
        self._sweep_at = float("-inf")

    # -- what verbs ask for --------------------------------------------------------------------------------------------

    def session(self, budget: Budget) -> Session:
        """Return the living session, connecting first if need be.

        Raises:
            BackendMisconfigured: a pooler, a standby, a refused login.
            BackendUnavailable: it could not be had in time.
            BackendClosed: after `close`.
        """
        session = self._session
        if session is not None and not session.died and not self._closing.is_set():
            return session
        found: Session = self._do(self._connected, budget)
        return found

    def ping(self, budget: Budget) -> None:
        """Have the session prove that it is ours and alive."""
        self._do(lambda: self._on_session(Session.ping), budget)

    def accept(self, budget: Budget) -> None:
        """Use the session, which was found to be a direct one; those to come will be too."""
        self._do(lambda: self._on_session(Session.settle_in), budget)
        self._direct = True

    def sit(self, name: str, key: int, lease_id: str) -> Seat:
        """Take a seat for a try. Tries with one id, at once or one after the other, share it. Ends with `rise`."""
        with self._lock:
            seat = self._seats.get(lease_id)
            if seat is None or seat.bond.loss is not None:
                seat = self._seats[lease_id] = Seat(name, lease_id, key)
            seat.asking += 1
            return seat

    def rise(self, seat: Seat, until: float | None) -> None:
        """End a try: keep the seat until the hold lapses, or give it up if nothing was granted (None)."""
        with self._lock:
            seat.asking -= 1
            if until is not None:
                seat.until = until
                self._seats.setdefault(seat.lease_id, seat)  # it was given back meanwhile, and granted all the same
                self._plan(seat)
                self._nudge()
            elif seat.asking == 0 and (seat.until is None or self._seats.get(seat.lease_id) is not seat):
                self._drop(seat)

    def seat_of(self, lease_id: str) -> Seat | None:
        """Return the seat of a hold."""
        return self._seats.get(lease_id)

    def prolong(self, seat: Seat, until: float) -> None:
        """Note that the hold was renewed."""
        with self._lock:
            if self._seats.get(seat.lease_id) is seat:
                seat.until = until

    def drop(self, seat: Seat) -> None:
        """Note that the hold is over: the lock is given back, without waiting for that."""
        with self._lock:
            self._drop(seat)

    def _drop(self, seat: Seat) -> None:
        self._loose.pop(seat, None)
        if self._seats.get(seat.lease_id) is seat:
            del self._seats[seat.lease_id]
        if seat.session is not None or seat.tried:
            self._post(partial(self._unlock, seat))  # comes after a try that is still under way

    def lock(self, seat: Seat, budget: Budget) -> bool:
        """Try to have the session own the lock for `seat`; False if somebody else has it, or there is no room.

        Raises:
            BackendUnavailable: there is no session now.
        """
        if seat.is_tied:
            return True
        seat.tried = True
        got: bool = self._do(lambda: self._on_session(partial(self._try_lock, seat)), budget)
        return got

    def mark_of(self, seat: Seat) -> Mark | None:
        """Return what a statement may write into a seat's row: only what stays true until the hold is over.

        Not while the keeper is at writing it. If that does not succeed the lock is given back, and whoever got it then
        would find it free in spite of the mark, and take over from a holder that is alive.
        """
        with self._lock:
            session = seat.session
            return session.mark if session is not None and seat.is_tied and not seat.tying else None

    # -- on its thread: the locks --------------------------------------------------------------------------------------

    def _try_lock(self, seat: Seat, session: Session) -> bool:
        if seat.bond.loss is not None:
            return False  # it was bound to a session that is gone, and its holder was told
        if seat.key in self._locks:
            return self._locks[seat.key] is seat
        if not self._has_room(session) or not session.try_lock(seat.key):
            return False
        with self._lock:
            self._locks[seat.key] = seat
            seat.session = session
            seat.bond.tie(session)
        return True

    def _has_room(self, session: Session) -> bool:
        most = session.capacity // 4 if self._most is None else self._most
        if len(self._locks) < most:
            return True
        if clock.now() - self._warned_at > _WARN_EVERY:
            self._warned_at = clock.now()
            log.warning(
                "this client has %d leases bound to its session, as many as it may (max_advisory): the others are "
                "plain, and outlive their holder's death until their ttl ends",
                most,
            )
        return False

    def _unlock(self, seat: Seat) -> None:
        """Give the lock of a seat back, if it has one."""
        with self._lock:
            session, seat.session = seat.session, None
            if self._locks.get(seat.key) is not seat:
                return
            del self._locks[seat.key]
        seat.bond.untie()
        if session is not None and session is self._session:
            self._on_session(lambda present: present.unlock(seat.key))

    # -- on its thread: holds without the lock -------------------------------------------------------------------------

    def _plan(self, seat: Seat) -> None:
        """Have a hold without the lock try for it in a while, again and again."""
        if seat.session is not None or self._seats.get(seat.lease_id) is not seat:
            self._loose.pop(seat, None)
            return
        seat.try_at = clock.now() + _TIE_AFTER[min(seat.tries, len(_TIE_AFTER) - 1)]
        seat.tries += 1
        self._loose[seat] = None

    def _tie_due(self, now: float) -> None:
        with self._lock:
            due = [seat for seat in self._loose if seat.try_at <= now][:_TIED_AT_ONCE]
        if not due:
            return
        try:
            self._on_session(partial(self._try_and_tie, due))
        finally:
            with self._lock:
                for seat in due:
                    self._plan(seat)

    def _try_and_tie(self, due: Sequence[Seat], session: Session) -> None:
        loose = [seat for seat in due if seat.session is None]  # else a try has got it, and may have said so in the row
        self._set_tying(loose, tying=True)
        try:
            self._tie([seat for seat in loose if self._try_lock(seat, session)], session)
        finally:
            self._set_tying(loose, tying=False)
        for seat in due:
            if seat.session is None:
                self._end_rival(seat, session)

    def _set_tying(self, seats: Sequence[Seat], *, tying: bool) -> None:
        with self._lock:
            for seat in seats:
                seat.tying = tying

    def _tie(self, seats: Sequence[Seat], session: Session) -> None:
        """Write the session's mark into the rows of holds that have the lock now; give back what could not be marked.

        The bonds are tied already: a hold depends on the session before anybody can read so.
        """
        if not seats or self.errands is None:
            return
        marked: set[int] = set()
        try:
            marked = {place for (place,) in session.ask(self.errands.tie, who(seats, session.mark))}
        finally:
            if not session.is_over():
                for place, seat in enumerate(seats, 1):
                    if place not in marked:
                        self._unlock(seat)

    def _end_rival(self, seat: Seat, session: Session) -> None:
        """End the session of a process that stands still: its hold lapsed long ago, and it still has the lock."""
        rival = seat.rival
        if rival is None or seat.tries < _END_AFTER or self.errands is None:
            return
        seat.rival = None
        try:
            ended = session.ask(self.errands.end, {"pid": rival.pid, "started": rival.started, "key": seat.key})
        except psycopg.Error as error:
            if session.is_over():
                raise
            log.debug("the session of a lapsed hold of %r could not be ended: %s", seat.name, error)
        else:
            if ended:
                seat.tries = 0  # the lock will be free in a moment
                log.warning("ended the session of the process that let %r lapse and still had its lock", seat.name)

    # -- on its thread: the session ------------------------------------------------------------------------------------

    def _connected(self) -> Session:
        session = self._session
        if session is None:
            session = Session.open(self._params(), silence=self._silence, first=not self._had_one)
            self._had_one = True
            with self._lock:
                self._session = session
            if self._direct:
                self._on_session(Session.settle_in)
        return session

    def _on_session(self, act: Callable[[Session], Any]) -> Any:
        session = self._connected()
        try:
            return act(session)
        except SessionDied as error:
            self._lose(session, error)
            raise
        except psycopg.Error as error:
            if session.is_over():
                self._lose(session, translated(error, self._scrub, sent=False))
            raise

    def _lose(self, session: Session, error: BackendError) -> None:
        """Tell everybody whose hold was bound to it. First all are severed, then the first hears of it."""
        with self._lock:
            if self._session is not session:
                return
            self._session = None
            seats, self._locks = list(self._locks.values()), {}
            for seat in seats:
                seat.bond.sever(Loss("session_died", error))
        session.died = True
        for seat in seats:
            seat.bond.tell()
        session.close()
        log.warning("the session that %d leases were bound to is gone: %s", len(seats), error)

    def _run(self, wake: socket.socket, other_end: socket.socket) -> None:
        try:
            while not self._closing.is_set():
                self._listen(wake)
                while not self._closing.is_set() and (job := self._next()) is not None:
                    job.run()
                self._tend()
        except BaseException:
            log.critical("the keeper of pglease's session failed", exc_info=True)
            if (session := self._session) is not None:
                self._lose(session, SessionDied("its keeper failed"))
        finally:
            self._wind_up()
            wake.close()
            other_end.close()

    def _listen(self, wake: socket.socket) -> None:
        """Wait for a job, the next errand, or the end of the session."""
        session = self._session
        with selectors.DefaultSelector() as selector:
            selector.register(wake, selectors.EVENT_READ)
            if session is not None:
                selector.register(session, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select(self._pause(session))}
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                wake.recv(4096)
        if session in ready:
            self._quietly(lambda: self._on_session(Session.listen))

    def _pause(self, session: Session | None) -> float | None:
        with self._lock:
            due = [seat.try_at for seat in self._loose]
        if session is not None:
            due.append(session.ping_at)
        elif due:
            due = [max(min(due), self._reconnect_at)]
        return max(0.0, min(due) - clock.now()) if due else None

    def _next(self) -> _Job | None:
        try:
            return self._jobs.get_nowait()
        except queue.Empty:
            return None

    def _read(self, error: BaseException) -> BaseException:
        if isinstance(error, Exception) and not isinstance(error, BackendError):
            return translated(error, self._scrub, sent=False)
        return error

    def _tend(self) -> None:
        """Do what is due: a sign of life, a lock that is still wanted, one that is wanted no more."""
        now = clock.now()
        if self._session is not None and self._session.is_over():
            self._lose(self._session, SessionDied("its connection broke"))
        if now >= self._sweep_at:
            self._sweep_at = now + _SWEEP_EVERY
            self._sweep(now)
        if self._session is not None and now >= self._session.ping_at:
            self._quietly(lambda: self._on_session(Session.ping))
        if self._session is not None or now >= self._reconnect_at:
            self._reconnect_at = now + _RECONNECT_EVERY
            self._quietly(lambda: self._tie_due(now))

    def _sweep(self, now: float) -> None:
        """Give back the locks of holds that lapsed without a word. Their holders stopped believing before.

        Not in the middle of a try: should it be granted, its mark says that the lock is there. And also the locks of
        seats that have left the book, so that no way of leaving it can keep one for as long as the session lives.
        """
        with self._lock:
            for seat in dict.fromkeys([*self._seats.values(), *self._locks.values()]):
                if seat.asking == 0 and (seat.until is None or seat.until <= now):
                    self._drop(seat)

    def _quietly(self, act: Callable[[], object]) -> None:
        try:
            act()
        except (psycopg.Error, BackendError, OSError) as error:  # said where it matters; errands are tried again
            log.debug("pglease's session: %s", self._scrub(str(error)))

    # -- from any thread -----------------------------------------------------------------------------------------------

    def _do(self, act: Callable[[], Any], budget: Budget) -> Any:
        job = _Job(act, self._read)
        self._put(job)
        return job.result(budget)

    def _post(self, act: Callable[[], object]) -> None:
        with contextlib.suppress(BackendClosed):
            self._put(_Job(act, self._read))

    def _put(self, job: _Job) -> None:
        with self._lock:
            if self._closing.is_set():
                raise BackendClosed("the backend is closed")
            self._jobs.put(job)
            if self._thread is None or not self._thread.is_alive():
                self._start()
        self._nudge()

    def _start(self) -> None:
        ends = socket.socketpair()
        for end in ends:
            end.setblocking(False)
        self._wake = ends[1]
        self._thread = threading.Thread(target=self._run, args=ends, name="pglease-session", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = None
            raise BackendUnavailable(f"no session can be kept any more: {error}") from None

    def _nudge(self) -> None:
        wake = self._wake
        if wake is not None:
            with contextlib.suppress(OSError):  # full of wake-ups already, or the thread has ended
                wake.send(b"\0")

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the session, but no hold: those that are left become plain, and lapse by their ttl. Idempotent."""
        with self._lock:
            self._closing.set()
            thread = self._thread
        self._nudge()
        if thread is None or thread is threading.current_thread():
            return
        thread.join(_CLOSING)
        session = self._session
        if thread.is_alive() and session is not None:
            session.interrupt()
            thread.join(_CLOSING)

    def _wind_up(self) -> None:
        session = self._session
        if session is not None:
            self._quietly(lambda: self._on_session(self._untie))
            self._lose_quietly(session)
        while (job := self._next()) is not None:
            job.fail(
                BackendClosed("the backend is closed") if self._closing.is_set() else SessionDied("its keeper failed")
            )

    def _untie(self, session: Session) -> None:
        """Make plain what is left: the session ends because it is closed, and not because its holder is dead."""
        seats = list(self._locks.values())
        if seats and self.errands is not None:
            session.ask(self.errands.untie, who(seats, session.mark))
            for seat in seats:
                seat.bond.untie()
        with self._lock:
            self._locks = {}

    def _lose_quietly(self, session: Session) -> None:
        if self._locks:
            self._lose(session, SessionDied("it was closed"))
        self._session = None
        session.close()

    def forget(self) -> None:
        """In a forked child: the session is the parent's."""
        if (session := self._session) is not None:
            forks.bury(session.abandon())
        forks.bury(self._wake)
        self._fresh()


def who(seats: Sequence[Seat], mark: Mark) -> dict[str, Any]:
    """Return the parameters of `tie` and `untie`."""
    return {
        "names": [seat.name for seat in seats],
        "lease_ids": [seat.lease_id for seat in seats],
        "session_pid": mark.pid,
        "session_started": mark.started,
    }
