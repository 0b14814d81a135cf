"""Other libraries: where they come from, what they promise, and one way to talk to all of them.

Each is installed from the registry into an environment of its own below `.venv/peers`, and runs as a process of its
own: `player.py`, which says to each library what its own documentation says.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pglease.testing.local_postgres import LocalPostgres

HOMES = Path(__file__).parents[1] / ".venv" / "peers"
PLAYER = Path(__file__).with_name("player.py")

LEASE = "a lease: lapses by itself"
SESSION = "a lock of a session: no ttl, no token, nothing written"


@dataclass(frozen=True)
class Peer:
    """One library at its own work.

    Attributes:
        key: its function in `player.py`.
        title: what people call it.
        store: `postgres` or `redis`.
        guarantee: what it promises.
        requirements: what pip installs; the first is the library.
        newest: whether the newest interpreter of this machine is taken; else ours.
        ours: whether it is this library, from this tree; `requirements` are what it needs.
        asynchronous: whether its verbs are awaited.
        period: seconds between two looks of one that waits.
    """

    key: str
    title: str
    store: str
    guarantee: str
    requirements: tuple[str, ...] = ()
    newest: bool = False
    ours: bool = False
    asynchronous: bool = False
    period: float = 0.1

    @property
    def home(self) -> Path:
        """Its environment."""
        return HOMES / ("ours" if self.ours else self.key)

    @property
    def python(self) -> str:
        """The interpreter that has it."""
        return str(self.home / "bin" / "python") if self.requirements else sys.executable

    @property
    def versioned(self) -> str:
        """Its title and its version."""
        mark = self.home / "version.txt"
        return f"{self.title} {mark.read_text()}" if self.requirements and mark.exists() else self.title

    @property
    def distribution(self) -> str:
        """The name in the registry."""
        return self.requirements[0].split("[")[0].split("=")[0].split(">")[0]


OURS = Peer("ours", "pglease", "postgres", LEASE)
OURS_ASYNC = Peer("ours_async", "pglease, async", "postgres", LEASE, asynchronous=True)
OURS_ASYNC_NEWEST = Peer(
    "ours_async",
    "pglease, async",
    "postgres",
    LEASE,
    ("psycopg[binary]", "psycopg-pool", "tenacity", "durationpy"),
    newest=True,
    ours=True,
    asynchronous=True,
)
OURS_ON_REDIS = Peer("ours", "pglease", "redis", LEASE)
BARE = Peer("bare", "bare psycopg", "postgres", LEASE)

_GRELMICRO = ("grelmicro", "asyncpg", "redis", "pydantic-settings")
ALL = (
    Peer("pglease_0_0_4", "pglease", "postgres", LEASE, ("pglease==0.0.4", "psycopg2-binary"), period=5.0),
    Peer("grelmicro_0_20", "grelmicro", "postgres", LEASE, ("grelmicro==0.20.0", *_GRELMICRO[1:]), asynchronous=True),
    Peer("grelmicro", "grelmicro", "postgres", LEASE, _GRELMICRO, newest=True, asynchronous=True),
    Peer("mithril", "mithril-locks", "postgres", LEASE, ("mithril-locks[postgres]",)),
    Peer("dislock", "dislock", "postgres", LEASE, ("dislock",)),
    Peer(
        "postgresql_lock", "postgresql-lock", "postgres", SESSION, ("postgresql-lock", "psycopg[binary]"), newest=True
    ),
    Peer("sqlalchemy_dlock", "sqlalchemy-dlock", "postgres", SESSION, ("sqlalchemy-dlock", "psycopg[binary]")),
    Peer("pals", "pals", "postgres", SESSION, ("pals", "psycopg[binary]")),
    Peer("django_pglock", "django-pglock", "postgres", SESSION, ("django-pglock", "psycopg[binary]")),
    Peer("redis_py", "redis-py's Lock", "redis", LEASE, ("redis",)),
    Peer("python_redis_lock", "python-redis-lock", "redis", LEASE, ("python-redis-lock", "redis")),
    Peer("grelmicro_0_20", "grelmicro", "redis", LEASE, ("grelmicro==0.20.0", *_GRELMICRO[1:]), asynchronous=True),
    Peer("grelmicro", "grelmicro", "redis", LEASE, _GRELMICRO, newest=True, asynchronous=True),
    Peer("mithril", "mithril-locks", "redis", LEASE, ("mithril-locks[postgres]",)),
)
LEFT_OUT = (
    "procrastinate: its lock is a column of a job, taken by fetching the job and given back by finishing it; without a "
    "job there is nothing to acquire"
)


def installed(wanted: Iterable[Peer]) -> tuple[list[Peer], list[str]]:
    """Return the peers that could be installed, and why not the others."""
    there, missing = [], [LEFT_OUT]
    for peer in wanted:
        trouble = _install(peer)
        if trouble is None:
            there.append(peer)
        else:
            missing.append(f"{peer.title} on {peer.store}: {trouble}")
    return there, missing


@functools.cache
def _install(peer: Peer) -> str | None:
    """Make its environment, if need be; return what went wrong. A failure is tried again with the next run."""
    mark = peer.home / "version.txt"
    if mark.exists():
        return None
    python = _newest() if peer.newest else sys.executable
    shutil.rmtree(peer.home, ignore_errors=True)
    for command in (
        [python, "-m", "venv", str(peer.home)],
        [peer.python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *peer.requirements],
    ):
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode:
            said = (answer.stderr.strip() or answer.stdout.strip() or "no word").splitlines()
            return f"not installed: {said[-1]}"
    asked = f"import importlib.metadata as m, sys; print(m.version({peer.distribution!r}), end='')"
    version = subprocess.run([peer.python, "-P", "-c", asked], capture_output=True, text=True, check=True).stdout
    major, minor = _version(peer.python) or (0, 0)
    written = "" if peer.ours else version
    mark.write_text(f"{written} (Python {major}.{minor})".strip() if peer.newest else written)
    return None


def _newest() -> str:
    """Return the newest interpreter: on the path, or beside ours, as pyenv keeps them."""
    beside = Path(sys.base_prefix).parent.glob("3.*/bin/python3")
    named = (shutil.which(f"python3.{minor}") for minor in range(14, 10, -1))
    found = {version: str(each) for each in (*beside, *named) if each and (version := _version(str(each)))}
    return found[max(found)] if found else sys.executable


def _version(python: str) -> tuple[int, int] | None:
    asked = [python, "-c", "import sys; print(*sys.version_info[:2])"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    if answer.returncode:
        return None
    major, minor = answer.stdout.split()
    return int(major), int(minor)


def database(server: LocalPostgres, name: str) -> str:
    """Return the DSN of a database, made if need be: libraries have tables of the same name."""
    if not server.execute(f"SELECT 1 FROM pg_database WHERE datname = '{name}'"):
        server.execute(f"CREATE DATABASE {name}")
    return server.url(name)


def playing(life: ExitStack, sides: Sequence[Peer], addresses: Sequence[str]) -> tuple[list[Player], list[str]]:
    """Start a process of each; return those that did one acquire and release, and what the others died of."""
    players, missing = [], []
    for peer, address in zip(sides, addresses, strict=True):
        player = life.enter_context(Player(peer, address))
        try:
            player.pairs(1)
        except RuntimeError as error:
            missing.append(str(error))
        else:
            players.append(player)
    return players, missing


class Player:
    """One process of some library."""

    def __init__(self, peer: Peer, address: str) -> None:
        self.peer = peer
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        # Our own need what is beside us; the others must not find our pglease in place of theirs.
        where = {"PYTHONPATH": str(PLAYER.parents[1])} if peer.ours or not peer.requirements else {}
        self._process = subprocess.Popen(
            [peer.python, "-P", str(PLAYER), peer.key, address],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True,
            cwd=peer.home if peer.requirements else None,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | where,
        )  # fmt: skip

    def begin(self, *order: object) -> None:
        """Send an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def done(self) -> Any:
        """Return the answer to the order: for `take` and `release`, when it was carried out."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._said.seek(0)
            words = self._said.read().decode(errors="replace").strip().splitlines() or ["without a word"]
            raise RuntimeError(f"{self.peer.versioned} on {self.peer.store} has ended: {words[-1]}")
        return json.loads(line)

    def do(self, *order: object) -> Any:
        """Send an order and wait for it."""
        self.begin(*order)
        return self.done()

    def pairs(self, rounds: int) -> list[float]:
        """Let it acquire and release so often; return the seconds of each."""
        seconds: list[float] = self.do("pairs", rounds)
        return seconds

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
        self._said.close()
