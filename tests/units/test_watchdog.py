"""The thread that does no I/O: acts when a moment on the boot clock has come."""

from __future__ import annotations

import logging
import threading

import pytest

from pglease import clock, watchdog
from pglease.watchdog import Watchdog
from tests.support.worlds import Stopwatch, wait_until


class Alarm:
    """Something with a deadline."""

    def __init__(self, within: float) -> None:
        self.due = clock.now() + within
        self.rang = threading.Event()
        self.times = 0

    def overdue(self) -> None:
        self.times += 1
        self.rang_at = clock.now()
        self.rang.set()


@pytest.fixture
def dog() -> Watchdog:
    return Watchdog()


def test_it_acts_when_the_moment_has_come_and_not_before(dog):
    alarm = Alarm(0.1)

    dog.watch(alarm)

    assert alarm.rang.wait(5)
    assert alarm.rang_at >= alarm.due
    assert alarm.rang_at < alarm.due + 1.0


def test_what_is_overdue_already_is_acted_on_at_once(dog):
    alarm = Alarm(-5)

    dog.watch(alarm)

    assert alarm.rang.wait(5)


def test_it_acts_once_for_each_watch(dog):
    alarm, later = Alarm(0), Alarm(0.1)

    dog.watch(alarm)
    dog.watch(later)
    assert later.rang.wait(5)
    assert alarm.times == 1

    alarm.rang.clear()
    dog.watch(alarm)
    assert alarm.rang.wait(5)
    assert alarm.times == 2


def test_what_was_forgotten_is_left_alone(dog):
    gone, kept = Alarm(0.05), Alarm(0.15)
    dog.watch(gone)
    dog.watch(kept)

    dog.forget(gone)
    dog.forget(Alarm(1))  # never watched

    assert kept.rang.wait(5)
    assert not gone.rang.is_set()


def test_a_deadline_that_moved_away_is_read_again(dog):
    moved, kept = Alarm(0.05), Alarm(0.2)
    dog.watch(moved)
    dog.watch(kept)

    moved.due += 600

    assert kept.rang.wait(5)
    assert not moved.rang.is_set()
    dog.forget(moved)


def test_an_earlier_deadline_wakes_it_from_a_longer_nap(dog):
    late, early = Alarm(600), Alarm(0.02)
    dog.watch(late)
    watch = Stopwatch()

    dog.watch(early)

    assert early.rang.wait(5)
    assert watch.seconds < watchdog.LONGEST_NAP
    dog.forget(late)


def test_it_goes_on_after_an_error_and_says_so(dog, caplog):
    class Faulty(Alarm):
        def overdue(self) -> None:
            super().overdue()
            raise RuntimeError("broken")

    faulty, sound = Faulty(0), Alarm(0)

    with caplog.at_level(logging.ERROR, "pglease"):
        dog.watch(faulty)
        dog.watch(sound)

        assert faulty.rang.wait(5)
        assert sound.rang.wait(5)
        wait_until(lambda: "goes on after an error" in caplog.text)


def test_acting_may_watch_and_forget_again(dog):
    class Stubborn(Alarm):
        def overdue(self) -> None:
            self.times += 1
            dog.forget(self)
            if self.times < 3:
                dog.watch(self)
            else:
                self.rang.set()

    stubborn = Stubborn(0)

    dog.watch(stubborn)

    assert stubborn.rang.wait(5)
    assert stubborn.times == 3


def test_thousands_are_watched_by_one_thread(dog):
    before = threading.active_count()
    alarms = [Alarm(0.1 + n * 1e-5) for n in range(5000)]

    for alarm in alarms:
        dog.watch(alarm)

    assert threading.active_count() <= before + 1
    wait_until(lambda: all(alarm.times == 1 for alarm in alarms))


def test_an_interpreter_without_a_thread_to_spare_is_warned_and_goes_on(dog, caplog, monkeypatch):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    alarm = Alarm(0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        dog.watch(alarm)
    assert "cannot start" in caplog.text
    assert not alarm.rang.is_set()

    later = Alarm(0)
    dog.watch(later)

    assert later.rang.wait(5)
    assert alarm.rang.wait(5), "what was watched before the thread could start is watched now"


def test_the_process_has_one_and_everybody_uses_it():
    alarm, gone = Alarm(0.05), Alarm(0.01)

    watchdog.watch(gone)
    watchdog.forget(gone)
    watchdog.watch(alarm)

    assert alarm.rang.wait(5)
    assert [t.name for t in threading.enumerate()].count("pglease-watchdog") >= 1
