"""Draws who held which lease and when, as one SVG: a row for each lease, a bar for each hold. Pure text.

Colour is never all there is: each way to end has a mark of its own shape, and each bar a title in words. The picture
brings its own background, for light and for dark, so it is readable wherever it is put; it asks for nothing from
elsewhere, no font and no script.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from html import escape

from pglease.records import Ending, Tenure

WIDTH = 960
_LABELS, _EDGE, _TOP, _ROW, _BAR = 190, 24, 64, 36, 20
_CHARACTER = 6.7
"""Pixels that a character takes at most, nearly: texts that would not fit are left out or cut."""
_STEPS = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 7 * 86400, 30 * 86400)
_UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
"""What XML cannot hold, and what turns the direction of all text after it."""

WORDS: dict[Ending | None, str] = {
    "released": "released",
    "expired": "ran out",
    "died": "its session died",
    "forced": "ended by an operator",
    "transferred": "handed over",
    None: "still held",
}
_SHAPES: dict[Ending | None, str] = {
    "released": "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0Z",  # a dot
    "expired": "M0 -6L6 0L0 6L-6 0Z",  # a diamond
    "died": "M-5 -5L5 5M5 -5L-5 5",  # a cross
    "forced": "M-5 -5H5V5H-5Z",  # a square
    "transferred": "M-4 -6L6 0L-4 6Z",  # an arrow
    None: "M-2 -6V6M2 -6V6",  # two lines: it goes on
}
_COLOURS = {
    "released": "#0072b2",
    "expired": "#e69f00",
    "died": "#d55e00",
    "forced": "#cc79a7",
    "transferred": "#009e73",
    "running": "#56b4e9",
}
"""Of Okabe and Ito, who chose them to be told apart by every kind of eye."""

STYLE = """
svg { --ink: #1f2328; --faint: #59636e; --line: #d1d9e0; --paper: #ffffff; color-scheme: light dark;
  font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
@media (prefers-color-scheme: dark) { svg { --ink: #f0f6fc; --faint: #9198a1; --line: #3d444d; --paper: #0d1117 } }
.paper { fill: var(--paper) } text { fill: var(--ink) } .faint { fill: var(--faint) }
.line { stroke: var(--line); stroke-width: 1 } .bar { fill-opacity: .22; stroke-width: 1.5 }
.mark { stroke: var(--paper); stroke-width: 1 } .stroke { fill: none; stroke-width: 3 } .title { font-weight: 600 }
"""
"""What stands in the picture's style element, to the letter: a page that takes the picture in allows this one by its
hash."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """Where a moment is."""

    begin: datetime
    end: datetime

    @property
    def seconds(self) -> float:
        return max((self.end - self.begin).total_seconds(), 0.001)

    def x(self, at: datetime) -> float:
        room = WIDTH - _LABELS - _EDGE
        share = (at - self.begin).total_seconds() / self.seconds
        return round(_LABELS + room * min(1.0, max(0.0, share)), 1)

    def ticks(self) -> list[datetime]:
        """Return round moments, at most nine."""
        step = next((step for step in _STEPS if self.seconds / step <= 8), self.seconds / 8)
        first = (self.begin.timestamp() // step + 1) * step
        count = int((self.end.timestamp() - first) // step) + 1
        return [datetime.fromtimestamp(first + n * step, UTC) for n in range(max(0, count))]

    def shown(self, at: datetime) -> str:
        """Return a tick's label."""
        if self.seconds > 3 * 86400:
            return f"{at:%b %d}"
        if self.seconds > 600:
            return f"{at:%H:%M}"
        return f"{at:%H:%M:%S}" if self.seconds > 8 else f"{at:%S.%f}"[:4] + " s"


def svg(tenures: Sequence[Tenure], *, title: str = "Who held which lease, and when") -> str:
    """Return the picture of some holds, of one lease or of many.

    Args:
        tenures: in any order, as `PGLease.history` returns them.
        title: what stands above, and is read to those who cannot see it.
    """
    rows: dict[str, list[Tenure]] = {}
    for tenure in sorted(tenures, key=lambda each: (each.name, each.acquired_at)):
        rows.setdefault(tenure.name, []).append(tenure)
    height = _TOP + _ROW * max(1, len(rows)) + 48
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title desc">',
        f'<title id="title">{_text(title)}</title>',
        f'<desc id="desc">{_text(_described(rows))}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="6"/>',
        f'<text class="title" x="{_EDGE}" y="28">{_text(title)}</text>',
        *(_drawn(rows) if rows else [f'<text class="faint" x="{_EDGE}" y="{_TOP + 20}">no hold is known</text>']),
        *_legend(tenures, height - 18),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _drawn(rows: dict[str, list[Tenure]]) -> list[str]:
    held = [tenure for row in rows.values() for tenure in row]
    begin, end = min(tenure.acquired_at for tenure in held), max(tenure.ended_at or tenure.seen_at for tenure in held)
    margin = (end - begin) * 0.02 + timedelta(milliseconds=1)
    scale = _Scale(begin - margin, end + margin)
    bottom = _TOP + _ROW * len(rows)
    parts = []
    for tick in scale.ticks():
        x = scale.x(tick)
        parts.append(f'<line class="line" x1="{x}" y1="{_TOP}" x2="{x}" y2="{bottom}"/>')
        parts.append(f'<text class="faint" x="{x}" y="{_TOP - 8}" text-anchor="middle">{scale.shown(tick)}</text>')
    parts.append(f'<text class="faint" x="{_EDGE}" y="{_TOP - 8}">{begin:%Y-%m-%d} UTC</text>')
    for place, (name, row) in enumerate(rows.items()):
        y = _TOP + _ROW * place + (_ROW - _BAR) / 2
        parts.append(f'<text x="{_EDGE}" y="{y + 14}">{_text(_cut(name, _LABELS - _EDGE - 8))}</text>')
        parts += [_bar(tenure, scale, y) for tenure in row]
    return parts


def _bar(tenure: Tenure, scale: _Scale, y: float) -> str:
    left, right = scale.x(tenure.acquired_at), scale.x(tenure.ended_at or tenure.seen_at)
    width, colour = max(2.0, round(right - left, 1)), _COLOURS[tenure.ending or "running"]
    dashed = "" if tenure.ending else ' stroke-dasharray="4 3"'
    label = next((text for text in _labels(tenure) if len(text) * _CHARACTER < width - 20), "")
    said = f'<text x="{left + 6}" y="{y + 14}">{_text(label)}</text>' if label else ""
    return (
        f"<g><title>{_text(_sentence(tenure))}</title>"
        f'<rect class="bar" x="{left}" y="{y}" width="{width}" height="{_BAR}" rx="3" fill="{colour}" '
        f'stroke="{colour}"{dashed}/>{said}{_mark(tenure.ending, left + width, y + _BAR / 2)}</g>'
    )


def _mark(ending: Ending | None, x: float, y: float) -> str:
    colour = _COLOURS[ending or "running"]
    look = f'class="stroke" stroke="{colour}"' if ending in {"died", None} else f'class="mark" fill="{colour}"'
    return f'<path {look} transform="translate({round(x, 1)} {y})" d="{_SHAPES[ending]}"/>'


def _labels(tenure: Tenure) -> tuple[str, ...]:
    return f"{tenure.owner_id} #{tenure.fencing_token}", f"#{tenure.fencing_token}"


def _sentence(tenure: Tenure) -> str:
    until = f"until {tenure.ended_at:%H:%M:%S}, {WORDS[tenure.ending]}" if tenure.ended_at else WORDS[None]
    return (
        f"{tenure.name}, token {tenure.fencing_token}: {tenure.owner_id} from "
        f"{tenure.acquired_at:%Y-%m-%d %H:%M:%S} UTC {until}"
    )


def _described(rows: dict[str, list[Tenure]]) -> str:
    """Return the picture in words: what a screen reader says."""
    if not rows:
        return "No hold is known."
    told = []
    for name, row in rows.items():
        ends = [WORDS[tenure.ending] for tenure in row]
        counted = ", ".join(f"{ends.count(word)} {word}" for word in dict.fromkeys(ends))
        last = row[-1]
        told.append(f"{name}: {len(row)} holds ({counted}); the last by {last.owner_id}, token {last.fencing_token}.")
    return " ".join(told)


def _legend(tenures: Sequence[Tenure], y: float) -> list[str]:
    parts, x = [], float(_EDGE + 6)
    for ending in [each for each in WORDS if any(tenure.ending == each for tenure in tenures)]:
        parts.append(_mark(ending, x, y - 4))
        parts.append(f'<text x="{round(x + 12, 1)}" y="{y}">{WORDS[ending]}</text>')
        x += 12 + len(WORDS[ending]) * 7.4 + 28
    return parts


def _cut(text: str, pixels: float) -> str:
    most = int(pixels / 7.4)
    return text if len(text) <= most else text[: most - 1] + "…"


def _text(text: str) -> str:
    """Return text that XML can hold, and that stays where it stands."""
    return escape(_UNFIT.sub("\ufffd", text))
