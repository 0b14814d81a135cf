"""`schema`, `doctor` and `bump-epoch`: is the store fit for leases, and what would make it so."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from pglease.cli import printing
from pglease.cli.failures import CommandError, sentence
from pglease.cli.options import DurationType, examples, json_option, open_store, quiet_option, store_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ACTIONS = ("print", "apply", "diff", "grants")


@click.command(
    epilog=examples(
        "pglease schema | psql",
        "pglease schema apply --dsn postgresql://owner@host/db",
    )
)
@click.argument("action", type=click.Choice(ACTIONS), default="print")
@click.option(
    "--force",
    is_flag=True,
    help="With apply: upgrade a table of pglease 0.0.x although a lease in it still runs. Stop those clients first.",
)
@store_options
@json_option
@quiet_option
@click.pass_context
def schema(ctx: click.Context, /, *, action: str, force: bool, as_json: bool, quiet: bool, **_: Any) -> int:
    """Print, apply or compare the table that leases live in.

    `print` (the default) shows the statements that make it, for those who let no program create tables. `apply`
    creates or upgrades it, safe for any number at once, and again. `diff` says how the store's table differs: exit
    code 0 when it does not, 1 when it does. `grants` shows the rights each role needs.
    """
    if force and action != "apply":
        raise click.UsageError("--force goes with `pglease schema apply`")
    actions: dict[str, Callable[[Any], int]] = {
        "print": _print,
        "apply": partial(_apply, force=force),
        "diff": _diff,
        "grants": _grants,
    }
    store = _Store(ctx, as_json, quiet)
    return actions[action](store)


class _Store:
    """The store's backend for the time of one command, and how its answers are printed."""

    def __init__(self, ctx: click.Context, as_json: bool, quiet: bool) -> None:
        self.backend: Any = open_store(ctx)
        self.as_json = as_json
        self.quiet = quiet

    def verb(self, name: str, purpose: str) -> Callable[..., Any]:
        """Return what the store can do, or say in one sentence that it cannot."""
        found: Callable[..., Any] | None = getattr(self.backend, name, None)
        if found is None:
            raise CommandError(f"{purpose}: this store ({self.backend.traits.kind}) has nothing of the kind")
        return found

    def lines(self, key: str, lines: Iterable[str], otherwise: str) -> None:
        """Print sentences, or one if there are none."""
        found = list(lines)
        if self.as_json:
            printing.say_json({key: found})
        elif found or not self.quiet:
            for line in found or [otherwise]:
                printing.say(line)

    def text(self, key: str, text: str) -> None:
        """Print a text as it is."""
        if self.as_json:
            printing.say_json({key: text})
        else:
            printing.say(text.rstrip("\n"))


def _print(store: _Store) -> int:
    store.text("ddl", store.verb("ddl", "cannot print a schema")())
    return 0


def _grants(store: _Store) -> int:
    store.text("grants", store.verb("grants", "cannot print grants")())
    return 0


def _apply(store: _Store, *, force: bool) -> int:
    done = store.verb("apply_schema", "cannot apply a schema")(**({"force": True} if force else {}))
    store.lines("done", done, "the schema is up to date: nothing was done")
    return 0


def _diff(store: _Store) -> int:
    differences = list(store.verb("schema_diff", "cannot compare a schema")())
    store.lines("differences", differences, "the schema is as it should be")
    return 1 if differences else 0


@click.command(
    epilog=examples(
        "pglease doctor",
        "pglease doctor -q --dsn postgresql://host/db     only what is not in order",
    )
)
@store_options
@json_option
@quiet_option
@click.pass_context
def doctor(ctx: click.Context, /, *, as_json: bool, quiet: bool, **_: Any) -> int:
    """Check whether the store is fit for leases: one line a check, and what to do. Exit code 1 if a check failed."""
    store = _Store(ctx, as_json, quiet)
    statuses = [_examine(check, store) for check in _checks(store)]
    return 1 if "fail" in statuses else 0


def _checks(store: _Store) -> Iterable[tuple[str, str, str, str]]:
    from pglease.errors import BackendError

    try:
        for check in store.verb("diagnose", "cannot examine the store")():
            yield check.name, check.status, check.text, check.remedy or ""
    except BackendError as error:
        yield "reachable", "fail", sentence(error), ""


def _examine(check: tuple[str, str, str, str], store: _Store) -> str:
    name, status, text, remedy = check
    if store.as_json:
        printing.say_json({"check": name, "status": status, "text": text, "remedy": remedy or None})
    elif status != "ok" or not store.quiet:
        printing.say(printing.visible(f"{status:<4}  {name}: {text}" + (f" → {remedy}" if remedy else "")))
    return status


@click.command(
    "bump-epoch",
    epilog=examples(
        "pglease bump-epoch --dsn postgresql://owner@restored/db",
        "pglease bump-epoch --quarantine 5m     and nobody is granted anything for five minutes",
    ),
)
@click.option(
    "--quarantine",
    type=DurationType(zero=True),
    help="Grant nothing for so long: as long as the longest ttl in use, since holders that this store has never heard"
    " of may still act on their leases.",
)
@store_options
@json_option
@quiet_option
@click.pass_context
def bump_epoch(ctx: click.Context, /, *, quarantine: float | None, as_json: bool, quiet: bool, **_: Any) -> int:
    """Let fencing tokens go on above all that were ever granted.

    A promoted replica, a restored dump and a recovery to a point in time are noticed by the next grant, which does
    this by itself. What no server can notice needs this command, before anybody asks for a lease: a volume or a
    virtual machine that was set back to a snapshot, rows that were deleted or copied back by hand, and servers of
    which `doctor` says that they cannot tell their timeline. Running it once too often does no harm.
    """
    store = _Store(ctx, as_json, quiet)
    epoch = store.verb("bump_epoch", "cannot begin a new epoch")(quarantine=quarantine)
    above = epoch << 32
    if as_json:
        printing.say_json({"epoch": epoch, "tokens_above": above})
    elif not quiet:
        printing.say(f"epoch {epoch}: every fencing token from now on is above {above}")
    return 0
