"""What an address says about TLS is what is asked of the server. The server of the wheel speaks none: a relay does."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pglease import BackendError, PGLease

SSL_REQUEST = b"\x00\x00\x00\x08\x04\xd2\x16\x2f"


class Relay:
    """Takes connections that ask for TLS, and hands on what is inside."""

    def __init__(self, context: ssl.SSLContext, target: tuple[str, int]) -> None:
        self._context, self._target = context, target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.encrypted = 0
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(self._listener.accept()[0],), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            assert client.recv(8, socket.MSG_WAITALL) == SSL_REQUEST
            client.sendall(b"S")
            with (
                self._context.wrap_socket(client, server_side=True) as inside,
                socket.create_connection(self._target) as server,
            ):
                self.encrypted += 1
                threading.Thread(target=_pump, args=(server, inside), daemon=True).start()
                _pump(inside, server)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(65536):
            sink.sendall(chunk)
        sink.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> Path:
    """A certificate for 127.0.0.1, its key beside it."""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "server.key", folder / "server.crt"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate


@pytest.fixture
def relay(server, certificate: Path) -> Iterator[Relay]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    relay = Relay(context, (server.host, server.port))
    yield relay
    relay.close()


@pytest.mark.needs("openssl")
def test_a_server_whose_certificate_is_trusted_is_talked_to_under_it(dsn: str, server, relay, certificate) -> None:
    address = dsn.replace(f":{server.port}/", f":{relay.port}/")

    with PGLease(f"{address}?sslmode=verify-full&sslrootcert={certificate}") as leases:
        assert leases.try_acquire("job")

    assert relay.encrypted


@pytest.mark.needs("openssl")
def test_a_server_whose_certificate_nobody_vouches_for_is_refused(dsn: str, server, relay, tmp_path: Path) -> None:
    address = dsn.replace(f":{server.port}/", f":{relay.port}/")

    with (
        PGLease(f"{address}?sslmode=verify-full&sslrootcert={tmp_path / 'none.crt'}", connect_timeout=2) as leases,
        pytest.raises(BackendError),
    ):
        leases.try_acquire("job")

    assert not relay.encrypted


def test_a_server_without_tls_is_not_talked_to_in_the_clear_where_tls_was_asked_for(dsn: str) -> None:
    with PGLease(f"{dsn}?sslmode=require", connect_timeout=2) as leases, pytest.raises(BackendError):
        leases.try_acquire("job")
