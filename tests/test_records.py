"""Facts say what the store said, in its own time, and cannot be changed."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, fields, replace
from datetime import UTC, datetime, timedelta, timezone
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pglease import records
from pglease.bonds import Bond
from pglease.errors import ConfigurationError
from pglease.records import (
    Adoption,
    Gone,
    Granted,
    Handover,
    Held,
    Lease,
    Loss,
    Refused,
    Released,
    Renewal,
    Request,
    Tenure,
    Unknown,
    lease_of,
)

SEEN = datetime(2024, 5, 1, 12, tzinfo=UTC)


def lease(*, age: float = 30, silent: float = 10, left: float = 50, **facts) -> Lease:
    return replace(
        Lease(
            task_name="job",
            owner_id="web-1",
            fencing_token=7,
            acquired_at=SEEN - timedelta(seconds=age),
            heartbeat_at=SEEN - timedelta(seconds=silent),
            expires_at=SEEN + timedelta(seconds=left),
            transitions=2,
            seen_at=SEEN,
        ),
        **facts,
    )


def test_a_lease_can_be_read_in_the_words_of_kubernetes() -> None:
    fact = lease()

    assert (fact.name, fact.holder, fact.renewed_at) == (fact.task_name, fact.owner_id, fact.heartbeat_at)


def test_nothing_attached_is_an_empty_mapping() -> None:
    assert dict(lease().metadata) == {}
    assert dict(Request("job", "web-1", "0" * 32, 60.0).metadata) == {}


@pytest.mark.parametrize(
    "fact",
    [
        lease(),
        Request("job", "web-1", "0" * 32, 60.0),
        Renewal("job", "0" * 32, 60.0),
        Granted(lease()),
        Refused(lease(), 50.0),
        Held(lease()),
        Gone("taken", lease()),
        Unknown(),
        Released(),
        Loss("expired"),
    ],
    ids=lambda fact: type(fact).__name__,
)
def test_a_fact_cannot_be_changed(fact) -> None:
    with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
        fact.name = "other"
    with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
        fact.anything = 1


def test_time_is_judged_at_the_reading_unless_another_moment_is_given() -> None:
    fact = lease(left=50)

    assert fact.time_remaining() == 50
    assert fact.time_remaining(SEEN + timedelta(seconds=20)) == 30
    assert not fact.is_expired()
    assert fact.is_expired(SEEN + timedelta(seconds=51))


def test_a_hold_is_over_at_the_very_moment_of_its_expiry() -> None:
    fact = lease(left=0)

    assert fact.is_expired()
    assert fact.time_remaining() == 0


def test_what_is_over_has_nothing_left_and_not_less() -> None:
    assert lease(left=-100).time_remaining() == 0


def test_judging_needs_no_clock_of_this_process() -> None:
    ancient = lease(seen_at=datetime(1999, 1, 1, tzinfo=UTC), expires_at=datetime(1999, 1, 1, 0, 1, tzinfo=UTC))

    assert ancient.time_remaining() == 60
    assert not ancient.is_expired()


def test_moments_in_other_time_zones_are_the_same_moments() -> None:
    there = timezone(timedelta(hours=-7))

    assert lease(left=50).time_remaining(SEEN.astimezone(there)) == 50


@pytest.mark.parametrize(
    ("silent", "left", "timeout", "wanted"),
    [
        (61, 50, 60, True),
        (60, 50, 60, False),
        (10, 50, 60, False),
        (10, 50, 5, True),
        (61, 0, 60, False),
        (61, -10, 60, False),
    ],
)
def test_a_zombie_is_silent_but_has_not_expired(silent: float, left: float, timeout: float, wanted: bool) -> None:
    assert lease(silent=silent, left=left).is_zombie(timeout) is wanted


def test_a_zombie_is_silent_for_a_minute_by_default() -> None:
    fact = lease(silent=59, left=600)

    assert not fact.is_zombie()
    assert fact.is_zombie(now=SEEN + timedelta(seconds=2))


@given(left=st.integers(-10_000, 10_000), later=st.integers(0, 20_000))
def test_expired_and_nothing_left_are_the_same_thing(left: int, later: int) -> None:
    now = SEEN + timedelta(milliseconds=later)
    fact = lease(left=left / 1000)

    assert fact.is_expired(now) == (fact.time_remaining(now) == 0)


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_what_is_expired_stays_expired(one: float, two: float) -> None:
    fact = lease(left=1000)
    sooner, later = sorted((one, two))

    if fact.is_expired(SEEN + timedelta(seconds=sooner)):
        assert fact.is_expired(SEEN + timedelta(seconds=later))


def test_a_refusal_names_the_holder_when_the_store_did() -> None:
    assert Refused(lease(), 50.0).held_by == "web-1"
    assert Refused(None, 0.1).held_by is None


def test_a_loss_names_the_new_holder_only_when_it_was_taken() -> None:
    assert Loss("taken", lease=lease()).taken_by == "web-1"
    assert Loss("taken").taken_by is None
    assert Loss("expired", lease=lease()).taken_by is None


def test_the_reasons_for_a_loss_are_a_closed_set() -> None:
    assert set(get_args(records.LossReason)) == {
        "expired",
        "taken",
        "deleted",
        "forced",
        "unreachable",
        "max_hold",
        "session_died",
        "forked",
        "closed",
    }


@pytest.mark.parametrize(
    "copied",
    [lambda fact: pickle.loads(pickle.dumps(fact)), copy.deepcopy, lambda fact: Lease(**asdict(fact))],
    ids=["pickle", "deepcopy", "asdict"],
)
def test_a_lease_can_be_handed_to_another_process_or_written_down(copied) -> None:
    assert copied(lease()) == lease()


def test_equal_facts_are_equal() -> None:
    assert lease() == lease()
    assert lease() != lease(fencing_token=8)
    assert Gone("deleted") == Gone("deleted") != Gone("taken")


def test_a_fact_may_be_a_key_whatever_is_attached_to_it() -> None:
    assert {lease(metadata={"pod": "a"}): 1}[lease(metadata={"pod": "a"})] == 1


def test_two_grants_of_one_record_are_equal_whatever_they_rest_on_besides() -> None:
    assert Granted(lease(), Bond()) == Granted(lease())


def test_what_is_not_said_has_not_happened() -> None:
    assert lease().given_back is False
    assert Adoption("job", "0" * 32, "1" * 32, "web-1", 60.0).unattended is False


# -- handed over, and remembered ---------------------------------------------------------------------------------------

HANDOVER = Handover("job", "0123456789abcdef" * 2, "web-1", 7, 30.0)


def test_a_handover_is_read_from_what_it_is_written_as_and_its_repr_does_not_give_it_away():
    assert Handover.read(str(HANDOVER)) == HANDOVER
    assert HANDOVER.lease_id not in repr(HANDOVER)


@pytest.mark.parametrize(
    "text",
    [
        str(HANDOVER).partition(":")[2],
        str(HANDOVER)[:-2],
        str(replace(HANDOVER, lease_id="0123")),
        str(replace(HANDOVER, lease_id="0123456789ABCDEF" * 2)),
        7,
    ],
)
def test_what_is_no_handover_is_refused(text):
    with pytest.raises(ConfigurationError, match="no handover"):
        Handover.read(text)


def test_a_tenure_lasted_until_its_end_or_lasts_until_it_is_read():
    running = Tenure("job", "web-1", 7, SEEN - timedelta(seconds=30), None, None, SEEN)

    assert running.seconds == 30
    assert replace(running, ended_at=SEEN - timedelta(seconds=10), ending="released").seconds == 20


def test_a_lease_that_a_store_made_is_one_like_any_other():
    facts = {field.name: getattr(lease(), field.name) for field in fields(Lease)}

    made = lease_of(**facts)

    assert type(made) is Lease
    assert made == lease()
    assert pickle.loads(pickle.dumps(made)) == made
    with pytest.raises(FrozenInstanceError):
        made.fencing_token = 8  # type: ignore[misc]
