"""`LeaderElection`: one worker at a time plays a long-lived role, and another takes over when it is gone."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, get_args

from pglease import clock, current, forks, identity, options
from pglease.bell import Bell
from pglease.errors import BackendClosed, BackendError, ConfigurationError, PgleaseError
from pglease.handles import HeldLease, NotAcquired
from pglease.options import Duration, OnLoss
from pglease.primitives.configs import LeaderElectionConfig, arguments_of, renew_by
from pglease.primitives.herald import Herald
from pglease.records import Granted, Lease, Request
from pglease.watching import Watch

if TYPE_CHECKING:
    from pglease.client import PGLease

log = logging.getLogger("pglease")

P = ParamSpec("P")
R = TypeVar("R")

REQUEST_SUFFIX = "#step-down"
"""Appended to an election's name: the lease by which somebody asks its leader to step down."""
AFTER_A_FAILURE = 1.0
"""Seconds a candidate stands back after its work has raised, so that a defect does not run in circles."""
LONGEST_PAUSE = 5.0
"""Seconds between two tries while the store refuses to be asked."""


@dataclass(frozen=True, slots=True)
class Health:
    """What a health probe wants to know: true when all is well.

    Attributes:
        ok: whether this candidate does what it should.
        reason: one sentence.
    """

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


class Term:
    """One stretch of leading, and the work that goes on under it."""

    def __init__(self, lease: HeldLease) -> None:
        self.lease = lease
        self.leaving = False
        self.workers: list[int] = []  # a thread for each piece of work
        self.failed = False

    @property
    def leads(self) -> bool:
        """Whether this worker may act as the leader."""
        return not self.leaving and self.lease.held

    def leave(self) -> None:
        """Tell the work to end: `lease.lost` is set, though the lease is still held until the work has ended."""
        self.leaving = True
        self.lease._hold.lost.set()


class Campaign(threading.Thread):
    """One stretch of being a candidate, from `start` to the end of the last work after `stop`.

    Attributes:
        stopping: set when it is to end.
        before: the one that has to end first.
        once: whether it ends with the first term.
        ended: whether it has.
    """

    def __init__(self, run: Callable[[Campaign], None], before: Campaign | None) -> None:
        super().__init__(target=run, args=(self,), name="pglease-election", daemon=True)
        self.stopping = Bell()
        self.before = before
        self.once = self.ended = False


class LeaderElection:
    """Campaigns for a lease, leads while it is held, and campaigns again after a loss.

    The order of things is always: work begins; work ends; the lease is released; `on_stopped` is called; and only then
    does this candidate begin anew. Work is told to end by `lease.lost`, which is set by a loss and by `stop` and
    `step_down`. Work that does not heed it after a loss goes on beside the next leader: pass the fencing token to what
    it writes.

    Args:
        leases: the client.
        name: the election, 1 to 240 characters.
        ttl: seconds until another worker leads if this one dies. Default 15, as client-go's: shorter than for a job,
            since a role should not be vacant for long.
        metadata: a JSON object of at most 8192 bytes and 16 levels that everybody can read in the record. Default None:
            an empty one.
        on_started: called with the `HeldLease` when a term begins, on a thread of its own; it may work for as long as
            the term lasts. If it raises, that is logged, the term ends, and this worker stands back for a second.
            Default None, as for the next two: nothing is called.
        on_stopped: called when a term is over and its lease released; never before a term. Default None.
        on_new_leader: called with the record whenever somebody (also this worker) has become the leader, and at the
            beginning if somebody leads; on a thread of its own, while the campaign goes on. Default None.
        defer: seconds, 0 or more, that this candidate lets others go first when the lease becomes free. Default 0.
        on_lost: "log" (default), or "exit": a loss ends the process, as for `PGLease.acquire`.

    Attributes:
        leases: the client.

    Building it does nothing; `start`, a block, `lead` or `run` begin the campaign. While the store is in trouble the
    campaign goes on, and the log says so.

    Raises:
        ConfigurationError: every broken rule at once.

    Source:
        client-go's `leaderelection` (the callbacks, the record, the health probe), River's elector (the term, resigning
        on request), grelmicro's `LeaderElection`. That work ends before the lease is released is ours.
    """

    def __init__(
        self,
        leases: PGLease,
        name: str,
        ttl: Duration = 15,
        *,
        metadata: Mapping[str, Any] | None = None,
        on_started: Callable[[HeldLease], object] | None = None,
        on_stopped: Callable[[], object] | None = None,
        on_new_leader: Callable[[Lease], object] | None = None,
        defer: Duration = 0,
        on_lost: OnLoss = "log",
    ) -> None:
        with options.all_problems() as problems:
            problems.check(options.choice, on_lost, "on_lost", get_args(OnLoss))
            self._wanted = problems.check(options.hold_options, name, ttl, metadata=metadata, on_lost=on_lost)
            self._defer = problems.check(options.seconds, defer, "defer", zero=True)
            for callback, argument in (
                (on_started, "on_started"),
                (on_stopped, "on_stopped"),
                (on_new_leader, "on_new_leader"),
            ):
                if callback is not None and not callable(callback):
                    problems.note(f"{argument} must be callable, not {callback!r}")
            problems.check(options.stem, name, "name")
        self.leases = leases
        self._on_started = on_started
        self._on_stopped = on_stopped
        self._on_new_leader = on_new_leader
        self._fresh()
        forks.forget_in_children(self, LeaderElection._fresh)  # there it is no candidate

    @classmethod
    def from_config(cls, leases: PGLease, name: str, config: LeaderElectionConfig, **callbacks: Any) -> Self:
        """Build one by a checked record; the environment is not asked.

        Args:
            leases: the client.
            name: the lease's.
            config: its options.
            callbacks: `on_started`, `on_stopped`, `on_new_leader`, as for the class.

        Raises:
            ConfigurationError: no `LeaderElectionConfig`, or a name that is none.
        """
        return cls(leases, name, **arguments_of(config, LeaderElectionConfig), **callbacks)

    def reconfigure(self, config: LeaderElectionConfig) -> None:
        """Go by other options: a new ttl counts at once, also for the present term; the rest with the next one.

        The name stays.

        Args:
            config: the new options, all of them.

        Raises:
            ConfigurationError: no `LeaderElectionConfig`; nothing is changed.
            BackendUnavailable: the new options count, and it is unknown whether the present term was renewed.
        """
        other = type(self).from_config(self.leases, self.name, config)
        self._wanted, self._defer = other._wanted, other._defer
        renew_by(self._wanted.ttl, self.lease)

    def _fresh(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._thread: Campaign | None = None
        self._term: Term | None = None
        self._terms = 0
        self._herald: Herald | None = None
        self._stands_back_until = 0.0
        self._listeners: dict[Callable[[], None], None] = {}

    def _tell(self) -> None:
        """Wake who waits; called with the lock held."""
        self._changed.notify_all()
        for listener in tuple(self._listeners):
            listener()

    def _add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` at every change, on whatever thread. It must neither block nor raise."""
        self._listeners[listener] = None

    def _remove_listener(self, listener: Callable[[], None]) -> None:
        """Call it no more; harmless for what is not known."""
        self._listeners.pop(listener, None)

    @property
    def name(self) -> str:
        """The election's name."""
        return self._wanted.name

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Begin to campaign, on a thread of its own. Does nothing if it runs already.

        After a `stop` whose work goes on, the campaign begins when that work has ended.

        Raises:
            BackendClosed: the client was closed; there is no campaign.
        """
        self.leases.taking.refuse_if_closed()
        self.leases._stop_before_closing(self)
        with self._changed:
            if self.over:
                self._thread = Campaign(self._campaign, before=self._thread)
                self._thread.start()
            if self._on_new_leader is not None and self._herald is None:
                self._herald = Herald(self.observe(), self._on_new_leader)
                self._herald.start()
        return self

    def stop(self, timeout: Duration | None = None) -> bool:
        """End the campaign: work is told to end, then the lease is released. Idempotent.

        Args:
            timeout: seconds to wait for the work to end, 0 or more. None (default) waits for as long as it takes.

        Returns:
            False if the work goes on; the lease is kept until it ends. Also when called by the work itself.

        Raises:
            ConfigurationError: `timeout` is no duration; the campaign goes on.
        """
        seconds = _or_forever(timeout)
        with self._changed:
            thread = self._thread
            self._request_stop()
            inside = thread is threading.current_thread() or (
                self._term is not None and threading.get_ident() in self._term.workers
            )
            if thread is None:
                return True
            # Not by joining: a signal handler may have interrupted this thread while it held the lock, and waiting
            # gives that up as well.
            if inside or not self._changed.wait_for(lambda: thread.ended, seconds):
                return False
        thread.join(1.0)  # it has nothing more to do
        return True

    def _has_ended(self) -> bool:
        """Tell whether no campaign goes on, not even one that was told to end."""
        return self._thread is None

    def _request_stop(self) -> None:
        """Begin to end the campaign, and return at once."""
        with self._changed:
            if self._thread is not None:
                self._thread.stopping.set()
            if self._term is not None:
                self._term.leave()
            self._tell()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- what is -------------------------------------------------------------------------------------------------------

    @property
    def is_leader(self) -> bool:
        """Whether this worker may act as the leader: computed, true only while the lease is held for sure."""
        term = self._term
        return term is not None and term.leads

    def is_leader_confirmed_within(self, seconds: Duration) -> bool:
        """Tell whether this worker leads and a request sent in the last `seconds` has confirmed it.

        Args:
            seconds: seconds (or "5s"), more than 0. Renewals come three times per ttl, so below a third of that it is
                often false.

        Raises:
            ConfigurationError: `seconds` is no duration.
        """
        within = options.seconds(seconds, "seconds")
        term = self._term
        return term is not None and term.leads and clock.now() - term.lease._hold.term.sent_at <= within

    @property
    def lease(self) -> HeldLease | None:
        """The handle of the present term, or None."""
        term = self._term
        return term.lease if term is not None and term.leads else None

    @property
    def record(self) -> Lease | None:
        """The record of the present or the last leader, read now; None if there never was one.

        Needs no campaign, and is kept when a leader resigns (`is_expired()` is then true). Errors as for
        `PGLease.get_lease`.
        """
        return self.leases.get_lease(self.name)

    def observe(self) -> Watch:
        """Watch who leads, without ever being a candidate; needs no campaign.

        An iterator of changes of the election's lease. See `PGLease.watch`.
        """
        return self.leases.watch(self.name, poll_interval=min(LONGEST_PAUSE, max(0.1, self._wanted.ttl / 3)))

    def wait_for_leader(self, timeout: Duration | None = None) -> bool:
        """Wait until this worker leads; False if `timeout` or `stop` came first. Campaigns only if that was begun.

        Args:
            timeout: seconds, 0 or more. Default None: for ever.

        Raises:
            ConfigurationError: `timeout` is no duration.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.is_leader or self.over, _or_forever(timeout))
            return self.is_leader

    def wait_until_lost(self, timeout: Duration | None = None) -> bool:
        """Wait until this worker does not lead; True at once if it does not. False if `timeout` came first.

        Args:
            timeout: seconds, 0 or more. Default None: for ever.

        Raises:
            ConfigurationError: `timeout` is no duration.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self.is_leader, _or_forever(timeout))

    @property
    def over(self) -> bool:
        """Whether there is no campaign: none was begun, or it was told to end."""
        return self._thread is None or self._thread.stopping.is_set()

    def health(self) -> Health:
        """Answer a health probe: not well when work goes on without a confirmed lease, or the campaign has died.

        Asks no store: whether the store is well is another probe's question.
        """
        term, thread = self._term, self._thread
        if term is not None and term.workers and not term.lease.held:
            return Health(ok=False, reason=f"work goes on though the lease {self.name!r} is not held")
        if thread is not None and not thread.is_alive() and not thread.stopping.is_set():
            return Health(ok=False, reason=f"the campaign for {self.name!r} has died")
        return Health(ok=True, reason="leads" if self.is_leader else "does not lead")

    # -- leading -------------------------------------------------------------------------------------------------------

    def lead(self, work: Callable[[HeldLease], R], *, repeat: bool = False) -> R | None:
        """Wait for leadership, then run `work(lease)` in this thread; it must end when `lease.lost` is set.

        Campaigns for as long as this call lasts, unless the election runs already.

        Args:
            work: what only the leader does. If it raises, the term ends, the lease is released and the error comes out.
            repeat: run it again in each later term, until `stop`. Default False: once.

        Returns:
            what `work` returned, if this worker led until the end; None if it did not, or after `stop`.

        Raises:
            Exception: what `work` raised; the term is over, and its lease released when all other work has ended.
        """
        with self._running():
            while (term := self._begin_work(wait=True)) is not None:
                try:
                    result = self._work(term, work)
                finally:
                    self._end_work(term)
                if not repeat:
                    return result if term.leads else None
                self._wait_until_over(term)
        return None

    def run(
        self,
        on_started: Callable[[HeldLease], object],
        on_stopped: Callable[[], object] | None = None,
        on_new_leader: Callable[[Lease], object] | None = None,
    ) -> None:
        """Campaign until `stop`, or an exception such as Ctrl-C in this thread.

        On leaving, work has ended and the lease is released, unless the election ran already.

        Args:
            on_started, on_stopped, on_new_leader: as for the class, in the place of what was said there.
        """
        self._on_started, self._on_stopped, self._on_new_leader = on_started, on_stopped, on_new_leader
        with self._running() as campaign:
            campaign.stopping.wait()

    def run_once(
        self, on_started: Callable[[HeldLease], object], on_stopped: Callable[[], object] | None = None
    ) -> bool:
        """Campaign until this worker has led once, and its term is over; then campaign no more.

        Args:
            on_started, on_stopped: as for the class.

        Returns:
            whether it led; False if `stop` came first.
        """
        self._on_started, self._on_stopped = on_started, on_stopped
        terms = self._terms
        with self._running() as campaign, self._changed:
            campaign.once = True
            self._changed.wait_for(lambda: campaign.ended)
        return self._terms > terms

    def leader_only(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function so that it runs only while this worker leads; else it answers None.

        The term does not end before the call does.
        """

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
            term = self._begin_work(wait=False)
            if term is None:
                return None
            try:
                current.enter(term.lease)
                return function(*args, **kwargs)
            finally:
                current.leave(term.lease)
                self._end_work(term)

        return call

    def step_down(self, cooldown: Duration | None = None) -> bool:
        """Resign: work is told to end, then the lease is released; returns at once.

        Args:
            cooldown: seconds, 0 or more, during which this worker is no candidate. Default None: the ttl, in which
                somebody else has had the time to come.

        Returns:
            whether it led. A candidate stands back all the same.

        Raises:
            ConfigurationError: `cooldown` is no duration; nothing changed.
        """
        seconds = self._wanted.ttl if cooldown is None else options.seconds(cooldown, "cooldown", zero=True)
        with self._changed:
            self._stands_back_until = clock.now() + seconds
            led = self.is_leader
            if self._term is not None:
                self._term.leave()
            self._tell()
        return led

    def request_step_down(self) -> bool:
        """Ask the present leader, in whatever process, to step down; False if nobody leads or somebody has asked.

        It looks for requests three times per ttl. A request concerns the present term alone, and lapses after two ttl.

        Raises:
            BackendError: unknown whether the request was left; it may be made again.
        """
        record = self.record
        if record is None or record.is_expired():
            return False
        backend, ttl = self.leases.backend, 2 * self._wanted.ttl
        request = Request(
            self.name + REQUEST_SUFFIX,
            self.leases.owner_id,
            identity.new_lease_id(),
            ttl,
            {"fencing_token": record.fencing_token},
        )
        return isinstance(backend.try_acquire(request, self.leases._budget()), Granted)

    # -- the campaign --------------------------------------------------------------------------------------------------

    def _campaign(self, campaign: Campaign) -> None:
        stopping = campaign.stopping
        try:
            if campaign.before is not None:
                campaign.before.join()
                campaign.before = None
            pause = 0.1
            while self._may_stand(stopping):
                try:
                    taken = self._ask(stopping)
                except BackendClosed:
                    break
                except (BackendError, ConfigurationError) as error:
                    log.warning("no campaign for %r at present: %s", self.name, error, extra={"lease_name": self.name})
                    stopping.wait(pause)
                    pause = min(2 * pause, LONGEST_PAUSE)
                    continue
                pause = 0.1
                if isinstance(taken, HeldLease):
                    self._serve(taken, stopping)
                    if campaign.once:
                        break
        finally:
            with self._changed:
                stopping.set()
                campaign.ended = True
                herald: Herald | None = None
                if self._thread is campaign:
                    self._thread = None
                    herald, self._herald = self._herald, None
                self._tell()
            if herald is not None:
                herald.close()

    def _may_stand(self, stopping: threading.Event) -> bool:
        """Wait until this worker is a candidate; False when the campaign is over."""
        while not stopping.is_set():
            left = self._stands_back_until - clock.now()
            if left <= 0:
                return True
            stopping.wait(left)
        return False

    def _ask(self, stopping: threading.Event) -> HeldLease | NotAcquired:
        taking = self.leases.taking
        if not self._defer:
            return taking.take(replace(self._wanted, wait=float("inf"), warn_after=None), cancel=stopping)
        taken = taking.take(self._wanted) if self._is_left_by_others(stopping) else None
        return taken or NotAcquired(self.name, None, 0.0)

    def _is_left_by_others(self, stopping: threading.Event) -> bool:
        """Let others go first: tell whether the lease is free, and was so for `defer` seconds."""
        record = self.record
        if record is not None and not record.is_expired():
            stopping.wait(min(record.time_remaining() + 0.005, 1.0))
            return False
        if stopping.wait(self._defer):
            return False
        record = self.record
        return record is None or record.is_expired()

    def _serve(self, lease: HeldLease, stopping: threading.Event) -> None:
        """Play the role from its begin to its end."""
        term = Term(lease)
        lease._hold.in_block = True  # whoever closes the client does not give it back under the feet of the work
        with self._changed:
            self._term = term
            self._tell()
        log.info("%r leads %r", lease.owner_id, self.name, extra={"lease_name": self.name, "lease_outcome": "acquired"})
        if self._on_started is not None:
            self._start_work(term, self._on_started)
        if stopping.is_set():
            term.leave()
        while not (lease.lost.wait(self._wanted.ttl / 3) or lease._hold.over):  # or released by hand
            self._heed_request(term)
        with self._changed:
            term.leave()
            self._tell()
            self._changed.wait_for(lambda: not term.workers)
        self._resign(term)

    def _resign(self, term: Term) -> None:
        term.lease._hold.in_block = False
        try:
            term.lease.release()
        except PgleaseError as error:
            log.warning("%s", error, extra={"lease_name": self.name})
        with self._changed:
            if term.failed:
                self._stands_back_until = max(self._stands_back_until, clock.now() + AFTER_A_FAILURE)
            self._term = None
            self._terms += 1
            self._tell()
        if self._on_stopped is not None:
            try:
                self._on_stopped()
            except BaseException:  # also SystemExit, which would end the campaign in silence
                log.exception("on_stopped failed for %r", self.name, extra={"lease_name": self.name})

    def _heed_request(self, term: Term) -> None:
        try:
            request = self.leases.get_lease(self.name + REQUEST_SUFFIX)
        except PgleaseError:
            return  # the store is in trouble: whether we lead is the renewer's business
        if request is None or request.is_expired():
            return
        if request.metadata.get("fencing_token") == term.lease.fencing_token:
            log.info("%r asks the leader of %r to step down", request.owner_id, self.name)
            self.step_down()

    # -- work ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def _running(self) -> Iterator[Campaign]:
        """Campaign for the block, unless that is done already."""
        with self._changed:
            begun_here = self.over
            self.start()
            campaign = self._thread
            assert campaign is not None
        try:
            yield campaign
        finally:
            if begun_here:
                self.stop()

    def _start_work(self, term: Term, work: Callable[[HeldLease], object]) -> None:
        begun = threading.Event()
        thread = threading.Thread(target=self._run_work, args=(term, work, begun), name="pglease-leader", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads, or the interpreter is going down
            log.exception("on_started could not be called for %r", self.name, extra={"lease_name": self.name})
            term.leave()
        else:
            begun.wait()  # or the term might end before its work is known

    def _run_work(self, term: Term, work: Callable[[HeldLease], object], begun: threading.Event) -> None:
        term.workers.append(threading.get_ident())
        begun.set()
        try:
            self._work(term, work)
        except BaseException:  # also SystemExit, which would end this thread in silence
            log.exception("the work of the leader of %r failed", self.name, extra={"lease_name": self.name})
        finally:
            self._end_work(term)

    def _work(self, term: Term, work: Callable[[HeldLease], R]) -> R:
        current.enter(term.lease)
        try:
            return work(term.lease)
        except BaseException:
            self._fail(term)
            raise
        finally:
            current.leave(term.lease)

    def _fail(self, term: Term) -> None:
        """End a term whose work has raised."""
        with self._changed:
            term.failed = True
            term.leave()

    def _begin_work(self, *, wait: bool) -> Term | None:
        """Take part in the present term; None if there is none and none comes."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self.is_leader or self.over)
            term = self._term
            if term is None or not term.leads:
                return None
            term.workers.append(threading.get_ident())
            return term

    def _end_work(self, term: Term) -> None:
        """Note that this thread's part in the term is over."""
        with self._changed:
            term.workers.remove(threading.get_ident())
            self._tell()

    def _is_over(self, term: Term) -> bool:
        """Tell whether a term has given way to another, or there will be none."""
        return self._term is not term or self.over

    def _wait_until_over(self, term: Term) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_over(term))

    def __repr__(self) -> str:
        return f"<LeaderElection {self.name!r}, {'leads' if self.is_leader else 'does not lead'}>"


def _or_forever(timeout: Duration | None) -> float | None:
    """Return what `Condition.wait_for` takes."""
    if timeout is None:
        return None
    seconds = options.seconds(timeout, "timeout", zero=True, forever=True)
    return None if seconds == float("inf") else min(seconds, threading.TIMEOUT_MAX)
