"""Reads what the server says, in RESP2: a line for each answer, and more behind it where the line says so.

redis-py's own parser serves every kind of client; for the few short answers to a verb of ours it takes longer than the
server does. What an error means is still redis-py's to say.
"""

from __future__ import annotations

from collections.abc import Callable
from socket import socket
from typing import Any

from redis.exceptions import ConnectionError as NotConnected
from redis.exceptions import InvalidResponse

_MOST = 65536
"""Bytes taken from the socket at once."""
_BLINK = 0.0001
"""Seconds for "now": a socket that may not wait at all says so in different words over TLS."""


class Reader:
    """The answers that come over one connection, each whole.

    Args:
        source: a connected socket, with TLS or without. What it raises comes out as it is.
        explained: makes an exception of the text of an error.
    """

    __slots__ = ("_at", "_explained", "_heard", "_source")

    def __init__(self, source: socket, explained: Callable[[str], Exception]) -> None:
        self._source = source
        self._explained = explained
        self._heard = b""
        self._at = 0

    def next(self) -> Any:
        """Return the next answer: bytes, a number, None, a list of answers, or an error that is not raised."""
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            return self._text(int(rest))
        if kind == b":":
            return int(rest)
        if kind == b"+":
            return rest
        if kind == b"*":
            return None if rest == b"-1" else [self.next() for _ in range(int(rest))]
        if kind != b"-":
            raise InvalidResponse(f"the server does not speak RESP2: {line[:40]!r}")
        error = self._explained(rest.decode(errors="replace"))
        if isinstance(error, NotConnected):  # the server is loading, say: nothing more is to be had here
            raise error
        return error

    def begun_within(self, seconds: float) -> bool:
        """Wait for at most `seconds` until something was said that `next` has not returned; tell whether it was."""
        if self._at < len(self._heard):
            return True
        self._source.settimeout(max(seconds, _BLINK))
        try:
            self._hear()
        except TimeoutError:
            return False
        finally:
            self._source.settimeout(None)
        return True

    def _line(self) -> bytes:
        while (end := self._heard.find(b"\r\n", self._at)) < 0:
            self._hear()
        line, self._at = self._heard[self._at : end], end + 2
        return line

    def _text(self, size: int) -> bytes | None:
        if size < 0:
            return None
        while len(self._heard) < self._at + size + 2:
            self._hear()
        end = self._at + size
        text, self._at = self._heard[self._at : end], end + 2
        return text

    def _hear(self) -> None:
        more = self._source.recv(_MOST)
        if not more:
            raise NotConnected("the server closed the connection")
        self._heard, self._at = self._heard[self._at :] + more, 0
