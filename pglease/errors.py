"""What can go wrong, and the state things are in afterwards.

Not getting a lease is an answer, not an error: nothing here is raised for a plain refusal unless the caller asked for
it. Every error survives pickling, keeps its facts as attributes and never carries a password. Its text alone makes one
as well, with empty facts: Celery's JSON results bring no more to whoever waits.
"""

from __future__ import annotations

from typing import Any


class PgleaseError(Exception):
    """The root: every error of this library is one of these."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call `type(self)(*args)`, which fails for constructors with keyword-only facts.
        facts = dict(self.__dict__)
        if isinstance(self, ImportError):  # keeps these outside its dictionary
            facts |= {"name": self.name, "path": self.path}
        return (_rebuild, (type(self), self.args, facts))


def _rebuild(kind: type[PgleaseError], args: tuple[Any, ...], facts: dict[str, Any]) -> PgleaseError:
    error = kind.__new__(kind, *args)
    error.args = args
    for fact, value in facts.items():
        setattr(error, fact, value)
    return error


class AcquisitionError(PgleaseError):
    """Somebody else has the lease.

    Attributes:
        name: the lease that was asked for.
        held_by: the holder's label, or None when the store could not say.
        retry_after: seconds until the hold ends unless it is renewed, or None when unknown.

    Afterwards: nothing is held and nothing was written.
    """

    def __init__(
        self, message: str, *, name: str = "", held_by: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.name = name
        self.held_by = held_by
        self.retry_after = retry_after


class AcquireTimeout(AcquisitionError, TimeoutError):
    """The wait ran out, or was cancelled, before the lease was free. Afterwards: nothing is held."""


class LeaseLostError(PgleaseError):
    """We had the lease and may no longer act.

    Attributes:
        name: the lease.
        reason: one of `expired`, `taken`, `deleted`, `forced`, `unreachable`, `max_hold`, `session_died`, `forked`,
            `closed`.

    Afterwards: `held` is false for good; somebody else may already be working.
    """

    def __init__(self, message: str, *, name: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.name = name
        self.reason = reason


HeartbeatError = LeaseLostError
"""The name 0.0.x used."""


class NotOwnedError(PgleaseError):
    """What takes a live hold was asked of one that has ended, or of none: to renew it, describe it, hand it over.

    Also by `Lock.release`, `TaskLock.release`, `downgrade`, `assert_held`; `HeldLease.release` answers False instead.

    Attributes:
        name: the lease.

    Afterwards: nothing changed in the store.
    """

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class ReentrantError(PgleaseError):
    """A waiting call by the thread or task that already holds the name through this client: it would wait for itself.

    Attributes:
        name: the lease.

    Afterwards: the hold it has is untouched.
    """

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class FencedError(PgleaseError):
    """A guarded write of a stale holder was refused.

    Attributes:
        name: the lease.
        fencing_token: the stale holder's.

    Afterwards: the caller's transaction is aborted.
    """

    def __init__(self, message: str, *, name: str = "", fencing_token: int = 0) -> None:
        super().__init__(message)
        self.name = name
        self.fencing_token = fencing_token


class ConfigurationError(PgleaseError, ValueError):
    """An argument or a combination of them is wrong; the text names every broken rule with its value.

    Attributes:
        problems: one sentence for each broken rule.

    Afterwards: nothing was taken, changed or ended.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class BackendError(PgleaseError):
    """Something about the store.

    Attributes:
        sqlstate: PostgreSQL's code for it; None where there is none.

    Afterwards: whoever asked for a lease holds none; holds that there are go on for as long as they are trusted.
    """

    sqlstate: str | None = None


class BackendUnavailable(BackendError):
    """Transport, overload, restart or failover: worth retrying.

    Attributes:
        outcome_unknown: True when the request may have been applied before the trouble. A grant that may exist is given
            back in the background and lapses by itself at its ttl.
        refused: the answer of an earlier look of the same wait (a `Refused`), or None.

    Afterwards: as for `BackendError`; what was asked for may have happened if the outcome is unknown.
    """

    refused: Any = None

    def __init__(self, message: str, *, outcome_unknown: bool = False) -> None:
        super().__init__(message)
        self.outcome_unknown = outcome_unknown


class ReleaseError(BackendError):
    """The store could not confirm a release.

    Attributes:
        name: the lease.

    Afterwards: the hold is over in this process, lapses in the store by its ttl, and may be released again.
    """

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class BackendMisconfigured(BackendError):
    """A table or a right is missing, the version is wrong, a pooler is in the way: the text says what mends it.

    Afterwards: nothing was granted or changed; asking again does not help before that is mended.
    """


class BackendClosed(BackendError):
    """The client or its backend was closed. Afterwards: nothing was sent; only a new client helps."""


class MissingDependencyError(BackendError, ImportError):
    """A package that this store needs is not installed; the text names the extra. Afterwards: nothing was opened."""
