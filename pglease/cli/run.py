"""`pglease run`: a command that runs only while it holds a lease."""

from __future__ import annotations

import contextlib
import math
import queue
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from pglease import clock
from pglease.cli import printing
from pglease.cli.failures import CONFLICT, LOST, CommandError, sentence
from pglease.cli.options import NAME, DurationType, Host, examples, open_client, quiet_option, store_options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pglease.cli.supervise import Child, Ending, Signals
    from pglease.client import PGLease
    from pglease.handles import HeldLease, NotAcquired

FOREVER = "forever"
LOOK = 1.0
"""The longest pause between two looks while waiting, in seconds."""
GOODBYE = 2.0
"""Seconds a signalled, still waiting pglease gives its question to come back, so that a late grant is given back."""


class RunCommand(click.Command):
    """Options stand before or after NAME; the first word of the command, or `--`, ends them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Rewrite what click cannot know: an optional duration after `--wait`, and where the command begins."""
        return super().parse_args(ctx, _rewritten(args, self._takes_value))

    def _takes_value(self, word: str) -> bool:
        name = word if word.startswith("--") else word[:2]
        known = [each for each in self.params if isinstance(each, click.Option) and name in each.opts]
        if not known or known[0].is_flag or "=" in word:
            return False
        return word.startswith("--") or len(word) == 2


def _rewritten(args: Sequence[str], takes_value: Callable[[str], bool]) -> list[str]:
    out: list[str] = []
    words = iter(args)
    names = 0
    for word in words:
        if word == "--" or (names == 1 and not _is_option(word)):
            return [*out, "--", *([] if word == "--" else [word]), *words]
        if word == "--wait":
            following = next(words, None)
            if following is not None and _is_duration(following):
                out.append(f"--wait={following}")
            else:
                rest = [] if following is None else [following, *words]
                return [*out, f"--wait={FOREVER}", *_after(names, rest, takes_value)]
        elif _is_option(word):
            out.append(word)
            if takes_value(word):
                out.extend(following for following in [next(words, None)] if following is not None)
        else:
            names += 1
            out.append(word)
    return out


def _after(names: int, rest: list[str], takes_value: Callable[[str], bool]) -> list[str]:
    """Rewrite what follows, remembering whether NAME was already seen."""
    return _rewritten(rest, takes_value) if names == 0 else _rewritten(["", *rest], takes_value)[1:]


def _is_option(word: str) -> bool:
    return word.startswith("-") and len(word) > 1


def _is_duration(word: str) -> bool:
    from pglease.errors import ConfigurationError
    from pglease.options import seconds

    try:
        return seconds(word, "--wait", zero=True, forever=True) >= 0
    except ConfigurationError:
        return False


@dataclass(frozen=True, slots=True)
class Terms:
    """What was asked for, checked."""

    name: str
    ttl: float
    wait: float | None
    min_hold: float | None
    max_hold: float | None
    grace: float
    owner: str | None


def default_grace(ttl: float) -> float:
    """Return 5 s, or a quarter of ttl if that is less, or what a ttl under 12 s leaves room for."""
    return max(0.0, min(5.0, ttl / 4, ttl / 3 - 1))


def _check(terms: Terms) -> None:
    """Refuse what cannot be kept, all at once, before anything is sent."""
    from pglease.errors import ConfigurationError
    from pglease.options import hold_options, text

    problems: list[str] = []
    if terms.ttl < 3 * (terms.grace + 1):
        problems.append(
            f"--ttl must be at least 3 * (grace + 1 s) = {3 * (terms.grace + 1):g} s, so that the command can be ended "
            f"in time, not {terms.ttl:g} s: choose a longer --ttl or a shorter --grace"
        )
    with _noted(problems, ConfigurationError):
        hold_options(
            terms.name,
            terms.ttl,
            wait=terms.wait,
            min_hold=terms.min_hold or 0.0,
            max_hold=terms.max_hold,
            on_lost="log",
        )
    if terms.owner is not None:
        with _noted(problems, ConfigurationError):
            text(terms.owner, "--owner")
    if terms.max_hold is not None and terms.max_hold < terms.grace + 1:
        problems.append(f"--max-hold must be at least grace + 1 s = {terms.grace + 1:g} s, not {terms.max_hold:g} s")
    if problems:
        raise click.UsageError("; ".join(problems))


@contextlib.contextmanager
def _noted(problems: list[str], kind: type[Exception]) -> Any:
    try:
        yield
    except kind as broken:
        problems.append(str(broken))


@click.command(
    cls=RunCommand,
    epilog=examples(
        "pglease run daily-report --ttl 5m -- ./report.sh --full",
        "pglease run import --ttl 1m --wait -- ./import         wait for ever",
        "pglease run import --ttl 1m --wait 30s -- ./import     or half a minute",
        "pglease run nightly --ttl 5m --min-hold 10m -q -E 0 -- ./nightly   for cron on several hosts",
    ),
)
@click.argument("name", type=NAME)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--ttl", type=DurationType(), default="60s", show_default=True,
    help="How long the lease lives without renewal, hence how long others wait after a crash. It is renewed three "
    "times in that span.",
)  # fmt: skip
@click.option(
    "--wait", type=DurationType(zero=True, forever=True), metavar="[DURATION]",
    help="Wait for the lease: that long, or for ever without a duration. A word after --wait that reads as a duration "
    "is one. Default: ask once.",
)  # fmt: skip
@click.option(
    "--min-hold", type=DurationType(zero=True), help="Keep the name at least this long, however short the command."
)
@click.option("--max-hold", type=DurationType(), help="End the command, and the hold, after this long.")
@click.option(
    "--grace", type=DurationType(zero=True),
    help="Time between TERM and KILL when the lease is lost. Default: 5 s, but at most a quarter of ttl, and less for "
    "a ttl under 12 s.",
)  # fmt: skip
@click.option(
    "-E", "--conflict-exit-code", "conflict", type=click.IntRange(0, 255), default=CONFLICT, show_default=True,
    metavar="CODE", help="Exit with this when another holder has it or the wait ran out; 0 makes that a success.",
)  # fmt: skip
@click.option("--owner", metavar="LABEL", help="Who you are, for people. Default: host, process and a random part.")
@store_options
@quiet_option
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
    name: str,
    command: tuple[str, ...],
    ttl: float,
    wait: float | None,
    min_hold: float | None,
    max_hold: float | None,
    grace: float | None,
    conflict: int,
    owner: str | None,
    quiet: bool,
    **_: Any,
) -> int:
    """Run COMMAND while holding the lease NAME; if another holder has it, do nothing and exit with 75.

    The command runs in a process group of its own (the foreground group when standard input is a terminal) and finds
    PGLEASE_NAME, PGLEASE_FENCING_TOKEN and PGLEASE_OWNER in its environment. TERM, INT, HUP, QUIT, USR1 and USR2 are
    passed on to the group. When the command ends, what it left behind in its group is ended too; then the lease is
    released.

    If the lease is lost, or cannot be renewed, the whole group is ended before anybody else can be granted it: TERM,
    then KILL after the grace time. If pglease is killed, the command dies with it (on Linux, and unless it is a
    set-uid program such as sudo).

    What this cannot do: if pglease is killed, its grandchildren go on; processes that left the group are not seen;
    and while pglease itself is stopped (SIGSTOP, a frozen container, a suspended machine) nobody renews and nobody
    ends the command. For these there is the fencing token: let the resource refuse every write that carries a smaller
    token than one it has seen.
    """
    grace = default_grace(ttl) if grace is None else grace
    terms = Terms(name, ttl, wait, min_hold or None, max_hold, grace, owner)
    _check(terms)
    if sys.platform == "win32":
        raise CommandError("`pglease run` needs process groups, which Windows has not; the library itself works there")
    from pglease.cli.supervise import Child, Signals

    signals = Signals()
    host = ctx.find_object(Host)
    child = Child(command if host is None else host.argv(command), signals)
    return _Run(ctx, terms, command, child, signals, conflict, quiet).go()


@dataclass(slots=True)
class _Run:
    """One run, from the question to the exit code."""

    ctx: click.Context
    terms: Terms
    command: Sequence[str]
    child: Child
    signals: Signals
    conflict: int
    quiet: bool

    def go(self) -> int:
        try:
            answer = self._ask()
        except BaseException:
            self.child.dismiss()
            raise
        if not isinstance(answer, int | Refusal):
            return self._supervise(answer)
        self.child.dismiss()
        return answer if isinstance(answer, int) else self._refused(answer)

    def _ask(self) -> HeldLease | Refusal | int:
        """Return the answer, or 128 + n when signal n ended the wait.

        The question is asked on a thread of its own: this one must hear signals while the store is silent.
        """
        question = Question(self._client, self.terms, self.signals, self._waiting)
        while not question.answered():
            for number in self.signals.wait():
                if number in _deadly():
                    question.withdraw(GOODBYE)
                    return 128 + number
        return question.answer()

    def _client(self) -> PGLease:
        return open_client(self.ctx, owner_id=self.terms.owner)

    def _waiting(self, answer: Refusal) -> None:
        if not self.quiet:
            printing.complain(f"waiting: {held_elsewhere(self.terms.name, answer)}")

    def _refused(self, answer: Refusal) -> int:
        if not self.quiet:
            printing.complain(held_elsewhere(self.terms.name, answer))
        return self.conflict

    def _supervise(self, lease: HeldLease) -> int:
        from pglease.cli.supervise import Supervisor

        supervisor = Supervisor(self.child, lease, self.signals, self.terms.grace, self.terms.max_hold)
        ending = supervisor.run(
            {
                "PGLEASE_NAME": lease.name,
                "PGLEASE_FENCING_TOKEN": str(lease.fencing_token),
                "PGLEASE_OWNER": lease.owner_id,
            }
        )
        code = self._verdict(ending, lease)
        if not ending.lost and not release(lease):
            printing.complain(
                f"warning: the lease {lease.name!r} had already ended in the store when the command was done"
            )
        supervisor.share_keyboard_signal()
        return code

    def _verdict(self, ending: Ending, lease: HeldLease) -> int:
        if ending.survivors:
            printing.complain(f"some processes of {self.command[0]!r} could not be ended and may still be running")
        if ending.failure is not None:
            printing.complain(f"cannot run {self.command[0]!r}: {ending.failure.strerror}")
            return ending.code
        if ending.lost:
            printing.complain(f"lost the lease {lease.name!r} ({_why(ending, lease)}): the command was ended")
            return LOST
        if ending.leftovers and not self.quiet:
            printing.complain(
                f"{self.command[0]!r} left processes behind; they were ended before the lease was released"
            )
        return ending.code


def release(lease: HeldLease) -> bool:
    """Give the lease back, whatever comes of it: the exit code is somebody else's. False if it had ended already."""
    try:
        return lease.release()
    except Exception as error:  # noqa: BLE001  # the command is done, and its exit code is what counts
        printing.complain(f"warning: the lease {lease.name!r} was not released: {sentence(error)}")
        return True


def _why(ending: Ending, lease: HeldLease) -> str:
    if ending.reason is None:
        return "it could not be renewed in time"
    words = {
        "taken": "somebody else holds it now",
        "forced": "an operator ended it",
        "deleted": "its record was deleted",
        "expired": "it ran out in the store",
        "unreachable": "the store could not be reached in time",
        "max_hold": "it was held for as long as --max-hold allows",
        "session_died": "the session it was bound to is gone",
    }
    error = lease.loss.error if lease.loss is not None else None
    return words.get(ending.reason, ending.reason) + (f"; last trouble: {sentence(error)}" if error is not None else "")


def _deadly() -> Sequence[int]:
    from pglease.cli.supervise import FORWARDED

    return FORWARDED


@dataclass(frozen=True, slots=True)
class Refusal:
    """Somebody else has it: who, and for how many seconds unless renewed, as far as the store can say."""

    held_by: str | None
    retry_after: float | None


def held_elsewhere(name: str, refusal: Refusal) -> str:
    """Say who has it and for how long."""
    who = f"{name!r} is held by {refusal.held_by or 'somebody else'}"
    if not refusal.retry_after or math.isinf(refusal.retry_after):
        return who
    return f"{who} for another {printing.duration(refusal.retry_after)} unless renewed"


class Question:
    """Asks for the lease on a thread of its own and wakes the main thread with the answer."""

    def __init__(
        self, client: Callable[[], PGLease], terms: Terms, signals: Signals, busy: Callable[[Any], None]
    ) -> None:
        self._terms = terms
        self._signals = signals
        self._client = client
        self._busy = busy
        self._withdrawn = threading.Event()
        self._context: Any = None  # owns the hold: dropped, it would release
        self._answer: queue.SimpleQueue[HeldLease | Refusal | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pglease-ask", daemon=True)
        self._thread.start()

    def answered(self) -> bool:
        """Tell whether the answer is there."""
        return not self._answer.empty()

    def answer(self) -> HeldLease | Refusal:
        """Return the answer, or raise what came instead."""
        got = self._answer.get()
        if isinstance(got, BaseException):
            raise got
        return got

    def withdraw(self, patience: float) -> None:
        """Want it no more: end the wait, and give back what was granted all the same."""
        self._withdrawn.set()
        self._thread.join(patience)
        self._give_back()

    def _run(self) -> None:
        try:
            self._answer.put(self._ask(self._client()))
        except BaseException as error:  # noqa: BLE001  # raised in the main thread
            self._answer.put(error)
        if self._withdrawn.is_set():
            self._give_back()
        self._signals.nudge()

    def _give_back(self) -> None:
        """Release what nobody wants any more; of the two who may find it there, one does."""
        with contextlib.suppress(queue.Empty):
            unwanted = self._answer.get_nowait()
            if not isinstance(unwanted, Refusal | BaseException):
                release(unwanted)

    def _ask(self, leases: PGLease) -> HeldLease | Refusal:
        """Ask once, so that a store that is not there is an error and not a long wait; then wait if that is wanted."""
        terms = self._terms
        started = clock.now()
        self._context = leases.acquire(
            terms.name, terms.ttl, min_hold=terms.min_hold, max_hold=terms.max_hold, on_lost="log"
        )
        answer: HeldLease | NotAcquired = self._context.__enter__()
        if answer:
            return answer
        refusal = Refusal(answer.held_by, answer.retry_after)
        left = (terms.wait or 0.0) - (clock.now() - started)
        if left <= 0:
            return refusal
        self._busy(refusal)
        return self._wait(leases, None if math.isinf(left) else left)

    def _wait(self, leases: PGLease, timeout: float | None) -> HeldLease | Refusal:
        from pglease.errors import AcquisitionError

        terms = self._terms
        try:
            return leases.wait_for_lease(
                terms.name,
                terms.ttl,
                timeout,
                LOOK,
                cancel=self._withdrawn,
                min_hold=terms.min_hold,
                max_hold=terms.max_hold,
            )
        except AcquisitionError as refused:
            return Refusal(refused.held_by, refused.retry_after)
