"""What the store says: records, lists, cleaning up, and an operator's end of somebody's hold."""

from __future__ import annotations

import dataclasses
from datetime import UTC, timedelta

import pytest

from pglease import ConfigurationError, Lease, MemoryBackend, PGLease

FACES = ("threads", "asyncio")


def test_a_name_that_was_never_held_is_unknown(leases):
    assert leases.get_lease("job") is None
    assert leases.list_leases() == []


def test_a_record_says_who_holds_it_since_when_until_when(leases, rival):
    with rival.acquire("job", ttl=60, metadata={"a": 1}) as lease:
        record = leases.get_lease("job")

    assert isinstance(record, Lease)
    assert (record.task_name, record.name) == ("job", "job")
    assert (record.owner_id, record.holder) == ("rival", "rival")
    assert record.fencing_token == lease.fencing_token
    assert record.heartbeat_at == record.renewed_at == record.acquired_at
    assert record.expires_at - record.acquired_at == timedelta(seconds=60)
    assert record.acquired_at.tzinfo is UTC
    assert record.seen_at >= record.acquired_at
    assert record.transitions == 0
    assert record.metadata == {"a": 1}
    assert not record.is_expired()
    assert 59 < record.time_remaining() <= 60
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.owner_id = "me"  # type: ignore[misc]


def test_a_record_stays_readable_after_its_hold(leases, rival):
    rival.try_acquire("job")
    rival.release("job")

    record = leases.get_lease("job")

    assert record.is_expired()
    assert record.time_remaining() == 0.0
    assert record.owner_id == "rival"


def test_a_list_is_of_one_prefix_in_order_and_of_what_has_not_been_given_back(leases, rival, store):
    for name in ("b%", "a_", "a%", "aa", "ab"):
        leases.try_acquire(name, heartbeat=False)
    leases.release("aa")
    store.lapse("ab")

    assert [lease.name for lease in rival.list_leases()] == ["a%", "a_", "ab", "b%"]
    assert [lease.name for lease in rival.list_leases("a")] == ["a%", "a_", "ab"]
    assert [lease.name for lease in rival.list_leases("a%")] == ["a%"]
    assert [lease.name for lease in rival.list_leases("a_")] == ["a_"]
    assert [lease.name for lease in rival.list_leases("a", ended=True)] == ["a%", "a_", "aa", "ab"]


@pytest.mark.parametrize("prefix", ["a\nb", None, 7, "x" * 256])
def test_what_is_no_prefix_is_refused(leases, prefix):
    with pytest.raises(ConfigurationError, match="prefix"):
        leases.list_leases(prefix)
    with pytest.raises(ConfigurationError, match="prefix"):
        leases.queues(prefix)


def test_a_store_without_queues_says_so():
    store = MemoryBackend()
    store.traits = dataclasses.replace(store.traits, fair=False)

    with PGLease(store) as leases:
        for ask in (lambda: leases.queued("job"), leases.queues):
            with pytest.raises(ConfigurationError, match="trait 'fair'"):
                ask()


def test_looking_changes_nothing(leases, rival):
    rival.try_acquire("job", heartbeat=False)
    before = leases.get_lease("job")

    for _ in range(3):
        leases.list_leases()
        leases.get_lease("job")
        leases.try_acquire("job")

    assert dataclasses.replace(leases.get_lease("job"), seen_at=before.seen_at) == before


def test_cleaning_up_removes_what_is_over_and_tokens_never_go_back(leases, rival, store):
    for _ in range(3):
        with leases.acquire("job"):
            pass
    leases.try_acquire("held")
    leases.try_acquire("lapsed", heartbeat=False)
    store.lapse("lapsed")

    assert rival.cleanup_expired() == 2

    assert rival.get_lease("job") is None
    assert rival.get_lease("held") is not None
    assert rival.cleanup_expired() == 0
    with rival.acquire("job") as lease:
        assert lease.fencing_token > 3


def test_cleaning_up_leaves_what_ended_lately(leases):
    with leases.acquire("job"):
        pass

    assert leases.cleanup_expired(older_than="1h") == 0
    assert leases.get_lease("job") is not None
    assert leases.cleanup_expired(older_than=timedelta(0)) == 1


@pytest.mark.parametrize("age", [-1, "x", None, float("nan"), True])
def test_what_is_no_age_is_refused(leases, age):
    with pytest.raises(ConfigurationError, match="older_than"):
        leases.cleanup_expired(age)


def test_an_operator_ends_the_hold_with_that_token_and_no_other(leases, rival):
    leases.try_acquire("job", heartbeat=False)
    token = leases.held("job").fencing_token

    assert rival.force_release("job", token + 1) is False
    assert rival.get_lease("job").time_remaining() > 0
    assert rival.force_release("job", token) is True
    assert rival.force_release("job", token) is False
    assert rival.try_acquire("job") is True
    assert rival.force_release("job", token) is False, "an old token ends nobody else's hold"
    assert rival.held("job").held


def test_an_operator_ends_what_is_only_waited_out(leases, rival):
    with leases.acquire("job", min_hold=600) as lease:
        pass
    assert rival.try_acquire("job") is False

    assert rival.force_release("job", lease.fencing_token) is True

    assert rival.try_acquire("job") is True


def test_nobody_is_forced_out_of_what_nobody_knows(leases):
    assert leases.force_release("never heard of", 1) is False


@pytest.mark.parametrize("token", [0, -1, True, 1.0, "1", None])
def test_what_is_no_token_is_refused(leases, token):
    with pytest.raises(ConfigurationError, match="fencing_token"):
        leases.force_release("job", token)
