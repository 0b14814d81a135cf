"""Metrics for Prometheus: what this process does with leases (`LeaseMetrics`), and who holds what (`LeaseCollector`).

Put `LeaseMetrics` into every process, as an observer. Register `LeaseCollector` in one place for a whole cluster, as
`pglease exporter` does: it asks the store once with every scrape.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from pglease.contrib.metric_names import stem
from pglease.errors import BackendError, MissingDependencyError
from pglease.events import Event, EventKind

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, start_http_server
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError:
    raise MissingDependencyError(
        "metrics need the package prometheus-client: install the extra, pglease[prometheus]"
    ) from None

if TYPE_CHECKING:
    from pglease.client import PGLease
    from pglease.records import Lease

log = logging.getLogger("pglease")

_Hold: TypeAlias = "tuple[str, int | None]"

OUTCOMES: dict[EventKind, str] = {"acquired": "acquired", "busy": "held", "waited": "timeout", "failed": "error"}
_ENDS = frozenset({"lost", "released", "unconfirmed", "transferred"})
_WANTED = {*OUTCOMES, *_ENDS, "renewed", "unknown", "at_risk"}

ACQUIRING = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Seconds it takes to get a lease: a round trip, or a wait."""
HOLDING = (0.01, 0.1, 0.5, 1, 5, 15, 30, 60, 300, 900, 3600, 4 * 3600, 86400)
"""Seconds a lease is held."""


class LeaseMetrics:
    """An observer that counts: `PGLease(..., observers=[LeaseMetrics()])`.

    One object serves any number of clients of a process; a second one for the same registry is refused by it.

    Args:
        registry: where the metrics are registered. Default: prometheus-client's own.
        metric_name: the value of the label `name` for a lease's name; default: the part before its first `:`. Each
            value costs about forty time series.

    Raises:
        ValueError: the registry has these metrics already.
    """

    def __init__(
        self, registry: CollectorRegistry | None = REGISTRY, *, metric_name: Callable[[str], str] = stem
    ) -> None:
        self._label = metric_name
        self._lock = threading.Lock()
        self._late: set[_Hold] = set()
        self._acquisitions = Counter(
            "pglease_acquisitions_total",
            "Attempts to get a lease, by how they ended.",
            ["name", "outcome"],
            registry=registry,
        )
        self._acquiring = Histogram(
            "pglease_acquire_duration_seconds",
            "Seconds until a lease was granted, waiting included.",
            ["name"],
            registry=registry,
            buckets=ACQUIRING,
        )
        self._holding = Histogram(
            "pglease_hold_duration_seconds",
            "Seconds for which a lease was held.",
            ["name"],
            registry=registry,
            buckets=HOLDING,
        )
        self._renewals = Counter(
            "pglease_renewals_total",
            "Renewals: confirmed, without an answer, or confirmed with less than a third of the ttl left.",
            ["outcome"],
            registry=registry,
        )
        self._losses = Counter(
            "pglease_leases_lost_total", "Leases that were lost, by why.", ["name", "reason"], registry=registry
        )
        self._leader = Gauge(
            "pglease_leader", "1 while this process holds the lease, or one of those by that name.", ["name"],
            registry=registry,
        )  # fmt: skip
        self._known: dict[str, _Series] = {}
        self._renewed, self._unknown, self._renewed_late = (
            self._renewals.labels(outcome) for outcome in ("ok", "error", "late")
        )

    @staticmethod
    def wants(kind: EventKind) -> bool:
        """Tell whether events of that `kind` are counted."""
        return kind in _WANTED

    def notify(self, event: Event) -> None:
        """Count one event."""
        kind, hold = event.kind, (event.name, event.fencing_token)
        if kind == "acquired":
            self._begin(hold, event)
        elif kind in _ENDS:
            self._end(hold, event)
        elif kind in OUTCOMES:
            self._of(event.name).outcome(kind).inc()
        elif kind == "at_risk":
            self._late.add(hold)
        elif kind == "renewed":
            (self._renewed_late if hold in self._late else self._renewed).inc()
            self._late.discard(hold)
        elif kind == "unknown":
            self._unknown.inc()

    def _of(self, name: str) -> _Series:
        label = self._label(name)
        return self._known.get(label) or self._known.setdefault(
            label, _Series(label, self._acquisitions, self._acquiring, self._holding, self._leader)
        )

    def _begin(self, hold: _Hold, event: Event) -> None:
        series = self._of(event.name)
        series.outcome("acquired").inc()
        series.acquiring.observe(event.seconds or 0.0)
        with self._lock:  # several clients tell us, each on a thread of its own
            series.held.add(hold)
            series.leader.set(1)

    def _end(self, hold: _Hold, event: Event) -> None:
        series = self._of(event.name)
        with self._lock:
            has_ended_before = hold not in series.held
            series.held.discard(hold)
            series.leader.set(bool(series.held))
        if not has_ended_before:
            series.holding.observe(event.seconds or 0.0)
        self._late.discard(hold)
        if event.kind == "lost" and event.reason != "closed":
            self._losses.labels(series.label, str(event.reason)).inc()


class _Series:
    """What counts for one label, each found once: `labels()` looks for it anew each time, at five times the cost.

    Each appears when there is something to count. And the holds that go by that label.
    """

    def __init__(
        self, label: str, acquisitions: Counter, acquiring: Histogram, holding: Histogram, leader: Gauge
    ) -> None:
        self.label = label
        self.held: set[_Hold] = set()
        self._acquisitions, self._acquiring, self._holding, self._leader = acquisitions, acquiring, holding, leader
        self._outcomes: dict[EventKind, Counter] = {}

    def outcome(self, kind: EventKind) -> Counter:
        """Return what counts attempts that ended so."""
        known = self._outcomes.get(kind)
        if known is None:
            known = self._outcomes[kind] = self._acquisitions.labels(self.label, OUTCOMES[kind])
        return known

    @cached_property
    def acquiring(self) -> Histogram:
        """Seconds until grants."""
        return self._acquiring.labels(self.label)

    @cached_property
    def holding(self) -> Histogram:
        """Seconds of holds."""
        return self._holding.labels(self.label)

    @cached_property
    def leader(self) -> Gauge:
        """Whether there is a hold."""
        return self._leader.labels(self.label)


class LeaseCollector(Collector):
    """Says who holds what, by asking the store once with every scrape.

    Args:
        leases: who asks. A store that does not answer within its `connect_timeout` is `pglease_store_up 0`: keep that
            below Prometheus' `scrape_timeout`.
        prefix: only names that begin with it. Default: all.
        metric_name: as for `LeaseMetrics`. Of several leases with one value, the latest times and the highest token are
            shown.
    """

    def __init__(self, leases: PGLease, prefix: str = "", *, metric_name: Callable[[str], str] = stem) -> None:
        self._leases = leases
        self._prefix = prefix
        self._label = metric_name

    @staticmethod
    def describe() -> Iterable[GaugeMetricFamily]:
        """Say nothing, so that registering asks no store."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Ask the store, and return what it says."""
        up = GaugeMetricFamily("pglease_store_up", "1 when the store answered.")
        try:
            found = self._leases.list_leases(self._prefix)
        except BackendError as error:
            log.warning("no metrics of the store: %s", error)
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        yield up
        yield from self._told(found)

    def _told(self, found: list[Lease]) -> Iterator[GaugeMetricFamily]:
        held = [lease for lease in found if not lease.is_expired()]
        count = GaugeMetricFamily("pglease_leases", "Leases, held or run out without a release.", labels=["state"])
        count.add_metric(["held"], len(held))
        count.add_metric(["expired"], len(found) - len(held))
        yield count
        yield self._latest(
            "pglease_lease_expiry_timestamp_seconds",
            "When the lease ends unless it is renewed, by the store's clock.",
            held,
            lambda lease: lease.expires_at.timestamp(),
        )
        yield self._latest(
            "pglease_lease_acquired_timestamp_seconds",
            "When the lease was acquired, by the store's clock.",
            held,
            lambda lease: lease.acquired_at.timestamp(),
        )
        yield self._latest(
            "pglease_lease_token",
            "The fencing token: each change is a hand-over.",
            found,
            lambda lease: lease.fencing_token,
        )
        holders = GaugeMetricFamily("pglease_lease_holder_info", "Who holds the lease.", labels=["name", "holder"])
        for name, holder in sorted({(self._label(lease.name), lease.owner_id) for lease in held}):
            holders.add_metric([name, holder], 1)
        yield holders

    def _latest(
        self, metric: str, text: str, leases: list[Lease], value: Callable[[Lease], float]
    ) -> GaugeMetricFamily:
        highest: dict[str, float] = {}
        for lease in leases:
            label = self._label(lease.name)
            highest[label] = max(highest.get(label, 0.0), value(lease))
        family = GaugeMetricFamily(metric, text, labels=["name"])
        for label, number in highest.items():
            family.add_metric([label], number)
        return family


@contextmanager
def serve(
    leases: PGLease, host: str, port: int, *, prefix: str = "", metric_name: Callable[[str], str] = stem
) -> Iterator[int]:
    """Answer scrapes for a block, with what `LeaseCollector` says and nothing else; yields the port.

    Args:
        leases: who asks the store.
        host, port: where to listen; port 0 takes a free one.
        prefix, metric_name: as for `LeaseCollector`.
    """
    registry = CollectorRegistry()
    registry.register(LeaseCollector(leases, prefix, metric_name=metric_name))
    server, thread = start_http_server(port, host, registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
