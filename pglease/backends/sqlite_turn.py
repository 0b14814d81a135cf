"""One turn at the file: a name is judged under the write lock, then changed. What decides who holds a lease is here."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pglease.backends.sqlite_rows import Sight, ns, written
from pglease.backends.sqlite_sql import Statements
from pglease.records import (
    Adoption,
    Change,
    Gone,
    Granted,
    Held,
    InTheWay,
    Place,
    Refused,
    Released,
    ReleaseOutcome,
    Renewal,
    RenewalOutcome,
    Request,
    Ticket,
)


@dataclass(slots=True)
class Turn:
    """One turn at the file, under its write lock.

    Attributes:
        link: the connection, inside a transaction.
        sql: the statements.
        judged: looks at a name; what it saw stays true until the turn is over.
        changes: what is to be announced afterwards.
    """

    link: sqlite3.Connection
    sql: Statements
    judged: Callable[[str], Sight]
    changes: list[Change]

    def do(self, statement: str, *values: object) -> int:
        """Execute one statement; return how many rows it changed."""
        return self.link.execute(statement, values).rowcount

    def announce(self, sight: Sight, what: Literal["released", "granted"]) -> None:
        """Have it told afterwards, if somebody waits for the name or watches it."""
        if sight.row is not None and sight.row.waited_until > sight.now:
            self.changes.append(Change(sight.row.name, what, sight.left()))


def take(turn: Turn, request: Request) -> Granted | Refused:
    """Give the name to whoever asks, if it is free and not reserved for somebody else. C1 C2 C3 C13 C17."""
    sight = turn.judged(request.name)
    answer = sight.answer(request)
    if answer is None:
        sight = sight._replace(row=sight.next_hold(request))
        assert sight.row is not None
        turn.do(turn.sql.put, *sight.row)
        if request.ticket_id is not None:
            turn.do(turn.sql.leave, request.name, request.ticket_id)
        turn.announce(sight, "granted")
        answer = Granted(sight.record())
    return answer


def take_all(turn: Turn, requests: Sequence[Request]) -> list[Granted] | InTheWay:
    """Give all of several names to whoever asks, if every one is free. C22."""
    for request in requests:
        answer = turn.judged(request.name).answer(request)
        if isinstance(answer, Refused):
            return InTheWay(request.name, answer)
    answers = [take(turn, request) for request in requests]
    return [answer for answer in answers if isinstance(answer, Granted)]


def renew(turn: Turn, renewal: Renewal) -> RenewalOutcome:
    """Extend one hold that still runs. C4 C5."""
    sight = turn.judged(renewal.name)
    if sight.row is None or not sight.held_by(renewal.lease_id):
        return sight.gone(renewal.lease_id)
    row = sight.row._replace(heartbeat=sight.now, expires=sight.now + ns(renewal.ttl))
    turn.do(turn.sql.renew, row.heartbeat, row.expires, row.name)
    return Held(sight._replace(row=row).record())


def adopt(turn: Turn, adoption: Adoption) -> Granted | Gone:
    """Let a hold that still runs go on as the next one. C20."""
    sight = turn.judged(adoption.name)
    if sight.held_by(adoption.next_id):
        return Granted(sight.record())
    if sight.row is None or not sight.held_by(adoption.lease_id):
        return sight.gone(adoption.lease_id)
    request = Request(adoption.name, adoption.owner_id, adoption.next_id, adoption.ttl)
    row = sight.next_hold(request)._replace(metadata=sight.row.metadata)
    turn.do(turn.sql.put, *row)
    sight = sight._replace(row=row)
    turn.announce(sight, "granted")
    return Granted(sight.record())


def describe(turn: Turn, name: str, lease_id: str, metadata: Mapping[str, Any]) -> Held | Gone:
    """Replace the metadata of a hold that still runs. C21."""
    sight = turn.judged(name)
    if sight.row is None or not sight.held_by(lease_id):
        return sight.gone(lease_id)
    row = sight.row._replace(metadata=written(metadata))
    turn.do(turn.sql.describe, row.metadata, name)
    return Held(sight._replace(row=row).record())


def release(turn: Turn, name: str, lease_id: str, min_hold: float) -> ReleaseOutcome:
    """End one hold, now or at `acquired + min_hold`; one that lapsed is given back all the same. C6."""
    sight = turn.judged(name)
    if sight.row is None or sight.row.lease_id != lease_id:
        return sight.gone(lease_id)
    if sight.free:
        turn.do(turn.sql.end, sight.row.expires, name)
        return sight.gone(lease_id)
    _end(turn, sight, max(sight.now, sight.row.acquired + ns(min_hold)))
    return Released()


def force(turn: Turn, name: str, fencing_token: int) -> bool:
    """End whoever holds the name under that token. C6."""
    sight = turn.judged(name)
    if sight.row is None or sight.free or sight.row.fencing_token != fencing_token:
        return False
    _end(turn, sight, sight.now)
    return True


def _end(turn: Turn, sight: Sight, expires: int) -> None:
    assert sight.row is not None
    turn.do(turn.sql.end, expires, sight.row.name)
    turn.announce(sight._replace(row=sight.row._replace(expires=expires)), "released")


def cleanup(turn: Turn, older_than: float) -> int:
    """Delete what ended long ago and raise the floor of the tokens above it. C3 C7."""
    now = turn.judged("").now
    bounds = {"now": now, "before": now - ns(older_than)}
    turn.link.execute(turn.sql.cleanup_queue, bounds)
    turn.link.execute(turn.sql.raise_floor, bounds)
    return turn.link.execute(turn.sql.cleanup, bounds).rowcount


def mark(turn: Turn, name: str, seconds: float) -> bool:
    """Note that somebody waits for the name. C16."""
    return turn.do(turn.sql.wait, turn.judged(name).now + ns(seconds), name) > 0


def queue(turn: Turn, ticket: Ticket) -> Place | None:
    """Take a place in the queue, or renew it. C17."""
    sight = turn.judged(ticket.name)
    if sight.row is None:
        return None
    name, until = ticket.name, sight.now + ns(ticket.ttl)
    turn.do(turn.sql.drop_dead, name, sight.now)
    found = turn.link.execute(turn.sql.ticket, (name, ticket.ticket_id)).fetchone()
    number: int = found[0] if found else sight.row.last_ticket + 1
    if found:
        turn.do(turn.sql.renew_ticket, until, name, number)
    else:
        turn.do(turn.sql.number, number, name)
        turn.do(turn.sql.arrive, name, number, ticket.ticket_id, ticket.owner_id, until)
    (ahead,) = turn.link.execute(turn.sql.ahead, (name, number)).fetchone()
    return Place(number, ahead)


def leave(turn: Turn, name: str, ticket_id: str) -> bool:
    """Give a place up. C17."""
    left = turn.do(turn.sql.leave, name, ticket_id) > 0
    if left:
        turn.announce(turn.judged(name), "released")
    return left
