"""A forked child owns nothing of its parent's, no lease, connection or thread, and can lease for itself at once."""

from __future__ import annotations

from collections.abc import Callable

from tests.attacks.world import Child

# Python warns of forking beside threads; that it works all the same is the point.
FORGIVING = "ignore::DeprecationWarning"

PARENT = """
    import os, signal, sys, time
    from pglease import PGLease

    leases = PGLease(os.environ["PGLEASE_URL"])
    leases.try_acquire("parent", ttl=2)
    signal.alarm(40)

    def forked(work):
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            try:
                os.write(1, f"{work()}\\n".encode())  # in one piece: the others write as well
                os._exit(0)
            finally:
                os._exit(1)
        return pid

    def ended(pids):
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
"""


def test_children_forked_at_once_each_lease_for_themselves_and_read_their_own_rows(child: Callable[..., Child]) -> None:
    parent = child(
        PARENT
        + """
    def work(place):
        name = f"child-{place}"
        taken = leases.try_acquire(name, ttl=30)
        record = leases.get_lease(name)
        return taken, record.name == name, record.owner_id == leases.owner_id, leases.try_acquire("parent")

    owner = leases.owner_id
    print(ended([forked(lambda place=place: work(place)) for place in range(4)]))
    print(leases.owner_id == owner, leases.held("parent").held, len(leases.list_leases("child-")))
    leases.close()
    """,
        warnings=FORGIVING,
    )

    assert sorted(parent.rest()) == sorted(["(True, True, True, False)"] * 4 + ["[0, 0, 0, 0]", "True True 4"])


def test_children_forked_one_after_the_other_exclude_each_other(child: Callable[..., Child]) -> None:
    parent = child(
        PARENT
        + """
    print([code for _ in range(4) for code in ended([forked(lambda: leases.try_acquire("one", ttl=30))])])
    leases.close()
    """,
        warnings=FORGIVING,
    )

    assert parent.rest() == ["True", "False", "False", "False", "[0, 0, 0, 0]"]


def test_a_child_that_closes_its_client_leaves_the_parents_lease_and_connection_alone(
    dsn: str, child: Callable[..., Child]
) -> None:
    parent = child(
        PARENT
        + """
    import psycopg
    def sessions():
        with psycopg.connect(os.environ["PGLEASE_URL"]) as connection:
            return connection.execute(
                "SELECT array_agg(pid ORDER BY pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()").fetchone()

    before = sessions()
    print(ended([forked(leases.close)]))
    print(sessions() == before)
    until = time.monotonic() + 4
    while time.monotonic() < until:
        assert leases.held("parent").held
        time.sleep(0.05)
    print(leases.release("parent"))
    leases.close()
    """,
        warnings=FORGIVING,
    )

    assert parent.rest() == ["None", "[0]", "True", "True"]


def test_a_child_that_exits_normally_leaves_the_parents_lease_alone(child: Callable[..., Child]) -> None:
    parent = child(
        PARENT
        + """
    if (pid := os.fork()) == 0:
        sys.exit(0)
    print(ended([pid]), leases.get_lease("parent").is_expired(), leases.held("parent").ensure(1))
    leases.close()
    """,
        warnings=FORGIVING,
    )

    assert parent.rest() == ["[0] False True"]


def test_the_child_of_a_holder_holds_nothing_and_knows_why(child: Callable[..., Child]) -> None:
    parent = child(
        PARENT
        + """
    from pglease import LeaseLostError, NotOwnedError
    lease = leases.held("parent")

    def work():
        said = [lease.held, lease.remaining(), lease.loss.reason, lease.lost.is_set(), leases.held("parent")]
        said += [leases.release("parent"), lease.release()]
        try:
            lease.renew()
        except NotOwnedError:
            said.append("not owned")
        return said

    print(ended([forked(work)]))
    print(lease.held, lease.ensure(1))
    leases.close()
    """,
        warnings=FORGIVING,
    )

    assert parent.rest() == ["[False, 0.0, 'forked', True, None, False, False, 'not owned']", "[0]", "True True"]


def test_a_fork_inside_a_block_ends_the_block_in_the_child_with_a_loss(child: Callable[..., Child]) -> None:
    parent = child(
        PARENT
        + """
    from pglease import LeaseLostError
    try:
        with leases.acquire("block", ttl=2) as lease:
            pid = os.fork()
            if pid:
                print(ended([pid]), lease.held)
    except LeaseLostError as error:
        print(error.reason)
        os._exit(0)
    print(leases.get_lease("block").is_expired())
    leases.close()
    """,
        warnings=FORGIVING,
    )

    assert parent.rest() == ["forked", "[0] True", "True"]


def test_a_fork_while_threads_are_busy_with_the_client_hangs_nobody(child: Callable[..., Child]) -> None:
    parent = child(
        PARENT
        + """
    import threading
    stop = threading.Event()
    def churn(place):
        while not stop.is_set():
            with leases.acquire(f"churn-{place}", ttl=30):
                pass
    threads = [threading.Thread(target=churn, args=(place,)) for place in range(4)]
    for thread in threads: thread.start()
    codes = []
    for place in range(15):
        codes += ended([forked(lambda: leases.try_acquire(f"mine-{place}", ttl=30))])
    stop.set()
    for thread in threads: thread.join()
    print(codes == [0] * 15)
    leases.close()
    """,
        warnings=FORGIVING,
    )

    assert parent.rest(60) == ["True"] * 16
