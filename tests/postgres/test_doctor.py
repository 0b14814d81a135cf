"""A doctor says what is wrong, what to do, and goes on looking."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pglease.backends import postgres_doctor as doctor
from pglease.backends import postgres_schema as schema
from pglease.backends.checks import Check
from pglease.backends.postgres_link import Link
from pglease.backends.postgres_look import look
from pglease.errors import BackendUnavailable
from pglease.schema import table_names

pytestmark = pytest.mark.matrix

NAMES = table_names()

Lend = Callable[[], AbstractContextManager[Link]]


@contextmanager
def linked(dsn: str, **options: Any) -> Iterator[Link]:
    with psycopg.connect(dsn, autocommit=True, **options) as connection:
        yield Link(connection)


def lending(dsn: str, **options: Any) -> Lend:
    return lambda: linked(dsn, **options)


@contextmanager
def made(dsn: str) -> Iterator[Link]:
    with linked(dsn) as link:
        schema.ensure(link, NAMES, create=True)
        yield link


def found(checks: list[Check], name: str) -> Check:
    """The gravest check of that name."""
    return max(
        (each for each in checks if each.name == name), key=lambda each: ("ok", "warn", "fail").index(each.status)
    )


def visit(lend: Lend, probe: Callable[[], None] | None = None) -> list[Check]:
    return list(doctor.diagnose(lend, NAMES, probe))


@pytest.fixture
def facts(dsn: str) -> doctor._Server:
    with linked(dsn) as link:
        return doctor._ask(link)


EVERYTHING = {
    "reachable", "server version", "primary", "pooler", "durability", "isolation", "encoding", "search_path", "clock",
    "time-outs", "keepalives", "table", "tokens", "indexes", "rights", "HOT updates", "vacuum", "acquire and release",
    "encryption", "standbys", "connections", "password", "row security", "snapshots", "locks", "records",
}  # fmt: skip


def test_where_all_is_well_nothing_fails_and_everything_was_looked_at(dsn: str) -> None:
    probes = []
    with made(dsn):
        checks = visit(lending(dsn), lambda: probes.append(1))

    assert {each.name for each in checks} == EVERYTHING
    assert [each for each in checks if each.status == "fail"] == []
    assert [each for each in checks if each.status != "ok"] == [each for each in checks if each.remedy]
    assert probes == [1]


def test_the_page_about_the_doctor_names_every_check() -> None:
    page = (Path(__file__).parents[2] / "docs" / "seeing.md").read_text("utf-8")
    rows = re.findall(r"^\| (`[^|]+) \|", page.split("## Is the store fit")[1], re.MULTILINE)

    assert set(re.findall("`([^`]+)`", "".join(rows))) == EVERYTHING


def test_an_unreachable_server_is_all_there_is_to_say(dsn: str) -> None:
    @contextmanager
    def lend() -> Iterator[Link]:
        raise BackendUnavailable("PostgreSQL cannot be reached: refused")
        yield

    (check,) = visit(lend, lambda: pytest.fail("probed"))

    assert (check.name, check.status) == ("reachable", "fail")
    assert "cannot be reached" in check.text
    assert check.remedy


def test_a_missing_table_fails_and_is_not_made(dsn: str) -> None:
    checks = visit(lending(dsn), lambda: pytest.fail("probed"))

    assert found(checks, "table") == Check(
        "table", "fail", "the table public.pglease_leases is missing", "pglease schema apply"
    )
    assert found(checks, "acquire and release").status == "warn"
    with linked(dsn) as link:
        assert schema.look(link, NAMES).table is None


def test_a_table_that_is_not_ours_fails(dsn: str) -> None:
    with linked(dsn) as link:
        link.script("CREATE TABLE pglease_leases (id int)")

    assert found(visit(lending(dsn)), "table").status == "fail"


def test_an_unknown_protocol_fails(dsn: str) -> None:
    with made(dsn) as link:
        link.script("UPDATE pglease_leases_meta SET protocol = 99")

    check = found(visit(lending(dsn)), "table")

    assert check.status == "fail"
    assert "protocol 99" in check.text


def test_an_unlogged_table_is_warned_of(dsn: str) -> None:
    with made(dsn) as link:
        link.script("ALTER TABLE pglease_leases SET UNLOGGED")

    check = found(visit(lending(dsn)), "table")

    assert (check.status, check.remedy) == ("warn", 'ALTER TABLE "public"."pglease_leases" SET LOGGED')


def test_an_index_on_changing_columns_is_pointed_at(dsn: str) -> None:
    with made(dsn) as link:
        link.script("CREATE INDEX idx_pglease_expires_at ON pglease_leases (expires_at)")

    check = found(visit(lending(dsn)), "indexes")

    assert (check.status, check.remedy) == ("warn", 'DROP INDEX CONCURRENTLY "public"."idx_pglease_expires_at"')


@pytest.mark.parametrize(
    ("granted", "statuses", "remedies"),
    [
        ("SELECT", ["ok", "fail", "ok", "ok"], 'GRANT INSERT, UPDATE ON "public"."pglease_leases" TO "{role}"'),
        ("SELECT, INSERT, UPDATE", ["ok", "ok", "ok", "ok"], 'GRANT DELETE ON "public"."pglease_leases" TO "{role}"'),
    ],
)
def test_each_verbs_rights_are_named_with_their_grant(
    admin_dsn: str, granted: str, statuses: list[str], remedies: str
) -> None:
    name = f"role_{uuid.uuid4().hex}"
    with made(admin_dsn) as link:
        link.script(f"CREATE ROLE {name}; GRANT {granted} ON pglease_leases TO {name}")
        link.script(f"GRANT SELECT ON pglease_leases_meta TO {name}; SET ROLE {name}")
        try:
            checks = [each for each in visit(lambda: lent(link)) if each.name == "rights"]
        finally:
            link.script(f"RESET ROLE; DROP OWNED BY {name}; DROP ROLE {name}")

    assert [each.status for each in checks] == statuses
    lacking = next(each for each in checks if each.remedy)
    assert lacking.remedy.startswith(remedies.format(role=name))


@contextmanager
def lent(link: Link) -> Iterator[Link]:
    yield link


def test_the_grants_of_the_cleanup_role_satisfy_the_doctor(admin_dsn: str) -> None:
    name = f"role_{uuid.uuid4().hex}"
    with made(admin_dsn) as link:
        granted = schema.grants(NAMES.within("public"), cleanup=name).split("-- cleanup_expired")[1].split("-- ")[0]
        link.script(f"CREATE ROLE {name}; {granted}; SET ROLE {name}")
        try:
            checks = [each for each in visit(lambda: lent(link)) if each.name == "rights"]
        finally:
            link.script(f"RESET ROLE; DROP OWNED BY {name}; DROP ROLE {name}")

    assert [(each.status, each.text) for each in checks if "cleanup" in each.text] == [("ok", f"{name} may cleanup")]


def test_a_read_only_session_fails(dsn: str) -> None:
    with made(dsn):
        checks = visit(lending(dsn, options="-c default_transaction_read_only=on"), lambda: pytest.fail("probed"))

    assert found(checks, "primary").status == "fail"
    assert "default_transaction_read_only" in found(checks, "primary").text


def test_a_replica_fails(facts: doctor._Server) -> None:
    check = doctor._writable(replace(facts, in_recovery=True))

    assert (check.status, check.remedy) == ("fail", "connect to the primary")


def test_an_old_server_fails(facts: doctor._Server) -> None:
    assert doctor._version(replace(facts, version="13.9", version_number=130009)).status == "fail"


def test_a_connection_that_others_can_read_is_warned_of(facts: doctor._Server) -> None:
    open_to_all = doctor._encryption(replace(facts, client="192.0.2.1", encrypted=False))

    assert open_to_all.status == "warn"
    assert "sslmode=verify-full" in open_to_all.remedy
    assert doctor._encryption(replace(facts, client="192.0.2.1", encrypted=True)).status == "ok"
    assert doctor._encryption(replace(facts, client="::1", encrypted=False)).status == "ok"
    assert doctor._encryption(replace(facts, client=None, encrypted=False)).status == "ok"


def test_torn_pages_are_warned_of(facts: doctor._Server) -> None:
    check = doctor._durability(replace(facts, settings={**facts.settings, "fsync": "on", "full_page_writes": "off"}))

    assert (check.status, check.remedy) == ("warn", "set full_page_writes = on")
    safe = {**facts.settings, "fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}
    assert doctor._durability(replace(facts, settings=safe)) == Check("durability", "ok", "synchronous_commit is on")


def test_a_local_socket_needs_no_keepalives(facts: doctor._Server) -> None:
    local = {**facts.settings, "tcp_keepalives_idle": "0"}

    assert "a local socket" in doctor._keepalives(replace(facts, settings=local), 60.0).text


def test_a_schema_that_may_not_be_used_is_all_there_is_to_say_of_rights(dsn: str) -> None:
    with made(dsn) as link:
        seen = look(link, NAMES)

    (check,) = doctor._rights(replace(seen, may_use=False))

    assert (check.status, check.remedy) == ("fail", f'GRANT USAGE ON SCHEMA "public" TO "{seen.role}"')


def test_a_probe_that_takes_long_is_warned_of_and_a_table_without_statistics_is_passed_over(dsn: str) -> None:
    assert doctor._probed(lambda: None, 0.0).status == "warn"
    assert doctor._probed(lambda: None, 3600.0).status == "ok"
    with made(dsn) as link:
        seen = look(link, NAMES)
        elsewhere = replace(seen, names=replace(seen.names, table="not_there"))

        assert len(list(doctor._about_use(link, None, seen))) == 2
        assert list(doctor._about_use(link, None, elsewhere)) == []


def test_a_pooler_shows_by_the_process_it_claims(dsn: str) -> None:
    with linked(dsn) as link:
        pooled = Link(SimpleNamespace(cursor=link.connection.cursor, info=SimpleNamespace(backend_pid=1)))

        check = found(visit(lambda: lent(pooled)), "pooler")

    assert check.status == "warn"
    assert "hybrid" in check.text


def test_pgbouncer_is_noticed(pgbouncer: Any) -> None:
    checks = visit(lending(pgbouncer.dsn, prepare_threshold=None))

    assert found(checks, "pooler").status == "warn"


@pytest.mark.parametrize(
    ("setting", "name", "word"),
    [
        ("synchronous_commit=off", "durability", "synchronous_commit is off"),
        ("search_path=public,pg_catalog", "search_path", "public stands before pg_catalog"),
        ("statement_timeout=200", "time-outs", "statement_timeout is 200 ms"),
        ("lock_timeout=20", "time-outs", "lock_timeout is 20 ms"),
        ("idle_session_timeout=5s", "time-outs", "idle_session_timeout is 5 s"),
    ],
)
def test_a_setting_that_harms_is_warned_of(facts: doctor._Server, dsn: str, setting: str, name: str, word: str) -> None:
    with made(dsn):
        kept = lending(dsn, options=f"-c {setting}")
        checks = visit(kept if name != "durability" else fsynced(kept))

    assert found(checks, name).status == "warn"
    assert word in found(checks, name).text
    assert found(checks, name).remedy


def fsynced(lend: Lend) -> Lend:
    """Test servers run without fsync, which is the graver thing to say."""

    @contextmanager
    def lend_one() -> Iterator[Link]:
        with lend() as link:
            rows = link.rows
            plain = SimpleNamespace(
                connection=link.connection,
                rows=lambda sql, params=None: [
                    tuple(
                        part.replace('"fsync": "off"', '"fsync": "on"') if isinstance(part, str) else part
                        for part in row
                    )
                    for row in rows(sql, params)
                ],
            )
            yield plain  # type: ignore[misc]

    return lend_one


def test_another_default_isolation_is_nothing_to_worry_about(dsn: str) -> None:
    with made(dsn):
        check = found(visit(lending(dsn, options="-c default_transaction_isolation=serializable")), "isolation")

    assert (check.status, check.text) == ("ok", "the default is serializable; leases use read committed all the same")


def test_an_encoding_that_cannot_hold_every_name_is_warned_of(admin_dsn: str) -> None:
    name = f"latin_{uuid.uuid4().hex}"
    with linked(admin_dsn) as link:
        link.script(f"CREATE DATABASE {name} ENCODING LATIN1 TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
        try:
            checks = visit(lending(make_conninfo(admin_dsn, dbname=name)))
        finally:
            link.script(f"DROP DATABASE {name}")

    assert found(checks, "encoding").status == "warn"
    assert "LATIN1" in found(checks, "encoding").text


def test_a_skewed_clock_is_told_and_keeps_no_lease_from_anybody(facts: doctor._Server) -> None:
    checks = list(doctor._about_time(replace(facts, ahead=3600.0), 60.0))

    assert found(checks, "clock").status == "warn"
    assert "60 min ahead of this host" in found(checks, "clock").text
    assert "leases do not care" in found(checks, "clock").text
    assert found(list(doctor._about_time(replace(facts, ahead=0.01), 60.0)), "clock").status == "ok"


@pytest.mark.parametrize(
    ("updates", "hot", "status"), [(0, 0, "ok"), (500, 0, "ok"), (5000, 4990, "ok"), (5000, 10, "warn")]
)
def test_few_hot_updates_are_warned_of_once_there_are_many(updates: int, hot: int, status: str) -> None:
    assert doctor._hot(updates, hot).status == status


def test_dead_rows_and_a_missing_autovacuum_are_warned_of(facts: doctor._Server) -> None:
    without = replace(facts, settings={**facts.settings, "autovacuum": "off"})
    with_it = replace(facts, settings={**facts.settings, "autovacuum": "on"})

    assert doctor._bloat(with_it, 10, 100, 8192).status == "ok"
    assert doctor._bloat(with_it, 10, 50_000, 1 << 23).status == "warn"
    assert doctor._bloat(without, 10, 100, 8192).text.startswith("autovacuum is off")


def test_a_probe_that_fails_is_told_and_not_raised(dsn: str) -> None:
    def probe() -> None:
        raise BackendUnavailable("PostgreSQL: too slow")

    with made(dsn):
        check = visit(lending(dsn), probe)[-1]

    assert check == Check("acquire and release", "fail", "PostgreSQL: too slow")


def test_a_check_that_cannot_be_made_does_not_keep_the_others_from_it(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_SERVER", "SELECT nonsense")
    monkeypatch.setattr(doctor, "_USE", "SELECT nonsense")
    with made(dsn):
        checks = visit(lending(dsn))

    assert found(checks, "server").status == "fail"
    assert found(checks, "table").status == "ok"
    assert found(checks, "use").status == "warn"


def test_it_works_on_borrowed_connections_of_psycopg2(dsn: str) -> None:
    psycopg2 = pytest.importorskip("psycopg2")
    with made(dsn):
        connection = psycopg2.connect(dsn)
        try:
            checks = visit(lambda: lent(Link(connection, in_transactions=True)))
        finally:
            connection.close()

    assert [each for each in checks if each.status == "fail"] == []
    assert found(checks, "pooler").status == "ok"


def test_looking_changes_nothing(dsn: str) -> None:
    with made(dsn):
        assert [each.status for each in visit(lending(dsn, options="-c default_transaction_read_only=on"))].count(
            "fail"
        ) == 1


def test_no_secret_is_told(dsn: str) -> None:
    password = psycopg.conninfo.conninfo_to_dict(dsn).get("password")
    with made(dsn):
        checks = visit(lending(dsn))

    assert password
    assert not [each for each in checks if str(password) in f"{each}"]


# Tokens after a failover


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ("lineage = lineage", "ok", "epoch 0; after a failover or a restore the next one begins by itself"),
        ("lineage = '1/00000001/1/1'", "ok", "epoch 0; another server granted last: the next grant begins a new one"),
        ("quarantined_until = now() + interval '1 h'", "warn", "nothing is granted for another 60 min"),
    ],
)
def test_what_becomes_of_tokens_after_a_failover_is_said(dsn: str, change: str, status: str, said: str) -> None:
    with made(dsn) as link:
        link.script(f"UPDATE pglease_leases_meta SET {change}")

    check = found(visit(lending(dsn)), "tokens")

    assert check.status == status
    assert said in check.text


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ("lineage = lineage", "warn", "after a failover a new epoch begins, which"),
        ("lineage = '1/00000001/1/1'", "fail", "another server granted last: a new epoch must begin, which"),
    ],
)
def test_a_role_that_may_not_begin_an_epoch_is_told_the_grant(
    admin_dsn: str, change: str, status: str, said: str
) -> None:
    role = f"role_{uuid.uuid4().hex}"
    with made(admin_dsn) as link:
        link.script(f"UPDATE pglease_leases_meta SET {change}")
        link.script(f"CREATE ROLE {role}; GRANT SELECT ON pglease_leases, pglease_leases_meta TO {role}")
        try:
            check = found(visit(lending(admin_dsn, options=f"-c role={role}")), "tokens")
        finally:
            link.script(f"DROP OWNED BY {role}; DROP ROLE {role}")

    assert check.status == status
    assert said in check.text
    assert "UPDATE (token_floor, lineage, quarantined_until)" in check.remedy


def test_a_server_that_cannot_tell_its_timeline_is_named(admin_dsn: str, dsn: str) -> None:
    with made(dsn), linked(admin_dsn) as admin:
        admin.script("REVOKE EXECUTE ON FUNCTION pg_catalog.pg_control_system() FROM PUBLIC")

    check = found(visit(lending(dsn)), "tokens")

    assert check.status == "warn"
    assert "cannot tell its timeline" in check.text
    assert "bump-epoch" in check.remedy
