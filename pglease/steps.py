"""The conversations that take more than one step, as generators: what to ask, how long to wait, when to stop.

Pure: a step is yielded, somebody else (`drive.py` on a thread, `loops.py` on an event loop) carries it out and sends an
`Answer` back, with the time. The same generators serve both.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

from pglease.errors import BackendUnavailable
from pglease.records import Adoption, Granted, InTheWay, Refused, Request
from pglease.term import Term


class Call(NamedTuple):
    """Ask the store: `verb(*args)`, for at most `seconds`."""

    verb: str
    args: tuple[Any, ...]
    seconds: float


class Wait(NamedTuple):
    """Let `seconds` pass, or less if there is a reason to wake up.

    Attributes:
        seconds: until the next look.
        at_most: until the last look: so long may rest whoever has others looking for it.
        said: what the last look said, None for trouble.
    """

    seconds: float
    at_most: float = float("inf")
    said: Refused | None = None


class Answer(NamedTuple):
    """What a step came to.

    Attributes:
        now: the boot clock afterwards.
        value: what the verb returned.
        sent_at: the boot clock before the request left.
        error: the trouble instead of a value.
    """

    now: float
    value: Any = None
    sent_at: float = 0.0
    error: BackendUnavailable | None = None


LAST_LOOK = 0.02
"""Seconds before the end of a bounded wait at which the last look is made: time for one round trip."""

Step: TypeAlias = Call | Wait


class Patience(NamedTuple):
    """How long to go on asking.

    Attributes:
        until: the boot clock when the wait is over; None asks once.
        poll: the longest pause between two looks, in seconds.
        attempt: the longest one look may take, in seconds.
    """

    until: float | None
    poll: float
    attempt: float


def acquire(
    request: Request,
    *,
    margin: float,
    patience: Patience,
    now: float,
    spread: Callable[[], float],
    anew: Callable[[Request], Request],
) -> Generator[Step, Answer, Term | Refused]:
    """Ask for a lease until it is ours or patience is at its end.

    Every look carries the same `lease_id`, so a grant whose reply was lost is found by the next look, until a grant
    came too late and was given back.

    Args:
        request: the question.
        margin: seconds by which belief ends before the store's expiry.
        patience: how long to go on.
        now: the boot clock.
        spread: a random number from 0 to 1, so that waiters do not look in step.
        anew: the same question under an id of its own, for what comes after a grant was given back: that release may
            be applied late, or twice, and must not end the next grant.

    Returns:
        the belief, or the last refusal.

    Raises:
        BackendUnavailable: the store never answered; a grant may exist if it says `outcome_unknown`.
    """
    refused: Refused | None = None
    unknown = False
    until = now if patience.until is None else patience.until
    while True:
        box = patience.attempt if patience.until is None else max(0.0, min(patience.attempt, until - now))
        answer = yield Call("try_acquire", (request,), box)
        now = answer.now
        error: BackendUnavailable | None = answer.error
        if isinstance(answer.value, Granted):
            lease, bond = answer.value.lease, answer.value.bond
            term = Term.begin(lease, sent_at=answer.sent_at, ttl=request.ttl, margin=margin, bond=bond)
            if now < term.trusted_until and (patience.until is None or now <= until):
                return term
            # Too late to be of use: its belief is over, or nobody waits for it any more.
            answer = yield Call("release", (request.name, request.lease_id), patience.attempt)
            now, unknown = answer.now, answer.error is not None
            error = too_late(request.name, answer)
            if now < until:
                request = anew(request)
        elif isinstance(answer.value, Refused):
            refused, unknown = answer.value, False
        if error is not None:
            unknown = unknown or error.outcome_unknown
        left = until - now
        if left <= LAST_LOOK:
            if left > 0:
                yield Wait(left, left)
            break
        said = answer.value if error is None else None
        rest = left - LAST_LOOK
        now = (yield Wait(min(pause(patience.poll, said, spread()), rest), rest, said)).now
    return _given_up(refused, error, unknown=unknown)


def too_late(name: str, given_back: Answer) -> BackendUnavailable:
    """Return the error for a grant that came too late to be of use, and what became of its release."""
    in_doubt = given_back.error is not None
    return BackendUnavailable(f"{name!r} was granted too late and given back", outcome_unknown=in_doubt)


def acquire_many(
    requests: Sequence[Request], *, margin: float, attempt: float
) -> Generator[Step, Answer, list[Term] | InTheWay | None]:
    """Ask for several leases in one step.

    Args:
        requests: the questions, by different names.
        margin: seconds by which belief ends before the store's expiry.
        attempt: the longest it may take, in seconds.

    Returns:
        the beliefs; or what is in the way; None where each has to be asked for by itself.

    Raises:
        BackendUnavailable: the store did not answer, or too late; grants may exist if it says `outcome_unknown`.
    """
    answer = yield Call("try_acquire_many", (requests,), attempt)
    if answer.error is not None:
        raise answer.error
    if not isinstance(answer.value, list):
        return answer.value  # type: ignore[no-any-return]
    asked = zip(requests, answer.value, strict=True)
    terms = [Term.begin(got.lease, sent_at=answer.sent_at, ttl=request.ttl, margin=margin) for request, got in asked]
    if any(answer.now >= term.trusted_until for term in terms):
        raise BackendUnavailable("several leases were granted too late to be of use", outcome_unknown=True)
    return terms


def adopt(adoption: Adoption, *, margin: float, attempt: float) -> Generator[Step, Answer, Term | Refused]:
    """Go on with a hold that was handed over.

    Args:
        adoption: the question.
        margin: seconds by which belief ends before the store's expiry.
        attempt: the longest it may take, in seconds.

    Returns:
        the belief; a refusal with the record where that hold is over, or somebody else has gone on with it.

    Raises:
        BackendUnavailable: the store did not answer, or too late; a grant may exist if it says `outcome_unknown`.
    """
    answer = yield Call("adopt", (adoption,), attempt)
    if answer.error is not None:
        raise answer.error
    if isinstance(answer.value, Granted):
        lease, bond = answer.value.lease, answer.value.bond
        term = Term.begin(lease, sent_at=answer.sent_at, ttl=adoption.ttl, margin=margin, bond=bond)
        if answer.now < term.trusted_until:
            return term
        raise BackendUnavailable(f"{adoption.name!r} was handed over too late to be of use", outcome_unknown=True)
    lease = answer.value.lease
    return Refused(lease, lease.time_remaining() if lease is not None else 0.0)


def _given_up(refused: Refused | None, error: BackendUnavailable | None, *, unknown: bool) -> Refused:
    """Return the last refusal; raise the last trouble where there was none, or where a grant may exist."""
    if error is not None and (refused is None or unknown):
        error.outcome_unknown = error.outcome_unknown or unknown
        error.refused = refused
        raise error
    assert refused is not None  # every look ends in one of the two
    return refused


def pause(poll: float, refused: Refused | None, spread: float) -> float:
    """Return how long to sleep: until the holder's known expiry, and a little more, not in step; at most about `poll`.

    Args:
        poll: the longest pause between two looks, in seconds.
        refused: what the last look said, None for trouble.
        spread: from 0 to 1, chosen at random.
    """
    if refused is None:
        return min(poll, 0.5) * (0.5 + spread / 2)
    poll = min(poll, refused.look_every)
    if refused.retry_after < poll:
        return refused.retry_after + 0.005 + min(0.05, poll / 10) * spread
    return poll * (0.9 + spread / 10)
