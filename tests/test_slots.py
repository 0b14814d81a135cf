"""Slots of time are found from the store's moments alone."""

from __future__ import annotations

import pickle
import sys
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pglease import ConfigurationError, Cron, MissingDependencyError
from pglease.slots import ROUNDING, Every, left_of, once_per

MOMENTS = st.datetimes(datetime(1971, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("wanted", "moment", "end"),
    [
        ("1h", "2026-03-01 10:59:59.999999", "2026-03-01 11:00"),
        ("1h", "2026-03-01 11:00", "2026-03-01 12:00"),
        (timedelta(days=1), "2026-03-01 23:00", "2026-03-02 00:00"),
        (0.5, "2026-03-01 00:00:00.400", "2026-03-01 00:00:00.500"),
        ("0 3 * * *", "2026-03-01 02:59:59", "2026-03-01 03:00"),
        ("0 3 * * *", "2026-03-01 03:00", "2026-03-02 03:00"),
        ("*/15 9-17 * * mon-fri", "2026-02-27 17:50", "2026-03-02 09:00"),
        (Cron("0 3 * * *", "Europe/Berlin"), "2026-07-01 00:59", "2026-07-01 01:00"),
        (Cron("0 3 * * *", "Europe/Berlin"), "2026-12-01 01:59", "2026-12-01 02:00"),
    ],
)
def test_a_slot_ends_where_the_next_begins(wanted, moment, end):
    assert once_per(wanted).end(at(moment)) == at(end)


def test_slots_shorter_than_time_can_be_written_are_refused_at_once():
    with pytest.raises(ConfigurationError, match="at least a microsecond, not 1e-07"):
        once_per(1e-7)
    assert once_per(1e-6) == Every(1e-6)


@given(moment=MOMENTS, seconds=st.floats(0.01, 1e7))
def test_every_moment_is_in_one_slot(moment, seconds):
    slots = Every(seconds)

    end = slots.end(moment)

    assert moment < end <= moment + timedelta(seconds=seconds + ROUNDING)
    assert slots.end(end) > end


@given(moment=MOMENTS)
def test_a_hold_that_is_waited_out_ends_in_the_next_slot(moment):
    slots = Every(3600)

    free_at = moment + timedelta(seconds=left_of(slots, moment))

    assert slots.end(free_at) == slots.end(moment) + timedelta(hours=1)


@pytest.mark.parametrize("wanted", [0, -1, "soon", True, float("inf"), None, "61 * * * *", "0 3 30 2 *", "* * *"])
def test_what_is_no_slot_is_refused_by_name(wanted):
    with pytest.raises(ConfigurationError, match="once_per"):
        once_per(wanted)


def test_several_words_are_meant_for_cron_however_few():
    with pytest.raises(ConfigurationError, match="cron expression: '0 3'"):
        once_per("0 3")


def test_an_unknown_zone_is_refused():
    with pytest.raises(ConfigurationError, match="timezone must be an IANA name, not 'Mars/Olympus'"):
        Cron("0 3 * * *", "Mars/Olympus")


def test_slots_can_be_pickled():
    assert pickle.loads(pickle.dumps(Cron("0 3 * * *"))) == Cron("0 3 * * *")


def test_slots_of_a_week_begin_on_thursdays_as_the_epoch_did():
    assert Every(7 * 86400).end(at("2026-03-01 12:00")) == at("2026-03-05 00:00")


def test_what_is_left_of_a_slot_is_rounded_up_by_a_thousandth():
    assert left_of(Every(3600), at("2026-03-01 10:59:59")) == pytest.approx(1.001)


def test_without_cronsim_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cronsim", None)

    with pytest.raises(MissingDependencyError, match="cron"):
        Cron("0 3 * * *")
