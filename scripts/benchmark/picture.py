"""Line charts as SVG, written out: a plotting library is larger than everything that would be drawn with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = ("#0b63c5", "#d1495b", "#2e8b57", "#8a5cc2", "#c77d0a", "#555555")
WIDTH, HEIGHT = 520, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 52
LEGEND_LINE = 16


@dataclass(frozen=True)
class Axis:
    """``ticks`` are values with their texts. With ``position`` values lie at its result, on any scale."""

    label: str
    ticks: Sequence[tuple[float, str]]
    position: Callable[[float], float] = math.log10


@dataclass(frozen=True)
class Chart:
    """``series``: points (x, y) by name, in the order of x."""

    title: str
    x: Axis
    y: Axis
    series: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def svg(self, left: int) -> str:
        """A group whose left edge is at ``left``."""
        parts = [f'<g transform="translate({left} 0)">', _text(WIDTH / 2, 20, self.title, "middle", "bold")]
        x_at = _scale(self.x, LEFT, WIDTH - RIGHT)
        y_at = _scale(self.y, HEIGHT - BOTTOM, TOP)
        for value, text in self.x.ticks:
            parts.append(_line(x_at(value), TOP, x_at(value), HEIGHT - BOTTOM))
            parts.append(_text(x_at(value), HEIGHT - BOTTOM + 16, text, "middle"))
        for value, text in self.y.ticks:
            parts.append(_line(LEFT, y_at(value), WIDTH - RIGHT, y_at(value)))
            parts.append(_text(LEFT - 6, y_at(value) + 4, text, "end"))
        parts.append(_text(WIDTH / 2, HEIGHT - 14, self.x.label, "middle"))
        parts.append(_text(LEFT, TOP - 6, self.y.label, "start"))
        for i, (name, points) in enumerate(self.series.items()):
            colour = COLOURS[i % len(COLOURS)]
            path = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            at = TOP + 14 + i * LEGEND_LINE
            parts.append(f'<rect x="{LEFT + 10}" y="{at - 8}" width="14" height="4" fill="{colour}"/>')
            parts.append(_text(LEFT + 30, at - 2, name, "start"))
        return "\n".join([*parts, "</g>"])


def picture(charts: Sequence[Chart]) -> str:
    """The charts side by side, on white."""
    width = WIDTH * len(charts)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" '
            f'height="{HEIGHT}" font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{HEIGHT}" fill="white"/>',
            *(chart.svg(i * WIDTH) for i, chart in enumerate(charts)),
            "</svg>\n",
        ]
    )


def decades(values: Sequence[float]) -> list[tuple[float, str]]:
    """Ticks at the powers of ten around ``values``, which are above 0."""
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return [(10.0**e, f"{10.0**e:,g}") for e in range(first, max(last, first + 1) + 1)]


def _scale(axis: Axis, start: float, stop: float) -> Callable[[float], float]:
    first, last = axis.position(axis.ticks[0][0]), axis.position(axis.ticks[-1][0])
    return lambda value: start + (axis.position(value) - first) / (last - first) * (stop - start)


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def _text(x: float, y: float, text: str, anchor: str, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
