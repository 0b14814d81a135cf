"""What an API server seldom says, and a client of it seldom does: told without one."""

from __future__ import annotations

import select
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pglease.backends import kubernetes, kubernetes_doctor, kubernetes_sightings
from pglease.backends.kubernetes import KubernetesBackend
from pglease.backends.kubernetes_api import Leases
from pglease.backends.kubernetes_http import ServerClock, Wire, _Line, _readable, _Request
from pglease.backends.kubernetes_sightings import Sightings
from pglease.backends.kubernetes_watch import Watch, _changes
from pglease.errors import BackendClosed, BackendMisconfigured, BackendUnavailable
from pglease.records import Change
from pglease.testing.harness import budget, new_id

LOGIN: Any = SimpleNamespace(server="http://127.0.0.1:1", authorization="", tls=None)


@pytest.fixture
def wire() -> Any:
    return Wire(lambda: LOGIN, pool_size=1, connect_timeout=1)


class Talking:
    """A connection that answers."""

    prefix = ""

    def __init__(self, status: int = 200, *, will_close: bool = False) -> None:
        self.sock: Any = self
        self.line = SimpleNamespace(until=None)
        self.reply: Any = SimpleNamespace(
            status=status, will_close=will_close, read=lambda: b"{}", getheader=lambda _: None, close=lambda: None
        )

    def request(self, *_: Any) -> None: ...

    def getresponse(self) -> Any:
        return self.reply

    def close(self) -> None:
        self.sock = None

    def is_fresh(self, _: Any) -> bool:
        return self.sock is not None


def test_a_connection_that_the_server_closes_is_not_used_again(wire: Any) -> None:
    for will_close, kept in ((True, 0), (False, 1)):
        connection: Any = Talking(will_close=will_close)
        answer = wire._conversation(connection, LOGIN, _Request("GET", "/"))
        wire._keep(connection)

        assert answer.status == 200
        assert len(wire._idle) == kept


def test_what_comes_back_after_the_end_is_closed_and_nothing_is_dialled(wire: Any) -> None:
    wire.close()
    connection: Any = Talking()

    wire._keep(connection)

    assert connection.sock is None
    with pytest.raises(BackendClosed):
        wire._dialled(LOGIN, budget())


def test_a_stream_that_the_server_does_not_know_us_for_is_begun_again_with_a_new_login(wire: Any) -> None:
    logins = [LOGIN, SimpleNamespace(**vars(LOGIN))]
    wire._read_login = lambda: logins.pop(0)
    used: list[Any] = []

    def dialled(login: Any, _: Any) -> Any:
        used.append(login)
        return Talking(401 if len(used) == 1 else 200)

    wire._dialled = dialled

    assert wire.open("/", budget()).reply.status == 200

    assert len(used) == 2
    assert used[0] is not used[1]


def test_credentials_that_another_thread_reads_are_waited_for_no_longer_than_there_is_time(wire: Any) -> None:
    taken, over = threading.Event(), threading.Event()

    def read() -> None:
        with wire._logging_in:
            taken.set()
            over.wait(60)

    thread = threading.Thread(target=read)
    thread.start()
    taken.wait(60)
    with pytest.raises(BackendUnavailable, match="still being read by another thread"):
        wire.login(budget(0.0))
    over.set()
    thread.join(60)


def test_nothing_is_sent_when_the_time_is_over() -> None:
    with pytest.raises(TimeoutError):
        _Line(None, budget(0.0)).bound()  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["poll", "select"])
def test_a_word_that_was_not_asked_for_is_seen_on_every_system(monkeypatch: Any, way: str) -> None:
    if way == "select":
        monkeypatch.delattr(select, "poll")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not _readable(ours)
        theirs.send(b"!")
        assert _readable(ours)


def test_before_its_first_answer_a_servers_clock_is_taken_for_ours() -> None:
    clock = ServerClock()
    ours = clock.now()

    clock.heard("Thu, 01 Jan 2026 00:00:00 GMT", 0.0, 0.0)

    assert ours.year >= 2026
    assert clock.now() != ours


def test_only_so_many_leases_are_remembered(monkeypatch: Any) -> None:
    monkeypatch.setattr(kubernetes_sightings, "_MOST", 2)
    seen = Sightings()
    for lease_id in ("a", "b", "c"):
        seen.asking(lease_id, 1.0)

    assert [seen.asked_at(lease_id) for lease_id in ("a", "b", "c")] == [None, 1.0, 1.0]


def test_a_client_that_was_closed_is_closed_in_a_forked_child_too() -> None:
    leases = Leases(None, "jobs", lambda: 0.0)  # type: ignore[arg-type]
    inherited = leases.closing
    leases.forget()
    assert leases.closing is not inherited

    leases.closing.set()
    leases.forget()
    assert leases.closing.is_set()


def test_a_write_that_takes_long_is_warned_of() -> None:
    leases: Any = SimpleNamespace(rehearse=lambda _: None)

    statuses = [next(kubernetes_doctor._a_write(leases, budget, ttl)).status for ttl in (0.0, 3600.0)]

    assert statuses == ["warn", "ok"]


# -- watches -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def watch() -> Any:
    """One that listens to nobody."""
    watch: Any = object.__new__(Watch)
    watch._saw, watch._heard, watch._over = (said := []).append, SimpleNamespace(put=lambda _: None), threading.Event()
    watch.said = said
    return watch


def test_a_bookmark_and_an_object_of_another_tool_move_a_watch_on_and_say_nothing(watch: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("pglease.backends.kubernetes_watch.named_row", lambda _: None)
    for version, kind in (("5", "BOOKMARK"), ("6", "MODIFIED")):
        watch._hear(kind, {"metadata": {"resourceVersion": version}})
        assert watch._version == version

    assert watch.said == []


def test_a_watch_that_was_closed_while_it_was_continued_hangs_up(watch: Any) -> None:
    hung_up: list[int] = []
    stream = SimpleNamespace(hang_up=lambda: hung_up.append(1))
    watch._leases = SimpleNamespace(again=lambda act, _: act())
    watch._opened = lambda _: stream

    assert watch._continued() is stream
    assert hung_up == []
    watch._over.set()
    watch._continued()
    assert hung_up == [1]


@pytest.mark.parametrize(("left", "changes"), [(5.0, [Change("job", "released", 0.0)]), (-1.0, [])])
def test_a_deleted_object_frees_its_name_unless_it_was_free_already(left: float, changes: list[Change]) -> None:
    row: Any = SimpleNamespace(name="job", left=lambda _: SimpleNamespace(total_seconds=lambda: left))

    assert list(_changes("DELETED", row)) == changes


# -- the backend -------------------------------------------------------------------------------------------------------


@pytest.fixture
def store() -> Any:
    made = KubernetesBackend("jobs")
    yield made
    made.close()


def test_a_watch_that_begins_while_the_backend_is_closed_is_closed(store: Any, monkeypatch: Any) -> None:
    closed: list[int] = []

    def watch(*_: Any) -> Any:
        store._leases.closing.set()
        return SimpleNamespace(close=lambda: closed.append(1), over=False)

    monkeypatch.setattr(kubernetes, "Watch", watch)

    store.listen(budget())

    assert closed == [1]


def test_only_so_many_holds_of_our_own_are_remembered(store: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(kubernetes, "_MOST_HOLDS", 1)
    for name in ("a", "b"):
        store._remember(SimpleNamespace(row=SimpleNamespace(name=name)))

    assert list(store._mine) == ["b"]


@pytest.mark.parametrize("error", [BackendUnavailable("no answer"), BackendMisconfigured("403")])
def test_a_first_hold_whose_second_write_failed_may_be_ours_unless_it_was_refused(store: Any, error: Exception) -> None:
    def failing(*_: Any) -> Any:
        raise error

    store._leases = SimpleNamespace(floor=failing, closing=threading.Event())
    seen: Any = SimpleNamespace(row=SimpleNamespace(settled=False, fencing_token=1))

    with pytest.raises(type(error)) as raised:
        store._settled(seen, SimpleNamespace(lease_id=new_id()), budget())

    assert getattr(raised.value, "outcome_unknown", False) == isinstance(error, BackendUnavailable)
