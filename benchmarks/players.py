"""Other libraries, each in a virtual environment of its own below `.venv/players`, and one way to talk to all of them.

A player is a process that obeys lines: `take` and `release` answer with the time when it was done, `wait` answers when
the lease is there. All on CLOCK_MONOTONIC, which is the same in every process of a machine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

HOMES = Path(__file__).parents[1] / ".venv" / "players"

SYNC = """
import sys, time
from pglease import PGLease
client = PGLease(sys.argv[1])
how = {"fair": True} if sys.argv[2] == "fair" else {}
def wait():
    client.wait_for_lease("turns", ttl=60, timeout=600, **how)
verbs = {"take": wait, "wait": wait, "release": lambda: client.release("turns")}
for line in sys.stdin:
    verbs[line.strip()]()
    print(time.monotonic(), flush=True)
client.close()
"""

SKIPPING = """
import sys, time
from pglease import PGLease
client = PGLease(sys.argv[1])
client.get_lease("tick")
print(time.monotonic(), flush=True)
for tick in sys.stdin:
    time.sleep(max(0.0, float(tick) - time.monotonic()))
    began = time.monotonic()
    won = client.try_acquire("tick", ttl=60)
    print(-1.0 if won else time.monotonic() - began, flush=True)
    if won:
        time.sleep(0.5)
        client.release("tick")
client.close()
"""

GRELMICRO = """
import asyncio, sys, time
from grelmicro.coordination import Lock
from grelmicro.coordination.postgres import PostgresLockAdapter
from grelmicro.providers.postgres import PostgresProvider
async def main():
    async with PostgresProvider(sys.argv[1]) as provider, PostgresLockAdapter(provider=provider) as adapter:
        lock = Lock("turns", backend=adapter, worker=sys.argv[2])
        verbs = {"take": lock.acquire, "wait": lock.acquire, "release": lock.release}
        while line := await asyncio.to_thread(sys.stdin.readline):
            await verbs[line.strip()]()
            print(time.monotonic(), flush=True)
asyncio.run(main())
"""


class Player:
    """One process of some library."""

    def __init__(self, python: str, script: str, dsn: str, name: str) -> None:
        self._process = subprocess.Popen(
            [python, "-P", "-c", script, dsn, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self, verb: str) -> None:
        """Send an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(verb + "\n")
        self._process.stdin.flush()

    def done(self) -> float:
        """Return when the order was carried out."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a player has ended with {self._process.wait()}")
        return float(line)

    def do(self, verb: str) -> float:
        """Send an order and wait for it."""
        self.begin(verb)
        return self.done()

    def kill(self) -> None:
        """End it as the kernel does."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()


def installed(name: str, *requirements: str) -> tuple[str, str]:
    """Return interpreter and version of a released package, in an environment that is made for it if need be."""
    home = HOMES / name
    python = str(home / "bin" / "python")
    if not home.exists():
        subprocess.run([_newest(), "-m", "venv", str(home)], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *requirements], check=True)
    asked = [python, "-P", "-c", f"import importlib.metadata as m; print(m.version({name!r}))"]
    return python, subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


def _newest() -> str:
    """Return the newest interpreter: on the path, or beside ours, as pyenv keeps them."""
    beside = Path(sys.base_prefix).parent.glob("3.*/bin/python3")
    named = (shutil.which(f"python3.{minor}") for minor in range(14, 10, -1))
    found = {version: python for python in (*beside, *named) if python and (version := _version(str(python)))}
    return str(found[max(found)]) if found else sys.executable


def _version(python: str) -> tuple[int, ...] | None:
    answer = subprocess.run(
        [python, "-c", "import sys; print(*sys.version_info[:3])"], capture_output=True, text=True, check=False
    )
    return None if answer.returncode else tuple(map(int, answer.stdout.split()))
