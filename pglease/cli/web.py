"""`web`: who holds what, in a browser."""

from __future__ import annotations

import os
import socket
from typing import Any
from urllib.parse import quote

import click

from pglease.cli import printing
from pglease.cli.failures import CommandError
from pglease.cli.options import DurationType, ListenType, examples, open_client, quiet_option, store_options

PORT = 9910
TOKEN = "PGLEASE_WEB_TOKEN"  # noqa: S105  # the name of the variable that may hold one


@click.command(
    epilog=examples(
        "pglease web",
        "pglease web --prefix shop: --listen 127.0.0.1:8000",
        "pglease web --allow-force-release",
        "ssh -L 9910:localhost:9910 server pglease web      to look at it from elsewhere",
    )
)
@click.option(
    "--listen",
    type=ListenType(),
    default=f"127.0.0.1:{PORT}",
    show_default=True,
    metavar="HOST:PORT",
    help="Where to answer. Beyond this machine, who reads must show the access token.",
)
@click.option("--prefix", default="", help="Only leases whose names begin with this.")
@click.option(
    "--every",
    type=DurationType(),
    default="1s",
    show_default=True,
    help="The time between two looks at the store, which are made for all readers together.",
)
@click.option(
    "--allow-force-release",
    is_flag=True,
    help="Let readers end somebody's hold. Each reader must show the access token.",
)
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="A name by which the page is reached, besides localhost and addresses in numbers. May be repeated.",
)
@store_options
@quiet_option
@click.pass_context
def web(
    ctx: click.Context,
    /,
    *,
    listen: tuple[str, int],
    prefix: str,
    every: float,
    allow_force_release: bool,
    hosts: tuple[str, ...],
    quiet: bool,
    **_: Any,
) -> int:
    """Show in a browser who holds what, who queues, and who held it before. Ends with TERM or Ctrl-C.

    Everybody on this machine may read it. An access token is asked for with --allow-force-release, where it listens
    beyond this machine, and where PGLEASE_WEB_TOKEN names one; else it is made anew with each start. The address that
    is printed has it. Traffic is not encrypted: beyond this machine, put it behind a proxy that speaks TLS.

    While nobody looks, the store is asked nothing; else once a tick, with the right to read alone (`pglease schema
    grants`).
    """
    from pglease.web import web_app
    from pglease.web.gate import is_loopback, new_token
    from pglease.web.serving import serve

    host, port = listen
    token = os.environ.get(TOKEN) or None
    if token is None and (allow_force_release or not is_loopback(host)):
        if quiet:
            raise click.UsageError(f"-q would leave nobody who knows the access token: set {TOKEN}")
        token = new_token()
    app = web_app(
        open_client(ctx, connect_timeout=3),
        prefix=prefix,
        every=every,
        access_token=token,
        allow_force_release=allow_force_release,
        hosts=(host, *hosts),
    )
    with _listener(host, port) as listener:
        if not quiet:
            printing.say(_address(host, listener.getsockname()[1], token))
        serve(app, listener)
    return 0


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise CommandError(f"{host}:{port} cannot be listened at: {error.strerror or error}") from None


def _address(host: str, port: int, token: str | None) -> str:
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    return where if token is None else f"{where}sign-in?token={quote(token, safe='')}"
