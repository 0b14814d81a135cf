"""A table of pglease 0.0.x becomes ours where it stands: its rows stay, and a client still in it is respected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from pglease.backends import postgres_schema as schema
from pglease.backends.postgres_link import Link
from pglease.errors import BackendMisconfigured
from pglease.schema import PROTOCOL, VERSION, table_names

pytestmark = pytest.mark.matrix

NAMES = table_names()

PUBLISHED = """
CREATE TABLE IF NOT EXISTS pglease_leases (
    task_name    VARCHAR(255) PRIMARY KEY,
    owner_id     VARCHAR(255) NOT NULL,
    acquired_at  TIMESTAMPTZ  NOT NULL,
    expires_at   TIMESTAMPTZ  NOT NULL,
    heartbeat_at TIMESTAMPTZ  NOT NULL
);
"""
"""As 0.0.x makes it and its README prints it."""

INDEX = "CREATE INDEX IF NOT EXISTS idx_pglease_leases_expires_at ON pglease_leases(expires_at);"
"""As 0.0.x makes it on every start, also on our table."""

HOLD = "INSERT INTO pglease_leases VALUES ('{name}', 'old-{name}', {start}, {start} + interval '{ttl}', {start});"


@contextmanager
def linked(dsn: str) -> Iterator[Link]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield Link(connection)


@contextmanager
def published(dsn: str, *, running: bool = False, extra: str = "") -> Iterator[Link]:
    """A database in which 0.0.x has worked: two leases that are over, and one that still runs if asked for."""
    with linked(dsn) as link:
        link.script(PUBLISHED + INDEX + extra)
        link.script(HOLD.format(name="a", start="now() - interval '1 day'", ttl="60s"))
        link.script(HOLD.format(name="Ä/z", start="now() - interval '2 s'", ttl="1s"))
        if running:
            link.script(HOLD.format(name="live", start="now()", ttl="1h"))
        yield link


def rows(link: Link, *columns: str) -> list[tuple[Any, ...]]:
    return link.rows(f"SELECT {', '.join(columns)} FROM pglease_leases ORDER BY task_name")


def mark(link: Link) -> tuple[Any, ...]:
    return link.rows("SELECT version, protocol, token_floor FROM pglease_leases_meta")[0]


def has_changed(link: Link) -> bool:
    return bool(
        link.rows(
            "SELECT 1 FROM pg_catalog.pg_attribute WHERE attrelid = 'pglease_leases'::regclass AND attname = 'lease_id'"
            " UNION ALL SELECT 1 FROM pg_catalog.pg_class WHERE relname = 'pglease_leases_meta'"
        )
    )


KEPT = ("task_name", "owner_id", "acquired_at", "expires_at", "heartbeat_at")


def test_a_table_with_nobody_in_it_is_upgraded_by_the_first_use(dsn: str) -> None:
    with published(dsn) as link:
        before = rows(link, *KEPT)

        names = schema.ensure(link, NAMES, create=True)

        assert names.schema == "public"
        assert rows(link, *KEPT) == before
        assert rows(link, "lease_id", "fencing_token", "transitions", "metadata") == [(None, 1, 0, None)] * 2
        assert rows(link, "waited_until", "queued_until", "slot", "session_pid", "session_started") == [(None,) * 5] * 2
        assert mark(link) == (VERSION, PROTOCOL, 0)
        assert schema.ensure(link, NAMES, create=False) == names


def test_all_that_is_left_to_say_about_an_upgraded_table_is_its_index(dsn: str) -> None:
    with published(dsn) as link:
        schema.ensure(link, NAMES, create=True)

        (odd,) = schema.diff(link, NAMES)

        assert odd.startswith("the index idx_pglease_leases_expires_at on expires_at")
        assert odd.endswith('DROP INDEX CONCURRENTLY "public"."idx_pglease_leases_expires_at"')


def test_an_upgraded_name_may_be_longer_in_bytes_and_sorts_like_bytes(dsn: str) -> None:
    with published(dsn) as link:
        schema.ensure(link, NAMES, create=True)

        link.script(f"INSERT INTO pglease_leases VALUES ('{'ü' * 255}', 'o', now(), now(), now(), NULL, 1)")

        found = link.rows(
            "SELECT pg_catalog.format_type(atttypid, atttypmod), collname FROM pg_catalog.pg_attribute a"
            " JOIN pg_catalog.pg_collation c ON c.oid = attcollation"
            " WHERE attrelid = 'pglease_leases'::regclass AND attname = 'task_name'"
        )
        assert found == [("text", "C")]


def test_a_0_0_x_client_within_its_ttl_keeps_the_upgrade_out(dsn: str) -> None:
    with published(dsn, running=True) as link:
        for attempt in (lambda: schema.ensure(link, NAMES, create=True), lambda: schema.apply(link, NAMES)):
            with pytest.raises(BackendMisconfigured, match=r"pglease schema apply --force"):
                attempt()

        assert not has_changed(link)


def test_the_refusal_names_the_lease_and_its_holder(dsn: str) -> None:
    with published(dsn, running=True) as link, pytest.raises(BackendMisconfigured) as caught:
        schema.ensure(link, NAMES, create=True)

    assert "its lease 'live' (held by 'old-live') still runs" in str(caught.value)


def test_a_client_that_comes_in_between_look_and_lock_keeps_it_out_too(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_once = schema._run_once

    def with_a_client(link: Link, script: str, *, force: bool) -> None:
        link.script(HOLD.format(name="live", start="now()", ttl="1h"))
        run_once(link, script, force=force)

    monkeypatch.setattr(schema, "_run_once", with_a_client)
    with published(dsn) as link:
        with pytest.raises(BackendMisconfigured, match=r"has 1 running lease\(s\); nothing was changed"):
            schema.ensure(link, NAMES, create=True)

        assert not has_changed(link)


def test_forced_the_running_hold_is_respected_until_its_end(dsn: str) -> None:
    with published(dsn, running=True) as link:
        before = rows(link, *KEPT)

        done = schema.apply(link, NAMES, force=True)

        assert done == ["upgraded public.pglease_leases from pglease 0.0.x; its columns and rows were kept"]
        assert rows(link, *KEPT) == before
        held = rows(link, "task_name", "lease_id IS NOT NULL", "fencing_token")
        assert held == [("a", False, 1), ("live", True, 1), ("Ä/z", False, 1)]


def test_after_force_a_row_that_an_old_client_deletes_does_not_repeat_its_token(dsn: str) -> None:
    with published(dsn, running=True) as link:
        schema.apply(link, NAMES, force=True)

        assert mark(link)[2] >= max(token for (token,) in rows(link, "fencing_token"))


def test_force_is_over_with_the_transaction(dsn: str) -> None:
    with published(dsn, running=True) as link:
        schema.apply(link, NAMES, force=True)

        assert link.rows("SELECT coalesce(pg_catalog.current_setting('pglease.force', true), '')") == [("",)]


def test_a_dba_forces_it_in_psql(dsn: str) -> None:
    with published(dsn, running=True) as link:
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            link.script(schema.ddl(NAMES))
        link.script("SET pglease.force = 'on'")
        link.script(schema.ddl(NAMES))

        assert mark(link) == (VERSION, PROTOCOL, 1)


def test_an_upgraded_table_refuses_new_rows_of_0_0_x(dsn: str) -> None:
    with published(dsn) as link:
        schema.ensure(link, NAMES, create=True)

        link.script(PUBLISHED + INDEX)  # a 0.0.x client starts
        with pytest.raises(psycopg.errors.NotNullViolation):
            link.script(HOLD.format(name="new", start="now()", ttl="60s"))


def test_it_is_not_upgraded_unless_wanted(dsn: str) -> None:
    with published(dsn) as link:
        with pytest.raises(BackendMisconfigured, match=r"is a table of pglease 0\.0\.x: run `pglease schema apply`"):
            schema.ensure(link, NAMES, create=False)

        assert not has_changed(link)


def test_a_role_that_does_not_own_it_is_told_who_does(admin_dsn: str) -> None:
    with published(admin_dsn) as link:
        name = f"role_{link.rows('SELECT pg_catalog.gen_random_uuid()::text')[0][0].replace('-', '_')}"
        link.script(f'CREATE ROLE "{name}"; GRANT SELECT ON pglease_leases TO "{name}"')
        link.script(f'GRANT CREATE ON SCHEMA public TO "{name}"')
        try:
            link.script(f'SET ROLE "{name}"')

            with pytest.raises(BackendMisconfigured, match=r"as its owner \(\w+\)"):
                schema.ensure(link, NAMES, create=True)
        finally:
            link.script(f'RESET ROLE; DROP OWNED BY "{name}"; DROP ROLE "{name}"')

        assert not has_changed(link)


def test_many_that_start_at_once_upgrade_it_once(dsn: str) -> None:
    with published(dsn) as link, linked(dsn) as other:
        with link.transaction():
            link.script(schema.ddl(NAMES))
            look_before = schema.look(other, NAMES)
        schema._run(other, look_before.names, force=False)

        assert rows(link, "fencing_token") == [(1,), (1,)]
        assert mark(link) == (VERSION, PROTOCOL, 0)


def test_extra_columns_of_the_users_are_kept(dsn: str) -> None:
    with published(dsn, extra="ALTER TABLE pglease_leases ADD note text DEFAULT 'n';") as link:
        link.script("ALTER TABLE pglease_leases ALTER note SET NOT NULL")
        schema.ensure(link, NAMES, create=True)

        assert rows(link, "note") == [("n",), ("n",)]


def test_a_view_on_it_is_not_torn_down_but_named(dsn: str) -> None:
    with published(dsn, extra="CREATE VIEW board AS SELECT task_name, owner_id FROM pglease_leases;") as link:
        with pytest.raises(BackendMisconfigured, match=r"used by a view or rule: rule _RETURN on view public.board"):
            schema.ensure(link, NAMES, create=True)

        assert not has_changed(link)


def test_under_another_name_and_schema(dsn: str) -> None:
    with linked(dsn) as link:
        link.script("CREATE SCHEMA jobs; SET search_path = jobs; " + PUBLISHED.replace("pglease_leases", '"order"'))
        link.script("SET search_path = public")

        names = schema.ensure(link, table_names("order", "jobs"), create=True)

        assert schema.diff(link, names) == []


def test_leases_that_lost_their_tokens_start_in_the_next_epoch(dsn: str) -> None:
    with linked(dsn) as link:
        schema.ensure(link, NAMES, create=True)
        link.script("UPDATE pglease_leases_meta SET token_floor = 9; DROP TABLE pglease_leases; " + PUBLISHED)
        link.script(HOLD.format(name="a", start="now() - interval '1 day'", ttl="60s"))

        schema.ensure(link, NAMES, create=True)

        assert mark(link)[2] == 1 << 32
        assert rows(link, "fencing_token") == [(1 << 32,)]
