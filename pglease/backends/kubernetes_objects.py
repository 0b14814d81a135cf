"""Lease objects and what they mean. Pure: a row in, an object out, and back.

`spec` is what every tool reads (`kubectl get leases`, client-go): who holds it, since when, when it was last renewed,
for how many whole seconds. The annotations hold what `spec` has no room for: the lease's own name, whose hold it is,
the token, and spans of time to the microsecond. They count only while `spec` is as their writer left it: where another
tool has written since, the hold is that tool's.

A moment of a hold is the moment of its beginning plus a span on somebody's boot clock. Only the beginning is a reading
of a clock that can be set, the server's, and it is for people: no judgement compares it with anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pglease.backends.kubernetes_names import FLOOR, object_name
from pglease.errors import BackendMisconfigured
from pglease.records import Adoption, Lease, LossReason, Request

Json = dict[str, Any]

PROTOCOL = "1"
LABEL = ("app.kubernetes.io/managed-by", "pglease")
_OURS = "pglease/"
_INT32_MAX = 2**31 - 1
_TOKEN_MAX = 2**63 - 1
_FOREIGN_TTL = 15
"""Seconds granted to another tool's hold that names no duration: client-go's default."""
NOTHING = timedelta()
BLUR = timedelta(seconds=1)
"""Two readings of the server's clock may differ by this much: dates of answers are cut to seconds."""
_NEVER = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Row:
    """One lease as its object has it.

    Attributes:
        name: the lease's name.
        owner_id: the label of the present or last holder.
        lease_id: the id of the running hold; None once it was given back, and for another tool's.
        fencing_token: see `Lease`; another tool's hold counts as one.
        transitions: see `Lease`.
        metadata: JSON; empty for none.
        acquired_at: when the hold began, by the server's clock.
        renewed_after: the span from there to the last renewal.
        expires_after: the span from there to the end of the hold.
        written_after: the span from there to the writing of this version.
        foreign: whether the hold is another tool's.
        settled: whether its creator has read the floor of the tokens since it was created.
        version: uid and resourceVersion: every write names both.
        written_at: when that was, by the server's clock.
        rest: what others have put into the object, to be kept.
    """

    name: str
    owner_id: str
    lease_id: str | None
    fencing_token: int
    transitions: int
    metadata: str
    acquired_at: datetime
    renewed_after: timedelta
    expires_after: timedelta
    written_after: timedelta
    foreign: bool = False
    settled: bool = True
    version: tuple[str, str] = ("", "")
    written_at: datetime = _NEVER
    rest: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False)

    def left(self, elapsed: timedelta) -> timedelta:
        """Return what is left of the hold, `elapsed` after this version was written; negative once it is over."""
        return self.expires_after - self.written_after - elapsed

    @property
    def given_back(self) -> bool:
        """Whether its holder, or somebody else, has ended it; it may still have to be waited out."""
        return (self.lease_id is None and not self.foreign) or self.left(NOTHING) <= NOTHING

    def over(self, elapsed: timedelta) -> bool:
        """Tell whether the hold is over."""
        return self.left(elapsed) <= NOTHING

    def held_by(self, lease_id: str, elapsed: timedelta) -> bool:
        """Tell whether it is this hold that is running."""
        return self.lease_id == lease_id and not self.over(elapsed)

    def record(self, elapsed: timedelta) -> Lease:
        """Return the record for those who see it `elapsed` after it was written."""
        return Lease(
            task_name=self.name,
            owner_id=self.owner_id,
            fencing_token=self.fencing_token,
            acquired_at=self.acquired_at,
            heartbeat_at=self.acquired_at + self.renewed_after,
            expires_at=self.acquired_at + self.expires_after,
            transitions=self.transitions,
            seen_at=self.acquired_at + self.written_after + elapsed,
            metadata=json.loads(self.metadata) if self.metadata else {},
            given_back=self.given_back,
        )

    def why_gone(self, lease_id: str) -> LossReason:
        """Return why a hold that is not running is gone."""
        return "expired" if self.lease_id == lease_id else "forced" if self.lease_id is None else "taken"


# -- the next version of a row ----------------------------------------------------------------------------------------


def first_hold(request: Request, token: int, moment: datetime) -> Row:
    """Return the row of a name that has no object yet. It is not settled: see `Row.settled`."""
    return Row(
        name=request.name,
        owner_id=request.owner_id,
        lease_id=request.lease_id,
        fencing_token=token,
        transitions=0,
        metadata=_written(request.metadata),
        acquired_at=moment,
        renewed_after=NOTHING,
        expires_after=timedelta(seconds=request.ttl),
        written_after=NOTHING,
        settled=False,
    )


def next_hold(last: Row, request: Request, floor: int, moment: datetime) -> Row:
    """Return the row of a hold that follows another."""
    token = max(last.fencing_token, floor) + 1
    if token > _TOKEN_MAX:
        raise BackendMisconfigured(f"the fencing token of {last.name!r} is at its end ({last.fencing_token})")
    return replace(
        first_hold(request, token, _at_least(moment, last.acquired_at + last.written_after)),
        transitions=min(last.transitions + 1, _INT32_MAX),
        settled=True,
        version=last.version,
        rest=last.rest,
    )


def _at_least(moment: datetime, known: datetime) -> datetime:
    """Return a moment that is not before one another client wrote: each reads the server's clock to the second.

    What is further ahead was written by a clock that is wrong, and is not followed.
    """
    return known if NOTHING < known - moment <= BLUR else moment


def renewed(row: Row, ttl: float, elapsed: timedelta) -> Row:
    """Return the row after a renewal."""
    now = max(row.written_after + elapsed, row.renewed_after + timedelta.resolution)  # a renewal is seen to be one
    return replace(row, renewed_after=now, expires_after=now + timedelta(seconds=ttl), written_after=now)


def adopted(row: Row, adoption: Adoption, moment: datetime) -> Row:
    """Return the row of the hold that a running one goes on as."""
    request = Request(adoption.name, adoption.owner_id, adoption.next_id, adoption.ttl)
    return replace(next_hold(row, request, 0, moment), metadata=row.metadata)


def described(row: Row, metadata: Mapping[str, Any], elapsed: timedelta) -> Row:
    """Return the row with other metadata, as old as it is."""
    return replace(row, metadata=_written(metadata), written_after=row.written_after + elapsed)


def _written(metadata: Mapping[str, Any]) -> str:
    return json.dumps(dict(metadata), ensure_ascii=False) if metadata else ""


def given_back(row: Row, elapsed: timedelta, min_hold: float = 0.0) -> Row:
    """Return the row after a release: over at once, or at `min_hold`; one that had lapsed keeps its end."""
    now = row.written_after + elapsed
    ends = row.expires_after if row.over(elapsed) else max(now, timedelta(seconds=min_hold))
    return replace(row, lease_id=None, foreign=False, expires_after=ends, written_after=now)


# -- to and from the object -------------------------------------------------------------------------------------------


def as_object(row: Row, namespace: str, moment: datetime) -> Json:
    """Return the body of the write that makes `row` the present version; it names the version it replaces."""
    uid, version = row.version
    kept: Mapping[str, Any] = row.rest.get("metadata", {})
    metadata: Json = {
        **kept,
        "name": object_name(row.name),
        "namespace": namespace,
        "labels": {**kept.get("labels", {}), LABEL[0]: LABEL[1]},
        "annotations": {**kept.get("annotations", {}), **_annotations(row, moment)},
    }
    if uid:
        metadata |= {"uid": uid, "resourceVersion": version}
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": {**row.rest.get("spec", {}), **_spec(row, moment)},
    }


def _spec(row: Row, moment: datetime) -> Json:
    """Return what other tools read. As client-go leaves it: a hold that is over has an empty holder and one second."""
    left = row.left(NOTHING)
    return {
        "holderIdentity": row.owner_id if left > NOTHING else "",
        "leaseDurationSeconds": min(max(1, -(-left // timedelta(seconds=1))), _INT32_MAX),  # whole seconds, up
        "acquireTime": micro_time(row.acquired_at),
        "renewTime": micro_time(moment),
        "leaseTransitions": row.transitions,
    }


def _annotations(row: Row, moment: datetime) -> dict[str, str]:
    facts = {
        "protocol": PROTOCOL,
        "name": row.name,
        "owner": row.owner_id,
        "lease-id": row.lease_id,
        "fencing-token": str(row.fencing_token),
        "metadata": row.metadata or None,
        "renewed-after": _span(row.renewed_after),
        "expires-after": _span(row.expires_after),
        "written-after": _span(row.written_after),
        "written-at": micro_time(moment),
        "unsettled": None if row.settled else "true",
    }
    return {_OURS + fact: value for fact, value in facts.items() if value is not None}


def as_row(found: Mapping[str, Any], name: str) -> Row:
    """Read an object that should be the lease `name`.

    Raises:
        BackendMisconfigured: it is not, or not in a form that we know.
    """
    metadata = found["metadata"]
    ours = _our_annotations(metadata)
    where = f"Lease {metadata['namespace']}/{metadata['name']}"
    if ours.get("name") != name:
        raise BackendMisconfigured(
            f"{where} is not the lease {name!r}: something else made it, or took its annotations away. Delete it once "
            "nobody works under it"
        )
    if ours.get("protocol") != PROTOCOL:
        raise BackendMisconfigured(
            f"{where} has protocol {ours.get('protocol')!r}, this pglease speaks {PROTOCOL!r}: upgrade pglease"
        )
    try:
        row = _row(found, ours)
        json.loads(row.metadata or "{}")
    except (KeyError, ValueError, OverflowError, TypeError):
        raise BackendMisconfigured(f"the annotations of {where} were changed by hand and cannot be read") from None
    return row if _as_left(row, found.get("spec") or {}) else _taken_by_another_tool(row, found)


def named_row(found: Mapping[str, Any]) -> Row | None:
    """Read an object of a list; None for what is no lease of ours."""
    name = _our_annotations(found["metadata"]).get("name")
    if name is None or object_name(name) != found["metadata"]["name"]:
        return None
    return as_row(found, name)


def _our_annotations(metadata: Mapping[str, Any]) -> dict[str, str]:
    annotations: Mapping[str, str] = metadata.get("annotations") or {}
    return {key.removeprefix(_OURS): value for key, value in annotations.items() if key.startswith(_OURS)}


def _row(found: Mapping[str, Any], ours: Mapping[str, str]) -> Row:
    metadata, spec = found["metadata"], found.get("spec") or {}
    written_at = datetime.fromisoformat(ours["written-at"])
    return Row(
        name=ours["name"],
        owner_id=ours["owner"],
        lease_id=ours.get("lease-id"),
        fencing_token=int(ours["fencing-token"]),
        transitions=spec.get("leaseTransitions") or 0,
        metadata=ours.get("metadata", ""),
        acquired_at=_moment(spec.get("acquireTime")) or written_at,
        renewed_after=timedelta(seconds=float(ours["renewed-after"])),
        expires_after=timedelta(seconds=float(ours["expires-after"])),
        written_after=timedelta(seconds=float(ours["written-after"])),
        settled="unsettled" not in ours,
        version=(metadata["uid"], metadata["resourceVersion"]),
        written_at=written_at,
        rest=_of_others(found),
    )


def _of_others(found: Mapping[str, Any]) -> Json:
    """Return what a write of ours leaves as it is. A PUT replaces everything, but for the managed fields."""
    metadata = found["metadata"]
    kept = {field: metadata[field] for field in ("labels", "ownerReferences", "finalizers") if field in metadata}
    annotations = metadata.get("annotations") or {}
    theirs = {key: value for key, value in annotations.items() if not key.startswith(_OURS)}
    if theirs:
        kept["annotations"] = theirs
    spec = found.get("spec") or {}
    fields = ("strategy", "preferredHolder")
    return {"metadata": kept, "spec": {field: spec[field] for field in fields if field in spec}}


def _as_left(row: Row, spec: Mapping[str, Any]) -> bool:
    """Tell whether nobody wrote since we did. Every tool that holds a Lease moves its renewTime."""
    holder = row.owner_id if row.left(NOTHING) > NOTHING else ""
    return (spec.get("holderIdentity") or "", _moment(spec.get("renewTime"))) == (holder, row.written_at)


def _taken_by_another_tool(row: Row, found: Mapping[str, Any]) -> Row:
    spec = found.get("spec") or {}
    renewed_at = _moment(spec.get("renewTime")) or row.written_at
    acquired_at = min(_moment(spec.get("acquireTime")) or renewed_at, renewed_at)
    age = renewed_at - acquired_at
    holder = spec.get("holderIdentity") or ""
    lasts = timedelta(seconds=spec.get("leaseDurationSeconds") or _FOREIGN_TTL) if holder else NOTHING
    return replace(
        row,
        owner_id=holder or "another tool",
        lease_id=None,
        foreign=True,
        fencing_token=row.fencing_token + 1,
        metadata="",
        acquired_at=acquired_at,
        renewed_after=age,
        expires_after=age + lasts,
        written_after=age,
    )


# -- the floor of the tokens ------------------------------------------------------------------------------------------


def floor_of(found: Mapping[str, Any]) -> int:
    """Read the floor: every token of a lease that was deleted is at most this."""
    try:
        return int(_our_annotations(found["metadata"])["floor"])
    except (KeyError, ValueError):
        where = f"{found['metadata']['namespace']}/{FLOOR}"
        raise BackendMisconfigured(
            f"Lease {where} must hold the floor of the tokens in its annotation {_OURS}floor, and does not"
        ) from None


def floor_object(floor: int, namespace: str, found: Mapping[str, Any] | None) -> Json:
    """Return the body of the write that raises the floor."""
    metadata: Json = {"name": FLOOR, "namespace": namespace, "labels": {LABEL[0]: LABEL[1]}}
    if found is not None:
        metadata |= {"uid": found["metadata"]["uid"], "resourceVersion": found["metadata"]["resourceVersion"]}
    metadata["annotations"] = {_OURS + "floor": str(floor)}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {}}


# -- times ------------------------------------------------------------------------------------------------------------


def micro_time(moment: datetime) -> str:
    """Write a moment as Kubernetes wants it: always six digits."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _moment(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def _span(span: timedelta) -> str:
    return f"{span.total_seconds():.6f}"
