"""Every command that README and pages show is one that its program takes, and bash can read the lines.

Those that can be run are run where their page is: `test_docs.py`, `test_readme.py`.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pglease.cli import failures
from tests.support import book, shell

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


def refused(text: str, config: pytest.Config) -> Iterator[str]:
    """Yield what is wrong with the commands of a page."""
    for line in shell.lines_of(text):
        for words in shell.simple_commands(line):
            if problem := shell.refusal(words, config):
                yield f"{shlex.join(words)}: {problem}"
    for line in shell.mentioned(text):
        words = [shell.PLACEHOLDERS.get(word, word) for word in shlex.split(line)]
        if problem := shell.refusal(words, config, in_a_sentence=True):
            yield f"{line}: {problem}"


def test_every_command_of_a_page_is_one_that_its_program_takes(pytestconfig: pytest.Config) -> None:
    wrong = [f"{page.name}: {each}" for page in PAGES for each in refused(page.read_text("utf-8"), pytestconfig)]

    assert wrong == []


def test_the_examples_of_each_help_are_what_it_takes(pytestconfig: pytest.Config) -> None:
    examples = re.findall(r"^ +Examples:\n((?: {4}.+\n)+)", book.commands(), re.MULTILINE)
    lines = [re.split(r" {3,}", line.strip())[0] for block in examples for line in block.splitlines()]
    commands = [words for line in lines for words in shell.simple_commands(line) if words[0] == "pglease"]

    assert {words[1] for words in commands} >= {"run", "list", "wait", "history", "web", "options"}
    assert [problem for words in commands if (problem := shell.refusal(words, pytestconfig))] == []


def test_the_page_of_the_command_line_has_every_exit_code_and_who_says_it() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text("utf-8")
    rows = re.findall(r"^\| ([\d, ]+) \| ([^|]+) \|", page, re.MULTILINE)
    told = {int(code) for codes, _ in rows for code in codes.split(", ")}

    codes = {value for name, value in vars(failures).items() if name.isupper() and type(value) is int}
    assert told >= codes | {0, 1, 126, 127}
    helps = re.split(r"^## pglease ", book.commands(), flags=re.MULTILINE)[1:]
    say_one = {
        text.split()[0]
        for text in helps
        if re.search(r"exit code[^.]*\b1\b", text.partition("Options:")[0], re.IGNORECASE)
    }
    assert say_one == {word for codes, who in rows if codes == "1" for word in re.findall(r"`(\w+)", who)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("$ pglease lizt", "no command 'lizt'"),
        ("$ pglease run job --tll 5m -- ./job", "--tll"),
        ("$ pglease run job --ttl soon -- ./job", "soon"),
        ("$ pglease run job --ttl 5m --grace 4m -- ./job", "--ttl must be at least"),
        ("$ pglease show", "NAME"),
        ("*/5 * * * *  app  pglease run refresh -x -- ./job", "-x"),
        ("$ python manage.py pglease_migrate --noinputs", "--noinputs"),
        ("$ python manage.py pglease_migrat", "pglease_migrat"),
        ('$ pip install ".[redis,postgre]"', "postgre"),
        ("$ make dema", "dema"),
        ("$ pytest --pglease-backends=x", "--pglease-backends"),
        ("$ celery -A shop beat --scheduler pglease.contrib.celery:LeaseScheduler", "LeaseScheduler"),
        ("$ ls", "who knows ls?"),
        ("`pglease release NAME --tokens N`", "--tokens"),
    ],
)
def test_a_command_that_would_not_be_taken_is_found_out(text: str, said: str, pytestconfig: pytest.Config) -> None:
    (problem,) = refused(text, pytestconfig)

    assert said in problem


def test_what_is_around_a_command_is_no_part_of_it() -> None:
    line = "A=1 pglease run a --  sh -c 'x # y' | sort && pglease list > file & wait  # as # ever"

    assert list(shell.simple_commands(line)) == [
        ["pglease", "run", "a", "--", "sh", "-c", "x # y"],
        ["sort"],
        ["pglease", "list"],
        ["wait"],
    ]


def test_bash_can_read_what_is_typed() -> None:
    script = "\n".join(line for page in PAGES for line in shell.prompted(page.read_text("utf-8")))

    done = subprocess.run(["bash", "-n"], input=script, check=False, capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")
