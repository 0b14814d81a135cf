"""Giving it back: only one's own, from any thread, whatever goes wrong; and tokens that never go back."""

from __future__ import annotations

import logging
import signal
import subprocess
import threading

import pytest

from pglease import BackendUnavailable, LeaseLostError, PGLease, PostgresBackend, ReleaseError
from tests.support.worlds import (
    TABLE,
    Stopwatch,
    child,
    execute,
    expire,
    is_free,
    row,
    two_clients,
    wait_until,
)


def test_a_late_release_by_the_former_holder_frees_nothing(dsn):
    """It says False, and the new holder's row is the same to the byte."""
    with two_clients(dsn) as (former, present):
        assert former.try_acquire("job", heartbeat=False)
        lease = former.held("job")
        expire(dsn, "job")
        assert present.try_acquire("job", heartbeat=False)
        before = row(dsn, "job")

        assert lease.release() is False
        assert former.release("job") is False

        assert row(dsn, "job") == before
        assert present.held("job")


def test_a_release_frees_at_once_and_a_second_one_is_harmless(dsn):
    """True, then False, whichever way it is asked."""
    with two_clients(dsn) as (one, other):
        lease = one.wait_for_lease("job")
        assert one.release("job") is True
        assert is_free(dsn, "job")
        assert other.try_acquire("job")

        assert one.release("job") is False
        assert lease.release() is False
        assert other.held("job")


# -- when the server does not answer


def test_an_error_of_the_body_comes_out_at_once_though_the_server_is_down(fresh_postgres):
    """The body's own, with the release's failure as a note; nobody waits for a hopeless release."""
    server = fresh_postgres()
    with PGLease(server.dsn) as leases:
        with pytest.raises(ValueError, match="of the body") as error, leases.acquire("job", ttl=30):
            server.stop("immediate", keep=True)
            watch = Stopwatch()
            raise ValueError("of the body")
        assert watch.seconds < 10
        assert any("could not be confirmed" in note for note in error.value.__notes__)
        server.start()
        wait_until(lambda: is_free(server.dsn, "job"))


def test_an_error_of_the_body_comes_out_at_once_though_the_server_is_silent(dsn, proxy):
    """The same with a network that swallows everything."""
    with PGLease(proxy.through(dsn)) as leases:
        with pytest.raises(ValueError, match="of the body") as error, leases.acquire("job", ttl=30):
            proxy.black_hole()
            watch = Stopwatch()
            raise ValueError("of the body")
        assert watch.seconds < 10
        assert any("could not be confirmed" in note for note in error.value.__notes__)
        proxy.pass_through()
        wait_until(lambda: is_free(dsn, "job"))


def test_a_block_that_succeeded_is_not_failed_by_its_release(fresh_postgres, caplog):
    """Its result stands; a warning says that the release goes on in the background, and it does."""
    server = fresh_postgres()
    with PGLease(server.dsn) as leases:

        @leases.singleton_task("job", ttl=60)
        def task() -> str:
            server.stop("immediate", keep=True)
            return "done"

        assert task() == "done"
        wait_until(lambda: any("could not be confirmed" in record.getMessage() for record in caplog.records))
        server.start()
        wait_until(lambda: is_free(server.dsn, "job"))


class Watching(PostgresBackend):
    """Notes whether the hold still counted as held when its release was sent; fails as often as it is told to."""

    def __init__(self, url, failures):
        super().__init__(url)
        self.failures = failures
        self.lease = None
        self.held_when_asked: list[bool] = []

    def release(self, *arguments, **knobs):
        self.held_when_asked.append(self.lease.held)
        if self.failures:
            self.failures -= 1
            raise BackendUnavailable("a scripted outage", outcome_unknown=True)
        return super().release(*arguments, **knobs)


@pytest.mark.parametrize("through", ["handle", "client"])
def test_a_release_that_failed_can_be_repeated(dsn, through):
    """Over in this process before the request is sent; the handle keeps its ids, and the next call ends the job."""
    backend = Watching(dsn, failures=1)
    with PGLease(backend) as leases:
        assert leases.try_acquire("job", ttl=30)
        lease = backend.lease = leases.held("job")
        release = lease.release if through == "handle" else lambda: leases.release("job")
        with pytest.raises(ReleaseError) as error:
            release()

        assert isinstance(error.value.__cause__, BackendUnavailable)
        assert backend.held_when_asked[0] is False
        assert lease.held is False
        assert lease.loss is None
        assert release() is True
        assert is_free(dsn, "job")
        assert not any(backend.held_when_asked)
    backend.close()


def test_a_release_whose_reply_was_lost_is_a_release(dsn, proxy):
    """The server had done it: asking again finds that out, and no loss is reported."""
    told: list[str] = []
    with PGLease(proxy.through(dsn), on_lease_lost=told.append) as leases:
        lease = leases.wait_for_lease("job", ttl=30)
        dropped = proxy.drop_next_reply(b"job")

        assert leases.release("job") is True
        assert dropped.is_set()
        assert lease.loss is None
        assert is_free(dsn, "job")
    assert told == []


# -- who may give back


def test_a_lease_taken_in_one_thread_is_released_in_another(dsn):
    """Ownership is the handle's, not the thread's."""
    answers: list[object] = []
    with PGLease(dsn) as leases:
        taker = threading.Thread(target=lambda: answers.append(leases.wait_for_lease("job")))
        taker.start()
        taker.join(10)
        (lease,) = answers
        assert lease.held
        releaser = threading.Thread(target=lambda: answers.append(lease.release()))
        releaser.start()
        releaser.join(10)

        assert answers[1] is True
        assert is_free(dsn, "job")


def test_a_block_that_outlived_its_lease_does_not_end_its_successors(dsn):
    """Two threads of one client: the first one's hold expired, the second one's goes on."""
    with PGLease(dsn) as leases:
        with pytest.raises(LeaseLostError), leases.acquire("job", ttl=30, heartbeat=False) as first:
            expire(dsn, "job")
            successor: list[object] = []
            thread = threading.Thread(target=lambda: successor.append(leases.wait_for_lease("job", timeout=5)))
            thread.start()
            thread.join(10)
            before = row(dsn, "job")
        (second,) = successor
        assert row(dsn, "job") == before
        assert second.held
        assert leases.held("job") is second
        assert not first.held
        assert leases.release("job") is True


# -- how processes end

BODY = """
import threading
leases = PGLease(dsn)
try:
    with leases.acquire("job", ttl=60):
        say("working")
        threading.Event().wait(30)
except KeyboardInterrupt:
    say("interrupted")
    hear()
    raise
"""


def test_an_interrupt_in_the_body_frees_the_name_at_once(dsn):
    """Ctrl-C unwinds the block like any exception."""
    with child(BODY, dsn) as worker:
        assert worker.hear() == "working"
        assert not is_free(dsn, "job")
        worker.send(signal.SIGINT)
        watch = Stopwatch()
        wait_until(lambda: is_free(dsn, "job"), every=0.002)

        assert watch.seconds < 10
        assert worker.hear() == "interrupted"
        worker.tell()
        code, errors = worker.end()
        assert code == -signal.SIGINT
        assert "KeyboardInterrupt" in errors


EXITING = """
leases = PGLease(dsn)
assert leases.try_acquire("job", ttl=60)
"""


def test_a_process_that_ends_gives_back_what_its_client_owns(dsn):
    """At the interpreter's exit, without a close."""
    with child(EXITING, dsn) as worker:
        assert worker.end() == (0, "")
    assert is_free(dsn, "job")


SIGNALS = """
import signal
def handlers(): return {number: signal.getsignal(number) for number in signal.valid_signals()}
import pglease.backends.postgres
before = handlers()
leases = PGLease(dsn)
with leases.acquire("job"): pass
leases.singleton_task("job")(print)("x")
leases.close()
say(before == handlers())
"""


def test_no_signal_handler_is_ever_installed(dsn):
    """Not by importing, constructing, holding or closing; signals are the application's."""
    record = "import signal\nfirst = {n: signal.getsignal(n) for n in signal.valid_signals()}\n"
    with child(SIGNALS + "say(first == handlers())\n", dsn, first=record) as process:
        assert [process.hear(), process.hear(), process.hear()] == ["x", "True", "True"]


# -- tokens


def test_tokens_rise_for_ever(fresh_postgres, tmp_path):
    """Through fifty holds, an expiry, an operator's force, cleaning, a restart, and a dump restored elsewhere."""
    server = fresh_postgres()
    tokens: list[int] = []

    def hold(dsn: str, end) -> None:
        with PGLease(dsn) as leases:
            lease = leases.wait_for_lease("job", ttl=60, timeout=5)
            tokens.append(lease.fencing_token)
            end(leases, lease)

    def release(leases, lease):
        assert lease.release()

    def lapse(leases, lease):
        expire(server.dsn, "job")

    def force(leases, lease):
        assert leases.force_release("job", lease.fencing_token)

    def clean(leases, lease):
        release(leases, lease)
        assert leases.cleanup_expired() == 1
        assert leases.get_lease("job") is None

    with PGLease(server.dsn) as leases:
        for _ in range(50):
            with leases.acquire("job") as lease:
                tokens.append(lease.fencing_token)
    for end in (lapse, release, force, release, clean, release, clean, release):
        hold(server.dsn, end)
    server.restart("immediate")
    hold(server.dsn, clean)
    hold(server.dsn, release)
    dump = tmp_path / "dump.sql"
    dump.write_bytes(
        subprocess.run([server.bindir / "pg_dump", server.admin_dsn], check=True, capture_output=True).stdout
    )
    server.execute("CREATE DATABASE elsewhere OWNER pglease_test")
    elsewhere = server.url("elsewhere")
    subprocess.run(
        [server.bindir / "psql", "-q", "-v", "ON_ERROR_STOP=1", "-f", dump, server.url("elsewhere", user="postgres")],
        check=True,
        capture_output=True,
    )
    hold(elsewhere, release)
    with PGLease(elsewhere) as leases:
        assert leases.try_acquire("new name")
        tokens.append(leases.held("new name").fencing_token)
        assert tokens[:50] == list(range(1, 51))
        assert tokens[:-1] == sorted(set(tokens[:-1]))
        assert leases.held("new name").fencing_token >= tokens[-3], "a new name starts above all that was cleaned"
    assert execute(elsewhere, f"SELECT count(*) FROM {TABLE}") == [(2,)]


def test_an_operators_end_needs_the_current_token(dsn):
    """A token that is not current ends nothing; the next hold's is larger, and the old holder hears `forced`."""
    with two_clients(dsn, heartbeat_interval=0.2) as (holder, operator):
        assert holder.try_acquire("job")
        lease = holder.held("job")
        assert operator.force_release("job", lease.fencing_token + 1) is False
        assert operator.force_release("unknown", 1) is False
        assert lease.held

        assert operator.force_release("job", lease.fencing_token) is True
        assert operator.try_acquire("job")
        assert operator.held("job").fencing_token == lease.fencing_token + 1
        assert lease.lost.wait(15)


def test_a_release_that_cannot_be_confirmed_is_a_warning_not_an_error(dsn, proxy, caplog):
    """The block was good; what is left lapses by itself."""
    with PGLease(proxy.through(dsn)) as leases:
        with leases.acquire("job", ttl=30):
            proxy.black_hole()
        (record,) = wait_until(lambda: [each for each in caplog.records if each.levelno >= logging.WARNING])
        assert record.levelno == logging.WARNING
        proxy.pass_through()
