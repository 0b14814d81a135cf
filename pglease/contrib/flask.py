"""Flask: a client for each application, and `flask pglease …`.

    from pglease.contrib.flask import PGLeaseExtension

    leases = PGLeaseExtension()

    def create_app():
        app = Flask(__name__)
        app.config["PGLEASE_DSN"] = "postgresql://user:pass@host/db"
        leases.init_app(app)
        return app

    @blueprint.post("/tasks/cleanup")
    def cleanup():
        with leases.client.acquire("cleanup", ttl="5m") as lease:
            ...

The client lives as long as the process. It is never closed at the end of a request: that would end the leases of all
other requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from flask import Flask, current_app
from flask.cli import with_appcontext

from pglease.backends import Backend
from pglease.cli.app import run_app
from pglease.cli.options import Host
from pglease.client import PGLease
from pglease.errors import ConfigurationError

PREFIX = "PGLEASE_"
ADDRESSES = ("PGLEASE_DSN", "PGLEASE_URL")
SETTINGS = (
    "owner_id",
    "heartbeat_interval",
    "margin",
    "table_name",
    "schema",
    "auto_initialize",
    "connect_timeout",
    "pool_size",
)
"""The arguments of `PGLease` that a configuration may have, as `PGLEASE_OWNER_ID` and so on."""


class PGLeaseExtension:
    """Gives applications a client: `PGLeaseExtension(app)`, or `init_app(app)` later, for any number of them.

    Args:
        app: the application. Default None: `init_app` follows.
        backend: a store or a client instead of an address, for instance `PGLease.from_engine(db.engine)`; for every
            application of this extension. Default None: what each application's configuration says.
        defaults: arguments of `PGLease` (`on_lease_lost`, `owner_id`…) where the configuration says nothing.
    """

    def __init__(
        self, app: Flask | None = None, *, backend: str | Backend | PGLease | None = None, **defaults: Any
    ) -> None:
        self._backend = backend
        self._defaults = defaults
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Give an application its client, `app.extensions["pglease"]`, and its command, `flask pglease`.

        Read from `app.config`: PGLEASE_DSN (or PGLEASE_URL; without both the environment's PGLEASE_URL, else
        DATABASE_URL), PGLEASE_OWNER_ID, PGLEASE_HEARTBEAT_INTERVAL, PGLEASE_MARGIN, PGLEASE_TABLE_NAME, PGLEASE_SCHEMA,
        PGLEASE_AUTO_INITIALIZE, PGLEASE_CONNECT_TIMEOUT, PGLEASE_POOL_SIZE; as the arguments of `PGLease`. Nothing is
        connected before the first use, and a forked worker has connections of its own.

        Raises:
            ConfigurationError: every broken rule at once, without showing the address.
        """
        app.extensions["pglease"] = self._made(app.config)
        app.cli.add_command(command)

    def _made(self, config: Mapping[str, Any]) -> PGLease:
        if isinstance(self._backend, PGLease):
            return self._backend
        stated = {name: config[f"{PREFIX}{name.upper()}"] for name in SETTINGS if f"{PREFIX}{name.upper()}" in config}
        arguments = {**self._defaults, **stated}
        address = self._backend or next((config[name] for name in ADDRESSES if config.get(name)), None)
        return PGLease.from_env(**arguments) if address is None else PGLease(address, **arguments)

    @property
    def client(self) -> PGLease:
        """The current application's client.

        Raises:
            ConfigurationError: `init_app` was not called for it.
            RuntimeError: there is no application context.
        """
        return client_of(current_app)


def client_of(app: Flask) -> PGLease:
    """Return an application's client, also outside of its context.

    Args:
        app: the application.

    Raises:
        ConfigurationError: `init_app` was not called for it.
    """
    found = app.extensions.get("pglease")
    if isinstance(found, PGLease):
        return found
    raise ConfigurationError("this application has no leases: call PGLeaseExtension.init_app(app)")


@click.command(
    "pglease",
    short_help="Look at the application's leases, end them, run commands under them.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@with_appcontext
def command(arguments: tuple[str, ...]) -> None:
    """Run `pglease` on the application's own store: `flask pglease list`."""
    store = client_of(current_app).backend
    host = Host("flask pglease", store=lambda: store, argv=tuple, keeps_store=True)
    click.get_current_context().exit(run_app(arguments, host=host))
