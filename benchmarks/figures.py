"""What was measured, against what, and how much it may be: facts that are kept as JSON and shown as tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SCALES = {"µs": 1e6, "ms": 1e3, "s": 1.0}


@dataclass(frozen=True)
class Spread:
    """The median of several runs, and the least and the most of them."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, runs: Iterable[float]) -> Spread:
        """Summarise one number for each run."""
        numbers = sorted(runs)
        return cls(statistics.median(numbers), numbers[0], numbers[-1])

    @classmethod
    def of_seconds(
        cls,
        runs: Iterable[Sequence[float]],
        unit: str,
        summary: Callable[[Sequence[float]], float] = statistics.median,
    ) -> Spread:
        """Summarise runs of seconds in another unit; each run first by `summary`."""
        return cls.of(summary(run) * SCALES[unit] for run in runs)

    def shown(self) -> str:
        """Return it as a cell of a table."""
        if self.least == self.most:
            return _shown(self.median)
        return f"{_shown(self.median)} ({_shown(self.least)} to {_shown(self.most)})"


def _shown(number: float) -> str:
    if abs(number) >= 100:
        return f"{number:,.0f}"
    return f"{number:.3g}" if abs(number) < 1 else f"{number:.1f}"


def late(share: float) -> Callable[[Sequence[float]], float]:
    """Return the summary that so large a share of a run stays below."""
    return lambda run: sorted(run)[min(len(run) - 1, int(share * len(run)))]


@dataclass(frozen=True)
class Aim:
    """A bound of the ratio, or of our own figure."""

    bound: float
    of: str = "ratio"
    at_least: bool = False

    def shown(self) -> str:
        """Return it as a person writes it."""
        return f"{'≥' if self.at_least else '≤'} {self.bound:g}{'×' if self.of == 'ratio' else ''}"

    def kept(self, figure: Figure) -> bool:
        """Tell whether a figure keeps it."""
        value = figure.ratio if self.of == "ratio" else figure.ours.median
        assert value is not None
        return value >= self.bound if self.at_least else value <= self.bound


@dataclass(frozen=True)
class Figure:
    """One kind of work, ours and what it is measured against.

    Attributes:
        work: what was done.
        unit: of both sides.
        ours, other: both sides, taken in turn in one run.
        beside: what the other side is.
        aim: the bound, if there is one.
        exact_ratio: the median of the ratios of neighbours, where that was taken; else the medians are divided.
        remark: what a reader must know to judge it.
    """

    work: str
    unit: str
    ours: Spread
    other: Spread | None = None
    beside: str = ""
    aim: Aim | None = None
    exact_ratio: float | None = None
    remark: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours through the other; None where the other took no time: it handed over before its release returned."""
        if self.exact_ratio is not None or self.other is None or not self.other.median:
            return self.exact_ratio
        return self.ours.median / self.other.median

    @property
    def kept(self) -> bool:
        """Whether the aim is kept; also where there is none."""
        return self.aim is None or self.aim.kept(self)

    def row(self) -> str:
        """Return a line of the section's table."""
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}×"
        aim = "" if self.aim is None else self.aim.shown() + ("" if self.kept else " (missed)")
        other = "" if self.other is None else self.other.shown()
        cells = (self.work, self.unit, self.ours.shown(), other, self.beside, ratio, aim, self.remark)
        return "| " + " | ".join(cells) + " |"


@dataclass(frozen=True)
class Section:
    """Figures that were taken together.

    Attributes:
        title: its heading.
        how: how they were taken, for people.
        figures: in the order of the table.
        notes: what was seen besides, one line each.
        missing: what was not measured, and why.
    """

    title: str
    how: str
    figures: list[Figure]
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def table(self) -> str:
        """Return the table, and what is said beneath it."""
        head = "| work | unit | pglease | other | beside | ratio | aim | remark |\n|---|---|---|---|---|---|---|---|"
        said = [f"* {line}" for line in (*self.notes, *(f"Not measured: {what}" for what in self.missing))]
        return "\n".join([head, *(figure.row() for figure in self.figures), *([""] if said else []), *said])


def to_json(section: Section, **facts: Any) -> str:
    """Return a section, and facts about its run, as text to keep."""
    return json.dumps({**facts, "section": asdict(section)}, indent=1, ensure_ascii=False) + "\n"


def from_json(text: str) -> tuple[Section, dict[str, Any]]:
    """Return what `to_json` kept."""
    facts = json.loads(text)
    kept = facts.pop("section")
    figures = [_figure(each) for each in kept.pop("figures")]
    return Section(figures=figures, **kept), facts


def _figure(kept: dict[str, Any]) -> Figure:
    ours, other, aim = Spread(**kept.pop("ours")), kept.pop("other"), kept.pop("aim")
    return Figure(ours=ours, other=other and Spread(**other), aim=aim and Aim(**aim), **kept)
