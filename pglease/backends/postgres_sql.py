"""The statements, on one screen each. What decides who holds a lease is here and nowhere else.

Every writing statement **locks first** in a MATERIALIZED step, **judges** the locked row with `clock_timestamp()` in a
second one, and only then writes from that. PostgreSQL evaluates SET and WHERE of an UPDATE *before* it waits for a row
lock, and not again if the blocker only locked the row: without the steps a takeover is born expired and a renewal
revives a lapsed hold. The judgement may not stand on the UPDATE's own table, or the planner may run it before the lock.

`now()` is the start of the transaction and is never used. Functions are named with their schema, since a hostile
`search_path` can shadow them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from pglease.schema import TableNames

_SECONDS = "pg_catalog.make_interval(secs => {})"

RECORD = """{verdict} AS verdict, task_name, owner_id, fencing_token, transitions, metadata::text AS metadata,
       pg_catalog.date_part('epoch', acquired_at) AS acquired_at,
       pg_catalog.date_part('epoch', heartbeat_at) AS heartbeat_at,
       pg_catalog.date_part('epoch', expires_at) AS expires_at, pg_catalog.date_part('epoch', seen_at) AS seen_at,
       lease_id IS NULL AS given_back"""
"""What every statement returns about a row, in the order that `postgres_rows.lease_in` reads. Epochs, since drivers and
session time zones differ about timestamps; text for metadata, since drivers differ about jsonb."""

_LINEAGE = """(
          SELECT pg_catalog.concat_ws('/', c.system_identifier,
            pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 1, 8),
            d.oid, {table_oid})
          FROM pg_catalog.pg_control_system() c, pg_catalog.pg_database d
          WHERE d.datname = pg_catalog.current_database())"""

VERDICT = """CASE WHEN seen.expires_at <= seen.seen_at AND seen.queued_until > seen.seen_at THEN 'queued'
            WHEN seen.expires_at <= seen.seen_at THEN 'over'
            WHEN seen.lease_id = %(lease_id)s::uuid THEN 'granted' ELSE 'held' END"""
"""What a look says to somebody who asks with `lease_id`; `granted` is that one's own earlier grant (C13), `queued` a
free name that may be reserved (C17)."""

_TOLD = """CASE WHEN {row}.waited_until > j.seen_at THEN pg_catalog.pg_notify('{channel}', pg_catalog.concat(
    '{what} ', greatest(0, pg_catalog.date_part('epoch', {row}.expires_at - j.seen_at)), ' ', {row}.task_name))::text
    END"""
"""Tells whoever waits, from within the UPDATE that holds the row's lock: a mark is either seen here or set after our
commit, and whoever set it looks again (C16). Without a mark nothing is said: each NOTIFY costs all commits of the
database a lock."""

# Inside the statements that end a hold: C23. Whoever ends it, or takes over what has lapsed, writes the one row; those
# beyond the number that is kept go. `ended` is read from what was judged under the row's lock.
_ENDED = """, kept AS (
  INSERT INTO {history} AS h (task_name, fencing_token, owner_id, acquired_at, ended_at, ending)
  SELECT j.task_name, j.fencing_token, j.owner_id, j.acquired_at, least(j.expires_at, j.seen_at),
         CASE WHEN j.expires_at <= j.seen_at THEN 'expired' ELSE '{ending}' END
  FROM judged j WHERE j.lease_id IS NOT NULL AND j.task_name IN (SELECT c.task_name FROM {change} c)
  ON CONFLICT DO NOTHING
), outdated AS (
  DELETE FROM {history} h USING judged j CROSS JOIN LATERAL (
    SELECT o.fencing_token FROM {history} o WHERE o.task_name = j.task_name
    ORDER BY o.fencing_token DESC OFFSET {keep} - 1 LIMIT 1) AS last
  WHERE h.task_name = j.task_name AND h.fencing_token <= last.fencing_token
    AND j.lease_id IS NOT NULL AND j.task_name IN (SELECT c.task_name FROM {change} c)
)"""
_ENDING_OF_A_STRANGERS = ", l.owner_id, l.lease_id, l.acquired_at"
"""What must be locked, besides what the statement itself needs, to tell how a hold ended."""

# get, and try_acquire when a recent answer said that the name is held: C1 C10. A plain look.
_LOOK = """
SELECT {record} FROM (
  SELECT {judged} AS verdict, seen.* FROM (
    SELECT l.*, pg_catalog.clock_timestamp() AS seen_at FROM {leases} l WHERE l.task_name = %(name)s::text
  ) AS seen
) AS found
"""

# try_acquire: C1 C2 C3 C13. Looks first, so that losing writes nothing and learns the holder; takes over a row whose
# hold is over, unless somebody has it locked; makes the row if there is none. Grants nothing on a server other than the
# one that granted last, nor in quarantine: the comparison stands on the way of a winner alone, since it costs more than
# all the rest of a losing try. The first token of an epoch is above all that any other server gave; a floor that a
# cleanup raised is for new names only.
#
# Of those who would make the same row in one instant, one is let through to the insert (the advisory lock ends with the
# statement): the others would each write a row and take it back. ON CONFLICT names no target: a target would not cover
# the second unique index. The lock timeout bounds the wait for a stranger's uncommitted insert.
_TRY_ACQUIRE = """
WITH seen AS MATERIALIZED (
  SELECT l.*, pg_catalog.clock_timestamp() AS seen_at, CASE WHEN {forfeit} THEN 'forfeit' END AS note
  FROM {leases} l WHERE l.task_name = %(name)s::text
), locked AS MATERIALIZED (
  SELECT l.task_name, l.expires_at, l.fencing_token, l.transitions, l.queued_until{past}, {forfeit} AS forfeit
  FROM {leases} l
  WHERE l.task_name = %(name)s::text AND ({forfeit} OR l.expires_at <= pg_catalog.clock_timestamp())
    AND (%(in_turn)s::boolean OR coalesce(l.queued_until <= pg_catalog.clock_timestamp(), true))
  FOR UPDATE SKIP LOCKED
), judged AS MATERIALIZED (
  SELECT locked.*, pg_catalog.clock_timestamp() AS seen_at, {lineage} AS lineage FROM locked
), taken AS (
  UPDATE {leases} l
  SET owner_id = %(owner)s::text, lease_id = %(lease_id)s::uuid,
      fencing_token = greatest(j.fencing_token, (m.token_floor >> 32) << 32) + 1,
      transitions = j.transitions + 1, metadata = %(metadata)s::jsonb,
      acquired_at = j.seen_at, heartbeat_at = j.seen_at, expires_at = j.seen_at + {ttl},
      session_pid = {session_pid}, session_started = {session_started}
  FROM judged j, {meta} m
  WHERE l.task_name = j.task_name AND (j.forfeit OR j.expires_at <= j.seen_at) AND m.protocol = {protocol}
    AND (%(in_turn)s::boolean OR coalesce(j.queued_until <= j.seen_at, true))
    AND (m.lineage = j.lineage OR {unknown}) AND coalesce(m.quarantined_until <= j.seen_at, true)
  RETURNING l.*, j.seen_at, {granted} AS note
){taken_over}, born AS (
  INSERT INTO {leases} AS l
    (task_name, owner_id, lease_id, fencing_token, metadata, acquired_at, heartbeat_at, expires_at,
     session_pid, session_started)
  SELECT %(name)s::text, %(owner)s::text, %(lease_id)s::uuid, m.token_floor + 1, %(metadata)s::jsonb,
         t.now, t.now, t.now + {ttl}, {session_pid}, {session_started}
  FROM {meta} m, (SELECT pg_catalog.clock_timestamp() AS now) t
  WHERE NOT EXISTS (SELECT 1 FROM seen) AND m.protocol = {protocol}
    AND (m.lineage = {lineage} OR {unknown}) AND coalesce(m.quarantined_until <= t.now, true)
    AND pg_catalog.set_config('lock_timeout', '300ms', true) IS NOT NULL
    AND pg_catalog.pg_try_advisory_xact_lock({key})
  ON CONFLICT DO NOTHING
  RETURNING l.*, l.acquired_at AS seen_at, NULL::text AS note
)
SELECT {record} FROM (
  SELECT 'granted' AS verdict, taken.* FROM taken
  UNION ALL SELECT 'granted', born.* FROM born
  UNION ALL SELECT CASE WHEN seen.note = 'forfeit' AND seen.queued_until > seen.seen_at THEN 'queued' ELSE {judged} END,
    seen.* FROM seen WHERE NOT EXISTS (SELECT 1 FROM taken)
) AS answer
"""

# try_acquire_many: C22. As `try_acquire` with several names, of which each is free and locked, or unknown and ours to
# make, or nothing is written. Nobody waits: rows that others have locked are skipped, and of those who would make the
# same row one is let through. An insert of a name that somebody has just made fails, and takes the rest with it.
_TRY_ACQUIRE_MANY = """
WITH wanted AS MATERIALIZED (
  SELECT * FROM ROWS FROM (pg_catalog.unnest(%(names)s::text[]), pg_catalog.unnest(%(lease_ids)s::uuid[]))
           WITH ORDINALITY AS w(name, wanted_id, place)
), seen AS MATERIALIZED (
  SELECT w.place, w.wanted_id, l.*, pg_catalog.clock_timestamp() AS seen_at
  FROM wanted w JOIN {leases} l ON l.task_name = w.name
), free AS MATERIALIZED (
  SELECT coalesce(bool_and(s.expires_at <= s.seen_at AND coalesce(s.queued_until <= s.seen_at, true)), true) AS all_free
  FROM seen s
), locked AS MATERIALIZED (
  SELECT w.place, w.wanted_id, l.task_name, l.expires_at, l.fencing_token, l.transitions, l.queued_until{past}
  FROM wanted w JOIN {leases} l ON l.task_name = w.name
  WHERE (SELECT f.all_free FROM free f) AND l.expires_at <= pg_catalog.clock_timestamp()
  ORDER BY l.task_name FOR UPDATE OF l SKIP LOCKED
), judged AS MATERIALIZED (
  SELECT locked.*, pg_catalog.clock_timestamp() AS seen_at FROM locked
), unknown AS MATERIALIZED (
  SELECT w.*, pg_catalog.pg_try_advisory_xact_lock({key_of_wanted}) AS ours
  FROM wanted w
  WHERE (SELECT f.all_free FROM free f) AND NOT EXISTS (SELECT 1 FROM seen s WHERE s.task_name = w.name)
), granting AS MATERIALIZED (
  SELECT m.token_floor, pg_catalog.set_config('lock_timeout', '300ms', true) AS bounded FROM {meta} m, free f
  WHERE f.all_free AND m.protocol = {protocol} AND (m.lineage = {lineage} OR {unknown})
    AND coalesce(m.quarantined_until <= pg_catalog.clock_timestamp(), true)
    AND (SELECT count(*) FROM judged j
         WHERE j.expires_at <= j.seen_at AND coalesce(j.queued_until <= j.seen_at, true)) = (SELECT count(*) FROM seen)
    AND NOT EXISTS (SELECT 1 FROM unknown u WHERE NOT u.ours)
), taken AS (
  UPDATE {leases} l
  SET owner_id = %(owner)s::text, lease_id = j.wanted_id,
      fencing_token = greatest(j.fencing_token, (g.token_floor >> 32) << 32) + 1,
      transitions = j.transitions + 1, metadata = %(metadata)s::jsonb,
      acquired_at = j.seen_at, heartbeat_at = j.seen_at, expires_at = j.seen_at + {ttl},
      session_pid = NULL, session_started = NULL
  FROM judged j, granting g WHERE l.task_name = j.task_name
  RETURNING j.place, l.*, j.seen_at, {granted} AS note
){taken_over}, born AS (
  INSERT INTO {leases} AS l
    (task_name, owner_id, lease_id, fencing_token, metadata, acquired_at, heartbeat_at, expires_at)
  SELECT u.name, %(owner)s::text, u.wanted_id, g.token_floor + 1, %(metadata)s::jsonb, t.now, t.now, t.now + {ttl}
  FROM unknown u, granting g, (SELECT pg_catalog.clock_timestamp() AS now) t
  WHERE g.bounded IS NOT NULL ORDER BY u.name
  RETURNING l.*, l.acquired_at AS seen_at
)
SELECT {record}, place FROM (
  SELECT 'granted' AS verdict, t.place, t.task_name, t.owner_id, t.lease_id, t.fencing_token, t.transitions,
         t.metadata, t.acquired_at, t.heartbeat_at, t.expires_at, t.seen_at FROM taken t
  UNION ALL
  SELECT 'granted', w.place, b.task_name, b.owner_id, b.lease_id, b.fencing_token, b.transitions,
         b.metadata, b.acquired_at, b.heartbeat_at, b.expires_at, b.seen_at
  FROM born b JOIN wanted w ON w.name = b.task_name
  UNION ALL
  SELECT CASE WHEN s.expires_at <= s.seen_at THEN 'over' WHEN s.lease_id = s.wanted_id THEN 'granted' ELSE 'held' END,
         s.place, s.task_name, s.owner_id, s.lease_id, s.fencing_token, s.transitions,
         s.metadata, s.acquired_at, s.heartbeat_at, s.expires_at, s.seen_at
  FROM seen s WHERE NOT EXISTS (SELECT 1 FROM granting)
) AS answer ORDER BY place
"""

# Why a try was answered neither with a grant nor with a holder. `contended` when a rival's statement is under way: it
# has locked the row and is about to write (somebody who only locks rows, as a guard does, holds a weaker lock on the
# table), or is making it. One whose session has been idle inside its transaction for a while is no rival, but a
# stranger.
_WHY = """
WITH locks AS MATERIALIZED (
  SELECT k.* FROM pg_catalog.pg_locks k WHERE k.granted
), rivals AS (
  SELECT k.pid FROM locks k JOIN {leases} l ON l.xmax = k.transactionid
  WHERE l.task_name = %(name)s::text AND EXISTS (
    SELECT 1 FROM locks w WHERE w.virtualtransaction = k.virtualtransaction AND w.relation = {table_oid}
      AND w.mode = 'RowExclusiveLock')
  UNION ALL
  SELECT k.pid FROM locks k, (SELECT {key} AS key) n
  WHERE k.locktype = 'advisory' AND k.objsubid = 1
    AND k.classid::int8 = (n.key >> 32) & 4294967295 AND k.objid::int8 = n.key & 4294967295
)
SELECT m.protocol, coalesce(m.lineage <> {lineage}, true) AND NOT {unknown} AS moved,
       pg_catalog.date_part('epoch', m.quarantined_until - pg_catalog.clock_timestamp()) AS quarantined,
       EXISTS (
         SELECT 1 FROM rivals r WHERE NOT EXISTS (
           SELECT 1 FROM pg_catalog.pg_stat_get_activity(r.pid) a
           WHERE a.pid = r.pid AND a.state = 'idle in transaction'
             AND a.state_change < pg_catalog.clock_timestamp() - {a_while})) AS contended
FROM {meta} m
"""

# bump-epoch, and the first grant after a failover or a restore: C3. Under the row lock, so that one client does it. The
# timeline is a lower bound, since of two failovers in a row the second server may not know of the first one's epoch.
# A new table whose server could not be asked when it was made learns where it is, and nothing was granted before.
_RAISE_EPOCH = """
WITH timed AS MATERIALIZED (
  SELECT pg_catalog.set_config('lock_timeout', '300ms', true) AS limit
), locked AS MATERIALIZED (
  SELECT m.* FROM {meta} m, timed WHERE timed.limit IS NOT NULL FOR UPDATE OF m
), judged AS MATERIALIZED (
  SELECT locked.*, {lineage} AS present, pg_catalog.clock_timestamp() AS seen_at FROM locked
), next AS MATERIALIZED (
  SELECT judged.*, CASE
    WHEN NOT %(anyway)s::boolean AND lineage IS NULL AND token_floor = 0 AND NOT EXISTS (SELECT 1 FROM {leases}) THEN 0
    ELSE greatest((token_floor >> 32) + 1, ('x' || pg_catalog.split_part(present, '/', 2))::bit(32)::int8 - 1)
    END AS epoch
  FROM judged WHERE %(anyway)s::boolean OR lineage IS DISTINCT FROM present
)
UPDATE {meta} m
SET token_floor = n.epoch << 32, lineage = coalesce(n.present, n.lineage),
    quarantined_until = CASE WHEN n.epoch = 0 OR %(quarantine)s::float8 IS NULL THEN n.quarantined_until
      ELSE greatest(n.quarantined_until, n.seen_at + {quarantine}) END
FROM next n WHERE m.one = n.one AND n.epoch < 2147483648
RETURNING n.epoch
"""
_LONGEST_TTL = """(
  SELECT max(pg_catalog.date_part('epoch', l.expires_at - l.heartbeat_at)) FROM {leases} l
  WHERE l.lease_id IS NOT NULL AND pg_catalog.isfinite(l.expires_at) AND pg_catalog.isfinite(l.heartbeat_at))"""

# renew: C4 C5. One statement for any number of holds, whose cost grows with their number and no faster: each is found
# by its key. Locks in key order, so that two batches cannot deadlock; NO KEY, so that a guard's KEY SHARE does not stop
# it; skips what others have locked, so that one row never stalls the rest. What was judged is what is written, so the
# answer is read from the judgement. A hold without an answer is locked or has no row: `present` then asks which.
_RENEW = """
WITH wanted AS MATERIALIZED (
  SELECT * FROM ROWS FROM (pg_catalog.unnest(%(names)s::text[]), pg_catalog.unnest(%(lease_ids)s::uuid[]),
                           pg_catalog.unnest(%(ttls)s::float8[]))
           WITH ORDINALITY AS w(name, wanted_id, ttl, place)
), locked AS MATERIALIZED (
  SELECT w.place, w.wanted_id, w.ttl, l.task_name, l.owner_id, l.lease_id, l.fencing_token, l.transitions, l.metadata,
         l.acquired_at, l.heartbeat_at, l.expires_at
  FROM wanted w JOIN {leases} l ON l.task_name = w.name
  ORDER BY l.task_name FOR NO KEY UPDATE OF l SKIP LOCKED
), clocked AS MATERIALIZED (
  SELECT locked.*, pg_catalog.clock_timestamp() AS seen_at FROM locked
), judged AS MATERIALIZED (
  SELECT clocked.*, CASE WHEN wanted_id = lease_id AND expires_at > seen_at THEN 'held'
                         WHEN wanted_id = lease_id THEN 'expired'
                         WHEN lease_id IS NULL THEN 'ended' ELSE 'taken' END AS verdict
  FROM clocked
), renewed AS (
  UPDATE {leases} l SET heartbeat_at = j.seen_at, expires_at = j.seen_at + {ttl}{renewed_mark}
  FROM judged j WHERE l.task_name = j.task_name AND j.verdict = 'held'
)
SELECT {record}, place FROM (
  SELECT place, verdict, task_name, owner_id, lease_id, fencing_token, transitions, metadata, acquired_at, seen_at,
         CASE verdict WHEN 'held' THEN seen_at ELSE heartbeat_at END AS heartbeat_at,
         CASE verdict WHEN 'held' THEN seen_at + {ttl} ELSE expires_at END AS expires_at
  FROM judged j
) AS answer
"""
_PRESENT = "SELECT l.task_name FROM {leases} l WHERE l.task_name = ANY (%(names)s::text[])"

# release: C6. Frees at once or at acquired_at + min_hold; the row stays as a tombstone that keeps the token. Clearing
# `lease_id` is what makes every guard that starts afterwards fail.
_RELEASE = """
WITH seen AS MATERIALIZED (
  SELECT l.task_name FROM {leases} l WHERE l.task_name = %(name)s::text
), locked AS MATERIALIZED (
  SELECT l.task_name, l.owner_id, l.lease_id, l.fencing_token, l.transitions, l.metadata,
         l.acquired_at, l.heartbeat_at, l.expires_at
  FROM {leases} l WHERE l.task_name = %(name)s::text FOR NO KEY UPDATE SKIP LOCKED
), judged AS MATERIALIZED (
  SELECT locked.*, pg_catalog.clock_timestamp() AS seen_at FROM locked
), released AS (
  UPDATE {leases} l
  SET lease_id = NULL, session_pid = NULL, session_started = NULL,
      expires_at = CASE WHEN j.expires_at <= j.seen_at THEN j.expires_at
                        ELSE greatest(j.seen_at, j.acquired_at + {min_hold}) END
  FROM judged j WHERE l.task_name = j.task_name AND j.lease_id = %(lease_id)s::uuid
  RETURNING l.task_name, j.expires_at > j.seen_at AS in_time,
    CASE WHEN j.expires_at > j.seen_at THEN {released} END AS told
){given_back}
SELECT {record} FROM (
  SELECT CASE WHEN r.in_time THEN 'released' WHEN NOT r.in_time THEN 'expired' WHEN j.task_name IS NULL THEN 'busy'
              WHEN j.lease_id IS NULL THEN 'ended' ELSE 'taken' END AS verdict,
         j.task_name, j.owner_id, j.lease_id, j.fencing_token, j.transitions, j.metadata,
         j.acquired_at, j.heartbeat_at, j.expires_at, j.seen_at
  FROM seen LEFT JOIN released r ON true LEFT JOIN judged j ON r.in_time IS NOT TRUE
) AS answer
"""

# adopt: C20 C13. A takeover with its holder's consent, of the hold that runs: the key changes, so a guard's KEY SHARE
# keeps it out, and no guard of that hold passes afterwards. Whoever queues is not asked. As in `try_acquire`, nothing
# is granted on a server other than the one that granted last, nor in quarantine.
_ADOPT = """
WITH seen AS MATERIALIZED (
  SELECT l.task_name FROM {leases} l WHERE l.task_name = %(name)s::text
), locked AS MATERIALIZED (
  SELECT l.* FROM {leases} l WHERE l.task_name = %(name)s::text FOR UPDATE SKIP LOCKED
), judged AS MATERIALIZED (
  SELECT locked.*, pg_catalog.clock_timestamp() AS seen_at, {lineage} AS present FROM locked
), adopted AS (
  UPDATE {leases} l
  SET owner_id = %(owner)s::text, lease_id = %(next_id)s::uuid,
      fencing_token = greatest(j.fencing_token, (m.token_floor >> 32) << 32) + 1, transitions = j.transitions + 1,
      acquired_at = j.seen_at, heartbeat_at = j.seen_at, expires_at = j.seen_at + {ttl},
      session_pid = {session_pid}, session_started = {session_started}
  FROM judged j, {meta} m
  WHERE l.task_name = j.task_name AND j.lease_id = %(lease_id)s::uuid AND j.expires_at > j.seen_at
    AND m.protocol = {protocol} AND (m.lineage = j.present OR {unknown})
    AND coalesce(m.quarantined_until <= j.seen_at, true)
  RETURNING l.*, j.seen_at, {granted} AS note
){handed_over}
SELECT {record} FROM (
  SELECT 'granted' AS verdict, a.task_name, a.owner_id, a.lease_id, a.fencing_token, a.transitions, a.metadata,
         a.acquired_at, a.heartbeat_at, a.expires_at, a.seen_at
  FROM adopted a
  UNION ALL
  SELECT CASE WHEN j.task_name IS NULL THEN 'busy'
              WHEN j.lease_id = %(next_id)s::uuid AND j.expires_at > j.seen_at THEN 'granted'
              WHEN j.lease_id = %(lease_id)s::uuid AND j.expires_at > j.seen_at THEN 'held'
              WHEN j.lease_id IN (%(lease_id)s::uuid, %(next_id)s::uuid) THEN 'expired'
              WHEN j.lease_id IS NULL THEN 'ended' ELSE 'taken' END,
         j.task_name, j.owner_id, j.lease_id, j.fencing_token, j.transitions, j.metadata,
         j.acquired_at, j.heartbeat_at, j.expires_at, j.seen_at
  FROM seen LEFT JOIN judged j ON true WHERE NOT EXISTS (SELECT 1 FROM adopted)
) AS answer
"""

# set_metadata: C21. Locked as a renewal locks.
_SET_METADATA = """
WITH seen AS MATERIALIZED (
  SELECT l.task_name FROM {leases} l WHERE l.task_name = %(name)s::text
), locked AS MATERIALIZED (
  SELECT l.* FROM {leases} l WHERE l.task_name = %(name)s::text FOR NO KEY UPDATE SKIP LOCKED
), judged AS MATERIALIZED (
  SELECT locked.*, pg_catalog.clock_timestamp() AS seen_at FROM locked
), described AS (
  UPDATE {leases} l SET metadata = %(metadata)s::jsonb
  FROM judged j
  WHERE l.task_name = j.task_name AND j.lease_id = %(lease_id)s::uuid AND j.expires_at > j.seen_at
  RETURNING l.metadata
)
SELECT {record} FROM (
  SELECT CASE WHEN j.task_name IS NULL THEN 'busy' WHEN EXISTS (SELECT 1 FROM described) THEN 'held'
              WHEN j.lease_id = %(lease_id)s::uuid THEN 'expired' WHEN j.lease_id IS NULL THEN 'ended'
              ELSE 'taken' END AS verdict,
         j.task_name, j.owner_id, j.lease_id, j.fencing_token, j.transitions,
         CASE WHEN EXISTS (SELECT 1 FROM described) THEN (SELECT d.metadata FROM described d) ELSE j.metadata END
           AS metadata,
         j.acquired_at, j.heartbeat_at, j.expires_at, j.seen_at
  FROM seen LEFT JOIN judged j ON true
) AS answer
"""

# force_release: an operator ends the hold with this token, also one that is only waited out (`min_hold`).
_FORCE_RELEASE = """
WITH seen AS MATERIALIZED (
  SELECT l.task_name FROM {leases} l WHERE l.task_name = %(name)s::text
), locked AS MATERIALIZED (
  SELECT l.task_name, l.fencing_token, l.expires_at{past}
  FROM {leases} l WHERE l.task_name = %(name)s::text FOR NO KEY UPDATE SKIP LOCKED
), judged AS MATERIALIZED (
  SELECT locked.*, pg_catalog.clock_timestamp() AS seen_at FROM locked
), forced AS (
  UPDATE {leases} l SET lease_id = NULL, session_pid = NULL, session_started = NULL, expires_at = j.seen_at
  FROM judged j
  WHERE l.task_name = j.task_name AND j.fencing_token = %(fencing_token)s::bigint AND j.expires_at > j.seen_at
  RETURNING l.task_name, {released} AS told
){forced}
SELECT CASE WHEN j.task_name IS NULL THEN 'busy' WHEN f.task_name IS NOT NULL THEN 'forced'
            WHEN j.fencing_token = %(fencing_token)s::bigint THEN 'over' ELSE 'refused' END AS verdict,
       pg_catalog.date_part('epoch', j.seen_at - j.expires_at) AS over_for
FROM seen LEFT JOIN judged j ON true LEFT JOIN forced f ON true
"""

# list: C10. `starts_with` and not LIKE: a name may contain % and _.
_LIST = """
SELECT {record} FROM (
  SELECT l.*, pg_catalog.clock_timestamp() AS seen_at FROM {leases} l
  WHERE pg_catalog.starts_with(l.task_name, %(prefix)s::text)
    AND (%(ended)s::boolean OR l.lease_id IS NOT NULL OR l.expires_at > pg_catalog.clock_timestamp())
) AS found ORDER BY task_name
"""

# cleanup, inside a transaction: C3 C7. A row that is deleted takes its token along, so new rows must start above it,
# and the table lock keeps out an insert that has already read the old floor. The lock timeout keeps a queue from
# forming behind us. A name that somebody queues for stays, and lapsed tickets of others go.
_CLEANUP_LOCK = """
SELECT pg_catalog.set_config('lock_timeout', '100ms', true)
"""
_CLEANUP_TABLE = "LOCK TABLE {leases} IN SHARE ROW EXCLUSIVE MODE"
_CLEANUP_BATCH = """
WITH doomed AS MATERIALIZED (
  SELECT l.ctid AS place FROM {leases} l
  WHERE l.expires_at <= pg_catalog.clock_timestamp() - {older_than}
    AND coalesce(l.queued_until <= pg_catalog.clock_timestamp(), true)
  LIMIT 1000 FOR UPDATE SKIP LOCKED
), gone AS (
  DELETE FROM {leases} l WHERE l.ctid = ANY (ARRAY(SELECT doomed.place FROM doomed))
  RETURNING l.fencing_token, l.task_name
), forgotten AS (
  DELETE FROM {history} h USING gone g WHERE h.task_name = g.task_name
), raised AS (
  UPDATE {meta} m SET token_floor = greatest(m.token_floor, (SELECT max(gone.fencing_token) FROM gone))
  WHERE EXISTS (SELECT 1 FROM gone) RETURNING 1
)
SELECT (SELECT count(*) FROM gone)::int AS deleted, (SELECT count(*) FROM raised)::int AS raised
"""
_CLEANUP_TICKETS = """
DELETE FROM {tickets} t WHERE t.ctid = ANY (ARRAY(
  SELECT o.ctid FROM {tickets} o WHERE o.expires_at <= pg_catalog.clock_timestamp() LIMIT 1000 FOR UPDATE SKIP LOCKED))
"""

# history: C23 C10. What has ended, and what the record itself says of the last hold unless it was given back.
_HISTORY = """
SELECT task_name, owner_id, fencing_token, pg_catalog.date_part('epoch', acquired_at) AS acquired_at,
       pg_catalog.date_part('epoch', ended_at) AS ended_at, ending, pg_catalog.date_part('epoch', seen_at) AS seen_at
FROM (
  SELECT h.task_name, h.owner_id, h.fencing_token, h.acquired_at, h.ended_at, h.ending, c.seen_at
  FROM {history} h, (SELECT pg_catalog.clock_timestamp() AS seen_at) c
  UNION ALL
  SELECT l.task_name, l.owner_id, l.fencing_token, l.acquired_at,
         CASE WHEN l.expires_at <= c.seen_at THEN l.expires_at END,
         CASE WHEN l.expires_at <= c.seen_at THEN 'expired' END, c.seen_at
  FROM {leases} l, (SELECT pg_catalog.clock_timestamp() AS seen_at) c WHERE l.lease_id IS NOT NULL
) AS tenures
WHERE task_name = %(name)s::text OR (%(prefix)s::boolean AND pg_catalog.starts_with(task_name, %(name)s::text))
ORDER BY tenures.acquired_at DESC, fencing_token DESC LIMIT %(limit)s::bigint
"""

# mark: C16. Skips a row that somebody has locked: its holder may be about to release it, unseen by us; the waiter looks
# again and then marks again. Writes once per half of a mark's time, whoever waits.
_MARK = """
WITH locked AS MATERIALIZED (
  SELECT l.task_name FROM {leases} l
  WHERE l.task_name = %(name)s::text
    AND coalesce(l.waited_until < pg_catalog.clock_timestamp() + {half}, true)
  FOR NO KEY UPDATE SKIP LOCKED
), marked AS (
  UPDATE {leases} l SET waited_until = greatest(l.waited_until, pg_catalog.clock_timestamp() + {seconds})
  FROM locked WHERE l.task_name = locked.task_name
  RETURNING l.task_name
)
SELECT EXISTS (SELECT 1 FROM marked) OR EXISTS (
  SELECT 1 FROM {leases} l
  WHERE l.task_name = %(name)s::text AND l.waited_until >= pg_catalog.clock_timestamp() + {half}) AS marked
"""

LONGEST_LOCK_WAIT = 0.3
"""Seconds that `queue_lock` waits in line for a row that another session has locked."""

# queue, inside a transaction: C17. The row's lock gives the numbers their order; the second statement has a snapshot of
# its own, so it sees every ticket that was given under that lock. `queued_until` says to those who ask that there may
# be a queue; it reaches further than the tickets, so that not each renewal writes the lease's row. A release that finds
# the row locked takes the same lock.
_QUEUE_LOCK = """
SELECT l.task_name FROM {leases} l, (SELECT pg_catalog.set_config('lock_timeout', '{lock_wait}', true) AS bounded) b
WHERE b.bounded IS NOT NULL AND l.task_name = %(name)s::text FOR NO KEY UPDATE OF l
"""
_QUEUE = """
WITH clocked AS MATERIALIZED (
  SELECT pg_catalog.clock_timestamp() AS now
), lapsed AS (
  DELETE FROM {tickets} t USING clocked c
  WHERE t.task_name = %(name)s::text AND t.expires_at <= c.now AND t.ticket_id <> %(ticket_id)s::uuid
), placed AS (
  INSERT INTO {tickets} AS t (task_name, ticket_id, owner_id, number, expires_at)
  SELECT %(name)s::text, %(ticket_id)s::uuid, %(owner)s::text,
         coalesce((SELECT max(o.number) FROM {tickets} o WHERE o.task_name = %(name)s::text), 0) + 1, c.now + {ttl}
  FROM clocked c
  ON CONFLICT (task_name, ticket_id) DO UPDATE SET expires_at = excluded.expires_at,
    number = CASE WHEN t.expires_at <= excluded.expires_at - {ttl} THEN excluded.number ELSE t.number END
  RETURNING t.number
), noted AS (
  UPDATE {leases} l SET queued_until = c.now + {ttl} * 3 FROM clocked c
  WHERE l.task_name = %(name)s::text AND coalesce(l.queued_until < c.now + {ttl}, true)
)
SELECT placed.number, (
  SELECT count(*) FROM {tickets} o, clocked c
  WHERE o.task_name = %(name)s::text AND o.number < placed.number AND o.expires_at > c.now)::int AS ahead
FROM placed
"""

# try_acquire of a free name with a queue: C17. The head is read without a lock first, so that being refused writes
# nothing; whoever is at the head locks the row, reads once more in a later snapshot, and then asks as everybody does.
_HEAD = """
SELECT coalesce(t.ticket_id = %(ticket_id)s::uuid, false) AS ours, t.owner_id,
       pg_catalog.date_part('epoch', t.expires_at - pg_catalog.clock_timestamp()) AS left
FROM {tickets} t WHERE t.task_name = %(name)s::text AND t.expires_at > pg_catalog.clock_timestamp()
ORDER BY t.number LIMIT 1
"""
# queued: C17 C10.
_QUEUED = """
SELECT t.owner_id FROM {tickets} t
WHERE t.task_name = %(name)s::text AND t.expires_at > pg_catalog.clock_timestamp() ORDER BY t.number
"""
# queues: C17 C10.
_QUEUES = """
SELECT t.task_name, t.owner_id FROM {tickets} t
WHERE pg_catalog.starts_with(t.task_name, %(prefix)s::text) AND t.expires_at > pg_catalog.clock_timestamp()
ORDER BY t.task_name, t.number
"""
_TURN_LOCK = "SELECT 1 FROM {leases} l WHERE l.task_name = %(name)s::text FOR UPDATE SKIP LOCKED"
_SERVED = "DELETE FROM {tickets} t WHERE t.task_name = %(name)s::text AND t.ticket_id = %(ticket_id)s::uuid"

# leave_queue: C17 C16.
_LEAVE_QUEUE = """
WITH left_it AS (
  DELETE FROM {tickets} t WHERE t.task_name = %(name)s::text AND t.ticket_id = %(ticket_id)s::uuid
  RETURNING t.expires_at > pg_catalog.clock_timestamp() AS live
), judged AS MATERIALIZED (
  SELECT l.*, pg_catalog.clock_timestamp() AS seen_at FROM {leases} l WHERE l.task_name = %(name)s::text
)
SELECT left_it.live, (SELECT {released_by_leaving} FROM judged j) AS told FROM left_it
"""


@dataclass(frozen=True, slots=True)
class Marking:
    """What the statements write about the holder's session: nothing, unless a backend has such sessions.

    Attributes:
        session_pid, session_started: the session of a new hold.
        renewed: what a renewal changes about it, with a comma before.
        forfeit: when a hold that has not lapsed, in the locked row `l`, is free all the same.
    """

    session_pid: str = "NULL"
    session_started: str = "NULL"
    renewed: str = ""
    forfeit: str = "false"


PLAIN = Marking()


@dataclass(frozen=True, slots=True)
class Statements:
    """Every statement, rendered for one pair of tables."""

    look: str
    try_acquire: str
    try_acquire_many: str
    why: str
    raise_epoch: str
    renew: str
    present: str
    release: str
    adopt: str
    set_metadata: str
    force_release: str
    list: str
    history: str
    cleanup_lock: str
    cleanup_table: str
    cleanup_batch: str
    cleanup_tickets: str
    mark: str
    queue_lock: str
    queue: str
    head: str
    queued: str
    queues: str
    turn_lock: str
    served: str
    leave_queue: str

    @classmethod
    def of(
        cls,
        names: TableNames,
        protocol: int,
        *,
        lineage: bool = True,
        marking: Marking = PLAIN,
        notify: bool = True,
        history: int = 0,
    ) -> Statements:
        """Render for the tables in `names`, whose schema must be known by now.

        Args:
            names: where the tables are.
            protocol: what the mark must say.
            lineage: whether the server can tell its lineage.
            marking: what is written about sessions.
            notify: whether waiters are told.
            history: how many holds that have ended are kept for each name.
        """
        return _all(names, protocol, lineage=lineage, marking=marking, notify=notify, history=history)


@lru_cache(maxsize=32)  # each client of a process wants the same
def _all(names: TableNames, protocol: int, **knobs: Any) -> Statements:
    templates = {field.name: globals()[f"_{field.name.upper()}"] for field in fields(Statements)}
    return Statements(**{verb: _rendered(template, names, protocol, **knobs) for verb, template in templates.items()})


def lineage_of(names: TableNames) -> str:
    """Return the expression that says which server this is, by which history, and which table of it.

    The system identifier changes with `initdb` (a dump that is restored elsewhere, pg_upgrade), the timeline with every
    promotion and recovery to a point in time, the database and the table with a dump that is restored on the spot. The
    timeline is that of the write-ahead log: `pg_control_checkpoint()` still shows the old one after a promotion.
    """
    return _LINEAGE.format(table_oid=_table_oid(names))


def _table_oid(names: TableNames) -> str:
    return f"'{names.leases}'::pg_catalog.regclass::pg_catalog.oid"


def _rendered(
    template: str,
    names: TableNames,
    protocol: int,
    *,
    lineage: bool,
    marking: Marking,
    notify: bool,
    history: int,
) -> str:
    ttl = "j.ttl" if template is _RENEW else "%(ttl)s::float8"
    verdict = "'seen'" if template is _LIST else "verdict"
    longest = f"CASE WHEN %(longest)s::boolean THEN {_LONGEST_TTL.format(leases=names.leases)} END"
    return template.format(
        leases=names.leases,
        meta=names.meta,
        tickets=names.tickets,
        history=names.history,
        past=_ENDING_OF_A_STRANGERS if history else "",
        taken_over=_ended(names, history, "died", "taken"),
        given_back=_ended(names, history, "released", "released"),
        handed_over=_ended(names, history, "transferred", "adopted"),
        forced=_ended(names, history, "forced", "forced"),
        protocol=protocol,
        session_pid=marking.session_pid,
        session_started=marking.session_started,
        renewed_mark=marking.renewed,
        forfeit=marking.forfeit,
        judged=VERDICT,
        record=RECORD.format(verdict=verdict),
        ttl=_SECONDS.format(ttl),
        min_hold=_SECONDS.format("%(min_hold)s::float8"),
        granted=_told(names, "granted", notify),
        released=_told(names, "released", notify),
        released_by_leaving=_told(names, "released", notify, row="j"),
        seconds=_SECONDS.format("%(seconds)s::float8"),
        half=_SECONDS.format("%(seconds)s::float8 / 2"),
        older_than=_SECONDS.format("%(older_than)s::float8"),
        quarantine=_SECONDS.format(f"greatest(%(quarantine)s::float8, {longest})"),
        a_while=_SECONDS.format("0.1"),
        lock_wait=f"{LONGEST_LOCK_WAIT * 1000:.0f}ms",
        table_oid=_table_oid(names),
        key=f'pg_catalog.hashtextextended(%(name)s::text COLLATE "C", {_table_oid(names)}::int8)',
        key_of_wanted=f'pg_catalog.hashtextextended(w.name COLLATE "C", {_table_oid(names)}::int8)',
        lineage=lineage_of(names) if lineage else "NULL::text",
        unknown="false" if lineage else "true",
    )


def _ended(names: TableNames, keep: int, ending: str, change: str) -> str:
    """Return the steps that remember how a hold ended which was not over yet; nothing where nothing is kept."""
    return _ENDED.format(history=names.history, keep=keep, ending=ending, change=change) if keep else ""


def _told(names: TableNames, what: str, notify: bool, *, row: str = "l") -> str:
    return _TOLD.format(what=what, row=row, channel=names.channel) if notify else "NULL::text"
