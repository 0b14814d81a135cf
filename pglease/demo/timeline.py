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

    def column(at: float) -> int:
        return min(WIDTH - 1, max(0, int(at / total * WIDTH)))

    lines = [" " * label + "  " + _scale(total, column)]
    for worker in workers:
        row = [" "] * WIDTH
        for bar in (each for each in bars if each.worker == worker):
            first, last = column(bar.start), column(bar.end)
            row[first : last + 1] = ink.of(bar.kind) * (last + 1 - first)
        if worker == killed[0]:
            row[column(killed[1])] = ink.killed
        for bar in (each for each in bars if each.worker == worker and each.label):
            first, last = column(bar.start) + 1, column(bar.end)
            if len(bar.label) < last - first:
                row[first : first + len(bar.label)] = bar.label
        lines.append(f"{worker:<{label}}  {''.join(row)}".rstrip())
    legend = (
        f"{ink.held} holds the lease   {ink.waiting} waits   {ink.killed} kill -9   "
        f"{ink.running_out} nobody holds it: the dead worker's ttl runs out"
    )
    return [*lines, "", legend]


def _scale(total: float, column: object) -> str:
    place = column if callable(column) else int
    row = [" "] * (WIDTH + 4)
    for second in range(0, int(total) + 1, 2):
        text = f"{second}" if second else "0 s"
        at = place(float(second))
        row[at : at + len(text)] = text
    return "".join(row).rstrip()
