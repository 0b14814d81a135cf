"""The protocols as Promela models, explored by Spin: here a few, in `make stress` all of them."""

from __future__ import annotations

import pytest

from tests.models.check import CONFIGURATIONS, Configuration, check

QUICK = {"tokens", "hybrid", "hybrid CUT"}


@pytest.mark.needs("spin")
@pytest.mark.parametrize(
    "configuration",
    [pytest.param(one, id=str(one), marks=[] if str(one) in QUICK else pytest.mark.long) for one in CONFIGURATIONS],
)
def test_a_model_that_is_right_holds_and_one_that_is_broken_is_found_out(configuration: Configuration) -> None:
    found = check(configuration)

    assert found.errors == configuration.errors, configuration.says
    assert found.states > 50
