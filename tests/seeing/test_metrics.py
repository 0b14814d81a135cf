"""Metrics: what a process counts, what the exporter says, and what a real Prometheus makes of both."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest, start_http_server

from pglease import BackendUnavailable, Event, MemoryBackend, PGLease
from pglease.contrib.prometheus import LeaseCollector, LeaseMetrics, serve
from tests.support.prometheus import expressions_of_a_dashboard, prometheus
from tests.support.worlds import wait_until

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
RULES = MONITORING / "pglease.rules.yml"


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> LeaseMetrics:
    return LeaseMetrics(registry)


@pytest.fixture
def store() -> MemoryBackend:
    return MemoryBackend()


def play(store: MemoryBackend, metrics: LeaseMetrics) -> None:
    """One of everything that is counted."""
    with PGLease(store.another(), "worker", observers=[metrics]) as leases, PGLease(store.another()) as rival:
        with leases.acquire("import:7", ttl=60) as lease:
            assert lease
            lease.renew()
            assert not leases.try_acquire("import:7")
        assert rival.try_acquire("import:8")
        with leases.acquire("import:8", wait=0.1) as refused:
            assert not refused
        assert leases.try_acquire("scheduler")
        assert rival.force_release("scheduler", 1)
        with pytest.raises(Exception, match="operator ended it"):
            leases.renew("scheduler")


def value(registry: CollectorRegistry, metric: str, **labels: str) -> float | None:
    return registry.get_sample_value(metric, labels)


def test_what_a_process_does_is_counted_by_the_stem_of_the_name(store, registry, metrics):
    play(store, metrics)

    counted = {
        outcome: value(registry, "pglease_acquisitions_total", name="import", outcome=outcome)
        for outcome in ("acquired", "held", "timeout", "error")
    }
    assert counted == {"acquired": 1, "held": 1, "timeout": 1, "error": None}
    assert value(registry, "pglease_acquire_duration_seconds_count", name="import") == 1
    assert value(registry, "pglease_hold_duration_seconds_count", name="import") == 1
    assert value(registry, "pglease_renewals_total", outcome="ok") == 1
    assert value(registry, "pglease_renewals_total", outcome="error") == 0
    assert value(registry, "pglease_leases_lost_total", name="scheduler", reason="forced") == 1
    assert value(registry, "pglease_leader", name="import") == 0
    assert value(registry, "pglease_leader", name="scheduler") == 0


def test_a_renewal_that_was_at_risk_is_late_and_one_without_an_answer_an_error(registry, metrics):
    for kind in ("acquired", "unknown", "at_risk", "renewed", "renewed"):
        metrics.notify(Event(kind, "job", "us", 3, seconds=1.0))

    outcomes = {each: value(registry, "pglease_renewals_total", outcome=each) for each in ("ok", "error", "late")}
    assert outcomes == {"ok": 1, "error": 1, "late": 1}


def test_a_process_leads_while_it_holds_any_lease_of_that_label_and_a_closed_client_lost_nothing(registry, metrics):
    for kind, name, reason in (
        ("acquired", "a:1", None),
        ("acquired", "a:2", None),
        ("lost", "a:1", "closed"),
        ("lost", "a:1", "closed"),
    ):
        metrics.notify(Event(kind, name, "us", 1, reason=reason, seconds=1.0))

    assert value(registry, "pglease_leader", name="a") == 1
    assert value(registry, "pglease_hold_duration_seconds_count", name="a") == 1
    assert value(registry, "pglease_leases_lost_total", name="a", reason="closed") is None
    metrics.notify(Event("released", "a:2", "us", 1, seconds=1.0))
    assert value(registry, "pglease_leader", name="a") == 0


def test_names_may_be_told_otherwise(store, registry):
    metrics = LeaseMetrics(registry, metric_name=lambda name: name.upper())

    play(store, metrics)

    assert value(registry, "pglease_acquisitions_total", name="IMPORT:7", outcome="acquired") == 1


def test_the_collector_says_who_holds_what_and_asks_nobody_when_it_is_registered(store, registry):
    class Asked(MemoryBackend):
        questions = 0

        def list(self, *args, **options):
            Asked.questions += 1
            return super().list(*args, **options)

    backend = Asked(store=store._store)
    with PGLease(backend) as leases, PGLease(store.another(), "holder") as holder:
        registry.register(LeaseCollector(leases))
        assert Asked.questions == 0
        assert holder.try_acquire("import:1", ttl=600)
        assert holder.try_acquire("import:2", ttl=60)

        text = generate_latest(registry).decode()
        assert Asked.questions == 1
        longer = holder.get_lease("import:1")

    assert "pglease_store_up 1.0" in text
    assert 'pglease_leases{state="held"} 2.0' in text
    assert 'pglease_lease_holder_info{holder="holder",name="import"} 1.0' in text
    assert text.count("\npglease_lease_token{") == 1
    assert value(registry, "pglease_lease_holder_info", name="import", holder="holder") is None  # asked anew: all free
    (expiry,) = [line for line in text.splitlines() if line.startswith("pglease_lease_expiry_timestamp_seconds{")]
    assert float(expiry.split()[-1]) == pytest.approx(longer.expires_at.timestamp())


def test_a_store_that_does_not_answer_is_not_up_and_nothing_else_is_said(registry, caplog):
    class Away(MemoryBackend):
        def list(self, *args, **options):
            raise BackendUnavailable("nobody there")

    with PGLease(Away()) as leases:
        registry.register(LeaseCollector(leases))
        text = generate_latest(registry).decode()

    assert "pglease_store_up 0.0" in text
    assert "pglease_leases" not in text
    assert "nobody there" in caplog.text


# -- against the real thing --------------------------------------------------------------------------------------------


@pytest.mark.needs("prometheus")
def test_the_text_passes_promtool(store, registry, metrics):
    play(store, metrics)
    with PGLease(store.another(), "holder") as holder, PGLease(store.another()) as leases:
        assert holder.try_acquire("scheduler")
        registry.register(LeaseCollector(leases))
        text = generate_latest(registry)

    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


@pytest.mark.needs("prometheus")
def test_the_rules_and_the_example_of_a_configuration_pass_promtool():
    for what, file in (("rules", RULES), ("config", MONITORING / "prometheus.yml")):
        checked = subprocess.run(["promtool", "check", what, str(file)], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def expressions_of_the_rules() -> dict[str, str]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


@pytest.fixture
def process(registry: CollectorRegistry) -> Iterator[int]:
    """The port at which a worker's own metrics are scraped."""
    server, thread = start_http_server(0, "127.0.0.1", registry)
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.needs("prometheus")
def test_a_real_prometheus_scrapes_both_answers_every_question_of_ours_and_fires_for_the_first_loss(
    store, registry, metrics, process, tmp_path
):
    with (
        PGLease(store.another(), "holder") as holder,
        PGLease(store.another()) as asking,
        serve(asking, "127.0.0.1", 0) as exporter,
        prometheus(tmp_path, {"pglease": exporter, "worker": process}, RULES) as server,
    ):
        assert holder.try_acquire("report:daily", ttl=600)
        play(store, metrics)
        empty = {"changes", "increase"}  # nothing of the kind has happened between two scrapes

        for expression in expressions_of_a_dashboard((MONITORING / "grafana-dashboard.json").read_text()):
            answered = wait_until(lambda: server.ask(expression) or expression.partition("(")[0] in empty, 120)  # noqa: B023
            assert answered, expression
        for expression in expressions_of_the_rules().values():
            server.ask(expression)
        (held,) = server.ask('pglease_lease_holder_info{name="report"}')
        assert held["metric"]["holder"] == "holder"
        wait_until(lambda: "PgleaseLeaseLost" in server.firing(), 120)

        absent = server.ask(expressions_of_the_rules()["PgleaseNoHolder"])
        assert holder.try_acquire("scheduler", ttl=600)
        assert absent
        wait_until(lambda: not server.ask(expressions_of_the_rules()["PgleaseNoHolder"]), 120)
