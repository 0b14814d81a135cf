"""`watch`: what happens to leases, one line a change."""

from __future__ import annotations

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
        "pglease watch daily-report",
        "pglease watch --prefix shop: --json | jq .",
    )
)
@click.argument("name", type=NAME, required=False)
@click.option("--prefix", help="All names that begin with this. Default, without NAME: all.")
@click.option("--timeout", type=DurationType(zero=True, forever=True), help="Stop after this long. Default: never.")
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
    as_json: bool,
    quiet: bool,
    **_: Any,
) -> int:
    """Watch NAME, or all leases, without taking part: one line for each change, until interrupted.

    First how things stand; with -q only what happens from then on. Times are the store's.
    """
    if name is not None and prefix is not None:
        raise click.UsageError("give either NAME or --prefix")
    leases = open_client(ctx)
    deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
    beginning = None if name is not None else prefix or ""
    with leases.watch(name, prefix=beginning, poll_interval=POLL) as changes:
        while (change := changes.next(max(0.0, deadline - time.monotonic()))) is not None:
            if not (quiet and change.kind == "present"):
                _tell(change, as_json)
    return 0


def _tell(change: LeaseChange, as_json: bool) -> None:
    if as_json:
        printing.say_json({"change": change.kind, "missed": change.missed, **printing.facts_of(change.lease)})
    else:
        printing.say(f"{change.lease.seen_at:%Y-%m-%d %H:%M:%S}  {printing.visible(change.name)}  {_sentence(change)}")


def _sentence(change: LeaseChange) -> str:
    lease = change.lease
    owner = printing.visible(lease.owner_id)
    if change.kind == "present":
        return "free" if lease.is_expired() else f"held by {owner} (token {lease.fencing_token})"
    missed = f"; {change.missed} before it were missed" if change.missed else ""
    return WORDS[change.kind].format(owner=owner, token=lease.fencing_token) + missed
