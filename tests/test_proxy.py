"""The fault proxy: each way of breaking a connection is the one it says, and can be mended."""

import contextlib
import socket
import threading
import time

import psycopg
import pytest

from pglease.testing.processes import LocalServerError, free_port, wait_until
from pglease.testing.proxy import Proxy, _Filter

PATIENCE = 60.0


class Echo:
    """A server that answers every chunk with the same bytes, and tells what it heard."""

    def __init__(self):
        self.heard = b""
        self.sessions = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                session, _ = self._listener.accept()
            except OSError:
                return  # closed
            self.sessions += 1
            threading.Thread(target=self._serve, args=(session,), daemon=True).start()

    def _serve(self, session):
        with session, contextlib.suppress(ConnectionError):  # cutting connections is what this is about
            while chunk := session.recv(65536):
                self.heard += chunk
                session.sendall(chunk)

    def close(self):
        # shutdown wakes the thread in accept; close alone does not.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def echo():
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def link(echo):
    with Proxy("127.0.0.1", echo.port) as proxy:
        yield proxy


@pytest.fixture
def client(link):
    with connected(link) as client:
        yield client


def connected(link):
    return socket.create_connection((link.host, link.port), PATIENCE)


def answers(client, words):
    client.sendall(words)
    return receive(client, len(words)) == words


def receive(client, size):
    got = b""
    while len(got) < size and (chunk := client.recv(size - len(got))):
        got += chunk
    return got


def is_silent(client, seconds=0.2):
    client.settimeout(seconds)
    try:
        return client.recv(1) is None
    except TimeoutError:
        return True
    finally:
        client.settimeout(PATIENCE)


def test_it_passes_bytes_both_ways_and_says_goodbye(link, client):
    assert answers(client, b"hello" * 50_000)

    client.shutdown(socket.SHUT_WR)

    assert client.recv(1) == b""
    assert wait_until(lambda: link.open_connections == 0, timeout=PATIENCE)


def test_refusing_is_a_real_refusal_spares_old_connections_and_keeps_the_port(link, client):
    assert answers(client, b"before")
    port = link.port

    link.refuse()

    with pytest.raises(ConnectionRefusedError):
        connected(link)
    assert answers(client, b"meanwhile")

    link.pass_through()

    with connected(link) as another:
        assert answers(another, b"after")
    assert link.port == port


def test_a_cut_is_a_reset_and_wakes_the_client_that_waits(link, client):
    assert answers(client, b"before")

    link.cut()

    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert link.open_connections == 0
    with connected(link) as another:
        assert answers(another, b"after")


def test_a_cut_ends_a_connection_whose_peer_does_not_read(link, client):
    assert answers(client, b"before")
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):  # all buffers are full: the echo waits for us, and the proxy for the echo
        client.sendall(b"x" * 100_000_000)

    link.cut()

    assert link.open_connections == 0


def test_a_black_hole_takes_everything_and_gives_it_when_it_is_mended(echo, link, client):
    assert answers(client, b"before")
    link.black_hole()

    client.sendall(b"late")
    with connected(link) as another:
        another.sendall(b"er")
        assert is_silent(client)
        assert is_silent(another)
        assert (echo.heard, echo.sessions) == (b"before", 1)

        link.pass_through()

        assert receive(client, 4) == b"late"
        assert receive(another, 2) == b"er"


def test_what_a_black_hole_holds_never_arrives_after_a_cut(echo, link, client):
    assert answers(client, b"before")
    link.black_hole()
    client.sendall(b"lost")
    assert is_silent(client)

    link.cut()
    link.pass_through()

    with connected(link) as another:
        assert answers(another, b"!")
    assert echo.heard == b"before!"


def test_dropped_replies_belong_to_requests_that_were_heard(echo, link, client):
    link.drop_replies()

    client.sendall(b"do it")

    assert wait_until(lambda: echo.heard == b"do it", timeout=PATIENCE)
    assert is_silent(client)


def test_a_delay_is_paid_in_each_direction(link, client):
    assert answers(client, b"before")
    link.delay(0.1)

    started = time.monotonic()
    assert answers(client, b"slow")

    assert time.monotonic() - started >= 0.2


def test_a_drip_brings_everything_a_few_bytes_at_a_time(link, client):
    assert answers(client, b"before")
    link.drip(size=3, every=0.01)

    client.sendall(b"0123456789")
    first = client.recv(10)

    assert len(first) == 3
    assert first + receive(client, 7) == b"0123456789"


def test_the_next_reply_is_dropped_and_the_connection_cut(echo, link, client):
    assert answers(client, b"before")
    dropped = link.drop_next_reply()

    client.sendall(b"commit")

    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert dropped.wait(PATIENCE)
    assert echo.heard == b"beforecommit"
    with connected(link) as another:
        assert answers(another, b"after")


def test_only_the_reply_to_a_certain_request_is_dropped(link, client):
    dropped = link.drop_next_reply(to=b"COMMIT")

    assert answers(client, b"BEGIN")
    assert not dropped.is_set()
    client.sendall(b"COMMIT")

    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert dropped.wait(PATIENCE)


def test_a_cut_in_the_middle_of_a_reply_lets_the_first_bytes_through(link, client):
    link.cut_after_reply_bytes(8)

    assert answers(client, b"12345")
    client.sendall(b"67890")

    with pytest.raises(ConnectionResetError):
        receive(client, 5)


def test_without_a_server_the_client_is_cut():
    # The reset may come before the connection is even reported.
    with Proxy("127.0.0.1", free_port()) as link, pytest.raises(ConnectionResetError), connected(link) as client:
        client.recv(1)


def test_stopping_leaves_no_thread_behind(echo):
    before = threading.active_count()
    link = Proxy("127.0.0.1", echo.port).start()
    with connected(link) as client:
        assert answers(client, b"hello")
        link.black_hole()
        client.sendall(b"never")

        link.stop()

        assert wait_until(lambda: threading.active_count() <= before, timeout=PATIENCE)
    assert echo.heard == b"hello"


@pytest.mark.parametrize("gone", [True, False], ids=["they go", "they stay"])
def test_connections_that_a_gentle_cut_does_not_end_are_cut_harder(monkeypatch, gone):
    def no_end(condition, *, timeout):
        return condition()

    class Deaf:
        def cut(self, *, also_writing=False):
            if also_writing and gone:
                link._links.clear()

    monkeypatch.setattr("pglease.testing.proxy.wait_until", no_end)
    link = Proxy("127.0.0.1", 1)
    link._links.add(Deaf())

    with contextlib.nullcontext() if gone else pytest.raises(LocalServerError, match="could not end its connections"):
        link.cut()


def test_what_has_not_wholly_come_waits_for_its_rest():
    whole = _Filter()
    said, notified = b"Z\0\0\0\x05I", b"A\0\0\0\x04"

    passed = [whole.without_notifications(piece) for piece in (said[:3], said[3:5], said[5:] + notified[:5], said)]

    assert passed == [b"", b"", said, said]


@pytest.mark.parametrize("shape", ["url", "pairs"])
def test_a_dsn_is_led_through_the_proxy(proxy, dsn, shape):
    pairs = psycopg.conninfo.conninfo_to_dict(dsn)
    given = dsn if shape == "url" else psycopg.conninfo.make_conninfo("", **pairs)
    assert ("://" in given) == (shape == "url")

    with psycopg.connect(proxy.through(given)) as connection:
        assert connection.info.port == proxy.port
        assert connection.info.dbname == pairs["dbname"]


def test_a_commit_whose_reply_was_lost_is_done_all_the_same(proxy, dsn, admin):
    admin.execute("CREATE TABLE t (n int); GRANT ALL ON t TO PUBLIC")
    connection = psycopg.connect(proxy.through(dsn))
    connection.execute("INSERT INTO t VALUES (1)")
    dropped = proxy.drop_next_reply(to=b"COMMIT")

    with pytest.raises(psycopg.OperationalError):
        connection.commit()

    assert dropped.wait(PATIENCE)
    assert admin.execute("SELECT count(*) FROM t").fetchone() == (1,)
