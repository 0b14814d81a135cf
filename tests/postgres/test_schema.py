"""Finding and making the tables: by many at once, with few rights, under odd names, and never over somebody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from psycopg import sql

from pglease import PGLease
from pglease.backends import postgres_schema as schema
from pglease.backends.postgres_link import Link
from pglease.backends.postgres_look import CHANGING, look
from pglease.errors import BackendMisconfigured
from pglease.schema import PROTOCOL, VERSION, table_names

pytestmark = pytest.mark.matrix

NAMES = table_names()

STARTER = """
import os
import sys
import psycopg
from pglease.backends.postgres_link import Link
from pglease.backends.postgres_schema import ensure
from pglease.schema import table_names

with psycopg.connect(os.environ["STARTER_DSN"], autocommit=True) as connection:
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            print(ensure(Link(connection), table_names(line.strip()), create=True).schema, flush=True)
        except Exception as error:
            print(repr(error), flush=True)
"""


@contextmanager
def linked(dsn: str, **options: Any) -> Iterator[Link]:
    with psycopg.connect(dsn, autocommit=True, **options) as connection:
        yield Link(connection)


@contextmanager
def starters(dsn: str, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Many processes, each with a connection, that start with a table whenever they read its name."""
    command, environment = [sys.executable, "-c", STARTER], {**os.environ, "STARTER_DSN": dsn}
    processes = [
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    try:
        assert all(answer(each) == "ready" for each in processes)
        yield processes
    finally:
        for each in processes:
            each.communicate(timeout=30)


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@contextmanager
def role(link: Link, *grants: str) -> Iterator[str]:
    """A role of its own, with what is granted to it; `{role}` stands for its name."""
    name = f"role_{link.rows('SELECT pg_catalog.gen_random_uuid()::text')[0][0].replace('-', '_')}"
    link.script(f'CREATE ROLE "{name}"')
    try:
        for each in grants:
            link.script(each.replace("{role}", name))
        yield name
    finally:
        link.script(f'RESET ROLE; DROP OWNED BY "{name}"; DROP ROLE "{name}"')


def tables(link: Link) -> list[tuple[str, str]]:
    rows = link.rows(
        "SELECT schemaname, tablename FROM pg_catalog.pg_tables"
        " WHERE schemaname NOT IN ('pg_catalog', 'information_schema') ORDER BY 1, 2"
    )
    return [(each[0], each[1]) for each in rows]


def mark(link: Link) -> tuple[Any, ...]:
    return link.rows("SELECT version, protocol, token_floor FROM pglease_leases_meta")[0]


# Making


@pytest.mark.parametrize("count", [12, pytest.param(32, marks=pytest.mark.long)])
def test_any_number_of_processes_may_start_at_once(dsn: str, server_log: Callable[[], list[str]], count: int) -> None:
    rounds = 8
    with starters(dsn, count) as processes, linked(dsn) as link:
        for number in range(rounds):
            name = f"round_{number}"

            for each in processes:
                tell(each, name)

            assert [answer(each) for each in processes] == ["public"] * count
            assert schema.diff(link, table_names(name)) == []
        assert len(tables(link)) == 4 * rounds

    assert [line for line in server_log() if "ERROR" in line] == []


def test_any_number_of_processes_may_meet_a_table_of_0_0_x_at_once(
    dsn: str, server_log: Callable[[], list[str]]
) -> None:
    with starters(dsn, 12) as processes, linked(dsn) as link:
        for number in range(5):
            name = f"round_{number}"
            link.script(TABLE.format(key="varchar(255) PRIMARY KEY", moment="timestamptz").replace(NAMES.table, name))
            link.script(f"INSERT INTO {name} VALUES ('a', 'o', now(), now(), now())")

            for each in processes:
                tell(each, name)

            assert [answer(each) for each in processes] == ["public"] * 12
            assert schema.diff(link, table_names(name)) == []
            assert link.rows(f"SELECT task_name, fencing_token FROM {name}") == [("a", 1)]

    assert [line for line in server_log() if "ERROR" in line] == []


def test_a_table_that_somebody_makes_without_our_lock_is_found_on_the_second_try(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_once = schema._run_once
    tries: list[str] = []

    def collide_first(link: Link, script: str, *, force: bool) -> None:
        tries.append(script)
        if len(tries) == 1:
            raise psycopg.errors.UniqueViolation("duplicate key value violates pg_type_typname_nsp_index")
        run_once(link, script, force=force)

    monkeypatch.setattr(schema, "_run_once", collide_first)

    with linked(dsn) as link:
        assert schema.ensure(link, NAMES, create=True).schema == "public"

    assert len(tries) == 2


def test_the_tables_carry_the_mark_and_need_no_mending(dsn: str) -> None:
    with linked(dsn) as link:
        names = schema.ensure(link, NAMES, create=True)

        assert names == NAMES.within("public")
        assert mark(link) == (VERSION, PROTOCOL, 0)
        assert schema.diff(link, names) == []
        assert schema.apply(link, names) == []


def test_a_missing_table_is_not_made_unless_wanted(dsn: str) -> None:
    with linked(dsn) as link:
        with pytest.raises(
            BackendMisconfigured, match=r"public\.pglease_leases is missing: run `pglease schema apply`"
        ):
            schema.ensure(link, NAMES, create=False)

        assert tables(link) == []


def test_making_is_all_or_nothing(dsn: str) -> None:
    with linked(dsn) as link:
        link.script("CREATE TABLE pglease_leases_meta (one boolean)")

        with pytest.raises(BackendMisconfigured, match="pglease_leases_meta is not ours"):
            schema.ensure(link, NAMES, create=True)

        assert tables(link) == [("public", "pglease_leases_meta")]


def test_the_script_for_psql_may_run_twice_and_makes_the_same(dsn: str) -> None:
    with linked(dsn) as link:
        link.script(schema.ddl(NAMES))
        link.script("INSERT INTO pglease_leases VALUES ('a', 'o', now(), now(), now(), NULL, 7)")
        link.script(schema.ddl(NAMES))
        link.script(schema.ddl(NAMES.within("public")))

        assert schema.diff(link, NAMES) == []
        assert schema.ensure(link, NAMES, create=False).schema == "public"
        assert link.rows("SELECT task_name, fencing_token FROM pglease_leases") == [("a", 7)]
        assert mark(link) == (VERSION, PROTOCOL, 0)


def test_a_start_behind_somebodys_open_migration_does_not_wait_for_ever(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "_PREPARE", schema._PREPARE.replace("'5s'", "'200ms'"))
    with linked(dsn) as migration, linked(dsn) as link, migration.transaction():
        migration.script(schema.ddl(NAMES))

        with pytest.raises(psycopg.errors.LockNotAvailable):
            schema.ensure(link, NAMES, create=True)


def test_psycopg2_makes_and_finds_them_too(dsn: str) -> None:
    psycopg2 = pytest.importorskip("psycopg2")
    connection = psycopg2.connect(dsn)
    try:
        link = Link(connection, in_transactions=True)

        names = schema.ensure(link, NAMES, create=True)

        assert schema.ensure(link, names, create=False) == names
        assert schema.diff(link, names) == []
    finally:
        connection.close()


def test_a_pooler_in_transaction_mode_is_no_obstacle(pgbouncer: Any) -> None:
    with linked(pgbouncer.dsn, prepare_threshold=None) as link:
        names = schema.ensure(link, NAMES, create=True)

        assert schema.ensure(link, names, create=False) == names


# Rights


def test_everything_in_order_takes_no_more_than_reading(admin_dsn: str) -> None:
    with linked(admin_dsn) as link:
        schema.ensure(link, NAMES, create=True)
        with role(link, "GRANT SELECT ON pglease_leases, pglease_leases_meta TO {role}") as reader:
            link.script(f'SET ROLE "{reader}"; SET default_transaction_read_only = on')

            assert schema.ensure(link, NAMES, create=True).schema == "public"

            link.script("RESET default_transaction_read_only")


def test_a_role_that_may_not_create_is_told_which_grant_it_lacks(admin_dsn: str) -> None:
    with linked(admin_dsn) as link:
        link.script("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
        with role(link) as name:
            link.script(f'SET ROLE "{name}"')

            with pytest.raises(BackendMisconfigured) as caught:
                schema.ensure(link, NAMES, create=True)

            assert f'GRANT CREATE ON SCHEMA "public" TO "{name}"' in str(caught.value)
            assert "pglease schema apply" in str(caught.value)
            link.script(f'RESET ROLE; GRANT CREATE ON SCHEMA "public" TO "{name}"; SET ROLE "{name}"')
            assert schema.ensure(link, NAMES, create=True).schema == "public"


@pytest.mark.parametrize("hidden", ["pglease_leases", "pglease_leases_meta"])
def test_a_role_that_may_not_read_is_told_which_grant_it_lacks(admin_dsn: str, hidden: str) -> None:
    with linked(admin_dsn) as link:
        schema.ensure(link, NAMES, create=True)
        seen = {"pglease_leases", "pglease_leases_meta"} - {hidden}
        with role(link, f"GRANT SELECT ON {seen.pop()} TO {{role}}") as name:
            link.script(f'SET ROLE "{name}"')

            with pytest.raises(BackendMisconfigured) as caught:
                schema.ensure(link, NAMES, create=True)

            assert str(caught.value).endswith(f'GRANT SELECT ON "public"."{hidden}" TO "{name}"')


def test_a_schema_that_may_not_be_used_is_named_with_its_grant(admin_dsn: str) -> None:
    with linked(admin_dsn) as link:
        names = schema.ensure(link, table_names(schema="jobs"), create=True)
        with role(link) as name:
            link.script(f'SET ROLE "{name}"')

            with pytest.raises(BackendMisconfigured, match=f'GRANT USAGE ON SCHEMA "jobs" TO "{name}"'):
                schema.ensure(link, names, create=True)


def test_a_missing_schema_that_may_not_be_made_is_said_so(admin_dsn: str) -> None:
    with linked(admin_dsn) as link, role(link) as name:
        link.script(f'SET ROLE "{name}"')

        with pytest.raises(BackendMisconfigured, match=f'CREATE SCHEMA "jobs" AUTHORIZATION "{name}"'):
            schema.ensure(link, table_names(schema="jobs"), create=True)


def test_a_missing_table_on_a_read_only_session_points_at_the_primary(dsn: str) -> None:
    on_the_primary = "read-only: `pglease schema apply` on the primary"
    with (
        linked(dsn, options="-c default_transaction_read_only=on") as link,
        pytest.raises(BackendMisconfigured, match=on_the_primary),
    ):
        schema.ensure(link, NAMES, create=True)


def test_the_grants_are_enough_for_each_role_and_no_more(admin_dsn: str) -> None:
    with linked(admin_dsn) as link:
        names = schema.ensure(link, table_names("order", "Odd"), create=True)
        with role(link) as app, role(link) as guard, role(link) as cleanup, role(link) as reader:
            link.script(schema.grants(names, app=app, guard=guard, cleanup=cleanup, read_only=reader))

            assert may(link, app, names.leases) == {"INSERT", "SELECT", "UPDATE"}
            assert may(link, app, names.meta) == {"SELECT"}
            assert may_update(link, app, names.meta) == {"lineage", "quarantined_until", "token_floor"}
            assert may(link, guard, names.leases) == {"SELECT"}
            assert may(link, guard, names.meta) == set()
            assert may(link, cleanup, names.leases) == {"DELETE", "SELECT"}
            assert may(link, cleanup, names.meta) == {"SELECT"}
            for table in (names.leases, names.meta, names.tickets, names.history):
                assert may(link, reader, table) == {"SELECT"}
            link.script(f'SET ROLE "{guard}"')
            link.rows(f"SELECT 1 FROM {names.leases} FOR KEY SHARE")
            link.script(f'SET ROLE "{cleanup}"')
            with link.transaction():
                link.script(f"LOCK TABLE {names.leases} IN SHARE ROW EXCLUSIVE MODE")
                link.rows(f"SELECT ctid FROM {names.leases} LIMIT 10 FOR UPDATE SKIP LOCKED")
                link.script(f"DELETE FROM {names.leases}; UPDATE {names.meta} SET token_floor = 1")


def test_whoever_may_only_look_sees_all_there_is_to_see(admin_dsn: str, dsn: str) -> None:
    with linked(admin_dsn) as link, PGLease(f"{dsn}?pglease.history=3", owner_id="worker") as worker:
        worker.try_acquire("job")
        names = schema.ensure(link, NAMES, create=False)
        with role(link) as reader:
            link.script(schema.grants(names, read_only=reader).partition("-- look")[2])
            with PGLease(psycopg.conninfo.make_conninfo(admin_dsn, options=f"-c role={reader}")) as leases:
                assert [lease.name for lease in leases.list_leases()] == ["job"]
                assert leases.get_lease("job").owner_id == "worker"
                assert leases.queued("job") == []
                assert leases.queues() == {}
                assert [tenure.owner_id for tenure in leases.history("job")] == ["worker"]
                with pytest.raises(BackendMisconfigured):
                    leases.force_release("job", 1)


def may(link: Link, name: str, table: str) -> set[str]:
    asked = ["SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER"]
    rows = link.rows(
        "SELECT r FROM pg_catalog.unnest(%(asked)s::text[]) AS r"
        " WHERE pg_catalog.has_table_privilege(%(name)s::name, %(table)s::text, r)",
        {"asked": asked, "name": name, "table": table},
    )
    return {each[0] for each in rows}


def may_update(link: Link, name: str, table: str) -> set[str]:
    rows = link.rows(
        "SELECT a.attname FROM pg_catalog.pg_attribute a WHERE a.attrelid = %(table)s::regclass AND a.attnum > 0"
        " AND pg_catalog.has_column_privilege(%(name)s::name, a.attrelid, a.attnum, 'UPDATE')",
        {"name": name, "table": table},
    )
    return {each[0] for each in rows}


def test_a_role_with_a_quote_in_its_name_is_granted_to_and_nothing_else_happens(dsn: str) -> None:
    script = schema.grants(NAMES, app='x"; DROP TABLE pglease_leases; --')

    assert 'TO "x""; DROP TABLE pglease_leases; --";' in script


# Names


@pytest.mark.parametrize(
    ("table", "where"), [("order", None), ("User", "Select"), ("_", "_1"), ("t" * 53, "s" * 63), ("MiXed", "public")]
)
def test_odd_but_legal_identifiers_work(dsn: str, table: str, where: str | None) -> None:
    names = table_names(table, where)
    with linked(dsn) as link:
        found = schema.ensure(link, names, create=True)

        assert found == names.within(where or "public")
        assert schema.ensure(link, names, create=False) == found
        assert schema.diff(link, names) == schema.apply(link, names) == []
        link.script(schema.ddl(names))
        assert tables(link) == [
            (where or "public", f"{table}{beside}") for beside in ("", "_history", "_meta", "_tickets")
        ]


def test_the_first_schema_of_the_search_path_that_has_the_table_wins(dsn: str) -> None:
    with linked(dsn) as link:
        link.script("CREATE SCHEMA early; CREATE SCHEMA late; SET search_path = early, late")
        schema.ensure(link, table_names(schema="late"), create=True)

        assert schema.ensure(link, NAMES, create=True).schema == "late"

        schema.ensure(link, table_names(schema="early"), create=True)
        assert schema.ensure(link, NAMES, create=True).schema == "early"


def test_pg_catalog_in_the_search_path_is_not_where_tables_are_made(dsn: str) -> None:
    with linked(dsn) as link:
        link.script('CREATE SCHEMA jobs; SET search_path = pg_catalog, "$user", jobs, public')

        assert schema.ensure(link, NAMES, create=True).schema == "jobs"


def test_a_temporary_table_of_that_name_does_not_count(dsn: str) -> None:
    with linked(dsn) as link:
        link.script("CREATE TEMPORARY TABLE pglease_leases (a int)")

        assert schema.ensure(link, NAMES, create=True).schema == "public"


def test_without_any_schema_to_make_it_in_the_search_path_is_named(dsn: str) -> None:
    with linked(dsn) as link:
        link.script("SET search_path = nowhere")

        with pytest.raises(BackendMisconfigured, match="search_path"):
            schema.ensure(link, NAMES, create=True)
        with pytest.raises(BackendMisconfigured, match="search_path"):
            schema.apply(link, NAMES)


def test_functions_that_shadow_the_servers_are_not_called(dsn: str) -> None:
    with linked(dsn) as link:
        link.script("""
            CREATE SCHEMA evil;
            CREATE FUNCTION evil.clock_timestamp() RETURNS timestamptz
                LANGUAGE sql AS $$ SELECT 'infinity'::timestamptz $$;
            CREATE FUNCTION evil.to_regclass(text) RETURNS regclass
                LANGUAGE sql AS $$ SELECT NULL::regclass $$;
            CREATE TYPE evil.uuid AS ENUM ('x');
            CREATE TYPE evil.jsonb AS ENUM ('x');
            SET search_path = evil, pg_catalog, public;
        """)

        names = schema.ensure(link, table_names(schema="public"), create=True)

        link.script("SET search_path = public")
        assert schema.diff(link, names) == []


# Somebody else's, and other versions

TABLE = """CREATE TABLE pglease_leases (task_name {key}, owner_id text NOT NULL,
    acquired_at {moment} NOT NULL, expires_at {moment} NOT NULL, heartbeat_at {moment} NOT NULL)"""


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ("CREATE TABLE pglease_leases (id int)", "it has no task_name"),
        ("CREATE VIEW pglease_leases AS SELECT 1 AS task_name", "not a plain table"),
        ("CREATE SEQUENCE pglease_leases", "not a plain table"),
        (TABLE.format(key="int PRIMARY KEY", moment="timestamptz"), "it has no task_name of the right type"),
        (TABLE.format(key="text PRIMARY KEY", moment="timestamp"), "it has no acquired_at, expires_at, heartbeat_at"),
        (TABLE.format(key="text NOT NULL", moment="timestamptz"), "task_name is not its key"),
    ],
)
def test_what_is_not_ours_is_refused_untouched(dsn: str, made: str, reason: str) -> None:
    with linked(dsn) as link:
        link.script(made)
        before = columns(link)

        for attempt in (
            lambda: schema.ensure(link, NAMES, create=True),
            lambda: schema.apply(link, NAMES),
            lambda: schema.apply(link, NAMES, force=True),
        ):
            with pytest.raises(BackendMisconfigured, match=reason):
                attempt()

        assert [reason in each for each in schema.diff(link, NAMES)] == [True]
        assert columns(link) == before


def test_the_script_itself_refuses_what_is_not_ours(dsn: str) -> None:
    with linked(dsn) as link:
        link.script("CREATE TABLE pglease_leases (id int)")

        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="not a lease table; nothing was changed"):
            link.script(schema.ddl(NAMES))

        assert columns(link) == [("id", "integer")]


def columns(link: Link) -> list[tuple[Any, ...]]:
    return link.rows(
        "SELECT attname, pg_catalog.format_type(atttypid, atttypmod) FROM pg_catalog.pg_attribute a"
        " JOIN pg_catalog.pg_class c ON c.oid = attrelid"
        " WHERE relname = 'pglease_leases' AND attnum > 0 ORDER BY attnum"
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("protocol = 99", "speaks protocol 99, and this pglease 1; to mend it: run the same pglease everywhere"),
        ("version = 99", r"layout 99, newer than this pglease knows \(1\); to mend it: upgrade pglease here"),
    ],
)
def test_an_unknown_protocol_or_a_newer_layout_is_refused(dsn: str, change: str, sentence: str) -> None:
    with linked(dsn) as link:
        schema.ensure(link, NAMES, create=True)
        link.script(f"UPDATE pglease_leases_meta SET {change}")
        before = mark(link)

        with pytest.raises(BackendMisconfigured, match=sentence):
            schema.ensure(link, NAMES, create=True)
        with pytest.raises(BackendMisconfigured, match=sentence):
            schema.apply(link, NAMES, force=True)

        assert mark(link) == before


def test_an_older_layout_is_upgraded_by_apply_alone(dsn: str) -> None:
    with linked(dsn) as link:
        schema.ensure(link, NAMES, create=True)
        link.script("UPDATE pglease_leases_meta SET version = 0, token_floor = 41")

        with pytest.raises(BackendMisconfigured, match=r"layout 0, older .* pglease schema apply"):
            schema.ensure(link, NAMES, create=True)
        done = schema.apply(link, NAMES)

        assert done == ["upgraded public.pglease_leases from layout 0"]
        assert mark(link) == (VERSION, PROTOCOL, 41)


# What diff finds, and apply mends


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (
            "ALTER TABLE pglease_leases DROP CONSTRAINT pglease_leases_token_key",
            "the key (task_name, fencing_token) is missing",
        ),
        ("ALTER TABLE pglease_leases DROP COLUMN metadata", "the column metadata is missing"),
        ("ALTER TABLE pglease_leases DROP COLUMN waited_until", "the column waited_until is missing"),
        ("ALTER TABLE pglease_leases DROP COLUMN session_pid", "the column session_pid is missing"),
        ("ALTER TABLE pglease_leases RESET (fillfactor)", "the table lacks fillfactor = 50"),
        ("ALTER TABLE pglease_leases ALTER task_name TYPE varchar(9)", "task_name is character varying(9)"),
        (
            'ALTER TABLE pglease_leases ALTER task_name TYPE text COLLATE "default"',
            'task_name is text COLLATE "default"',
        ),
        ("ALTER TABLE pglease_leases ALTER fencing_token TYPE int", "fencing_token is integer, not bigint"),
        ("ALTER TABLE pglease_leases ALTER lease_id SET NOT NULL", "lease_id is not null"),
        ("ALTER TABLE pglease_leases ALTER owner_id DROP NOT NULL", "owner_id is nullable"),
    ],
)
def test_diff_finds_what_is_odd_and_apply_mends_it(dsn: str, damage: str, found: str) -> None:
    with linked(dsn) as link:
        schema.ensure(link, NAMES, create=True)
        link.script(damage)

        odd = schema.diff(link, NAMES)
        done = schema.apply(link, NAMES)

        assert len(odd) == len(done) == 1
        assert odd[0].startswith(found)
        assert done[0].startswith(found)
        assert schema.diff(link, NAMES) == []


@pytest.mark.parametrize("beside", ["tickets", "history"])
def test_a_table_beside_the_leases_that_was_dropped_is_missed_and_made_again(dsn: str, beside: str) -> None:
    with linked(dsn) as link:
        schema.ensure(link, NAMES, create=True)
        link.script(f"DROP TABLE pglease_leases_{beside}")

        assert f"pglease_leases_{beside} is missing" in schema.diff(link, NAMES)[0]
        assert schema.apply(link, NAMES) == [f"made public.pglease_leases_{beside}"]
        assert schema.diff(link, NAMES) == []


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ("ALTER TABLE pglease_leases SET (fillfactor = 95)", "fillfactor is 95"),
        ("ALTER TABLE pglease_leases SET (autovacuum_enabled = off)", "autovacuum is off for the table"),
        ("ALTER TABLE pglease_leases_meta RENAME version TO v", "pglease_leases_meta is not ours"),
        ("DELETE FROM pglease_leases_meta", "pglease_leases_meta has no version mark"),
        ("ALTER TABLE pglease_leases_tickets RENAME ticket_id TO t", "pglease_leases_tickets is not ours"),
        ("ALTER TABLE pglease_leases_history RENAME fencing_token TO t", "pglease_leases_history is not ours"),
    ],
)
def test_what_else_diff_finds_odd(dsn: str, odd: str, said: str) -> None:
    with linked(dsn) as link:
        schema.ensure(link, NAMES, create=True)
        link.script(odd)

        assert [said in each for each in schema.diff(link, NAMES)] == [True]


def test_tables_that_cannot_be_used_after_all_fail_the_apply(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "_problem", lambda *_, **__: "it cannot be used")
    with linked(dsn) as link, pytest.raises(BackendMisconfigured, match="it cannot be used"):
        schema.apply(link, NAMES)


def test_who_may_not_read_the_old_table_cannot_say_that_somebody_holds_a_lease_in_it(dsn: str) -> None:
    with linked(dsn) as link:
        schema.ensure(link, NAMES, create=True)
        seen = look(link, NAMES)
        assert seen.table is not None
        unread = replace(seen, table={**seen.table, "rights": {**seen.table["rights"], "SELECT": False}})

        assert schema._running(link, unread) is None


@pytest.mark.parametrize(
    "made",
    [
        "CREATE INDEX idx_pglease_expires_at ON pglease_leases (expires_at)",
        "CREATE INDEX odd ON pglease_leases (task_name, heartbeat_at)",
        "CREATE INDEX odd ON pglease_leases (task_name) INCLUDE (expires_at)",
        "CREATE INDEX odd ON pglease_leases ((expires_at - heartbeat_at))",
        "CREATE INDEX odd ON pglease_leases (owner_id) WHERE expires_at > '2020-01-01Z'",
    ],
)
def test_an_index_on_changing_columns_is_named_and_left_alone(dsn: str, made: str) -> None:
    with linked(dsn) as link:
        schema.ensure(link, NAMES, create=True)
        link.script(made)

        assert schema.apply(link, NAMES) == []

        (odd,) = schema.diff(link, NAMES)
        assert "no HOT updates" in odd
        link.script(odd.partition("to mend it: ")[2])
        assert schema.diff(link, NAMES) == []


def test_other_indexes_and_columns_of_the_users_are_nobodys_business(dsn: str) -> None:
    with linked(dsn) as link:
        schema.ensure(link, NAMES, create=True)
        link.script("ALTER TABLE pglease_leases ADD note text, ADD made timestamptz NOT NULL DEFAULT now()")
        link.script("CREATE INDEX mine ON pglease_leases (note)")

        assert schema.diff(link, NAMES) == []
        assert schema.ensure(link, NAMES, create=False).schema == "public"


def test_a_column_that_would_refuse_every_lease_blocks(dsn: str) -> None:
    with linked(dsn) as link:
        schema.ensure(link, NAMES, create=True)
        link.script("ALTER TABLE pglease_leases ADD tenant text NOT NULL")

        with pytest.raises(BackendMisconfigured, match="the column tenant is not ours and has no default"):
            schema.ensure(link, NAMES, create=True)


def test_a_mark_that_was_lost_comes_back_above_every_token(dsn: str) -> None:
    with linked(dsn) as link:
        schema.ensure(link, NAMES, create=True)
        link.script("INSERT INTO pglease_leases VALUES ('a', 'o', now(), now(), now(), NULL, 7)")
        link.script("DROP TABLE pglease_leases_meta")

        with pytest.raises(
            BackendMisconfigured, match="pglease_leases_meta is missing; to mend it: pglease schema apply"
        ):
            schema.ensure(link, NAMES, create=True)
        schema.apply(link, NAMES)

        assert mark(link) == (VERSION, PROTOCOL, 1 << 32)


def test_a_table_that_was_dropped_comes_back_above_every_token(dsn: str) -> None:
    with linked(dsn) as link:
        schema.ensure(link, NAMES, create=True)
        link.script(
            sql.SQL("UPDATE pglease_leases_meta SET token_floor = {}").format((3 << 32) + 5).as_string(link.connection)
        )
        link.script("DROP TABLE pglease_leases")

        schema.ensure(link, NAMES, create=True)

        assert mark(link) == (VERSION, PROTOCOL, 4 << 32)


def test_forged_tokens_do_not_overflow_the_floor(dsn: str) -> None:
    with linked(dsn) as link:
        schema.ensure(link, NAMES, create=True)
        link.script("INSERT INTO pglease_leases VALUES ('a', 'o', now(), now(), now(), NULL, 9223372036854775807)")
        link.script("DROP TABLE pglease_leases_meta")

        schema.apply(link, NAMES)

        assert mark(link)[2] == 2147483647 << 32


def test_apply_needs_the_owner_and_says_so(admin_dsn: str) -> None:
    with linked(admin_dsn) as link:
        schema.ensure(link, NAMES, create=True)
        link.script("ALTER TABLE pglease_leases RESET (fillfactor)")
        with role(link, "GRANT SELECT ON pglease_leases, pglease_leases_meta TO {role}") as name:
            link.script(f'SET ROLE "{name}"')

            with pytest.raises(BackendMisconfigured, match="must be owner of table pglease_leases"):
                schema.apply(link, NAMES)


def test_what_heartbeats_waiters_and_sessions_write_is_in_no_index(dsn: str) -> None:
    changing = [*sorted(CHANGING), "session_started"]
    with linked(dsn) as link:
        schema.ensure(link, NAMES, create=True)
        link.script("INSERT INTO pglease_leases VALUES ('job', 'o', now(), now(), now(), NULL, 7)")

        with link.transaction():
            for column in changing:
                link.script(f"UPDATE pglease_leases SET {column} = pg_catalog.clock_timestamp()")
            hot = link.rows(
                "SELECT n_tup_hot_upd FROM pg_catalog.pg_stat_xact_all_tables WHERE relname = 'pglease_leases'"
            )

        assert hot == [(len(changing),)]
