"""Is the cluster fit for leases: can it be reached, may we do what is needed, how long does a write take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from pglease.backends.base import Budget
from pglease.backends.checks import Check
from pglease.backends.kubernetes_api import Leases
from pglease.errors import BackendError

NEEDED = ("get", "create", "update")
MORE = (
    ("list", "`pglease list` and cleanup"),
    ("watch", "waiting that is woken by a release"),
    ("delete", "cleanup"),
)
_ROLES = """\
# What pglease needs in namespace {namespace}. Put the name of your own service account in the RoleBinding.
# `create` cannot be limited by name in Kubernetes; the lease objects are called pglease-*.
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: pglease
  namespace: {namespace}
rules:
  - apiGroups: ["coordination.k8s.io"]
    resources: ["leases"]
    verbs: ["get", "create", "update"] # to take, keep and give back leases
  - apiGroups: ["coordination.k8s.io"]
    resources: ["leases"]
    verbs: ["watch", "list"] # to be woken by a release, and for `pglease list`; leave out what you do not use
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: pglease-cleanup
  namespace: {namespace}
rules:
  - apiGroups: ["coordination.k8s.io"]
    resources: ["leases"]
    verbs: ["get", "list", "create", "update", "delete"] # for `pglease cleanup` alone; workers need no delete
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: pglease
  namespace: {namespace}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: pglease
subjects:
  - kind: ServiceAccount
    name: default
    namespace: {namespace}
"""


def manifests(namespace: str) -> str:
    """Return the Roles that workers and a janitor need, and a binding to start from."""
    return _ROLES.format(namespace=namespace)


def diagnose(leases: Leases, box: Callable[[], Budget], *, ttl: float = 60.0) -> Iterator[Check]:
    """Look at everything that leases depend on, and yield what was found, one thing at a time. Writes nothing.

    Args:
        leases: the Leases of the namespace.
        box: returns the budget of one request.
        ttl: seconds, the lease length that the time of a write is compared with; 60 as everywhere.
    """
    started = time.perf_counter()
    try:
        version = leases.server_version(box())
        namespace = leases.namespace(box())
    except BackendError as error:
        yield Check("reachable", "fail", str(error), "check the kubeconfig and context, and that the server runs")
        return
    took = time.perf_counter() - started
    yield Check("reachable", "ok", f"Kubernetes {version}, namespace {namespace}, answered in {took * 1000:.0f} ms")
    yield from _rights(leases, box)
    yield from _a_write(leases, box, ttl)
    yield Check(
        "clock",
        "ok",
        "expiry is judged by observed change: who has just arrived waits for a whole ttl behind a holder that crashed",
        "let workers wait (`--wait`, `wait=`) for longer than the ttl, or stay",
    )


def _rights(leases: Leases, box: Callable[[], Budget]) -> Iterator[Check]:
    try:
        lacking = [verb for verb in NEEDED if not leases.may(verb, box())]
        missing_for = [(verb, what) for verb, what in MORE if not leases.may(verb, box())]
    except BackendError as error:
        yield Check("rights", "warn", f"they could not be asked for: {error}", "see `pglease schema grants`")
        return
    if lacking:
        yield Check("rights", "fail", f"may not {', '.join(lacking)} Leases", "apply `pglease schema grants`")
    else:
        yield Check("rights", "ok", f"may {', '.join(NEEDED)} Leases")
    for verb, what in missing_for:
        yield Check(f"right to {verb}", "warn", f"may not {verb} Leases: no {what}", "see `pglease schema grants`")


def _a_write(leases: Leases, box: Callable[[], Budget], ttl: float) -> Iterator[Check]:
    started = time.perf_counter()
    try:
        leases.rehearse(box())
    except BackendError as error:
        yield Check("write", "fail", str(error), "check the namespace, its quota, and admission webhooks")
        return
    took = time.perf_counter() - started
    text = f"a write takes {took * 1000:.0f} ms (tried without keeping it)"
    if took > ttl / 20:
        yield Check("write", "warn", text, "look for load on the API server, admission webhooks, or a slow network")
    else:
        yield Check("write", "ok", text)
