"""Tokens rise over deletions: the floor is raised first, and read again by whoever creates."""

from __future__ import annotations

import json

import pytest

from pglease.backends.kubernetes_names import FLOOR
from pglease.errors import BackendMisconfigured, BackendUnavailable
from pglease.records import Granted
from pglease.testing.contract import _at_once as at_once
from pglease.testing.harness import budget, new_id

NAMESPACE = "jobs"


def test_a_new_name_starts_above_the_greatest_token_that_was_cleaned_up(alice, bob) -> None:
    for _ in range(7):
        alice.hold("old").released()
    alice.hold("older").released()

    assert bob.cleanup() == 2

    assert alice.hold("new").token == 8
    assert bob.hold("old").token == 8


def test_the_floor_is_raised_before_anything_is_deleted(cluster, alice) -> None:
    for name in ("a", "b", "c"):
        alice.hold(name).released()
    cluster.server.asked.clear()

    alice.cleanup()

    asked = cluster.server.asked
    raised = next(index for index, (method, path) in enumerate(asked) if method == "POST" and path.endswith("/leases"))
    assert cluster.asked("DELETE") == ["DELETE"] * 3
    assert all(method != "DELETE" for method, _ in asked[:raised])


def test_a_creator_who_read_the_floor_before_a_cleanup_lifts_its_token_above_it(cluster, alice, bob) -> None:
    """It has read floor 0; before its POST arrives, others use the name up to token 5, and clean it up."""

    def use_and_clean_up() -> None:
        for _ in range(5):
            bob.hold("job").released()
        assert bob.cleanup() == 1

    cluster.meanwhile("POST", use_and_clean_up)

    assert alice.hold("job").token == 6


def test_who_follows_a_creator_that_died_before_it_read_the_floor_reads_it(cluster, alice, bob) -> None:
    def use_and_clean_up() -> None:
        for _ in range(5):
            bob.hold("job").released()
        assert bob.cleanup() == 1
        cluster.server.next(_trouble_with_the_floor())

    cluster.meanwhile("POST", use_and_clean_up)
    with pytest.raises(BackendUnavailable) as raised:
        alice.ask("job", 10, within=0.5)
    assert raised.value.outcome_unknown
    cluster.server._faults.clear()
    bob.is_refused("job")
    cluster.pass_time(11)

    assert bob.hold("job").token > 5


def _trouble_with_the_floor():
    from pglease.testing.api_server import Fault

    return Fault("GET", within=FLOOR, status=503, times=1000)


def test_a_grant_whose_creator_could_not_read_the_floor_is_settled_by_the_next_try(cluster, alice, bob) -> None:
    for _ in range(4):
        bob.hold("other").released()
    bob.cleanup()
    lease_id = new_id()
    cluster.next("GET", commit=True, status=None, within=FLOOR)
    cluster.server.next(_trouble_with_the_floor())
    with pytest.raises(BackendUnavailable):
        alice.ask("job", lease_id=lease_id, within=0.5)
    assert "pglease/unsettled" in cluster.object("job")["metadata"]["annotations"]
    cluster.server._faults.clear()

    hold = alice.hold("job", lease_id=lease_id)

    assert hold.token == 5
    assert "pglease/unsettled" not in cluster.object("job")["metadata"]["annotations"]


def test_a_name_that_is_taken_between_the_look_and_the_deletion_is_not_deleted(cluster, alice, bob) -> None:
    alice.hold("job").released()
    cluster.meanwhile("DELETE", lambda: bob.hold("job"))

    assert alice.cleanup() == 0

    assert alice.is_refused("job").held_by == "bob"


def test_a_deletion_names_the_very_version_in_its_body(cluster, alice) -> None:
    alice.hold("job").released()
    found = cluster.object("job")["metadata"]
    seen: list[bytes] = []
    from pglease.testing.api_server import _Handler

    real = _Handler._outcome

    def outcome(self: _Handler, body: bytes):
        seen.extend([body] if self.command == "DELETE" else [])
        return real(self, body)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Handler, "_outcome", outcome)
        alice.cleanup()

    (body,) = seen
    wanted = {"uid": found["uid"], "resourceVersion": found["resourceVersion"]}
    assert json.loads(body)["preconditions"] == wanted


def test_a_floor_that_holds_no_number_lets_nothing_be_created_or_deleted(cluster, alice) -> None:
    alice.hold("job").released()
    alice.cleanup()
    floor = cluster.server.leases.get(NAMESPACE, FLOOR)
    floor["metadata"]["annotations"] = {"team": "a"}
    cluster.put(floor)

    with pytest.raises(BackendMisconfigured, match="floor"):
        alice.ask("new")

    assert not cluster.exists("new")


def test_two_janitors_raise_the_floor_together(cluster, alice, bob) -> None:
    for index in range(6):
        alice.hold(f"job-{index}").released()

    done = at_once(2, lambda index: (alice, bob)[index].cleanup())

    assert sum(done) == 6
    assert cluster.worker("carol").hold("job-1").token == 2


def test_what_lapsed_is_cleaned_up_by_those_who_watched_it_and_what_was_given_back_by_anybody(cluster, alice) -> None:
    alice.hold("lapsed", 10)
    alice.hold("given back").released()
    watcher = cluster.worker("watcher")
    watcher.names()
    cluster.pass_time(11)

    assert cluster.worker("newcomer").cleanup() == 1
    assert watcher.cleanup() == 1


def test_how_long_ago_a_hold_was_given_back_can_be_read_off_the_servers_clock(cluster, alice) -> None:
    alice.hold("job").released()
    found = cluster.object("job")
    for field in (("spec", "renewTime"), ("metadata", "annotations", "pglease/written-at")):
        place = found
        for key in field[:-1]:
            place = place[key]
        place[field[-1]] = "2020-01-01T00:00:00.000000Z"
    cluster.put(found)
    newcomer = cluster.worker("newcomer")

    assert newcomer.cleanup(older_than=10 * 365 * 86400) == 0
    assert newcomer.cleanup(older_than=86400) == 1


def test_a_running_hold_is_not_cleaned_up_although_its_times_are_years_old(cluster, alice) -> None:
    alice.hold("job", 30)
    found = cluster.object("job")
    found["spec"]["renewTime"] = found["metadata"]["annotations"]["pglease/written-at"] = "2020-01-01T00:00:00.000000Z"
    cluster.put(found)

    assert cluster.worker("newcomer").cleanup() == 0

    assert cluster.worker("bob").is_refused("job").held_by == "alice"


def test_tokens_rise_while_names_are_created_and_cleaned_up_all_the_time(cluster) -> None:
    workers = [cluster.worker(f"w{index}") for index in range(4)]
    tokens: list[list[int]] = [[], [], []]

    def live(index: int) -> None:
        if index == 3:
            for _ in range(25):
                workers[3].cleanup()
            return
        while len(tokens[index]) < 15:
            answer = workers[index].ask("job", lease_id=(lease_id := new_id()))
            if isinstance(answer, Granted):
                tokens[index].append(answer.lease.fencing_token)
                workers[index].backend.release("job", lease_id, budget())

    at_once(4, live)

    everything = [token for row in tokens for token in row]
    assert len(set(everything)) == len(everything)
    assert all(row == sorted(row) for row in tokens)
