"""The catalogue of faults is complete, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.catalogue import CATALOGUE

ROOT = Path(__file__).resolve().parents[2]
FAULTS = 96


def test_every_fault_has_a_test_or_says_what_it_lacks() -> None:
    assert list(CATALOGUE) == list(range(1, FAULTS + 1))
    assert [number for number, fault in CATALOGUE.items() if not fault.tests and not fault.lacks] == []


@pytest.mark.parametrize("number", CATALOGUE)
def test_what_the_catalogue_names_exists(number: int) -> None:
    for test in CATALOGUE[number].tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).exists(), test
        assert re.search(rf"(\bdef |^){name}\b", (ROOT / path).read_text("utf-8"), re.MULTILINE) or not name, test


def test_every_test_of_a_fault_is_in_the_catalogue() -> None:
    named = {test for fault in CATALOGUE.values() for test in fault.tests}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if path.name != Path(__file__).name:
            there = re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)
            assert [name for name in there if f"tests/faults/{path.name}::{name}" not in named] == []
