"""One lent connection, whichever driver made it: rows in, rows out, transactions on request.

`Link` is all that the statements above know of a driver. It serves psycopg 3 and psycopg2 connections alike, reads rows
of any shape (tuples, dicts, named tuples, whatever a cursor factory makes) by position, and never touches a transaction
it did not open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

Row = tuple[Any, ...]

IDLE = 2.0
"""Seconds for which a transaction of ours may lie idle. In it a row is locked, or the table: a process that stands
still there, or is cut off, would keep everybody from the name until the server noticed, which may take two hours."""


class Link:
    """A connection that is ours until it is given back.

    Args:
        connection: a psycopg 3 or psycopg2 connection.
        in_transactions: whether every statement runs in a READ COMMITTED transaction of its own, begun and committed
            here: on borrowed connections and where the server's default isolation is another. A snapshot older than a
            lock wait would read a stale token floor.
    """

    __slots__ = ("_begun", "connection", "in_transactions")

    def __init__(self, connection: Any, *, in_transactions: bool = False) -> None:
        self.connection = connection
        self.in_transactions = in_transactions
        self._begun = False

    def rows(self, statement: str, params: Mapping[str, Any] | None = None) -> list[Row]:
        """Run one statement and return its rows as tuples (none for a statement without rows)."""
        if self.in_transactions and not self._begun:
            with self.transaction():
                return self._rows(statement, params)
        return self._rows(statement, params)

    def _rows(self, statement: str, params: Mapping[str, Any] | None) -> list[Row]:
        with self.connection.cursor() as cursor:
            cursor.execute(statement, params)
            if cursor.description is None:
                return []
            columns = [column[0] for column in cursor.description]
            return [_as_tuple(row, columns) for row in cursor.fetchall()]

    def script(self, statements: str) -> None:
        """Run several statements without parameters, in one message."""
        with self.connection.cursor() as cursor:
            if hasattr(self.connection, "pgconn"):  # psycopg 3 would prepare it in time, and several cannot be
                cursor.execute(statements, prepare=False)
            else:
                cursor.execute(statements)

    @contextmanager
    def transaction(self, *, idle: float = IDLE) -> Iterator[Link]:
        """Run what follows in one READ COMMITTED transaction: committed at the end, rolled back on any exception.

        Args:
            idle: seconds for which it may lie idle; then the server ends it, and the connection.
        """
        begin = (
            "BEGIN" if self.connection.autocommit else "SET TRANSACTION"
        )  # a driver without autocommit sends BEGIN itself
        self.script(
            f"{begin} ISOLATION LEVEL READ COMMITTED; "
            f"SET LOCAL idle_in_transaction_session_timeout = {milliseconds(idle)}"
        )
        self._begun = True
        try:
            yield self
        except BaseException:
            self._begun = False
            self._quietly_roll_back()
            raise
        self._begun = False
        self._end("COMMIT")

    def _end(self, word: str) -> None:
        if self.connection.autocommit:
            self.script(word)
        elif word == "COMMIT":
            self.connection.commit()
        else:
            self.connection.rollback()

    def _quietly_roll_back(self) -> None:
        try:
            self._end("ROLLBACK")
        except Exception:  # noqa: BLE001  # a dead connection cannot roll back, and the error under way says why
            return


def milliseconds(seconds: float) -> int:
    """Return a time as a setting of the server's takes it: 0 would be none, and above 2**31 - 1 it takes nothing."""
    return max(1, round(min(1000 * seconds, 2**31 - 1)))


def _as_tuple(row: Any, columns: Sequence[str]) -> Row:
    if isinstance(row, tuple):
        return tuple(row)
    if isinstance(row, Mapping):
        return tuple(row[column] for column in columns)
    return tuple(row)
