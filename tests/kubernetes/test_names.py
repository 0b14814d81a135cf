"""Any legal name becomes a legal object name, and no two become the same."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pglease.backends.kubernetes_names import FLOOR, checked_namespace, object_name
from pglease.errors import ConfigurationError
from pglease.testing.contract import HARD_NAMES

LEGAL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?\Z")
names = st.text(min_size=1, max_size=255).filter(lambda text: not any("\ud800" <= char <= "\udfff" for char in text))


@settings(max_examples=60, deadline=None)
@given(names)
def test_every_name_becomes_a_legal_one(name: str) -> None:
    assert LEGAL.match(object_name(name))
    assert len(object_name(name)) <= 101
    assert object_name(name) != FLOOR


@settings(max_examples=60, deadline=None)
@given(names, names)
def test_two_names_become_two(one: str, other: str) -> None:
    assert (object_name(one) == object_name(other)) == (one == other)


def test_names_that_look_alike_become_different_ones() -> None:
    alike = {*HARD_NAMES.values(), "users:42", "users/42", "users-42", "a.b", "a/b", "Order", "order", "floor"}

    assert len({object_name(name) for name in alike}) == len(alike)


def test_people_recognise_it() -> None:
    assert re.fullmatch(r"pglease-daily-report-[a-z2-7]{52}", object_name("daily:report"))
    assert re.fullmatch(r"pglease-[a-z2-7]{52}", object_name("日報"))


def test_a_name_is_mapped_the_same_for_ever() -> None:
    assert object_name("job") == "pglease-job-l2gjsarapl5ow4jaimgfqwsel4q6skjsbaowjpez7ahesjn4waba"


@pytest.mark.parametrize("namespace", ["Jobs", "a_b", "-a", "a-", "a" * 64, "a.b", "a/b", "jobs?x"])
def test_a_namespace_that_cannot_be_is_refused(namespace: str) -> None:
    with pytest.raises(ConfigurationError, match="namespace"):
        checked_namespace(namespace)


@pytest.mark.parametrize("namespace", ["a", "jobs", "kube-system", "0", "a" * 63, string.digits])
def test_a_namespace_is_taken_as_it_is(namespace: str) -> None:
    assert checked_namespace(namespace) == namespace
