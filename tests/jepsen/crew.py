"""The processes of a run: started, killed, stopped, brought to rest."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Self

from tests.jepsen.worker import Orders

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 90.0
"""Seconds in which a worker has come to rest, whatever it was doing."""


class Crew:
    """So many workers at a time; a killed one is succeeded by another, under a name of its own."""

    def __init__(self, size: int, names: list[str], orders: Callable[[str], Orders]) -> None:
        """Describe `size` processes that follow `orders(process)`, about leases called `names`."""
        self._orders = orders
        self._size = size
        self._lock = threading.Lock()
        self._born = 0
        self._busy: set[str] = set()
        self.names = names
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Self:
        for _ in range(self._size):
            self._spawn()
        for name, process in self.processes.items():
            heard = _hear(process)
            assert heard == "ready", f"{name} said {heard!r}: {self.errors()}"
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    stream and stream.close()

    def _spawn(self) -> None:
        self._born += 1
        name = f"p{self._born}"
        orders = self._orders(name)
        with (Path(orders.folder) / f"{name}.err").open("w") as errors:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "tests.jepsen.worker", json.dumps(asdict(orders))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
            )

    def choose(self, rng: random.Random, preferred: list[str]) -> str:
        """Return a process that nothing is being done to; one of the preferred, if they live."""
        with self._lock:
            idle = self.processes.keys() - self._busy
            return rng.choice(sorted(idle & set(preferred)) or sorted(idle) or sorted(self.processes))

    def kill(self, name: str) -> None:
        """SIGKILL it, and start another in its place."""
        with self._lock:
            process = self.processes.pop(name, None)
            if process is None:
                return
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    stream and stream.close()
            self._spawn()

    def signal(self, name: str, signum: int) -> None:
        """Send it a signal, if it is ready for one."""
        with self._lock:
            process = self.processes.get(name)
            if process is not None and process.poll() is None and self._is_ready(name):
                process.send_signal(signum)

    def _is_ready(self, name: str) -> bool:
        return (Path(self._orders(name).folder) / f"{name}.before").exists()

    @contextlib.contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """SIGSTOP it for as long as the block runs."""
        with self._lock:
            self._busy.add(name)
            process = self.processes.get(name)
        try:
            if process is not None:
                process.send_signal(signal.SIGSTOP)
            yield
        finally:
            with self._lock:
                self._busy.discard(name)
            if process is not None and process.poll() is None:
                os.kill(process.pid, signal.SIGCONT)

    def rest(self) -> None:
        """Have everybody stop taking leases; return when they have."""
        for process in self.processes.values():
            _tell(process)
        for name, process in self.processes.items():
            heard = _hear(process)
            if heard == "ready":  # it was born late
                heard = _hear(process)
            assert heard == "at rest", f"{name} said {heard!r}: {self.errors()}"

    def end(self) -> None:
        """Have everybody end."""
        for process in self.processes.values():
            _tell(process)
        for process in self.processes.values():
            process.wait(PATIENCE)

    def errors(self) -> str:
        """Return what the living wrote to standard error, but for the library's own log."""
        folder = Path(self._orders("p0").folder)
        texts = [(folder / f"{name}.err").read_text() for name in self.processes]
        return "\n".join(text for text in texts if "Traceback" in text)[-3000:]


def _tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write("\n")
        process.stdin.flush()


def _hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    timer = threading.Timer(PATIENCE, process.kill)
    timer.start()
    try:
        return process.stdout.readline().strip()
    finally:
        timer.cancel()
