"""The model agrees with itself, and it and the contract see through every backend that is broken on purpose."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import pytest

from pglease.backends.memory import MemoryBackend
from pglease.records import Gone, Granted, Held, InTheWay, Refused, Released, Renewal, Request
from pglease.testing.contract import BackendContract
from pglease.testing.fake_clock import FakeClock
from pglease.testing.harness import Harness, World
from pglease.testing.model import Conversation, compare_with_model, seeds

if TYPE_CHECKING:
    from collections.abc import Callable


class RevivesOnRenewal(MemoryBackend):
    """A renewal by the last holder succeeds although the hold has lapsed."""

    def _renew(self, renewal, now):
        row = self._store.rows.get(renewal.name)
        if row is not None and row.lease_id == renewal.lease_id and row.over(now):
            row.expires_at = now.replace(year=now.year + 1)
        return super()._renew(renewal, now)


class RenewsByName(MemoryBackend):
    """A renewal extends whoever holds the name."""

    def _renew(self, renewal, now):
        row = self._store.rows.get(renewal.name)
        return super()._renew(replace(renewal, lease_id=row.lease_id) if row and row.lease_id else renewal, now)


class ReleasesByName(MemoryBackend):
    """A release ends whoever holds the name."""

    def release(self, name, lease_id, budget, *, min_hold=0.0):
        row = self._store.rows.get(name)
        return super().release(name, (row and row.lease_id) or lease_id, budget, min_hold=min_hold)


class DeletesOnRelease(MemoryBackend):
    """A release takes the row along, and with it the token."""

    def release(self, name, lease_id, budget, *, min_hold=0.0):
        outcome = super().release(name, lease_id, budget, min_hold=min_hold)
        if outcome == Released():
            del self._store.rows[name]
        return outcome


class RepeatsTokens(MemoryBackend):
    """A takeover keeps the token."""

    def _next_hold(self, last, request, now):
        row = super()._next_hold(last, request, now)
        row.fencing_token -= 1 if last else 0
        return row


class SkipsTokens(MemoryBackend):
    """A refused try uses up a token."""

    def try_acquire(self, request, budget):
        answer = super().try_acquire(request, budget)
        if isinstance(answer, Refused):
            self._store.rows[request.name].fencing_token += 1
        return answer


class ForgetsTokensOnCleanup(MemoryBackend):
    """New names start at one again."""

    def cleanup(self, older_than, budget):
        count = super().cleanup(older_than, budget)
        self._store.token_floor = 0
        return count


class CleansUpTheLiving(MemoryBackend):
    """A cleanup takes running holds along."""

    def cleanup(self, older_than, budget):
        return super().cleanup(older_than - 1e6, budget)


class IsReentrant(MemoryBackend):
    """The same label gets the name again."""

    def try_acquire(self, request, budget):
        answer = super().try_acquire(request, budget)
        own = isinstance(answer, Refused) and answer.held_by == request.owner_id
        return Granted(answer.lease) if own else answer


class ForgetsItsGrant(MemoryBackend):
    """A retry does not recognise its own grant."""

    def try_acquire(self, request, budget):
        known = request.lease_id in [row.lease_id for row in self._store.rows.values()]
        answer = super().try_acquire(request, budget)
        return Refused(answer.lease, 1.0) if known else answer


class IgnoresMinHold(MemoryBackend):
    """A release frees at once whatever was asked."""

    def release(self, name, lease_id, budget, *, min_hold=0.0):
        return super().release(name, lease_id, budget)


class CountsMinHoldFromNow(MemoryBackend):
    """A release into min_hold counts from the release, not from the beginning."""

    def release(self, name, lease_id, budget, *, min_hold=0.0):
        row = self._store.rows.get(name)
        extra = (self._store.now() - row.acquired_at).total_seconds() if row else 0.0
        return super().release(name, lease_id, budget, min_hold=min_hold + extra if min_hold else 0.0)


class ForcesByName(MemoryBackend):
    """Any token ends the hold."""

    def force_release(self, name, fencing_token, budget):
        row = self._store.rows.get(name)
        return super().force_release(name, row.fencing_token if row else fencing_token, budget)


class ListsByPattern(MemoryBackend):
    """A prefix is taken for a LIKE pattern."""

    def list(self, prefix, budget, *, ended=False):
        pattern = re.compile(re.escape(prefix).replace("%", ".*").replace("_", "."), re.DOTALL)
        return [lease for lease in super().list("", budget, ended=ended) if pattern.match(lease.task_name)]


class HidesTheHolder(MemoryBackend):
    """The refused learn nothing."""

    def try_acquire(self, request, budget):
        answer = super().try_acquire(request, budget)
        return Refused(None, answer.retry_after) if isinstance(answer, Refused) else answer


class AnswersOutOfOrder(MemoryBackend):
    """The outcomes of a batch stand in the order of the names."""

    def renew(self, renewals, budget):
        return super().renew(sorted(renewals, key=lambda renewal: renewal.name), budget)


class RestartsTheHoldOnRenewal(MemoryBackend):
    """A renewal moves the beginning of the hold."""

    def _renew(self, renewal, now):
        outcome = super()._renew(renewal, now)
        if isinstance(outcome, Held):
            self._store.rows[renewal.name].acquired_at = now
        return outcome


class ExtendsFromTheOldExpiry(MemoryBackend):
    """A renewal adds its ttl to what is left."""

    def _renew(self, renewal, now):
        row = self._store.rows.get(renewal.name)
        left = max(0.0, (row.expires_at - now).total_seconds()) if row else 0.0
        return super()._renew(replace(renewal, ttl=renewal.ttl + left), now)


class CreatesOnRenewal(MemoryBackend):
    """A renewal of an unknown name leaves a row behind."""

    def _renew(self, renewal, now):
        outcome = super()._renew(renewal, now)
        if outcome == Gone("deleted"):
            request = Request(renewal.name, "ghost", renewal.lease_id, renewal.ttl)
            self._store.rows[renewal.name] = self._next_hold(None, request, now)
        return outcome


class FoldsCase(MemoryBackend):
    """Two names that differ in case are one."""

    def try_acquire(self, request, budget):
        return super().try_acquire(replace(request, name=request.name.lower()), budget)


class CountsNoTransitions(MemoryBackend):
    """The same label coming back is no transition."""

    def _next_hold(self, last, request, now):
        row = super()._next_hold(last, request, now)
        row.transitions -= 1 if last and last.owner_id == request.owner_id else 0
        return row


class RefreshesOnLook(MemoryBackend):
    """Looking at a hold counts as its heartbeat."""

    def get(self, name, budget):
        row = self._store.rows.get(name)
        if row is not None:
            row.heartbeat_at = self._store.now()
        return super().get(name, budget)


class SharesMetadata(MemoryBackend):
    """Everybody is handed the same object."""

    _shared: ClassVar[dict] = {}

    def try_acquire(self, request, budget):
        self._shared[request.name] = request.metadata
        return super().try_acquire(request, budget)

    def get(self, name, budget):
        lease = super().get(name, budget)
        return lease and replace(lease, metadata=self._shared.get(name, {}))


class KeepsTheTokenOnAdoption(MemoryBackend):
    """A hold that is handed over keeps its token."""

    def adopt(self, adoption, budget):
        answer = super().adopt(adoption, budget)
        if isinstance(answer, Granted):
            self._store.rows[adoption.name].fencing_token -= 1
            answer = Granted(self.get(adoption.name, budget))
        return answer


class AdoptsByName(MemoryBackend):
    """Whoever holds a name, it can be adopted."""

    def adopt(self, adoption, budget):
        row = self._store.rows.get(adoption.name)
        return super().adopt(replace(adoption, lease_id=(row and row.lease_id) or adoption.lease_id), budget)


class ExtendsOnDescription(MemoryBackend):
    """A description counts as a renewal."""

    def set_metadata(self, name, lease_id, metadata, budget):
        outcome = super().set_metadata(name, lease_id, metadata, budget)
        return super().renew([Renewal(name, lease_id, 600.0)], budget)[0] if isinstance(outcome, Held) else outcome


class DescribesByName(MemoryBackend):
    """Anybody may describe a hold."""

    def set_metadata(self, name, lease_id, metadata, budget):
        row = self._store.rows.get(name)
        return super().set_metadata(name, (row and row.lease_id) or lease_id, metadata, budget)


class TakesAPart(MemoryBackend):
    """Of several names, those that are free are taken."""

    def try_acquire_many(self, requests, budget):
        answers = [self.try_acquire(request, budget) for request in requests]
        refused = [at for at, answer in enumerate(answers) if isinstance(answer, Refused)]
        return InTheWay(requests[refused[0]].name, answers[refused[0]]) if refused else answers


class GivesUpOnClose(MemoryBackend):
    """Closing a client ends every hold."""

    def close(self):
        self._store.rows.clear()
        super().close()


BROKEN = [each for each in MemoryBackend.__subclasses__() if each.__module__ == __name__]
UNSEEN_BY_THE_MODEL = (FoldsCase, TakesAPart, GivesUpOnClose)
"""Its names differ by more than case, it asks for one at a time, and it closes nobody."""


class BrokenHarness(Harness):
    tick = 10.0
    slack = 0.001
    racers = 8
    model_runs = 0

    def __init__(self, kind: type[MemoryBackend]) -> None:
        self.clock = FakeClock()
        self._store = kind(clock=self.clock)

    def open(self):
        return self._store.another()

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def close(self) -> None:
        self._store.close()


def three_clients(kind: type[MemoryBackend]) -> tuple[list[MemoryBackend], Callable[[float], None]]:
    now = FakeClock()
    first = kind(clock=now)
    return [first, first.another(), first.another()], now.advance


def compare_forty_times(kind: type[MemoryBackend]) -> None:
    clients, pass_time = three_clients(kind)
    for seed in range(40):
        compare_with_model(clients, pass_time, seed)


def test_memory_agrees_with_itself() -> None:
    clients, pass_time = three_clients(MemoryBackend)

    for seed in seeds(200):
        compare_with_model(clients, pass_time, seed)


def test_a_store_that_is_not_empty_is_emptied_first() -> None:
    clients, pass_time = three_clients(MemoryBackend)
    compare_with_model(clients, pass_time, 1)

    compare_with_model(clients, pass_time, 2)


@pytest.mark.parametrize("kind", [kind for kind in BROKEN if kind not in UNSEEN_BY_THE_MODEL])
def test_the_model_sees_through_a_broken_backend(kind: type[MemoryBackend]) -> None:
    with pytest.raises((AssertionError, KeyError, ValueError)):
        compare_forty_times(kind)


@pytest.mark.parametrize("kind", BROKEN)
def test_the_contract_sees_through_a_broken_backend(kind: type[MemoryBackend]) -> None:
    red = next((name for name in plain_tests() if not passes(kind, name)), None)

    assert red is not None, f"no test of the contract notices: {kind.__doc__}"


def test_no_test_of_the_contract_is_red_for_the_sound_backend() -> None:
    assert [name for name in plain_tests() if not passes(MemoryBackend, name)] == []


def plain_tests() -> list[str]:
    """Return the names of the tests that need nothing but a world."""
    tests = inspect.getmembers(BackendContract, inspect.isfunction)
    return [
        name
        for name, test in tests
        if name.startswith("test_") and list(inspect.signature(test).parameters) == ["self", "world"]
    ]


def passes(kind: type[MemoryBackend], name: str) -> bool:
    world = World(BrokenHarness(kind))
    try:
        getattr(BackendContract(), name)(world)
    except pytest.skip.Exception:
        return True
    except Exception:  # whatever a broken backend does, the test is red
        return False
    finally:
        world.close()
    return True


def test_a_failure_says_what_was_asked_and_how_to_replay_it() -> None:
    with pytest.raises(AssertionError) as failure:
        compare_forty_times(RevivesOnRenewal)

    text = str(failure.value)
    command = re.search(r"replay: +PGLEASE_MODEL_SEEDS=(\d+) python -m pytest '(.*)'", text)
    assert command is not None
    assert "test_a_failure_says_what_was_asked_and_how_to_replay_it" in command[2]
    assert "expired" in text
    with pytest.raises(AssertionError):
        compare_with_model(*three_clients(RevivesOnRenewal), int(command[1]))


@pytest.mark.parametrize(("chosen", "wanted"), [("", [0, 1, 2]), ("17", [17]), ("8-10", [8, 9, 10])])
def test_seeds_can_be_chosen_from_outside(monkeypatch: pytest.MonkeyPatch, chosen: str, wanted: list[int]) -> None:
    monkeypatch.setenv("PGLEASE_MODEL_SEEDS", chosen)

    assert list(seeds(3)) == wanted


def test_the_same_seed_is_the_same_conversation() -> None:
    said = []
    for _ in range(2):
        clients, pass_time = three_clients(MemoryBackend)
        conversation = Conversation(clients, pass_time, 7, 60.0)
        conversation.run(60)
        said.append(conversation.said)

    assert said[0] == said[1]


def test_conversations_reach_every_kind_of_answer() -> None:
    said = []
    for seed in range(30):
        clients, pass_time = three_clients(MemoryBackend)
        conversation = Conversation(clients, pass_time, seed, 60.0)
        conversation.run(60)
        said.extend(conversation.said)

    text = "\n".join(said)
    for answer in ("Granted", "Refused", "Held", "Released", "expired", "taken", "forced", "deleted"):
        assert text.count(answer) > 10, answer
    assert len(re.findall(r"force_release.*-> True", text)) > 5
    assert len(re.findall(r"cleanup.*-> [1-9]", text)) > 5
