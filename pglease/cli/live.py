"""`watch` on a terminal: who holds what, drawn anew each second, and what happened last below it."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pglease.cli import printing
from pglease.errors import BackendClosed, BackendError

if TYPE_CHECKING:
    from pglease.client import PGLease
    from pglease.events import LeaseChange
    from pglease.records import Lease
    from pglease.watching import Watch

EVERY = 1.0
"""Seconds between two looks at the store."""
EVENTS = 8
BAR = 14
COLUMNS = {"LEASE": 0, "STATE": 0, "HOLDER": 40, "TOKEN": 50, "SINCE": 64, "RENEWED": 90, "LEFT": 30, "": 78}
"""In their order, each with the width of a terminal from which it is shown."""


class Board:
    """What is known, and how it is drawn.

    Args:
        leases: who looks.
        name: the one lease to show; None for all that begin with `prefix`.
        prefix: the beginning of names.
    """

    def __init__(self, leases: PGLease, name: str | None, prefix: str) -> None:
        self._leases, self._name, self._prefix = leases, name, prefix
        self._seen: list[Lease] = []
        self._seen_at = 0.0
        self._trouble = ""
        self._events: deque[str] = deque(maxlen=EVENTS)

    def look(self) -> None:
        """Ask the store; what it said last stays on the board while it does not answer."""
        try:
            if self._name is None:
                self._seen = self._leases.list_leases(self._prefix, ended=True)
            else:
                found = self._leases.get_lease(self._name)
                self._seen = [] if found is None else [found]
        except BackendClosed:
            raise
        except BackendError as error:
            self._trouble = " ".join(str(error).split())
            return
        self._trouble, self._seen_at = "", time.monotonic()

    def hear(self, changes: Watch, until: float) -> bool:
        """Wait for the next change, at most until a moment; False when nothing came."""
        from pglease.cli.watch import sentence

        change: LeaseChange | None = changes.next(max(0.0, until - time.monotonic()))
        if change is None:
            return False
        if change.kind != "present":
            at = f"{change.lease.seen_at:%H:%M:%S}"
            self._events.append(f"{at}  {printing.visible(change.name)}  {sentence(change)}")
        return True

    def __rich_console__(self, console: Console, _: object) -> list[RenderableType]:
        """Draw it, as large as the terminal is now."""
        room = max(1, console.size.height - EVENTS - 8)
        shown = sorted(self._seen, key=lambda lease: (lease.is_expired(), lease.name))
        parts: list[RenderableType] = [self._heading(), self._table(shown[:room], console.width)]
        if len(shown) > room:
            parts.append(Text(f"and {len(shown) - room} more", style="dim"))
        parts += [Text(""), *(Text(event, no_wrap=True, overflow="ellipsis") for event in self._events)]
        return [Group(*parts)]

    def _heading(self) -> Text:
        if self._trouble:
            return Text(f"the store does not answer: {self._trouble}", style="bold red")
        held = sum(not lease.is_expired() for lease in self._seen)
        return Text(f"{held} held, {len(self._seen) - held} free · Ctrl-C ends", style="bold")

    def _table(self, leases: list[Lease], width: int) -> Table:
        """Return the table with as many columns as have room beside the names."""
        columns = [column for column, least in COLUMNS.items() if width >= least]
        table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False)
        for column in columns:
            if column in {"LEASE", "HOLDER"}:
                table.add_column(column, overflow="ellipsis", no_wrap=True, ratio=1)
            else:
                table.add_column(column, justify="left" if column in {"STATE", ""} else "right", no_wrap=True)
        for lease in leases:
            cells = self._cells(lease)
            table.add_row(*(cells[column] for column in columns))
        return table

    def _cells(self, lease: Lease) -> dict[str, RenderableType]:
        since_look = time.monotonic() - self._seen_at
        left = lease.time_remaining() - since_look
        name, token = Text(printing.visible(lease.name)), str(lease.fencing_token)
        if left <= 0:
            empty: dict[str, RenderableType] = dict.fromkeys(COLUMNS, "")
            return empty | {"LEASE": name, "STATE": Text("free", style="dim"), "TOKEN": token}
        ttl = max(0.001, (lease.expires_at - lease.heartbeat_at).total_seconds())
        late = printing.is_late(lease)
        age = (lease.seen_at - lease.acquired_at).total_seconds() + since_look
        renewed = (lease.seen_at - lease.heartbeat_at).total_seconds() + since_look
        return {
            "LEASE": name,
            "STATE": Text("held, late", style="bold yellow") if late else Text("held", style="green"),
            "HOLDER": Text(printing.visible(lease.owner_id)),
            "TOKEN": token,
            "SINCE": printing.duration(age),
            "RENEWED": printing.duration(renewed),
            "LEFT": printing.duration(left),
            "": ProgressBar(total=ttl, completed=left, width=BAR, complete_style="red" if late else "green"),
        }


def run(leases: PGLease, name: str | None, prefix: str, deadline: float) -> None:
    """Show the board until a moment on the monotonic clock, or until interrupted."""
    board = Board(leases, name, prefix)
    beginning = None if name is not None else prefix
    with (
        leases.watch(name, prefix=beginning, poll_interval=EVERY) as changes,
        Live(board, screen=True, auto_refresh=False) as live,
    ):
        while board.hear(changes, time.monotonic()):
            pass  # how things stood: what comes after that is news
        while (now := time.monotonic()) < deadline:
            board.look()
            live.refresh()
            until = min(deadline, now + EVERY)
            while board.hear(changes, until):
                live.refresh()
