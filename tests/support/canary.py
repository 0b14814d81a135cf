"""The canary: a password that is in the DSN of every test, and must come out nowhere.

Searched after each phase of each test: what it printed, every log record (extras and tracebacks too, down to DEBUG for
our own logger), every exception that it expected or died of with all its causes, and the output of the programs it ran.
A sighting fails the test.
"""

from __future__ import annotations

import logging
import subprocess
import traceback
from collections.abc import Iterator

import pytest


class CanaryWatch(logging.Handler):
    """Remembers where the secret was seen since the last look.

    A logging handler, so that a record is searched as whole as any handler of a user's would see it.
    """

    def __init__(self, secret: str) -> None:
        super().__init__(logging.NOTSET)
        self.secret = secret
        self.sightings: list[str] = []

    def look(self, where: str, text: object) -> None:
        """Note a sighting if the secret is in `text`."""
        readable = text.decode(errors="replace") if isinstance(text, bytes | bytearray) else str(text)
        if self.secret in readable:
            self.sightings.append(where)

    def look_at_error(self, where: str, error: BaseException) -> None:
        """Search an error as a person would see it: message, repr, traceback, causes and notes."""
        self.look(f"{where}: the repr of {type(error).__name__}", repr(error))
        self.look(f"{where}: the traceback of {type(error).__name__}", "".join(traceback.format_exception(error)))

    def emit(self, record: logging.LogRecord) -> None:
        """Search a record: the message, its arguments, its extras and its traceback."""
        where = f"a log record of {record.name} ({record.levelname})"
        self.look(where, record.getMessage())
        self.look(where, {name: value for name, value in vars(record).items() if name != "exc_info"})
        if record.exc_info and record.exc_info[1] is not None:
            self.look_at_error(where, record.exc_info[1])

    def take(self) -> list[str]:
        """Return the sightings and forget them."""
        seen, self.sightings = self.sightings, []
        return list(dict.fromkeys(seen))


WATCH = pytest.StashKey[CanaryWatch]()


def start(config: pytest.Config, secret: str) -> None:
    """Watch for this secret until the end of the run."""
    watch = CanaryWatch(secret)
    config.stash[WATCH] = watch
    undo = pytest.MonkeyPatch()
    config.add_cleanup(undo.undo)
    logging.getLogger().addHandler(watch)
    config.add_cleanup(lambda: logging.getLogger().removeHandler(watch))
    # A secret in a DEBUG record is a secret on somebody's disk.
    logging.getLogger("pglease").setLevel(logging.DEBUG)
    _watch_expected_errors(watch, undo)
    _watch_programs(watch, undo)


def _watch_expected_errors(watch: CanaryWatch, undo: pytest.MonkeyPatch) -> None:
    """Search what `pytest.raises` catches: most errors of a test run are expected ones."""
    fill = pytest.ExceptionInfo.fill_unfilled

    def fill_and_look(self, exc_info):
        watch.look_at_error("an expected error", exc_info[1])
        return fill(self, exc_info)

    undo.setattr(pytest.ExceptionInfo, "fill_unfilled", fill_and_look)


def _watch_programs(watch: CanaryWatch, undo: pytest.MonkeyPatch) -> None:
    """Search what programs say through pipes: `subprocess.run`, `check_output` and `communicate`."""
    communicate = subprocess.Popen.communicate

    def communicate_and_look(self, *args, **options):
        answer = communicate(self, *args, **options)
        for stream in answer:
            watch.look(f"the output of a program ({self.args!r:.60})", stream or "")
        return answer

    undo.setattr(subprocess.Popen, "communicate", communicate_and_look)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Fail a phase in which the secret was seen."""
    report: pytest.TestReport = yield
    watch = item.config.stash.get(WATCH, None)
    if watch is None:
        return report
    for title, text in report.sections:
        if title.endswith(call.when):  # the sections of earlier phases are repeated
            watch.look(title, text)
    if call.excinfo is not None:
        watch.look_at_error("the failure", call.excinfo.value)
    if seen := watch.take():
        verdict = f"the canary password came out in: {'; '.join(seen)}"
        report.sections.append(("canary", verdict))
        if report.outcome != "failed":
            report.outcome, report.longrepr = "failed", verdict
    return report
