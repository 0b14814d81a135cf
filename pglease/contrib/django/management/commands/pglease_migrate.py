"""`manage.py pglease_migrate`: `migrate`, in one process at a time."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from django.core.management.base import CommandError
from django.core.management.commands.migrate import Command as Migrate
from django.db import connections

from pglease import options
from pglease.cli import printing
from pglease.cli.failures import CONFLICT, LOST, OUR_FAILURE
from pglease.client import PGLease
from pglease.contrib.django.conf import conf
from pglease.errors import AcquisitionError, BackendError, ConfigurationError, LeaseLostError
from pglease.handles import HeldLease
from pglease.signals import install_signal_handlers


class Command(Migrate):
    """`migrate` with all its options, under a lease: of many that start, one migrates and the others wait.

    When it is their turn, they find nothing to do and go on. The lease's own table is made first if it is missing, so
    the first `migrate` of a new database is no exception.

    A holder that loses its lease (the server cannot be reached, an operator ended it) sends no further statement, and
    the one under way is cancelled. So it is by SIGTERM (by psycopg), and then the lease is released.
    """

    help = "Updates the database schema as `migrate` does, in one process at a time: the others wait until it is done."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the lease's options to those of `migrate`."""
        super().add_arguments(parser)
        lease = parser.add_argument_group("lease")
        lease.add_argument("--lease", default="migrate", help="The name that excludes the others. Default: migrate.")
        lease.add_argument(
            "--ttl",
            type=_duration(),
            help="How long others wait after a crash; renewed while migrations run. Default: PGLEASE['TTL'], 60s.",
        )
        lease.add_argument(
            "--wait",
            type=_duration(zero=True),
            default=float("inf"),
            help="How long to wait for another one before giving up with exit code 75. Default: until it is done.",
        )

    def run_from_argv(self, argv: list[str]) -> None:
        """Run it from a command line, where SIGTERM ends it in order."""
        put_back = install_signal_handlers()
        try:
            super().run_from_argv(argv)
        finally:
            put_back()

    def handle(self, *args: Any, lease: str, ttl: float | None, wait: float, **migrate: Any) -> None:
        """Wait, then migrate.

        Raises:
            CommandError: with the return code 75 when the wait ran out, 76 when the lease was lost, 125 when the store
                could not be used; and what `migrate` raises.
        """
        mine = connections[migrate["database"]]
        with _client(lambda _: _cancel(mine)) as leases, _exit_codes():
            self._say_who_is_at_it(leases, lease, wait)
            held_for = conf().ttl if ttl is None else ttl
            with leases.acquire(lease, held_for, True, wait=wait) as held, _no_statement_after_a_loss_of(held):
                super().handle(*args, **migrate)

    def _say_who_is_at_it(self, leases: PGLease, name: str, wait: float) -> None:
        other = leases.get_lease(name) if wait else None
        if other is not None and not other.is_expired():
            left = printing.duration(other.time_remaining())
            self.stdout.write(f"  Waiting: {other.owner_id} is migrating, for another {left} unless renewed")
            self.stdout.flush()


@contextmanager
def _client(on_lost: Callable[[str], object]) -> Iterator[PGLease]:
    wanted = conf()
    store = wanted.open_store(create=True)
    try:
        with PGLease(store, wanted.owner_id, on_lease_lost=on_lost) as leases:
            yield leases
    finally:
        store.close()


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Tell in a sentence and a code what kept it from migrating."""
    try:
        yield
    except AcquisitionError as busy:
        raise CommandError(str(busy), returncode=CONFLICT) from busy
    except LeaseLostError as lost:
        raise CommandError(str(lost), returncode=LOST) from lost
    except BackendError as trouble:
        raise CommandError(str(trouble), returncode=OUR_FAILURE) from trouble


@contextmanager
def _no_statement_after_a_loss_of(lease: HeldLease) -> Iterator[None]:
    """Let no statement out after a loss, on any database."""

    def refuse(execute: Callable[..., Any], *statement: Any) -> Any:
        lease.raise_if_lost()
        return execute(*statement)

    with ExitStack() as stack:
        for each in connections.all():
            stack.enter_context(each.execute_wrapper(refuse))
        try:
            yield
        except LeaseLostError:
            raise
        except Exception:
            lease.raise_if_lost()  # the statement under way was cancelled: that is the consequence, this is why
            raise


def _cancel(connection: Any) -> None:
    """Cancel the statement that runs on a connection of Django's, on whichever thread."""
    driver = connection.connection
    if driver is not None:
        driver.cancel()


def _duration(*, zero: bool = False) -> Callable[[str], float]:
    def duration(text: str) -> float:
        try:
            return options.seconds(text, "it", zero=zero)
        except ConfigurationError as broken:
            raise argparse.ArgumentTypeError(str(broken)) from None

    return duration
