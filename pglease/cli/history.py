"""`history`: who held a lease, and how each hold ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pglease.cli import printing
from pglease.cli.options import NAME, examples, json_option, open_client, quiet_option, store_options

if TYPE_CHECKING:
    from pglease.records import Tenure


@click.command(
    epilog=examples(
        "pglease history daily-report",
        "pglease history daily-report --svg report.svg",
        "pglease history --prefix shop: --json --limit 1000",
    )
)
@click.argument("name", type=NAME, required=False)
@click.option("--prefix", default="", help="Instead of one NAME: all names that begin with this.")
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, help="The last so many holds.")
@click.option("--svg", metavar="FILE", type=click.Path(dir_okay=False, allow_dash=True), help="Draw it into a file.")
@store_options
@json_option
@quiet_option
@click.pass_context
def history(
    ctx: click.Context,
    /,
    *,
    name: str | None,
    prefix: str,
    limit: int,
    svg: str | None,
    as_json: bool,
    quiet: bool,
    **_: Any,
) -> int:
    """Show who held NAME, or all leases, under which token, from when to when, and how each hold ended.

    The store remembers as many holds of each name as the clients that take leases say: `?pglease.history=100` in
    their address. Without it there is the last one alone. Times are the store's. Exit code 1 when no hold is known.
    """
    if name is not None and prefix:
        raise click.UsageError("NAME and --prefix contradict each other")
    tenures = open_client(ctx).history(name, prefix=prefix, limit=limit)
    if as_json:
        for tenure in tenures:
            printing.say_json(_facts(tenure))
    if svg is not None:
        from pglease import timeline

        what = {"title": f"Who held {name}, and when"} if name is not None else {}
        printing.write(svg, timeline.svg(tenures, **what))
    elif tenures and not as_json:
        printing.columns([("NAME", "TOKEN", "HOLDER", "SINCE", "FOR", "END"), *map(_row, tenures)])
    if not tenures and not as_json and not quiet:
        printing.complain("no hold is known" + (f" of {name!r}" if name is not None else ""))
    return 0 if tenures else 1


def _facts(tenure: Tenure) -> dict[str, Any]:
    return {
        "name": tenure.name,
        "owner_id": tenure.owner_id,
        "fencing_token": tenure.fencing_token,
        "acquired_at": tenure.acquired_at,
        "ended_at": tenure.ended_at,
        "ending": tenure.ending,
        "seconds": round(tenure.seconds, 3),
    }


def _row(tenure: Tenure) -> tuple[str, ...]:
    from pglease.timeline import WORDS

    return (
        printing.visible(tenure.name),
        str(tenure.fencing_token),
        printing.visible(tenure.owner_id),
        f"{tenure.acquired_at:%Y-%m-%d %H:%M:%S}",
        printing.duration(tenure.seconds),
        WORDS[tenure.ending],
    )
