"""The tables: found, made, upgraded, compared and granted.

One script makes and upgrades them, for every number of processes at once: the same text is run by the first use of a
backend, by `pglease schema apply`, by a DBA with psql, and by the Django and Alembic migrations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from typing import Any

from pglease.backends.postgres_errors import sqlstate
from pglease.backends.postgres_link import Link
from pglease.backends.postgres_look import STORAGE, Finding, Look, findings, look
from pglease.backends.postgres_sql import lineage_of
from pglease.errors import BackendMisconfigured
from pglease.schema import PROTOCOL, TableNames

_LOCK = 5784230157903120741
"""The advisory lock that serialises DDL within a database. Any number nobody else uses; it must never change."""

_REFUSED = "55000"
"""The SQLSTATE with which the script refuses a table; it changed nothing then."""
_MADE_MEANWHILE = frozenset({"23505", "42P07", "42701", "42710", "42P06"})
"""Somebody who does not take our lock (a migration tool, a 0.0.x client) made the same thing in this instant."""
_NEEDS_A_PERSON = frozenset({_REFUSED, "0A000", "2BP01", "42501"})
"""Our own refusal, a view that stands on a column, a missing right: another try would end the same way."""

_PREPARE = """
SELECT pg_catalog.set_config('lock_timeout', '5s', true) AS lock_timeout,
       pg_catalog.set_config('search_path', 'pg_catalog', true) AS search_path,
       pg_catalog.set_config('pglease.force', %(force)s::text, true) AS force
"""
"""For the transaction alone. With this search path nothing in the script can be shadowed: our tables are named with
their schema. The lock time-out keeps a start from waiting for ever behind somebody's open migration."""

# Whether a client of 0.0.x was seen within its ttl, by the server's clock.
_RUNNING = """
SELECT l.task_name, l.owner_id FROM {leases} l
WHERE l.expires_at > pg_catalog.clock_timestamp() ORDER BY l.expires_at DESC LIMIT 1
"""

RAISING = "SELECT, UPDATE (token_floor, lineage, quarantined_until)"
"""What a role needs on the meta table to grant, and to begin a new epoch when the first grant elsewhere wants one."""

_CREATE_SCHEMA = """
    IF pg_catalog.to_regnamespace('"{schema}"') IS NULL THEN
        CREATE SCHEMA "{schema}";
    END IF;
"""


def ensure(link: Link, names: TableNames, *, create: bool) -> TableNames:
    """Return the names with their schema once the tables are fit for use; make or upgrade them if `create`.

    When everything is in order this only reads, and needs no right but SELECT. Any number of processes may call it at
    once.

    Raises:
        BackendMisconfigured: with what mends it; nothing was changed.
    """
    seen = look(link, names)
    if not _blocking(seen) and _may_read(seen):
        return seen.names
    if create and _may_be_made(link, seen):
        _run(link, seen.names, force=False)
        seen = look(link, seen.names)
    if problem := _problem(link, seen, create=create):
        raise BackendMisconfigured(problem)
    return seen.names


def apply(link: Link, names: TableNames, *, force: bool = False) -> list[str]:
    """Make, upgrade or mend the tables, and return what was done, in sentences; empty when nothing was to be done.

    An index on changing columns is left alone, since it may be somebody's: `diff` names it.

    Args:
        link: a connection of a role that may create there, or owns the tables.
        names: where.
        force: upgrade a 0.0.x table although a lease in it still runs. Such clients then write beside ours, by their
            own clock, and may delete rows.

    Raises:
        BackendMisconfigured: when the table is not ours or not to be touched; nothing was changed.
    """
    before = look(link, names)
    _refuse_what_is_not_ours(before)
    done = []
    if _needs_script(before):
        _run(link, before.names, force=force)
        done.append(_told(before))
    after = look(link, before.names)
    for finding in [each for each in findings(after) if each.automatic]:
        _mend(link, finding)
        done.append(f"{finding.text}: {finding.remedy}")
    if problem := _problem(link, look(link, after.names), create=True):
        raise BackendMisconfigured(problem)
    return done


def diff(link: Link, names: TableNames) -> list[str]:
    """Return what is missing or odd, each with what mends it; empty when all is as it should be."""
    return [_said(each) for each in findings(look(link, names))]


def ddl(names: TableNames) -> str:
    """Return the script that makes or upgrades the tables, for psql. Running it again is harmless."""
    return _script(names)


def undo(names: TableNames) -> tuple[str, ...]:
    """Return the statements that take the tables away, with all leases: tokens start again at 1 afterwards."""
    return tuple(f"DROP TABLE IF EXISTS {each}" for each in (names.history, names.tickets, names.meta, names.leases))


def grants(
    names: TableNames,
    *,
    app: str = "pglease_app",
    guard: str = "pglease_guard",
    cleanup: str = "pglease_cleanup",
    read_only: str = "pglease_read",
) -> str:
    """Return the GRANTs that each role needs, and no more.

    Args:
        names: where the tables are.
        app: acquires, renews and releases.
        guard: runs only the guard inside its own transactions. Locking a row takes UPDATE on one column; `heartbeat_at`
            is the one that decides nothing.
        cleanup: `cleanup_expired`.
        read_only: `list`, `show`, `watch`, `history`, `exporter`, `web`.
    """
    leases, meta, tickets, history = names.leases, names.meta, names.tickets, names.history
    all_rows = "SELECT, INSERT, UPDATE, DELETE"
    needs = [
        (
            "acquire, renew, release; a new epoch after a failover",
            app,
            {leases: "SELECT, INSERT, UPDATE", meta: RAISING, tickets: all_rows, history: "SELECT, INSERT, DELETE"},
        ),
        ("guard other tables inside its own transactions", guard, {leases: "SELECT, UPDATE (heartbeat_at)"}),
        (
            "cleanup_expired",
            cleanup,
            {
                leases: "SELECT, DELETE, UPDATE (heartbeat_at)",
                meta: "SELECT, UPDATE (token_floor)",
                tickets: "SELECT, DELETE",
                history: "SELECT, DELETE",
            },
        ),
        ("look", read_only, dict.fromkeys((leases, meta, tickets, history), "SELECT")),
    ]
    return "\n".join(_granted(names, *need) for need in needs)


def grant(rights: str, table: str, role: str) -> str:
    """Return one GRANT."""
    return f"GRANT {rights} ON {table} TO {quoted(role)}"


def quoted(role: str) -> str:
    """Return a role's name as an identifier, whatever it holds."""
    return '"' + role.replace('"', '""') + '"'


def _granted(names: TableNames, purpose: str, role: str, rights: Mapping[str, str]) -> str:
    who = quoted(role)
    schema = [] if names.schema is None else [f'GRANT USAGE ON SCHEMA "{names.schema}" TO {who};']
    lines = [f"-- {purpose}", *schema]
    lines += [grant(each, table, role) + ";" for table, each in rights.items()]
    return "\n".join(lines) + "\n"


def _said(finding: Finding) -> str:
    return f"{finding.text}; to mend it: {finding.remedy}"


def _blocking(seen: Look) -> list[Finding]:
    return [each for each in findings(seen) if each.blocks]


def _may_read(seen: Look) -> bool:
    return seen.may("SELECT", of=seen.table) and seen.may("SELECT", of=seen.meta)


def _needs_script(seen: Look) -> bool:
    missing = seen.is_published or None in (seen.table, seen.meta, seen.tickets, seen.history)
    return missing or (
        seen.may("SELECT", of=seen.meta) and (seen.mark is None or any(_is_for_apply(each) for each in _blocking(seen)))
    )


def _is_for_apply(finding: Finding) -> bool:
    return finding.remedy == "pglease schema apply"


def _may_be_made(link: Link, seen: Look) -> bool:
    """Tell whether a first use may make the tables, or upgrade those of 0.0.x with nobody in them."""
    if seen.names.schema is None or seen.read_only or not seen.may_create:
        return False
    if seen.table is None:
        return seen.meta is None or bool(seen.meta["owned"])
    return seen.is_published and bool(seen.table["owned"]) and _running(link, seen) is None


def _running(link: Link, seen: Look) -> str | None:
    if not seen.may("SELECT", of=seen.table):
        return None
    rows = link.rows(_RUNNING.format(leases=seen.names.leases))
    return f"{rows[0][0]!r} (held by {rows[0][1]!r})" if rows else None


def _problem(link: Link, seen: Look, *, create: bool) -> str | None:
    """Say why the tables cannot be used and what mends it, or None when they can."""
    if seen.names.schema is None:
        return "no schema of the search_path exists where the lease table could be: say schema=, or set search_path"
    if seen.schema_exists and not seen.may_use:
        grant = f'GRANT USAGE ON SCHEMA "{seen.names.schema}" TO {quoted(seen.role)}'
        return f"the role {seen.role} may not use the schema {seen.names.schema}: {grant}"
    if seen.table is None:
        return _missing(seen, create=create)
    if seen.is_published:
        return _published(link, seen)
    if blocking := _blocking(seen):
        return "; ".join(_said(each) for each in blocking)
    return _unreadable(seen)


def _missing(seen: Look, *, create: bool) -> str:
    where = "" if seen.names.schema is None else f" --schema {seen.names.schema}"
    if not create:
        return f"the table {seen.shown} is missing: run `pglease schema apply` (automatic creation is off)"
    if seen.read_only:
        return f"the table {seen.shown} is missing and this session is read-only: `pglease schema apply` on the primary"
    if not seen.schema_exists:
        advice = f'CREATE SCHEMA "{seen.names.schema}" AUTHORIZATION {quoted(seen.role)}'
        return f"the schema {seen.names.schema} is missing and the role {seen.role} may not create it: {advice}"
    advice = f'GRANT CREATE ON SCHEMA "{seen.names.schema}" TO {quoted(seen.role)}'
    return (
        f"the table {seen.shown} is missing and the role {seen.role} may not create it: "
        f"run `pglease schema apply`{where} as a role that may, or {advice}"
    )


def _published(link: Link, seen: Look) -> str:
    if running := _running(link, seen):
        return (
            f"{seen.shown} is a table of pglease 0.0.x, and its lease {running} still runs: "
            "stop the 0.0.x clients, or run `pglease schema apply --force`"
        )
    assert seen.table is not None
    owner = seen.table["owner"]
    return f"{seen.shown} is a table of pglease 0.0.x: run `pglease schema apply` as its owner ({owner})"


def _unreadable(seen: Look) -> str | None:
    lacking = [
        grant("SELECT", table, seen.role)
        for table, about in ((seen.names.leases, seen.table), (seen.names.meta, seen.meta))
        if not seen.may("SELECT", of=about)
    ]
    return f"the role {seen.role} may not read {seen.shown}: {'; '.join(lacking)}" if lacking else None


def _refuse_what_is_not_ours(seen: Look) -> None:
    if seen.names.schema is None:
        raise BackendMisconfigured("no schema of the search_path exists: say schema=, or set search_path")
    hopeless = [each for each in _blocking(seen) if not each.automatic and not _is_for_apply(each)]
    if hopeless:
        raise BackendMisconfigured("; ".join(_said(each) for each in hopeless))


def _told(before: Look) -> str:
    if before.table is None:
        return f"made {before.shown}, {before.shown}_meta, {before.shown}_tickets and {before.shown}_history"
    if before.is_published:
        return f"upgraded {before.shown} from pglease 0.0.x; its columns and rows were kept"
    if before.mark is None:
        return f"made the version mark of {before.shown} anew; tokens go on in the next epoch"
    if made := [f"{before.shown}_{kind}" for kind in ("tickets", "history") if getattr(before, kind) is None]:
        return f"made {' and '.join(made)}"
    return f"upgraded {before.shown} from layout {before.mark.version}"


def _run(link: Link, names: TableNames, *, force: bool) -> None:
    with _said_to_people():
        try:
            _run_once(link, _script(names), force=force)
        except Exception as error:
            if sqlstate(error) not in _MADE_MEANWHILE:
                raise
            _run_once(link, _script(names), force=force)


def _run_once(link: Link, script: str, *, force: bool) -> None:
    with link.transaction():
        link.rows(_PREPARE, {"force": "on" if force else "off"})
        link.script(script)


def _mend(link: Link, finding: Finding) -> None:
    with _said_to_people():
        _run_once(link, finding.remedy, force=False)


@contextmanager
def _said_to_people() -> Iterator[None]:
    """Turn the server's refusals that only a person can mend into ours; everything else passes."""
    try:
        yield
    except Exception as error:
        if sqlstate(error) not in _NEEDS_A_PERSON:
            raise
        raise BackendMisconfigured(": ".join(_lines_of(error))) from None


def _lines_of(error: Exception) -> list[str]:
    diagnostics: Any = getattr(error, "diag", None)
    said = [getattr(diagnostics, part, None) for part in ("message_primary", "message_detail", "message_hint")]
    return [line for line in said if line] or [str(error)]


def _script(names: TableNames) -> str:
    template = (resources.files("pglease.backends") / "migrations" / "0001_leases.sql").read_text(encoding="utf-8")
    known = {
        "lock": str(_LOCK),
        "leases": names.leases,
        "meta": names.meta,
        "tickets": names.tickets,
        "history": names.history,
        "table": names.table,
        "token_key": f"{names.table}_token_key",
        "queue_key": f"{names.table}_queue",
        "history_key": f"{names.table}_past",
        "protocol": str(PROTOCOL),
        "lineage": lineage_of(names),
        "storage": ",\n            ".join(f"{name} = {value}" for name, value in STORAGE.items()),
        "create_schema": "" if names.schema is None else _CREATE_SCHEMA.strip("\n").format(schema=names.schema),
    }
    for name, value in known.items():
        template = template.replace("{" + name + "}", value)
    return template
