"""Checks the Promela models with Spin: those that are right hold, those that are broken on purpose are found out."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
MEMORY = 2500
"""Megabytes one check may take."""


@dataclass(frozen=True)
class Configuration:
    """One model, what is switched on in it, and what Spin is to find.

    Attributes:
        model: the file's name.
        switches: macros.
        errors: 0 where it must hold, 1 where Spin must find the way to break it.
        says: what that proves.
    """

    model: str
    switches: tuple[str, ...]
    errors: int
    says: str

    def __str__(self) -> str:
        return " ".join([self.model, *self.switches])


@dataclass(frozen=True)
class Finding:
    """What Spin said."""

    errors: int
    states: int
    seconds: float


def _lease(errors: int, says: str, *switches: str) -> Configuration:
    return Configuration("lease", switches, errors, says)


def _hybrid(errors: int, says: str, *switches: str) -> Configuration:
    return Configuration("hybrid", switches, errors, says)


def _tokens(errors: int, says: str, *switches: str) -> Configuration:
    return Configuration("tokens", switches, errors, says)


CONFIGURATIONS = (
    _lease(0, "nobody is granted a name in which another believes, whatever is lost or late", "END=7", "GRANTS=3"),
    _lease(1, "belief counted from the reply", "BUG_REPLY_ANCHOR"),
    _lease(1, "a server's clock that is stepped, and no margin for it", "BUG_NO_MARGIN"),
    _lease(1, "a renewal by name", "BUG_RENEW_BY_NAME"),
    _lease(1, "a release by name", "BUG_RELEASE_BY_NAME"),
    _lease(1, "a late confirmation that revives", "BUG_REVIVE"),
    _lease(1, "a release that is sent before the holder has stopped", "BUG_STORE_FIRST"),
    _hybrid(0, "fast: a holder that hears of its session's death in time is never overlapped"),
    _hybrid(1, "fast and cut off: the overlap that is not promised away exists", "CUT"),
    _hybrid(0, "strict and cut off: none", "STRICT", "CUT"),
    _hybrid(1, "strict, without the handover delay", "STRICT", "CUT", "DELAY=0"),
    _hybrid(1, "fast, without the handover delay", "DELAY=0"),
    _hybrid(1, "a takeover by the lock alone, of a row that was never tied to it", "BUG_LOCK_ALONE"),
    _hybrid(1, "a frozen holder whose session lives can be succeeded once its row has expired", "FROZEN"),
    _hybrid(0, "it cannot, where both row and lock are demanded", "FROZEN", "BUG_DEMANDS_BOTH"),
    _tokens(0, "tokens rise over releases, cleanups and failovers to a replica that is behind"),
    _tokens(1, "a cleanup without the table's lock", "BUG_NO_LOCK"),
    _tokens(1, "a cleanup that does not raise the floor", "BUG_NO_FLOOR"),
    _tokens(1, "a release that deletes the row", "BUG_DELETE_ON_RELEASE"),
    _tokens(1, "a failover without a new epoch", "BUG_NO_EPOCH"),
    _tokens(1, "an epoch that forgets the timeline, over two failovers", "BUG_FORGETS_THE_TIMELINE"),
)


def check(configuration: Configuration) -> Finding:
    """Let Spin explore one configuration altogether, or until it finds an error, shortest way first."""
    ways = ["-DBFS"] if configuration.errors else ["-DCOLLAPSE"]
    with TemporaryDirectory() as folder:
        switches = [f"-D{switch}" for switch in configuration.switches]
        _run(folder, "spin", *switches, "-a", str(HERE / f"{configuration.model}.pml"))
        _run(folder, "gcc", "-O1", "-w", "-DSAFETY", "-DNOCLAIM", f"-DMEMLIM={MEMORY}", *ways, "-o", "pan", "pan.c")
        said = _run(folder, "./pan", "-m200000", "-E", "-n")
    errors, states = re.search(r"errors: (\d+)", said), re.search(r"(\d+) states, stored", said)
    seconds = re.search(r"elapsed time ([\d.e+-]+)", said)
    assert errors, said
    assert states, said
    assert "max search depth too small" not in said, said
    assert "reached -DMEMLIM" not in said, said
    return Finding(int(errors[1]), int(states[1]), float(seconds[1]) if seconds else 0.0)


def _run(folder: str, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout
