"""What the server says is read whole, in however many pieces it comes."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import redis
from redis.exceptions import BusyLoadingError, InvalidResponse, NoScriptError, ResponseError

from pglease.backends.redis_reader import Reader

SAID = b"$5\r\n1\r\n2\n\r\n:-7\r\n+OK\r\n$-1\r\n*-1\r\n*2\r\n*1\r\n:1\r\n$0\r\n\r\n-NOSCRIPT none\r\n"
ANSWERS = [b"1\r\n2\n", -7, b"OK", None, None, [[1], b""]]


@pytest.fixture
def line() -> Iterator[tuple[socket.socket, Reader]]:
    server, ours = socket.socketpair()
    with server, ours:
        yield server, Reader(ours, redis.Connection()._parser.parse_error)


@pytest.mark.parametrize("size", [1, 3, 1000], ids=["bytes", "pieces", "all at once"])
def test_answers_are_the_same_however_they_are_cut(line, size):
    server, reader = line
    answers: list[object] = []

    for at in range(0, len(SAID), size):
        server.sendall(SAID[at : at + size])
        if SAID[: at + size].endswith(b":-7\r\n"):  # whole answers are had before the next one comes
            answers += [reader.next(), reader.next()]
    answers += [reader.next() for _ in range(len(ANSWERS) - len(answers))]

    assert answers == ANSWERS
    assert isinstance(reader.next(), NoScriptError)


def test_an_error_is_an_answer_and_in_a_list_too(line):
    server, reader = line
    server.sendall(b"*2\r\n-ERR no\r\n:2\r\n")

    first, second = reader.next()

    assert isinstance(first, ResponseError)
    assert second == 2


@pytest.mark.parametrize(
    ("said", "error"),
    [(b"-LOADING wait\r\n", BusyLoadingError), (b"", redis.ConnectionError), (b"HTTP/1.1 400\r\n", InvalidResponse)],
    ids=["a server that is loading", "a closed connection", "another protocol"],
)
def test_what_ends_a_conversation_is_raised(line, said, error):
    server, reader = line
    server.sendall(said)
    server.shutdown(socket.SHUT_WR)

    with pytest.raises(error):
        reader.next()


def test_waiting_for_the_beginning_of_an_answer_is_bounded_and_loses_nothing(line):
    server, reader = line

    assert reader.begun_within(0.0) is False
    assert reader.begun_within(0.02) is False
    server.sendall(b":1\r\n:2\r\n")
    assert reader.begun_within(10)
    assert reader.next() == 1
    assert reader.begun_within(0.0), "the second came with the first"
    assert reader.next() == 2
