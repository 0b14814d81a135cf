"""Waiting, interrupted by signal handlers and errors where it hurts most."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any

import pytest

from pglease import BackendUnavailable, PGLease
from pglease.backends.memory import MemoryBackend
from pglease.listening import Ear
from pglease.records import Change, Place, Refused, Request
from pglease.steps import Answer, Call, Wait
from pglease.waiting import Nap, Room, Waiter, _Line, _Mark
from tests.support.interrupts import Interruption, interrupted_at_every_line
from tests.support.worlds import wait_until

PATIENCE = 30.0


def waiter_in(room: Room) -> Waiter:
    request = Request("job", "waiter", "ab" * 16, 60.0)
    return Waiter(room, request, Nap(lambda: None), poll=60, heard_poll=60, warn_after=None, box=5)


def test_a_signal_handler_may_wake_the_wait_it_interrupts_wherever_that_is() -> None:
    def begin() -> Interruption:
        nap = Nap(lambda: None)
        return Interruption(lambda: nap.rest(15), nap.kick)

    assert interrupted_at_every_line(begin) > 5


def test_whoever_interrupts_a_waiter_on_its_way_into_the_line_finds_no_line_in_which_nobody_stands() -> None:
    with PGLease(MemoryBackend()) as client:
        room, came = client.taking.room, list[Waiter]()

        def look_around() -> None:
            room._heard([Change("job", "released")])
            assert all(line.waiters for line in room._lines.values())

        def begin() -> Interruption:
            for waiter in came:
                room.leave(waiter, None)
            came[:] = [waiter_in(room)]
            return Interruption(lambda: room.join(came[0]), look_around)

        assert interrupted_at_every_line(begin) > 5


def test_whoever_interrupts_the_ordering_of_a_line_finds_all_who_stand_in_it() -> None:
    line = _Line(_Mark())

    class Nosy:
        def __init__(self, number: int) -> None:
            self.number = number

        @property
        def place(self) -> Place:
            found.append(len(line.waiters))
            return Place(self.number, 0)

    found: list[int] = []
    line.waiters = [Nosy(3), Nosy(1), Nosy(2)]  # type: ignore[list-item]

    with PGLease(MemoryBackend()) as client:
        client.taking.room.placed(line)

    assert [each.number for each in line.waiters] == [1, 2, 3]  # type: ignore[attr-defined]
    assert set(found) == {3}


def test_a_wait_that_is_interrupted_while_it_ends_stands_in_no_line_any_more() -> None:
    def conversation() -> Generator[Any, Answer, Any]:
        try:
            yield Call("try_acquire", (), 1.0)
            yield Wait(60, 60, Refused(None, 60))
        except GeneratorExit:
            raise KeyboardInterrupt from None

    with PGLease(MemoryBackend()) as client:
        attended = waiter_in(client.taking.room).attend(conversation())
        next(attended)
        attended.send(Answer(0.0, Refused(None, 60)))
        assert [wait.name for wait in client.waiting()] == ["job"]

        with pytest.raises(KeyboardInterrupt):
            attended.close()

        assert client.waiting() == []


def test_waiters_learn_that_nothing_is_heard_any_more_though_the_broken_link_cannot_even_be_closed() -> None:
    class Broken:
        def next(self, seconds: float) -> Any:
            raise BackendUnavailable("the link broke")

        def close(self) -> None:
            raise OSError("and cannot be closed")

    class Store(MemoryBackend):
        def listen(self, budget: Any) -> Any:
            return Broken()

    turns: list[bool] = []
    needed = threading.Event()
    needed.set()
    ear = Ear(Store(), needed=needed.is_set, heard=lambda _: None, turned=turns.append, rest=lambda: 1.0)
    ear.need()
    try:
        wait_until(lambda: turns[:2] == [True, False], PATIENCE)
        assert not ear.hearing
    finally:
        needed.clear()
        ear.close()
