"""One request and its answer, each of their waits bounded by the caller's budget, and nothing ever sent twice.

A small pool over `http.client`: a reply that drips in byte by byte, a handshake that hangs, a name that does not
resolve and a plugin that does not return all end with the budget, which time-outs for each operation would not do. What
a failure means for the request is told apart: it was certainly not applied, or nobody knows.
"""

from __future__ import annotations

import http.client
import io
import json
import queue
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pglease import clock, forks
from pglease.backends.base import Budget
from pglease.backends.kubernetes_login import Login
from pglease.errors import BackendClosed, BackendError, BackendMisconfigured, BackendUnavailable

T = TypeVar("T")

_AGENT = "pglease"
_UNKNOWN_TO_SERVER = 401


@dataclass(frozen=True)
class Answer:
    """What the API server said.

    Attributes:
        status: of HTTP.
        body: the object.
        retry_after: seconds after which it wants to be asked again; 0 if it did not say.
    """

    status: int
    body: Mapping[str, Any]
    retry_after: float = 0.0


@dataclass(frozen=True)
class _Request:
    method: str
    path: str
    payload: bytes | None = None
    sending: Callable[[], None] | None = None
    reserved: bool = False

    def headers(self, login: Login) -> dict[str, str]:
        headers = {"Accept": "application/json", "User-Agent": _AGENT}
        if self.payload is not None:
            headers["Content-Type"] = "application/json"
        if login.authorization:
            headers["Authorization"] = login.authorization
        return headers


class ServerClock:
    """The server's clock, from the dates of its answers: for people, never to judge by.

    A date is cut to whole seconds, so each answer only says that the clock was within one second; many say more.
    """

    def __init__(self) -> None:
        self._ahead: timedelta | None = None

    def heard(self, date: str | None, sent_at: float, now: float) -> None:
        """Note the date of an answer to a request that was sent at a moment of the boot clock."""
        try:
            said = parsedate_to_datetime(date or "").astimezone(UTC)
        except ValueError:
            return
        least = said - _EPOCH - timedelta(seconds=now)
        most = said - _EPOCH + timedelta(seconds=1 - sent_at)
        self._ahead = least if self._ahead is None else min(max(self._ahead, least), most)

    def now(self) -> datetime:
        """Return what it shows; before its first answer, what this machine's clock shows."""
        if self._ahead is None:
            return datetime.now(UTC)
        return _EPOCH + timedelta(seconds=clock.now()) + self._ahead


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Wire:
    """A bounded pool of connections to one API server.

    Args:
        read_login: tells where it is and who we are; asked at the first use, and again when the server knows us no
            more.
        pool_size: how many requests may be under way at once.
        connect_timeout: seconds one connection attempt may take.
    """

    def __init__(self, read_login: Callable[[], Login], *, pool_size: int, connect_timeout: float) -> None:
        self.server_clock = ServerClock()
        self._read_login = read_login
        self._pool_size = pool_size
        self._connect_timeout = connect_timeout
        self._closed = False
        self._fresh()
        forks.forget_in_children(self, type(self).forget)

    def _fresh(self) -> None:
        self._logging_in = threading.RLock()
        self._login: Login | None = None
        # Both are used in single steps of their own, so that a signal handler which calls in finds neither locked.
        self._places: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(self._pool_size):
            self._places.put(None)
        self._idle: deque[_Connection] = deque()

    def login(self, budget: Budget, *, instead_of: Login | None = None) -> Login:
        """Return who and where; `instead_of` is what the server did not accept."""
        if not self._logging_in.acquire(timeout=max(0.0, budget.left())):
            raise BackendUnavailable("the Kubernetes credentials are still being read by another thread")
        try:
            if self._login is None or self._login is instead_of:
                self._login = within(budget, self._read_login, "the Kubernetes credentials")
            return self._login
        finally:
            self._logging_in.release()

    def ask(
        self,
        method: str,
        path: str,
        budget: Budget,
        *,
        body: Mapping[str, Any] | None = None,
        sending: Callable[[], None] | None = None,
        reserved: bool = False,
    ) -> Answer:
        """Send one request and read its answer, whatever its status.

        Args:
            method: of HTTP.
            path: with the query.
            budget: the bound of all of it.
            body: sent as JSON.
            sending: called when the first byte is about to leave.
            reserved: for renewals, which wait for no place behind other requests.

        Raises:
            BackendUnavailable: with `outcome_unknown` when it may have been applied.
            BackendMisconfigured: the credentials are not accepted, also not after they were read again.
        """
        login = self.login(budget)
        payload = None if body is None else json.dumps(body, ensure_ascii=False).encode()
        request = _Request(method, path, payload, sending, reserved)
        answer = self._ask(login, request, budget)
        if answer.status == _UNKNOWN_TO_SERVER:  # refused before anything was looked at
            login = self.login(budget, instead_of=login)
            answer = self._ask(login, request, budget)
        if answer.status == _UNKNOWN_TO_SERVER:
            raise BackendMisconfigured(
                "the Kubernetes API server does not accept our credentials (401), which were read again just now: "
                "check the kubeconfig, or the pod's service account"
            )
        return answer

    def _ask(self, login: Login, request: _Request, budget: Budget) -> Answer:
        with self._place(budget, reserved=request.reserved):
            connection = self._connected(login, budget)
            try:
                if request.sending:
                    request.sending()
                answer = self._conversation(connection, login, request)
            except BaseException:
                connection.close()
                raise
            self._keep(connection)
            return answer

    @contextmanager
    def _place(self, budget: Budget, *, reserved: bool) -> Iterator[None]:
        if budget.left() <= 0:
            raise BackendUnavailable("the time given was over before the request was sent")
        if reserved:
            yield
            return
        places = self._places
        try:
            places.get(timeout=max(0.001, budget.left()))
        except queue.Empty:
            text = "all connections to the Kubernetes API server are in use: raise pool_size"
            raise BackendUnavailable(text) from None
        try:
            yield
        finally:
            places.put(None)

    def _conversation(self, connection: _Connection, login: Login, request: _Request) -> Answer:
        sent_at = clock.now()
        try:
            connection.request(
                request.method, connection.prefix + request.path, request.payload, request.headers(login)
            )
            reply = connection.getresponse()
            raw = reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise unreachable(error, unknown=request.payload is not None) from None
        self.server_clock.heard(reply.getheader("Date"), sent_at, clock.now())
        if reply.will_close:
            connection.close()
        return Answer(reply.status, _read(raw), _seconds(reply.getheader("Retry-After")))

    def open(self, path: str, budget: Budget) -> Stream:
        """Begin a GET whose answer has no end, on a connection of its own.

        Raises:
            BackendUnavailable: it could not be begun.
        """
        login = self.login(budget)
        stream = self._begun(login, path, budget)
        if stream.reply.status == _UNKNOWN_TO_SERVER:
            stream.close()
            stream = self._begun(self.login(budget, instead_of=login), path, budget)
        return stream

    def _begun(self, login: Login, path: str, budget: Budget) -> Stream:
        connection = self._dialled(login, budget)
        try:
            connection.request("GET", connection.prefix + path, None, _Request("GET", path).headers(login))
            return Stream(connection, connection.getresponse())
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise unreachable(error, unknown=False) from None
        except BaseException:
            connection.close()
            raise

    def _connected(self, login: Login, budget: Budget) -> _Connection:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return self._dialled(login, budget)
            if connection.is_fresh(login):
                connection.line.until = budget
                return connection
            connection.close()

    def _dialled(self, login: Login, budget: Budget) -> _Connection:
        if self._closed:
            raise BackendClosed("this Kubernetes store was closed")
        try:
            return _Connection(login, budget, self._connect_timeout)
        except ssl.SSLCertVerificationError as error:
            raise BackendMisconfigured(
                f"the certificate of the Kubernetes API server is not trusted: {error.verify_message}"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise unreachable(error, unknown=False) from None

    def _keep(self, connection: _Connection) -> None:
        if connection.sock is not None:
            self._idle.append(connection)
        if self._closed:
            self._drop_idle()

    def _drop_idle(self) -> None:
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def forget(self) -> None:
        """Drop, in a forked child, what is the parent's."""
        forks.bury(self._idle)
        self._fresh()

    def close(self) -> None:
        """Close what was opened here; requests under way end by themselves."""
        self._closed = True
        self._drop_idle()


def within(budget: Budget, act: Callable[[], T], what: str) -> T:
    """Do what cannot be bounded, such as running a plugin or resolving a name, and wait no longer than the budget.

    Raises:
        BackendUnavailable: it took too long; its thread is left to itself.
    """
    found: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            found.put((act(), None))
        except Exception as error:  # noqa: BLE001  # raised where it is waited for
            found.put((None, error))

    thread = threading.Thread(target=run, name="pglease-kubernetes", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is going down, or is out of threads
        return act()
    try:
        value, error = found.get(timeout=max(0.001, budget.left()))
    except queue.Empty:
        raise BackendUnavailable(f"{what}: no answer within the time given") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # there is a value where there is no error


class _Line:
    """A socket whose every wait ends with the budget of the moment."""

    def __init__(self, raw: socket.socket, until: Budget) -> None:
        self.raw = raw
        self.until = until

    def bound(self) -> None:
        left = self.until.left()
        if left <= 0:
            raise TimeoutError("the time given is over")
        self.raw.settimeout(left)

    def sendall(self, data: bytes) -> None:
        self.bound()
        self.raw.sendall(data)

    def makefile(self, *_: Any) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self))

    def close(self) -> None:
        self.raw.close()


class _Reader(io.RawIOBase):
    def __init__(self, line: _Line) -> None:
        self._line = line

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._line.bound()
        return self._line.raw.recv_into(buffer)


class _Connection(http.client.HTTPConnection):
    """One connection, made when it is built."""

    auto_open = 0  # a closed connection is an error, not a reason to send again

    def __init__(self, login: Login, budget: Budget, connect_timeout: float) -> None:
        address = urlsplit(login.server)
        port = address.port or (80 if login.tls is None else 443)
        super().__init__(address.hostname or "", port)
        self._login = login
        self.prefix = address.path.rstrip("/")
        raw = _dial(self.host, port, budget, connect_timeout)
        try:
            if login.tls is not None:
                raw = login.tls.wrap_socket(raw, server_hostname=self.host)
        except BaseException:
            raw.close()
            raise
        self.line = _Line(raw, budget)
        self.sock: Any = self.line

    def is_fresh(self, login: Login) -> bool:
        """Tell whether it can be used: for the same login, and the server has neither closed it nor said a word."""
        if self.sock is None or login is not self._login:
            return False
        return not _readable(self.line.raw)


class Stream:
    """An answer that goes on, line by line."""

    def __init__(self, connection: _Connection, reply: http.client.HTTPResponse) -> None:
        self._connection = connection
        self.reply = reply

    def listens_for(self, seconds: float) -> None:
        """Let it go on for at most so long."""
        self._connection.line.until = Budget.of(seconds, clock.now)

    def whole(self) -> Answer:
        """Read it to its end, and close it: it was no stream."""
        try:
            return Answer(self.reply.status, _read(self.reply.read()), _seconds(self.reply.getheader("Retry-After")))
        except (OSError, http.client.HTTPException) as error:
            raise unreachable(error, unknown=False) from None
        finally:
            self.close()

    def hang_up(self) -> None:
        """End it from another thread, which closing would not wake."""
        with suppress(OSError):
            socket.socket.shutdown(self._connection.line.raw, socket.SHUT_RDWR)  # TLS's own would disturb the reader

    def close(self) -> None:
        """Close it."""
        self.reply.close()
        self._connection.close()


def _readable(raw: socket.socket) -> bool:
    if not hasattr(select, "poll"):  # Windows
        return bool(select.select([raw], [], [], 0)[0])
    poll = select.poll()
    poll.register(raw, select.POLLIN)
    return bool(poll.poll(0))


def _dial(host: str, port: int, budget: Budget, connect_timeout: float) -> socket.socket:
    until = Budget.of(min(budget.left(), connect_timeout), clock.now)
    trouble: OSError = TimeoutError("the time given is over")
    for family, kind, protocol, _, address in _addresses(host, port, until):
        left = until.left()
        if left <= 0:
            break
        raw = socket.socket(family, kind, protocol)
        try:
            raw.settimeout(left)
            raw.connect(address)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.settimeout(max(0.001, until.left()))  # also of the handshake, as a whole
            return raw
        except OSError as error:
            raw.close()
            trouble = error
        except BaseException:
            raw.close()
            raise
    raise trouble


def _addresses(host: str, port: int, budget: Budget) -> list[Any]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        resolve = lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)  # noqa: E731
        return within(budget, resolve, f"resolving {host}")


def unreachable(error: Exception, *, unknown: bool) -> BackendError:
    """Return our error for one of the transport."""
    said = str(error) or type(error).__name__
    return BackendUnavailable(f"the Kubernetes API server cannot be reached: {said}", outcome_unknown=unknown)


def _read(raw: bytes) -> Mapping[str, Any]:
    try:
        body = json.loads(raw or b"{}")
    except ValueError:
        return {}  # a proxy's page: the status says enough
    return body if isinstance(body, dict) else {}


def _seconds(text: str | None) -> float:
    return float(text) if text and text.isdigit() else 0.0
