"""Plots of the races, from the JSON files that they wrote: `python -m benchmarks.races.plots` (needs matplotlib).

Writes an SVG beside each file of `benchmarks/results` that is there: how many times faster than each peer we are, with
the targets as marks, and how a step grows with its bytes, with workers and with shards.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks.tables import RESULTS

mpl.use("agg")
mpl.rcParams.update({"svg.hashsalt": "parashard", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})

RATIOS = ("push_pull", "race_scheduling", "race_training")
BYTES_PER_MIB = 1 << 20
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20)

Rows = Sequence[dict[str, Any]]


def main() -> None:
    """Draw a plot for each file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files, and of the plots")
    results = parser.parse_args().results
    for name in RATIOS:
        if (path := results / f"{name}.json").exists():
            save(ratios(json.loads(path.read_text())), path)
    if (path := results / "growth.json").exists():
        save(growth(json.loads(path.read_text())), path)


def ratios(content: dict[str, Any]) -> Figure:
    """Return bars of how many times faster we are than each peer, on a logarithmic axis; a mark is a target."""
    rows: Rows = [row for row in content["rows"] if shown(row)]
    figure = Figure(figsize=(8, 1.2 + 0.24 * len(rows)), layout="constrained")
    axes: Axes = figure.subplots()
    places = range(len(rows), 0, -1)
    colours = ["tab:gray" if row["reached"] is None else "tab:green" if row["reached"] else "tab:red" for row in rows]
    values = [row["ratio"] for row in rows]
    spread = [[v - row["ratio_low"] for v, row in zip(values, rows, strict=True)],
              [row["ratio_high"] - v for v, row in zip(values, rows, strict=True)]]  # fmt: skip
    errors = [[max(0.0, error) for error in side] for side in spread]  # a ratio of medians may lie outside
    axes.barh(places, values, xerr=errors, color=colours, height=0.7, error_kw={"linewidth": 0.8})
    marked = [(row["target"], place) for row, place in zip(rows, places, strict=True) if row["target"] is not None]
    axes.plot(*zip(*marked, strict=True) if marked else ((), ()), "k|", markersize=11, label="target")
    axes.set_yticks(
        list(places), [f"{row['race']}, {row['size']}: {row['ours']} against {row['peer']}" for row in rows]
    )
    axes.set_xscale("log")
    axes.set_xticks(TICKS, [f"{tick:g} x" for tick in TICKS])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(min([0.5, *values]) / 1.3, max([2.0, *values]) * 1.3)
    axes.margins(y=0.01)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("times faster than the peer, in the same run")
    if marked:
        figure.legend(frameon=False, loc="outside upper right")
    return stamped(figure, content)


def shown(row: dict[str, Any]) -> bool:
    """Tell whether a row is drawn: pushes and pulls apart, and the slow way, are for the table only."""
    return not row["race"].endswith(", part") and row["ours"] != "grpc"


def growth(content: dict[str, Any]) -> Figure:
    """Return a panel for each sweep: milliseconds per step over what grows, both logarithmic."""
    axis_of = {"shards": "shards", "workers": "workers", "bytes": "size_bytes"}
    sweeps: dict[str, Rows] = content["sweeps"]
    figure = Figure(figsize=(3.2 * len(sweeps), 3), layout="constrained")
    for axes, (sweep, rows) in zip(figure.subplots(1, len(sweeps), squeeze=False)[0], sweeps.items(), strict=True):
        xs = [row[axis_of[sweep]] / (BYTES_PER_MIB if sweep == "bytes" else 1) for row in rows]
        ms = [[1000 / rate for rate in row["steps_per_s"]] for row in rows]
        middle = [statistics.median(own) for own in ms]
        axes.plot(xs, middle, "o-", label="a step")
        axes.fill_between(xs, [min(own) for own in ms], [max(own) for own in ms], alpha=0.25)
        if sweep == "bytes":
            slope = [x * middle[-1] / xs[-1] for x in xs]
            axes.plot(xs, slope, "k:", linewidth=0.8, label="in proportion")
            axes.legend(frameon=False)
        axes.set_xscale("log", base=2)
        axes.set_xticks(xs, [f"{x:g}" for x in xs], minor=False)
        axes.set_yscale("log")
        axes.set_xlabel("MiB of the model" if sweep == "bytes" else sweep)
        axes.set_ylabel("ms per step")
    return stamped(figure, content)


def stamped(figure: Figure, content: dict[str, Any]) -> Figure:
    """Write on the figure where and when it was measured."""
    machine = content["machine"]
    figure.suptitle(f"{machine['cpu']}, {machine['cores']} cores, {machine['date']}", fontsize=8)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write the figure beside its figures; the same figures give the same bytes."""
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    print(path.with_suffix(".svg").name, flush=True)


if __name__ == "__main__":
    main()
