"""What else on a PostgreSQL can stand in the way of leases: for a doctor, one `Check` a line.

Standbys that commits wait for, sessions that hold locks or old snapshots, limits, rights that others have, and records
that our statements do not write. What a role may not see of others is left out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pglease.backends.checks import Check
from pglease.backends.postgres_link import Link
from pglease.backends.postgres_look import Look
from pglease.backends.postgres_schema import quoted

BLINK = 0.3
"""Seconds between two looks at locks: a cleanup holds one for less than 0.05."""
LONG = 60.0
"""Seconds from which a transaction that has locked our rows is worth a word; the default ttl."""
VERY_LONG = 3600.0
"""Seconds from which a transaction is worth a word because dead rows outlive it."""
FEW = 5
"""Connections that a client may open at once, its renewer's among them."""
SOON = 30 * 86400.0
MANY_ENDED = 100_000
AHEAD = 2.0
"""Seconds in the store's own future that no renewal can have been made at, unless its clock went back."""
HIGHEST_TOKEN = (1 << 63) - (1 << 32)

_STRONG = frozenset({"ShareLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock"})
"""Table locks behind which nobody writes."""

_AROUND = """
SELECT pg_catalog.jsonb_build_object(
  'waited_for', pg_catalog.current_setting('synchronous_standby_names'),
  'commit', pg_catalog.current_setting('synchronous_commit'),
  'standbys', (
    SELECT coalesce(pg_catalog.jsonb_agg(r.sync_state), '[]') FROM pg_catalog.pg_stat_replication r
    WHERE NOT EXISTS (
      SELECT 1 FROM pg_catalog.pg_replication_slots s WHERE s.active_pid = r.pid AND s.slot_type = 'logical')),
  'limits', pg_catalog.jsonb_build_array(
    pg_catalog.jsonb_build_array('the server',
      (SELECT pg_catalog.sum(d.numbackends) FROM pg_catalog.pg_stat_database d),
      pg_catalog.current_setting('max_connections')::int
        - pg_catalog.current_setting('superuser_reserved_connections')::int
        - coalesce(pg_catalog.current_setting('reserved_connections', true)::int, 0)),
    pg_catalog.jsonb_build_array('the database',
      (SELECT d.numbackends FROM pg_catalog.pg_stat_database d WHERE d.datname = pg_catalog.current_database()),
      (SELECT d.datconnlimit FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())),
    pg_catalog.jsonb_build_array('the role',
      (SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_activity a WHERE a.usename = session_user),
      (SELECT r.rolconnlimit FROM pg_catalog.pg_roles r WHERE r.rolname = session_user))),
  'user', session_user,
  'password_lasts', (
    SELECT CASE WHEN pg_catalog.isfinite(r.rolvaliduntil)
      THEN pg_catalog.date_part('epoch', r.rolvaliduntil - pg_catalog.clock_timestamp()) END
    FROM pg_catalog.pg_roles r WHERE r.rolname = session_user),
  'by_anybody', pg_catalog.has_table_privilege(
    'public', pg_catalog.to_regclass(%(leases)s::text)::oid, 'INSERT, UPDATE, DELETE, TRUNCATE'),
  'row_security', pg_catalog.row_security_active(pg_catalog.to_regclass(%(leases)s::text)::oid),
  'oldest', (
    SELECT pg_catalog.jsonb_build_array(
      o.who, pg_catalog.date_part('epoch', pg_catalog.clock_timestamp() - o.since), o.how)
    FROM (
      SELECT pg_catalog.format('process %%s of %%s', a.pid, a.usename) AS who, a.xact_start AS since,
             pg_catalog.format('SELECT pg_terminate_backend(%%s)', a.pid) AS how
      FROM pg_catalog.pg_stat_activity a
      WHERE a.datname = pg_catalog.current_database() AND a.backend_xmin IS NOT NULL
        AND a.pid <> pg_catalog.pg_backend_pid()
      UNION ALL
      SELECT pg_catalog.format('the prepared transaction %%L', p.gid), p.prepared,
             pg_catalog.format('ROLLBACK PREPARED %%L', p.gid)
      FROM pg_catalog.pg_prepared_xacts p WHERE p.database = pg_catalog.current_database()) o
    ORDER BY o.since LIMIT 1)
)::text AS around
"""

# Who else holds a lock on our tables, in which mode, and since when its transaction is open, as far as that is told.
_LOCKS = """
SELECT coalesce(k.pid, 0), k.mode, a.usename::text, a.application_name,
       pg_catalog.date_part('epoch', pg_catalog.clock_timestamp() - a.xact_start)
FROM pg_catalog.pg_locks k LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = k.pid
WHERE k.locktype = 'relation' AND k.granted AND k.pid IS DISTINCT FROM pg_catalog.pg_backend_pid()
  AND k.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())
  AND k.relation IN (pg_catalog.to_regclass(%(leases)s::text)::oid, pg_catalog.to_regclass(%(meta)s::text)::oid)
ORDER BY k.pid
"""

# What is in the table: how much of it has ended, what lies in the future, and what no statement of ours writes.
_RECORDS = """
SELECT pg_catalog.count(*), pg_catalog.count(*) FILTER (WHERE r.ended),
       pg_catalog.max(r.ahead) FILTER (WHERE NOT r.ended),
       pg_catalog.count(*) FILTER (WHERE r.odd), pg_catalog.min(r.task_name) FILTER (WHERE r.odd)
FROM (
  SELECT l.task_name, l.expires_at <= pg_catalog.clock_timestamp() AS ended,
    CASE WHEN pg_catalog.isfinite(l.heartbeat_at)
      THEN pg_catalog.date_part('epoch', l.heartbeat_at - pg_catalog.clock_timestamp()) END AS ahead,
    l.expires_at = 'infinity' OR NOT pg_catalog.isfinite(l.heartbeat_at) OR l.fencing_token < 0
      OR l.fencing_token >= %(highest)s::bigint OR pg_catalog.length(l.task_name) NOT BETWEEN 1 AND 255
      OR l.task_name ~ '[[:cntrl:]]' AS odd
  FROM {leases} l) r
"""


@dataclass(frozen=True, slots=True)
class _Around:
    """What the server told."""

    waited_for: str
    commit: str
    standbys: Sequence[str | None]
    limits: Sequence[tuple[str, int | None, int | None]]
    user: str
    password_lasts: float | None
    by_anybody: bool | None
    row_security: bool | None
    oldest: tuple[str, float, str] | None


@dataclass(frozen=True, slots=True)
class _Lock:
    """A table lock of somebody else's. `pid` is 0 for a prepared transaction's."""

    pid: int
    mode: str
    role: str | None
    application: str | None
    open_for: float | None

    @property
    def who(self) -> str:
        """Say who has it."""
        if not self.pid:
            return "a prepared transaction"
        named = f" ({self.application})" if self.application else ""
        return f"process {self.pid} of {self.role or 'somebody'}{named}"

    @property
    def remedy(self) -> str:
        """Say how to end it."""
        if not self.pid:
            return "SELECT gid FROM pg_prepared_xacts, then COMMIT PREPARED or ROLLBACK PREPARED"
        return f"wait for its end, or SELECT pg_terminate_backend({self.pid})"


def about_neighbours(link: Link, seen: Look) -> Iterator[Check]:
    """Yield what was found around the tables of `seen`, which are ours."""
    names = {"leases": seen.names.leases, "meta": seen.names.meta}
    found = _Around(**json.loads(link.rows(_AROUND, names)[0][0]))
    yield _standbys(found)
    yield _connections(found)
    yield _password(found)
    yield from _others_rights(found, seen)
    yield _snapshots(found)
    locks = _locks(link, names)
    yield from locks
    is_locked = any(lock.status == "fail" for lock in locks)
    if seen.may("SELECT", of=seen.table) and not seen.is_published and not is_locked:
        yield from _records(link, seen)


def _standbys(found: _Around) -> Check:
    count = len(found.standbys)
    waits = bool(found.waited_for.strip()) and found.commit not in {"off", "local"}
    if waits and all(state in {"async", "potential"} for state in found.standbys):
        text = f"each commit waits for a standby of synchronous_standby_names = {found.waited_for!r}, and none is there"
        remedy = "connect one, or ALTER SYSTEM SET synchronous_standby_names = '' and SELECT pg_reload_conf()"
        return Check("standbys", "fail", text, remedy)
    if not count:
        return Check("standbys", "ok", "none: no failover can lose a grant")
    if waits:
        return Check("standbys", "ok", f"{count} connected; commits wait for {found.waited_for}")
    text = f"{count} connected, and no commit waits for them: a failover may lose the last grants, but no token"
    return Check("standbys", "ok", f"{text} (failover_quarantine lets nobody be granted twice)")


def _connections(found: _Around) -> Check:
    left = {
        what: limit - used
        for what, used, limit in found.limits
        if limit is not None and limit >= 0 and used is not None
    }
    scarce, room = min(left.items(), key=lambda each: each[1])
    if room < FEW:
        text = f"{scarce} has room for {max(0, room)} more connections: a renewal that has to connect anew is refused"
        return Check("connections", "warn", text, "raise the limit, end idle sessions, or connect through a pooler")
    return Check("connections", "ok", f"room for {room} more")


def _password(found: _Around) -> Check:
    lasts = found.password_lasts
    if lasts is None:
        return Check("password", "ok", f"that of {found.user} does not expire")
    said = f"the password of {found.user} {'expires' if lasts > 0 else 'expired'}"
    text = f"{said} {_days(lasts)}: from then on a renewal that has to connect anew is refused"
    if lasts < SOON:
        return Check("password", "warn", text, f"ALTER ROLE {quoted(found.user)} PASSWORD … VALID UNTIL …")
    return Check("password", "ok", text)


def _others_rights(found: _Around, seen: Look) -> Iterator[Check]:
    if found.by_anybody:
        remedy = f"REVOKE INSERT, UPDATE, DELETE, TRUNCATE ON {seen.names.leases} FROM PUBLIC"
        yield Check("rights", "warn", "everybody who can connect may end leases, and forge them", remedy)
    if found.row_security:
        text = f"row security hides records from {seen.role}: a lease in a hidden one cannot be taken, nor seen"
        remedy = f"a policy that shows {seen.role} every name it uses, or ALTER ROLE {quoted(seen.role)} BYPASSRLS"
        yield Check("row security", "warn", text, remedy)
    else:
        yield Check("row security", "ok", f"hides nothing from {seen.role}")


def _snapshots(found: _Around) -> Check:
    if found.oldest is None or found.oldest[1] < VERY_LONG:
        return Check("snapshots", "ok", "no transaction here has been open for long, as far as this role can see")
    who, since, how = found.oldest
    text = f"a transaction has been open for {_span(since)} ({who}): until it ends, each renewal leaves a dead row"
    return Check("snapshots", "warn", text, how)


def _locks(link: Link, names: Mapping[str, str]) -> list[Check]:
    """Look twice: nobody is reported who only passed by."""
    first = _ask_for_locks(link, names)
    lasting = [lock for lock in first if lock.mode in _STRONG]
    if lasting:
        time.sleep(BLINK)
        still = {(lock.pid, lock.mode) for lock in _ask_for_locks(link, names)}
        lasting = [lock for lock in lasting if (lock.pid, lock.mode) in still]
    rows = [lock for lock in first if lock.mode in {"RowShareLock", "RowExclusiveLock"} and (lock.open_for or 0) > LONG]
    checks = [
        Check("locks", "fail", f"{lock.who} holds {lock.mode} on our table: nothing is granted or renewed", lock.remedy)
        for lock in lasting
    ] + [
        Check("locks", "warn", f"{lock.who} may have locked records for {_span(lock.open_for or 0)}", lock.remedy)
        for lock in rows
    ]
    return list(dict.fromkeys(checks)) or [Check("locks", "ok", "nobody keeps writers from the table")]


def _ask_for_locks(link: Link, names: Mapping[str, str]) -> list[_Lock]:
    return [_Lock(*row) for row in link.rows(_LOCKS, names)]


def _records(link: Link, seen: Look) -> Iterator[Check]:
    statement = _RECORDS.format(leases=seen.names.leases)
    ((count, ended, ahead, odd, name),) = link.rows(statement, {"highest": HIGHEST_TOKEN})
    troubles = []
    if odd:
        text = f"{odd} were not written by pglease, among them that of {name!r}: nobody may get such a lease again"
        remedy = f"find out who writes to {seen.names.leases}, and delete the record there"
        troubles.append(Check("records", "warn", text, remedy))
    if ahead is not None and ahead > AHEAD:
        text = f"a hold was renewed {_span(ahead)} in the future: the server's clock was set back"
        remedy = "pglease release NAME --token N, for a hold whose holder is gone; let NTP slew the clock, not step it"
        troubles.append(Check("records", "warn", f"{text}; of those who die now, leases last that much longer", remedy))
    if ended > MANY_ENDED:
        remedy = "pglease cleanup --older-than 7d, now and then"
        troubles.append(Check("records", "warn", f"{ended} of {count} have ended", remedy))
    yield from troubles or [Check("records", "ok", f"{count - ended} held, {ended} ended")]


def _span(seconds: float) -> str:
    """Write a span for people."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.3g} s"


def _days(seconds: float) -> str:
    return f"in {_span(seconds)}" if seconds > 0 else f"{_span(-seconds)} ago"
