"""A nightly job and its tests: `pytest examples/test_nightly.py`, with pglease installed and nothing else running."""

import pytest

import pglease
from pglease import PGLease
from pglease.testing import MovableClock, World, always_acquire, lose_after, never_acquire


def run_nightly(batches: list[str]) -> list[str]:
    """Process batches under a lease, and stop before the next one when it is lost."""
    done: list[str] = []
    with pglease.acquire("nightly", ttl="1m", on_lost="log") as lease:
        if lease:
            while lease.held and len(done) < len(batches):
                done.append(batches[len(done)])
    return done


def test_everything_is_processed() -> None:
    with always_acquire():
        assert run_nightly(["a", "b", "c"]) == ["a", "b", "c"]


def test_nothing_is_processed_while_another_worker_is_at_it() -> None:
    with never_acquire():
        assert run_nightly(["a", "b", "c"]) == []


def test_it_stops_when_the_lease_is_lost() -> None:
    with always_acquire(), lose_after("nightly", calls=2):
        assert run_nightly(["a", "b", "c"]) == ["a", "b"]


def test_the_lease_is_given_back(pglease: PGLease) -> None:
    run_nightly(["a"])

    assert pglease.list_leases() == []


def test_a_worker_that_was_suspended_finds_itself_succeeded(pglease_world: World) -> None:
    lease = pglease_world.one.wait_for_lease("nightly", ttl="1m")
    pglease_world.clock.advance(61)

    assert pglease_world.other.try_acquire("nightly")
    assert not lease.held


def test_a_batch_that_takes_too_long_loses_it(pglease: PGLease, pglease_clock: MovableClock) -> None:
    lease = pglease.wait_for_lease("nightly", ttl="1m")
    pglease_clock.advance(50)
    assert lease.ensure(30)  # renewed, since less was left
    pglease_clock.advance(50)
    assert lease.held


@pytest.mark.pglease(backend="postgres")
def test_all_of_it_on_a_real_postgresql(pglease: PGLease) -> None:
    assert run_nightly(["a"]) == ["a"]
    assert pglease.get_lease("nightly").fencing_token == 1
