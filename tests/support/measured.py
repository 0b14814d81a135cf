"""`measured(what, seconds, promised)`: what a test measured beside what is promised; the end of the run lists them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

MEASURED = "measured"
"""The key of the report property."""
SLACK = 10.0
"""Seconds by which a machine that has other things to do may be late."""


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[[str, float, float], None]:
    """Return what notes a figure, in seconds; it must not exceed what is promised and some slack."""

    def note(what: str, seconds: float, promised: float) -> None:
        request.node.user_properties.append((MEASURED, (what, seconds, promised)))
        assert seconds <= promised + SLACK, f"{what}: {seconds:.3f} s, and {promised:g} s are promised"

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what was measured."""
    lines = []
    for report in terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", []):
        for name, value in getattr(report, "user_properties", ()) if report.when == "call" else ():
            if name == MEASURED:
                what, seconds, promised = value
                lines.append(f"{what}: {seconds:.3f} s, promised {promised:g} s")
    if lines:
        terminalreporter.section("measured against promised")
        for line in sorted(lines):
            terminalreporter.line(line)
