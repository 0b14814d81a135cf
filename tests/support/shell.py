"""The shell lines of a page: what stands in them, whether the programs take it, and what happens when they are run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest

from pglease.cli import main
from pglease.cli.app import app
from pglease.cli.run import Terms, _check, default_grace
from tests.support import django_site

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(sys.executable).parent
CRON_LINE = re.compile(r"^(?:[\d*/,-]+ +){5}\w+ +(pglease .*)$", re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")
MENTIONED = re.compile(r"(?:pglease|python manage\.py|flask --app|make) [^{}…]+\Z")
"""A command in the middle of a sentence; with an ellipsis or a brace in it, it is not whole."""
PLACEHOLDERS = {"NAME": "name", "[NAME]": "name", "N": "1", "FILE": "file"}
ELSEWHERE = {
    ".": "the shell's",
    "cd": "the shell's",
    "export": "the shell's",
    "git": "not ours",
    "kubectl": "not ours",
    "python": "runs a file of the page, or code",
    "python3": "makes a virtual environment",
    "wait": "the shell's",
}
"""Programs of which there is nothing to check here, and why."""


def prompted(text: str) -> list[str]:
    """Return what is typed in blocks of a page."""
    return re.findall(r"^\$ (.+)$", text, re.MULTILINE)


def lines_of(text: str) -> list[str]:
    """Return the whole lines of a page: what is typed, and what is written into a crontab."""
    return [*prompted(text), *CRON_LINE.findall(text)]


def mentioned(text: str) -> list[str]:
    """Return the commands that a page's sentences speak of; often without what they need."""
    return [span for line in text.splitlines() for span in SPAN.findall(line) if MENTIONED.match(span)]


def simple_commands(line: str) -> Iterator[list[str]]:
    """Yield the commands of one line, without what is set for them by `NAME=value`, and where their output goes."""
    command: list[str] = []
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
    lexer.wordchars += "<>$(){}[]:,!*?%@#"  # these are of a word here; a comment begins after a blank
    words = iter([*_until_comment(lexer), "|"])
    for word in words:
        if set(word) <= set("<>"):
            next(words)
        elif set(word) <= set("|&;"):
            if command:
                yield command
            command = []
        elif command or not re.match(r"[A-Z_]+=", word):
            command.append(word)


def _until_comment(lexer: shlex.shlex) -> Iterator[str]:
    lexer.commenters = ""
    for word in lexer:
        if word.startswith("#"):
            return
        yield word


# -- whether it is taken -----------------------------------------------------------------------------------------------


def refusal(words: Sequence[str], config: pytest.Config, *, in_a_sentence: bool = False) -> str | None:
    """Return why a command would not be taken; None when it would be, or when that is nothing of ours."""
    match words:
        case (
            ["pglease", *arguments]
            | ["python", "manage.py", "pglease", *arguments]
            | ["flask", "--app", _, "pglease", *arguments]
        ):
            return refusal_of_ours(arguments, in_a_sentence=in_a_sentence)
        case ["python", "manage.py", command, *arguments]:
            return _refusal_of_django(command, arguments)
        case ["pip", "install", *targets]:
            wanted = {extra for found in re.findall(r"\[(.*?)\]", " ".join(targets)) for extra in found.split(",")}
            return _unless(wanted <= _extras(), f"there are no extras {wanted - _extras()}")
        case ["make", *targets]:
            wanted = {target for target in targets if "=" not in target}
            return _unless(wanted <= _targets(), f"there are no targets {wanted - _targets()}")
        case ["pytest", *words]:
            unknown = [each for each in words if each.startswith("-") and not _is_taken(each.partition("=")[0], config)]
            return _unless(not unknown, f"pytest has no options {unknown}")
        case ["celery", *words]:
            missing = [each for each in words if each.startswith("pglease.") and not _exists(each)]
            return _unless(not missing, f"there is no {missing}")
        case [program, *_]:
            return None if program in ELSEWHERE else f"who knows {program}?"
        case _:
            return "nothing"


def refusal_of_ours(arguments: Sequence[str], *, in_a_sentence: bool = False) -> str | None:
    """Return why `pglease` would not take these words; a sentence may leave out what is required."""
    command: click.Command = app
    name, rest = "pglease", list(arguments)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        below = command.get_command(click.Context(command), rest[0])
        if below is None:
            return f"{name} has no command {rest[0]!r}"
        command, name, rest = below, rest[0], rest[1:]
    try:
        with command.make_context(name, rest) as context:
            given = context.params
    except click.exceptions.Exit:  # --help, --version; or a group alone, which says what there is
        return None
    except click.MissingParameter as wrong:
        return None if in_a_sentence else f"{name}: {wrong.format_message()}"
    except click.UsageError as wrong:
        return f"{name}: {wrong.format_message()}"
    return _refusal_of_a_run(given) if name == "run" else None


def _refusal_of_a_run(given: dict[str, Any]) -> str | None:
    terms = (given[each] for each in ("name", "ttl", "wait", "min_hold", "max_hold"))
    try:
        _check(Terms(*terms, given["grace"] or default_grace(given["ttl"]), given["owner"]))
    except click.UsageError as wrong:
        return f"run: {wrong.format_message()}"
    return None


def _refusal_of_django(command: str, arguments: Sequence[str]) -> str | None:
    from django.core.management import get_commands, load_command_class
    from django.core.management.base import CommandError

    django_site.set_up()
    if command not in get_commands():
        return f"manage.py has no command {command!r}"
    parser = load_command_class(get_commands()[command], command).create_parser("manage.py", command)
    parser.called_from_command_line = False  # then it raises, instead of leaving
    try:
        parser.parse_args(list(arguments))
    except CommandError as wrong:
        return f"manage.py {command}: {wrong}"
    return None


def _unless(fine: bool, problem: str) -> str | None:
    return None if fine else problem


def _exists(word: str) -> bool:
    """Tell whether there is a `module:name`."""
    module, _, name = word.partition(":")
    return hasattr(import_module(module), name)


def _extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"])


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def _is_taken(option: str, config: pytest.Config) -> bool:
    return config.getoption(option, default=config) is not config


# -- what happens ------------------------------------------------------------------------------------------------------


class Shell:
    """Types the lines of a page in, in a directory of its own, where the environment names the store.

    What only asks and answers is run in this process: it is the same `main`, and costs a hundredth. A command under
    `pglease run` gets a process, of a real shell.

    Args:
        folder: where it begins; what a page calls `/var/lib/app` and `/opt/app/bin`, too.
        dsn: the store, which the environment names.
        others: what else runs here, by the first words of a line: given the words that follow, returns an exit code.
    """

    def __init__(self, folder: Path, dsn: str, others: dict[str, Callable[[list[str]], int]] | None = None) -> None:
        self.dsn = dsn
        self._folder = folder
        self._others = others or {}
        self._environment = {
            "PGLEASE_URL": dsn,
            "XDG_STATE_HOME": str(folder),
            "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}",
        }

    def type_in(self, line: str) -> None:
        """Run one line; what cannot be run here must have been checked elsewhere. It must end well."""
        line = line.replace("/var/lib/app", str(self._folder)).replace("/opt/app/bin", str(self._folder))
        words = next(simple_commands(line))
        if words[:2] == ["pglease", "run"]:
            self._have_what_it_runs(words)
            code = self._in_a_shell(line)
        elif words[0] == "pglease":
            with pytest.MonkeyPatch.context() as patch:
                for name, value in self._environment.items():
                    patch.setenv(name, value)
                code = main(words[1:])
        else:
            code = self._other(words)
        assert code == 0, line

    def _have_what_it_runs(self, words: list[str]) -> None:
        program = self._folder / words[words.index("--") + 1]
        program.write_text('#!/bin/sh\ntest -n "$PGLEASE_FENCING_TOKEN"\n', "utf-8")
        program.chmod(0o755)

    def _in_a_shell(self, line: str) -> int:
        environment = {**os.environ, **self._environment}
        return subprocess.run(["bash", "-c", line], check=False, cwd=self._folder, env=environment).returncode

    def _other(self, words: list[str]) -> int:
        for beginning, run in self._others.items():
            first = beginning.split()
            if words[: len(first)] == first:
                return run(words[len(first) :])
        raise LookupError(words)
