"""`acquire_many`: all, or none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from pglease import AcquisitionError, BackendUnavailable, ConfigurationError, LeaseLostError, current_lease
from tests.support.worlds import wait_until


def test_all_are_held_for_the_block(leases, rival):
    with leases.acquire_many(["b", "a", "c"], ttl=600) as group:
        assert group
        assert [lease.name for lease in group] == ["a", "b", "c"]
        assert group.held
        assert len(group) == 3
        assert group["b"].fencing_token == 1
        assert group.fencing_tokens == {"a": 1, "b": 1, "c": 1}
        assert group.remaining() > 500
        assert current_lease("b") is group["b"]
        assert [rival.try_acquire(name) for name in "abc"] == [False] * 3

    assert not group.held
    assert [rival.try_acquire(name) for name in "abc"] == [True] * 3


def test_one_that_is_held_leaves_none(leases, rival):
    rival.try_acquire("b")

    with leases.acquire_many(["a", "b", "c"]) as group:
        assert not group
        assert group.name == "b"
        assert group.held_by == "rival"

    assert leases.holding() == []
    assert rival.wait_for_lease("a", timeout=10, poll_interval=0.05)
    assert rival.wait_for_lease("c", timeout=10, poll_interval=0.05)


def test_a_refusal_may_be_an_error(leases, rival):
    rival.try_acquire("b")

    with pytest.raises(AcquisitionError, match="'b' is held by 'rival'"):
        leases.acquire_many(["a", "b"], raise_on_failure=True).acquire()


def test_a_wait_holds_nothing_meanwhile(leases, rival):
    rival.try_acquire("b", ttl=600)

    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(leases.acquire_many(["a", "b"], ttl=600, wait=60).acquire)
        wait_until(lambda: rival.try_acquire("a"))
        rival.release("a")
        rival.release("b")
        group = taking.result(30)

    assert group
    assert group.release()
    assert not group.release()


def test_many_who_want_the_same_in_another_order_all_get_them(leases, rival):
    def work(number: int) -> bool:
        names = ["a", "b", "c"] if number % 2 else ["c", "b", "a"]
        with (leases, rival)[number % 2].acquire_many(names, ttl=600, wait=90) as group:
            return bool(group) and group.held

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(12)))


def test_one_that_is_lost_is_told_at_the_end(leases, rival, store):
    with pytest.raises(LeaseLostError, match="'b'"), leases.acquire_many(["a", "b"]) as group:
        store.delete("b")
        assert not group["b"].ensure(1000)
        assert not group.held
        with pytest.raises(LeaseLostError):
            group.raise_if_lost()

    assert rival.try_acquire("a")


@pytest.mark.parametrize("names", [[], "ab", ["a", "a"], ["a", ""], None, [7], [str(n) for n in range(1001)]])
def test_names_are_several_different_names(leases, names):
    with pytest.raises(ConfigurationError, match="name"):
        leases.acquire_many(names)


def test_a_block_is_entered_once(leases):
    block = leases.acquire_many(["a"])
    with block, pytest.raises(ConfigurationError, match="in use"):
        block.__enter__()


def test_a_store_that_confirms_nothing_holds_up_the_end_of_a_block_once(leases, monkeypatch):
    asked: list[str] = []

    def unconfirmed(hold, _seconds):
        asked.append(hold.name)
        hold.end()
        raise BackendUnavailable("no answer")

    with leases.acquire_many(["a", "b", "c"]):
        monkeypatch.setattr(leases.heartbeat_manager, "settle", unconfirmed)

    assert asked == ["c"]
    assert leases.holding() == []
    monkeypatch.undo()


def test_one_release_that_fails_for_whatever_reason_leaves_no_other_held(leases, rival, monkeypatch):
    settle, failures = leases.heartbeat_manager.settle, iter([ConfigurationError("a lent connection of no use")])

    def fail_once(hold, seconds):
        for error in failures:
            hold.end()
            leases.heartbeat_manager.give_back.add(hold.name, hold.lease_id)
            raise error
        return settle(hold, seconds)

    monkeypatch.setattr(leases.heartbeat_manager, "settle", fail_once)
    with pytest.raises(ConfigurationError), leases.acquire_many(["a", "b"]):
        pass

    assert leases.holding() == []
    assert rival.wait_for_lease("a", timeout=10, poll_interval=0.05)
