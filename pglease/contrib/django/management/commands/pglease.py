"""`manage.py pglease …`: the command line, on the store of the settings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from django.core.management import get_commands
from django.core.management.base import BaseCommand, CommandError
from django.db import connections

from pglease.cli.app import run_app
from pglease.cli.options import Host
from pglease.contrib.django.conf import conf

_DJANGOS = ("--settings", "--pythonpath")
"""Options of every management command, which Django has read already when it comes to us."""


class Command(BaseCommand):
    """The `pglease` command line with its options, its output and its exit codes.

    It takes its store from the settings, and `run` knows management commands: `manage.py pglease run nightly -- report`
    runs `manage.py report` under the lease `nightly`.
    """

    help = "Who holds what; run a management command, or any other, under a lease. See `manage.py pglease --help`."
    requires_system_checks: Sequence[str] = ()
    _manage: Sequence[str] = ("-m", "django")
    _djangos: Sequence[str] = ()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Take all words as they are, for `call_command`."""
        parser.add_argument("words", nargs=argparse.REMAINDER, help="as for the command pglease")

    def run_from_argv(self, argv: list[str]) -> None:
        """Run it from a command line, and exit as `pglease` does."""
        script = Path(argv[0])
        if script.is_file() and script.name != "__main__.py":
            self._manage = (argv[0],)
        self._djangos, words = _split(argv[2:])
        try:
            code = self._run(words)
        finally:
            connections.close_all()
        sys.exit(code)

    def handle(self, *_: Any, words: Sequence[str], **__: Any) -> None:
        """Run it from `call_command`.

        Raises:
            CommandError: it ended with another exit code than 0, which is the error's `returncode`.
        """
        self.stdout.ending = self.stderr.ending = ""
        with redirect_stdout(self.stdout), redirect_stderr(self.stderr):
            code = self._run(words)
        if code:
            raise CommandError(f"pglease {' '.join(words[:1])} ended with exit code {code}", returncode=code)

    def _run(self, words: Sequence[str]) -> int:
        return run_app(words, host=Host("manage.py pglease", lambda: conf().open_store(create=True), self._argv))

    def _argv(self, command: Sequence[str]) -> Sequence[str]:
        """Return how a command is executed: by this project if it is one of its management commands."""
        if command[0] not in get_commands():
            return command
        return [sys.executable, *self._manage, *command, *self._djangos]


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Part Django's options from ours: in front, and behind for what has no command of its own to give them to."""
    djangos: list[str] = []
    ours: list[str] = []
    rest = iter(words)
    for word in rest:
        if word.partition("=")[0] in _DJANGOS:
            djangos.extend([word] if "=" in word else [word, *[value for value in [next(rest, None)] if value]])
        elif word == "run":
            return djangos, [*ours, word, *rest]
        else:
            ours.append(word)
    return djangos, ours
