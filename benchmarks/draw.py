"""Draws figures as bars, in SVG that reads on light and on dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from benchmarks.figures import Figure

WIDTH, LABEL, ROW, TOP = 860, 400, 24, 56
_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328; } .small { font-size: 11px; fill: #59636e; }
  .title { font-weight: 600; } .good { fill: #1a7f37; } .costs { fill: #bf5b00; } .one { stroke: #59636e; }
  .aim { stroke: #0969da; stroke-width: 2; } .back { fill: #ffffff; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .small { fill: #9198a1; } .good { fill: #3fb950; } .costs { fill: #e3862f; }
    .one { stroke: #9198a1; } .aim { stroke: #58a6ff; } .back { fill: #0d1117; }
  }
"""


def drawn(title: str, figures: Sequence[Figure], *, about: str) -> str:
    """Return a picture of ratios on a logarithmic scale; a line at one, and a mark at each aim.

    Args:
        title: its heading.
        figures: those with a ratio are drawn.
        about: one line beneath the heading.
    """
    bars = [figure for figure in figures if figure.ratio]
    scale = _Scale([figure.ratio or 1.0 for figure in bars])
    height = TOP + ROW * len(bars) + 28
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{height}" rx="6"/>',
        f'<text class="title" x="16" y="24">{escape(title)}</text>',
        f'<text class="small" x="16" y="42">{escape(about)}</text>',
        *(_bar(figure, TOP + ROW * place, scale) for place, figure in enumerate(bars)),
        *(_tick(tick, height, scale) for tick in scale.ticks()),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class _Scale:
    """From ratios to places, by their logarithm."""

    def __init__(self, ratios: Sequence[float]) -> None:
        self._low, self._high = min([0.5, *ratios]) * 0.95, max([2.0, *ratios]) * 1.25

    def __call__(self, ratio: float) -> float:
        share = math.log(ratio / self._low) / math.log(self._high / self._low)
        return LABEL + 16 + share * (WIDTH - LABEL - 80)

    def ticks(self) -> list[float]:
        powers = (base * 10**power for power in range(-4, 5) for base in (1, 2, 5))
        ticks = [tick for tick in powers if self._low <= tick <= self._high]
        return ticks if len(ticks) < 8 else [tick for tick in ticks if math.log10(tick).is_integer()]


def _bar(figure: Figure, y: float, scale: _Scale) -> str:
    ratio = figure.ratio or 1.0
    start, end = sorted((scale(1.0), scale(ratio)))
    good = figure.kept if figure.aim is not None else ratio <= 1 if figure.unit != "a second" else ratio >= 1
    label = f"{figure.work}, beside {figure.beside}" if figure.beside else figure.work
    mark, right = "", max(end, scale(1.0))
    if figure.aim is not None and figure.aim.of == "ratio":
        at = scale(figure.aim.bound)
        right = max(right, at)
        mark = f'<line class="aim" x1="{at:.1f}" x2="{at:.1f}" y1="{y}" y2="{y + 16}"/>'
    return (
        f'<text x="{LABEL}" y="{y + 13}" text-anchor="end">{escape(_short(label))}</text>'
        f'<rect class="{"good" if good else "costs"}" x="{start:.1f}" y="{y + 2}" '
        f'width="{max(1.0, end - start):.1f}" height="12" rx="2"/>{mark}'
        f'<text class="small" x="{right + 6:.1f}" y="{y + 13}">{ratio:.2f}×</text>'
    )


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"


def _tick(tick: float, height: int, scale: _Scale) -> str:
    x = scale(tick)
    line = f'<line class="one" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - 24}"/>' if tick == 1 else ""
    return f'{line}<text class="small" x="{x:.1f}" y="{height - 10}" text-anchor="middle">{tick:g}×</text>'
