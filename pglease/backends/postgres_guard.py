"""The guard: one statement in somebody else's transaction that proves a hold, and keeps it so until that ends.

The caller's connection is a foreign country. Its search_path may be hostile, so the table, every function, type and
operator is named with its schema. Its driver may not prepare, so planning counts: what is rarely needed stands in a
text, and is planned when it is needed, by `ts_rewrite`: of what every PostgreSQL has built in, the one function that
runs a text. And whatever is wrong must abort the transaction, so that nothing written before the guard commits either:
the server is made to compute something that it cannot, and which error it raises tells what was wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pglease.backends.base import Fence, ParamStyle
from pglease.backends.paramstyles import written
from pglease.backends.postgres_errors import (
    INSUFFICIENT_PRIVILEGE,
    LOCK_NOT_AVAILABLE,
    READ_ONLY,
    UNDEFINED_TABLE,
    sqlstate,
    translated,
)
from pglease.backends.postgres_link import Link, milliseconds
from pglease.errors import BackendError, BackendUnavailable, ConfigurationError, FencedError
from pglease.records import Claim
from pglease.schema import TableNames

_NOT_CURRENT = "22012"  # a division by zero
_ELSEWHERE = "2201E"  # the logarithm of zero
_NOT_FIRST = "2201F"  # the root of a negative number
_NO_SUCH_SETTING = "42704"  # a server older than the lease's
_SERIALIZATION = "40001"
_ABORTED = "25P02"
_NOT_IN_THIS_DATABASE = frozenset({UNDEFINED_TABLE, "3F000", "42703", _NO_SUCH_SETTING, _ELSEWHERE})
_NO_IDENTITY = frozenset({INSUFFICIENT_PRIVILEGE, "42883", "0A000"})
"""What a server says that does not tell its identity: a managed one that took the right away, or a look-alike."""

LONGEST = "1h"
"""How long a guarded transaction may take in all, from PostgreSQL 17 on."""
SHORTEST_IDLE = 1.0
"""Seconds that a guarded transaction may lie idle, however short the ttl."""
PATIENCE = "500ms"
"""How long a guard waits for whoever has the row locked against it. Only a takeover does, for a millisecond, or a
stranger; shorter than `deadlock_timeout` usually is, so that nobody is ended as a victim because of a guard."""

# Where a lease is: asked once, on our own connection. `started` tells one running server from all others at no cost;
# the system identifier, which takes reading a file, is only asked for when that differs. ISO 8601, since the caller's
# DateStyle is not ours.
_PLACE = """
SELECT pg_catalog.pg_relation_filepath(c.oid), pg_catalog.split_part(pg_catalog.pg_relation_filepath(c.oid), '/', -2),
       pg_catalog.to_char(pg_catalog.pg_postmaster_start_time() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
       pg_catalog.current_setting('transaction_timeout', true) IS NOT NULL,
       (c.oid || ARRAY(SELECT i.indexrelid FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid))::text, {system}
FROM pg_catalog.pg_class c WHERE c.oid = '{leases}'::pg_catalog.regclass
"""
_SYSTEM = "(SELECT system_identifier FROM pg_catalog.pg_control_system())"

# guard: C18. Locks first, and reads the clock afterwards. KEY SHARE lets renewals and releases pass and keeps takeovers
# out, since those change a key. A hold that has lapsed is refused though nobody took it, or guards that overlap could
# keep a successor out for ever. Behind a snapshot of its own, KEY SHARE locks and shows a version of the row that a
# release may have replaced: there it must be the last one. The mark is local: a rollback to a savepoint older than the
# guard takes both away, the lock and the mark.
#
# What is locked stands in FROM and not in an expression, in which the server would look for tables to lock each time.
# No such row that could be locked at once is neither a proof nor a refusal (there is no answer, and no mark): the same
# is asked once more, patiently. Nobody else pays for the lock timeout.
_GUARD = """
SELECT 1 {per} CASE WHEN
    CASE WHEN {usual} THEN {bound} ELSE {closer} AND {last} END
    AND l.lease_id {eq} %(lease_id)s::pg_catalog.text::pg_catalog.uuid
    AND l.expires_at {gt} pg_catalog.clock_timestamp() AND {marking}
  THEN 1 ELSE 0 END
FROM (
  SELECT l.lease_id, l.expires_at, l.ctid FROM {leases} l
  WHERE l.task_name {eq} %(name)s::pg_catalog.text
    AND l.fencing_token {eq} %(token)s::pg_catalog.text::pg_catalog.int8
  FOR KEY SHARE SKIP LOCKED
) AS l
"""

# The patient way, also of those who ask again: it waits for whoever has the row locked, and says no where there is no
# such row. With a short lock timeout, for this statement alone, unless the caller's own is shorter still; so the row is
# locked after that was set, and where nothing else is wrong.
_PATIENT_GUARD = """
SELECT 1 {per} CASE {unless_marked} WHEN
    CASE WHEN {usual} THEN {bound} ELSE {closer} END {hurry}
  THEN CASE WHEN (
      SELECT CASE WHEN l.lease_id {eq} %(lease_id)s::pg_catalog.text::pg_catalog.uuid AND {last}
             THEN l.expires_at END
      FROM {leases} l
      WHERE l.task_name {eq} %(name)s::pg_catalog.text
        AND l.fencing_token {eq} %(token)s::pg_catalog.text::pg_catalog.int8
      FOR KEY SHARE
    ) {gt} pg_catalog.clock_timestamp() AND {marking}
      AND pg_catalog.set_config('lock_timeout', own, true) IS NOT NULL
    THEN 1 ELSE 0 END
  ELSE 0 END
FROM pg_catalog.current_setting('lock_timeout') AS own
"""

_USUAL = """pg_catalog.pg_relation_filepath('{leases}'::pg_catalog.regclass) {eq} '{path}'
         AND pg_catalog.pg_postmaster_start_time() {eq} '{started}'::pg_catalog.timestamptz
         AND pg_catalog.current_setting('transaction_isolation') {eq} 'read committed' {unbounded}"""
_MARKED = "coalesce(pg_catalog.current_setting('pglease.guard', true), '') {eq} %(lease_id)s::pg_catalog.text"
_MARKING = "pg_catalog.set_config('pglease.guard', %(lease_id)s::pg_catalog.text, true) IS NOT NULL"
_LAST = """CASE WHEN pg_catalog.current_setting('transaction_isolation') {eq} 'read committed' THEN true
                  ELSE pg_catalog.currtid2('{leases}', {place}) {eq} {place} END"""
_HURRY = """AND CASE WHEN own::pg_catalog.interval {eq} '0' OR own::pg_catalog.interval {gt} '{patience}'
        THEN pg_catalog.set_config('lock_timeout', '{patience}', true) ELSE own END IS NOT NULL"""

# Looks closer: at another server or database, behind a snapshot from before the guard, and where the caller has bounds
# of his own, which are only ever lowered; those that an earlier guard of the same transaction has set are known for
# ours. Of a transaction with a snapshot, an earlier statement is known by the locks it left.
_CLOSER = """
SELECT 'a'::pg_catalog.tsquery, 'a'::pg_catalog.tsquery WHERE pg_catalog.concat(
       pg_catalog.ln(CASE WHEN {here} THEN 1.0 ELSE 0.0 END),
       pg_catalog.sqrt(CASE WHEN pg_catalog.current_setting('transaction_isolation') {ne} 'read committed'
         AND EXISTS (SELECT FROM pg_catalog.pg_lock_status() k
                     WHERE k.pid {eq} pg_catalog.pg_backend_pid() AND k.locktype {eq} 'relation'
                       AND k.mode {ne} 'SIReadLock' AND k.relation {ne} ALL ('{ours}'::pg_catalog.oid[]))
         THEN -1.0 ELSE 1.0 END),
       {lower}) IS NULL
"""
_LOWER = """CASE WHEN pg_catalog.current_setting('{setting}')::pg_catalog.interval {eq} '0'
                   OR pg_catalog.current_setting('{setting}')::pg_catalog.interval {gt} '{most}'
            THEN pg_catalog.set_config('{setting}', '{most}', true) END"""
_HERE = """pg_catalog.split_part(pg_catalog.pg_relation_filepath('{leases}'::pg_catalog.regclass), '/', -2) {eq} '{database}'
    AND CASE WHEN pg_catalog.pg_postmaster_start_time() {eq} '{started}'::pg_catalog.timestamptz THEN true
             ELSE {same_system} END"""  # noqa: E501  # one line is one condition

# fence_sql: C18. The same as a predicate, with the row lock inside: a bare subquery would only be a snapshot. Casts and
# no `::`, which some drivers take for a parameter; the token as text, since some make an integer of 32 bits of it.
_FENCE = """EXISTS (
  WITH pglease_locked AS MATERIALIZED (
    SELECT l.lease_id, l.expires_at, l.ctid AS place FROM {leases} l
    WHERE l.task_name {eq} CAST(%(pglease_name)s AS pg_catalog.text)
      AND l.fencing_token {eq} CAST(CAST(%(pglease_token)s AS pg_catalog.text) AS pg_catalog.int8)
      AND {here}
    FOR KEY SHARE
  ) SELECT 1 FROM pglease_locked k
  WHERE k.lease_id {eq} CAST(%(pglease_lease_id)s AS pg_catalog.uuid)
    AND k.expires_at {gt} pg_catalog.clock_timestamp() AND {last}
)"""
_OPERATORS = {
    word: f"OPERATOR(pg_catalog.{sign})" for word, sign in {"eq": "=", "ne": "<>", "gt": ">", "per": "/"}.items()
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where the leases are: what a guard compares the caller's connection with.

    Attributes:
        leases: the quoted table, with its schema.
        path: its file, which has the database's oid in it.
        database: that oid.
        started: when the server was started.
        has_transaction_timeout: whether it knows that setting (from 17 on).
        relations: the oids of the table and its indexes.
        system: the system identifier; None where the server does not tell it.
    """

    leases: str
    path: str
    database: str
    started: str
    has_transaction_timeout: bool
    relations: str
    system: int | None


def find(link: Link, names: TableNames) -> Place:
    """Look, on a connection of our own, where the leases in `names` are."""
    try:
        ((*found, system),) = link.rows(_PLACE.format(leases=names.leases, system=_SYSTEM))
    except Exception as error:
        if sqlstate(error) not in _NO_IDENTITY:
            raise
        ((*found, system),) = link.rows(_PLACE.format(leases=names.leases, system="NULL::pg_catalog.int8"))
    path, database, started, has_transaction_timeout, relations = found
    return Place(names.leases, path, database, started, has_transaction_timeout, relations, system)


def guard(place: Place, idle: float) -> str:
    """Return the guarding statement, with the parameters `name`, `token` and `lease_id`.

    Its answer is one row, or none where no such row of the leases could be locked at once.

    Args:
        place: where the leases are.
        idle: seconds that the guarded transaction may lie idle.
    """
    return _written(_GUARD, place, idle)


def patient_guard(place: Place, idle: float, *, again: bool = False) -> str:
    """Return the one that waits for whoever has the row locked, for `PATIENCE` at most. Its answer is one row.

    Args:
        place: where the leases are.
        idle: seconds that the guarded transaction may lie idle.
        again: whether it is to pass unasked where the mark of this hold's guard is still in place.
    """
    return _written(
        _PATIENT_GUARD,
        place,
        idle,
        unless_marked=f"WHEN {_MARKED.format(**_OPERATORS)} THEN 1" if again else "",
        hurry=_HURRY.format(patience=PATIENCE, **_OPERATORS),
    )


def _written(template: str, place: Place, idle: float, **parts: str) -> str:
    bounds = {"idle_in_transaction_session_timeout": shown(milliseconds(max(idle, SHORTEST_IDLE)))}
    if place.has_transaction_timeout:
        bounds["transaction_timeout"] = LONGEST
    return template.format(
        leases=place.leases,
        usual=_USUAL.format(
            leases=place.leases,
            path=place.path,
            started=place.started,
            unbounded=" ".join(
                f"AND pg_catalog.current_setting('{name}') {_OPERATORS['eq']} ANY ('{{0,{most}}}'::pg_catalog.text[])"
                for name, most in bounds.items()
            ),
            **_OPERATORS,
        ),
        bound=" AND ".join(
            f"pg_catalog.set_config('{name}', '{most}', true) IS NOT NULL" for name, most in bounds.items()
        ),
        closer=_closer(place, bounds),
        last=_LAST.format(leases=place.leases, place="l.ctid", **_OPERATORS),
        marking=_MARKING,
        **parts,
        **_OPERATORS,
    )


def _closer(place: Place, bounds: Mapping[str, str]) -> str:
    """Return the condition that looks closer, and sets those bounds where it does not lower any of the caller's."""
    text = _CLOSER.format(
        here=_here(place),
        ours=place.relations,
        lower=", ".join(_LOWER.format(setting=name, most=most, **_OPERATORS) for name, most in bounds.items()),
        **_OPERATORS,
    )
    quoted = text.replace("'", "''")
    return f"pg_catalog.ts_rewrite('a'::pg_catalog.tsquery, '{quoted}') IS NOT NULL"


def shown(milliseconds: int) -> str:
    """Write a time as the server shows it: in the largest unit of which it is a multiple."""
    units = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000), ("ms", 1))
    return next(f"{milliseconds // length}{unit}" for unit, length in units if milliseconds % length == 0)


def _here(place: Place) -> str:
    same = "true" if place.system is None else f"{_SYSTEM} {{eq}} {place.system}"
    return _HERE.format(
        leases=place.leases,
        database=place.database,
        started=place.started,
        same_system=same.format(**_OPERATORS),
        **_OPERATORS,
    )


def fence(place: Place, claim: Claim, style: ParamStyle, start: int) -> Fence:
    """Return the predicate for a claim, in one driver's style."""
    last = _LAST.format(leases=place.leases, place="k.place", **_OPERATORS)
    sql = _FENCE.format(leases=place.leases, here=_here(place), last=last, **_OPERATORS)
    values = {
        "pglease_name": claim.name,
        "pglease_token": str(claim.fencing_token),
        "pglease_lease_id": claim.lease_id,
    }
    return Fence(*written(sql, values, style, start))


def refusal(error: BaseException, claim: Claim) -> FencedError | ConfigurationError | BackendError:
    """Return our error for what came of the guarding statement; the caller's transaction is aborted by it."""
    state = _state(error)
    what = f"the lease {claim.name!r} (token {claim.fencing_token})"
    if state == _NOT_CURRENT:
        return fenced(claim, "it ran out, was ended, or somebody else has it")
    if state == _SERIALIZATION:
        return fenced(claim, "this transaction's snapshot is older than its record, and cannot prove it")
    if state in _NOT_IN_THIS_DATABASE:
        return ConfigurationError(
            f"{what} cannot be guarded on this connection: it leads to another database or server than the lease's"
        )
    if state == _NOT_FIRST:
        return ConfigurationError(
            f"{what} cannot be guarded so late: at REPEATABLE READ and SERIALIZABLE the guard must be the "
            "transaction's first statement"
        )
    if state == READ_ONLY:
        return ConfigurationError(f"{what} cannot be guarded in a READ ONLY transaction, or on a standby")
    if state == _ABORTED:
        return aborted(claim)
    if state == LOCK_NOT_AVAILABLE:
        return BackendUnavailable(
            f"{what} cannot be guarded just now: another session has its row locked, and waiting did not help"
        )
    return translated(error, str, sent=False)


def fenced(claim: Claim, why: str) -> FencedError:
    """Return the error for a hold that may not write any more."""
    return FencedError(
        f"a write under the lease {claim.name!r} (token {claim.fencing_token}) was refused: {why}",
        name=claim.name,
        fencing_token=claim.fencing_token,
    )


def aborted(claim: Claim) -> ConfigurationError:
    """Return the error for a transaction that has failed already."""
    return ConfigurationError(
        f"the lease {claim.name!r} cannot be guarded in a transaction that has failed: roll it back first"
    )


def _state(error: BaseException) -> str | None:
    cause = error.__cause__  # Django's errors are made of the driver's
    return sqlstate(error) or (sqlstate(cause) if cause is not None else None)
