"""A lease that goes to another holder without a gap, and what is attached to one while it is held."""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys
from typing import Any

import pytest

from pglease import (
    AcquisitionError,
    AsyncPGLease,
    BackendUnavailable,
    ConfigurationError,
    Event,
    FencedError,
    Handover,
    MemoryBackend,
    NotOwnedError,
    PGLease,
)
from tests.support import worlds


def test_a_lease_goes_on_with_whoever_shows_the_handover(leases, rival):
    with leases.acquire("job", ttl=60, metadata={"order": 7}) as lease:
        handover = lease.transfer("celery-child", ttl=30)

        assert not lease.held
        assert lease.loss is None
        record = rival.get_lease("job")
        assert (record.owner_id, record.fencing_token) == ("celery-child", handover.fencing_token)
        assert not rival.try_acquire("job")

    with rival.adopt(str(handover)) as adopted:
        assert adopted.held
        assert (adopted.owner_id, adopted.metadata) == ("rival", {"order": 7})
        assert adopted.fencing_token > handover.fencing_token > lease.fencing_token
        assert not leases.try_acquire("job")
    assert leases.try_acquire("job")


def test_only_the_first_goes_on_and_the_others_learn_who_did(leases, rival):
    handover = leases.wait_for_lease("job").transfer("somebody")

    with rival.adopt(handover) as first, leases.adopt(handover) as second:
        assert first
        assert not second
        assert second.held_by == "rival"
        with pytest.raises(AcquisitionError, match="'rival'"), leases.adopt(handover, raise_on_failure=True):
            pass


def test_the_old_handle_is_over_for_good(leases):
    lease = leases.wait_for_lease("job")
    lease.transfer("somebody")

    verbs = {
        "renewed": lease.renew,
        "handed over": lambda: lease.transfer("b"),
        "described": lambda: lease.set_metadata({}),
    }
    for word, verb in verbs.items():
        with pytest.raises(NotOwnedError, match=f"'job' cannot be {word}: "):
            verb()
    assert lease.release() is False
    assert leases.held("job") is None


def test_what_is_lost_cannot_be_handed_over(leases, store):
    lease = leases.wait_for_lease("job")
    store.lapse("job")

    with pytest.raises(NotOwnedError, match="ran out"):
        lease.transfer("somebody")

    assert lease.loss.reason == "expired"


def test_a_handover_survives_every_way_to_another_process_and_keeps_its_secret(leases, rival):
    handover = leases.wait_for_lease("n\u00e4chtlich: 7").transfer("somebody", ttl="5m")

    assert pickle.loads(pickle.dumps(handover)) == handover
    assert Handover.read(json.loads(json.dumps(str(handover)))) == handover
    assert handover.lease_id not in repr(handover)
    assert (handover.name, handover.ttl) == ("n\u00e4chtlich: 7", 300.0)
    with rival.adopt(handover) as lease:
        assert 200 < lease.remaining() < 300


@pytest.mark.parametrize("text", ["", "job", "pglease-handover-1:", "pglease-handover-1:00", "7b7d", None, 7])
def test_what_is_no_handover_is_refused_at_once(text):
    with PGLease(MemoryBackend()) as leases, pytest.raises(ConfigurationError, match="handover"):
        leases.adopt(text)


def test_observers_are_told(store):
    told: list[Event] = []

    class Observer:
        def notify(self, event: Event) -> None:
            told.append(event)

    leases = store.rival("ours", observers=[Observer()])
    handover = leases.wait_for_lease("job").transfer("somebody")
    with leases.adopt(handover):
        pass
    leases.close()

    assert [event.kind for event in told] == [
        "attempted",
        "acquired",
        "transferred",
        "attempted",
        "acquired",
        "released",
    ]


class Silent(MemoryBackend):
    """Does what it is asked, and says nothing."""

    def adopt(self, adoption: Any, budget: Any) -> Any:
        super().adopt(adoption, budget)
        raise BackendUnavailable("the reply was lost", outcome_unknown=True)


def test_a_handover_without_an_answer_is_given_back_by_both_its_names():
    backend = Silent()
    with PGLease(backend) as leases, PGLease(backend.another()) as rival:
        lease = leases.wait_for_lease("job")

        with pytest.raises(BackendUnavailable):
            lease.transfer("somebody")

        assert not lease.held
        assert rival.wait_for_lease("job", timeout=30)


def test_an_adoption_without_an_answer_is_given_back():
    backend = Silent()
    with PGLease(MemoryBackend(store=backend._store)) as parent, PGLease(backend) as child:
        handover = parent.wait_for_lease("job").transfer("child")

        with pytest.raises(BackendUnavailable), child.adopt(handover):
            pass

        assert parent.wait_for_lease("job", timeout=30)


CHILD = """
import sys, pglease
with pglease.PGLease(sys.argv[1], "child") as leases, leases.adopt(sys.argv[2]) as lease:
    print(lease.fencing_token if lease else "too late")
"""


def test_of_two_child_processes_one_goes_on_and_the_parent_is_fenced(dsn):
    with PGLease(dsn, "parent") as leases:
        lease = leases.wait_for_lease("job")
        handover = lease.transfer("child", ttl=120)
        children = [
            subprocess.Popen([sys.executable, "-c", CHILD, dsn, str(handover)], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        said = sorted(child.communicate(timeout=120)[0].strip() for child in children)

        assert said == [str(handover.fencing_token + 1), "too late"]
        with worlds.connect(dsn) as connection, pytest.raises(FencedError):
            lease.guard(connection)


def test_what_is_attached_is_replaced_while_it_is_held(leases, rival):
    with leases.acquire("job", metadata={"done": 0}) as lease:
        lease.set_metadata({"done": 40})

        assert lease.metadata == rival.get_lease("job").metadata == {"done": 40}
        lease.renew()
        assert rival.get_lease("job").metadata == {"done": 40}
        with pytest.raises(ConfigurationError, match="metadata"):
            lease.set_metadata({"done": float("nan")})
    with pytest.raises(NotOwnedError):
        lease.set_metadata({"done": 100})


def test_describing_what_somebody_else_has_by_now_is_a_loss(leases, rival, store):
    lease = leases.wait_for_lease("job")
    store.lapse("job")
    rival.wait_for_lease("job", metadata={"mine": True})

    with pytest.raises(NotOwnedError, match="somebody else holds it"):
        lease.set_metadata({"mine": False})

    assert lease.loss.reason == "taken"
    assert rival.get_lease("job").metadata == {"mine": True}


def test_on_asyncio(leases, rival):
    async def story() -> None:
        aleases = AsyncPGLease(leases)
        async with aleases.acquire("job") as lease:
            await lease.set_metadata({"done": 40})
            assert rival.get_lease("job").metadata == {"done": 40}
            handover = await lease.transfer("ourselves")
            assert not lease.held
        async with aleases.adopt(handover) as again:
            assert again
            assert again.fencing_token > lease.fencing_token
        async with aleases.adopt(handover) as late:
            assert not late

    asyncio.run(story())
