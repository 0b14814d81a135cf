"""What the pages show, as text and numbers: made of what the store said, and of nothing else.

Two of them are equal when they tell the same facts. How long something takes so far is not compared: browsers count on
by themselves, and a page is sent again only when there is news.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from pglease import timeline
from pglease.cli import printing
from pglease.records import Lease, Tenure
from pglease.web.lookout import View

ROWS = 500
"""So many leases are shown at most; the search finds the others."""

State = Literal["held", "late", "ran out", "free"]
SHOWN: dict[str, tuple[State, ...]] = {
    "all": ("held", "late", "ran out", "free"),
    "held": ("held", "late"),
    "late": ("late",),
    "free": ("ran out", "free"),
}
"""What can be asked for, and the states that answer to it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One lease.

    Attributes:
        state: `late` where a renewal is overdue; `ran out` where a hold ended without being given back.
        since, renewed, left: seconds, at the look.
        ttl: seconds that the last renewal asked for.
        queue: labels of those who queue.
    """

    name: str
    state: State
    holder: str
    token: int
    acquired_at: datetime
    renewed_at: datetime
    expires_at: datetime
    transitions: int
    metadata: str
    queue: Sequence[str]
    since: float = field(compare=False)
    renewed: float = field(compare=False)
    left: float = field(compare=False)

    @property
    def is_held(self) -> bool:
        """Whether somebody holds it."""
        return self.state in {"held", "late"}

    @property
    def ttl(self) -> float:
        """Seconds that the last renewal asked for."""
        return max(0.001, (self.expires_at - self.renewed_at).total_seconds())


@dataclass(frozen=True, slots=True)
class Status:
    """How the store is.

    Attributes:
        trouble: why it does not answer; empty when it does.
        stale_since: its clock at its last answer, while it does not answer.
        notes: what could not be read.
    """

    trouble: str
    stale_since: datetime | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Overview:
    """The first page.

    Attributes:
        rows: of the leases that were asked for, as many as are shown.
        more: how many there are beside them.
        held, late, ran_out, known: of all leases, asked for or not.
        picture: who held them, and when, as SVG.
    """

    status: Status
    rows: Sequence[Row]
    more: int
    held: int
    late: int
    ran_out: int
    known: int
    picture: str = field(compare=False)


@dataclass(frozen=True, slots=True)
class Record:
    """The page of one lease.

    Attributes:
        row: None while the store does not know the name.
        tenures: its last holds, the present one first.
    """

    status: Status
    name: str
    row: Row | None
    tenures: Sequence[Tenure] = field(default=(), compare=False)
    picture: str = field(default="", compare=False)


def overview(view: View, search: str, shown: str) -> Overview:
    """Return the first page.

    Args:
        view: what the store said.
        search: text that a lease's name, holder or metadata contains, in whatever case.
        shown: one of `SHOWN`.
    """
    rows = [_row(lease, view.queues.get(lease.name, ())) for lease in view.leases.values()]
    wanted = [row for row in rows if row.state in SHOWN[shown] and _contains(row, search.casefold())]
    wanted.sort(key=lambda row: (not row.is_held, row.name))
    states = [row.state for row in rows]
    names = {row.name for row in wanted}
    drawn = [_up_to(view.seen_at, tenure) for tenure in view.tenures if tenure.name in names]
    late = states.count("late")
    return Overview(
        _status(view),
        wanted[:ROWS],
        len(wanted[ROWS:]),
        states.count("held") + late,
        late,
        states.count("ran out"),
        len(rows),
        timeline.svg(drawn),
    )


def record(view: View, name: str, tenures: Sequence[Tenure]) -> Record:
    """Return the page of one lease. `tenures` are its last holds, in any order."""
    lease = view.leases.get(name)
    if lease is None:
        return Record(_status(view), name, None)
    told = sorted((_up_to(lease.seen_at, each) for each in tenures), key=lambda each: each.acquired_at, reverse=True)
    picture = timeline.svg(told, title=f"Who held {name}, and when")
    return Record(_status(view), name, _row(lease, view.queues.get(name, ())), told, picture)


def _row(lease: Lease, queue: Sequence[str]) -> Row:
    written = json.dumps(dict(lease.metadata), ensure_ascii=False, indent=2) if lease.metadata else ""
    return Row(
        lease.name,
        _state(lease),
        lease.owner_id,
        lease.fencing_token,
        lease.acquired_at,
        lease.renewed_at,
        lease.expires_at,
        lease.transitions,
        "\n".join(map(printing.visible, written.split("\n"))),
        tuple(queue),
        since=(lease.seen_at - lease.acquired_at).total_seconds(),
        renewed=(lease.seen_at - lease.renewed_at).total_seconds(),
        left=lease.time_remaining(),
    )


def _state(lease: Lease) -> State:
    if lease.is_expired():
        return "free" if lease.given_back else "ran out"
    return "late" if printing.is_late(lease) else "held"


def _status(view: View) -> Status:
    return Status(view.trouble, view.seen_at if view.trouble else None, view.notes)


def _contains(row: Row, text: str) -> bool:
    return any(text in each.casefold() for each in (row.name, row.holder, row.metadata, *row.queue))


def _up_to(now: datetime | None, tenure: Tenure) -> Tenure:
    """Let a hold that still runs reach up to the last look: the history itself is read at changes alone."""
    return tenure if now is None or tenure.ended_at is not None else replace(tenure, seen_at=now)
