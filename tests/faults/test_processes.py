"""What can happen to a process that holds a lease, beyond an ordinary end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.needs import FREEZER

HOLDER = """
import os, sys
from pglease import PGLease, clock
leases = PGLease.from_env(owner_id="holder")
lease = leases.wait_for_lease("job", ttl=float(sys.argv[1]))
print(lease.fencing_token, flush=True)
{then}
"""
WAKES = """
sys.stdin.readline()
print(lease.held, flush=True)
lease.lost.wait(30)
print(lease.loss.reason, clock.now(), flush=True)
"""


@pytest.mark.parametrize(
    "death",
    [
        pytest.param("import ctypes; ctypes.string_at(0)", id="segmentation fault"),
        pytest.param("os._exit(3)", id="exit without a word"),
        pytest.param(
            "import resource; resource.setrlimit(resource.RLIMIT_AS, (1, 1)); os.abort()", id="no memory, and abort"
        ),
    ],
)
def test_whatever_a_process_dies_of_its_name_is_free_after_its_ttl(child, rival, measured, death: str) -> None:
    holder = child(HOLDER.format(then="import faulthandler; faulthandler.disable()\n" + death), 1.0)
    token = int(holder.line())
    holder.process.wait(30)
    died = time.monotonic()

    heir = rival.wait_for_lease("job", ttl=60, timeout=30)

    assert heir.fencing_token == token + 1
    measured("a name is free after its holder died", time.monotonic() - died, 1.0 + 0.6)


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A group whose processes the kernel stops all at once."""
    group = FREEZER / f"pglease-{os.getpid()}"
    group.mkdir()
    yield group
    (group / "freezer.state").write_text("THAWED")
    for pid in (group / "cgroup.procs").read_text().split():
        (FREEZER / "cgroup.procs").write_text(pid)
    group.rmdir()


@pytest.mark.needs("freezer")
def test_a_frozen_group_is_succeeded_and_knows_it_when_it_thaws(child, rival, freezer, measured) -> None:
    holder = child(HOLDER.format(then=WAKES), 1.5)
    token = int(holder.line())
    (freezer / "cgroup.procs").write_text(str(holder.process.pid))

    (freezer / "freezer.state").write_text("FROZEN")
    heir = rival.wait_for_lease("job", ttl=60, timeout=30)
    holder.say()
    thawed = time.clock_gettime(time.CLOCK_BOOTTIME)
    (freezer / "freezer.state").write_text("THAWED")

    assert heir.fencing_token == token + 1
    assert holder.line() == "False"
    reason, at = holder.line().split()
    assert reason in {"expired", "unreachable", "taken"}
    measured("a thawed process is told of its loss", float(at) - thawed, 0.05)
    assert heir.held


@pytest.mark.long
def test_a_process_that_may_open_nothing_more_keeps_what_it_has(child, rival) -> None:
    then = """
import resource
open_now = max(int(fd) for fd in os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (open_now, open_now))
sys.stdin.readline()
print(lease.held, flush=True)
sys.stdin.readline()
"""
    holder = child(HOLDER.format(then=then), 2.0)
    holder.line()
    time.sleep(3.0)  # longer than its ttl

    assert rival.try_acquire("job") is False
    assert holder.say().line() == "True"


def test_what_a_holder_starts_inherits_none_of_its_connections(child) -> None:
    then = """
import subprocess
subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False)
"""
    holder = child(HOLDER.format(then=then), 60.0)
    holder.line()

    inherited = holder.rest()

    assert len(inherited) > 2  # it could be listed
    assert [line for line in inherited if "socket" in line] == []
