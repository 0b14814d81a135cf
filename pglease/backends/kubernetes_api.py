"""Leases over the API server: what is asked, asked again, and what became of a write whose answer never came.

Every write is a compare-and-swap: a POST of a name that must not exist, or a PUT or DELETE of one uid and
resourceVersion. (A resourceVersion alone would not do: a PUT that names no uid re-creates an object that was deleted.)
So a write whose answer was lost is simply sent again: at most one of its copies is applied. When the last one finds
that somebody wrote before, that may have been an earlier copy; a hold's own `lease_id` in the object tells.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from pglease.backends.base import Budget
from pglease.backends.kubernetes_http import Answer, Stream, Wire
from pglease.backends.kubernetes_names import FLOOR
from pglease.backends.kubernetes_objects import LABEL, Json, floor_object, floor_of
from pglease.errors import BackendMisconfigured, BackendUnavailable

T = TypeVar("T")

GROUP = "/apis/coordination.k8s.io/v1/namespaces"
PAGE = 500
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_FORBIDDEN, _NOT_FOUND, _CONFLICT, _EXPIRED, _OVERLOADED, _SERVER_TROUBLE = 403, 404, 409, 410, 429, 500


class Busy(BackendUnavailable):
    """The server asked to be asked again later."""

    retry_after = 0.0


@dataclass(frozen=True)
class Written:
    """A write was applied.

    Attributes:
        found: the object as it is now.
        sent_at: when the copy that was answered was sent.
    """

    found: Json
    sent_at: float


@dataclass(frozen=True)
class Outrun:
    """Somebody else wrote first.

    Attributes:
        unheard: whether a copy of the write was never answered: it may have been applied before they wrote.
    """

    unheard: bool


class Leases:
    """The Leases of one namespace.

    Args:
        wire: the connections.
        namespace: which; empty for the one of the credentials.
        now: reads the boot clock.
    """

    def __init__(self, wire: Wire, namespace: str, now: Callable[[], float]) -> None:
        self.wire = wire
        self.closing = threading.Event()
        self._namespace = namespace
        self.now = now

    def namespace(self, budget: Budget) -> str:
        """Return where the leases are."""
        return self._namespace or self.wire.login(budget).namespace

    def forget(self) -> None:
        """Drop, in a forked child, a lock that a thread of the parent may hold."""
        if not self.closing.is_set():
            self.closing = threading.Event()

    # -- reading -----------------------------------------------------------------------------------------------------

    def get(self, name: str, budget: Budget, *, reserved: bool = False) -> Json | None:
        """Read one object, from a quorum; None when there is none."""
        path = self.path(budget, name)
        return _object(self.again(lambda: self.heard("GET", path, budget, reserved=reserved), budget), "get")

    def all(self, budget: Budget) -> list[Json]:
        """Read all objects that carry our label, page by page."""
        return self.again(lambda: [item for page in self._pages(budget) for item in page], budget)

    def _pages(self, budget: Budget) -> Iterator[list[Json]]:
        query = {"labelSelector": "=".join(LABEL), "limit": str(PAGE)}
        while True:
            answer = self.heard("GET", f"{self.path(budget)}?{urlencode(query)}", budget)
            if answer.status == _EXPIRED:  # the pages took longer than the server remembers
                raise BackendUnavailable("the list of leases expired while it was read")
            page = _object(answer, "list") or {}
            yield page.get("items") or []
            query["continue"] = page.get("metadata", {}).get("continue") or ""
            if not query["continue"]:
                return

    def present_version(self, budget: Budget) -> str:
        """Return the version that a watch of our leases begins after."""
        path = f"{self.path(budget)}?{urlencode({'labelSelector': '='.join(LABEL), 'limit': '1'})}"
        found = _object(self.again(lambda: self.heard("GET", path, budget), budget), "list") or {}
        return str(found.get("metadata", {}).get("resourceVersion") or "")

    def stream(self, query: str, budget: Budget) -> Stream:
        """Begin a watch.

        Raises:
            BackendUnavailable: worth another try, but for a version that the server has forgotten.
            BackendMisconfigured: we may not watch.
        """
        stream = self.wire.open(f"{self.path(budget)}?{query}", budget)
        if stream.reply.status == 200:
            return stream
        answer = stream.whole()
        if answer.status in {_EXPIRED, _OVERLOADED} or answer.status >= _SERVER_TROUBLE:
            raise _trouble(answer)
        _object(answer, "watch")
        raise BackendUnavailable(f"the Kubernetes API server answered a watch with {answer.status}")

    def floor(self, budget: Budget) -> int:
        """Read the floor of the tokens: that of every lease that was ever deleted is at most this."""
        found = self.get(FLOOR, budget)
        return 0 if found is None else floor_of(found)

    # -- writing -----------------------------------------------------------------------------------------------------

    def write(
        self, body: Json, budget: Budget, *, sending: Callable[[], None] | None = None, reserved: bool = False
    ) -> Written | Outrun:
        """Make `body` the present version of its object: a new one, or in place of the version it names.

        Raises:
            BackendUnavailable: with `outcome_unknown` when a copy of it may have been applied.
        """
        return _Write(self, body, budget, sending, reserved=reserved).carried_out()

    def raise_floor(self, least: int, budget: Budget) -> None:
        """Make the floor at least `least`."""
        while True:
            found = self.get(FLOOR, budget)
            if found is not None and floor_of(found) >= least:
                return
            body = floor_object(least, self.namespace(budget), found)
            if isinstance(self.write(body, budget), Written):
                return

    def delete(self, name: str, version: tuple[str, str], budget: Budget) -> bool:
        """Delete one version of an object; False when it is no longer the present one."""
        uid, resource_version = version
        wanted = {"uid": uid, "resourceVersion": resource_version}
        # In the body: in the query they would be ignored, and whatever is there deleted.
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": wanted}
        unheard = False

        def delete() -> bool:
            nonlocal unheard
            try:
                answer = self.heard("DELETE", self.path(budget, name), budget, body=options)
            except BackendUnavailable as trouble:
                unheard = unheard or trouble.outcome_unknown
                raise
            if answer.status == _CONFLICT:
                return False
            return _object(answer, "delete") is not None or unheard

        return self.again(delete, budget)

    # -- for a doctor ------------------------------------------------------------------------------------------------

    def server_version(self, budget: Budget) -> str:
        """Return the version of the server."""
        answer = self.wire.ask("GET", "/version", budget)
        return str(answer.body.get("gitVersion") or f"answered {answer.status}")

    def may(self, verb: str, budget: Budget) -> bool:
        """Tell whether we may do something to Leases here."""
        asked = {"group": "coordination.k8s.io", "resource": "leases", "verb": verb}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {**asked, "namespace": self.namespace(budget)}},
        }
        answer = self.heard("POST", _REVIEWS, budget, body=body)
        return bool((_object(answer, "review") or {}).get("status", {}).get("allowed"))

    def rehearse(self, budget: Budget) -> None:
        """Let the server go through the motions of a write, and keep nothing."""
        body = floor_object(0, self.namespace(budget), None)
        body["metadata"]["name"] = f"pglease-doctor-{os.urandom(8).hex()}"
        _object(self.heard("POST", f"{self.path(budget)}?dryRun=All", budget, body=body), "create")

    # -- asking ------------------------------------------------------------------------------------------------------

    def path(self, budget: Budget, name: str = "") -> str:
        """Return where an object is, or all of them."""
        return f"{GROUP}/{quote(self.namespace(budget))}/leases" + (f"/{quote(name)}" if name else "")

    def heard(self, method: str, path: str, budget: Budget, **options: Any) -> Answer:
        """Ask once; trouble of the server's is raised."""
        answer = self.wire.ask(method, path, budget, **options)
        if answer.status == _OVERLOADED or answer.status >= _SERVER_TROUBLE:
            raise _trouble(answer)
        return answer

    def again(self, act: Callable[[], T], budget: Budget) -> T:
        """Do it; while trouble is of the kind that passes, do it again until the budget is spent."""
        unknown = False
        for pause in _pauses():
            try:
                return act()
            except BackendUnavailable as trouble:
                unknown = trouble.outcome_unknown = unknown or trouble.outcome_unknown
                nap = max(pause, trouble.retry_after if isinstance(trouble, Busy) else 0.0)
                if budget.left() <= nap or self.closing.wait(nap):
                    raise
        raise AssertionError("the pauses never end")


class _Write:
    """One write on its way."""

    def __init__(
        self, leases: Leases, body: Json, budget: Budget, sending: Callable[[], None] | None, *, reserved: bool
    ) -> None:
        self._leases, self._budget, self._sending, self._reserved = leases, budget, sending, reserved
        metadata = body["metadata"]
        self._body, self._name, self._is_new = body, metadata["name"], "resourceVersion" not in metadata
        self._sent_at = 0.0
        self._unheard = False

    def carried_out(self) -> Written | Outrun:
        try:
            return self._leases.again(self._attempt, self._budget)
        except BackendUnavailable as trouble:
            trouble.outcome_unknown = self._unheard
            raise

    def _attempt(self) -> Written | Outrun:
        path = self._leases.path(self._budget, "" if self._is_new else self._name)
        method = "POST" if self._is_new else "PUT"
        try:
            answer = self._leases.heard(
                method, path, self._budget, body=self._body, sending=self._about_to_send, reserved=self._reserved
            )
        except BackendUnavailable as trouble:
            self._unheard = self._unheard or trouble.outcome_unknown
            raise
        if answer.status == _CONFLICT:
            return Outrun(self._unheard)
        found = _object(answer, "create" if self._is_new else "update")
        assert found is not None
        return Written(found, self._sent_at)

    def _about_to_send(self) -> None:
        self._sent_at = self._leases.now()
        if self._sending:
            self._sending()


def _pauses() -> Iterator[float]:
    """Yield how long to wait before each new try: not at all at first, since a restart leaves dead connections."""
    yield 0.0
    longest = 0.04
    while True:
        yield random.uniform(longest / 2, longest)
        longest = min(2 * longest, 0.5)


def _trouble(answer: Answer) -> Busy:
    busy = Busy(
        f"the Kubernetes API server is in trouble ({answer.status}): {said(answer)}",
        outcome_unknown=answer.status != _OVERLOADED,  # that one is refused before it is looked at
    )
    busy.retry_after = answer.retry_after
    return busy


def _object(answer: Answer, verb: str) -> Json | None:
    """Return the object of an answer; None when there is no such object."""
    if answer.status in {200, 201}:
        return dict(answer.body)
    about = answer.body.get("details") or {}
    if answer.status == _NOT_FOUND and verb in {"get", "delete"} and about.get("kind") != "namespaces":
        return None
    if answer.status == _FORBIDDEN:
        raise BackendMisconfigured(
            f"the Kubernetes API server refuses to {verb} Leases here: {said(answer)}. `pglease schema grants` prints "
            "the Role that is needed"
        )
    raise BackendMisconfigured(f"the Kubernetes API server refuses to {verb} a Lease ({answer.status}): {said(answer)}")


def said(answer: Answer) -> str:
    """Return the server's words, in one line."""
    return " ".join(str(answer.body.get("message") or "it did not say why").split())[:300]
