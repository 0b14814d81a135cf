"""`watch`: what happens to leases, as a table on a terminal, else one line a change."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from pglease.cli import printing
from pglease.cli.options import NAME, DurationType, examples, json_option, open_client, quiet_option, store_options

if TYPE_CHECKING:
    from pglease.events import LeaseChange

POLL = 1.0
"""Seconds between two looks where the store does not say when to look."""
WORDS = {
    "acquired": "acquired by {owner} (token {token})",
    "taken over": "taken over by {owner} (token {token})",
    "released": "released by {owner} (token {token})",
    "expired": "expired: {owner} did not renew it (token {token})",
    "deleted": "its record was cleaned up",
}


@click.command(
    epilog=examples(
        "pglease watch",
        "pglease watch daily-report --lines",
        "pglease watch --prefix shop: --json | jq .",
    )
)
@click.argument("name", type=NAME, required=False)
@click.option("--prefix", help="All names that begin with this. Default, without NAME: all.")
@click.option("--timeout", type=DurationType(zero=True, forever=True), help="Stop after this long. Default: never.")
@click.option("--lines", is_flag=True, help="One line for each change, also on a terminal.")
@store_options
@json_option
@quiet_option
@click.pass_context
def watch(
    ctx: click.Context,
    /,
    *,
    name: str | None,
    prefix: str | None,
    timeout: float | None,
    lines: bool,
    as_json: bool,
    quiet: bool,
    **_: Any,
) -> int:
    """Watch NAME, or all leases, without taking part, until interrupted.

    On a terminal, where rich is installed (extra `cli`), a table: who holds what, since when, when it was renewed, how
    much is left, and what happened last. A state `held, late` says that a renewal is overdue. Elsewhere, and with
    --lines, one line for each change: first how things stand; with -q only what happens from then on. Times are the
    store's.
    """
    if name is not None and prefix is not None:
        raise click.UsageError("give either NAME or --prefix")
    leases = open_client(ctx, connect_timeout=3)
    deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
    if not (lines or as_json or quiet) and _has_a_screen():
        from pglease.cli import live

        live.run(leases, name, prefix or "", deadline)
        return 0
    beginning = None if name is not None else prefix or ""
    with leases.watch(name, prefix=beginning, poll_interval=POLL) as changes:
        while (change := changes.next(max(0.0, deadline - time.monotonic()))) is not None:
            if not (quiet and change.kind == "present"):
                _tell(change, as_json)
    return 0


def _has_a_screen() -> bool:
    """Tell whether a table can be drawn, and drawn anew."""
    from importlib.util import find_spec

    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb" and find_spec("rich") is not None


def _tell(change: LeaseChange, as_json: bool) -> None:
    if as_json:
        printing.say_json({"change": change.kind, "missed": change.missed, **printing.facts_of(change.lease)})
    else:
        printing.say(f"{change.lease.seen_at:%Y-%m-%d %H:%M:%S}  {printing.visible(change.name)}  {sentence(change)}")


def sentence(change: LeaseChange) -> str:
    """Say what happened, without the lease's name."""
    lease = change.lease
    owner = printing.visible(lease.owner_id)
    if change.kind == "present":
        return "free" if lease.is_expired() else f"held by {owner} (token {lease.fencing_token})"
    missed = f"; {change.missed} before it were missed" if change.missed else ""
    return WORDS[change.kind].format(owner=owner, token=lease.fencing_token) + missed
