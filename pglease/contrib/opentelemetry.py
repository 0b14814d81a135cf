"""Traces and metrics through `opentelemetry-api` alone: without an SDK it does nothing, and costs next to nothing.

Spans are made when they end, with the times at which they began: an attempt and a hold are told of by events that know
how long they took. They are children of the span in which the lease was asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pglease import clock
from pglease.contrib.metric_names import stem
from pglease.errors import MissingDependencyError
from pglease.events import Event, EventKind

try:
    from opentelemetry import metrics, trace
    from opentelemetry.trace import SpanKind, Status, StatusCode
except ImportError:
    raise MissingDependencyError(
        "traces need the package opentelemetry-api: install the extra, pglease[otel]"
    ) from None

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, TracerProvider
    from opentelemetry.util.types import Attributes

OUTCOMES: dict[EventKind, str] = {"acquired": "acquired", "busy": "held", "waited": "timeout", "failed": "error"}
_ENDS = frozenset({"lost", "released", "unconfirmed", "transferred"})
_NOTED = frozenset({"renewed", "unknown", "at_risk"})
_WANTED = {*OUTCOMES, *_ENDS, *_NOTED}
_OWN = "pglease"


class LeaseTracing:
    """An observer that traces and measures: `PGLease(..., observers=[LeaseTracing()])`.

    Spans: `pglease acquire {name}` (CLIENT) for each attempt, `pglease hold {name}` (INTERNAL) for each hold, with
    events for its loss and for its 1st, 2nd, 4th, 8th… renewal. Instruments: `pglease.lease.acquisitions`,
    `pglease.lease.acquire.duration`, `pglease.lease.held`. What the store is asked is traced by the driver's own
    instrumentation.

    Args:
        tracer_provider, meter_provider: where spans and measurements go. Default: the global ones.
        metric_name: the value of `pglease.lease.name` in measurements, and what stands in the spans' names, for a
            lease's name; default: the part before its first `:`. Attributes of spans have the whole name.
        db_system_name: the value of `db.system.name`, as "postgresql". Default None: it is left out.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        *,
        metric_name: Callable[[str], str] = stem,
        db_system_name: str | None = None,
    ) -> None:
        self._label = metric_name
        self._common = {} if db_system_name is None else {"db.system.name": db_system_name}
        self._is_traced = tracer_provider is not None
        self._tracer = trace.get_tracer(_OWN, tracer_provider=tracer_provider)
        meter = metrics.get_meter(_OWN, meter_provider=meter_provider)
        self._acquisitions = meter.create_counter(
            "pglease.lease.acquisitions", unit="{attempt}", description="Attempts to get a lease."
        )
        self._acquiring = meter.create_histogram(
            "pglease.lease.acquire.duration", unit="s", description="Seconds until an attempt ended."
        )
        self._held = meter.create_up_down_counter(
            "pglease.lease.held", unit="{lease}", description="Leases that this process holds."
        )
        # Several clients tell us, each on a thread of its own; each use is one step of the dictionary's own.
        self._notes: dict[tuple[str, int | None], _Notes] = {}

    @staticmethod
    def wants(kind: EventKind) -> bool:
        """Tell whether events of that `kind` are traced or measured."""
        return kind in _WANTED

    def notify(self, event: Event) -> None:
        """Make a span, an event of a span or a measurement of it."""
        if event.kind in OUTCOMES:
            self._attempted(event)
        elif event.kind in _ENDS:
            self._ended(event)
        elif (notes := self._notes.get((event.name, event.fencing_token))) is not None:  # else it has ended before
            notes.add(event)

    def _attempted(self, event: Event) -> None:
        label, outcome = self._label(event.name), OUTCOMES[event.kind]
        measured = _measured(label, outcome)
        if event.error is not None:
            measured = {**measured, **_error(event)}
        self._acquisitions.add(1, measured)
        self._acquiring.record(event.seconds or 0.0, measured)
        if self._is_watched():
            self._trace_attempt(event, label, outcome)
        if event.kind == "acquired":
            self._notes[event.name, event.fencing_token] = _Notes()
            self._held.add(1, _named(label))

    def _ended(self, event: Event) -> None:
        notes = self._notes.pop((event.name, event.fencing_token), None)
        if notes is None:  # it has ended before
            return
        label = self._label(event.name)
        if self._is_watched():
            self._trace_hold(event, label, notes)
        self._held.add(-1, _named(label))

    def _is_watched(self) -> bool:
        """Tell whether a span is seen by anybody: not before there is an SDK, which may be set at any time, and once.

        A span that nobody sees takes longer to make than all the rest of us.
        """
        if not self._is_traced:
            self._is_traced = not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
        return self._is_traced

    def _trace_attempt(self, event: Event, label: str, outcome: str) -> None:
        ended = _wall(event.at)
        span = self._span(f"pglease acquire {label}", SpanKind.CLIENT, event, outcome, ended)
        if event.kind == "failed":
            span.set_status(Status(StatusCode.ERROR, str(event.error or "interrupted")))
        span.end(ended)

    def _trace_hold(self, event: Event, label: str, notes: _Notes) -> None:
        outcome, ended = event.reason or event.kind, _wall(event.at)
        span = self._span(f"pglease hold {label}", SpanKind.INTERNAL, event, outcome, ended)
        for kind, at, attributes in notes.taken:
            span.add_event(kind, attributes, timestamp=_wall(at))
        if event.kind == "lost":
            span.add_event("lost", {"pglease.outcome": outcome}, timestamp=ended)
            span.set_status(Status(StatusCode.ERROR, outcome))
        span.end(ended)

    def _span(self, name: str, kind: SpanKind, event: Event, outcome: str, ended: int) -> Span:
        """Begin a span, in the past, that `event` ended."""
        attributes: dict[str, Any] = {
            "pglease.lease.name": event.name,
            "pglease.outcome": outcome,
            **self._common,
            **_error(event),
        }
        if event.fencing_token is not None:
            attributes["pglease.lease.token"] = event.fencing_token
        began = ended - int((event.seconds or 0.0) * 1e9)
        return self._tracer.start_span(name, kind=kind, attributes=attributes, start_time=began)


class _Notes:
    """What happened to one hold while it ran."""

    __slots__ = ("_renewals", "taken")

    def __init__(self) -> None:
        self.taken: list[tuple[str, float, Attributes]] = []
        self._renewals = 0

    def add(self, event: Event) -> None:
        """Keep it, or a few of many."""
        if event.kind == "renewed":
            self._renewals += 1
            if self._renewals & (self._renewals - 1) == 0:
                self.taken.append((event.kind, event.at, {"pglease.renewals": self._renewals}))
        elif len(self.taken) < 64:
            self.taken.append((event.kind, event.at, _error(event)))


@lru_cache(maxsize=256)
def _named(label: str) -> dict[str, Any]:
    """Return the attributes of a measurement; made once for each label, and changed by nobody."""
    return {"pglease.lease.name": label}


@lru_cache(maxsize=256)
def _measured(label: str, outcome: str) -> dict[str, Any]:
    """Return those of an attempt, in the same way."""
    return {**_named(label), "pglease.outcome": outcome}


def _error(event: Event) -> dict[str, str]:
    return {} if event.error is None else {"error.type": type(event.error).__name__}


def _wall(at: float) -> int:
    """Return a moment on the boot clock in nanoseconds since 1970."""
    return time.time_ns() - int((clock.now() - at) * 1e9)
