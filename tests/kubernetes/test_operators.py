"""What operators see: rights, manifests, `pglease doctor` and the other commands on a Kubernetes address."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from pglease.cli.app import run_app
from pglease.errors import BackendMisconfigured
from pglease.records import Gone
from pglease.testing.api_server import ALL_VERBS
from tests.kubernetes.conftest import WORKERS_VERBS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(cluster, capsys) -> Callable[..., tuple[int, str]]:
    def run(*words: str) -> tuple[int, str]:
        code = run_app([*words, "--dsn", f"kubernetes://jobs?pglease.kubeconfig={cluster.kubeconfig}"])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def test_a_worker_needs_three_verbs(cluster) -> None:
    cluster.only(*WORKERS_VERBS)
    alice, bob = cluster.worker("alice"), cluster.worker("bob")

    hold = alice.hold("job", metadata={"a": 1})
    assert bob.is_refused("job").held_by == "alice"
    hold.renewed()
    assert bob.sees("job").owner_id == "alice"
    hold.released()
    assert bob.hold("job").token == 2
    assert alice.force("job", 2)


@pytest.mark.parametrize(
    ("lacking", "act"),
    [
        ("get", lambda worker: worker.sees("job")),
        ("create", lambda worker: worker.ask("new")),
        ("update", lambda worker: worker.ask("job")),
        ("list", lambda worker: worker.names()),
        ("delete", lambda worker: worker.cleanup()),
    ],
    ids=["get", "create", "update", "list", "delete"],
)
def test_a_right_that_is_missing_is_named(cluster, lacking: str, act) -> None:
    cluster.only(*ALL_VERBS)
    cluster.worker("before").hold("job").released()
    cluster.only(*(ALL_VERBS - {lacking}), token="token-2")

    with pytest.raises(BackendMisconfigured, match=rf"refuses to {lacking} Leases.*schema grants"):
        act(cluster.worker("alice"))


def test_without_the_right_to_create_nothing_that_was_deleted_comes_back(cluster) -> None:
    cluster.only(*ALL_VERBS)
    hold = cluster.worker("alice").hold("job")
    cluster.delete("job")

    assert hold.renew() == Gone("deleted")


def test_the_manifests_are_the_file_that_people_copy(cluster, run) -> None:
    code, printed = run("schema", "grants")

    assert code == 0
    written = (ROOT / "migrations" / "kubernetes" / "rbac.yaml").read_text()
    assert printed.strip() == written.strip().replace("namespace: default", "namespace: jobs").replace(
        "in namespace default", "in namespace jobs"
    )


def test_the_manifests_grant_what_is_needed_and_no_more() -> None:
    roles = {
        each["metadata"]["name"]: [verb for rule in each["rules"] for verb in rule["verbs"]]
        for each in yaml.safe_load_all((ROOT / "migrations" / "kubernetes" / "rbac.yaml").read_text())
        if each["kind"] == "Role"
    }

    assert roles["pglease"][:3] == list(WORKERS_VERBS)
    assert "delete" not in roles["pglease"]
    assert set(roles["pglease-cleanup"]) >= {"get", "list", "create", "update", "delete"}


def test_a_cluster_in_order_passes_the_doctor_who_leaves_nothing_behind(cluster, run) -> None:
    code, printed = run("doctor")

    assert code == 0
    for line in ("ok    reachable", "ok    rights", "ok    write"):
        assert line in printed
    assert cluster.server.leases.all("jobs", lambda _: True)[0] == []


def test_the_doctor_says_which_rights_are_missing(cluster, run) -> None:
    cluster.only("get", "create", "list")

    code, printed = run("doctor", "--json")

    checks = {check["check"]: check for check in map(json.loads, printed.splitlines())}
    assert code == 1
    assert checks["rights"]["status"] == "fail"
    assert "update" in checks["rights"]["text"]
    assert {name for name, check in checks.items() if check["status"] == "warn"} == {
        "right to watch",
        "right to delete",
    }


def test_the_doctor_says_that_nobody_answers(cluster, run) -> None:
    cluster.server.stop()

    code, printed = run("doctor")

    assert code == 1
    assert "fail  reachable" in printed


def test_the_doctor_says_that_the_namespace_is_missing(cluster, run) -> None:
    cluster.server.leases.namespaces.clear()

    code, printed = run("doctor")

    assert code == 1
    assert 'namespaces "jobs" not found' in printed


def test_every_command_that_tells_facts_works_on_a_kubernetes_address(cluster, alice, run) -> None:
    hold = alice.hold("nightly report", metadata={"a": 1})

    code, printed = run("list", "--json")
    (facts,) = map(json.loads, printed.splitlines())
    assert (code, facts["name"], facts["held"]) == (0, "nightly report", True)
    assert run("check", "nightly report")[0] == 0
    code, printed = run("show", "nightly report", "--json")
    assert json.loads(printed)["fencing_token"] == hold.token
    assert run("release", "nightly report", "--token", "7")[0] == 1
    assert run("release", "nightly report", "--token", str(hold.token))[0] == 0
    assert run("wait", "nightly report", "--timeout", "5s")[0] == 0
    assert run("cleanup")[1].strip() == "1 record removed"
    assert run("show", "nightly report")[0] == 1


def test_what_a_table_needs_is_nothing_here(cluster, run) -> None:
    code, printed = run("schema", "apply")

    assert code != 0
    assert "Kubernetes" in printed
