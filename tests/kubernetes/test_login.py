"""Who we are to the cluster: kubeconfigs, contexts, pods, tokens that rotate, certificates, plugins."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pglease import PGLease, clock
from pglease.backends import open_backend
from pglease.backends.kubernetes import KubernetesBackend
from pglease.errors import (
    BackendClosed,
    BackendMisconfigured,
    BackendUnavailable,
    ConfigurationError,
    MissingDependencyError,
)
from pglease.records import Held
from pglease.testing.api_server import ALL_VERBS, ApiServer
from pglease.testing.harness import Worker

SECRET = "kept-to-ourselves"


def test_a_token_that_was_rotated_is_read_again(cluster) -> None:
    cluster.only(*ALL_VERBS, token="token-1")
    alice = cluster.worker("alice")
    hold = alice.hold("job")

    cluster.only(*ALL_VERBS, token="token-2")

    assert isinstance(hold.renew(), Held)
    hold.released()


def test_credentials_that_stay_refused_are_an_error_that_names_no_secret(cluster) -> None:
    cluster.only(*ALL_VERBS, token=SECRET)
    alice = cluster.worker("alice")
    hold = alice.hold("job")
    cluster.server.tokens = {"another": ALL_VERBS}

    with pytest.raises(BackendMisconfigured, match="401") as raised:
        hold.renew()

    assert SECRET not in str(raised.value)
    assert SECRET not in repr(alice.backend) + repr(vars(alice.backend)) + repr(alice.backend._wire._login)


def test_many_threads_read_rotated_credentials_once(cluster, monkeypatch) -> None:
    cluster.only(*ALL_VERBS, token="token-1")
    alice = cluster.worker("alice")
    holds = [alice.hold(f"job-{index}") for index in range(24)]
    read, reads = alice.backend._wire._read_login, []
    monkeypatch.setattr(alice.backend._wire, "_read_login", lambda: reads.append(1) or read())
    cluster.only(*ALL_VERBS, token="token-2")

    outcomes = alice.renew(*(hold.renewal() for hold in holds))

    assert all(isinstance(outcome, Held) for outcome in outcomes)
    assert len(reads) == 1


def test_in_a_pod_the_service_account_is_used(cluster, tmp_path, monkeypatch) -> None:
    account = tmp_path / "serviceaccount"
    account.mkdir()
    (account / "token").write_text("token-1")
    (account / "namespace").write_text("jobs")
    monkeypatch.setattr("pglease.backends.kubernetes_login.SERVICE_ACCOUNT", str(account))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(cluster.server.port))
    from pglease.backends.kubernetes_login import read_login

    with pytest.raises(BackendMisconfigured, match="the pod's service account"):
        read_login()  # no ca.crt

    _certificate(tmp_path)
    (account / "ca.crt").write_bytes((tmp_path / "cert.pem").read_bytes())
    login = read_login()
    assert (login.namespace, login.authorization) == ("jobs", "Bearer token-1")
    assert login.server == f"https://127.0.0.1:{cluster.server.port}"
    assert read_login(kubeconfig=str(cluster.kubeconfig)).server == cluster.server.url


def test_the_first_file_of_kubeconfig_and_the_context_that_is_asked_for_are_used(
    cluster, tmp_path, monkeypatch
) -> None:
    config = json.loads(cluster.kubeconfig.read_text())
    other = {"name": "other", "context": {"cluster": "test", "user": "test", "namespace": "elsewhere"}}
    config["contexts"].append(other)
    cluster.kubeconfig.write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'missing'}:{cluster.kubeconfig}")
    from pglease.backends.kubernetes_login import read_login

    assert read_login().namespace == "jobs"
    assert read_login("other").namespace == "elsewhere"
    with pytest.raises(BackendMisconfigured, match="'third'"):
        read_login("third")


@pytest.mark.parametrize(
    "text", ["{", f"token: {SECRET}\n- x", "[]", "clusters: 5", '{"clusters": [], "contexts": []}']
)
def test_a_kubeconfig_that_is_none_is_an_error_that_shows_nothing_of_it(tmp_path, text: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)

    with pytest.raises(BackendMisconfigured) as raised:
        Worker(KubernetesBackend(kubeconfig=path), "alice").ask("job")

    assert SECRET not in str(raised.value)
    assert raised.value.__cause__ is None


def test_without_any_kubeconfig_the_error_says_where_it_looked(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    monkeypatch.setenv("HOME", str(tmp_path))

    with pytest.raises(BackendMisconfigured, match=r"~/\.kube/config"):
        Worker(KubernetesBackend("jobs"), "alice").ask("job")


def _plugin(cluster, tmp_path: Path, script: str) -> Path:
    program = tmp_path / "plugin"
    program.write_text(f"#!{sys.executable}\n{script}")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    config = json.loads(cluster.kubeconfig.read_text())
    ask = {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": str(program)}
    config["users"] = [{"name": "test", "user": {"exec": ask}}]
    cluster.kubeconfig.write_text(json.dumps(config))
    return cluster.kubeconfig


def test_a_plugin_is_asked_for_credentials_and_asked_again_when_they_are_over(cluster, tmp_path) -> None:
    tokens = tmp_path / "token"
    tokens.write_text("token-1")
    _plugin(
        cluster, tmp_path, f"import json\nprint(json.dumps({{'status': {{'token': open({str(tokens)!r}).read()}}}}))"
    )
    cluster.server.tokens = {"token-1": ALL_VERBS}
    alice = cluster.worker("alice")
    hold = alice.hold("job")

    tokens.write_text("token-2")
    cluster.server.tokens = {"token-2": ALL_VERBS}

    hold.renewed()


def test_a_plugin_that_hangs_ends_with_the_budget(cluster, tmp_path) -> None:
    _plugin(cluster, tmp_path, "import time\ntime.sleep(5)")

    began = clock.now()
    with pytest.raises(BackendUnavailable, match="credentials"):
        cluster.worker("alice").ask("job", within=0.5)

    assert clock.now() - began < 3


def test_a_plugin_that_fails_is_an_error_that_shows_nothing_of_it(cluster, tmp_path) -> None:
    _plugin(cluster, tmp_path, f"import sys\nsys.exit({SECRET!r})")

    with pytest.raises(BackendMisconfigured, match="the command it names") as raised:
        cluster.worker("alice").ask("job")

    assert SECRET not in str(raised.value)


def _certificate(folder: Path) -> tuple[Path, Path]:
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj /CN=test"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    return cert, key


@pytest.mark.needs("openssl")
def test_over_tls_the_server_is_checked(tmp_path) -> None:
    with ApiServer(("jobs",), certificate=_certificate(tmp_path)) as server:
        trusted = Worker(KubernetesBackend("jobs", kubeconfig=server.kubeconfig(tmp_path / "trusted")), "alice")
        hold = trusted.hold("job")
        hold.renewed()
        hold.released()
        trusted.backend.close()
        config = json.loads((tmp_path / "trusted").read_text())
        del config["clusters"][0]["cluster"]["certificate-authority-data"]
        (tmp_path / "trusting nobody").write_text(json.dumps(config))
        doubtful = Worker(KubernetesBackend("jobs", kubeconfig=tmp_path / "trusting nobody"), "alice")

        with pytest.raises(BackendMisconfigured, match="not trusted"):
            doubtful.ask("job")


def test_without_the_extra_it_is_named(monkeypatch) -> None:
    monkeypatch.setattr("pglease.backends.kubernetes_login.find_spec", lambda _: None)

    with pytest.raises(MissingDependencyError, match=r"pglease\[kubernetes\]"):
        open_backend("kubernetes://jobs")


# -- the address -------------------------------------------------------------------------------------------------------


def test_an_address_names_namespace_context_and_file(cluster) -> None:
    url = f"kubernetes://?pglease.kubeconfig={cluster.kubeconfig}&pglease.context=test&pglease.pool_size=2"

    with PGLease(url, owner_id="alice") as alice, PGLease(f"kubernetes://jobs/?{url.partition('?')[2]}") as bob:
        assert alice.try_acquire("job")
        assert not bob.try_acquire("job")
        assert cluster.object("job")["spec"]["holderIdentity"] == "alice"


@pytest.mark.parametrize(
    ("url", "knobs", "match"),
    [
        ("kubernetes://Jobs", {}, "namespace"),
        ("kubernetes://jobs?context=x", {}, r"pglease\.context"),
        ("kubernetes://jobs", {"schema": "x"}, "no knob 'schema'"),
        ("kubernetes://jobs?pglease.clock=x", {}, "no knob 'clock'"),
    ],
)
def test_a_wrong_address_is_refused_when_it_is_said(url: str, knobs: dict[str, str], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        open_backend(url, **knobs)


def test_building_it_connects_to_nothing(cluster) -> None:
    cluster.worker("alice")

    assert cluster.server.asked == []


def test_a_namespace_that_does_not_exist_or_goes_away_is_said(cluster, alice) -> None:
    with pytest.raises(BackendMisconfigured, match="not found"):
        cluster.worker("alice", namespace="nowhere").ask("job")
    hold = alice.hold("job")
    cluster.server.leases.terminating.add("jobs")

    with pytest.raises(BackendMisconfigured, match="being terminated"):
        alice.ask("new")

    hold.renewed()


def test_closing_it_wakes_whoever_waits_to_ask_again(cluster, alice) -> None:
    cluster.next("GET", status=503, headers=(("Retry-After", "20"),))
    failed: list[Exception] = []

    def ask() -> None:
        try:
            alice.ask("job", within=60)
        except (BackendUnavailable, BackendClosed) as error:
            failed.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not cluster.server.asked:
        pass
    alice.backend.close()
    thread.join(10)

    assert not thread.is_alive()
    assert len(failed) == 1
