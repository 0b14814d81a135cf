"""The conversation that takes a lease, driven by hand: the test is the store, the clock and the sleeper."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pglease import steps
from pglease.errors import BackendUnavailable
from pglease.records import Adoption, Gone, Granted, InTheWay, Lease, Refused, Released, Request
from pglease.steps import LAST_LOOK, Answer, Call, Patience, Wait
from pglease.term import Term

TTL = 60.0
MARGIN = 3.0
ROUND_TRIP = 0.001
DAY = datetime(2020, 1, 1, tzinfo=UTC)
REQUEST = Request("job", "me", "0" * 32, TTL)


def record(left: float = TTL, owner: str = "me") -> Lease:
    return Lease("job", owner, 7, DAY, DAY, DAY + timedelta(seconds=left), 0, DAY)


def granted(left: float = TTL) -> Granted:
    return Granted(record(left))


def refused(retry_after: float = 30.0) -> Refused:
    return Refused(record(retry_after, "rival"), retry_after)


def down(*, outcome_unknown: bool = False) -> BackendUnavailable:
    return BackendUnavailable("down", outcome_unknown=outcome_unknown)


@dataclass
class Story:
    """A conversation and what became of it. Time begins at 100 and goes on only as the story says."""

    steps: Generator[Any, Answer, Term | Refused]
    now: float = 100.0
    calls: list[Call] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    result: Term | Refused | None = None
    step: Call | Wait | None = None

    def begin(self) -> Story:
        self.step = next(self.steps)
        return self

    def answer(self, what: Any, took: float = ROUND_TRIP) -> Story:
        """Answer the call that is waited for; sleep through the pauses after it."""
        assert isinstance(self.step, Call), self.step
        self.calls.append(self.step)
        sent_at, self.now = self.now, self.now + took
        error = what if isinstance(what, BackendUnavailable) else None
        self._go_on(Answer(self.now, None if error else what, sent_at, error))
        while isinstance(self.step, Wait):
            self.sleep(self.step.seconds)
        return self

    def sleep(self, seconds: float) -> None:
        assert isinstance(self.step, Wait)
        self.waits.append(self.step.seconds)
        self.now += seconds
        self._go_on(Answer(self.now))

    def _go_on(self, answer: Answer) -> None:
        try:
            self.step = self.steps.send(answer)
        except StopIteration as end:
            self.step, self.result = None, end.value

    @property
    def verbs(self) -> list[str]:
        return [call.verb for call in self.calls]


def story(
    wait: float | None = None, *, poll: float = 1.0, attempt: float = 10.0, spread: Callable[[], float] = lambda: 0.5
) -> Story:
    """Begin a conversation; `wait` as in `acquire`."""
    now = 100.0
    patience = Patience(None if wait is None else now + wait, poll, attempt)
    return Story(
        steps.acquire(REQUEST, margin=MARGIN, patience=patience, now=now, spread=spread, anew=lambda request: request),
        now,
    ).begin()


# -- asking once -------------------------------------------------------------------------------------------------------


def test_a_grant_ends_it_with_a_belief_counted_from_when_the_request_was_sent():
    asked = story().answer(granted(), took=2.0)

    assert isinstance(asked.result, Term)
    assert asked.result.sent_at == 100.0
    assert asked.result.trusted_until == 100.0 + TTL - MARGIN
    assert asked.verbs == ["try_acquire"]
    assert asked.waits == []


@pytest.mark.parametrize("took", [0.0, ROUND_TRIP])
def test_who_asks_once_is_refused_once_and_does_not_wait(took):
    asked = story().answer(refused(), took)

    assert asked.result == refused()
    assert (asked.verbs, asked.waits) == (["try_acquire"], [])


def test_who_asks_once_has_the_time_of_one_attempt():
    asked = story(attempt=10.0)

    assert asked.step == Call("try_acquire", (REQUEST,), 10.0)


def test_an_outage_is_raised_to_who_asks_once():
    with pytest.raises(BackendUnavailable) as caught:
        story().answer(down())

    assert caught.value.outcome_unknown is False


def test_a_lost_reply_is_raised_as_unknown_to_who_asks_once():
    with pytest.raises(BackendUnavailable) as caught:
        story().answer(down(outcome_unknown=True))

    assert caught.value.outcome_unknown is True


def test_a_retry_that_finds_its_own_older_grant_believes_only_in_what_is_left_of_it():
    asked = story().answer(granted(left=20.0))

    assert isinstance(asked.result, Term)
    assert asked.result.trusted_until == 100.0 + 20.0 - MARGIN


@pytest.mark.parametrize("took", [TTL - MARGIN, TTL, 1000.0])
def test_a_grant_that_arrives_after_its_own_trust_is_given_back(took):
    asked = story().answer(granted(), took=took)

    assert asked.step == Call("release", ("job", REQUEST.lease_id), 10.0)
    with pytest.raises(BackendUnavailable, match="too late and given back") as caught:
        asked.answer(Released())
    assert caught.value.outcome_unknown is False


def test_a_late_grant_that_cannot_be_given_back_is_raised_as_unknown():
    asked = story().answer(granted(), took=1000.0)

    with pytest.raises(BackendUnavailable) as caught:
        asked.answer(down())

    assert caught.value.outcome_unknown is True


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_who_waits_looks_again_and_again_under_one_id():
    asked = story(wait=30).answer(refused()).answer(refused()).answer(granted())

    assert isinstance(asked.result, Term)
    assert asked.verbs == ["try_acquire"] * 3
    assert all(call.args == (REQUEST,) for call in asked.calls)
    assert len(asked.waits) == 2


def test_the_pause_is_the_poll_interval_while_the_hold_goes_on_for_longer():
    asked = story(wait=30, poll=4.0).answer(refused(retry_after=25.0))

    (pause,) = asked.waits
    assert 3.6 <= pause <= 4.0


def test_the_pause_ends_at_the_known_expiry_and_a_little_later():
    asked = story(wait=30, poll=4.0).answer(refused(retry_after=1.5))

    (pause,) = asked.waits
    assert 1.5 < pause <= 1.56


def test_a_holder_that_keeps_renewing_is_looked_at_about_once_per_ttl():
    now, looks, every = 0.0, 0, TTL / 3
    while now < 1000 * TTL:
        renewed_at = now - now % every
        now += steps.pause(600.0, refused(renewed_at + TTL - now), (looks % 11) / 10)
        looks += 1

    assert 1000 <= looks <= 1500  # a look may find as little as two thirds of the ttl left


def test_a_waiter_that_could_notice_a_death_looks_more_often():
    asked = story(wait=30, poll=4.0).answer(Refused(record(25.0, "rival"), 25.0, look_every=0.2))

    (pause,) = asked.waits
    assert 0.15 <= pause <= 0.2


@settings(deadline=None)
@given(spread=st.floats(0, 1), retry_after=st.floats(0, 100), poll=st.floats(0.01, 100))
def test_no_pause_is_a_busy_loop_or_longer_than_asked_for(spread, retry_after, poll):
    asked = story(wait=math.inf, poll=poll, spread=lambda: spread).answer(refused(retry_after))

    (pause,) = asked.waits
    assert pause >= 0.005
    assert pause <= max(poll, retry_after + 0.06) if retry_after < poll else pause <= poll


@pytest.mark.parametrize(
    ("poll", "said", "spread", "expected"),
    [
        (10.0, None, 0.0, 0.25),
        (10.0, None, 1.0, 0.5),
        (0.2, None, 1.0, 0.2),
        (10.0, refused(2.0), 0.0, 2.005),
        (10.0, refused(2.0), 1.0, 2.055),
        (0.2, refused(0.1), 1.0, 0.125),
        (10.0, refused(30.0), 0.0, 9.0),
        (10.0, refused(30.0), 1.0, 10.0),
    ],
)
def test_a_pause_is_as_long_as_this(poll: float, said: Refused | None, spread: float, expected: float) -> None:
    assert steps.pause(poll, said, spread) == pytest.approx(expected)


def test_two_who_wait_for_the_same_hold_do_not_look_in_step():
    early = story(wait=30, spread=lambda: 0.0).answer(refused(0.5)).waits
    late = story(wait=30, spread=lambda: 1.0).answer(refused(0.5)).waits

    assert early != late


def test_the_last_look_is_made_just_before_the_end_and_then_the_rest_is_waited_out():
    asked = story(wait=2.0, poll=50.0).answer(refused(retry_after=100.0))

    assert asked.now == pytest.approx(102.0 - LAST_LOOK)
    asked.answer(refused(retry_after=98.0))
    assert asked.now == pytest.approx(102.0)
    assert isinstance(asked.result, Refused)
    assert len(asked.calls) == 2


def test_with_no_more_time_than_a_look_takes_there_is_none():
    patience = Patience(LAST_LOOK, 1.0, 10.0)
    conversation = steps.acquire(
        REQUEST, margin=MARGIN, patience=patience, now=0.0, spread=lambda: 0.5, anew=lambda request: request
    )
    asked = Story(conversation, now=0.0).begin().answer(refused(), took=0.0)

    assert (asked.verbs, asked.waits) == (["try_acquire"], [LAST_LOOK])


def test_the_last_look_may_still_get_it():
    asked = story(wait=2.0, poll=50.0).answer(refused(100.0)).answer(granted())

    assert isinstance(asked.result, Term)


def test_a_grant_after_the_end_of_the_wait_is_given_back():
    asked = story(wait=2.0).answer(granted(), took=2.5)

    assert asked.step == Call("release", ("job", REQUEST.lease_id), 10.0)
    with pytest.raises(BackendUnavailable, match="too late"):
        asked.answer(Released())


def test_a_late_grant_after_refusals_is_given_back_and_the_refusal_is_the_answer():
    asked = story(wait=2.0, poll=50.0).answer(refused(100.0)).answer(granted(), took=1.0).answer(Released())

    assert asked.result == refused(100.0)


def test_a_look_takes_no_longer_than_what_is_left_of_the_wait():
    asked = story(wait=2.0, poll=1.0, attempt=10.0).answer(refused(100.0))

    assert asked.calls[0].seconds == 2.0
    assert isinstance(asked.step, Call)
    assert asked.step.seconds == pytest.approx(102.0 - asked.now)


def test_a_grant_whose_trust_ended_while_we_wait_on_is_given_back_and_asked_for_anew():
    asked = story(wait=math.inf).answer(granted(), took=1000.0).answer(Released())

    assert asked.verbs == ["try_acquire", "release"]
    asked.answer(granted())
    assert isinstance(asked.result, Term)


# -- waiting through trouble -------------------------------------------------------------------------------------------


def test_an_outage_is_waited_out():
    asked = story(wait=30)
    for _ in range(5):
        asked.answer(down(outcome_unknown=True))
    asked.answer(granted())

    assert isinstance(asked.result, Term)
    assert all(0.2 <= pause <= 0.5 for pause in asked.waits)


def test_a_wait_in_which_the_store_never_answered_raises_its_trouble():
    asked = story(wait=1.0)

    with pytest.raises(BackendUnavailable) as caught:
        while True:
            asked.answer(down())

    assert caught.value.outcome_unknown is False
    assert asked.now <= 101.1


def test_an_outage_at_the_end_of_a_wait_that_had_been_refused_is_a_refusal():
    asked = story(wait=2.0, poll=50.0).answer(refused(100.0)).answer(down())

    assert asked.result == refused(100.0)


def test_a_lost_reply_at_the_end_is_raised_since_a_grant_may_exist():
    asked = story(wait=2.0, poll=50.0).answer(refused(100.0))

    with pytest.raises(BackendUnavailable) as caught:
        asked.answer(down(outcome_unknown=True))

    assert caught.value.outcome_unknown is True


def test_a_lost_reply_stays_unknown_through_a_clean_outage():
    """That nothing was sent the second time does not say what became of the first."""
    asked = story(wait=0.55, poll=50.0).answer(down(outcome_unknown=True))

    with pytest.raises(BackendUnavailable) as caught:
        while True:
            asked.answer(down())

    assert caught.value.outcome_unknown is True


def test_a_later_refusal_settles_what_became_of_a_lost_reply():
    """Had it been granted, the look under the same id would have found the grant."""
    asked = story(wait=2.0, poll=0.5)
    asked.answer(down(outcome_unknown=True)).answer(refused(100.0))
    while asked.step is not None:
        asked.answer(refused(100.0) if asked.now < 101.5 else down())

    assert asked.result == refused(100.0)


# -- for ever ----------------------------------------------------------------------------------------------------------


def test_who_waits_for_ever_never_gives_up_and_never_looks_for_ever():
    asked = story(wait=math.inf, poll=5.0, attempt=10.0)
    for _ in range(1000):
        asked.answer(refused(3.0))
        assert isinstance(asked.step, Call)
        assert asked.step.seconds == 10.0

    assert isinstance(asked.answer(granted()).result, Term)
    assert all(math.isfinite(pause) for pause in asked.waits)


# -- whatever happens --------------------------------------------------------------------------------------------------

ANSWERS = st.one_of(
    st.floats(0, 100).map(refused),
    st.just(granted()),
    st.just(granted(0.0)),
    st.booleans().map(lambda unknown: down(outcome_unknown=unknown)),
)


@settings(deadline=None)
@given(
    wait=st.floats(0.001, 20),
    poll=st.floats(0.01, 60),
    spread=st.floats(0, 1),
    answers=st.lists(st.tuples(ANSWERS, st.floats(0.001, 5)), min_size=1, max_size=20),
    nap=st.floats(0.1, 1.0),
)
def test_pauses_never_exceed_what_is_left_and_the_end_is_kept(wait, poll, spread, answers, nap):
    """Whatever the store answers, however long it takes within its time, and however early a sleeper wakes up."""
    asked = story(wait=wait, poll=poll, spread=lambda: spread)
    until = 100.0 + wait
    script = itertools.cycle(answers)
    try:
        while asked.step is not None:
            step, before = asked.step, asked.now
            if isinstance(step, Wait):
                assert 0 <= step.seconds <= until - before + 1e-9
                asked.sleep(step.seconds * nap)
                continue
            answer, took = next(script)
            if step.verb == "release":
                assert step.seconds == 10.0
                answer = Released()
            else:
                assert step.seconds <= max(0.0, until - before) + 1e-9
            sent_at, asked.now = asked.now, asked.now + min(took, step.seconds)
            error = answer if isinstance(answer, BackendUnavailable) else None
            asked._go_on(Answer(asked.now, None if error else answer, sent_at, error))
    except BackendUnavailable:
        asked.step = None
    if isinstance(asked.result, Term):
        assert asked.now <= until
        assert asked.now < asked.result.trusted_until
    assert asked.now <= until + 10.0 + 1e-6


# -- what comes after a grant was given back ---------------------------------------------------------------------------


def renamed(request: Request) -> Request:
    return Request(request.name, request.owner_id, "f" * 32, request.ttl)


def ids_of(asked: Story) -> list[str]:
    return [call.args[0].lease_id for call in asked.calls if call.verb == "try_acquire"]


@pytest.mark.parametrize(("wait", "expected"), [(math.inf, ["0" * 32, "f" * 32]), (100.0, ["0" * 32, "f" * 32])])
def test_what_is_asked_after_a_late_grant_has_an_id_of_its_own(wait: float, expected: list[str]) -> None:
    patience = Patience(100.0 + wait, 1.0, 80.0)
    conversation = steps.acquire(
        REQUEST, margin=MARGIN, patience=patience, now=100.0, spread=lambda: 0.5, anew=renamed
    )  # fmt: skip
    asked = Story(conversation).begin().answer(granted(), took=70.0).answer(Released()).answer(granted())

    assert isinstance(asked.result, Term)
    assert ids_of(asked) == expected


def test_a_look_after_the_end_of_the_wait_asks_under_the_same_id() -> None:
    patience = Patience(101.0, 1.0, 80.0)
    conversation = steps.acquire(
        REQUEST, margin=MARGIN, patience=patience, now=100.0, spread=lambda: 0.5, anew=renamed
    )  # fmt: skip
    asked = Story(conversation).begin()

    with pytest.raises(BackendUnavailable, match="too late"):
        asked.answer(granted(), took=2.0).answer(Released())
    assert ids_of(asked) == ["0" * 32]


def test_no_other_id_is_chosen_where_nothing_is_asked_any_more() -> None:
    chosen: list[Request] = []

    def remembered(request: Request) -> Request:
        chosen.append(request)
        return request

    patience = Patience(170.0, 1.0, 80.0)
    conversation = steps.acquire(
        REQUEST, margin=MARGIN, patience=patience, now=100.0, spread=lambda: 0.5, anew=remembered
    )  # fmt: skip
    asked = Story(conversation).begin().answer(granted(), took=69.0)

    with pytest.raises(BackendUnavailable):
        asked.answer(down(outcome_unknown=True), took=1.0)  # what may be left of it is given back by its own id
    assert chosen == []


def test_a_grant_at_the_very_end_of_the_wait_is_in_time() -> None:
    asked = story(wait=8.0, attempt=8.0).answer(granted(), took=8.0)

    assert isinstance(asked.result, Term)


def test_a_wait_says_nothing_about_a_longer_rest_unless_it_is_told() -> None:
    assert Wait(1.0).at_most == math.inf
    assert Answer(1.0).sent_at == 0.0


# -- several at once ---------------------------------------------------------------------------------------------------


def several(**answer: Any) -> list[Term] | InTheWay | None:
    """What became of asking for two names at once."""
    requests = [REQUEST, Request("other", "me", "1" * 32, TTL / 2)]
    conversation = steps.acquire_many(requests, margin=MARGIN, attempt=10.0)
    assert next(conversation) == Call("try_acquire_many", (requests,), 10.0)
    with pytest.raises(StopIteration) as end:
        conversation.send(Answer(**{"now": 101.0, "sent_at": 100.0} | answer))
    return end.value.value


def test_several_that_are_granted_are_several_beliefs() -> None:
    first, second = several(value=[granted(), granted()])

    assert (first.trusted_until, second.trusted_until) == (100.0 + TTL - MARGIN, 100.0 + TTL / 2 - MARGIN)
    assert first.sent_at == 100.0


@pytest.mark.parametrize("answer", [None, InTheWay("other", refused())])
def test_several_of_which_one_is_in_the_way_are_answered_as_the_store_says(answer: Any) -> None:
    assert several(value=answer) is answer


def test_several_that_are_not_answered_are_trouble() -> None:
    with pytest.raises(BackendUnavailable, match="down") as caught:
        several(error=down(outcome_unknown=True))

    assert caught.value.outcome_unknown


@pytest.mark.parametrize("now", [100.0 + TTL / 2 - MARGIN, 100.0 + TTL])
def test_several_of_which_one_came_too_late_may_have_been_granted(now: float) -> None:
    with pytest.raises(BackendUnavailable, match="too late") as caught:
        several(value=[granted(), granted()], now=now)

    assert caught.value.outcome_unknown


def test_an_answer_to_fewer_than_were_asked_for_is_a_defect() -> None:
    with pytest.raises(ValueError, match="shorter"):
        several(value=[granted()])


# -- going on with a hold that was handed over -------------------------------------------------------------------------


def adopted(**answer: Any) -> Term | Refused:
    """What became of showing a handover."""
    adoption = Adoption("job", "0" * 32, "1" * 32, "me", TTL)
    conversation = steps.adopt(adoption, margin=MARGIN, attempt=10.0)
    assert next(conversation) == Call("adopt", (adoption,), 10.0)
    with pytest.raises(StopIteration) as end:
        conversation.send(Answer(**{"now": 101.0, "sent_at": 100.0} | answer))
    return end.value.value


def test_a_hold_that_was_handed_over_is_believed_in_from_when_it_was_asked_for() -> None:
    term = adopted(value=granted())

    assert term.sent_at == 100.0
    assert term.trusted_until == 100.0 + TTL - MARGIN


@pytest.mark.parametrize(("lease", "left"), [(record(25.0, "rival"), 25.0), (None, 0.0)])
def test_a_hold_that_is_over_cannot_be_gone_on_with(lease: Lease | None, left: float) -> None:
    assert adopted(value=Gone("taken", lease)) == Refused(lease, left)


def test_a_handover_that_is_not_answered_is_trouble() -> None:
    with pytest.raises(BackendUnavailable, match="down"):
        adopted(error=down())


def test_a_handover_that_came_too_late_may_have_been_granted() -> None:
    with pytest.raises(BackendUnavailable, match="too late") as caught:
        adopted(value=granted(), now=100.0 + TTL - MARGIN)

    assert caught.value.outcome_unknown
