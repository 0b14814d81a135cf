"""Every clause of the contract has tests, and every test of the contract stands for a clause."""

from __future__ import annotations

import re

import pytest

from pglease.backends import base
from pglease.testing.contract import CLAUSES, BackendContract, clause_map, clauses


def test_the_suite_knows_exactly_the_clauses_that_the_contract_says() -> None:
    said = re.findall(r"^(C\d+) ", base.__doc__ or "", re.MULTILINE)

    assert said == list(CLAUSES) == [f"C{number}" for number in range(1, 25)]


@pytest.mark.parametrize("clause", CLAUSES)
def test_every_clause_has_at_least_two_tests(clause: str) -> None:
    assert len(clause_map(BackendContract)[clause]) >= 2


def test_every_test_of_the_contract_stands_for_a_clause() -> None:
    tests = {name for name in dir(BackendContract) if name.startswith("test_")}

    assert set().union(*clause_map(BackendContract).values()) == tests
    assert len(tests) >= 80


def test_a_clause_that_does_not_exist_cannot_be_named() -> None:
    with pytest.raises(ValueError, match="C99"):
        clauses("C1", "C99")
    with pytest.raises(ValueError, match="no such"):
        clauses()


def test_a_verb_whose_clauses_are_named_in_the_contract_has_tests_for_them() -> None:
    table = clause_map(BackendContract)
    verbs = [getattr(base.Backend, verb) for verb in ("try_acquire", "renew", "release", "get", "close")]
    for verb in [*verbs, base.WakingBackend.listen, base.WakingBackend.mark, base.FairBackend.queue]:
        named = re.findall(r"C\d+", verb.__doc__ or "")

        assert named
        assert all(table[clause] for clause in named)
