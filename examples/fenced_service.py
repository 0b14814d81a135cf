"""A service that keeps something for workers, and lets in only the newest holder of their lease.

Each request carries the fencing token of its sender in a header. The service remembers the largest one it has seen for
each thing and answers 409 to any that is smaller: the sender has been succeeded, whatever it believes.

    python fenced_service.py    # plays both sides once, on a port of its own
"""

import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from pglease import PGLease
from pglease.backends.memory import MemoryBackend
from pglease.fencing import Marks, MemoryMarks

HEADER = "X-Fencing-Token"


class Service(ThreadingHTTPServer):
    """Keeps the last document of each path. `marks` may be any of `pglease.fencing`."""

    def __init__(self, marks: Marks) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.marks = marks
        self.documents: dict[str, bytes] = {}
        self.writing = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    """PUT, for holders only."""

    server: Service

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        token = self.headers.get(HEADER, "")
        if not token.isascii() or not token.isdigit() or int(token) < 1:
            self.answer(428)  # Precondition Required: who does not say who they are is not let in either
            return
        with self.server.writing:  # the question and the write are one step, or a newer holder slips in between
            if not self.server.marks.accept(self.path, int(token)):
                self.answer(409)
                return
            self.server.documents[self.path] = body
        self.answer(204)

    def answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def put(service: Service, path: str, body: bytes, token: int | None) -> int:
    """Send a document; return the status."""
    headers = {} if token is None else {HEADER: str(token)}
    address = f"http://127.0.0.1:{service.server_port}{path}"
    request = urllib.request.Request(address, body, headers, method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status
    except urllib.error.HTTPError as refused:
        return refused.code


def main() -> None:
    with Service(MemoryMarks()) as service, PGLease(MemoryBackend()) as leases:
        threading.Thread(target=service.serve_forever, daemon=True).start()
        with leases.acquire("report") as first:
            print("the first holder writes:", put(service, "/report", b"one", first.fencing_token))
            print("and again:", put(service, "/report", b"two", first.fencing_token))
        with leases.acquire("report") as second:
            print("its successor writes:", put(service, "/report", b"three", second.fencing_token))
            print("the first comes back:", put(service, "/report", b"stale", first.fencing_token))
        print("somebody without a token:", put(service, "/report", b"who?", None))
        print("the report is:", service.documents["/report"].decode())
        service.shutdown()


if __name__ == "__main__":
    main()
