"""Which renewal is due: pure arithmetic over moments that the test invents."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pglease import options
from pglease.schedule import RenewalSchedule

MOMENTS = st.floats(0, 1e6)


def schedule(**next_at: float) -> RenewalSchedule[str]:
    """Leases of 30 s, by the moment of their next renewal."""
    made: RenewalSchedule[str] = RenewalSchedule()
    for key, at in next_at.items():
        made.add(key, interval=10.0, box=5.0, sent_at=at - 10.0)
    return made


def test_nothing_is_due_in_an_empty_schedule():
    empty = schedule()

    assert empty.next_at() == math.inf
    assert empty.due(1e9) == []
    assert len(empty) == 0


def test_a_renewal_is_due_one_interval_after_the_last_request_was_sent():
    leases: RenewalSchedule[str] = RenewalSchedule()

    due_at = leases.add("job", interval=20.0, box=5.0, sent_at=100.0)

    assert due_at == leases.next_at() == 120.0
    assert leases.due(119.999) == []
    assert leases.due(120.0) == ["job"]


def test_whoever_is_due_pulls_along_what_would_be_due_within_a_quarter_of_its_interval():
    leases = schedule(now=100.0, soon=102.5, later=102.6)

    assert leases.due(100.0) == ["now", "soon"]


def test_nobody_is_pulled_along_while_nobody_is_due():
    leases = schedule(soon=102.5, sooner=100.1)

    assert leases.due(100.0) == []


def test_hundreds_of_leases_taken_one_after_the_other_settle_into_one_renewal_for_all():
    leases = schedule(**{f"job-{n}": 100 + n * 0.004 for n in range(500)})

    together = leases.due(leases.next_at())
    for key in together:
        leases.confirmed(key, sent_at=100.0)

    assert len(together) == 500
    assert leases.next_at() == 110.0
    assert len(leases.due(110.0)) == 500


def test_a_confirmed_renewal_counts_from_when_it_was_sent():
    leases = schedule(job=100.0)

    leases.confirmed("job", sent_at=101.0)

    assert leases.next_at() == 111.0


def test_what_was_dropped_is_never_due_and_an_unknown_key_is_harmless():
    leases = schedule(job=100.0, other=200.0)

    leases.drop("job")
    leases.drop("never heard of")
    leases.confirmed("job", sent_at=100.0)
    leases.unanswered("job", now=100.0, trusted_until=120.0, spread=0.5)

    assert "job" not in leases
    assert "other" in leases
    assert leases.next_at() == 200.0


def test_clear_leaves_nothing():
    leases = schedule(job=100.0)

    leases.clear()

    assert len(leases) == 0


def test_adding_again_replaces_the_earlier_plan():
    leases = schedule(job=100.0)

    leases.add("job", interval=1.0, box=0.5, sent_at=50.0)

    assert len(leases) == 1
    assert leases.next_at() == 51.0


@settings(deadline=None)
@given(now=MOMENTS, left=st.floats(0, 3600), spread=st.floats(0, 1))
def test_an_unanswered_renewal_is_tried_again_soon_and_not_in_a_busy_loop(now, left, spread):
    leases = schedule(job=now)

    leases.unanswered("job", now=now, trusted_until=now + left, spread=spread)

    pause = leases.next_at() - now
    assert 0.024 < pause < 1.001
    assert left < 0.5 or pause <= left / 10 + 1e-6


@settings(deadline=None)
@given(left=st.floats(2.0, 60.0), spread=st.floats(0, 1))
def test_at_least_nine_tries_are_planned_before_the_deadline(left, spread):
    """Each is said to be unanswered at once; what the answers take is the box's matter."""
    leases, now, tries = schedule(job=0.0), 0.0, 0

    while now < left:
        tries += 1
        leases.unanswered("job", now=now, trusted_until=left, spread=spread)
        now = leases.next_at()

    assert tries >= 9


def test_leases_that_failed_together_are_not_tried_again_in_step():
    leases = schedule(one=100.0, two=100.0)

    leases.unanswered("one", now=100.0, trusted_until=110.0, spread=0.0)
    leases.unanswered("two", now=100.0, trusted_until=110.0, spread=1.0)

    leases.drop("one")
    late = leases.next_at()
    assert late == 101.0


def test_a_batch_takes_as_long_as_its_most_urgent_member_may():
    leases: RenewalSchedule[str] = RenewalSchedule()
    leases.add("long", interval=20.0, box=5.0, sent_at=0.0)
    leases.add("short", interval=1.0, box=0.8, sent_at=0.0)

    assert leases.box(["long", "short"]) == 0.8
    assert leases.box(["short"]) == 0.8


def test_a_very_urgent_member_hurries_its_batch():
    leases: RenewalSchedule[str] = RenewalSchedule()
    leases.add("long", interval=20.0, box=5.0, sent_at=0.0)
    leases.add("very short", interval=0.1, box=0.08, sent_at=0.0)

    assert leases.box(["long", "very short"]) == 0.08


def test_a_batch_of_patient_leases_does_not_delay_an_impatient_one_that_is_not_in_it():
    leases: RenewalSchedule[str] = RenewalSchedule()
    leases.add("long", interval=20.0, box=5.0, sent_at=0.0)
    leases.add("short", interval=1.0, box=0.8, sent_at=0.0)

    assert leases.box(["long"]) == 0.8


def test_one_very_short_lease_does_not_shrink_everybodys_time_to_nothing():
    leases: RenewalSchedule[str] = RenewalSchedule()
    leases.add("long", interval=20.0, box=5.0, sent_at=0.0)
    leases.add("tiny", interval=0.1, box=0.05, sent_at=0.0)

    assert leases.box(["long"]) == 0.5
    assert leases.box(["tiny"]) == 0.05


def test_a_batch_of_nothing_that_is_known_has_a_bounded_time():
    assert 0 < schedule().box([]) <= 5.0
    assert 0 < schedule().box(["gone"]) <= 5.0


@settings(deadline=None)
@given(
    ttl=st.floats(0.1, 86400),
    asked=st.none() | st.floats(0.01, 1e5),
    margin=st.none() | st.floats(0.0, 1e5),
    start=MOMENTS,
)
def test_three_renewals_begin_within_one_ttl_whatever_interval_was_asked_for(ttl, asked, margin, start):
    interval = options.interval_for(ttl, asked)
    leases: RenewalSchedule[str] = RenewalSchedule()
    leases.add("job", interval=interval, box=1.0, sent_at=start)

    moments = []
    while len(moments) < 3:
        now = leases.next_at()
        moments.append(now)
        leases.confirmed("job", sent_at=now)

    assert moments[-1] <= start + ttl * (1 + 1e-9) + 1e-6
    # Two whole tries fit between a renewal that fails and the deadline.
    kept = options.margin_for(ttl, margin)
    assert interval + 2 * options.renewal_box(ttl, kept, interval) <= ttl - kept


@pytest.mark.parametrize("ttl", [2, 60, 3600])
def test_a_lease_survives_two_renewals_in_a_row_that_are_never_answered(ttl):
    """Each takes its whole box before it is given up; the third begins before the deadline."""
    margin, interval = options.margin_for(ttl), options.interval_for(ttl)
    box = options.renewal_box(ttl, margin, interval)
    leases: RenewalSchedule[str] = RenewalSchedule()
    leases.add("job", interval=interval, box=box, sent_at=0.0)

    now = leases.next_at()
    for _ in range(2):
        now += leases.box(["job"])
        leases.unanswered("job", now=now, trusted_until=ttl - margin, spread=0.0)
        now = leases.next_at()

    assert now < ttl - margin
