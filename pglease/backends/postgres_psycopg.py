"""Our own psycopg connections. Imported when the first one is made, so that `import pglease` loads no driver.

Statements go through `psycopg.pq`, psycopg's own layer below its cursors: ours are few and fixed, and what a cursor
does for a statement it does not know yet (parse placeholders, choose dumpers, decide about preparing) costs a third of
a round trip.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import psycopg
from psycopg import generators, pq
from psycopg.abc import PQGen

from pglease.backends.cutoff import Cutoff
from pglease.backends.postgres_connections import OURS_ALONE, PROBE, Report
from pglease.backends.postgres_errors import translated
from pglease.backends.postgres_link import Link, Row
from pglease.errors import BackendError, BackendUnavailable

_PLACEHOLDER = re.compile(r"%\((\w+)\)s")
_READERS: dict[int, Callable[[bytes], Any]] = {16: lambda value: value == b"t", 20: int, 21: int, 23: int, 701: float}
"""By type: bool, the integers, float8. Everything else is text."""


class _Statement:
    """A statement that one connection has prepared."""

    __slots__ = ("name", "params", "readers")

    def __init__(self, name: bytes, params: tuple[str, ...]) -> None:
        self.name = name
        self.params = params
        self.readers: list[Callable[[bytes], Any]] | None = None


class OwnLink(Link):
    """One of our own connections. A statement is prepared the first time a connection sees it.

    Attributes:
        cutoff: shuts its socket when a conversation is overdue.
        watch: what an event loop keeps with it; None for none.
    """

    __slots__ = ("_pgconn", "_prepared", "cutoff", "watch")

    def __init__(self, connection: psycopg.Connection[Any], *, in_transactions: bool) -> None:
        super().__init__(connection, in_transactions=in_transactions)
        self._pgconn = connection.pgconn
        self._prepared: dict[str, _Statement] | None = None if connection.prepare_threshold is None else {}
        self.cutoff = Cutoff(connection.pgconn.socket)
        self.watch: object = None  # an event loop's

    def _rows(self, statement: str, params: Mapping[str, Any] | None) -> list[Row]:
        return self.wait(self.asking(statement, params))

    def asking(self, statement: str, params: Mapping[str, Any] | None) -> PQGen[list[Row]]:
        """Run one statement as psycopg's own layer does: a generator that yields what it waits for.

        It belongs to whoever drives it: `wait`, on a thread, or an event loop that watches the connection's socket.
        """
        if self._prepared is None:
            text, names = _numbered(statement)
            self._pgconn.send_query_params(text, [_written(params[name]) for name in names] if params else None)
            result = (yield from generators.execute(self._pgconn))[-1]
            return _read(result, _readers(result))
        known = self._prepared.get(statement) or (yield from self._prepare(self._prepared, statement))
        self._pgconn.send_query_prepared(
            known.name, [_written(params[name]) for name in known.params] if params else None
        )
        result = (yield from generators.execute(self._pgconn))[-1]
        if known.readers is None and result.status == pq.ExecStatus.TUPLES_OK:
            known.readers = _readers(result)
        return _read(result, known.readers or [])

    def wait(self, asking: PQGen[list[Row]]) -> list[Row]:
        """Drive a statement to its end, from wherever it is."""
        return self.connection.wait(asking)  # type: ignore[no-any-return]

    def _prepare(self, prepared: dict[str, _Statement], statement: str) -> PQGen[_Statement]:
        text, params = _numbered(statement)
        known = _Statement(f"pglease_{len(prepared)}".encode(), params)
        self._pgconn.send_prepare(known.name, text)
        _read((yield from generators.execute(self._pgconn))[-1], [])
        prepared[statement] = known
        return known


@lru_cache(maxsize=256)
def _numbered(statement: str) -> tuple[bytes, tuple[str, ...]]:
    """Return the statement with `$1`, `$2`… for its named placeholders, and the names in that order."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        if match[1] not in names:
            names.append(match[1])
        return f"${names.index(match[1]) + 1}"

    text = _PLACEHOLDER.sub(number, statement)
    return (text.replace("%%", "%") if names else text).encode(), tuple(names)


def _written(value: Any) -> bytes | None:
    """Write a parameter as PostgreSQL reads it. Every placeholder of ours has a cast, so text is all it takes."""
    if isinstance(value, str):
        return value.encode()
    if value is None:
        return None
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, list):
        return b"{%s}" % b",".join(map(_element, value))
    return repr(value).encode()


def _element(value: Any) -> bytes:
    written = _written(value)
    if written is None:
        return b"NULL"
    return b'"%s"' % written.replace(b"\\", b"\\\\").replace(b'"', b'\\"')


def _readers(result: Any) -> list[Callable[[bytes], Any]]:
    return [_READERS.get(result.ftype(column), bytes.decode) for column in range(result.nfields)]


def _read(result: Any, readers: list[Callable[[bytes], Any]]) -> list[Row]:
    if result.status == pq.ExecStatus.TUPLES_OK:
        return [_row(result, row, readers) for row in range(result.ntuples)]
    if result.status != pq.ExecStatus.COMMAND_OK:
        raise psycopg.errors.error_from_result(result, encoding="utf-8")
    return []


def _row(result: Any, row: int, readers: list[Callable[[bytes], Any]]) -> Row:
    values = []
    for column, read in enumerate(readers):
        value = result.get_value(row, column)
        values.append(None if value is None else read(value))
    return tuple(values)


class Connection(psycopg.Connection[Any]):
    """A connection that tells, when it cannot be made, why; and that knows what stands between it and the server."""

    link: OwnLink
    behind_pooler = False

    @classmethod
    def connect(  # type: ignore[override]  # the pool passes our own keywords through
        cls,
        conninfo: str = "",
        *,
        params: Callable[[], dict[str, Any]],
        report: Report,
        scrub: Callable[[str], str],
    ) -> Connection:
        """Connect and look once at the session: its pooler, its role, its isolation. `params` are asked for here."""
        ours: BackendError
        try:
            connection = super().connect(conninfo, autocommit=True, prepare_threshold=0, **params())
        except BackendError as error:
            ours = error
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
                report.connected()
                return connection
            connection.close()
        report.failed(ours)
        raise psycopg.OperationalError(str(ours))

    def _settle_in(self, report: Report) -> None:
        ((pid, in_recovery, read_only, isolation),) = self.execute(PROBE, prepare=False).fetchall()
        if in_recovery:
            raise BackendUnavailable("the server is a standby; leases need the primary")
        if read_only:
            raise BackendUnavailable("the server is read-only; leases need the primary")
        report.pooler = self.behind_pooler = pid != self.info.backend_pid
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
        args = record.args if isinstance(record.args, tuple) else ()
        # By its name, or that of a thread of it: one that connects into a hole outlives the pool's patience.
        named = str(args[0]).split("-")[0] if args else ""
        return named != "pglease" and not any(isinstance(each, Connection) for each in args)


logging.getLogger("psycopg.pool").addFilter(_FromOurPools())
