"""A belief ends before the fact it stands on, counted from the moment the request left."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pglease.options import margin_for
from pglease.records import Lease
from pglease.term import Term

SEEN = datetime(2024, 5, 1, tzinfo=UTC)
durations = st.floats(min_value=0.001, max_value=1e9)
moments = st.floats(min_value=0, max_value=1e8)


def lease_with(left: float) -> Lease:
    return Lease("job", "web-1", 1, SEEN, SEEN, SEEN + timedelta(seconds=left), 0, SEEN)


def test_trust_is_counted_from_the_sending_and_ends_a_margin_early() -> None:
    term = Term.begin(lease_with(60), sent_at=1000.0, ttl=60, margin=3)

    assert (term.sent_at, term.trusted_until) == (1000.0, 1057.0)
    assert term.lease == lease_with(60)


def test_a_slow_reply_makes_trust_no_longer() -> None:
    quick = Term.begin(lease_with(60), sent_at=1000.0, ttl=60, margin=3)
    slow = Term.begin(lease_with(60), sent_at=1000.0, ttl=60, margin=3)

    assert quick.trusted_until == slow.trusted_until
    assert slow.remaining(now=1050.0) == 7.0


def test_a_retry_that_found_its_older_grant_trusts_only_what_is_left() -> None:
    term = Term.begin(lease_with(20), sent_at=1000.0, ttl=60, margin=3)

    assert term.trusted_until == 1017.0


def test_a_store_that_granted_more_than_was_asked_is_not_trusted_for_it() -> None:
    assert Term.begin(lease_with(900), sent_at=0.0, ttl=60, margin=3).trusted_until == 57.0


def test_a_grant_that_has_already_ended_is_not_trusted_at_all() -> None:
    term = Term.begin(lease_with(-5), sent_at=1000.0, ttl=60, margin=3)

    assert term.trusted_until == 997.0
    assert term.remaining(now=1000.0) == 0.0


def test_trust_may_be_cut_short_and_is_never_lengthened_by_that() -> None:
    term = Term.begin(lease_with(60), sent_at=1000.0, ttl=60, margin=3)

    assert [term.until(moment).trusted_until for moment in (1056.0, 1057.0, 1058.0)] == [1056.0, 1057.0, 1057.0]
    assert term.until(1056.0) == term._replace(trusted_until=1056.0)


def test_what_remains_shrinks_to_zero_and_never_below() -> None:
    term = Term.begin(lease_with(60), sent_at=1000.0, ttl=60, margin=3)

    assert [term.remaining(now) for now in (1000.0, 1030.0, 1057.0, 1058.0, 9e9)] == [57.0, 27.0, 0.0, 0.0, 0.0]


def test_a_term_cannot_be_changed() -> None:
    term = Term.begin(lease_with(60), sent_at=0.0, ttl=60, margin=3)

    with pytest.raises(AttributeError):
        term.trusted_until = 1e9  # type: ignore[misc]


@given(ttl=durations, sent_at=moments, delay=st.floats(min_value=0, max_value=1e6))
def test_belief_ends_before_the_store_can_expire_the_hold(ttl: float, sent_at: float, delay: float) -> None:
    """The store reads its clock `delay` after the sending; its expiry, on our clock, is at sent_at + delay + ttl."""
    term = Term.begin(lease_with(ttl), sent_at=sent_at, ttl=ttl, margin=margin_for(ttl))

    assert term.trusted_until < sent_at + delay + ttl


@given(ttl=durations, sent_at=moments, margin=st.floats(min_value=0, max_value=1e9))
def test_more_margin_never_means_more_trust(ttl: float, sent_at: float, margin: float) -> None:
    generous = Term.begin(lease_with(ttl), sent_at=sent_at, ttl=ttl, margin=0.0)
    careful = Term.begin(lease_with(ttl), sent_at=sent_at, ttl=ttl, margin=margin)

    assert careful.trusted_until <= generous.trusted_until
