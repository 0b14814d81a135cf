"""The suite's own ear: what it hears of several names may come in any order."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pglease.records import Change
from pglease.testing.harness import Ear


class Told:
    """A subscription that hears one change after the other, and then nothing."""

    def __init__(self, *changes: Change) -> None:
        self._changes = list(changes)

    def next(self, within: float) -> Iterable[Change]:
        return [self._changes.pop(0)] if self._changes else []


def test_what_is_heard_of_another_name_can_be_waited_for_afterwards() -> None:
    ear = Ear(Told(Change("b", "released"), Change("a", "released")))

    assert ear.hears("a", "released").name == "a"
    assert ear.hears("b", "released", within=0.1).name == "b"


def test_what_was_heard_of_a_name_before_is_not_heard_again() -> None:
    ear = Ear(Told(Change("a", "granted"), Change("a", "released")))
    ear.hears("a", "released")

    with pytest.raises(AssertionError, match="'a' was not heard to be granted"):
        ear.hears("a", "granted", within=0.01)
