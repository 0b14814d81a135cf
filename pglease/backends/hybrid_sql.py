"""What the hybrid backend adds to the statements of `postgres_sql`: who of them writes which mark, and a few errands.

A row's mark names the session of its holder, and stands there only while that session has the advisory lock of the
name. So whoever gets the lock, and reads the same hold with the same mark twice, a handover delay apart, knows that the
session is dead and that its holder was told.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from pglease.backends.hybrid_keeper import Errands
from pglease.backends.postgres_sql import RECORD, VERDICT, Marking, Statements
from pglease.schema import TableNames

_PID = "%(session_pid)s::integer"
_STARTED = "%(session_started)s::timestamptz"

MARKING = Marking(
    session_pid=_PID,
    session_started=_STARTED,
    renewed=f""",
         session_pid = CASE WHEN j.wanted_id = ANY (%(bound)s::uuid[]) THEN {_PID} END,
         session_started = CASE WHEN j.wanted_id = ANY (%(bound)s::uuid[]) THEN {_STARTED} END""",
)
"""A grant is marked if the lock was got before. So is a renewal: in a row that was written without the lock, or that
somebody else continues, it says how things stand now."""

FORFEIT = """(l.lease_id = %(rival_id)s::uuid AND l.session_pid = %(rival_pid)s::integer
         AND l.session_started = %(rival_started)s::timestamptz)"""
"""The hold that was seen before, bound to the session that it was bound to before."""

# A look that also tells whose session the holder is bound to, and whether somebody may stand in the queue.
_GLANCE = """
SELECT {record}, coalesce(queued_until > seen_at, false) AS queued, lease_id::text AS lease_id, session_pid,
       pg_catalog.to_char(session_started AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS session_started
FROM (
  SELECT {judged} AS verdict, seen.* FROM (
    SELECT l.*, pg_catalog.clock_timestamp() AS seen_at FROM {leases} l WHERE l.task_name = %(name)s::text
  ) AS seen
) AS found
"""

# Says in the rows of these holds which session has their locks; nothing else about them changes. A row that somebody
# has locked is left alone, and not answered.
_TIE = """
WITH wanted AS MATERIALIZED (
  SELECT * FROM ROWS FROM (pg_catalog.unnest(%(names)s::text[]), pg_catalog.unnest(%(lease_ids)s::uuid[]))
           WITH ORDINALITY AS w(name, wanted_id, place)
), locked AS MATERIALIZED (
  SELECT w.place, l.task_name FROM wanted w JOIN {leases} l ON l.task_name = w.name AND l.lease_id = w.wanted_id
  ORDER BY l.task_name FOR NO KEY UPDATE OF l SKIP LOCKED
)
UPDATE {leases} l SET session_pid = {session_pid}, session_started = {session_started}
FROM locked k WHERE l.task_name = k.task_name
RETURNING k.place
"""

# Ends the session that has this lock, if it is the one that was seen, and no lease that still runs is bound to it.
_END = """
SELECT pg_catalog.pg_terminate_backend(a.pid) FROM pg_catalog.pg_stat_activity a
WHERE a.pid = %(pid)s::integer AND a.backend_start = %(started)s::timestamptz
  AND EXISTS (
    SELECT 1 FROM pg_catalog.pg_locks k
    WHERE k.pid = a.pid AND k.locktype = 'advisory' AND k.granted AND k.objsubid = 1 AND k.database = a.datid
      AND k.classid::int8 = (%(key)s::int8 >> 32) & 4294967295 AND k.objid::int8 = %(key)s::int8 & 4294967295)
  AND NOT EXISTS (
    SELECT 1 FROM {leases} l
    WHERE l.session_pid = a.pid AND l.session_started = a.backend_start
      AND l.expires_at > pg_catalog.clock_timestamp())
"""

LOCKS_IN_USE = """
SELECT (SELECT count(*) FROM pg_catalog.pg_locks k WHERE k.locktype = 'advisory')::int,
       pg_catalog.current_setting('max_locks_per_transaction')::int
         * pg_catalog.current_setting('max_connections')::int
"""


@dataclass(frozen=True, slots=True)
class HybridStatements:
    """Every statement of the hybrid backend's own."""

    take_over: Statements
    glance: str
    errands: Errands

    @classmethod
    def of(
        cls, names: TableNames, protocol: int, *, lineage: bool = True, notify: bool = True, history: int = 0
    ) -> HybridStatements:
        """Render for the tables in `names`; see `Statements.of`."""
        glance = _GLANCE.format(leases=names.leases, record=RECORD.format(verdict="verdict"), judged=VERDICT)
        errands = Errands(
            tie=_TIE.format(leases=names.leases, session_pid=_PID, session_started=_STARTED),
            untie=_TIE.format(leases=names.leases, session_pid="NULL", session_started="NULL"),
            end=_END.format(leases=names.leases),
        )
        forfeiting = replace(MARKING, forfeit=FORFEIT)
        take_over = Statements.of(names, protocol, lineage=lineage, marking=forfeiting, notify=notify, history=history)
        return cls(take_over, glance, errands)


def key_of(names: TableNames, name: str) -> int:
    """Return the key of a name's advisory lock: 64 bits of a hash, since that is what there is room for.

    Should two names ever share one, the second is held without the lock: that costs time after a death, and no more.
    """
    text = "\0".join(("pglease hybrid 1", names.schema or "", names.table, name))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], signed=True)
