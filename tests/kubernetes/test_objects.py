"""What is written next, made from what stands there."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from pglease.backends import kubernetes_objects as objects
from pglease.backends.base import Request

MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def begun(after: timedelta) -> datetime:
    """Return when a second hold is said to begin, whose client reads a clock that far ahead of the first one's."""
    first = objects.first_hold(Request("job", "alice", "one", 60.0), 1, MOMENT)
    second = objects.next_hold(first, Request("job", "bob", "two", 60.0), 0, MOMENT + after)
    return second.acquired_at


@pytest.mark.parametrize("behind", [0.0004, 0.5, 1.0])
def test_a_hold_is_not_said_to_begin_before_the_last_one_when_its_client_reads_the_clock_a_little_behind(behind):
    assert begun(-timedelta(seconds=behind)) == MOMENT


@pytest.mark.parametrize("seconds", [-3600, -1.01, 0, 0.0004, 3600])
def test_a_clock_that_was_wrong_is_not_followed(seconds):
    assert begun(timedelta(seconds=seconds)) == MOMENT + timedelta(seconds=seconds)
