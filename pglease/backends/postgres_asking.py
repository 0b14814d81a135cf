"""Asking for a lease until there is an answer: a grant, or who has it.

One statement is the answer nearly always. What it leaves open passes within milliseconds: a rival's statement is under
way, or the store has moved to another server and tokens must go on in a new epoch. A row that a stranger has locked
is no such thing: then the name is busy, and nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pglease import clock
from pglease.backends.base import Budget
from pglease.backends.postgres_epochs import Quarantine, raise_epoch
from pglease.backends.postgres_errors import LOCK_NOT_AVAILABLE, UNIQUE_VIOLATION, sqlstate
from pglease.backends.postgres_link import Link, Row
from pglease.backends.postgres_rows import answer_in, lease_in
from pglease.backends.postgres_sql import Statements
from pglease.backends.postgres_waiting import in_turn
from pglease.errors import BackendMisconfigured, BackendUnavailable
from pglease.records import Gone, Granted, InTheWay, LossReason, Refused, Request
from pglease.schema import PROTOCOL

BUSY_RETRY_AFTER = 0.05
"""Seconds after which a row that somebody had locked is worth another look."""
_PATIENCE = 2.0
"""Seconds to follow a rival's statement that is under way. It takes one or two milliseconds, and this long only on a
machine that has many more processes than it can run."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
_FRUITLESS = 2
"""Looks that find neither a holder nor a rival, after which a stranger must have the row locked. One may be bad luck:
the rival's statement ended between the question and the look for it."""


REASONS: dict[str, LossReason] = {"taken": "taken", "deleted": "deleted", "ended": "forced", "expired": "expired"}
"""Why a hold is gone, by what a statement says."""


class _Why(NamedTuple):
    """Why there was neither a grant nor a holder; as `postgres_sql._WHY` says it."""

    protocol: int
    moved: bool
    quarantined: float | None
    contended: bool


def ask(
    link: Link,
    sql: Statements,
    request: Request,
    params: Mapping[str, Any],
    budget: Budget,
    *,
    quarantine: Quarantine,
    pause: Callable[[float], bool],
) -> Granted | Refused:
    """Ask for a lease.

    Args:
        link: the connection.
        sql: the statements.
        request: the question.
        params: the same, as `try_acquire` has it.
        budget: what the verb may take; a rival is followed for two seconds at most.
        quarantine: what to order if this try has to begin a new epoch.
        pause: waits so many seconds, and tells whether the backend was closed meanwhile.

    Raises:
        BackendMisconfigured: another protocol; a new epoch that this role may not begin.
    """
    until = min(budget.until, clock.now() + _PATIENCE)
    wait, fruitless = _FIRST_PAUSE, 0
    while True:
        rows = _asked(link, sql, params)
        if (answer := _answer(link, sql, request, params, rows or [])) is not None:
            return answer
        why = _why(link, sql, params)
        if why.moved:
            raise_epoch(link, sql, quarantine)
        elif why.quarantined is not None and why.quarantined > 0:
            return Refused(lease_in(rows[0]) if rows else None, why.quarantined)
        elif why.contended:
            if clock.now() + wait >= until or pause(wait):
                break
            wait = min(2 * wait, _LONGEST_PAUSE)
        else:
            fruitless += 1
        if rows is None or fruitless >= _FRUITLESS:
            break
    return Refused(lease_in(rows[0]) if rows else None, BUSY_RETRY_AFTER)


def adopt(link: Link, sql: Statements, params: Mapping[str, Any], *, quarantine: Quarantine) -> Granted | Gone:
    """Let a running hold go on as the next one, in a new epoch where one must begin.

    Raises:
        BackendUnavailable: the row is locked, by a guarded transaction perhaps, or the store is in quarantine; nothing
            was changed.
        BackendMisconfigured: as for `ask`.
    """
    while True:
        row = next(iter(link.rows(sql.adopt, params)), None)
        if row is None:
            return Gone("deleted")
        refuse_busy(row[0], params["name"])
        if row[0] == "granted":
            return Granted(lease_in(row))
        if row[0] != "held":
            return Gone(REASONS[row[0]], lease_in(row))
        if not _why(link, sql, params).moved:
            raise BackendUnavailable(f"{params['name']!r} cannot be handed over: nothing is granted at present")
        raise_epoch(link, sql, quarantine)


def ask_for_all(
    link: Link, sql: Statements, requests: Sequence[Request], params: Mapping[str, Any]
) -> list[Granted] | InTheWay | None:
    """Ask for several leases in one statement; None where that could not answer, and wrote nothing."""
    try:
        rows = link.rows(sql.try_acquire_many, params)
    except Exception as error:
        if sqlstate(error) not in {UNIQUE_VIOLATION, LOCK_NOT_AVAILABLE}:
            raise
        return None  # somebody makes one of them at this moment
    for *row, place in rows:
        if row[0] == "held":
            lease = lease_in(tuple(row))
            return InTheWay(requests[place - 1].name, Refused(lease, lease.time_remaining()))
    grants = [Granted(lease_in(tuple(row))) for *row, _ in rows if row[0] == "granted"]
    return grants if len(grants) == len(requests) else None


def refuse_busy(verdict: str, name: str) -> None:
    """Turn a locked row into trouble that passes: the verb is tried again until its budget is spent."""
    if verdict == "busy":
        raise BackendUnavailable(f"the row of {name!r} is locked by another session")


def _answer(
    link: Link, sql: Statements, request: Request, params: Mapping[str, Any], rows: list[Row]
) -> Granted | Refused | None:
    """Read the answer; of a free name that has a queue, ask again in turn."""
    if rows and rows[0][0] == "queued":
        return in_turn(link, sql, request, params, lambda asked: answer_in(link.rows(sql.try_acquire, asked)))
    return answer_in(rows)


def _asked(link: Link, sql: Statements, params: Mapping[str, Any]) -> list[Row] | None:
    """Ask once; None when a stranger's uncommitted insert of this very name stood in the way."""
    try:
        return link.rows(sql.try_acquire, params)
    except Exception as error:
        if sqlstate(error) != LOCK_NOT_AVAILABLE:
            raise
        return None


def _why(link: Link, sql: Statements, params: Mapping[str, Any]) -> _Why:
    marks = [_Why(*row) for row in link.rows(sql.why, {"name": params["name"]})]
    protocols = [mark.protocol for mark in marks]
    if protocols != [PROTOCOL]:
        raise BackendMisconfigured(
            f"the lease table has protocol {protocols}, this pglease speaks {PROTOCOL}: upgrade pglease, or run "
            "`pglease schema apply`"
        )
    return marks[0]
