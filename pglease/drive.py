"""Carries out the steps of `steps.py` by calling and sleeping. What event loops do instead is in `loops.py`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, TypeVar

from pglease import clock
from pglease.backends.base import Backend, Budget
from pglease.errors import BackendUnavailable
from pglease.steps import Answer, Call, Step, Wait

T = TypeVar("T")


def run(steps: Generator[Step, Answer, T], backend: Backend, pause: Callable[[float], None]) -> T:
    """Carry out `steps` in this thread.

    Args:
        steps: a conversation.
        backend: who is asked.
        pause: sleeps for so many seconds, or less; may raise to end the conversation.
    """
    try:
        step = next(steps)
        while True:
            if isinstance(step, Wait):
                pause(step.seconds)
                answer = Answer(clock.now())
            else:
                answer = call(backend, step, Budget.of(step.seconds, clock.now))
            step = steps.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        steps.close()


def call(backend: Backend, step: Call, budget: Budget) -> Answer:
    """Make one call within its time. Trouble that passes is part of the answer; everything else is raised."""
    return answer_of(partial(getattr(backend, step.verb), *step.args, budget), budget)


def answer_of(verb: Callable[[], Any], budget: Budget) -> Answer:
    """Do the same with a verb in whatever shape."""
    try:
        value = verb()
    except BackendUnavailable as error:
        return Answer(clock.now(), error=error, sent_at=budget.sent_at)
    return Answer(clock.now(), value, budget.sent_at)
