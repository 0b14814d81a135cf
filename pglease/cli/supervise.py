"""Runs one command in a process group of its own and ends the whole group before its lease can go to anybody else.

The supervisor only looks: at the clock, at what the handle believes, at the state of its children. It never talks to
the store (the client's heartbeat thread does) and writes to no terminal while the command runs, because either may
block for longer than the lease lasts. Whatever it has to say is in the `Ending` it returns.

The child is forked before anything else happens, while this process is one thread with nothing imported, and waits
behind a pipe until the lease is there. That way `PR_SET_PDEATHSIG` belongs to the main thread (from a thread that
ends, the child would die at once), the terminal is the child's before its first instruction, and no lock of another
thread is copied.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import select
import shutil
import signal
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NoReturn, Protocol

from pglease import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
WATCHED = (*FORWARDED, signal.SIGCHLD, signal.SIGCONT)
KEYBOARD = (signal.SIGINT, signal.SIGQUIT)
JOB_STOPS = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)

REAPING = 0.5
"""Seconds kept between the KILL and the end of trust, for the kernel to tear the group down."""
GLANCE = 0.5
"""The longest sleep between two looks, so that a machine that wakes from suspend is noticed."""
LEFTOVER_GLANCE = 0.02
"""The sleep while others of the group are still there: their end is not always announced by a signal."""
DECLARING = 0.05
"""Seconds the declaration of a loss may take after belief has ended."""
UNKILLABLE = 5.0
"""Seconds after a KILL at which a group that is still there (another user's process, a dead disk) is given up."""

NOT_EXECUTABLE, NOT_FOUND = 126, 127

Step = Literal["go on", "term", "kill"]


class Loss(Protocol):
    """Why a hold was lost."""

    @property
    def reason(self) -> str:
        """One word of the closed set."""

    @property
    def error(self) -> Exception | None:
        """The last trouble before."""


class Handle(Protocol):
    """What the supervisor looks at; `HeldLease` is one."""

    @property
    def lost(self) -> threading.Event:
        """Set once the hold is lost."""

    @property
    def loss(self) -> Loss | None:
        """Why, once it is."""

    def remaining(self) -> float:
        """Return the seconds this process may still act."""


@dataclass(slots=True)
class Countdown:
    """Decides when the group is told to end and when it is made to. Pure: it is handed what it judges.

    TERM goes out when `grace` + 0.5 s of trust are left and no renewal has moved the end, KILL 0.5 s before the end
    of trust. A definite loss (taken, forced, deleted) gives the command `grace` to tidy up, and less where trust
    would have ended sooner. Once told to end, a command is not told otherwise: a late renewal only buys it the rest
    of its grace.

    Attributes:
        grace: seconds between TERM and KILL.
        ending: whether the group has been told to end.
        lost: whether that was for the lease's sake.
    """

    grace: float
    ending: bool = False
    lost: bool = False
    _trusted_until: float = -math.inf
    _kill_at: float = math.inf

    def look(self, now: float, remaining: float, reason: str | None) -> Step:
        """Judge one glance: `remaining` seconds of trust at `now`, or the reason of a loss."""
        if reason is None:
            self._trusted_until = now + remaining
        if reason in ("session_died", "expired", "unreachable"):  # somebody else may be granted the name this instant
            self._kill_at = now
        if reason is not None or self._last_call() - now <= self.grace:
            self.lost = True
            return self.end(now)
        return self.end(now) if self.ending else "go on"

    def end(self, now: float) -> Step:
        """Tell the group to end within `grace` and before trust ends; ask again to hear whether it is time for KILL."""
        first = not self.ending
        self.ending = True
        if first:
            self._kill_at = min(self._kill_at, now + self.grace)
        if now >= min(self._kill_at, self._last_call()):
            return "kill"
        return "term" if first else "go on"

    def until_next(self, now: float) -> float:
        """Return the seconds until the next decision could fall due if nothing is heard before."""
        due = min(self._kill_at, self._last_call()) if self.ending else self._last_call() - self.grace
        return max(0.0, due - now)

    def _last_call(self) -> float:
        return self._trusted_until - REAPING


class Signals:
    """Turns signals into bytes on a pipe, so that one `select` hears of children, signals and nudges alike."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)

    def catch(self) -> None:
        """Hear of the watched signals from now on. A signal that was ignored when we started stays ignored (nohup)."""
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in WATCHED:
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGCHLD:
                signal.signal(number, _heard)

    def nudge(self) -> None:
        """Wake whoever waits; callable from any thread."""
        with contextlib.suppress(OSError):
            os.write(self._write, b"\0")

    def wait(self, timeout: float | None = None) -> list[signal.Signals]:
        """Return the signals that came in, at the latest after `timeout` seconds; a nudge returns none."""
        heard = os.read(self._read, 4096) if self._poll.poll(None if timeout is None else timeout * 1000) else b""
        return [signal.Signals(number) for number in heard if number]


def _heard(number: int, frame: object) -> None:
    """Do nothing: the byte on the pipe is the news. Without a handler there would be no byte."""


class Child:
    """The command: forked at once, started when the gate opens. From then on signals are heard through `signals`.

    Call it from the main thread: on Linux the child dies when the *thread* that forked it does.
    """

    def __init__(self, command: Sequence[str], signals: Signals) -> None:
        gate, self._gate = os.pipe()
        self._fate, fate = os.pipe()
        tie = _tie_to_parent()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)  # none may arrive between the fork and the handlers
        self.pid = os.fork()
        if self.pid == 0:
            _become(list(command), gate, self._gate, fate, tie, before)
        os.close(gate)
        os.close(fate)
        with contextlib.suppress(OSError):  # the child does the same; whoever comes second finds it done
            os.setpgid(self.pid, self.pid)
        signals.catch()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def start(self, environment: Mapping[str, str]) -> None:
        """Open the gate: the child adds `environment` to its own and becomes the command."""
        with contextlib.suppress(BrokenPipeError):  # killed at the gate: its exit status says so
            os.write(self._gate, json.dumps(dict(environment)).encode())
        os.close(self._gate)

    def dismiss(self) -> None:
        """End the child at the gate: there is no lease."""
        os.close(self._gate)
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def failure(self) -> OSError | None:
        """Return why the command could not be run, once the child has ended; None when it could."""
        told = os.read(self._fate, 64)
        if not told:
            return None
        number = int(told)
        return OSError(number, os.strerror(number))


def _tie_to_parent() -> Callable[[], None]:
    """Return what makes the calling process die with its parent; prepared before the fork, as it loads a library."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    import ctypes

    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def tie() -> None:
        prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(125)

    return tie


def adopt_orphans() -> None:
    """Become the parent of whatever the command's children leave behind: their end is heard, and they are reaped.

    Linux only. Elsewhere, and in containers whose first process reaps nothing, a dead member of the group could not
    be told from a living one.
    """
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _become(  # noqa: PLR0917  # called once
    command: list[str], gate: int, other_end: int, fate: int, tie: Callable[[], None], mask: set[int | signal.Signals]
) -> NoReturn:
    """Be the child: wait behind the gate, then become the command. Never returns into the caller's stack."""
    code = 125
    try:
        os.close(other_end)
        os.setpgid(0, 0)
        tie()
        for number in (*FORWARDED, signal.SIGPIPE, getattr(signal, "SIGXFSZ", signal.SIGPIPE)):
            # Python ignores SIGPIPE and catches SIGINT; what was ignored before Python came stays ignored.
            if number not in FORWARDED or callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        told = b"".join(iter(lambda: os.read(gate, 65536), b""))
        if told:
            os.environ.update(json.loads(told))
            code = _execute(command, fate)
    finally:
        os._exit(code)


def _execute(command: list[str], fate: int) -> int:
    """Become the command; return what to exit with if that cannot be."""
    try:
        try:
            os.execvp(command[0], command)
        except OSError as error:
            script = shutil.which(command[0])
            if error.errno != errno.ENOEXEC or script is None:
                raise
            # A script without #!, as execvp(3) would run it.
            os.execv("/bin/sh", ["sh", script, *command[1:]])
    except OSError as error:
        os.write(fate, str(error.errno or 0).encode())
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE


class Terminal:
    """The terminal on standard input, lent to the command's group while it runs."""

    def __init__(self, group: int) -> None:
        self._group = group
        self.lent = False

    def lend(self) -> None:
        """Make the command's group the foreground group, if the foreground is ours to give."""
        if self.in_foreground():
            self._set(self._group)
            self.lent = True

    def take_back(self) -> None:
        """Make our own group the foreground group again, unless a shell has taken the terminal in the meantime."""
        with contextlib.suppress(OSError):
            if self.lent and os.tcgetpgrp(0) == self._group:
                self._set(os.getpgrp())

    @staticmethod
    def in_foreground() -> bool:
        """Tell whether standard input is a terminal whose foreground group is ours."""
        try:
            return os.tcgetpgrp(0) == os.getpgrp()
        except OSError:
            return False

    @staticmethod
    def _set(group: int) -> None:
        # From the background, tcsetpgrp raises SIGTTOU, which would stop us.
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        try:
            with contextlib.suppress(OSError):  # the terminal was hung up
                os.tcsetpgrp(0, group)
        finally:
            signal.signal(signal.SIGTTOU, before)


@dataclass(frozen=True, slots=True)
class Ending:
    """How it ended.

    Attributes:
        code: what to exit with on the command's behalf: its own code, 128 + n for a signal, 126 or 127 if it could
        not be run. lost: whether the group was ended for the lease's sake. reason: why the lease was lost, as far as
        the handle says. failure: why the command could not be run. leftovers: whether processes of the group outlived
        the command and were ended. survivors: whether some could not be ended.
    """

    code: int
    lost: bool = False
    reason: str | None = None
    failure: OSError | None = None
    leftovers: bool = False
    survivors: bool = False


@dataclass(slots=True)
class Supervisor:
    """Watches over one running group until all of it has ended."""

    child: Child
    handle: Handle
    signals: Signals
    grace: float
    max_hold: float | None = None
    now: Callable[[], float] = clock.now
    _lost: threading.Event = field(init=False)
    _ends_at: float = field(init=False, default=math.inf)
    _countdown: Countdown = field(init=False)
    _terminal: Terminal = field(init=False)
    _status: int | None = field(init=False, default=None)
    _killed_at: float | None = field(init=False, default=None)
    _continue_at: float | None = field(init=False, default=None)
    _leftovers: bool = field(init=False, default=False)
    _held_out: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._countdown = Countdown(self.grace)
        self._terminal = Terminal(self.child.pid)
        # Taken once: asking the handle for it may declare the loss, and so log and call back, in this thread.
        self._lost = self.handle.lost

    def run(self, environment: Mapping[str, str]) -> Ending:
        """Start the command, watch it, and return when its group is gone or cannot be ended."""
        adopt_orphans()
        threading.Thread(target=self._announce_loss, name="pglease-loss", daemon=True).start()
        if self.max_hold is not None:
            self._ends_at = self.now() + self.max_hold
        self._terminal.lend()
        self.child.start(environment)
        try:
            self._watch()
        finally:
            self._terminal.take_back()
        return self._ending()

    def _announce_loss(self) -> None:
        self._lost.wait()
        self.signals.nudge()

    def _watch(self) -> None:
        while True:
            self._reap()
            if self._status is not None and not self._group_lives():
                return
            self._act(self._judge())
            if self._given_up():
                return
            for number in self.signals.wait(self._pause()):
                self._pass_on(number)
            if self._continue_at is not None and self.now() >= self._continue_at:
                self._go_on()

    def _judge(self) -> Step:
        remaining = self.handle.remaining()
        # A handle that is being declared lost believes nothing any more an instant before it says so.
        lost = self._lost.is_set() or (remaining <= 0 and self._lost.wait(DECLARING))
        now = self.now()
        told = self._countdown.ending
        step = self._countdown.look(now, remaining, self._reason() if lost else None)
        if self._countdown.lost and not told:
            # The handle counts from before the grant, we from after it: hence the slack.
            self._held_out = self._ends_at - now <= self.grace + 2 * REAPING
        if self._status is not None and step == "go on":
            self._leftovers = True
            step = self._countdown.end(now)
        return step

    def _reason(self) -> str:
        loss = self.handle.loss
        return loss.reason if loss else "expired"

    def _act(self, step: Step) -> None:
        if step == "term":
            self._send(signal.SIGTERM)
            self._send(signal.SIGCONT)  # a stopped process hears of TERM only once it runs
        elif step == "kill":
            self._send(signal.SIGKILL)
            self._killed_at = self._killed_at or self.now()

    def _given_up(self) -> bool:
        return self._killed_at is not None and self.now() - self._killed_at > UNKILLABLE

    def _pause(self) -> float:
        if self._status is not None or self._killed_at is not None:
            return LEFTOVER_GLANCE
        return min(GLANCE, self._countdown.until_next(self.now()))

    def _pass_on(self, number: signal.Signals) -> None:
        if number in FORWARDED:
            self._send(number)
        elif number == signal.SIGCONT:
            self._go_on()

    def _reap(self) -> None:
        """Collect every child that changed its state: the command, and orphans of its group that became ours."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child.pid:
                self._note(status)

    def _note(self, status: int) -> None:
        if not os.WIFSTOPPED(status):
            self._status = status
        elif os.WSTOPSIG(status) in JOB_STOPS and os.isatty(0):
            self._stop_like_the_command()

    def _stop_like_the_command(self) -> None:
        """Ctrl-Z: stop as well, so that the shell gets its prompt; `fg` wakes us, and we wake the command.

        While we are stopped nobody renews; a command that is continued too late is ended instead (the countdown is
        asked first). Where there is no shell to continue us the kernel ignores the stop, and the command goes on a
        moment later.
        """
        self._terminal.take_back()
        self._continue_at = self.now() + 0.2
        os.killpg(os.getpgrp(), signal.SIGTSTP)

    def _go_on(self) -> None:
        self._continue_at = None
        self._act(self._judge())
        if not self._countdown.ending:
            self._terminal.lend()
            self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        with contextlib.suppress(OSError):  # nobody is left, or another user's process is: both show when we look
            os.killpg(self.child.pid, number)

    def _group_lives(self) -> bool:
        """Tell whether the group has members. Its number cannot be given to strangers while it does."""
        try:
            os.killpg(self.child.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return sys.platform != "darwin"  # there, a group of zombies answers so
        return True

    def _ending(self) -> Ending:
        reason = self._reason() if self._lost.is_set() else "max_hold" if self._held_out else None
        return Ending(
            code=_code(self._status),
            lost=self._countdown.lost or self._lost.is_set(),
            reason=reason,
            failure=self.child.failure() if self._status is not None else None,
            leftovers=self._leftovers,
            survivors=self._given_up(),
        )

    def share_keyboard_signal(self) -> None:
        """Let the rest of our job have the Ctrl-C that only the command's group got, as if we were not in between."""
        if self._terminal.lent and self._status is not None and os.WIFSIGNALED(self._status):
            number = os.WTERMSIG(self._status)
            if number in KEYBOARD:
                signal.signal(number, signal.SIG_IGN)
                os.killpg(os.getpgrp(), number)


def _code(status: int | None) -> int:
    if status is None:
        return 128 + signal.SIGKILL
    number = os.waitstatus_to_exitcode(status)
    return number if number >= 0 else 128 - number
