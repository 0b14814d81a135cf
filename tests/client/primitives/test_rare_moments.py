"""What the primitives do at moments that seldom come: told by a store that can be asked to bring them about."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pglease import (
    AsyncPGLease,
    BackendUnavailable,
    ConfigurationError,
    LeaseLostError,
    MemoryBackend,
    NotOwnedError,
    PGLease,
    ReleaseError,
    clock,
)
from pglease.primitives import herald as heralds
from pglease.primitives import vigil as vigils
from pglease.primitives.aio import _Blocks
from pglease.primitives.election import REQUEST_SUFFIX
from pglease.primitives.herald import Herald
from pglease.primitives.talk import Deadline, List
from pglease.primitives.vigil import Vigil
from pglease.records import Loss

PATIENCE = 60.0


@pytest.fixture
def leases() -> Any:
    with PGLease(MemoryBackend(), owner_id="me") as client:
        yield client


def elsewhere(act: Any) -> None:
    """Let another thread do it."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE)
    if raised:
        raise raised[0]


# -- blocks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lock", "task_lock"])
def test_a_block_may_be_left_by_another_thread_than_entered_it(leases: Any, kind: str) -> None:
    block = leases.lock("job") if kind == "lock" else leases.task_lock("job", max_hold=60)
    lease = block.__enter__()

    elsewhere(lambda: block.__exit__(None, None, None))

    assert not lease.held
    assert leases.try_acquire("job")


def test_a_block_may_be_left_by_another_task_than_entered_it() -> None:
    async def story() -> None:
        async with AsyncPGLease(MemoryBackend()) as leases:
            lock = leases.lock("job")
            await asyncio.create_task(lock.__aenter__())
            await asyncio.create_task(lock.__aexit__(None, None, None))
            assert not await lock.locked()

    asyncio.run(story())


def test_blocks_inside_each_other_end_from_the_inside() -> None:
    blocks = _Blocks()
    for block in ("outer", "inner"):
        blocks.enter(block)

    assert [blocks.leave(), blocks.leave()] == ["inner", "outer"]


def test_a_semaphores_blocks_inside_each_other_end_from_the_inside(leases: Any) -> None:
    semaphore = leases.semaphore("db", 2)
    with semaphore as outer:
        with semaphore as inner:
            assert inner.name != outer.name
        assert not inner.held
        assert outer.held


def test_a_run_that_was_late_and_its_successor_end_each_for_itself(leases: Any) -> None:
    run = leases.task_lock("job", max_hold=60)
    with pytest.raises(LeaseLostError), run as first:
        first._hold.lose(Loss("expired"))
        leases.force_release("job", first.fencing_token)
        with run as second:
            assert second.held
        assert not second.held


@pytest.mark.parametrize("kind", ["lock", "task_lock"])
def test_a_release_of_what_had_been_ended_by_force_says_so(leases: Any, kind: str) -> None:
    block = leases.lock("job") if kind == "lock" else leases.task_lock("job", max_hold=60)
    taken = block.acquire()
    leases.force_release("job", taken.fencing_token)

    with pytest.raises(NotOwnedError, match="before it was released"):
        block.release()


# -- several at once ---------------------------------------------------------------------------------------------------


def test_several_leases_are_lost_one_by_one_and_told_by_the_first(leases: Any) -> None:
    group = leases.acquire_many(["a", "b"]).acquire()
    group.raise_if_lost()

    group["b"]._hold.lose(Loss("taken"))

    with pytest.raises(LeaseLostError, match="'b'"):
        group.raise_if_lost()
    assert group["a"].held
    group.release()


def test_of_several_leases_one_that_is_not_confirmed_keeps_no_other_from_being_released(
    leases: Any, monkeypatch: Any
) -> None:
    group = leases.acquire_many(["a", "b"]).acquire()
    release = leases.backend.release

    def release_some(name: str, *given: Any, **more: Any) -> Any:
        if name == "b":
            raise BackendUnavailable("no answer")
        return release(name, *given, **more)

    monkeypatch.setattr(leases.backend, "release", release_some)

    with pytest.raises(ReleaseError, match="'b'"):
        group.release()
    assert leases.get_lease("a").is_expired()


@pytest.mark.parametrize("confirmed", [True, False])
def test_an_asynchronous_group_is_left_without_waiting_twice_for_a_silent_store(*, confirmed: bool) -> None:
    later: list[str] = []

    async def story() -> None:
        async with AsyncPGLease(MemoryBackend()) as leases:
            group = leases.acquire_many(["a", "b"])
            taken = await group.__aenter__()
            assert taken
            with pytest.raises(ConfigurationError, match="a second block needs its own"):
                await group.__aenter__()
            taking: Any = leases.client.taking
            leave, leave_later = taking.aleave, taking.leave_later

            async def silent(hold: Any, error: Any) -> None:
                hold.release_begun()
                hold.end()

            def note(hold: Any, error: Any) -> None:
                later.append(hold.name)
                leave_later(hold, error)

            taking.aleave = leave if confirmed else silent
            taking.leave_later = note
            await group.__aexit__(None, None, None)
            taking.aleave, taking.leave_later = leave, leave_later

    asyncio.run(story())

    assert later == ([] if confirmed else ["a"])


# -- waiting for one of several ----------------------------------------------------------------------------------------


def test_a_mark_that_the_store_does_not_set_is_no_mark_and_none_is_set_when_time_is_over(
    leases: Any, monkeypatch: Any
) -> None:
    vigil, asked = Vigil(leases), list[str]()

    def mark(_: Any, name: str, __: float) -> float:
        asked.append(name)
        return 0.0 if name == "unmarked" else clock.now() + 60

    monkeypatch.setattr(vigils, "mark", mark)
    vigil._mark_in_time(["late"], clock.now() - 1)
    vigil._mark_in_time(["unmarked", "marked"], clock.now() + 60)

    assert asked == ["unmarked", "marked"]
    assert list(vigil._marked) == ["marked"]
    vigil.close()


def told(conversation: Any, *answers: Any) -> Any:
    """Let a talk hear these answers; return what it wished for last, or came to."""
    wish = next(conversation)
    try:
        for answer in answers:
            wish = conversation.send(answer)
    except StopIteration as over:
        return over.value
    return wish


def test_a_writer_that_lost_its_intent_while_it_waited_for_readers_begins_anew(leases: Any) -> None:
    lock = leases.read_write_lock("book")
    lost = leases.wait_for_lease("lost")
    lost._hold.lose(Loss("expired"))
    assert next(iter_of(lock._wait_for_readers(lost, Deadline(60)))) is None

    again = told(lock._writing(60.0), lost)
    assert type(again).__name__ == "Take"


def iter_of(talk: Any) -> Any:
    """Yield what a talk that wishes for nothing comes to."""
    try:
        next(talk)
    except StopIteration as over:
        yield over.value


def test_whoever_lost_the_gate_while_it_waited_for_a_slot_queues_anew(leases: Any) -> None:
    semaphore = leases.semaphore("db", 1)
    taken = leases.wait_for_lease("db#slot:0")
    gate = leases.wait_for_lease("gate")
    gate._hold.lose(Loss("expired"))

    wish = told(semaphore._wait_at(gate, Deadline(60), Vigil(leases)), [taken.lease])

    assert isinstance(wish, List)  # its first look, as of whoever comes


@pytest.mark.parametrize("room", [True, False])
def test_a_slot_that_turns_out_to_be_one_too_many_is_given_back(leases: Any, monkeypatch: Any, *, room: bool) -> None:
    semaphore = leases.semaphore("db", 2)
    slot = leases.wait_for_lease("db#slot:0")
    beyond = [leases.wait_for_lease(f"db#slot:{number}").lease for number in (5, 6)]
    others = beyond[:1] if room else beyond

    came_to = told(semaphore._try_once(), beyond[:1], slot, [slot.lease, *others])

    assert came_to == (slot if room else beyond[:1])
    leases.heartbeat_manager.give_back.settle(PATIENCE)
    assert leases.get_lease("db#slot:0").is_expired() != room


# -- elections ---------------------------------------------------------------------------------------------------------


def test_an_election_whose_campaign_has_died_is_not_well(leases: Any) -> None:
    election = leases.leader_election("job")
    dead: Any = SimpleNamespace(is_alive=lambda: False, stopping=threading.Event())

    election._thread = dead
    assert not election.health().ok
    assert "has died" in election.health().reason
    dead.stopping.set()
    assert election.health().ok
    election._thread = None


def test_whoever_lets_others_go_first_stops_waiting_when_the_campaign_ends(leases: Any) -> None:
    election = leases.leader_election("job", defer=3600)
    stopping = threading.Event()
    stopping.set()

    assert not election._is_left_by_others(stopping)


@pytest.mark.parametrize("meant", [True, False], ids=["this leader", "an earlier one"])
def test_a_request_to_step_down_is_for_the_leader_it_names(leases: Any, monkeypatch: Any, *, meant: bool) -> None:
    election = leases.leader_election("job")
    stepped: list[int] = []
    monkeypatch.setattr(election, "step_down", lambda: stepped.append(1))
    lease = leases.wait_for_lease("job")
    token = lease.fencing_token + (not meant)
    leases.wait_for_lease("job" + REQUEST_SUFFIX, metadata={"fencing_token": token})

    election._heed_request(SimpleNamespace(lease=lease))

    assert bool(stepped) == meant


def test_work_within_a_campaign_that_goes_on_does_not_end_it(leases: Any) -> None:
    election = leases.leader_election("job")
    with election._running() as campaign:
        with election._running() as inner:
            assert inner is campaign
        assert not election.over
    assert election.over


def test_a_leader_is_proclaimed_once_for_a_term(leases: Any) -> None:
    lease = leases.wait_for_lease("job").lease
    changes = [SimpleNamespace(kind=kind, lease=lease) for kind in ("present", "acquired")]
    proclaimed: list[int] = []

    herald = Herald(SimpleNamespace(close=lambda: None), lambda leader: proclaimed.append(leader.fencing_token))  # type: ignore[arg-type]

    def next_one() -> Any:
        if not changes:
            herald.close()
            return None
        return changes.pop(0)

    herald._next = next_one  # type: ignore[method-assign]
    herald._run()

    assert proclaimed == [lease.fencing_token]
    assert heralds.AFTER_A_REFUSAL > 0


def test_an_asynchronous_election_that_goes_with_its_loop_is_only_asked_to_end() -> None:
    async def story() -> bool:
        async with AsyncPGLease(MemoryBackend()) as leases:
            election = leases.leader_election("job")
            election.start()
            await election.__aexit__(GeneratorExit, GeneratorExit(), None)
            asked = election._election._thread
            stopped = asked is None or asked.stopping.is_set()
            await election.stop()
            return stopped

    assert asyncio.run(story())


def test_an_end_that_is_cancelled_is_waited_for_all_the_same() -> None:
    async def story() -> list[str]:
        seen = []
        async with AsyncPGLease(MemoryBackend()) as leases:
            election = leases.leader_election("job")
            election.start()
            until, go_on = election._until, asyncio.Event()

            async def later(*given: Any) -> Any:
                await go_on.wait()
                return await until(*given)

            election._until = later  # type: ignore[method-assign]
            stopping = asyncio.create_task(election.stop())
            await asyncio.sleep(0)
            stopping.cancel()
            await asyncio.sleep(0)
            seen.append("waits" if not stopping.done() else "left")
            go_on.set()
            try:
                await stopping
            except asyncio.CancelledError:
                seen.append("cancelled")
            seen.append("over" if election._election.over else "goes on")
        return seen

    assert asyncio.run(story()) == ["waits", "cancelled", "over"]


def test_work_that_survives_its_cancellation_is_cancelled_all_the_same_for_who_asked() -> None:
    async def story() -> list[str]:
        seen: list[str] = []
        begun = asyncio.Event()

        async def work(_: Any) -> str:
            begun.set()
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                seen.append("tidied up")
            return "a result that nobody gets"

        async with AsyncPGLease(MemoryBackend()) as leases:
            leading = asyncio.create_task(leases.leader_election("job").lead(work))
            await asyncio.wait_for(begun.wait(), PATIENCE)
            leading.cancel()
            try:
                await leading
            except asyncio.CancelledError:
                seen.append("cancelled")
        return seen

    assert asyncio.run(story()) == ["tidied up", "cancelled"]
