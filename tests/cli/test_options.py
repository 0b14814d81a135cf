"""`options`: what applies to a name, and where it comes from."""

import json

import pytest


@pytest.fixture(autouse=True)
def said(monkeypatch):
    monkeypatch.setenv("PGLEASE_LOCK_TTL", "120")
    monkeypatch.setenv("PGLEASE_LOCK_ORDER_3A_42_MAX_HOLD", "1h")


def test_it_shows_what_applies_and_where_each_option_comes_from(call):
    code, out, err = call("options", "order:42", "--kind", "lock")

    assert (code, err) == (0, "")
    heading, *lines = out.splitlines()
    assert heading == "lock 'order:42'"
    found = {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines}
    assert found["ttl"] == ["120", "PGLEASE_LOCK_TTL"]
    assert found["max_hold"] == ["1h", "PGLEASE_LOCK_ORDER_3A_42_MAX_HOLD"]
    assert found["fair"] == ["False", "default; set by PGLEASE_LOCK_ORDER_3A_42_FAIR"]
    assert found["min_hold"] == ["-", "default; set by PGLEASE_LOCK_ORDER_3A_42_MIN_HOLD"]


def test_as_json_it_is_one_option_a_line_and_all_kinds(call):
    code, out, _ = call("options", "cart", "--json")

    assert code == 0
    found = [json.loads(line) for line in out.splitlines()]
    assert {each["kind"] for each in found} == {"lock", "task_lock", "leader_election", "read_write_lock", "semaphore"}
    assert {"kind": "leader_election", "name": "cart", "option": "ttl", "value": 15, "source": "default"} in found


def test_a_prefix_of_its_own_and_a_value_that_cannot_be_read(call, monkeypatch):
    monkeypatch.setenv("SHOP_TTL", "5")
    assert "SHOP_TTL" in call("options", "cart", "--kind", "lock", "--env-prefix", "SHOP_")[1]

    monkeypatch.setenv("PGLEASE_LOCK_TTL", "soon")
    code, _, err = call("options", "cart")

    assert code == 125
    assert "PGLEASE_LOCK_TTL must be a duration" in err
