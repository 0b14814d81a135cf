"""The ORM's transaction, guarded by a lease."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from django.db import connections, transaction

from pglease.contrib.django.conf import conf

if TYPE_CHECKING:
    from pglease.handles import HeldLease


@contextmanager
def guarded(
    lease: HeldLease, using: str | None = None, *, savepoint: bool = True, durable: bool = False
) -> Iterator[None]:
    """Run a block in `transaction.atomic()`, and let PostgreSQL refuse it if the lease is not current.

    What the block writes is committed only if this hold was current when it began, and until the transaction has ended
    nobody else is granted the name. Inside another `atomic()` that is the outer transaction: the block may be rolled
    back to its savepoint alone, and the guard goes with it. See `HeldLease.guard`.

    Args:
        lease: what `pglease.acquire` gave.
        using: the alias of the database to write to, which must be the one the lease is in. Default: that one.
        savepoint, durable: as for `transaction.atomic`.

    Raises:
        FencedError: the hold is over; the transaction (inside another `atomic()`: the block) is rolled back.
        ConfigurationError, BackendUnavailable: as for `HeldLease.guard`.
    """
    alias = conf().database if using is None else using
    with (
        transaction.atomic(using=alias, savepoint=savepoint, durable=durable),
        lease.guard(connections[alias]),
    ):
        yield
