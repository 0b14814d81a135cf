"""Draws who held the lease and when, one row a worker, in plain text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH = 60


@dataclass(frozen=True, slots=True)
class Bar:
    """One stretch in a worker's life, in seconds since the story began."""

    worker: str
    kind: Literal["waiting", "held", "running out"]
    start: float
    end: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class Ink:
    """What is drawn with: Unicode where the terminal has it, ASCII otherwise."""

    waiting: str
    held: str
    running_out: str
    killed: str

    def of(self, kind: str) -> str:
        """Return the character for one kind of stretch."""
        return {"waiting": self.waiting, "held": self.held, "running out": self.running_out}[kind]


UNICODE = Ink(waiting="·", held="█", running_out="░", killed="✗")
ASCII = Ink(waiting=".", held="#", running_out="-", killed="X")


def draw(workers: Sequence[str], bars: Sequence[Bar], killed: tuple[str, float], total: float, ink: Ink) -> list[str]:
    """Return the picture, line by line."""
    label = max(map(len, workers))
    lines = [" " * label + "  " + _scale(total)]
    for worker in workers:
        own = [bar for bar in bars if bar.worker == worker]
        row = _row(own, killed[1] if worker == killed[0] else None, total, ink)
        lines.append(f"{worker:<{label}}  {row}".rstrip())
    legend = (
        f"{ink.held} holds the lease   {ink.waiting} waits   {ink.killed} kill -9   "
        f"{ink.running_out} nobody holds it: the dead worker's ttl runs out"
    )
    return [*lines, "", legend]


def _row(bars: Sequence[Bar], killed: float | None, total: float, ink: Ink) -> str:
    row = [" "] * WIDTH
    for bar in bars:
        first, last = _column(bar.start, total), _column(bar.end, total)
        row[first : last + 1] = ink.of(bar.kind) * (last + 1 - first)
    if killed is not None:
        row[_column(killed, total)] = ink.killed
    for bar in bars:
        first, last = _column(bar.start, total) + 1, _column(bar.end, total)
        if bar.label and len(bar.label) < last - first:
            row[first : first + len(bar.label)] = bar.label
    return "".join(row)


def _column(at: float, total: float) -> int:
    return min(WIDTH - 1, max(0, int(at / total * WIDTH)))


def _scale(total: float) -> str:
    row = [" "] * (WIDTH + 4)
    for second in range(0, int(total) + 1, 2):
        text = str(second) if second else "0 s"
        at = int(second / total * WIDTH)
        row[at : at + len(text)] = text
    return "".join(row).rstrip()
