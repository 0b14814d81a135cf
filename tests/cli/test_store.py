"""`schema` and `doctor`."""

import json

import psycopg
import pytest


def test_the_printed_schema_makes_a_store(call, dsn, sql):
    code, out, _ = call("schema")
    assert code == 0
    assert call("schema", "print")[1] == out

    with psycopg.connect(dsn, autocommit=True) as database:
        database.execute(out)

    assert sql("SELECT count(*) FROM pglease_leases") == (0,)
    assert call("schema", "diff")[0] == 0


def test_printing_touches_nothing(call, sql):
    call("schema")

    assert sql("SELECT to_regclass('pglease_leases')") == (None,)


def test_apply_says_what_it_did_and_may_be_repeated(call):
    code, out, _ = call("schema", "diff")
    assert code == 1
    assert out

    code, out, _ = call("schema", "apply")
    assert code == 0
    assert out

    code, out, _ = call("schema", "apply", "--json")
    assert (code, json.loads(out)) == (0, {"done": []})
    assert call("schema", "diff", "-q")[:2] == (0, "")


def test_a_table_that_was_changed_shows_in_the_difference(call, sql):
    call("schema", "apply")
    sql("ALTER TABLE pglease_leases DROP COLUMN metadata")

    code, out, _ = call("schema", "diff", "--json")

    assert code == 1
    assert "metadata" in " ".join(json.loads(out)["differences"])


def test_a_live_table_of_0_0_x_is_upgraded_by_force_alone(call, sql):
    sql(
        "CREATE TABLE pglease_leases (task_name varchar(255) PRIMARY KEY, owner_id varchar(255) NOT NULL, acquired_at"
        " timestamptz NOT NULL, expires_at timestamptz NOT NULL, heartbeat_at timestamptz NOT NULL)"
    )
    sql("INSERT INTO pglease_leases VALUES ('job', 'old', now(), now() + interval '1 h', now())")

    code, _, refusal = call("schema", "apply")
    assert code == 125
    assert "pglease schema apply --force" in refusal

    assert call("schema", "apply", "--force")[0] == 0
    assert sql("SELECT owner_id, fencing_token FROM pglease_leases") == ("old", 1)


@pytest.mark.parametrize("action", ["print", "diff", "grants"])
def test_force_goes_with_apply_alone(call, action):
    code, _, refusal = call("schema", action, "--force")

    assert code == 2
    assert "--force goes with" in refusal


def test_grants_name_the_roles(call):
    code, out, _ = call("schema", "grants")

    assert code == 0
    assert "GRANT SELECT, INSERT, UPDATE" in out


def test_the_doctor_finds_a_good_store_good(call):
    call("schema", "apply")

    code, out, _ = call("doctor", "--json")

    checks = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert {check["status"] for check in checks} <= {"ok", "warn"}
    assert all(check["text"] for check in checks)
    assert len(checks) > 8


def test_the_doctor_prints_one_line_a_check_and_what_to_do(call, sql):
    call("schema", "apply")
    sql("CREATE INDEX unwanted ON pglease_leases (expires_at)")

    _, out, _ = call("doctor")

    (about,) = [line for line in out.splitlines() if "indexes" in line]
    assert about.startswith(("warn", "fail"))
    assert "DROP INDEX" in about


def test_a_quiet_doctor_speaks_of_what_is_not_in_order(call):
    call("schema", "apply")

    _, out, _ = call("doctor", "-q")

    assert not any(line.startswith("ok") for line in out.splitlines())


def test_a_store_that_is_not_there_fails_the_doctor(call):
    code, out, _ = call("doctor", "--dsn", "postgresql://me:c4n4ry@127.0.0.1:1/db")

    assert code == 1
    assert out.startswith("fail  reachable")


@pytest.mark.parametrize(
    "arguments", [("schema",), ("schema", "apply"), ("schema", "diff"), ("schema", "grants"), ("doctor",)]
)
def test_a_store_without_such_a_thing_says_so_in_a_sentence(arguments, call):
    code, out, err = call(*arguments, "--dsn", "memory://")

    assert (code, out) == (125, "")
    assert "nothing of the kind" in err
    assert err.count("\n") == 1


def test_a_new_epoch_is_begun_and_said(call, sql):
    call("schema", "apply")

    code, out, _ = call("bump-epoch")
    assert (code, out) == (0, "epoch 1: every fencing token from now on is above 4294967296\n")

    code, out, _ = call("bump-epoch", "--json", "--quarantine", "5m")
    assert (code, json.loads(out)) == (0, {"epoch": 2, "tokens_above": 8589934592})
    assert sql("SELECT token_floor, quarantined_until > now() + interval '4 min' FROM pglease_leases_meta") == (
        8589934592,
        True,
    )
