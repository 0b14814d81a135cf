"""What a server is set to: told at the first use, and by `pglease doctor`."""

from __future__ import annotations

import json
import logging

import pytest

from pglease.cli import main


@pytest.fixture
def call(monkeypatch, capsys, canary):
    def run(url, *arguments):
        monkeypatch.setenv("PGLEASE_URL", url)
        code = main(arguments)
        out, err = capsys.readouterr()
        assert canary not in out + err
        return code, out, err

    return run


def checks(alice):
    return {check.name: check for check in alice.backend.diagnose()}


def test_a_server_in_order_warns_of_nothing(valkey, worker, caplog):
    with caplog.at_level(logging.WARNING, "pglease"):
        alice = worker(valkey.url)
        alice.hold("job")

    assert caplog.messages == []
    assert {name: check.status for name, check in checks(alice).items()} == {
        "reachable": "ok",
        "version": "ok",
        "eviction": "ok",
        "persistence": "ok",
        "replicas": "ok",
        "clock": "ok",
        "acquire": "ok",
    }
    assert alice.names("pglease:") == []


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"maxmemory_policy": "allkeys-lru", "maxmemory": "100mb"}, "evict leases and fencing tokens"),
        ({"appendonly": "no"}, "fencing tokens go back"),
    ],
    ids=["eviction", "persistence"],
)
def test_at_the_first_use_what_weakens_leases_is_told_once(fresh, worker, caplog, settings, told):
    alice = worker(fresh(**settings).url)

    with caplog.at_level(logging.WARNING, "pglease"):
        for _ in range(3):
            alice.names()

    (message,) = caplog.messages
    assert told in message
    assert "set " in message


@pytest.mark.parametrize("policy", ["volatile-lru", "noeviction"])
def test_a_policy_that_evicts_nothing_of_ours_is_in_order(fresh, worker, policy):
    alice = worker(fresh(maxmemory_policy=policy, maxmemory="100mb").url)

    assert checks(alice)["eviction"].status == "ok"


@pytest.mark.parametrize(("fsync", "status"), [("always", "ok"), ("everysec", "ok"), ("no", "warn")])
def test_the_doctor_looks_when_the_file_is_written_through(fresh, worker, fsync, status):
    found = checks(worker(fresh(appendfsync=fsync).url))["persistence"]

    assert found.status == status
    assert found.text.startswith("append-only file")


def test_a_server_that_does_not_answer_fails_one_check(worker):
    found = checks(worker("redis://127.0.0.1:1"))

    assert [(check.name, check.status) for check in found.values()] == [("reachable", "fail")]


def test_a_doctor_without_rights_says_what_is_missing(valkey, worker, canary):
    valkey.execute("ACL", "SETUSER", "reader", "reset", "on", f">{canary}", "~*", "+client", "+role")

    found = checks(worker(f"redis://reader:{canary}@{valkey.host}:{valkey.port}"))

    assert found["settings"].status == "warn"
    assert found["acquire"].status == "fail"


def test_the_command_line_works_on_redis(valkey, call):
    """No verb of it knows what kind of store it talks to."""
    url = valkey.url  # the doctor leaves a record of its probe
    assert call(url, "doctor")[0] == 0
    assert call(url, "check", "job")[0] == 1
    code, out, _ = call(url, "run", "job", "--ttl", "30s", "--", "sh", "-c", "exit 7")
    assert code == 7
    code, out, _ = call(url, "show", "job", "--json")
    assert code == 0
    assert json.loads(out)["fencing_token"] == 1
    assert call(url, "list", "--all")[0] == 0
    assert call(url, "wait", "job", "--timeout", "1s")[0] == 0
    assert call(url, "release", "job", "--token", "1")[0] == 1
    assert "2 records removed" in call(url, "cleanup")[1]


def test_a_doctor_that_finds_a_failure_ends_with_one(call):
    code, out, _ = call("redis://127.0.0.1:1", "doctor", "--json")

    assert code == 1
    assert json.loads(out)["check"] == "reachable"


def test_a_schema_is_nothing_that_redis_has(valkey, call):
    code, _, err = call(valkey.url, "schema", "diff")

    assert code == 125
    assert "Redis" in err
