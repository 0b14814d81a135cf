"""The `pglease` group: which commands there are, and how every one of them ends."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

from pglease.cli import printing
from pglease.cli.failures import BROKEN_PIPE, INTERRUPTED, OUR_FAILURE, CommandError, scrub, sentence
from pglease.cli.options import store_options

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pglease.cli.options import Host

COMMANDS = {
    "run": "pglease.cli.run:run",
    "list": "pglease.cli.facts:list_leases",
    "show": "pglease.cli.facts:show",
    "wait": "pglease.cli.facts:wait",
    "watch": "pglease.cli.watch:watch",
    "check": "pglease.cli.facts:check",
    "release": "pglease.cli.facts:release",
    "cleanup": "pglease.cli.facts:cleanup",
    "schema": "pglease.cli.store:schema",
    "doctor": "pglease.cli.store:doctor",
    "bump-epoch": "pglease.cli.store:bump_epoch",
    "history": "pglease.cli.history:history",
    "exporter": "pglease.cli.exporter:exporter",
    "web": "pglease.cli.web:web",
    "options": "pglease.cli.explain:explain",
    "demo": "pglease.cli.demo:demo",
    "completion": "pglease.cli.completion:completion",
}
"""In the order of `--help`. Each is imported when it is asked for: a cron job that runs `run` pays for nothing else."""

COMPLETE_VARIABLE = "_PGLEASE_COMPLETE"


class Commands(click.Group):
    """A group that imports a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        """Return the names in the order of the table above."""
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; of a misspelt one say what was meant."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as wrong:
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, 1)
            if not near:
                raise
            raise click.UsageError(f"{wrong.message.rstrip('.')}: did you mean {near[0]}?", ctx) from None

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import one command."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("pglease")
        except PackageNotFoundError:
            found = "(not installed)"
        printing.say(f"pglease {found}")
        ctx.exit()


EPILOG = """\b
Examples:
  pglease run daily-report --ttl 5m -- ./report.sh     at most one of these at a time
  pglease run import --ttl 1m --wait 30s -- ./import   wait half a minute for the other one
  pglease list                                         who holds what
  pglease doctor                                       is the store fit for it
  pglease demo                                         see it work, with a PostgreSQL of its own

\b
Exit codes:
  2      wrong usage
  75     another holder has the lease, or the wait ran out
  76     the lease was lost and the command was ended
  125    pglease itself failed
  126    the command cannot be executed
  127    the command was not found
  128+n  ended by signal n; otherwise the command's own
"""


@click.group(
    cls=Commands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version."
)
@click.option("-v", "--verbose", is_flag=True, help="Print the library's log on standard error.")
@store_options
def app(verbose: bool, **_: Any) -> None:
    """One holder at a time, in the PostgreSQL you already run."""
    _set_up_logging(verbose)


def _set_up_logging(verbose: bool) -> None:
    """Keep all logs off standard error unless they are asked for: the commands themselves say what matters."""
    logging.getLogger().addHandler(logging.NullHandler())
    if verbose:
        handler = logging.StreamHandler()
        handler.setFormatter(_OneLine("pglease: %(levelname)s %(name)s: %(message)s"))
        logging.getLogger("pglease").addHandler(handler)
        logging.getLogger("pglease").setLevel(logging.DEBUG)


class _OneLine(logging.Formatter):
    """One line a record, without traceback and password."""

    def format(self, record: logging.LogRecord) -> str:
        record.exc_info = record.exc_text = record.stack_info = None
        return printing.visible(scrub(super().format(record), _secrets()))


def run_app(arguments: Sequence[str] | None = None, *, host: Host | None = None) -> int:
    """Run the command line and return its exit code; see `main`. `host` is a program that has it inside."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        printing.never_choke()
        if COMPLETE_VARIABLE in os.environ:
            _complete(os.environ[COMPLETE_VARIABLE])
        code = _run(given, host)
        sys.stdout.flush()
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except click.ClickException as wrong:
        return _explain(wrong, given)
    except BrokenPipeError:
        _forget_output()
        return BROKEN_PIPE
    except Exception as error:  # noqa: BLE001  # the last net: a sentence and a code, whatever happened
        printing.complain(scrub(sentence(error), _secrets(given)))
        return error.code if isinstance(error, CommandError) else OUR_FAILURE
    return code


def _run(arguments: list[str], host: Host | None) -> int:
    # Not `app.main`: it would turn a closed pipe into exit code 1.
    try:
        with app.make_context(host.program if host else "pglease", arguments, obj=host) as ctx:
            code = app.invoke(ctx)
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    return code if isinstance(code, int) else 0


def _explain(wrong: click.ClickException, arguments: Sequence[str]) -> int:
    ctx = getattr(wrong, "ctx", None)
    if isinstance(wrong, click.UsageError) and ctx is not None and wrong.message == ctx.get_help():
        click.echo(wrong.message, err=True)  # `pglease` alone
    else:
        see = f" (see '{ctx.command_path} --help')" if ctx is not None else ""
        printing.complain(scrub(" ".join(wrong.format_message().split()), _secrets(arguments)) + see)
    return wrong.exit_code


def _complete(instruction: str) -> NoReturn:
    """Answer a shell's question, and do not wait for a look-up that may still hang in the network."""
    from click.shell_completion import shell_complete

    code = shell_complete(app, {}, "pglease", COMPLETE_VARIABLE, instruction)
    sys.stdout.flush()
    os._exit(code)


def _secrets(arguments: Iterable[str] = ()) -> list[str]:
    """Return whatever may hold a password that could turn up in a message."""
    variables = [value for name, value in os.environ.items() if name.endswith(("_URL", "_DSN"))]
    password = os.environ.get("PGPASSWORD")
    return [*arguments, *variables, *([f"password='{password}'"] if password else [])]


def _forget_output() -> None:
    """Point standard output at nothing, so that the last flush does not complain about the closed pipe."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)
