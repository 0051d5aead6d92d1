"""Draw the dashboards' panels as pictures, without Grafana, from what a Prometheus has stored.

    python -m deploy.grafana.draw --prometheus http://127.0.0.1:9090 --last-s 300 --output docs/pictures

Asks Prometheus for each panel's own expression over the time span, as Grafana would, and draws the answer with
matplotlib. Draws one picture per dashboard, named like its JSON file; a panel without data says so.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from deploy.grafana.contents import DASHBOARDS
from deploy.grafana.layout import Dashboard, Panel

POINTS = 300  # over the time span
ANSWER_S = 30.0
IN_A_ROW = 3
LEGEND_MAX = 8
SHORT_NAME = 20  # characters; four longer ones side by side would be wider than a panel
COLOURS = ("#3274d9", "#ff780a", "#37872d", "#c4162a", "#8f3bb8", "#e0b400", "#1f9e9e", "#7d7d7d")
CAPTION = (
    "Panels of the Grafana dashboard, drawn from Prometheus' data of a real run by deploy/grafana/draw.py. "
    "Grafana itself was not run."
)
SECONDS = (("days", 86400.0), ("h", 3600.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
BYTES = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))
SCALES = {"s": SECONDS, "bytes": BYTES, "Bps": tuple((f"{name}/s", size) for name, size in BYTES)}
BLUES = LinearSegmentedColormap.from_list("staleness", ["#ffffff", "#9ec5f4", "#1f60c4", "#0b2a5b"])

mpl.use("agg")
mpl.rcParams.update(
    {
        "font.size": 8.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e6e6e6",
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
    }
)


@dataclass(frozen=True)
class Series:
    """Values of one series on the span's common time axis; NaN where it has none."""

    name: str
    labels: dict[str, str]
    values: NDArray[np.float64]


@dataclass(frozen=True)
class Span:
    """A time span and the Prometheus that knows about it. Times are Unix seconds."""

    prometheus: str
    start_s: float
    end_s: float
    rate_s: float  # what `$__rate_interval` stands for

    @property
    def step_s(self) -> float:
        return (self.end_s - self.start_s) / POINTS

    @property
    def minutes(self) -> NDArray[np.float64]:
        """The common time axis, from 0."""
        return np.arange(POINTS + 1) * self.step_s / 60

    def ask(self, expr: str, legend: str) -> list[Series]:
        """Return an expression's series over the span."""
        query = expr.replace("$__rate_interval", f"{math.ceil(self.rate_s)}s").replace("$run", ".*")
        parameters = {"query": query, "start": self.start_s, "end": self.end_s, "step": self.step_s}
        url = f"{self.prometheus}/api/v1/query_range?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
            results = json.load(answer)["data"]["result"]
        found = []
        for result in results:
            values = np.full(POINTS + 1, np.nan)
            for at_s, value in result["values"]:
                values[round((at_s - self.start_s) / self.step_s)] = float(value)
            labels = result["metric"]
            name = re.sub(r"{{(\w+)}}", partial(_label, labels), legend)
            found.append(Series(name, labels, values))
        return sorted(found, key=lambda series: series.name)


def main() -> int:
    """Draw the dashboards that were asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="its address")
    parser.add_argument("--last-s", type=float, default=300.0, help="length of the time span")
    parser.add_argument("--end-s", type=float, default=0.0, help="its end, in Unix seconds; 0: now")
    parser.add_argument("--rate-s", type=float, default=10.0, help="window of rates")
    parser.add_argument("--only", default="", help="names of dashboards, such as overview,shards; empty: all")
    parser.add_argument("--output", type=Path, required=True, help="folder for the pictures")
    arguments = parser.parse_args()
    end_s = arguments.end_s or time.time()
    span = Span(arguments.prometheus, end_s - arguments.last_s, end_s, arguments.rate_s)
    arguments.output.mkdir(parents=True, exist_ok=True)
    only = set(filter(None, arguments.only.split(",")))
    for dashboard in DASHBOARDS:
        name = dashboard.uid.removeprefix("parashard-")
        if only and name not in only:
            continue
        try:
            figure = picture(dashboard, span)
        except (OSError, urllib.error.HTTPError) as error:
            sys.stderr.write(f"{arguments.prometheus} did not answer for {dashboard.title}: {error}\n")
            return 1
        figure.savefig(
            arguments.output / f"{name}.png", dpi=100, metadata={"Software": None}, pil_kwargs={"optimize": True}
        )
    return 0


def picture(dashboard: Dashboard, span: Span) -> Figure:
    """Return all panels of a dashboard side by side."""
    rows = -(-len(dashboard.panels) // IN_A_ROW)
    figure = Figure(figsize=(14, 0.9 + 2.9 * rows), layout="constrained")
    figure.suptitle(dashboard.title, x=0.008, ha="left", fontsize=13, fontweight="bold")
    figure.supxlabel(CAPTION, fontsize=8, color="#555555")
    places = figure.subplots(rows, IN_A_ROW, squeeze=False).flat
    for axes, panel in zip(places, dashboard.panels, strict=False):
        draw(axes, panel, span)
    for axes in places[len(dashboard.panels) :]:
        axes.set_axis_off()
    return figure


def draw(axes: Axes, panel: Panel, span: Span) -> None:
    """Draw one panel."""
    series = [found for query in panel.queries for found in span.ask(query.expr, query.legend)]
    axes.set_title(panel.title, loc="left", fontsize=9.5)
    axes.set_xlim(0, span.minutes[-1])
    axes.set_xlabel("minutes", fontsize=7.5, color="#555555", labelpad=1)
    if not any(np.isfinite(one.values).any() for one in series):
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color="#888888")
        axes.set_yticks([])
    elif panel.kind == "heatmap":
        heat_map(axes, series, span)
    elif panel.kind == "stack":
        stack(axes, panel, series, span)
    else:
        lines(axes, panel, series, span)


def lines(axes: Axes, panel: Panel, series: Sequence[Series], span: Span) -> None:
    """Draw one line per series."""
    for place, one in enumerate(series):
        colour = COLOURS[place % len(COLOURS)]
        axes.plot(span.minutes, one.values, color=colour, linewidth=1.3, label=_short(one.name))
    value_axis(axes, panel)
    legend(axes, len(series))


def stack(axes: Axes, panel: Panel, series: Sequence[Series], span: Span) -> None:
    """Draw the series on top of each other."""
    layers = [np.nan_to_num(one.values) for one in series]
    colours = [COLOURS[place % len(COLOURS)] for place in range(len(series))]
    axes.stackplot(span.minutes, layers, labels=[_short(one.name) for one in series], colors=colours, alpha=0.75)
    value_axis(axes, panel)
    legend(axes, len(series))


def heat_map(axes: Axes, series: Sequence[Series], span: Span) -> None:
    """Draw cumulative buckets as rows of cells; the darker, the larger the share of that moment's pushes."""
    buckets = sorted(series, key=lambda one: float(one.labels["le"]))
    cumulative = np.array([np.nan_to_num(one.values) for one in buckets])
    counts = np.clip(np.diff(cumulative, axis=0, prepend=0.0), 0.0, None)
    totals = counts.sum(axis=0)
    share = np.divide(counts, totals, out=np.zeros_like(counts), where=totals > 0)
    edges = np.append(span.minutes, span.minutes[-1] + span.step_s / 60)
    mesh = axes.pcolormesh(edges, np.arange(len(buckets) + 1), share, cmap=BLUES, vmin=0)
    axes.set_yticks(np.arange(len(buckets)) + 0.5, [one.labels["le"].removesuffix(".0") for one in buckets], fontsize=7)
    axes.set_ylabel("pushes missed, at most", fontsize=7.5)
    axes.grid(visible=False)
    bar = axes.figure.colorbar(mesh, ax=axes, pad=0.01, format=FuncFormatter(lambda part, _: f"{part:.0%}"))
    bar.set_label("share of pushes", fontsize=7.5)
    bar.outline.set_visible(False)


def value_axis(axes: Axes, panel: Panel) -> None:
    """Label values in the panel's unit."""
    if panel.minimum is not None:
        top = axes.dataLim.y1
        axes.set_ylim(panel.minimum, max(panel.minimum + 1.08 * (top - panel.minimum), panel.minimum + 1e-9))
    low, high = axes.get_ylim()
    scale = next((size for _, size in SCALES.get(panel.unit, ()) if high > 2 * size), 1.0)
    locator = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=panel.unit == "short" and high > 2)
    ticks = np.array(locator.tick_values(low / scale, high / scale)) * scale
    axes.set_yticks([tick for tick in ticks if low <= tick <= high])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, panel.unit)))
    if panel.unit.startswith("suffix: "):
        axes.set_ylabel(panel.unit.removeprefix("suffix: "), fontsize=7.5)


def legend(axes: Axes, entries: int) -> None:
    """Name the lines under the panel, up to LEGEND_MAX of them."""
    handles, names = axes.get_legend_handles_labels()
    more = f" (and {entries - LEGEND_MAX} more)" if entries > LEGEND_MAX else ""
    axes.legend(
        handles[:LEGEND_MAX],
        [*names[: LEGEND_MAX - 1], *(name + more for name in names[LEGEND_MAX - 1 : LEGEND_MAX])],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=4 if max(map(len, names), default=0) <= SHORT_NAME else 2,
        frameon=False,
        fontsize=7.5,
        handlelength=1.2,
        columnspacing=1.2,
    )


def shown(value: float, unit: str) -> str:
    """Return a value as a person reads it.

    >>> shown(0.0025, "s"), shown(3 * 2**20, "bytes"), shown(0.5, "percentunit"), shown(12000, "short")
    ('2.5 ms', '3 MiB', '50%', '12k')
    """
    if unit == "percentunit":
        return f"{100 * value:.4g}%"
    if unit in SCALES:
        return _scaled(value, SCALES[unit])
    return f"{value / 1000:.4g}k" if abs(value) >= 10_000 else f"{value:.4g}"


def _scaled(value: float, units: Sequence[tuple[str, float]]) -> str:
    for name, size in units:
        if abs(value) >= size:
            return f"{value / size:.4g} {name}"
    return f"{value / units[-1][1]:.4g} {units[-1][0]}" if value else "0"


def _label(labels: dict[str, str], braces: re.Match[str]) -> str:
    return labels.get(braces[1], "")


def _short(name: str) -> str:
    """Return a run's id as its beginning; nothing else is that long."""
    return re.sub(r"\b[0-9a-f]{16}\b", lambda found: f"run {found[0][:6]}", name)


if __name__ == "__main__":
    sys.exit(main())
