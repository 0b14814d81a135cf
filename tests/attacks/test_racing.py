"""Many ask for one name in the same instant: one gets it, the others hear no, and nobody sees an error."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from pglease import PGLease
from pglease.backends.postgres import PostgresBackend
from tests.attacks.world import Child, all_at_once, eventually, lapse, sql

RACER = """
    import os, sys, time
    from pglease import PGLease

    rounds, start, gap = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    leases = PGLease(os.environ["PGLEASE_URL"])
    leases.list_leases()
    print("ready")
    start += float(sys.stdin.readline())
    for place in range(rounds):
        time.sleep(max(0.0, start + place * gap - time.monotonic()))
        print(place, leases.try_acquire(f"new-{place}", ttl=600, heartbeat=False))
    sys.stdin.readline()
    leases.close()
"""

CHURNER = """
    import os, sys, time
    from pglease import PGLease

    leases = PGLease(os.environ["PGLEASE_URL"], owner_id=sys.argv[1])
    tries = 0
    until = time.monotonic() + float(sys.argv[2])
    while time.monotonic() < until:
        tries += 1
        with leases.acquire("churned", ttl=30) as lease:
            if lease:
                began = time.monotonic()
                print(lease.fencing_token, began, time.monotonic())
    leases.close()
"""


def rolled_back(dsn: str) -> int:
    """How many transactions of this database failed: every statement that is refused with an error is one."""
    ((count,),) = sql(dsn, "SELECT xact_rollback FROM pg_stat_database WHERE datname = current_database()")
    return int(count)


def test_of_processes_that_race_for_a_new_name_one_wins_and_none_sees_an_error(
    dsn: str, child: Callable[..., Child]
) -> None:
    PGLease(dsn).close()
    rounds = 25
    start = time.monotonic()
    racers = [child(RACER, rounds, start, 0.05) for _ in range(8)]
    assert {racer.line() for racer in racers} == {"ready"}
    before = rolled_back(dsn)

    for racer in racers:
        racer.say(str(time.monotonic() - start + 0.2))
    answers = [[racer.line().split() for _ in range(rounds)] for racer in racers]

    for place in range(rounds):
        assert sorted(answer[place][1] for answer in answers) == ["False"] * 7 + ["True"]
    for racer in racers:
        assert racer.say().rest() == []
    assert rolled_back(dsn) == before


def test_threads_with_a_client_each_race_without_errors_and_the_losers_know_the_winner(
    client: Callable[..., PGLease],
) -> None:
    clients = [client(owner_id=f"racer-{place}") for place in range(8)]

    for place in range(25):
        contexts = [each.acquire(f"new-{place}", ttl=60) for each in clients]
        answers = all_at_once([context.__enter__ for context in contexts])

        (winner,) = [answer for answer in answers if answer]
        assert {answer.held_by for answer in answers if not answer} == {winner.owner_id}
        for context in contexts:
            context.__exit__(None, None, None)


def test_threads_of_one_backend_race_for_new_and_for_lapsed_names_without_errors(
    dsn: str, client: Callable[..., PGLease]
) -> None:
    backend = PostgresBackend(dsn, pool_size=8)
    clients = [client(backend) for _ in range(8)]

    for place in range(25):
        name = f"name-{place}"
        asked = [lambda each=each, name=name: each.try_acquire(name, ttl=60, heartbeat=False) for each in clients]
        assert sorted(all_at_once(asked)) == [False] * 7 + [True]
        lapse(dsn, name)
        others = [client(backend) for _ in range(4)]
        asked = [lambda each=each, name=name: each.try_acquire(name, ttl=60, heartbeat=False) for each in others]
        assert sorted(all_at_once(asked)) == [False] * 3 + [True]
    backend.close()


def test_processes_that_churn_one_name_never_overlap_and_never_fail(dsn: str, child: Callable[..., Child]) -> None:
    PGLease(dsn).close()

    churners = [child(CHURNER, f"churner-{place}", 3) for place in range(8)]
    holds = sorted(tuple(map(float, line.split())) for churner in churners for line in churner.rest())

    tokens = [token for token, _, _ in holds]
    assert tokens == [float(token) for token in range(1, len(holds) + 1)]
    assert len(holds) > 20
    for (_, _, ended), (_, began, _) in itertools.pairwise(holds):
        assert ended < began


def test_the_name_of_a_race_is_free_again_once_its_winner_is_done(leases: PGLease, rival: PGLease) -> None:
    assert leases.try_acquire("contended")
    assert not rival.try_acquire("contended")

    leases.release("contended")

    assert rival.try_acquire("contended")
    assert eventually(lambda: rival.get_lease("contended")).fencing_token == 2
