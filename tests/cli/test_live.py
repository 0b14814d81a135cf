"""`watch` on a terminal: a table that follows what happens, the window and a store that comes and goes."""

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time

import pytest

from pglease import PGLease
from tests.cli.conftest import PGLEASE

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def plain(shown):
    """What was shown, without colours; a new frame begins on a new line."""
    return CODES.sub("", shown.replace("\x1b[H", "\n"))


class Terminal:
    """A terminal of some size with `watch` on it."""

    def __init__(self, environment, *arguments):
        self._main, other = pty.openpty()
        self.resize(100, 30)
        self.process = subprocess.Popen(
            [*PGLEASE, "watch", *arguments],
            env={**{k: v for k, v in environment.items() if k not in {"COLUMNS", "LINES"}}, "TERM": "xterm-256color"},
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
        )
        os.close(other)
        self.shown = ""

    def resize(self, columns, rows):
        fcntl.ioctl(self._main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait_for(self, *texts, seconds=60.0):
        """Wait until all of `texts` were drawn after the last wait."""
        deadline = time.monotonic() + seconds
        while not all(text in plain(self.shown) for text in texts):
            left = deadline - time.monotonic()
            assert left > 0, f"{texts} were not shown: {self.shown[-3000:]!r}"
            self._read(left)
        shown, self.shown = plain(self.shown), ""
        return shown

    def _read(self, seconds):
        if select.select([self._main], [], [], seconds)[0]:
            with contextlib.suppress(OSError):
                self.shown += os.read(self._main, 65536).decode(errors="replace")

    def end(self, number):
        self.process.send_signal(number)
        deadline = time.monotonic() + 60
        while self.process.poll() is None:
            assert time.monotonic() < deadline
            self._read(0.05)
        self._read(0.2)
        return self.process.returncode

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self._main)


@pytest.fixture
def terminal():
    opened = []

    def show(environment, *arguments):
        opened.append(Terminal(environment, *arguments))
        return opened[-1]

    yield show
    for each in opened:
        each.close()


def test_a_table_follows_what_happens_and_the_window_and_gives_the_terminal_back(terminal, environment, leases):
    assert leases.try_acquire("job", ttl="10m")
    screen = terminal(environment)
    screen.wait_for("1 held, 0 free", "job", "somebody-else", "LEFT")

    assert leases.try_acquire("other", ttl="10m")
    screen.wait_for("2 held", "other  acquired by somebody-else (token 1)")
    leases.release("job")
    screen.wait_for("1 held, 1 free", "job  released by somebody-else")

    screen.resize(60, 20)
    deadline = time.monotonic() + 60
    while max(map(len, screen.wait_for("1 held", "other").splitlines())) > 60:
        assert time.monotonic() < deadline, "it stays as wide as the window was"

    assert screen.end(signal.SIGINT) == 130
    assert "\x1b[?1049l" in screen.shown  # the screen that was there before
    assert "Traceback" not in screen.shown


def test_a_store_that_goes_away_is_said_and_its_return_too(terminal, environment, behind_proxy, proxy, leases):
    assert leases.try_acquire("job", ttl="10m")
    screen = terminal({**environment, **behind_proxy}, "job")
    screen.wait_for("1 held", "job")

    proxy.refuse()
    proxy.cut()
    screen.wait_for("the store does not answer", "job")
    proxy.pass_through()

    screen.wait_for("1 held, 0 free", "job")
    assert screen.end(signal.SIGTERM) == -signal.SIGTERM


def test_a_restart_of_the_server_is_lived_through_as_a_table_and_as_lines(terminal, environment, start, fresh_postgres):
    server = fresh_postgres()
    with PGLease(server.dsn, owner_id="worker") as leases:
        assert leases.try_acquire("job", ttl="10m")
        screen = terminal({**environment, "PGLEASE_URL": server.dsn})
        lines = start("watch", env={"PGLEASE_URL": server.dsn})
        screen.wait_for("1 held", "job")
        assert "job  held by worker" in lines.stdout.readline()

        server.restart("immediate")
        with PGLease(server.dsn, owner_id="the next one") as later:
            assert later.try_acquire("other", ttl="10m")
            screen.wait_for("2 held", "other  acquired by the next one (token 1)")
            assert "other  acquired by the next one" in lines.stdout.readline()

    assert screen.end(signal.SIGINT) == 130


def test_without_rich_or_a_terminal_it_is_lines(terminal, environment, start, leases, tmp_path):
    assert leases.try_acquire("job", ttl="10m")
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['rich'] = None")
    without_rich = {**environment, "PYTHONPATH": str(tmp_path)}
    for screen in (terminal(without_rich), terminal(environment, "--lines")):
        assert "LEFT" not in screen.wait_for("job  held by somebody-else (token 1)")

    piped = start("watch", "--timeout", "0.5s", env={"TERM": "xterm"})
    out, err = piped.communicate(timeout=60)
    assert (piped.returncode, err) == (0, "")
    assert "job  held by somebody-else (token 1)" in out


def test_of_many_leases_as_many_are_shown_as_fit():
    from rich.console import Console

    from pglease import MemoryBackend, PGLease
    from pglease.cli.live import Board

    with PGLease(MemoryBackend(), "us") as client:
        for number in range(40):
            assert client.try_acquire(f"lease {number:02}")
        board = Board(client, None, "")
        board.look()
        console = Console(width=100, height=30, record=True, file=io.StringIO())
        console.print(board)

    text = console.export_text()
    assert "40 held, 0 free" in text
    assert "lease 00" in text
    assert "and 26 more" in text
    assert len(text.splitlines()) <= 30


def test_a_renewal_that_is_overdue_shows(monkeypatch):
    from datetime import UTC, datetime, timedelta

    from pglease import Lease
    from pglease.cli import printing

    now = datetime(2026, 1, 1, tzinfo=UTC)

    def lease(age):
        beat = now - timedelta(seconds=age)
        return Lease("job", "us", 1, beat, beat, beat + timedelta(seconds=60), 0, now, {})

    assert [printing.is_late(lease(age)) for age in (0, 21, 31, 61)] == [False, False, True, False]
