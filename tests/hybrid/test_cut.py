"""A network that is cut without a word frees the lease within seconds."""

from __future__ import annotations

import pytest

from tests.support.cut import cut_off_a_holder

pytestmark = [pytest.mark.needs("netns", "postgres-programs")]


@pytest.mark.parametrize("in_an_answer", [False, True], ids=["on a quiet line", "in an answer"])
def test_a_cut_network_frees_the_lease_within_seconds_and_the_holder_is_told(canary: str, in_an_answer: bool) -> None:
    outcome = cut_off_a_holder(canary, in_an_answer=in_an_answer)

    print(f"told after {outcome.told_after:.2f} s, granted after {outcome.granted_after:.2f} s")
    assert outcome.reason == "session_died"
    assert 0.5 < outcome.told_after < 20
    assert 0.5 < outcome.granted_after < 30
