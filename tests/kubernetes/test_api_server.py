"""The tests' own API server answers as a real one was measured to do.

Plain HTTP, told in statuses and reasons: what the backend rests on, and where naive fakes differ. With
`PGLEASE_TEST_KUBECONFIG` a real one is asked.
"""

from __future__ import annotations

import copy
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pglease import clock
from pglease.backends.base import Budget
from pglease.backends.kubernetes_http import Answer, Wire
from pglease.backends.kubernetes_login import read_login
from pglease.testing.api_leases import Json
from pglease.testing.api_server import ApiServer

REAL = os.environ.get("PGLEASE_TEST_KUBECONFIG")
NAMESPACE = f"pglease-contract-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
PATH = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
STAMP = "2026-01-02T03:04:05.000006Z"


class Api:
    """A Lease API, asked plainly."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def ask(self, method: str, path: str, body: Json | None = None) -> Answer:
        return self.wire.ask(method, path, Budget.of(20, clock.now), body=body)

    def get(self, name: str) -> Answer:
        return self.ask("GET", f"{PATH}/{name}")

    def post(self, body: Json, query: str = "") -> Answer:
        return self.ask("POST", PATH + query, body)

    def put(self, body: Json) -> Answer:
        return self.ask("PUT", f"{PATH}/{body['metadata']['name']}", body)

    def delete(self, name: str, query: str = "", **preconditions: str) -> Answer:
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions}
        return self.ask("DELETE", f"{PATH}/{name}{query}", body)

    def made(self, **spec: Any) -> Json:
        answer = self.post(lease(**spec))
        assert answer.status == 201, answer
        return dict(answer.body)


def lease(name: str = "", **spec: Any) -> Json:
    name = name or f"api-{secrets.token_hex(6)}"
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


def changed(found: Json, **metadata: Any) -> Json:
    """Return a body that would change something, with other metadata; None leaves a field out."""
    body = copy.deepcopy(found)
    body["spec"]["holderIdentity"] = secrets.token_hex(4)
    body["metadata"] |= metadata
    body["metadata"] = {key: value for key, value in body["metadata"].items() if value is not None}
    return body


def outcome(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.body.get("reason", "")


@pytest.fixture(scope="module")
def api(tmp_path_factory) -> Iterator[Api]:
    with ApiServer((NAMESPACE,)) as server:
        path = Path(REAL) if REAL else server.kubeconfig(tmp_path_factory.mktemp("api") / "kubeconfig")
        wire = Wire(lambda: read_login(kubeconfig=str(path)), pool_size=4, connect_timeout=5)
        api = Api(wire)
        if REAL:
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
            api.ask("POST", "/api/v1/namespaces", body)
        yield api
        wire.close()


def test_a_name_can_be_created_once(api: Api) -> None:
    body = lease()

    first, second = api.post(body), api.post(body)

    assert first.status == 201
    assert outcome(second) == (409, "AlreadyExists")


def test_a_creation_that_names_a_version_is_a_server_error(api: Api) -> None:
    assert api.post(changed(lease(), resourceVersion="1")).status == 500


CHANGES: dict[str, tuple[Callable[[Json], Json], tuple[int, str]]] = {
    "the present version": (changed, (200, "")),
    "the present version without its uid": (lambda found: changed(found, uid=None), (200, "")),
    "an older version": (lambda found: changed(found, resourceVersion="1"), (409, "Conflict")),
    "no version": (lambda found: changed(found, resourceVersion=None), (422, "Invalid")),
    "version 0": (lambda found: changed(found, resourceVersion="0"), (422, "Invalid")),
    "no number": (lambda found: changed(found, resourceVersion="latest"), (500, "")),
    "another uid": (lambda found: changed(found, uid="00000000-0000-0000-0000-000000000000"), (409, "Conflict")),
    "another namespace": (lambda found: changed(found, namespace="other"), (400, "BadRequest")),
}


@pytest.mark.parametrize(("body", "wanted"), CHANGES.values(), ids=CHANGES)
def test_a_replacement_must_name_the_present_version(api: Api, body, wanted) -> None:
    found = api.made(holderIdentity="a")

    assert outcome(api.put(body(found))) == wanted


def test_a_replacement_of_what_is_gone_creates_it_unless_it_names_the_uid(api: Api) -> None:
    found = api.made(holderIdentity="a")
    api.delete(found["metadata"]["name"])

    assert outcome(api.put(changed(found))) == (409, "Conflict")
    assert api.get(found["metadata"]["name"]).status == 404
    assert api.put(changed(found, uid=None)).status == 201


def test_a_replacement_that_changes_nothing_is_no_new_version(api: Api) -> None:
    found = api.made(holderIdentity="a", renewTime=STAMP)

    same = api.put(found)
    spelled = copy.deepcopy(found)
    spelled["spec"]["renewTime"] = STAMP.replace("Z", "+00:00")
    again = api.put(spelled)

    assert same.body["metadata"]["resourceVersion"] == again.body["metadata"]["resourceVersion"]
    assert same.body["metadata"]["resourceVersion"] == found["metadata"]["resourceVersion"]


def test_a_replacement_drops_what_it_leaves_out(api: Api) -> None:
    body = lease(holderIdentity="a")
    body["metadata"]["labels"] = {"a": "b"}
    found = dict(api.post(body).body)

    replaced = api.put(changed(found, labels=None)).body

    assert "labels" not in replaced["metadata"]
    assert replaced["metadata"]["uid"] == found["metadata"]["uid"]


def test_versions_grow_over_deletion_and_the_uid_changes(api: Api) -> None:
    first = api.made()
    api.delete(first["metadata"]["name"])
    second = dict(api.post(lease(first["metadata"]["name"])).body)

    assert int(second["metadata"]["resourceVersion"]) > int(first["metadata"]["resourceVersion"])
    assert second["metadata"]["uid"] != first["metadata"]["uid"]


SPECS: dict[str, tuple[Json, int]] = {
    "six digits": ({"renewTime": STAMP}, 201),
    "six digits and an offset": ({"renewTime": STAMP.replace("Z", "+02:00")}, 201),
    "no fraction": ({"renewTime": "2026-01-02T03:04:05Z"}, 400),
    "three digits": ({"renewTime": "2026-01-02T03:04:05.123Z"}, 400),
    "no zone": ({"renewTime": "2026-01-02T03:04:05.000006"}, 400),
    "no second 61": ({"renewTime": "2026-01-02T03:04:61.000006Z"}, 400),
    "null is unset": ({"renewTime": None, "holderIdentity": None}, 201),
    "whole seconds": ({"leaseDurationSeconds": 2**31 - 1}, 201),
    "no seconds": ({"leaseDurationSeconds": 0}, 422),
    "half a second": ({"leaseDurationSeconds": 1.5}, 400),
    "too many seconds": ({"leaseDurationSeconds": 2**31}, 400),
    "text": ({"leaseDurationSeconds": "15"}, 400),
    "transitions below 0": ({"leaseTransitions": -1}, 422),
    "any holder": ({"holderIdentity": "ünï \N{ROCKET}\n"}, 201),
    "an empty holder": ({"holderIdentity": ""}, 201),
    "a number for a holder": ({"holderIdentity": 7}, 400),
}


@pytest.mark.parametrize(("spec", "wanted"), SPECS.values(), ids=SPECS)
def test_what_a_spec_may_hold(api: Api, spec: Json, wanted: int) -> None:
    answer = api.post(lease(**spec))

    assert answer.status == wanted
    if wanted == 201 and spec.get("holderIdentity") is not None:
        assert answer.body["spec"]["holderIdentity"] == spec["holderIdentity"]


@pytest.mark.parametrize("name", ["Order", "a_b", "a..b", "-a", "a-", "a" * 254])
def test_names_that_cannot_be(api: Api, name: str) -> None:
    assert outcome(api.post(lease(name))) == (422, "Invalid")


def test_an_annotation_may_be_long_but_not_endless(api: Api) -> None:
    for size, wanted in ((200_000, 201), (262_145, 422)):
        body = lease()
        body["metadata"]["annotations"] = {"pglease/metadata": "x" * size}
        assert api.post(body).status == wanted


@pytest.mark.parametrize(
    ("metadata", "wanted"),
    [
        ({"labels": {"batch": "no blanks"}}, 422),
        ({"labels": {"batch": 7}}, 400),
        ({"annotations": {"note": 7}}, 400),
    ],
    ids=["a label with a blank", "a label that is a number", "an annotation that is one"],
)
def test_what_metadata_may_not_hold(api: Api, metadata: Json, wanted: int) -> None:
    body = lease()
    body["metadata"] |= metadata

    assert api.post(body).status == wanted


def test_what_is_no_object_or_no_such_place_or_method(api: Api) -> None:
    assert api.ask("POST", PATH, ["a lease"]).status == 400  # type: ignore[arg-type]
    assert api.ask("GET", PATH.replace("leases", "promises")).status == 404
    assert api.ask("PUT", PATH, lease()).status == 405


def test_a_rehearsed_deletion_deletes_nothing(api: Api) -> None:
    name = api.made()["metadata"]["name"]

    body = {"apiVersion": "v1", "kind": "DeleteOptions", "dryRun": ["All"]}
    assert api.ask("DELETE", f"{PATH}/{name}", body).status == 200

    assert api.get(name).status == 200


def test_a_deletion_heeds_preconditions_in_its_body_alone(api: Api) -> None:
    metadata = api.made()["metadata"]
    name, uid, version = metadata["name"], metadata["uid"], metadata["resourceVersion"]

    assert outcome(api.delete(name, uid="00000000-0000-0000-0000-000000000000")) == (409, "Conflict")
    assert outcome(api.delete(name, uid=uid, resourceVersion="1")) == (409, "Conflict")
    assert api.delete(name, "?dryRun=All", uid=uid, resourceVersion=version).status == 200
    assert api.get(name).status == 404, "with a body, dryRun in the query is ignored"
    assert api.delete(name).status == 404


def test_a_rehearsed_creation_keeps_nothing(api: Api) -> None:
    body = lease()

    assert api.post(body, "?dryRun=All").status == 201
    assert api.get(body["metadata"]["name"]).status == 404


def test_a_list_is_selected_by_label_and_read_in_pages(api: Api) -> None:
    mark = secrets.token_hex(6)
    for _ in range(5):
        body = lease()
        body["metadata"]["labels"] = {"batch": mark}
        api.post(body)

    whole = api.ask("GET", f"{PATH}?labelSelector=batch={mark}").body
    page = api.ask("GET", f"{PATH}?labelSelector=batch={mark}&limit=2").body
    rest = api.ask("GET", f"{PATH}?labelSelector=batch={mark}&limit=9&continue={page['metadata']['continue']}").body

    names = {item["metadata"]["name"] for item in whole["items"]}
    paged = [item["metadata"]["name"] for item in page["items"] + rest["items"]]
    assert len(names) == len(paged) == 5
    assert set(paged) == names
    assert api.ask("GET", f"{PATH}?fieldSelector=spec.holderIdentity=a").status == 400


def test_a_namespace_that_does_not_exist(api: Api) -> None:
    elsewhere = PATH.replace(NAMESPACE, "pglease-nowhere")
    body = lease()
    body["metadata"]["namespace"] = "pglease-nowhere"

    created = api.ask("POST", elsewhere, body)

    assert outcome(created) == (404, "NotFound")
    assert created.body["details"]["kind"] == "namespaces"
    assert api.ask("GET", elsewhere).body["items"] == []


def watched(api: Api, query: str) -> list[Json]:
    """Return all lines of a watch that ends by itself."""
    stream = api.wire.open(f"{PATH}?watch=1&{query}", Budget.of(20, clock.now))
    try:
        assert stream.reply.status == 200
        return [json.loads(line) for line in stream.reply]
    finally:
        stream.close()


def test_a_watch_tells_what_came_after_a_version_until_its_time_is_over(api: Api) -> None:
    found = api.made(holderIdentity="a")
    name, version = found["metadata"]["name"], found["metadata"]["resourceVersion"]
    api.put(changed(found))
    api.delete(name)

    lines = watched(api, f"fieldSelector=metadata.name={name}&resourceVersion={version}&timeoutSeconds=1")

    assert [line["type"] for line in lines] == ["MODIFIED", "DELETED"]
    versions = [int(line["object"]["metadata"]["resourceVersion"]) for line in lines]
    assert versions == sorted(versions)
    assert versions[0] > int(version)


def test_what_leaves_a_selector_is_deleted_for_its_watch(api: Api) -> None:
    body = lease(holderIdentity="a")
    mark = secrets.token_hex(6)
    body["metadata"]["labels"] = {"batch": mark}
    found = dict(api.post(body).body)
    api.put(changed(found, labels=None))

    version = found["metadata"]["resourceVersion"]
    lines = watched(api, f"labelSelector=batch={mark}&resourceVersion={version}&timeoutSeconds=1")

    assert [line["type"] for line in lines] == ["DELETED"]


def test_a_watch_from_no_version_begins_with_what_is_there_and_hears_of_nothing_else(api: Api) -> None:
    there, other = api.made(holderIdentity="a"), api.made(holderIdentity="b")
    name, version = there["metadata"]["name"], other["metadata"]["resourceVersion"]

    lines = watched(api, f"fieldSelector=metadata.name={name}&timeoutSeconds=1")

    assert [(line["type"], line["object"]["metadata"]["name"]) for line in lines] == [("ADDED", name)]
    api.put(changed(other))
    assert watched(api, f"fieldSelector=metadata.name={name}&resourceVersion={version}&timeoutSeconds=1") == []


@pytest.mark.skipif(bool(REAL), reason="a real server is not compacted for a test")
def test_a_version_that_was_compacted_away_is_an_event_of_the_stream(cluster) -> None:
    wire = Wire(lambda: read_login(kubeconfig=str(cluster.kubeconfig)), pool_size=1, connect_timeout=5)
    cluster.worker("alice").hold("job")
    cluster.server.leases.compact()

    stream = wire.open(f"{PATH.replace(NAMESPACE, 'jobs')}?watch=1&resourceVersion=1", Budget.of(5, clock.now))
    (line,) = [json.loads(line) for line in stream.reply]
    stream.close()
    wire.close()

    assert (line["type"], line["object"]["code"], line["object"]["reason"]) == ("ERROR", 410, "Expired")


@pytest.mark.skipif(bool(REAL), reason="this is about the tests' own")
def test_a_restart_keeps_the_port_and_what_was_written(cluster) -> None:
    hold = cluster.worker("alice").hold("job")
    port = cluster.server.port

    cluster.server.restart()

    assert cluster.server.port == port
    hold.renewed()
    with socket.create_connection(("127.0.0.1", port), 5):
        pass
