"""One plot a task: the final metric by staleness with the band of one machine's seeds, and the curves (matplotlib)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.statistics.cells import OLD_DEFAULT, PLAIN_NAME

mpl.use("agg")
mpl.rcParams.update({"svg.hashsalt": "parashard", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})

Cells = dict[tuple[str, int], list[dict[str, Any]]]
STYLES = {
    "auto": ("tab:green", "o"),
    "auto, one slow": ("tab:green", "v"),
    "auto, kills": ("tab:green", "x"),
    "auto, transfers": ("tab:green", "s"),
    "async": ("tab:orange", "o"),
    OLD_DEFAULT: ("tab:red", "o"),
    "ssp:1": ("tab:blue", "s"),
    "ssp:3": ("tab:blue", "D"),
}
LAG = ("0.4", "+")
CURVES = [("auto", 4), (OLD_DEFAULT, 4), ("async", 4), ("ssp:1", 4)]


def plotted(task: str, cells: Cells, folder: Path) -> str:
    """Draw a task's plot, and return the name of its file."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    plain = cells[PLAIN_NAME, 1]
    _by_staleness(left, cells, plain)
    _curves(right, cells, plain)
    metric = f"held-out {plain[0]['metric']}"
    left.set_ylabel(metric)
    figure.suptitle(f"{task}: {metric}, {'higher' if plain[0]['higher_is_better'] else 'lower'} is better")
    name = f"statistics_{task}.svg"
    figure.savefig(folder / name, metadata={"Date": None})
    return name


def _by_staleness(axes: Axes, cells: Cells, plain: list[dict[str, Any]]) -> None:
    values = [cell["value"] for cell in plain]
    axes.axhspan(min(values), max(values), color="0.85", label=f"one machine, {len(values)} seeds")
    for scenario, style in STYLES.items():
        found = [of for (name, _), of in sorted(cells.items()) if name == scenario]
        _points(axes, scenario, style, [(statistics.fmean(cell["staleness_mean"] for cell in of), of) for of in found])
    lags = [(int(name[4:]), of) for (name, _), of in cells.items() if name.startswith("lag ")]
    _points(axes, "each update so late", LAG, lags)
    axes.set_xlabel("mean staleness, in updates")
    axes.legend(fontsize=7, frameon=False)
    _limit(axes, plain)


def _points(
    axes: Axes, label: str, style: tuple[str, str], found: Sequence[tuple[float, list[dict[str, Any]]]]
) -> None:
    """Draw the mean of the seeds at each staleness, of those that did not diverge."""
    ends = [(staleness, [cell["value"] for cell in of if math.isfinite(cell["value"])]) for staleness, of in found]
    points = sorted((staleness, statistics.fmean(values)) for staleness, values in ends if values)
    if points:
        axes.plot(*zip(*points, strict=True), marker=style[1], color=style[0], markersize=5, label=label)


def _curves(axes: Axes, cells: Cells, plain: list[dict[str, Any]]) -> None:
    for number, cell in enumerate(plain):
        axes.plot(*zip(*cell["curve"], strict=True), color="0.7", linewidth=1, label="" if number else "one machine")
    for scenario, workers in CURVES:
        colour, mark = STYLES[scenario]
        for number, cell in enumerate(cells.get((scenario, workers), [])[:3]):
            if cell["curve"]:
                label = "" if number else f"{scenario}, {workers} workers"
                style = "--" if mark == "s" else "-"
                axes.plot(*zip(*cell["curve"], strict=True), style, color=colour, linewidth=1, label=label)
    axes.set_xlabel("epochs")
    axes.legend(fontsize=7, frameon=False)
    _limit(axes, plain)


def _limit(axes: Axes, plain: list[dict[str, Any]]) -> None:
    """Cut the axis of a loss at 1.5 times the worst of one machine: a loss that diverged would flatten the rest."""
    if not plain[0]["higher_is_better"]:
        worst = max(value for cell in plain for _, value in cell["curve"])
        axes.set_ylim(top=min(axes.get_ylim()[1], 1.5 * worst))
