"""Whether one order of calls explains all their answers: Wing and Gong's search, with Lowe's memory of what failed.

The object is one lease: a mutex with an owner, whose tokens rise, and whose hold may lapse at any moment. A call takes
effect at some moment between its beginning and its end. A call whose outcome its caller does not know had its effect if
somebody else saw it, at some moment before that; else it may as well have had none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pglease.testing.histories import NEVER, Op


class _State(NamedTuple):
    """What the lease is: the last token that was granted, and whether that hold runs."""

    token: int = 0
    live: bool = False


class _Place(NamedTuple):
    """Where a search stands: all before `low` have had their effect, and beyond it those in `done`."""

    low: int
    done: int
    state: _State

    def settled(self) -> int:
        """Return how many calls have had their effect."""
        return self.low + self.done.bit_count()


def explain(ops: Sequence[Op]) -> str | None:
    """Return None if there is such an order; else the call where the longest attempt got stuck.

    Args:
        ops: the calls by one name.
    """
    calls = sorted([op for op in ops if _tells(op)] + _ghosts(ops), key=lambda op: op.began)
    tokens = sorted({op.token for op in calls if op.is_grant and op.token is not None})
    stack, failed = [_Place(0, 0, _State())], set[_Place]()
    furthest = stack[0]
    while stack:
        place = stack.pop()
        if place in failed:
            continue
        failed.add(place)
        furthest = max(furthest, place, key=_Place.settled)
        if place.low == len(calls):
            return None
        stack.extend(_next_places(calls, tokens, place))
    op = min((calls[at] for at in _candidates(calls, furthest)), key=lambda op: op.ended)
    return f"{op.verb} {op.key}: {op.outcome}, token {op.token}, holder {op.holder}, live {op.live}"


def _tells(op: Op) -> bool:
    """Tell whether its answer says anything. An effect that nobody saw is no other than a lapse."""
    if op.outcome in {"unknown", "error"}:
        return False
    return not (op.verb == "acquire" and op.outcome == "denied" and op.holder is None)


def _ghosts(ops: Sequence[Op]) -> list[Op]:
    """Return the grants whose callers never learned of them, as far as somebody else saw their tokens.

    Their answers were lost, or came so late that they were given back and asked for anew, perhaps in vain.
    """
    doubtful = [op.began for op in ops if op.verb == "acquire" and op.outcome != "ok"]
    known = {op.token for op in ops if op.is_grant}
    first_seen: dict[int, float] = {}
    for op in ops if doubtful else ():
        token = op.holder or (op.token if op.verb == "get" else None)
        if token is not None and token not in known:
            first_seen[token] = min(first_seen.get(token, NEVER), op.ended)
    return [
        Op(f"whoever was granted {token}", "", "acquire", ops[0].name, min(doubtful), seen, "ok", token)
        for token, seen in first_seen.items()
    ]


def _next_places(calls: Sequence[Op], tokens: Sequence[int], place: _Place) -> Iterator[_Place]:
    """Yield where the search may go on, the most promising last."""
    answers = [(at, _apply(calls[at], place.state, tokens)) for at in _candidates(calls, place)]
    for at, state in answers:
        if state == place.state:  # it may as well come first: it changes nothing for the others
            yield _moved_on(place, at, state)
            return
    for at, state in sorted(answers, key=lambda each: -calls[each[0]].ended):
        if state is not None:
            yield _moved_on(place, at, state)


def _moved_on(place: _Place, at: int, state: _State) -> _Place:
    """Return the place after the call `at`, with `low` behind all that is settled."""
    low, done = place.low, place.done | 1 << (at - place.low)
    while done & 1:
        done >>= 1
        low += 1
    return _Place(low, done, state)


def _candidates(calls: Sequence[Op], place: _Place) -> Iterator[int]:
    """Yield the calls that may come next: those that began before any other of the rest has ended."""
    first_end = NEVER
    for at in range(place.low, len(calls)):
        if place.done >> (at - place.low) & 1:
            continue
        if calls[at].began > first_end:
            return
        first_end = min(first_end, calls[at].ended)
        yield at


def _apply(op: Op, state: _State, tokens: Sequence[int]) -> _State | None:
    """Return the lease after `op` was answered as it was; None where it could not have been."""
    if op.is_grant:
        return _grant(op, state, tokens)
    if op.verb == "acquire":
        return state if state == (op.holder, True) else None
    if op.verb == "get":
        return _read(op, state)
    if op.outcome == "gone":
        return state._replace(live=False) if state.token == op.token else state
    if state != (op.token, True):
        return None
    return state._replace(live=op.verb == "renew")


def _grant(op: Op, state: _State, tokens: Sequence[int]) -> _State | None:
    assert op.token is not None
    # Tokens rise: whoever skips one could never come back to it.
    at = bisect_right(tokens, state.token)
    skips = at < len(tokens) and tokens[at] < op.token
    return _State(op.token, live=True) if op.token > state.token and not skips else None


def _read(op: Op, state: _State) -> _State | None:
    if op.token is None:
        return state._replace(live=False)
    if op.live:
        return state if state == (op.token, True) else None
    return state._replace(live=False) if state.token == op.token else None
