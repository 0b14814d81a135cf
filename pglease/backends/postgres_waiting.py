"""The verbs that waiters and watchers rest on, in PostgreSQL: marks, hints by NOTIFY, and leased tickets.

A release or grant of a marked name tells the listeners from within its own UPDATE, in the statement's own transaction:
also on lent connections, whose conversations are transactions of our own. Never on a renewal, never for a name that
nobody marked, never inside a transaction of the application.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pglease import forks
from pglease.backends.base import Budget
from pglease.backends.postgres_connections import Connections
from pglease.backends.postgres_link import Link
from pglease.backends.postgres_listen import PostgresSubscription
from pglease.backends.postgres_sql import Statements
from pglease.errors import BackendClosed
from pglease.records import Granted, Place, Refused, Request, Ticket
from pglease.schema import TableNames

log = logging.getLogger("pglease")

T = TypeVar("T")

NOTIFY = "SELECT pg_catalog.pg_notify(%(channel)s::text, '')"
HELLO = 1.0
"""Seconds within which a notification of our own has to come back through a pooler."""


class Listening:
    """Whether and how one backend hears of marked names.

    Args:
        connections: where a connection of its own can be made.
        released: called with a name that was heard to be released.
        wanted: False: nobody is told and nobody listens (`notify=False`).
    """

    def __init__(self, connections: Connections, released: Callable[[str], object], *, wanted: bool) -> None:
        self._connections = connections
        self._released = released
        self.wanted = wanted
        self._fresh()

    def _fresh(self) -> None:
        self._lock = threading.RLock()
        self._deaf = not self.wanted
        self._closed = False
        self._open: set[PostgresSubscription] = set()

    def begin(self, names: TableNames, notify: Callable[[str], object], budget: Budget) -> PostgresSubscription | None:
        """Listen on a connection of its own; None where that cannot work."""
        if self._deaf:
            return None
        connection = self._connections.connect(budget)
        if connection is None:
            self._deaf = True
            return None
        subscription = PostgresSubscription(connection, names.channel, self._released, self._open.discard)
        try:
            self._open.add(subscription)
            if subscription.behind_pooler and not subscription.hears_itself(notify, budget, HELLO):
                self._deaf = True
                log.info("no notification comes through the pooler: waiters look on their own")
                subscription.close()
                return None
            subscription.begin(budget)
        except BaseException:
            subscription.close()
            raise
        if self._closed:
            subscription.close()
            raise BackendClosed("the backend is closed")
        return subscription

    def close(self) -> None:
        """Close every connection that listens."""
        self._closed = True
        for subscription in list(self._open):
            subscription.close()

    def forget(self) -> None:
        """In a forked child: the connections are the parent's."""
        for subscription in self._open:
            forks.bury(subscription)
        self._fresh()


def mark(link: Link, sql: Statements, name: str, seconds: float) -> bool:
    """Mark a name; see `WakingBackend.mark`."""
    ((marked,),) = link.rows(sql.mark, {"name": name, "seconds": seconds})
    return bool(marked)


def queue(link: Link, sql: Statements, ticket: Ticket) -> Place | None:
    """Take or renew a place; see `FairBackend.queue`."""
    params = {"name": ticket.name, "ticket_id": ticket.ticket_id, "owner": ticket.owner_id, "ttl": ticket.ttl}
    with link.transaction():
        if not link.rows(sql.queue_lock, {"name": ticket.name}):
            return None
        ((number, ahead),) = link.rows(sql.queue, params)
    return Place(number, ahead)


def leave_queue(link: Link, sql: Statements, name: str, ticket_id: str) -> bool:
    """Give a place up; see `FairBackend.leave_queue`."""
    rows = link.rows(sql.leave_queue, {"name": name, "ticket_id": ticket_id})
    return bool(rows and rows[0][0])


def in_turn(
    link: Link, sql: Statements, request: Request, params: Mapping[str, Any], ask: Callable[[Mapping[str, Any]], T]
) -> T | Refused | None:
    """Ask for a free name that has a queue: refused without a write unless our ticket is at its head, or nobody's is.

    Args:
        link: the connection of this conversation.
        sql: the statements.
        request: who asks.
        params: those of the ordinary statement.
        ask: runs the ordinary statement and reads its answer.

    Returns:
        the answer; None when somebody has locked the row.
    """
    if (refused := reserved(link, sql, request)) is not None:
        return refused
    with link.transaction():
        if not link.rows(sql.turn_lock, {"name": request.name}):
            return None
        if (refused := reserved(link, sql, request)) is not None:
            return refused
        answer = ask({**params, "in_turn": True})
        if request.ticket_id is not None and isinstance(answer, Granted):
            link.rows(sql.served, {"name": request.name, "ticket_id": request.ticket_id})
        return answer


def reserved(link: Link, sql: Statements, request: Request) -> Refused | None:
    """Refuse whoever is not at the head of the queue; None when that is `request`, or nobody queues."""
    rows = link.rows(sql.head, {"name": request.name, "ticket_id": request.ticket_id})
    if not rows or rows[0][0]:
        return None
    _, owner, left = rows[0]
    return Refused(None, max(0.0, left), owner)
