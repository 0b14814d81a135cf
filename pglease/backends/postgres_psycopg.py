"""Our own psycopg connections. Imported when the first one is made, so that `import pglease` loads no driver."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import psycopg

from pglease.backends.postgres_connections import OURS_ALONE, PROBE, OwnLink, Report
from pglease.backends.postgres_errors import translated
from pglease.errors import BackendError, BackendUnavailable


class Connection(psycopg.Connection[Any]):
    """A connection that tells, when it cannot be made, why; and that knows what stands between it and the server."""

    link: OwnLink

    @classmethod
    def connect(  # type: ignore[override]  # the pool passes our own keywords through
        cls, conninfo: str = "", *, params: dict[str, Any], report: Report, scrub: Callable[[str], str]
    ) -> Connection:
        """Connect and look once at the session: its pooler, its role, its isolation."""
        ours: BackendError
        try:
            connection = super().connect(conninfo, autocommit=True, prepare_threshold=0, **params)
        except Exception as error:  # noqa: BLE001  # told to those who wait, who raise it
            ours = translated(error, scrub, sent=False)
        else:
            try:
                connection._settle_in(report)
            except BackendError as error:
                ours = error
            except Exception as error:  # noqa: BLE001  # as above
                ours = translated(error, scrub, sent=False)
            else:
                return connection
            connection.close()
        report.failed(ours)
        raise psycopg.OperationalError(str(ours))

    def _settle_in(self, report: Report) -> None:
        pid, in_recovery, read_only, isolation = self.execute(PROBE, prepare=False).fetchone()
        if in_recovery:
            raise BackendUnavailable("the server is a standby; leases need the primary")
        if read_only:
            raise BackendUnavailable("the server is read-only; leases need the primary")
        report.pooler = pid != self.info.backend_pid
        if report.unprepared:
            self.prepare_threshold = None
        if report.pooler:  # the next statement may meet another session: nothing may be left in this one
            self.prepare_threshold = None
        else:
            self.execute(OURS_ALONE, prepare=False)
            isolation = "read committed"
        self.link = OwnLink(self, in_transactions=isolation != "read committed")


class _FromOurPools(logging.Filter):
    """Drops what the pool says about our connections: we say it ourselves, once, and rate limited."""

    def filter(self, record: logging.LogRecord) -> bool:
        told_by_us = isinstance(record.args, tuple) and record.args[:1] == ("pglease",)
        return not (
            told_by_us or (isinstance(record.args, tuple) and any(isinstance(a, Connection) for a in record.args))
        )


logging.getLogger("psycopg.pool").addFilter(_FromOurPools())
