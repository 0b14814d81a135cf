"""Traces and measurements, as an SDK of OpenTelemetry receives them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from pglease import BackendUnavailable, Event, MemoryBackend, PGLease
from pglease.contrib.opentelemetry import LeaseTracing


class Instruments:
    """An SDK that keeps what it receives."""

    def __init__(self) -> None:
        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.traces = TracerProvider()
        self.traces.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.observer = LeaseTracing(self.traces, MeterProvider([self.reader]), db_system_name="memory")

    def spans(self):
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def points(self, metric):
        data = self.reader.get_metrics_data()
        found = [each for each in data.resource_metrics[0].scope_metrics[0].metrics if each.name == metric]
        return found[0].data.data_points


@pytest.fixture
def sdk() -> Instruments:
    return Instruments()


def test_an_attempt_and_a_hold_are_spans_below_the_callers_own_with_the_times_they_took(sdk):
    with (
        PGLease(MemoryBackend(), observers=[sdk.observer]) as leases,
        sdk.traces.get_tracer("app").start_as_current_span("request") as request,
        leases.acquire("import:7", ttl=60) as lease,
    ):
        for _ in range(5):
            lease.renew()

    spans = sdk.spans()
    attempt, hold = spans["pglease acquire import"], spans["pglease hold import"]
    assert (attempt.kind, hold.kind) == (SpanKind.CLIENT, SpanKind.INTERNAL)
    for span in (attempt, hold):
        assert span.parent.span_id == request.get_span_context().span_id
        assert span.attributes["pglease.lease.name"] == "import:7"
        assert span.attributes["pglease.lease.token"] == 1
        assert span.attributes["db.system.name"] == "memory"
        assert spans["request"].start_time - 1_000_000 <= span.start_time <= span.end_time
    assert attempt.attributes["pglease.outcome"] == "acquired"
    assert hold.attributes["pglease.outcome"] == "released"
    assert [event.attributes["pglease.renewals"] for event in hold.events] == [1, 2, 4]


def test_a_loss_is_an_error_of_the_hold_and_trouble_one_of_the_attempt(sdk):
    sdk.observer.notify(Event("acquired", "job", "us", 1, seconds=0.1))
    sdk.observer.notify(Event("lost", "job", "us", 1, reason="taken", seconds=2.0))
    sdk.observer.notify(Event("failed", "job", "us", seconds=0.1, error=BackendUnavailable("away")))
    sdk.observer.notify(Event("released", "job", "us", 1, seconds=2.0))

    hold = sdk.spans()["pglease hold job"]
    assert [event.name for event in hold.events] == ["lost"]
    assert (hold.status.status_code, hold.attributes["pglease.outcome"]) == (StatusCode.ERROR, "taken")
    failed = sdk.exporter.get_finished_spans()[-1]
    assert (failed.status.status_code, failed.attributes["error.type"]) == (StatusCode.ERROR, "BackendUnavailable")
    assert 1.9e9 < hold.end_time - hold.start_time < 2.1e9


def test_attempts_and_holds_are_measured_by_the_stem_of_the_name(sdk):
    store = MemoryBackend()
    with PGLease(store, observers=[sdk.observer]) as leases, PGLease(store.another()) as rival:
        assert rival.try_acquire("import:1")
        assert not leases.try_acquire("import:1")
        assert leases.try_acquire("import:2")
        leases.release("import:2")
        assert leases.try_acquire("import:3")
        leases.heartbeat_manager.notices.close(60)

        counted = {
            point.attributes["pglease.outcome"]: point.value for point in sdk.points("pglease.lease.acquisitions")
        }
        (held,) = sdk.points("pglease.lease.held")

    assert counted == {"held": 1, "acquired": 2}
    assert (held.attributes["pglease.lease.name"], held.value) == ("import", 1)


LATER = """
import threading
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pglease import MemoryBackend, PGLease
from pglease.contrib.opentelemetry import LeaseTracing

class Telling(LeaseTracing):
    told = threading.Event()
    def notify(self, event):
        super().notify(event)
        if event.kind == "renewed":
            self.told.set()

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
with PGLease(MemoryBackend(), observers=[Telling()]) as leases:
    with leases.acquire("earlier") as lease:
        lease.renew()
        assert Telling.told.wait(60)
        trace.set_tracer_provider(provider)
    with leases.acquire("later"):
        pass
for span in exporter.get_finished_spans():
    print(span.name, len(span.events))
"""


def test_an_sdk_that_is_set_later_sees_what_ends_from_then_on_from_its_beginning():
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines() == ["pglease hold earlier 1", "pglease acquire later 0", "pglease hold later 0"]


def test_no_span_is_made_where_nobody_would_see_it(monkeypatch):
    observer = LeaseTracing()
    made = []
    monkeypatch.setattr(observer._tracer, "start_span", lambda *args, **_: made.append(args))
    monkeypatch.setattr(trace, "get_tracer_provider", trace.ProxyTracerProvider)

    observer.notify(Event("acquired", "job", "us", 1, seconds=0.1))
    observer.notify(Event("released", "job", "us", 1, seconds=0.1))

    assert made == []


WITHOUT = """
import sys
sys.modules["opentelemetry.sdk"] = None
from pglease import MemoryBackend, PGLease
from pglease.contrib.opentelemetry import LeaseTracing
with PGLease(MemoryBackend(), observers=[LeaseTracing()]) as leases, leases.acquire("job"):
    pass
assert not [name for name in sys.modules if name.startswith("opentelemetry.sdk") and sys.modules[name]]
for blocked, module in (("opentelemetry", "opentelemetry"), ("prometheus_client", "prometheus")):
    for name in [each for each in sys.modules if each.split(".")[0] == blocked or each.startswith("pglease.contrib.")]:
        del sys.modules[name]
    sys.modules[blocked] = None
    try:
        __import__(f"pglease.contrib.{module}")
    except ImportError as error:
        print(type(error).__name__, error)
"""


def test_the_api_alone_is_enough_and_without_it_the_extra_is_named():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)

    assert done.stderr == ""
    otel, prometheus = done.stdout.splitlines()
    assert "MissingDependencyError" in otel
    assert "pglease[otel]" in otel
    assert "pglease[prometheus]" in prometheus
