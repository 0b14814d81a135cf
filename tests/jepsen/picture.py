"""What a run looked like: who was entitled to act under which lease, and when."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from pglease import Tenure, timeline
from pglease.records import Ending
from pglease.testing.histories import Belief, History

_BOOT = datetime(2000, 1, 1, tzinfo=UTC)


def picture(history: History, title: str) -> str:
    """Draw what the processes believed. An overlap in a row is two holders at a time."""
    return timeline.svg(list(_tenures(history)), title=title)


def _tenures(history: History) -> Iterator[Tenure]:
    released = {op.key.removesuffix(":release") for op in history.ops if op.verb == "release" and op.outcome == "ok"}
    reasons = {told.hold: told.reason for told in history.told}
    beliefs = history.beliefs()
    end = max((belief.ends for belief in beliefs), default=0.0)
    for belief in beliefs:
        yield Tenure(
            name=belief.name,
            owner_id=belief.process,
            fencing_token=belief.token,
            acquired_at=_at(belief.began),
            ended_at=_at(belief.ends),
            ending=_ending(belief, history.deaths, reasons.get(belief.hold), released=belief.hold in released),
            seen_at=_at(end),
        )


def _ending(belief: Belief, deaths: dict[str, float], reason: str | None, *, released: bool) -> Ending:
    if deaths.get(belief.process) == belief.ends:
        return "died"
    if reason is not None:
        return "forced" if reason == "forced" else "died" if reason == "session_died" else "expired"
    return "released" if released else "expired"


def _at(seconds: float) -> datetime:
    return _BOOT + timedelta(seconds=seconds)
