"""`exporter`: who holds what, for Prometheus."""

from __future__ import annotations

import signal
import threading
from typing import Any

import click

from pglease.cli import printing
from pglease.cli.options import ListenType, examples, open_client, quiet_option, store_options

PORT = 9909


@click.command(
    epilog=examples(
        "pglease exporter",
        "pglease exporter --listen 0.0.0.0:9909 --prefix shop: -q",
    )
)
@click.option(
    "--listen",
    type=ListenType(),
    default=f"127.0.0.1:{PORT}",
    show_default=True,
    metavar="HOST:PORT",
    help="Where to answer. Nobody is asked for a password there.",
)
@click.option("--prefix", default="", help="Only leases whose names begin with this.")
@click.option(
    "--whole-names",
    is_flag=True,
    help="Give every lease time series of its own. By default those with the same text before their first ':' share"
    " theirs, so that `webhook:4711` and its like do not flood Prometheus.",
)
@store_options
@quiet_option
@click.pass_context
def exporter(
    ctx: click.Context, /, *, listen: tuple[str, int], prefix: str, whole_names: bool, quiet: bool, **_: Any
) -> int:
    """Answer Prometheus at /metrics: what is held, by whom, since when and until when. Ends with TERM or Ctrl-C.

    Each scrape asks the store once, with the right to read alone (`pglease schema grants`). One exporter is enough for
    all processes that share a store. Alert rules and a dashboard are in deploy/monitoring of the repository.
    """
    from pglease.contrib.metric_names import stem
    from pglease.contrib.prometheus import serve

    ends = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: ends.set())
    (host, port), label = listen, str if whole_names else stem
    with serve(open_client(ctx, connect_timeout=5), host, port, prefix=prefix, metric_name=label) as found:
        if not quiet:
            printing.say(f"http://{f'[{host}]' if ':' in host else host}:{found}/metrics")
        ends.wait()
    return 0
