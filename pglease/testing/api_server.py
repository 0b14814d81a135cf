"""A small Kubernetes API server for tests: Leases over HTTP, with rights, watches, and faults on order.

It keeps what it has written over a `restart`, listens on 127.0.0.1 alone, and is as honest as `api_leases` makes it.
"""

from __future__ import annotations

import base64
import json
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

from pglease import clock
from pglease.testing.api_leases import Json, LeaseObjects, StatusError, status_error

HOST = "127.0.0.1"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_GROUP = "coordination.k8s.io/v1"
_VERSION = {"groupVersion": _GROUP, "version": "v1"}
_KIND = {"name": "leases", "singularName": "lease", "namespaced": True, "kind": "Lease"}
DISCOVERY: Mapping[str, Json] = {
    "/api": {"kind": "APIVersions", "versions": []},
    "/apis": {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [{"name": "coordination.k8s.io", "versions": [_VERSION], "preferredVersion": _VERSION}],
    },
    f"/apis/{_GROUP}": {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": _GROUP,
        "resources": [_KIND | {"verbs": ["create", "delete", "get", "list", "update", "watch"]}],
    },
}
"""What kubectl asks for before it asks for a Lease."""
ALL_VERBS = frozenset({"get", "create", "update", "delete", "list", "watch"})
_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "DELETE": "delete"}
_WATCH_SLICE = 0.5
"""Seconds after which a watch looks whether the server goes down."""


@dataclass
class Fault:
    """What happens to the next request that it is for.

    Attributes:
        method: the request's method; empty for any.
        commit: whether the request is carried out.
        status: what is answered: the truth (None), nothing on a connection that is cut (0), or this status.
        headers: what goes with that status, such as `Retry-After`.
        before: called before the request is carried out: what a rival does meanwhile.
        after: called after that and before the answer.
        within: what the request's path must hold.
        times: how many requests it is for.
    """

    method: str = ""
    commit: bool = False
    status: int | None = 0
    headers: tuple[tuple[str, str], ...] = ()
    before: Callable[[], object] | None = None
    after: Callable[[], object] | None = None
    within: str = ""
    times: int = 1

    def is_for(self, method: str, path: str) -> bool:
        """Tell whether it is for a request."""
        return self.method in {"", method} and self.within in path


_HONEST = Fault(commit=True, status=None)


class ApiServer:
    """One API server; `with ApiServer() as server:` starts and stops it.

    Attributes:
        leases: what it keeps.
        tokens: the verbs each bearer token allows; None lets everybody do everything. Change it to rotate a token.
        asked: the method and path of every request, in their order.
        port: where it listens; the same after a restart.
    """

    def __init__(
        self,
        namespaces: tuple[str, ...] = ("default",),
        *,
        tokens: dict[str, Iterable[str]] | None = None,
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        """Describe a server; nothing listens yet.

        Args:
            namespaces: those that exist.
            tokens: see above.
            certificate: the files of a certificate and its key; without, it speaks plain HTTP.
        """
        self.leases = LeaseObjects(namespaces)
        self.tokens = tokens
        self.asked: list[tuple[str, str]] = []
        self.port = 0
        self.going_down = threading.Event()
        self._certificate = certificate
        self._faults: deque[Fault] = deque()
        self._lock = threading.Lock()
        self._http: _Http | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"{'https' if self._certificate else 'http'}://{HOST}:{self.port}"

    def start(self) -> Self:
        """Listen."""
        self.going_down.clear()
        http = self._http = _Http(self, self.port)
        self.port = http.server_address[1]
        if self._certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*self._certificate)
            http.tls = context
        self._thread = threading.Thread(target=http.serve_forever, args=(0.02,), name="api-server", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop listening and cut every connection; what was written stays."""
        http, self._http = self._http, None
        if http is None:
            return
        self.going_down.set()
        http.shutdown()
        http.server_close()
        http.cut_all()
        assert self._thread is not None  # the two begin together
        self._thread.join()

    def restart(self) -> None:
        """Stop and start."""
        self.stop()
        self.start()

    def cut(self) -> None:
        """Cut every connection, and go on listening."""
        if self._http is not None:
            self._http.cut_all()

    def kubeconfig(self, path: Path, *, token: str = "", server: str = "", namespace: str = "default") -> Path:
        """Write a kubeconfig of this server with one context, `test`."""
        cluster: Json = {"server": server or self.url}
        if self._certificate:
            cluster["certificate-authority-data"] = base64.b64encode(self._certificate[0].read_bytes()).decode()
        path.write_text(
            json.dumps(  # which is YAML, too
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "clusters": [{"name": "test", "cluster": cluster}],
                    "users": [{"name": "test", "user": {"token": token} if token else {}}],
                    "contexts": [
                        {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}
                    ],
                }
            )
        )
        return path

    # -- faults ------------------------------------------------------------------------------------------------------

    def next(self, fault: Fault) -> None:
        """Order a fault for the next request that it is for."""
        with self._lock:
            self._faults.append(fault)

    def take_fault(self, method: str, path: str) -> Fault | None:
        """Return the fault that was ordered for a request, or None."""
        with self._lock:
            self.asked.append((method, path))
            for fault in self._faults:
                if fault.is_for(method, path):
                    fault.times -= 1
                    if fault.times <= 0:
                        self._faults.remove(fault)
                    return fault
        return None

    def may(self, token: str | None, verb: str) -> bool:
        """Tell whether a token allows a verb; raises 401 for one that nobody gave out."""
        if self.tokens is None:
            return True
        if token is None:
            return False  # anonymous
        if token not in self.tokens:
            raise status_error(401, "Unauthorized", "Unauthorized")
        return verb in self.tokens[token]


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, server: ApiServer, port: int) -> None:
        self.api = server
        self.tls: ssl.SSLContext | None = None
        self._open: set[socket.socket] = set()
        super().__init__((HOST, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._open.add(request)
        super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self.tls is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(10)  # on the connection's own thread: a slow handshake keeps nobody else waiting
        with self.tls.wrap_socket(request, server_side=True) as secured:
            secured.settimeout(None)
            self._open.add(secured)
            super().finish_request(secured, client_address)
            self._open.discard(secured)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients of tests go away in all manners."""

    def cut_all(self) -> None:
        for request in list(self._open):
            _cut(request)


def _cut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    server: _Http

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def date_time_string(self, timestamp: float | None = None) -> str:  # noqa: ARG002  # as http.server calls it
        """Read a clock that tests which step `time.time` do not step."""
        return format_datetime(datetime.now(UTC), usegmt=True)

    def do_GET(self) -> None:  # the name that http.server looks for
        self._serve()

    do_POST = do_PUT = do_DELETE = do_PATCH = do_GET  # noqa: N815  # as above

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.api.take_fault(self.command, self.path) or _HONEST
        if fault.before:
            fault.before()
        code, answer = self._outcome(body) if fault.commit else (0, {})
        if fault.after:
            fault.after()
        if fault.status is None:
            if code:  # a watch has said everything by now
                self._say(code, answer)
        elif fault.status:
            text = f"this is a fault on order ({fault.status})"
            self._say(fault.status, status_error(fault.status, "", text).body, fault.headers)
        else:
            self.close_connection = True
            _cut(self.connection)

    def _outcome(self, body: bytes) -> tuple[int, Json]:
        try:
            return _Call(self, body).answer()
        except StatusError as error:
            return error.code, error.body

    def _say(self, code: int, answer: Json, headers: Iterable[tuple[str, str]] = ()) -> None:
        payload = json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace")
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload)
        self.wfile.flush()

    def begin_stream(self) -> None:
        """Begin an answer without an end."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()

    def stream(self, line: Json | None) -> None:
        """Send one line of it, or the end."""
        data = b"" if line is None else json.dumps(line, ensure_ascii=False).encode() + b"\n"
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


class _Call:
    """One request, taken apart."""

    def __init__(self, handler: _Handler, body: bytes) -> None:
        self._handler = handler
        self._api = handler.server.api
        parts = urlsplit(handler.path)
        self._path = unquote(parts.path)
        self._query = {key: values[-1] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        self._method = handler.command
        self._raw = body
        kind, _, token = (handler.headers.get("Authorization") or "").partition(" ")
        self._token = token if kind == "Bearer" and token else None

    def answer(self) -> tuple[int, Json]:
        if self._path == "/version":
            return 200, {"major": "1", "minor": "36", "gitVersion": "v1.36.2-pglease-test"}
        if self._path in DISCOVERY:
            return 200, DISCOVERY[self._path]
        if self._path == REVIEWS and self._method == "POST":
            return 201, self._review()
        if self._path.startswith(LEASES):
            namespace, _, rest = self._path.removeprefix(LEASES).partition("/")
            kind, _, name = rest.partition("/")
            if kind == "leases" and "/" not in name:
                return self._about_leases(namespace, name)
        raise status_error(404, "NotFound", "the server could not find the requested resource")

    @property
    def _body(self) -> Json:
        try:
            body = json.loads(self._raw)
        except ValueError:
            raise status_error(400, "BadRequest", "the body is no JSON") from None
        if not isinstance(body, dict):
            raise status_error(400, "BadRequest", "the body is no object")
        return body

    def _review(self) -> Json:
        body = self._body
        asked = body["spec"]["resourceAttributes"]
        allowed = asked["resource"] == "leases" and self._api.may(self._token, asked["verb"])
        return body | {"status": {"allowed": allowed}}

    def _about_leases(self, namespace: str, name: str) -> tuple[int, Json]:
        watching = self._query.get("watch") in {"1", "true"}
        verb = _VERBS.get(self._method, "patch")
        verb = ("watch" if watching else "list") if verb == "get" and not name else verb
        if not self._api.may(self._token, verb):
            who = "system:anonymous" if self._token is None else "system:serviceaccount:test"
            text = f'leases.coordination.k8s.io is forbidden: User "{who}" cannot {verb} resource "leases" in API group'
            raise status_error(403, "Forbidden", f'{text} "coordination.k8s.io" in the namespace "{namespace}"')
        dry_run = self._query.get("dryRun") == "All"
        match verb:
            case "get":
                return 200, self._api.leases.get(namespace, name)
            case "create" if not name:
                return 201, self._api.leases.create(namespace, self._body, dry_run=dry_run)
            case "update" if name:
                existed = self._exists(namespace, name)
                done = self._api.leases.replace(namespace, name, self._body, dry_run=dry_run)
                return 200 if existed else 201, done
            case "delete" if name:
                return 200, self._api.leases.delete(namespace, name, self._body if self._raw else {})
            case "list":
                return 200, self._list(namespace)
            case "watch":
                self._watch(namespace)
                return 0, {}
            case _:
                raise status_error(405, "MethodNotAllowed", "the server does not allow this method")

    def _exists(self, namespace: str, name: str) -> bool:
        try:
            self._api.leases.get(namespace, name)
        except StatusError:
            return False
        return True

    def _list(self, namespace: str) -> Json:
        found, version = self._api.leases.all(namespace, self._selector())
        after = base64.urlsafe_b64decode(self._query.get("continue", "")).decode()
        limit = int(self._query.get("limit") or 0) or len(found)
        rest = [each for each in found if each["metadata"]["name"] > after]
        page, metadata = rest[:limit], {"resourceVersion": str(version)}
        if len(rest) > limit:
            metadata["continue"] = base64.urlsafe_b64encode(page[-1]["metadata"]["name"].encode()).decode()
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "LeaseList", "metadata": metadata, "items": page}

    def _selector(self) -> Callable[[Json], bool]:
        labels = dict(part.split("=", 1) for part in self._query.get("labelSelector", "").split(",") if part)
        fields = dict(part.split("=", 1) for part in self._query.get("fieldSelector", "").split(",") if part)
        if fields.keys() - {"metadata.name", "metadata.namespace"}:
            raise status_error(400, "BadRequest", "field label not supported")

        def matches(one: Json) -> bool:
            metadata = one["metadata"]
            has = metadata.get("labels", {})
            return all(has.get(key) == value for key, value in labels.items()) and all(
                metadata[field.removeprefix("metadata.")] == value for field, value in fields.items()
            )

        return matches

    def _watch(self, namespace: str) -> None:
        matches, leases = self._selector(), self._api.leases
        until = clock.now() + float(self._query.get("timeoutSeconds") or 1800)
        version = int(self._query.get("resourceVersion") or 0)
        self._handler.close_connection = True
        self._handler.begin_stream()
        if not version:
            found, version = leases.all(namespace, matches)
            for each in found:
                self._handler.stream({"type": "ADDED", "object": each})
        while clock.now() < until and not self._api.going_down.is_set():
            try:
                events, version = leases.events(version, min(_WATCH_SLICE, max(0.0, until - clock.now())))
            except StatusError as error:  # inside a stream that began well
                self._handler.stream({"type": "ERROR", "object": error.body})
                break
            for event in events:
                if event.after["metadata"]["namespace"] == namespace and (told := event.seen_through(matches)):
                    self._handler.stream({"type": told[0], "object": told[1]})
        self._handler.stream(None)
