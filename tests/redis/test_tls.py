"""Over TLS: the same leases, and a certificate that cannot be trusted is refused in one sentence."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pglease import BackendMisconfigured, PGLease
from pglease.testing import processes
from pglease.testing.local_valkey import LocalValkey

pytestmark = [pytest.mark.needs("redis-server", "openssl"), pytest.mark.xdist_group("redis over TLS")]


def certificate(directory: Path, name: str, host: str) -> tuple[Path, Path]:
    """Make a key and a certificate that signs itself; the server's user may read both."""
    key, cert = directory / f"{name}.key", directory / f"{name}.crt"
    subject = ["-subj", f"/CN={name}", "-addext", f"subjectAltName={host}"]
    made = ["-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", "req", "-x509", *made, *subject], check=True, capture_output=True)
    key.chmod(0o644)
    return key, cert


@pytest.fixture(scope="module")
def certificates() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pglease-tls-") as name:  # not pytest's own, which is for root alone
        directory = Path(name)
        directory.chmod(0o755)
        yield directory


@pytest.fixture(scope="module")
def address(certificates: Path, canary: str) -> Iterator[str]:
    """The address of a server that speaks TLS, without a word on whom to trust."""
    key, cert = certificate(certificates, "server", "IP:127.0.0.1")
    port = processes.free_port()
    settings = {"tls-port": port, "tls-cert-file": cert, "tls-key-file": key, "tls-auth-clients": "no"}
    with LocalValkey(flavour="redis", password=canary, settings=settings):
        yield f"rediss://:{canary}@127.0.0.1:{port}/0"


def test_leases_are_taken_renewed_awaited_and_given_back(address, certificates):
    trusting = f"{address}?ssl_ca_certs={certificates / 'server.crt'}"
    with PGLease(trusting) as ours, PGLease(trusting) as theirs:
        with ours.acquire("job", metadata={"text": "ü" * 2000}) as lease:
            lease.renew()
            assert theirs.try_acquire("job") is False
            assert [found.metadata for found in theirs.list_leases()] == [{"text": "ü" * 2000}]
        assert ours.try_acquire("other")
        with pytest.raises(TimeoutError):
            theirs.wait_for_lease("other", timeout=0.3)
        assert ours.release("other")
        assert theirs.wait_for_lease("other", timeout=30).fencing_token == 2


@pytest.mark.parametrize("wrong", ["nobody", "somebody else", "another host"])
def test_a_certificate_that_cannot_be_trusted_is_refused_in_one_sentence(address, certificates, canary, wrong):
    stranger = certificate(certificates, "stranger", "DNS:elsewhere.invalid")[1]
    trusting = {
        "nobody": address,
        "somebody else": f"{address}?ssl_ca_certs={stranger}",
        "another host": f"{address.replace('127.0.0.1', 'localhost')}?ssl_ca_certs={certificates / 'server.crt'}",
    }[wrong]

    with PGLease(trusting) as leases, pytest.raises(BackendMisconfigured) as caught:
        leases.try_acquire("job")

    said = str(caught.value)
    assert said.startswith("the certificate of Redis is not trusted: ")
    assert "?ssl_ca_certs=" in said
    assert "\n" not in said
    assert canary not in said
