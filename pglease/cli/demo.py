"""`demo`: the story of `pglease.demo`, on a PostgreSQL of its own or on yours."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

from pglease.cli import printing
from pglease.cli.failures import CommandError
from pglease.cli.options import examples, json_option, quiet_option

if TYPE_CHECKING:
    from collections.abc import Iterator

ENDING = ("SIGTERM", "SIGHUP")


@click.command(
    epilog=examples(
        "pglease demo",
        "pglease demo --dsn postgresql://me@localhost/test",
    )
)
@click.option(
    "--dsn",
    metavar="URL",
    help="Play it on this server, in a schema that is dropped at the end. Default: an own server.",
)
@click.option("--ascii", "plain", is_flag=True, help="Draw without Unicode.")
@click.option("--svg", metavar="FILE", type=click.Path(dir_okay=False), help="Draw who held the lease into a file.")
@json_option
@quiet_option
@click.pass_context
def demo(ctx: click.Context, /, *, dsn: str | None, plain: bool, svg: str | None, as_json: bool, quiet: bool) -> int:
    """See it work: three workers, one lease, one kill -9, one refused write.

    It starts a PostgreSQL of its own (extra `demo`), plays for about twelve seconds, checks each step in the database
    and in the process table, and leaves no process and no file. Exit code 1 if anything did not happen as it should.
    """
    with _tidy_when_told_to_end(), _server(dsn or (ctx.parent.params.get("dsn") if ctx.parent else None)) as url:
        from pglease.demo.story import Story

        story = Story(url, say=_nothing if quiet or as_json else printing.say)
        true = story.play()
    if svg is not None:
        from pglease import timeline

        printing.write(svg, timeline.svg(story.tenures, title="pglease demo: one lease, three workers, one kill -9"))
    if as_json:
        for fact in story.facts:
            printing.say_json({"fact": fact.text, "true": fact.true, **fact.seen})
    elif not quiet or not true:
        _print(story, plain=plain or not _has_unicode())
    return 0 if true else 1


def _nothing(_: str) -> None:
    """Say nothing."""


@contextlib.contextmanager
def _server(dsn: str | None) -> Iterator[str]:
    if dsn:
        yield dsn
        return
    try:
        from pglease.testing.local_postgres import LocalPostgres

        server = LocalPostgres().start()
    except ImportError:  # also the library's own, where there are no server programs
        raise CommandError("the demo needs a PostgreSQL: install pglease[demo], or name one with --dsn") from None
    with server:
        yield server.dsn


@contextlib.contextmanager
def _tidy_when_told_to_end() -> Iterator[None]:
    """Unwind, and so end every process and remove every file, on TERM and HUP as on Ctrl-C."""

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {}
    for name in ENDING:
        if hasattr(signal, name):
            number = getattr(signal, name)
            before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _has_unicode() -> bool:
    try:
        "·█░✗".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _print(story: Any, *, plain: bool) -> None:
    from pglease.demo.story import WORKERS
    from pglease.demo.timeline import ASCII, UNICODE, draw

    ink = ASCII if plain else UNICODE
    if story.bars:
        printing.say("")
        for line in draw(WORKERS, story.bars, story.killed, story.total, ink):
            printing.say(line)
    printing.say("")
    for fact in story.facts:
        printing.say(f"{_mark(fact.true, plain)} {fact.text}")


def _mark(true: bool, plain: bool) -> str:
    text = ("ok  " if true else "FAIL") if plain else ("✓" if true else "✗")
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return click.style(text, fg="green" if true else "red")
