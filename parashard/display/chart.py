"""A run's loss and metrics over its steps, as an SVG picture, which follows the viewer's light or dark scheme."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from parashard.figures import metric, metric_name

WIDTH, PANEL_HEIGHT = 760, 220
LEFT, RIGHT, TOP, BOTTOM = 74, 20, 34, 34
GAP = 14
POINTS_MAX = 1000
"""Most points of a line: a long history is thinned."""
TICKS = 4
STYLE = """
  :root { color-scheme: light dark }
  text { font: 12px system-ui, sans-serif; fill: #566473 } .name { font-size: 14px; fill: #1c2733 }
  .ground { fill: #ffffff } .grid { stroke: #d5dce3 } polyline { fill: none; stroke-width: 1.8 }
  .line-0 { stroke: #0b6bcb } .line-1 { stroke: #c2560c } text.line-0 { stroke: none; fill: #0b6bcb }
  text.line-1 { stroke: none; fill: #c2560c } circle.line-0 { fill: #0b6bcb } circle.line-1 { fill: #c2560c }
  @media (prefers-color-scheme: dark) { .ground { fill: #10171f } text { fill: #9fb0c0 } .name { fill: #e6edf3 }
    .grid { stroke: #2b3744 } }
"""

Point = tuple[float, float]
"""A step, and a value."""


class Panel(NamedTuple):
    """One picture with its lines, at most two."""

    name: str
    lines: Mapping[str, Sequence[Point]]


def panels_of(history: Sequence[Mapping[str, object]]) -> list[Panel]:
    """Return the panels to draw: the loss, and each metric."""
    lines: dict[str, dict[str, dict[float, float]]] = {"loss": {}}  # by metric, then by data, then by step
    judged: object = None
    for line in history:
        step, found = line.get("steps_complete"), line.get("held_out")
        if not isinstance(step, int):
            continue
        _take(lines, "training", {"loss": line.get("training_loss")}, step)
        _take(lines, "training", line.get("training"), step)
        if found != judged:  # a line a second, but an evaluation only now and then
            judged = found
            _take(lines, "held out", found, step)
    names = ["loss", *sorted(lines.keys() - {"loss"})]
    panels = [
        Panel("loss" if name == "loss" else metric_name(name), {of: _thinned(line) for of, line in lines[name].items()})
        for name in names
    ]
    return [panel for panel in panels if panel.lines]


def _take(lines: dict[str, dict[str, dict[float, float]]], of: str, metrics: object, step: int) -> None:
    """Add the figures of one line of the history."""
    for name, value in metrics.items() if isinstance(metrics, Mapping) else ():
        if isinstance(value, int | float) and math.isfinite(value):
            lines.setdefault(str(name), {}).setdefault(of, {})[step] = float(value)


def svg(title: str, panels: Sequence[Panel]) -> str:
    """Return the picture: one panel below the other, steps along the bottom."""
    height = GAP + 30 + len(panels) * (PANEL_HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{height}"/>',
        f'<text class="name" x="{LEFT}" y="26">{escape(title)}</text>',
    ]
    for place, panel in enumerate(panels):
        parts.append(f'<g transform="translate(0 {30 + GAP + place * (PANEL_HEIGHT + GAP)})">')
        parts += _panel(panel)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel) -> list[str]:
    steps = [step for line in panel.lines.values() for step, _ in line]
    values = [value for line in panel.lines.values() for _, value in line]
    last = max(1.0, *steps)
    heights = _ticks(*_around(min(values), max(values)))
    low, high = heights[0], heights[-1]

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(value: float) -> float:
        return TOP + (PANEL_HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    parts = [f'<text class="name" x="{LEFT}" y="20">{escape(panel.name)}</text>']
    for value in heights:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{metric(value)}</text>')
    for step in _ticks(0.0, last):
        if step <= last:
            label = f"{step:,.0f}{'' if step else ' steps'}"
            parts.append(f'<text x="{x(step):.1f}" y="{PANEL_HEIGHT - 12}" text-anchor="middle">{label}</text>')
    for number, (name, line) in enumerate(panel.lines.items()):
        kind = f"line-{0 if name == 'training' else 1}"
        places = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in line)
        parts.append(f'<polyline class="{kind}" points="{places}"/>')
        parts.append(f'<circle class="{kind}" cx="{x(line[-1][0]):.1f}" cy="{y(line[-1][1]):.1f}" r="3"/>')
        said = f"{escape(name)} {metric(line[-1][1])}"
        parts.append(f'<text class="{kind}" x="{WIDTH - RIGHT - 150 * number}" y="20" text-anchor="end">{said}</text>')
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers at equal distances, from the last below `low` to the first above `high`.

    >>> _ticks(0.0, 2345.0)
    [0.0, 1000.0, 2000.0, 3000.0]
    """
    due = (high - low) / TICKS
    size = 10.0 ** math.floor(math.log10(due))
    step = next(size * many for many in (1, 2, 5, 10) if size * many >= due)
    return [step * number for number in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _around(low: float, high: float) -> tuple[float, float]:
    """Return bounds of an axis with some room; values that are all equal lie in its middle."""
    room = 0.02 * (high - low) or abs(high) / 2 or 1.0
    return low - room, high + room


def _thinned(line: Mapping[float, float]) -> list[Point]:
    points = sorted(line.items())
    stride = -(-len(points) // POINTS_MAX)
    return points if stride == 1 else [*points[:-1:stride], points[-1]]
