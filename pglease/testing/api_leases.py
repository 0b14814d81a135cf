"""What a Kubernetes API server does with Leases, without the HTTP: versions, preconditions, validation, history.

As kube-apiserver 1.36 was measured to do it, surprises included: a PUT of a name that does not exist creates it, an
unchanged PUT keeps the resourceVersion, a MicroTime has exactly six digits, preconditions count in the body only.
"""

from __future__ import annotations

import copy
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Json = dict[str, Any]

KIND = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*\Z")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?\Z")
_MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d)\Z")
_MOST_ANNOTATIONS = 262144
_INT32 = 2**31


class StatusError(Exception):
    """A refusal, as the server words it."""

    def __init__(self, code: int, reason: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.body: Json = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            **({"reason": reason} if reason else {}),
            **({"details": details} if details else {}),
            "code": code,
        }


def status_error(code: int, reason: str, message: str, **details: Any) -> StatusError:
    """Return a refusal; `details` go into the body."""
    return StatusError(code, reason, message, **details)


@dataclass(frozen=True)
class Event:
    """One change, as a watch tells it."""

    version: int
    kind: str
    before: Json | None
    after: Json

    def seen_through(self, matches: Callable[[Json], bool]) -> tuple[str, Json] | None:
        """Return what a watch with a selector hears of it: an object that leaves the selector was DELETED for it."""
        was = self.before is not None and matches(self.before)
        now = self.kind != "DELETED" and matches(self.after)
        if not was and not now:
            return None
        return ("MODIFIED" if was and now else "ADDED" if now else "DELETED"), self.after


class LeaseObjects:
    """All Leases of a cluster, under one growing resourceVersion."""

    def __init__(self, namespaces: tuple[str, ...] = ("default",)) -> None:
        self.changed = threading.Condition()
        self.namespaces = set(namespaces)
        self.terminating: set[str] = set()
        self.version = 1000
        self._objects: dict[tuple[str, str], Json] = {}
        self._history: list[Event] = []
        self._compacted = 0

    # -- reading ---------------------------------------------------------------------------------------------------

    def get(self, namespace: str, name: str) -> Json:
        """Read one."""
        with self.changed:
            return copy.deepcopy(self._found(namespace, name))

    def all(self, namespace: str, matches: Callable[[Json], bool]) -> tuple[list[Json], int]:
        """Read all that match, by name, and the version they were read at; a namespace that does not exist is empty."""
        with self.changed:
            names = sorted(key for key in self._objects if key[0] == namespace)
            found = [self._objects[key] for key in names if matches(self._objects[key])]
            return copy.deepcopy(found), self.version

    def events(self, after: int, timeout: float) -> tuple[list[Event], int]:
        """Wait for changes after a version, at most so long; return them and the version they reach to.

        Raises:
            StatusError: 410, that version was compacted away.
        """
        with self.changed:
            if after < self._compacted:
                raise StatusError(410, "Expired", f"too old resource version: {after} ({self._compacted})")
            self.changed.wait_for(lambda: self.version > after, timeout)
            return [event for event in self._history if event.version > after], self.version

    def compact(self) -> None:
        """Forget all history, as etcd does every few minutes."""
        with self.changed:
            self._compacted = self.version
            self._history.clear()

    # -- writing ---------------------------------------------------------------------------------------------------

    def create(self, namespace: str, body: Json, *, dry_run: bool = False) -> Json:
        """POST."""
        metadata = _metadata(body)
        if metadata.get("resourceVersion"):
            raise StatusError(500, "", "resourceVersion should not be set on objects to be created")
        name = metadata.get("name") or ""
        with self.changed:
            self._must_accept(namespace, name)
            if (namespace, name) in self._objects:
                message = f'leases.coordination.k8s.io "{name}" already exists'
                raise StatusError(409, "AlreadyExists", message, name=name, group="coordination.k8s.io", kind="leases")
            return self._insert(namespace, name, body, dry_run=dry_run)

    def replace(self, namespace: str, name: str, body: Json, *, dry_run: bool = False) -> Json:
        """PUT."""
        metadata = _metadata(body)
        if metadata.get("name", name) != name or metadata.get("namespace", namespace) != namespace:
            raise StatusError(400, "BadRequest", "the name of the object does not match the name on the URL")
        version, uid = metadata.get("resourceVersion") or "", metadata.get("uid") or ""
        with self.changed:
            before = self._objects.get((namespace, name))
            if before is None and uid:
                raise _wrong_uid(name, uid, "")
            if before is None:
                self._must_accept(namespace, name)
                return self._insert(namespace, name, body, dry_run=dry_run)
            if uid and uid != before["metadata"]["uid"]:
                raise _wrong_uid(name, uid, before["metadata"]["uid"])
            if version in {"", "0"}:
                raise _invalid(name, "metadata.resourceVersion: Invalid value: 0x0: must be specified for an update")
            if not version.isdigit():
                raise StatusError(500, "", f'strconv.ParseUint: parsing "{version}": invalid syntax')
            if version != before["metadata"]["resourceVersion"]:
                raise _conflict(name, "the object has been modified; please apply your changes to the latest version")
            return self._update(namespace, name, before, body, dry_run=dry_run)

    def delete(self, namespace: str, name: str, options: Mapping[str, Any]) -> Json:
        """DELETE; `options` is the body, the only place where preconditions and dryRun count."""
        wanted = options.get("preconditions") or {}
        with self.changed:
            found = self._found(namespace, name)
            for field in ("uid", "resourceVersion"):
                if wanted.get(field) and wanted[field] != found["metadata"][field]:
                    had, want = found["metadata"][field], wanted[field]
                    raise _conflict(name, f"Precondition failed: {field} in precondition: {want}, in object: {had}")
            if not options.get("dryRun"):
                del self._objects[namespace, name]
                gone = copy.deepcopy(found)
                gone["metadata"]["resourceVersion"] = self._note("DELETED", found, gone)
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    # -- inside ----------------------------------------------------------------------------------------------------

    def _found(self, namespace: str, name: str) -> Json:
        found = self._objects.get((namespace, name))
        if found is None:
            message = f'leases.coordination.k8s.io "{name}" not found'
            raise StatusError(404, "NotFound", message, name=name, group="coordination.k8s.io", kind="leases")
        return found

    def _must_accept(self, namespace: str, name: str) -> None:
        if namespace not in self.namespaces:
            raise StatusError(404, "NotFound", f'namespaces "{namespace}" not found', name=namespace, kind="namespaces")
        if namespace in self.terminating:
            text = f"unable to create new content in namespace {namespace} because it is being terminated"
            causes = [{"reason": "NamespaceTerminating", "message": text}]
            raise StatusError(403, "Forbidden", f'leases "{name}" is forbidden: {text}', causes=causes)
        if not _SUBDOMAIN.match(name) or len(name) > 253:
            raise _invalid(name, f'metadata.name: Invalid value: "{name}": a lowercase RFC 1123 subdomain must ...')

    def _insert(self, namespace: str, name: str, body: Json, *, dry_run: bool) -> Json:
        made = _accepted(name, body)
        made["metadata"] |= {
            "namespace": namespace,
            "uid": str(uuid.uuid4()),
            "creationTimestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        if not dry_run:
            made["metadata"]["resourceVersion"] = self._note("ADDED", None, made)
            self._objects[namespace, name] = made
        return copy.deepcopy(made)

    def _update(self, namespace: str, name: str, before: Json, body: Json, *, dry_run: bool) -> Json:
        made = _accepted(name, body)
        for kept in ("namespace", "uid", "creationTimestamp", "resourceVersion"):
            made["metadata"][kept] = before["metadata"][kept]
        if made != before and not dry_run:  # what changes nothing is no new version, and nobody hears of it
            made["metadata"]["resourceVersion"] = self._note("MODIFIED", before, made)
            self._objects[namespace, name] = made
        return copy.deepcopy(made)

    def _note(self, kind: str, before: Json | None, after: Json) -> str:
        self.version += 1
        self._history.append(Event(self.version, kind, before, after))
        self.changed.notify_all()
        return str(self.version)


def _metadata(body: Json) -> Json:
    metadata = body.get("metadata")
    if body.get("apiVersion") != KIND["apiVersion"] or body.get("kind") != "Lease" or not isinstance(metadata, dict):
        raise StatusError(400, "BadRequest", "the object provided is unrecognized (must be of type Lease)")
    return metadata


def _accepted(name: str, body: Json) -> Json:
    """Return what is kept of a body: known fields alone, checked, times in UTC."""
    metadata = body["metadata"]
    kept: Json = {"name": name}
    for field in ("labels", "annotations", "ownerReferences", "finalizers"):
        if metadata.get(field):
            kept[field] = copy.deepcopy(metadata[field])
    _must_be_text(name, kept)
    spec = dict(_accepted_spec(name, body.get("spec") or {}))
    return {**KIND, "metadata": kept, "spec": spec}


def _must_be_text(name: str, metadata: Json) -> None:
    labels, annotations = metadata.get("labels", {}), metadata.get("annotations", {})
    for value in (*labels.values(), *annotations.values()):
        if not isinstance(value, str):
            raise StatusError(400, "BadRequest", "cannot unmarshal a value that is no string")
    if any(not _LABEL_VALUE.match(value) for value in labels.values()):
        raise _invalid(name, "metadata.labels: Invalid value: a valid label must ...")
    size = sum(len(text.encode()) for pair in annotations.items() for text in pair)
    if size > _MOST_ANNOTATIONS:
        raise _invalid(name, "metadata.annotations: Too long: may not be more than 262144 bytes")


def _accepted_spec(name: str, spec: Json) -> Iterator[tuple[str, Any]]:
    for field in ("acquireTime", "renewTime"):
        if spec.get(field) is not None:
            yield field, _micro_time(spec[field])
    if spec.get("holderIdentity") is not None:
        if not isinstance(spec["holderIdentity"], str):
            raise StatusError(400, "BadRequest", "cannot unmarshal into Go struct field LeaseSpec.holderIdentity")
        yield "holderIdentity", spec["holderIdentity"]
    for field, least in (("leaseDurationSeconds", 1), ("leaseTransitions", 0)):
        value = spec.get(field)
        if value is None:
            continue
        if type(value) is not int or not -_INT32 <= value < _INT32:
            raise StatusError(400, "BadRequest", f"cannot unmarshal number {value!r} into {field} of type int32")
        if value < least:
            raise _invalid(name, f"spec.{field}: Invalid value: {value}: must be greater than {least - 1}")
        yield field, value


def _micro_time(text: Any) -> str:
    if not isinstance(text, str) or not _MICRO_TIME.match(text):
        raise StatusError(400, "BadRequest", f'parsing time "{text}" as "2006-01-02T15:04:05.000000Z07:00"')
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise StatusError(400, "BadRequest", f'parsing time "{text}": out of range') from None
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _invalid(name: str, text: str) -> StatusError:
    return StatusError(422, "Invalid", f'Lease.coordination.k8s.io "{name}" is invalid: {text}', name=name)


def _conflict(name: str, text: str) -> StatusError:
    message = f'Operation cannot be fulfilled on leases.coordination.k8s.io "{name}": {text}'
    return StatusError(409, "Conflict", message, name=name)


def _wrong_uid(name: str, wanted: str, found: str) -> StatusError:
    return _conflict(name, f"Precondition failed: UID in precondition: {wanted}, UID in object meta: {found}")
