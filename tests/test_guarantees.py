"""Each guarantee of the page names the tests that hold it, and they exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "guarantees.md").read_text("utf-8")
GUARANTEES = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_each_guarantee_is_held_by_tests_that_exist(guarantee: str) -> None:
    tests = NAMED.findall(GUARANTEES[guarantee])

    assert tests
    for path, name in tests:
        assert re.search(rf"\bdef {name}\b", (ROOT / path).read_text("utf-8")), f"{path}::{name}"


def test_nothing_that_looks_like_a_test_is_overlooked() -> None:
    assert len(re.findall(r"::test_", PAGE)) == len(NAMED.findall(PAGE))
