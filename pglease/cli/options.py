"""What the command's options have in common: durations, the store's address, `--json`, `-q`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import click

from pglease.cli.failures import USAGE, CommandError

if TYPE_CHECKING:
    from pglease.backends.base import Backend
    from pglease.client import PGLease

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Host:
    """A program that has the command line inside, as `manage.py pglease`.

    Attributes:
        program: what it is called, for usage and help.
        store: returns the store where neither --dsn nor --local names one.
        argv: returns what is executed for the COMMAND of `run`.
        keeps_store: whether the store goes on when the command ends. Default False: it is closed then.
    """

    program: str
    store: Callable[[], Backend]
    argv: Callable[[Sequence[str]], Sequence[str]]
    keeps_store: bool = False


NO_STORE = (
    "no store is named: use --dsn postgresql://user@host/db, set PGLEASE_URL or DATABASE_URL, or set libpq's PGHOST, "
    "PGSERVICE or PGDATABASE (--local chooses an SQLite file, for one host only)"
)


def examples(*lines: str) -> str:
    """Return an epilog that shows how a command is used, kept as it is written."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


class DurationType(click.ParamType):  # type: ignore[type-arg]  # generic in the types of newer versions only
    """Seconds as a number, or text such as 90s, 5m, 1h30m."""

    name = "duration"

    def __init__(self, *, zero: bool = False, forever: bool = False) -> None:
        self._zero = zero
        self._forever = forever

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read it with the library's own rules."""
        from pglease.errors import ConfigurationError
        from pglease.options import seconds

        argument = param.opts[-1] if param else "the duration"
        try:
            return seconds(value, argument, zero=self._zero, forever=self._forever)
        except ConfigurationError as broken:
            self.fail(str(broken), param, ctx)


class ListenType(click.ParamType):  # type: ignore[type-arg]
    """`host:port`, `[::1]:port` or a port alone."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """Take the two apart."""
        if isinstance(value, tuple):
            return value
        host, _, port = value.rpartition(":")
        if not port.isascii() or not port.isdigit() or int(port) > 65535:
            self.fail(f"{value!r} is no address: say host:port, or a port", param, ctx)
        return host.strip("[]") or "127.0.0.1", int(port)


class NameType(click.ParamType):  # type: ignore[type-arg]
    """A lease's name; completes from the store."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuse what no store may hold, before anything is sent anywhere."""
        from pglease.errors import ConfigurationError
        from pglease.options import text

        try:
            return text(value, "NAME")
        except ConfigurationError as broken:
            self.fail(str(broken), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:  # noqa: ARG002
        """Offer the names that are held now."""
        from click.shell_completion import CompletionItem

        from pglease.cli.completion import names_in_store

        return [CompletionItem(name) for name in names_in_store(ctx, incomplete)]


NAME = NameType()


def store_options(command: F) -> F:
    """Add `--dsn` and `--local`."""
    command = click.option(
        "--local", is_flag=True, help="Use an SQLite file in your state directory: one host only, never silently."
    )(command)
    return click.option(
        "--dsn",
        metavar="URL",
        help="The store. Default: PGLEASE_URL, then DATABASE_URL, then libpq's PGHOST, PGSERVICE or PGDATABASE. "
        "A password on the command line is seen by everybody on this machine: prefer the variables or ~/.pgpass.",
    )(command)


def json_option(command: F) -> F:
    """Add `--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")(command)


def quiet_option(command: F) -> F:
    """Add `-q`."""
    return click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors; for cron.")(command)


def store_address(dsn: str | None, local: bool, environment: Mapping[str, str] = os.environ) -> str:
    """Return the store's URL: the option, PGLEASE_URL, DATABASE_URL, then libpq's variables.

    Raises:
        CommandError: when nothing names a store (125), or two options contradict each other (2).
    """
    if dsn and local:
        raise CommandError("--dsn and --local contradict each other: choose one", USAGE)
    if local:
        return f"sqlite:///{quote(str(_local_directory(environment) / 'leases.db'))}"
    for address in (dsn, environment.get("PGLEASE_URL"), environment.get("DATABASE_URL")):
        if address:
            return address
    if any(environment.get(name) for name in ("PGHOST", "PGSERVICE", "PGDATABASE")):
        return "postgresql://"
    raise CommandError(NO_STORE)


def _local_directory(environment: Mapping[str, str]) -> Path:
    return _state_directory(environment) / "pglease"


def _make_local_directory() -> None:
    """Make the directory of this user's lease file; nobody else can enter it."""
    directory = _local_directory(os.environ)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--local keeps its leases in {directory}, which cannot be made: {error.strerror}") from None


def _state_directory(environment: Mapping[str, str]) -> Path:
    if stated := environment.get("XDG_STATE_HOME"):
        return Path(stated)
    home = Path(environment.get("HOME") or Path.home())
    if sys.platform == "darwin":
        return home / "Library" / "Application Support"
    if sys.platform == "win32":
        return Path(environment.get("LOCALAPPDATA") or home)
    return home / ".local" / "state"


def _chosen(ctx: click.Context) -> tuple[str | None, bool]:
    """Return `--dsn` and `--local` as given to the command, else to `pglease` itself."""
    dsn, local = None, False
    here: click.Context | None = ctx
    while here is not None and not dsn and not local:
        dsn, local = here.params.get("dsn"), bool(here.params.get("local"))
        here = here.parent
    return dsn, local


def address_from(ctx: click.Context) -> str:
    """Return the address given to the command, else to `pglease` itself, else from the environment."""
    dsn, local = _chosen(ctx)
    address = store_address(dsn, local)
    if local:
        _make_local_directory()
    return address


def _host(ctx: click.Context) -> Host | None:
    """Return whose store it is, unless an option names another one."""
    return None if any(_chosen(ctx)) else ctx.find_object(Host)


def open_store(ctx: click.Context) -> Backend:
    """Return the store: the one given by option, the host's, or the environment's. Nothing is sent yet.

    It is closed when the command ends, unless the host keeps it.
    """
    from pglease.backends import open_backend

    host = _host(ctx)
    store = open_backend(address_from(ctx)) if host is None else host.store()
    if host is None or not host.keeps_store:
        ctx.call_on_close(lambda: _close(store))
    return store


def open_client(ctx: click.Context, **options: Any) -> PGLease:
    """Return a client of the store, closed when the command ends. Nothing is sent before its first use.

    Options that are for addresses alone leave a host's store as the host made it.
    """
    from pglease.client import KNOBS, PGLease

    if _host(ctx) is None:
        client = PGLease(address_from(ctx), **options)
    else:
        client = PGLease(open_store(ctx), **{name: value for name, value in options.items() if name not in KNOBS})
    ctx.call_on_close(lambda: _close(client))
    return client


def _close(what: PGLease | Backend) -> None:
    with contextlib.suppress(Exception):  # the command's exit code is settled; what could not be given back lapses
        what.close()
