"""`list`, `show`, `wait`, `check`, `release`, `cleanup`: what the store says, and what an operator may do to it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from pglease.cli import printing
from pglease.cli.failures import CONFLICT
from pglease.cli.options import NAME, DurationType, examples, json_option, open_client, quiet_option, store_options

if TYPE_CHECKING:
    from pglease.client import PGLease
    from pglease.records import Lease

FREE, HELD, REFUSED, UNKNOWN = 1, 0, 1, 1
POLL = 1.0
"""Seconds between two looks of `wait` where the store does not say when to look."""


@click.command(
    "list",
    epilog=examples(
        "pglease list",
        "pglease list report: --json | jq -r 'select(.held) | .name'",
    ),
)
@click.argument("prefix", default="")
@click.option("-a", "--all", "ended", is_flag=True, help="Also names whose hold was given back.")
@store_options
@json_option
@quiet_option
@click.pass_context
def list_leases(ctx: click.Context, /, *, prefix: str, ended: bool, as_json: bool, quiet: bool, **_: Any) -> int:
    """List who holds what: all names that begin with PREFIX, or all.

    A hold that ran out is shown as free until somebody takes or cleans it up. Times are the store's.
    """
    leases = open_client(ctx).list_leases(prefix, ended=ended)
    if as_json:
        for lease in leases:
            printing.say_json(printing.facts_of(lease))
    elif leases:
        printing.table(leases)
    elif not quiet:
        printing.complain("no leases" + (f" begin with {prefix!r}" if prefix else ""))
    return 0


@click.command(
    epilog=examples(
        "pglease show daily-report --json",
    )
)
@click.argument("name", type=NAME)
@store_options
@json_option
@quiet_option
@click.pass_context
def show(ctx: click.Context, /, *, name: str, as_json: bool, quiet: bool, **_: Any) -> int:
    """Show everything the store says about NAME: who has it, since when, until when, if renewed, who queues.

    Those who wait without a queue (`fair=True`) are not known to the store. Exit code 1 when it does not know the name.
    """
    leases = open_client(ctx)
    lease = leases.get_lease(name)
    if lease is None:
        if as_json:
            printing.say_json({"name": name, "held": False, "known": False})
        elif not quiet:
            printing.complain(f"the store knows no lease {name!r}")
        return UNKNOWN
    queue = leases.queued(name) if leases.backend.traits.fair else None
    if as_json:
        printing.say_json(printing.facts_of(lease) | ({} if queue is None else {"queue": queue}))
    else:
        printing.details(lease, queue)
    return 0


@click.command(
    epilog=examples(
        'pglease check -q backup && echo "a backup is running"',
        'pglease check -q api --owner "$POD_NAME"       is this pod the leader: a readiness probe',
    )
)
@click.argument("name", type=NAME)
@click.option("--owner", metavar="LABEL", help="Ask whether this owner has it; somebody else's hold counts as free.")
@store_options
@json_option
@quiet_option
@click.pass_context
def check(ctx: click.Context, /, *, name: str, owner: str | None, as_json: bool, quiet: bool, **_: Any) -> int:
    """Tell whether NAME is held: exit code 0 if it is, 1 if it is free.

    The answer may be old by the time it is read: to act on a free name, use `run`.
    """
    lease = _held(ctx, name)
    if as_json:
        printing.say_json(printing.facts_of(lease) if lease else {"name": name, "held": False})
    elif not quiet:
        printing.say(_sentence(name, lease))
    if lease is not None and owner not in {None, lease.owner_id}:
        return FREE
    return HELD if lease else FREE


@click.command(
    epilog=examples(
        "pglease wait migration --timeout 5m && ./start-server",
    )
)
@click.argument("name", type=NAME)
@click.option(
    "--timeout", type=DurationType(zero=True, forever=True), help="Give up after this long, with 75. Default: never."
)
@store_options
@json_option
@quiet_option
@click.pass_context
def wait(ctx: click.Context, /, *, name: str, timeout: float | None, as_json: bool, quiet: bool, **_: Any) -> int:
    """Wait until NAME is free, without taking it: exit code 0 when it is, 75 when the time ran out.

    Another waiter may take it at once: to be the one who does, use `run --wait`.
    """
    leases = open_client(ctx)
    deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
    lease = _current(leases.get_lease(name))  # a store that is not there is an error and not a long wait
    if lease is not None and _ends(leases, lease, deadline):
        lease = None
    if as_json:
        printing.say_json(printing.facts_of(lease) if lease else {"name": name, "held": False})
    elif not quiet:
        (printing.complain if lease else printing.say)(_sentence(name, lease))
    return CONFLICT if lease else 0


@click.command(
    epilog=examples(
        "pglease show backup && pglease release backup --token 17",
    )
)
@click.argument("name", type=NAME)
@click.option(
    "--token", type=int, required=True, metavar="N", help="The fencing token of the hold to end, from `show`."
)
@store_options
@json_option
@quiet_option
@click.pass_context
def release(ctx: click.Context, /, *, name: str, token: int, as_json: bool, quiet: bool, **_: Any) -> int:
    """End somebody's hold of NAME by force: exit code 0 if it ended, 1 if the token is no longer current.

    The holder learns of it with its next renewal, up to a third of its ttl later, and may still be working until
    then: what protects the resource in between is the fencing token.
    """
    done = open_client(ctx).force_release(name, token)
    if as_json:
        printing.say_json({"name": name, "fencing_token": token, "released": done})
    elif not quiet:
        if done:
            printing.say(f"{printing.visible(repr(name))} was taken from its holder (token {token})")
        else:
            printing.complain(f"{name!r} is not held under token {token}: nothing was changed (see `pglease show`)")
    return 0 if done else REFUSED


@click.command(
    epilog=examples(
        "pglease cleanup --older-than 7d -q",
    )
)
@click.option(
    "--older-than",
    type=DurationType(zero=True),
    default="0s",
    show_default=True,
    help="Keep what ended more recently than this.",
)
@store_options
@json_option
@quiet_option
@click.pass_context
def cleanup(ctx: click.Context, /, *, older_than: float, as_json: bool, quiet: bool, **_: Any) -> int:
    """Delete the records of holds that have ended. Fencing tokens never go back because of it.

    Nothing depends on it: a lapsed lease is free without any janitor. It keeps a table with many one-off names small.
    """
    removed = open_client(ctx).cleanup_expired(older_than)
    if as_json:
        printing.say_json({"removed": removed})
    elif not quiet:
        printing.say(f"{removed} record{'' if removed == 1 else 's'} removed")
    return 0


def _ends(leases: PGLease, lease: Lease, deadline: float) -> bool:
    """Wait until a hold is over; its end counts though somebody else may have taken the name right after."""
    with leases.watch(lease.name, poll_interval=POLL) as watch:
        while (change := watch.next(max(0.0, deadline - time.monotonic()))) is not None:
            another = change.lease.fencing_token != lease.fencing_token
            if another or change.kind != "present" or change.lease.is_expired():
                return True
    return False


def _held(ctx: click.Context, name: str) -> Lease | None:
    return _current(open_client(ctx).get_lease(name))


def _current(lease: Lease | None) -> Lease | None:
    return None if lease is None or lease.is_expired() else lease


def _sentence(name: str, lease: Lease | None) -> str:
    shown = printing.visible(repr(name))
    if lease is None:
        return f"{shown} is free"
    left = printing.duration(lease.time_remaining())
    return f"{shown} is held by {printing.visible(lease.owner_id)} for another {left} unless renewed"
