"""What a doctor finds on a PostgreSQL: one `Check` a line, each with what to do.

A check that fails does not keep the others from being made. Only the probe writes, and only where all before it allows
leases.
"""

from __future__ import annotations

import ipaddress
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

from pglease.backends.checks import Check
from pglease.backends.postgres_epochs import Lineage, ask_lineage
from pglease.backends.postgres_link import Link
from pglease.backends.postgres_look import CHANGING, Finding, Look, Mark, findings, look
from pglease.backends.postgres_neighbours import about_neighbours
from pglease.backends.postgres_schema import RAISING, grant, quoted
from pglease.schema import TableNames

Lend = Callable[[], AbstractContextManager[Link]]

PROBE_NAME = "pglease:doctor"
"""What the probe acquires. Always the same name, so that many visits leave one tombstone."""

OLDEST_SERVER = 140000
_MANY_UPDATES = 1000
_HOT_ENOUGH = 0.4
"""A grant changes the key and is never HOT, its release and renewals are: leases never renewed stand at a half."""
_MANY_DEAD = 10_000

_SETTINGS = (
    "autovacuum",
    "default_transaction_isolation",
    "default_transaction_read_only",
    "fsync",
    "full_page_writes",
    "idle_in_transaction_session_timeout",
    "idle_session_timeout",
    "lock_timeout",
    "search_path",
    "server_encoding",
    "statement_timeout",
    "synchronous_commit",
    "tcp_keepalives_count",
    "tcp_keepalives_idle",
    "tcp_keepalives_interval",
    "tcp_user_timeout",
    "transaction_timeout",
)

# What the server says about itself and this session. Time-outs come in milliseconds, keepalives in seconds.
_SERVER = """
SELECT pg_catalog.jsonb_build_object(
  'now', extract(epoch FROM pg_catalog.clock_timestamp())::float8,
  'pid', pg_catalog.pg_backend_pid(),
  'version', pg_catalog.current_setting('server_version'),
  'version_number', pg_catalog.current_setting('server_version_num')::int,
  'in_recovery', pg_catalog.pg_is_in_recovery(),
  'read_only', pg_catalog.current_setting('transaction_read_only')::boolean,
  'client', pg_catalog.host(pg_catalog.inet_client_addr()),
  'encrypted', (
    SELECT coalesce(pg_catalog.bool_or(e.found), false) FROM (
      SELECT s.ssl AS found FROM pg_catalog.pg_stat_ssl s WHERE s.pid = pg_catalog.pg_backend_pid()
      UNION ALL
      SELECT g.encrypted FROM pg_catalog.pg_stat_gssapi g WHERE g.pid = pg_catalog.pg_backend_pid()) e),
  'settings', (
    SELECT pg_catalog.jsonb_object_agg(s.name, s.setting) FROM pg_catalog.pg_settings s
    WHERE s.name = ANY (%(names)s::text[])),
  'first', (
    SELECT pg_catalog.jsonb_object_agg(s.name, s.reset_val) FROM pg_catalog.pg_settings s
    WHERE s.name = ANY (%(names)s::text[]))
)::text AS server
"""

# How the lease table has fared since its statistics began.
_USE = """
SELECT s.n_live_tup, s.n_dead_tup, s.n_tup_upd, s.n_tup_hot_upd, pg_catalog.pg_table_size(s.relid)::bigint
FROM pg_catalog.pg_stat_all_tables s WHERE s.schemaname = %(schema)s::text AND s.relname = %(table)s::text
"""


CLOCKS_APART = 2.0
"""Seconds from which two clocks that differ are worth a word."""


@dataclass(frozen=True, slots=True)
class _Server:
    """The server's answers. `first` are the settings as the session began, before anybody's SET.

    `client` is where it sees this host; None on a local socket.
    """

    now: float
    pid: int
    version: str
    version_number: int
    in_recovery: bool
    read_only: bool
    client: str | None
    encrypted: bool
    settings: Mapping[str, str]
    first: Mapping[str, str]
    pid_of_connection: int | None
    ahead: float
    round_trip: float

    def timeout(self, setting: str) -> float:
        """Return a time-out in seconds, 0 for none."""
        return int(self.settings.get(setting, "0")) / 1000


def diagnose(
    lend: Lend, names: TableNames, probe: Callable[[], None] | None = None, *, ttl: float = 60.0
) -> Iterator[Check]:
    """Look at everything that leases depend on, and yield what was found, one thing at a time.

    Args:
        lend: lends a connection, the backend's own or a borrowed one.
        names: where the tables are, with or without a schema.
        probe: acquires and releases `PROBE_NAME` once; None leaves that out. Not called where leases cannot be kept.
        ttl: seconds, the lease length that the server's time-outs are compared with; 60 as everywhere.
    """
    started = time.perf_counter()
    healthy = True
    try:
        with lend() as link:
            took = time.perf_counter() - started
            yield Check("reachable", "ok", f"connected in {_short(took)}")
            for check in _at_the_bedside(link, names, ttl):
                healthy = healthy and check.status != "fail"
                yield check
    except Exception as error:  # noqa: BLE001  # whatever it is, a doctor reports it
        yield _failed(
            "reachable", error, "check that the server runs, that the address is the primary's, and the credentials"
        )
        return
    if probe is not None:
        yield (
            _probed(probe, ttl) if healthy else Check("acquire and release", "warn", "not tried: something above fails")
        )


def _at_the_bedside(link: Link, names: TableNames, ttl: float) -> Iterator[Check]:
    server = None
    try:
        server = _ask(link)
    except Exception as error:  # noqa: BLE001  # a pooler or a fork of PostgreSQL may refuse anything
        yield _failed("server", error, "")
    else:
        yield from _about_server(server)
        yield from _about_time(server, ttl)
    try:
        seen = look(link, names)
    except Exception as error:  # noqa: BLE001  # as above
        yield _failed("table", error, "")
        return
    yield from _about_tables(seen)
    yield from _about_tokens(link, seen)
    if seen.table is None or seen.is_foreign:
        return
    is_locked = False
    for check in _about_neighbours(link, seen):
        is_locked = is_locked or (check.name == "locks" and check.status == "fail")
        yield check
    if not is_locked:  # the size of a table that is locked is waited for
        yield from _about_use(link, server, seen)


def _ask(link: Link) -> _Server:
    sent, started = time.time(), time.perf_counter()
    answer = json.loads(link.rows(_SERVER, {"names": list(_SETTINGS)})[0][0])
    round_trip = time.perf_counter() - started
    info = getattr(link.connection, "info", None)
    ahead = answer["now"] - (sent + round_trip / 2)
    return _Server(**answer, pid_of_connection=getattr(info, "backend_pid", None), ahead=ahead, round_trip=round_trip)


def _about_server(server: _Server) -> Iterator[Check]:
    yield _version(server)
    yield _writable(server)
    yield _pooler(server)
    yield _encryption(server)
    yield _durability(server)
    yield _isolation(server)
    yield _encoding(server)
    yield _search_path(server)


def _version(server: _Server) -> Check:
    if server.version_number < OLDEST_SERVER:
        return Check("server version", "fail", f"PostgreSQL {server.version}", "upgrade to PostgreSQL 14 or later")
    return Check("server version", "ok", f"PostgreSQL {server.version}")


def _writable(server: _Server) -> Check:
    if server.in_recovery:
        return Check(
            "primary", "fail", "this is a replica: leases are granted by the primary alone", "connect to the primary"
        )
    if server.read_only:
        remedy = "unset default_transaction_read_only for this role or database"
        return Check("primary", "fail", "sessions are read-only (default_transaction_read_only)", remedy)
    return Check("primary", "ok", "this server takes writes")


def _pooler(server: _Server) -> Check:
    if server.pid_of_connection in (None, server.pid):
        return Check("pooler", "ok", "no sign of one")
    text = "a pooler stands in between: in transaction mode leases work, hybrid and prompt wake-ups do not"
    return Check("pooler", "warn", text, "connect directly for those")


def _encryption(server: _Server) -> Check:
    if server.encrypted:
        return Check("encryption", "ok", "what goes to and from the server is encrypted")
    if server.client is None or ipaddress.ip_address(server.client).is_loopback:
        return Check("encryption", "ok", "none, and nothing leaves this host")
    text = f"none between the server and {server.client}: who is on the way may read the password, and end leases"
    return Check("encryption", "warn", text, "sslmode=verify-full and sslrootcert=… in the address")


def _durability(server: _Server) -> Check:
    if server.settings.get("fsync") == "off":
        return Check("durability", "warn", "fsync is off: a crash of the host may lose everything", "set fsync = on")
    if server.settings.get("synchronous_commit") == "off":
        text = "synchronous_commit is off: a crash may lose the last grants, and their tokens are granted again"
        return Check("durability", "warn", text, "set synchronous_commit = on for this role or database")
    if server.settings.get("full_page_writes") == "off":
        text = "full_page_writes is off: a crash of the host may leave torn pages"
        return Check("durability", "warn", text, "set full_page_writes = on")
    return Check("durability", "ok", f"synchronous_commit is {server.settings.get('synchronous_commit')}")


def _isolation(server: _Server) -> Check:
    default = server.first.get("default_transaction_isolation", "read committed")
    said = "" if default == "read committed" else "; leases use read committed all the same"
    return Check("isolation", "ok", f"the default is {default}{said}")


def _encoding(server: _Server) -> Check:
    encoding = server.settings.get("server_encoding", "UTF8")
    if encoding != "UTF8":
        text = f"the database's encoding is {encoding}: names and labels outside of it are refused or garbled"
        return Check("encoding", "warn", text, "use a database with encoding UTF8, or names in ASCII")
    return Check("encoding", "ok", "UTF8")


def _search_path(server: _Server) -> Check:
    path = [part.strip().strip('"') for part in server.settings.get("search_path", "").split(",")]
    before = path[: path.index("pg_catalog")] if "pg_catalog" in path else []
    if before:
        text = f"{', '.join(before)} stands before pg_catalog: whoever may create there can change what operators mean"
        return Check("search_path", "warn", text, "put pg_catalog first, or leave it out")
    return Check("search_path", "ok", ", ".join(path))


def _about_time(server: _Server, ttl: float) -> Iterator[Check]:
    direction = "ahead of" if server.ahead >= 0 else "behind"
    text = f"the server is {_short(abs(server.ahead))} {direction} this host (± {_short(server.round_trip / 2)})"
    if abs(server.ahead) > CLOCKS_APART + server.round_trip:
        remedy = "let both hosts follow NTP: logs and histories of the two do not fit together"
        yield Check("clock", "warn", f"{text}; leases do not care", remedy)
    else:
        yield Check("clock", "ok", f"{text}; leases do not care")
    yield from _timeouts(server, ttl)
    yield _keepalives(server, ttl)


def _timeouts(server: _Server, ttl: float) -> Iterator[Check]:
    said = []
    for setting, least, harm in (
        ("statement_timeout", 1.0, "a statement that waits is cut off, and its outcome is unknown"),
        ("transaction_timeout", 1.0, "a statement that waits is cut off, and its outcome is unknown"),
        ("lock_timeout", 0.1, "a start beside another, and cleanup, give up early"),
        ("idle_session_timeout", ttl / 3, "every renewal has to connect anew, and a hybrid lease is lost"),
    ):
        found = server.timeout(setting)
        if 0 < found < least:
            text = f"{setting} is {_short(found)}, under {_short(least)}: {harm}"
            yield Check("time-outs", "warn", text, f"ALTER ROLE … SET {setting} = '{max(1, round(least * 2))}s'")
        elif found:
            said.append(f"{setting} {_short(found)}")
    idle = server.timeout("idle_in_transaction_session_timeout")
    said.append(
        f"a forgotten guard keeps a takeover out for {_short(idle) if idle else 'as long as its transaction is open'}"
    )
    yield Check("time-outs", "ok", f"for a ttl of {ttl:g} s: {', '.join(said)}")


def _keepalives(server: _Server, ttl: float) -> Check:
    idle, interval, count = (
        int(server.settings.get(f"tcp_keepalives_{each}", "0")) for each in ("idle", "interval", "count")
    )
    if idle == 0:
        return Check("keepalives", "ok", "a local socket: the server notices a dead client at once")
    notices = idle + interval * count
    later = " (later than the ttl: its session, not its lease, lasts that long)" if notices > ttl else ""
    return Check("keepalives", "ok", f"the server notices a silent client after {_short(notices)}{later}")


def _about_tables(seen: Look) -> Iterator[Check]:
    found = list(findings(seen))
    indexes = [each for each in found if each.about_index]
    table = [each for each in found if not each.about_index]
    yield from (_as_check("table", each) for each in table)
    if not any(each.blocks for each in table) and seen.mark is not None:
        mark = f"layout {seen.mark.version}, protocol {seen.mark.protocol}"
        yield Check("table", "ok", f"{seen.shown}: {mark}, new names start above token {seen.mark.token_floor}")
    if seen.table is None or seen.is_foreign:
        return
    yield from (_as_check("indexes", each) for each in indexes)
    if not indexes:
        yield Check("indexes", "ok", f"none on {', '.join(sorted(CHANGING))}")
    yield from _rights(seen)


def _about_tokens(link: Link, seen: Look) -> Iterator[Check]:
    """Say whether tokens would go on rising after a failover, and whether one was just seen."""
    mark = seen.mark
    if mark is None:
        return
    try:
        lineage = ask_lineage(link, seen.names)
    except Exception as error:  # noqa: BLE001  # whatever it is, a doctor reports it
        yield _failed("tokens", error, "")
        return
    if mark.quarantined:
        text = f"in quarantine after a failover or a restore: nothing is granted for another {_short(mark.quarantined)}"
        yield Check("tokens", "warn", text, "wait, or shorten it: UPDATE … SET quarantined_until = now()")
    yield _epochs(seen, mark, lineage)


def _epochs(seen: Look, mark: Mark, lineage: Lineage) -> Check:
    moved = lineage.present is not None and lineage.present != mark.lineage
    if lineage.untold:
        text = f"the server cannot tell its timeline ({lineage.untold}): no failover and no restore is noticed"
        remedy = "GRANT EXECUTE on these functions, or run `pglease bump-epoch` after each failover and restore"
        return Check("tokens", "warn", text, remedy)
    if not seen.may("LOCK", of=seen.meta):
        text = "another server granted last: a new epoch must begin" if moved else "after a failover a new epoch begins"
        remedy = f"pglease bump-epoch by another role, or {grant(RAISING, seen.names.meta, seen.role)}"
        return Check("tokens", "fail" if moved else "warn", f"{text}, which {seen.role} may not do", remedy)
    if moved:
        return Check(
            "tokens", "ok", f"epoch {mark.epoch}; another server granted last: the next grant begins a new one"
        )
    return Check("tokens", "ok", f"epoch {mark.epoch}; after a failover or a restore the next one begins by itself")


def _as_check(name: str, finding: Finding) -> Check:
    return Check(name, "fail" if finding.blocks else "warn", finding.text, finding.remedy)


def _rights(seen: Look) -> Iterator[Check]:
    """Say which verbs this role may use. Without those of `cleanup` nothing is lost but tidiness."""
    if not seen.may_use:
        remedy = f'GRANT USAGE ON SCHEMA "{seen.names.schema}" TO {quoted(seen.role)}'
        yield Check("rights", "fail", f"{seen.role} may not use the schema {seen.names.schema}", remedy)
        return
    yield _right(seen, "list, show", ["SELECT"], ["SELECT"])
    yield _right(seen, "acquire, renew, release", ["SELECT", "INSERT", "UPDATE"], ["SELECT"])
    yield _right(seen, "cleanup", ["SELECT", "DELETE", "LOCK"], ["SELECT", "LOCK"], needed=False)

    lacking = ", ".join(each for each in ("SELECT", "INSERT", "DELETE") if not seen.may(each, of=seen.history))
    if lacking:
        text = f"{seen.role} may not keep a history; only clients with history=… need it, and those that clean up"
        yield Check("rights", "ok", text, grant(lacking, seen.names.history, seen.role))
    else:
        yield Check("rights", "ok", f"{seen.role} may keep a history")


def _right(seen: Look, verbs: str, on_table: list[str], on_meta: list[str], *, needed: bool = True) -> Check:
    lacking = [
        grant(", ".join(missing).replace("LOCK", f"UPDATE ({column})"), table, seen.role)
        for table, about, rights, column in (
            (seen.names.leases, seen.table, on_table, "heartbeat_at"),
            (seen.names.meta, seen.meta, on_meta, "token_floor"),
        )
        if (missing := [right for right in rights if not seen.may(right, of=about)])
    ]
    if lacking:
        said = "" if needed else "; leases do not need that of this role"
        return Check("rights", "fail" if needed else "ok", f"{seen.role} may not {verbs}{said}", "; ".join(lacking))
    return Check("rights", "ok", f"{seen.role} may {verbs}")


def _about_neighbours(link: Link, seen: Look) -> Iterator[Check]:
    try:
        yield from about_neighbours(link, seen)
    except Exception as error:  # noqa: BLE001  # a fork of PostgreSQL may lack any of these views
        yield _failed("neighbours", error, "look at standbys, locks and limits by hand", status="warn")


def _about_use(link: Link, server: _Server | None, seen: Look) -> Iterator[Check]:
    try:
        rows = link.rows(_USE, {"schema": seen.names.schema, "table": seen.names.table})
    except Exception as error:  # noqa: BLE001  # statistics may be out of reach; leases do not need them
        yield _failed("use", error, "", status="warn")
        return
    if rows:
        yield _hot(*map(int, rows[0][2:4]))
        live, dead, _, _, size = map(int, rows[0])
        yield _bloat(server, live, dead, size)


def _hot(updates: int, hot: int) -> Check:
    if not updates:
        return Check("HOT updates", "ok", "no update yet")
    text = f"{hot / updates:.0%} of {updates} updates"
    if updates > _MANY_UPDATES and hot / updates < _HOT_ENOUGH:
        remedy = "drop indexes on changing columns, set fillfactor = 50, end transactions that stay open for long"
        return Check("HOT updates", "warn", f"only {text} were HOT", remedy)
    return Check("HOT updates", "ok", f"{text} were HOT")


def _bloat(server: _Server | None, live: int, dead: int, size: int) -> Check:
    text = f"{live} rows and {dead} dead ones in {size / 1024:.0f} kB"
    if server is not None and server.settings.get("autovacuum") == "off":
        return Check("vacuum", "warn", f"autovacuum is off; {text}", "set autovacuum = on")
    if dead > _MANY_DEAD and dead > 10 * live:
        return Check("vacuum", "warn", text, "end transactions that stay open for long, then VACUUM the table")
    return Check("vacuum", "ok", text)


def _probed(probe: Callable[[], None], ttl: float) -> Check:
    started = time.perf_counter()
    try:
        probe()
    except Exception as error:  # noqa: BLE001  # whatever it is, a doctor reports it
        return _failed("acquire and release", error, "")
    took = time.perf_counter() - started
    text = f"{_short(took)} for both, the first time"
    if took > ttl / 10:
        return Check("acquire and release", "warn", text, "look for load, locks on the table, or a slow network")
    return Check("acquire and release", "ok", text)


def _failed(name: str, error: Exception, remedy: str, *, status: Literal["warn", "fail"] = "fail") -> Check:
    lines = str(error).strip().splitlines()
    return Check(name, status, lines[0] if lines else type(error).__name__, remedy)


def _short(seconds: float) -> str:
    """Write a span for people."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 600 else f"{seconds / 60:.0f} min"
