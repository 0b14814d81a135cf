"""What stands in the server: keys, counters and scripts; and what others may have put there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pglease import BackendMisconfigured
from pglease.records import Gone, Held, Renewal, Unknown
from pglease.testing.harness import budget, new_id

PAGE = Path(__file__).parents[2] / "docs" / "redis.md"
LEASE, TOKEN = "pglease:1:{job}:lease", "pglease:1:{job}:token"
FOREIGN = {
    "text": ("SET", LEASE, "theirs"),
    "a list": ("RPUSH", LEASE, "theirs"),
    "a hash": ("HSET", LEASE, "their", "field"),
    "a record of another name": ("HSET", LEASE, "name", "other", "lease_id", "x", "fencing_token", "1"),
    "a record without times": ("HSET", LEASE, "name", "job", "owner_id", "o", "lease_id", "x", "fencing_token", "1"),
    "a token that is no number": ("SET", TOKEN, "theirs"),
    "a token of another type": ("SADD", TOKEN, "theirs"),
}
RIGHTS = re.search(r"^ACL SETUSER leases (.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)[1].split()[2:]
"""What docs/redis.md says that a user needs, after `on` and the password."""


def calls(server, command):
    """How often clients or scripts ran a command since the last CONFIG RESETSTAT."""
    with server.client() as client:
        return client.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"]


def test_a_verb_is_one_round_trip(valkey, worker):
    alice, bob = worker(valkey.url), worker(valkey.url, "bob")
    hold = alice.hold("warm")
    for one in (alice, bob):
        hold.renewed()
        one.is_refused("warm")
        one.sees("warm")
        one.force("warm", 0)
    hold.release()
    valkey.execute("CONFIG", "RESETSTAT")

    hold = alice.hold("job")
    bob.is_refused("job")
    hold.renewed()
    bob.sees("job")
    hold.released()
    hold.release()
    bob.force("job", hold.token)

    assert calls(valkey, "evalsha") == 7
    for other in ("eval", "script|load", "role", "publish", "subscribe", "wait"):
        assert calls(valkey, other) == 0, other


def test_five_hundred_renewals_are_one_round_trip(valkey, worker, before):
    proxy, url = before(valkey)
    alice = worker(url)
    holds = [alice.hold(f"job-{n}") for n in range(500)]

    proxy.delay(0.2)
    outcomes = alice.renew(*(hold.renewal() for hold in holds))

    assert all(isinstance(outcome, Held) for outcome in outcomes)


@pytest.mark.parametrize("verb", ["hold", "renew", "release", "see", "list"])
def test_scripts_that_the_server_forgot_are_loaded_again(valkey, worker, verb):
    alice = worker(valkey.url)
    hold = alice.hold("job")
    acts = {
        "hold": lambda: alice.hold("other"),
        "renew": hold.renewed,
        "release": hold.released,
        "see": lambda: alice.sees("job"),
        "list": alice.names,
    }

    valkey.execute("SCRIPT", "FLUSH")

    acts[verb]()


def test_no_key_has_a_time_to_live(valkey, worker):
    alice = worker(valkey.url)
    alice.hold("job", 0.5)
    alice.hold("other").released()

    keys = valkey.execute("KEYS", "*")

    assert len(keys) == 4
    assert {valkey.execute("PTTL", key) for key in keys} == {-1}


def test_a_cleanup_takes_the_record_and_leaves_the_counter(valkey, worker):
    alice = worker(valkey.url)
    for _ in range(3):
        alice.hold("job").released()

    assert alice.cleanup() == 1

    assert valkey.execute("KEYS", "*") == [TOKEN.encode()]
    assert alice.hold("job").token == 4


@pytest.mark.parametrize("what", FOREIGN)
def test_a_foreign_value_is_refused_and_not_overwritten(valkey, worker, what):
    command = FOREIGN[what]
    valkey.execute(*command)
    before = valkey.execute("DUMP", command[1])
    alice = worker(valkey.url)

    with pytest.raises(BackendMisconfigured, match=command[1].replace("{", r"\{")):
        alice.ask("job")

    if command[1] == LEASE:
        for verb in (lambda: alice.sees("job"), lambda: alice.force("job", 1), lambda: alice.mark("job")):
            with pytest.raises(BackendMisconfigured, match="did not write"):
                verb()
        outcome = alice.renew(alice.hold("own").renewal(), Renewal("job", new_id(), 60))[1]
        assert isinstance(outcome, Unknown)
        assert isinstance(outcome.error, BackendMisconfigured)
    assert alice.names(ended=True) == (["own"] if command[1] == LEASE else [])
    assert alice.cleanup() == 0
    assert valkey.execute("DUMP", command[1]) == before


def test_keys_that_only_look_like_ours_are_left_alone(valkey, worker):
    alice = worker(valkey.url)
    alice.hold("a}b{c%7D")
    for key in (b"pglease:1:{a}b}:lease", b"pglease:1:{\xff}:lease", b"pglease:1:{%zz}:lease", b"pglease:2:{x}:lease"):
        valkey.execute("HSET", key, "name", "x")

    assert alice.names(ended=True) == ["a}b{c%7D"]
    assert alice.cleanup() == 0


def test_a_list_asks_by_scan_and_finds_ours_among_many(valkey, worker):
    with valkey.client() as client, client.pipeline(transaction=False) as batch:
        for n in range(5000):
            batch.set(f"theirs:{n}", n)
        batch.execute()
    alice = worker(valkey.url)
    for n in range(50):
        alice.hold(f"job-{n:02}")
    valkey.execute("CONFIG", "RESETSTAT")

    assert alice.names() == [f"job-{n:02}" for n in range(50)]

    assert calls(valkey, "keys") == 0
    assert calls(valkey, "scan") > 1


def test_prefixes_and_databases_are_stores_apart(valkey, worker):
    workers = [worker(valkey.url), worker(valkey.url, prefix="shop"), worker(valkey.url.replace("/0", "/5"))]

    tokens = [one.hold("job").token for one in workers]

    assert tokens == [1, 1, 1]
    assert [one.names() for one in workers] == [["job"]] * 3


@pytest.mark.parametrize("last", [2**53, 2**60 + 1])
def test_tokens_beyond_what_a_double_holds_stay_exact(valkey, worker, last):
    valkey.execute("SET", TOKEN, last)
    alice = worker(valkey.url)

    hold = alice.hold("job")

    assert hold.token == last + 1
    assert hold.renewed().fencing_token == last + 1
    assert alice.force("job", last) is False
    assert alice.force("job", last + 1) is True
    assert alice.hold("job").token == last + 2


def test_a_token_at_its_end_is_refused_and_does_not_wrap(valkey, worker):
    valkey.execute("SET", TOKEN, 2**63 - 1)
    alice = worker(valkey.url)

    with pytest.raises(BackendMisconfigured, match="token"):
        alice.ask("job")

    assert alice.backend.get("job", budget()) is None
    assert valkey.execute("GET", TOKEN) == b"%d" % (2**63 - 1)


@pytest.mark.parametrize("last", [9, 10, 2**60])
def test_a_counter_that_somebody_deleted_goes_on_above_the_record(valkey, worker, last):
    valkey.execute("SET", TOKEN, last)
    alice = worker(valkey.url)
    alice.hold("job").released()

    valkey.execute("DEL", TOKEN)

    assert alice.hold("job").token == last + 2
    assert valkey.execute("GET", TOKEN) == b"%d" % (last + 2)


def test_a_flushed_server_is_noticed_by_the_next_renewal(valkey, worker):
    hold = worker(valkey.url).hold("job")

    valkey.execute("FLUSHALL")

    assert hold.renew() == Gone("deleted")


def test_a_user_with_the_documented_rights_can_do_everything(valkey, worker, canary):
    valkey.execute("ACL", "SETUSER", "leases", "reset", "on", f">{canary}", *RIGHTS)
    url = f"redis://leases:{canary}@{valkey.host}:{valkey.port}/0"
    alice = worker(url)

    ear = alice.listens()
    hold = alice.hold("job")
    assert alice.mark("job")
    queued = alice.queue("job")
    hold.renewed()
    alice.is_refused("job")
    hold.released()
    ear.hears("job", "released")
    queued.hold().released()
    assert alice.names(ended=True) == ["job"]
    assert alice.cleanup() == 1
    assert {check.status for check in alice.backend.diagnose()} <= {"ok", "warn"}
    ear.close()


def test_a_user_without_channels_releases_and_hears_nothing(valkey, worker, canary):
    valkey.execute("ACL", "SETUSER", "deaf", "reset", "on", f">{canary}", *RIGHTS, "resetchannels")
    alice = worker(f"redis://deaf:{canary}@{valkey.host}:{valkey.port}/0")
    hold = alice.hold("job")
    assert alice.mark("job")

    assert alice.backend.listen(budget()) is None
    hold.released()
    alice.hold("job")


def test_a_user_without_rights_is_told_so(valkey, worker, canary):
    valkey.execute("ACL", "SETUSER", "nobody", "reset", "on", f">{canary}", "+ping")
    alice = worker(f"redis://nobody:{canary}@{valkey.host}:{valkey.port}/0")

    with pytest.raises(BackendMisconfigured, match=r"no permissions|can't run"):
        alice.ask("job")


def test_a_wrong_password_is_told_and_not_shown(valkey, worker):
    for url in (f"redis://:hunter22@{valkey.host}:{valkey.port}", f"redis://{valkey.host}:{valkey.port}"):
        with pytest.raises(BackendMisconfigured, match="user or password") as caught:
            worker(url).ask("job")
        assert "hunter22" not in str(caught.value)
