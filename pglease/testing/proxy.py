"""A TCP proxy that breaks connections on demand: refused, cut, silent, slow, or cut just before a reply arrives."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self
from urllib.parse import urlsplit, urlunsplit

from pglease.testing.processes import LocalServerError, wait_until

Kind = Literal["pass", "black_hole", "drop_replies", "drop_notifications", "delay", "drip"]

HOST = "127.0.0.1"
CHUNK = 65536
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER on, zero seconds: close() sends RST instead of FIN."""
CONNECT_TIMEOUT = 10.0
"""Seconds to reach the server; it is on this machine."""
GENTLE_TIMEOUT = 0.5
"""Seconds for the threads of a cut connection to let go of it; one that writes to a peer who does not read does not."""


@dataclass(frozen=True)
class Mode:
    """What happens to bytes on their way.

    Attributes:
        kind: `pass` forwards; `black_hole` holds everything, both ways, until the mode changes; `drop_replies` forwards
            requests and throws replies away; `drop_notifications` takes those of PostgreSQL out of the replies; `delay`
            forwards each chunk `seconds` later; `drip` forwards `size` bytes every `seconds`.
        seconds: for `delay` and `drip`.
        size: bytes, for `drip`.
    """

    kind: Kind = "pass"
    seconds: float = 0.0
    size: int = CHUNK


@dataclass(eq=False)
class _Trap:
    """Waits for a reply that is not to arrive.

    Attributes:
        after: bytes of replies still let through.
        to: what the request before the reply must hold.
        sprung: set once a connection was cut.
    """

    after: int
    to: bytes
    sprung: threading.Event


class _Rules:
    """What may pass now: shared by a proxy and the threads of all its connections."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._trap: _Trap | None = None
        self.mode = Mode()

    def set(self, mode: Mode) -> None:
        with self._changed:
            self.mode = mode
            self._changed.notify_all()

    def arm(self, trap: _Trap) -> threading.Event:
        with self._changed:
            self._trap = trap
        return trap.sprung

    def wake(self) -> None:
        """Make those who wait look again: their connection was cut."""
        with self._changed:
            self._changed.notify_all()

    def hold_back(self, link: _Link) -> Mode:
        """Wait as long as nothing may pass; return the mode under which the bytes go on."""
        waited_from = time.monotonic()
        with self._changed:
            while not link.is_cut:
                if self.mode.kind == "black_hole":
                    self._changed.wait()
                elif self.mode.seconds and (left := waited_from + self.mode.seconds - time.monotonic()) > 0:
                    self._changed.wait(left)
                else:
                    break
            return self.mode

    def spring(self, link: _Link, size: int) -> int:
        """Return how many bytes of a reply may pass: fewer than `size` when the connection is to be cut after them."""
        with self._changed:
            trap = self._trap
            if trap is None or trap.to not in link.last_request:
                return size
            if trap.after >= size:
                trap.after -= size
                return size
            self._trap = None
            link.on_closed = trap.sprung.set
            return trap.after


class Proxy:
    """One proxy before one server; `with Proxy(host, port) as proxy:` starts and stops it.

    Modes can be changed at any time and hold for connections that exist as well as for later ones. What a black hole
    swallowed arrives once it is mended, as TCP would do it: a statement may reach the server long after its client gave
    up.

    Attributes:
        host: 127.0.0.1.
        port: where clients connect; it stays the same when connections are refused for a while.
    """

    def __init__(self, host: str, port: int) -> None:
        """Describe a proxy before the server at `host` and `port`; nothing listens yet."""
        self._target = (host, port)
        self._rules = _Rules()
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._accepted = 0
        self._listener: socket.socket | None = None
        self._door: _Door | None = None
        self.host = HOST
        self.port = 0

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Proxy {self.host}:{self.port} before {self._target[0]}:{self._target[1]}, {self._rules.mode.kind}>"

    # What clients use

    def through(self, dsn: str) -> str:
        """Return the DSN, a URL or `key=value` pairs, with this proxy in place of its host and port."""
        if "://" not in dsn:
            from psycopg.conninfo import make_conninfo

            return make_conninfo(dsn, host=self.host, port=self.port)
        parts = urlsplit(dsn)
        login, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{login}{at}{self.host}:{self.port}"))

    @property
    def accepted(self) -> int:
        """How many connections were ever taken."""
        with self._lock:
            return self._accepted

    @property
    def open_connections(self) -> int:
        """How many connections are there now."""
        with self._lock:
            return len(self._links)

    # Modes

    def pass_through(self) -> None:
        """Mend everything: take connections and forward bytes."""
        self._rules.set(Mode())
        self._open_door()

    def black_hole(self) -> None:
        """Take connections and bytes, and let nothing come of them, either way, until the mode changes."""
        self._rules.set(Mode("black_hole"))

    def drop_replies(self) -> None:
        """Forward requests; throw replies away. Connections are useless to their clients afterwards: cut them."""
        self._rules.set(Mode("drop_replies"))

    def drop_notifications(self) -> None:
        """Drop each NotificationResponse of PostgreSQL on connections made from now on, until `pass_through`.

        The connections must not be encrypted.
        """
        self._rules.set(Mode("drop_notifications"))

    def delay(self, seconds: float) -> None:
        """Forward every chunk, either way, this many seconds later."""
        self._rules.set(Mode("delay", seconds))

    def drip(self, size: int = 1, every: float = 0.01) -> None:
        """Forward `size` bytes every `every` seconds, either way."""
        self._rules.set(Mode("drip", every, size))

    def refuse(self) -> None:
        """Refuse new connections (the kernel answers with RST). Those that exist go on: see `cut`."""
        self._close_door()
        self._bind(self.port)

    def cut(self) -> None:
        """End every connection with RST, at both sides; they are gone when this returns."""
        with self._lock:
            links = set(self._links)
        for link in links:
            link.cut()
        if wait_until(lambda: self._links.isdisjoint(links), timeout=GENTLE_TIMEOUT):
            return
        for link in links:
            link.cut(also_writing=True)
        if not wait_until(lambda: self._links.isdisjoint(links), timeout=CONNECT_TIMEOUT):
            raise LocalServerError(f"{self!r} could not end its connections")

    def cut_after_reply_bytes(self, count: int) -> threading.Event:
        """Let this many more bytes of replies through, over all connections, then cut the connection whose turn it is.

        Returns:
            An event that is set once it was cut. Later connections pass.
        """
        return self._rules.arm(_Trap(count, b"", threading.Event()))

    def drop_next_reply(self, to: bytes = b"") -> threading.Event:
        """Let the next request be carried out and answered, but cut the connection instead of handing the reply on.

        The lost COMMIT: the server did it, the client cannot know.

        Args:
            to: only a reply to a request that holds these bytes. Default: any; beware of the connection's own set-up.

        Returns:
            An event that is set once the reply was dropped: by then the server has carried the request out.
        """
        return self._rules.arm(_Trap(0, to, threading.Event()))

    # Life

    def start(self) -> Self:
        """Listen on a free port and forward."""
        if self._listener is None:
            self._bind(0)
        self._open_door()
        return self

    def stop(self) -> None:
        """Cut every connection and stop listening."""
        self._close_door()
        self.cut()  # whatever is held back never arrives

    # How it is done

    def _bind(self, port: int) -> None:
        """Hold the port without listening: whoever connects is refused, and nobody else can take it."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        self._listener = listener
        self.port = listener.getsockname()[1]

    def _open_door(self) -> None:
        if self._door is None and self._listener is not None:
            self._door = _Door(self._listener, self._take)

    def _close_door(self) -> None:
        door, self._door = self._door, None
        if door is not None:
            door.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _take(self, client: socket.socket) -> None:
        with self._lock:
            self._accepted += 1
        link = _Link(client, self._target, self._rules, self._forget)
        with self._lock:
            self._links.add(link)
        link.start()

    def _forget(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)


class _Door:
    """Takes connections from a listening socket in a thread, until it is closed."""

    def __init__(self, listener: socket.socket, take: Callable[[socket.socket], None]) -> None:
        self._listener = listener
        self._take = take
        self._wake, self._woken = socket.socketpair()
        listener.listen(128)
        listener.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="pglease-proxy-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; the caller closes the socket."""
        self._wake.close()
        self._thread.join()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, self._woken:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while all(key.fileobj is not self._woken for key, _ in selector.select()):
                # A client that has gone again leaves nothing to accept.
                with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
                    self._take(self._listener.accept()[0])


class _Link:
    """One connection: a client, the server, and a thread for each direction."""

    def __init__(
        self, client: socket.socket, target: tuple[str, int], rules: _Rules, forget: Callable[[_Link], None]
    ) -> None:
        self._client = client
        self._target = target
        self._rules = rules
        self._forget = forget
        self._server: socket.socket | None = None
        self._lock = threading.Lock()
        self._pumps_left = 2
        self.is_cut = False
        self.last_request = b""
        self.on_closed: Callable[[], None] = _nothing
        self._filter = _Filter() if rules.mode.kind == "drop_notifications" else None
        client.setblocking(True)

    def start(self) -> None:
        """Forward in threads of its own."""
        threading.Thread(target=self._connect, name="pglease-proxy-link", daemon=True).start()

    def cut(self, *, also_writing: bool = False) -> None:
        """Wake whoever reads or writes here; the last of them closes, which sends RST.

        Not close(): the other thread's recv would go on, on a descriptor that may soon be somebody else's.
        """
        with self._lock:
            self.is_cut = True
            for side in filter(None, (self._client, self._server)):
                with contextlib.suppress(OSError):
                    side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                    # Better reading only: a full shutdown sends FIN before the RST.
                    side.shutdown(socket.SHUT_RDWR if also_writing else socket.SHUT_RD)
        self._rules.wake()

    def _connect(self) -> None:
        try:
            self._rules.hold_back(self)  # through a black hole nobody arrives
            server = socket.create_connection(self._target, CONNECT_TIMEOUT)
        except OSError:
            self.cut()
            self._pumps_left = 1
            self._let_go()
            return
        server.settimeout(None)
        for side in (self._client, server):
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._server = server
        if self.is_cut:
            self.cut()  # between our connect and our telling of it
        threading.Thread(target=self._pump_replies, name="pglease-proxy-link", daemon=True).start()
        self._pump_requests()

    def _pump_requests(self) -> None:
        self._pump(self._client, self._server_side(), is_reply=False)

    def _pump_replies(self) -> None:
        self._pump(self._server_side(), self._client, is_reply=True)

    def _server_side(self) -> socket.socket:
        assert self._server is not None
        return self._server

    def _pump(self, source: socket.socket, sink: socket.socket, *, is_reply: bool) -> None:
        try:
            with contextlib.suppress(OSError):
                while chunk := source.recv(CHUNK):
                    self._forward(chunk, sink, is_reply=is_reply)
                    if self.is_cut:
                        break
                else:
                    # One side said goodbye: say it to the other, which may still answer.
                    self._rules.hold_back(self)
                    if not self.is_cut:
                        sink.shutdown(socket.SHUT_WR)
        finally:
            self._let_go()

    def _forward(self, chunk: bytes, sink: socket.socket, *, is_reply: bool) -> None:
        if not is_reply:
            self.last_request = chunk
        if is_reply and self._filter is not None:
            chunk = self._filter.without_notifications(chunk)
        while chunk:
            mode = self._rules.hold_back(self)
            if self.is_cut or (is_reply and mode.kind == "drop_replies"):
                return
            piece, chunk = chunk[: mode.size], chunk[mode.size :]
            allowed = self._rules.spring(self, len(piece)) if is_reply else len(piece)
            sink.sendall(piece[:allowed])
            if allowed < len(piece):
                self.cut()
                return

    def _let_go(self) -> None:
        """Count the pumps out; the last one closes both sides."""
        with self._lock:
            self._pumps_left -= 1
            if self._pumps_left:
                return
            for side in filter(None, (self._client, self._server)):
                side.close()
        self._forget(self)
        self.on_closed()


class _Filter:
    """Reads PostgreSQL's messages (a letter, a length, the rest) and lets all but notifications through."""

    def __init__(self) -> None:
        self._pending = b""

    def without_notifications(self, chunk: bytes) -> bytes:
        """Return what may pass of all that has come and is whole."""
        self._pending += chunk
        passed = b""
        while len(self._pending) >= 5:
            size = 1 + int.from_bytes(self._pending[1:5], "big")
            if len(self._pending) < size:
                break
            message, self._pending = self._pending[:size], self._pending[size:]
            if message[:1] != b"A":
                passed += message
        return passed


def _nothing() -> None:
    pass
