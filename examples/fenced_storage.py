"""Fenced writes to an object storage that knows conditional writes, as S3 and its kin do.

The storage never hears of leases. What it can do is refuse a write unless the object is still the one that was read
(`If-Match: <etag>`), or is not there yet (`If-None-Match: *`). So the token is kept *in* the object: a writer reads it,
gives up if it is larger than its own, and replaces exactly what it has read. Whoever comes in between makes the
condition fail, and the writer looks again. In the object and not in its metadata, since S3's tag is a digest of the
bytes: a successor that wrote the same bytes would go unnoticed. For what is large, let this be a pointer to it.

    python fenced_storage.py    # plays it once against a small storage of its own
"""

import hashlib
import json
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pglease import FencedError, PGLease
from pglease.backends.memory import MemoryBackend

# -- the writer's side: this is what you take


def fenced_put(url: str, document: dict[str, Any], *, name: str, token: int) -> None:
    """Write a document, unless somebody with a larger token has.

    Raises:
        FencedError: somebody has; nothing was written.
    """
    body = json.dumps({"fencing_token": token, **document}).encode()
    while True:
        there, etag = get(url)
        if there is not None and there["fencing_token"] > token:
            raise FencedError(f"token {there['fencing_token']} has written since", name=name, fencing_token=token)
        if put(url, body, {"If-None-Match": "*"} if there is None else {"If-Match": etag}):
            return


def get(url: str) -> tuple[dict[str, Any] | None, str]:
    """Read a document and the tag of its version; None when there is no such object."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return json.load(response), response.headers["ETag"]
    except urllib.error.HTTPError as refused:
        if refused.code == 404:
            return None, ""
        raise


def put(url: str, body: bytes, condition: dict[str, str]) -> bool:
    """Write an object under a condition; False when that does not hold any more."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, condition, method="PUT"), timeout=10):
            return True
    except urllib.error.HTTPError as refused:
        if refused.code in {409, 412}:  # 409: what S3 says of two conditional writes in one instant
            return False
        raise


# -- a storage to try it with: as much of S3 as this needs


class Storage(ThreadingHTTPServer):
    """A bucket."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, bytes] = {}
        self.writing = threading.Lock()

    def url(self, key: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/bucket/{key}"

    def etag(self, path: str) -> str | None:
        body = self.objects.get(path)
        return None if body is None else f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'


class Handler(BaseHTTPRequestHandler):
    """Conditional PUT, and GET."""

    server: Storage

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.server.writing:
            present = self.server.etag(self.path)
            kept_out = self.headers.get("If-None-Match") == "*" and present is not None
            if kept_out or self.headers.get("If-Match", present) != present:
                self.answer(412)
                return
            self.server.objects[self.path] = body
        self.answer(200)

    def do_GET(self) -> None:
        with self.server.writing:
            body, etag = self.server.objects.get(self.path), self.server.etag(self.path)
        self.answer(404 if body is None else 200, body or b"", etag)

    def answer(self, status: int, body: bytes = b"", etag: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if etag:
            self.send_header("ETag", etag)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def main() -> None:
    with Storage() as storage, PGLease(MemoryBackend()) as leases:
        threading.Thread(target=storage.serve_forever, daemon=True).start()
        url = storage.url("report.json")
        with leases.acquire("report") as first:
            fenced_put(url, {"text": "one"}, name="report", token=first.fencing_token)
            fenced_put(url, {"text": "two"}, name="report", token=first.fencing_token)
        with leases.acquire("report") as second:
            fenced_put(url, {"text": "two"}, name="report", token=second.fencing_token)
            try:
                fenced_put(url, {"text": "stale"}, name="report", token=first.fencing_token)
            except FencedError as refused:
                print("the first holder came back:", refused)
        print("the object is:", get(url)[0])
        storage.shutdown()


if __name__ == "__main__":
    main()
