"""`pglease run` on a terminal: the command's group is in the foreground, and everything is given back."""

import contextlib
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time

import pytest

TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)


class Screen:
    """A terminal with one program on it: what it shows can be waited for, keys can be pressed."""

    def __init__(self, program, environment, directory):
        self._main, other = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *program],
            env={**environment, "PS1": "prompt> ", "TERM": "dumb"},
            cwd=directory,
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
        )
        os.close(other)
        self.shown = ""

    def press(self, keys):
        os.write(self._main, keys.encode())

    def wait_for(self, text, seconds=15):
        """Wait until `text` is shown, and forget everything up to it."""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} was not shown: {self.shown!r}"
            if select.select([self._main], [], [], left)[0]:
                try:
                    self.shown += os.read(self._main, 4096).decode()
                except OSError:  # the last program has left the terminal
                    assert text in self.shown, f"{text!r} was not shown: {self.shown!r}"
        before, _, self.shown = self.shown.partition(text)
        return before

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._main)


@pytest.fixture
def screen(environment, tmp_path):
    """Open a program on a terminal of its own."""
    opened = []

    def show(*program):
        opened.append(Screen(program, environment, tmp_path))
        return opened[-1]

    yield show
    for each in opened:
        each.close()


def run(*command):
    return [sys.executable, "-m", "pglease", "run", "job", "--ttl", "30s", "--", *command]


def test_the_command_reads_from_the_terminal(screen):
    shown = screen(*run("sh", "-c", "echo ask; read answer; echo got $answer"))
    shown.wait_for("ask")

    shown.press("hello\n")

    shown.wait_for("got hello")
    assert shown.process.wait(60) == 0


def test_ctrl_c_goes_to_the_command_which_may_answer_in_its_own_way(screen):
    shown = screen(*run("sh", "-c", "trap 'echo caught; exit 7' INT; echo ready; while :; do sleep 0.05; done"))
    shown.wait_for("ready")

    shown.press("\x03")

    shown.wait_for("caught")
    assert shown.process.wait(60) == 7


def test_ctrl_c_ends_the_command_with_130_and_the_lease_is_free(screen, leases):
    shown = screen(*run("sh", "-c", "echo ready; exec sleep 100"))
    shown.wait_for("ready")

    shown.press("\x03")

    assert shown.process.wait(60) == 130
    assert leases.get_lease("job").is_expired()


def test_ctrl_c_while_waiting_is_130(screen, leases):
    assert leases.try_acquire("job", ttl=30)
    shown = screen(sys.executable, "-m", "pglease", "run", "job", "--wait", "--", "echo", "never")
    shown.wait_for("waiting")

    shown.press("\x03")

    assert shown.process.wait(60) == 130


def test_the_terminal_is_given_back(screen):
    line = " ".join(f"'{word}'" for word in run("true"))
    shown = screen("sh", "-c", f"{line}; echo ask; read answer; echo got $answer")
    shown.wait_for("ask")

    shown.press("hello\n")

    shown.wait_for("got hello")
    assert shown.process.wait(60) == 0


def test_ctrl_c_stops_a_script_as_it_would_without_us(screen):
    line = " ".join(f"'{word}'" for word in run("sh", "-c", "echo ready; exec sleep 100"))
    shown = screen("sh", "-c", f"{line}; echo went on")
    shown.wait_for("ready")

    shown.press("\x03")

    assert shown.process.wait(60) in (130, -signal.SIGINT)
    assert "went on" not in shown.shown


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs a shell with job control")
def test_ctrl_z_gives_the_shell_its_prompt_and_fg_goes_on(screen, leases):
    shown = screen("bash", "--norc", "--noprofile", "-i")
    shown.wait_for("prompt> ")
    line = " ".join(f"'{word}'" for word in run("sh", "-c", "echo rea''dy; read answer; echo got $answer"))
    shown.press(f"{line}\n")
    shown.wait_for("ready\r\n")

    shown.press("\x1a")
    shown.wait_for("Stopped")
    shown.wait_for("prompt> ")
    assert not leases.get_lease("job").is_expired()
    shown.press("fg\n")
    shown.press("hello\n")

    shown.wait_for("got hello")
    shown.wait_for("prompt> ")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs a shell with job control")
def test_a_command_that_is_continued_after_its_lease_ran_out_is_ended_instead(screen, leases, until):
    shown = screen("bash", "--norc", "--noprofile", "-i")
    shown.wait_for("prompt> ")
    line = " ".join(f"'{word}'" for word in run("sh", "-c", "echo rea''dy; read answer; echo got $answer"))
    shown.press(line.replace("30s", "3s") + "\n")
    shown.wait_for("ready\r\n")

    shown.press("\x1a")
    shown.wait_for("Stopped")
    until(lambda: leases.get_lease("job").is_expired())
    shown.press("fg\n")

    shown.wait_for("lost the lease")
    shown.press("echo code $?\n")
    shown.wait_for("code 76")
