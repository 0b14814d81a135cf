"""`ReadWriteLock`: many readers, or one writer.

Readers hold `NAME#reader:0`, `NAME#reader:1` and so on, a writer `NAME#writer`. Whoever comes first raises its own flag
and looks at the other's afterwards, so of a reader and a writer who come together at least one sees the other. A
writer's flag keeps new readers out while it waits for the present ones to end; while it waits, its lease is short.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from pglease import current, mistakes, options
from pglease.errors import NotOwnedError, ReentrantError
from pglease.handles import HeldLease, NotAcquired
from pglease.options import Duration, OnLost
from pglease.primitives import talk
from pglease.primitives.configs import ReadWriteLockConfig, arguments_of
from pglease.primitives.talk import Deadline, List, Look, Renew, Take, Talk
from pglease.primitives.vigil import Vigil
from pglease.records import Lease
from pglease.taking import not_acquired

if TYPE_CHECKING:
    from pglease.client import PGLease

READER = "#reader:"
WRITER = "#writer"
INTENT_TTL = 5.0
"""Seconds for which a writer that died while it waited keeps readers out, at most."""
_INTENT = "pglease_intent"
_NUMBER = re.compile(r"[0-9]+\Z")


class ReadWriteLock:
    """Many readers at a time, or one writer. Writers go first: one that waits keeps new readers out.

    `read()` and `write()` are blocks, `acquire_read()` and `acquire_write()` return handles. To become a writer, a
    reader has to release first (`ReentrantError` otherwise, for it would wait for itself); a writer may become a reader
    without a gap by `downgrade`.

    Args:
        leases: the client.
        name: the lock, 1 to 240 characters.
        ttl, metadata, max_hold, on_lost: as for `PGLease.acquire`, with its defaults.

    Attributes:
        leases: the client.
        name: the lock's name.

    Raises:
        ConfigurationError: every broken rule at once.

    Source:
        `poisoned` is that of Rust's `RwLock`; the rest is told as grelmicro's `ReadWriteLock` tells it.
    """

    def __init__(
        self,
        leases: PGLease,
        name: str,
        ttl: Duration = 60,
        *,
        max_hold: Duration | None = None,
        metadata: Mapping[str, Any] | None = None,
        on_lost: OnLost = "raise",
    ) -> None:
        self.leases = leases
        self._configure(name, ttl, max_hold=max_hold, metadata=metadata, on_lost=on_lost)

    def _configure(self, name: str, ttl: Duration, **hold: Any) -> None:
        with options.all_problems() as problems:
            wanted = problems.check(options.hold_options, name, ttl, **hold)
            problems.check(options.stem, name, "name")
        self.name = wanted.name
        self._reader = wanted
        # One that waits holds for a span that no writer asks for, so that its death is told from a writer's.
        self._intent_ttl = 0.99 * min(wanted.ttl, INTENT_TTL)
        attached = {**wanted.metadata, _INTENT: self._intent_ttl}
        self._writer = replace(wanted, name=self.name + WRITER, metadata=attached)

    @classmethod
    def from_config(cls, leases: PGLease, name: str, config: ReadWriteLockConfig) -> Self:
        """Build one by a checked record; the environment is not asked.

        Args:
            leases: the client.
            name: the lease's.
            config: its options.

        Raises:
            ConfigurationError: no `ReadWriteLockConfig`, a name that is none, or options that this store cannot keep.
        """
        return cls(leases, name, **arguments_of(config, ReadWriteLockConfig))

    def reconfigure(self, config: ReadWriteLockConfig) -> None:
        """Go by other options from the next acquire on; the name stays.

        Args:
            config: the new options, all of them.

        Raises:
            ConfigurationError: no `ReadWriteLockConfig`; nothing is changed.
        """
        self._configure(self.name, **arguments_of(config, ReadWriteLockConfig))

    # -- taking --------------------------------------------------------------------------------------------------------

    def acquire_read(self, timeout: Duration | None = None) -> HeldLease:
        """Wait until no writer holds or wants it, and hold it together with other readers.

        Args:
            timeout: seconds to wait at most; None (default) waits for ever, 0 asks once.

        Raises:
            ConfigurationError: `timeout` is no duration.
            AcquireTimeout: a writer has it still. Nothing is held.
            ReentrantError: this thread or task writes through this client. That hold goes on.
            BackendError: nothing is held, or lapses by itself.
        """
        mistakes.refuse_to_be_awaited()
        return self._acquire(self._reading, timeout)

    def acquire_write(self, timeout: Duration | None = None) -> HeldLease:
        """Wait until nobody holds it, and hold it alone.

        Args:
            timeout: as for `acquire_read`.

        Raises:
            ConfigurationError: `timeout` is no duration.
            AcquireTimeout: somebody has it still. Nothing is held; new readers are let in again when that has reached
                the store, at the latest after 5 seconds.
            ReentrantError: this thread or task reads or writes through this client. That hold goes on.
            BackendError: nothing is held, or lapses by itself.
        """
        mistakes.refuse_to_be_awaited()
        return self._acquire(self._writing, timeout)

    def _acquire(self, conversation: Any, timeout: Duration | None) -> HeldLease:
        wait = options.wait(timeout, "timeout")
        return self._got(talk.run(conversation(wait), self.leases), wait)

    def _got(self, taken: HeldLease | NotAcquired, wait: float) -> HeldLease:
        """Return what was taken; a refusal is an error."""
        if isinstance(taken, NotAcquired):
            raise not_acquired(taken, replace(self._reader, wait=wait))
        return taken

    @contextlib.contextmanager
    def read(self, timeout: Duration | None = None) -> Iterator[HeldLease]:
        """Return a block for reading; `timeout` and errors on entering as for `acquire_read`.

        Raises:
            LeaseLostError: on leaving, unless the block raised already or `on_lost="log"`.
        """
        yield from self._block(self.acquire_read(timeout))

    @contextlib.contextmanager
    def write(self, timeout: Duration | None = None) -> Iterator[HeldLease]:
        """Return a block for writing; `timeout` and errors on entering as for `acquire_write`.

        Raises:
            LeaseLostError: on leaving, unless the block raised already or `on_lost="log"`.
        """
        yield from self._block(self.acquire_write(timeout))

    def _block(self, lease: HeldLease) -> Iterator[HeldLease]:
        lease._hold.in_block = True
        current.enter(lease)
        error: BaseException | None = None
        try:
            yield lease
        except BaseException as raised:
            error = raised
            raise
        finally:
            current.leave(lease)
            self.leases.taking.leave(lease._hold, error)

    def downgrade(self, writing: HeldLease) -> HeldLease:
        """Turn a writer's hold into a reader's, with no writer in between; return the reader's handle.

        Args:
            writing: what `write` or `acquire_write` gave.

        Raises:
            NotOwnedError: it is no live hold of a writer of this lock. Nothing is held under it.
            BackendError: the writer's hold goes on; a reader's that was taken is given back, or lapses by itself.
        """
        self._check_writer(writing)
        return talk.run(self._downgrading(writing), self.leases)

    def _check_writer(self, writing: HeldLease) -> None:
        """Refuse what is no live hold of a writer of this lock."""
        if writing.name != self._writer.name or not writing.held:
            raise NotOwnedError(f"{writing!r} does not write under {self.name!r}", name=self.name)

    # -- what is -------------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """The token of the present or the last writer, by the store; 0 before the first.

        One that only waits has one, too. Errors as for `PGLease.get_lease`.
        """
        record = self.leases.get_lease(self._writer.name)
        return record.fencing_token if record is not None else 0

    @property
    def poisoned(self) -> bool:
        """Whether the last writer's lease ran out, by the store: what it wrote may be half done.

        Known until the next writer comes, also one that only waits and gives up; and not known of a writer whose hold
        was ended by an operator. Errors as for `PGLease.get_lease`.
        """
        record = self.leases.get_lease(self._writer.name)
        if record is None or record.given_back or not record.is_expired():
            return False
        ran_for = (record.expires_at - record.heartbeat_at).total_seconds()
        return bool(abs(ran_for - record.metadata.get(_INTENT, 0.0)) > 0.001)

    def readers(self) -> list[Lease]:
        """Return the records of those who read, by the store. Errors as for `PGLease.list_leases`."""
        return _live(self.name, self.leases.list_leases(self.name + READER))

    # -- how it is got -------------------------------------------------------------------------------------------------

    def _reading(self, wait: float | None) -> Talk[HeldLease | NotAcquired]:
        """Return the talk of one acquire for reading."""
        deadline = Deadline(wait)
        self._refuse_to_wait(deadline, lambda name: name == self._writer.name)
        with closing(Vigil(self.leases)) as vigil:
            while True:
                writer = yield Look(self._writer.name)
                if writer is None or writer.is_expired():
                    taken = yield from self._raise_flag()
                    writer = yield from self._writer_beside(taken)
                    if writer is None:
                        return taken
                if deadline.over():
                    return talk.refused(self.name, writer)
                yield deadline.rest(vigil, [writer])

    def _raise_flag(self) -> Talk[HeldLease]:
        """Take a reader's place, one that was left if there is one: so there are as few records as places."""
        tried: set[int] = set()
        while True:
            known = _numbered(self.name, (yield List(self.name + READER, ended=True)))
            left = [number for number, record in known.items() if record.is_expired() and number not in tried]
            beyond = max([*known, *tried], default=-1) + 1
            number = random.choice(left or [beyond, beyond + 1, beyond + 2])  # not in step with others
            taken: HeldLease | NotAcquired = yield Take(replace(self._reader, name=f"{self.name}{READER}{number}"))
            if isinstance(taken, HeldLease):
                return taken
            tried.add(number)

    def _writer_beside(self, reading: HeldLease) -> Talk[Lease | None]:
        """Look once more, with the flag up; if there is a writer, take it down again."""
        try:
            writer: Lease | None = yield Look(self._writer.name)
        except BaseException:
            talk.abandon(reading, self.leases)
            raise
        if writer is None or writer.is_expired():
            return None
        talk.abandon(reading, self.leases)
        return writer

    def _writing(self, wait: float | None) -> Talk[HeldLease | NotAcquired]:
        """Return the talk of one acquire for writing."""
        deadline = Deadline(wait)
        self._refuse_to_wait(deadline, lambda name: name == self._writer.name or self._is_reader(name))
        intent = replace(self._writer, ttl=self._intent_ttl, max_hold=None)
        while True:
            taken: HeldLease | NotAcquired = yield Take(deadline.of(intent))
            if isinstance(taken, NotAcquired):
                return NotAcquired(self.name, taken.lease, taken.retry_after)
            try:
                reader = yield from self._wait_for_readers(taken, deadline)
            except BaseException:
                talk.abandon(taken, self.leases)
                raise
            if reader is None and taken.held:
                if self._writer.max_hold is not None:
                    taken._hold.limit(self._writer.max_hold)
                return taken
            talk.abandon(taken, self.leases)
            if deadline.over():
                return talk.refused(self.name, reader)

    def _wait_for_readers(self, writing: HeldLease, deadline: Deadline) -> Talk[Lease | None]:
        """Wait until nobody reads, then lengthen the intent; return a reader if time was over before."""
        with closing(Vigil(self.leases)) as vigil:
            while writing.held:
                reading = _live(self.name, (yield List(self.name + READER)))
                if not reading:
                    with contextlib.suppress(NotOwnedError):  # it was over by then, and whoever waits begins anew
                        yield Renew(writing, self._writer.ttl)
                    return None
                if deadline.over():
                    return reading[0]
                yield deadline.rest(vigil, reading)
        return None

    def _downgrading(self, writing: HeldLease) -> Talk[HeldLease]:
        """Return the talk of a downgrade."""
        reading = yield from self._raise_flag()
        try:
            writer: Lease | None = yield Look(self._writer.name)
        except BaseException:
            talk.abandon(reading, self.leases)
            raise
        if writer is None or writer.is_expired() or writer.fencing_token != writing.fencing_token:
            talk.abandon(reading, self.leases)  # the flag may have come too late for another writer to see it
            raise NotOwnedError(f"{writing!r} had ended before it read under {self.name!r}", name=self.name)
        talk.abandon(writing, self.leases)
        return reading

    def _refuse_to_wait(self, deadline: Deadline, matches: Callable[[str], bool]) -> None:
        """Refuse what would wait for this caller's own hold."""
        held = None if deadline.over() else self.leases.taking.held_here(matches)
        if held is not None:
            raise ReentrantError(
                f"this thread already holds {held!r} through this client; waiting for it would never end",
                name=self.name,
            )

    def _is_reader(self, name: str) -> bool:
        return name.startswith(self.name + READER) and _NUMBER.match(name[len(self.name + READER) :]) is not None

    def __repr__(self) -> str:
        return f"<ReadWriteLock {self.name!r}>"


def _numbered(name: str, records: list[Lease]) -> dict[int, Lease]:
    """Return the readers' places of this lock, and of no other whose name begins alike."""
    places = {record.task_name[len(name + READER) :]: record for record in records}
    return {int(number): record for number, record in places.items() if _NUMBER.match(number)}


def _live(name: str, records: list[Lease]) -> list[Lease]:
    return [record for record in _numbered(name, records).values() if not record.is_expired()]
