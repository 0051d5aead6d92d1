"""The laboratory's table and plots, from its cells."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.statistics.cells import METHODS, OLD_DEFAULT, PLAIN_NAME, SCENARIOS, Verdict, verdict
from benchmarks.tables import RESULTS, table, write
from parashard.figures import counted

Cells = dict[tuple[str, int], list[dict[str, Any]]]
"""By scenario and number of workers."""

TWICE = ("auto, one slow",)
"""Scenarios, besides 16 workers, that may be worse by twice the tolerance."""
KEPT = ("task", "scenario", "workers", "seed", "metric", "value", "staleness_mean", "staleness_max", "virtual_s")
"""Fields of each cell in statistics.json."""
LAGS = ("lag 1", "lag 2", "lag 4")
DEFAULT = [
    *(("auto", workers) for workers in (2, 4, 8, 16)),
    *(("auto, one slow", workers) for workers in (2, 4, 8, 16)),
    *(("auto, kills", workers) for workers in (2, 4, 8, 16)),
    *(("auto, transfers", workers) for workers in (2, 4, 8)),
]
OTHERS = [
    *((OLD_DEFAULT, workers) for workers in (1, 2, 4, 8, 16)),
    *(("async", workers) for workers in (2, 4, 8, 16)),
    *(("ssp:1", workers) for workers in (2, 4, 8, 16)),
    *(("ssp:3", workers) for workers in (2, 4, 8, 16)),
    ("sync:1", 4),
    *(("sync:N", workers) for workers in (2, 4, 8, 16)),
]
RULE = """A cell is the mean over seeds, and in brackets by how much it is worse than one machine's with the same seeds
(a minus: better) and two standard errors of this difference. **Bold** is worse by more than the larger of two standard
errors and the task's tolerance: 0.005 of accuracy and AUC, 1 % of a loss; twice that for 16 workers and a slow one.
*Italic* is worse by more than the tolerance and within two standard errors: more seeds must tell."""

WHY_NONE = """The product has none of these methods: none keeps accuracy at each staleness, the default policy needs
none, and Gap-Aware is claimed by US patent 11,631,035 (decision 0056)."""


def page(cells: Sequence[dict[str, Any]], *, written: bool) -> str:
    """Return the tables as Markdown; `written`: also to `benchmarks/results`, with the plots."""
    by_task: defaultdict[str, Cells] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        by_task[cell["task"]][cell["scenario"], cell["workers"]].append(cell)
    methods = [(name, workers) for name in METHODS for workers in (2, 4, 8)]
    found = {task: of for task, of in sorted(by_task.items()) if of.get((PLAIN_NAME, 1))}
    sections = {
        "The default": f"{RULE}\n\n{compared(found, DEFAULT)}",
        "Other policies": compared(found, OTHERS),
        "Drift, and what a lag costs": drifts(found),
        "Methods, at a staleness of N - 1": f"{WHY_NONE}\n\n{compared(found, methods)}",
        "Staleness": stalenesses(found),
    }
    if written:
        from benchmarks.statistics.plots import plotted  # needs matplotlib

        sections["Plots"] = "\n".join(f"![{task}]({plotted(task, of, RESULTS)})" for task, of in found.items())
        write("statistics", sections, {"cells": [{name: cell[name] for name in KEPT} for cell in cells]})
    return "\n\n".join(f"## {heading}\n\n{text}" for heading, text in sections.items())


def judged(cells: Cells, scenario: str, workers: int) -> Verdict | None:
    """Return the verdict on a scenario of a task; None: it was not run."""
    found = cells.get((scenario, workers))
    if not found:
        return None
    twice = workers == 16 or scenario in TWICE
    return verdict(found, cells[PLAIN_NAME, 1], 2.0 if twice else 1.0)


def compared(found: dict[str, Cells], columns: Sequence[tuple[str, int]]) -> str:
    """Return a table of tasks and scenarios."""
    used = [column for column in columns if any(cells.get(column) for cells in found.values())]
    if not used:
        return "Not run."
    header = ["scenario", "workers", *(f"{task} ({_first(cells)['metric']})" for task, cells in found.items())]
    rows = [["one machine", "1", *(_plain(cells) for cells in found.values())]]
    for scenario, workers in used:
        rows.append([scenario, str(workers), *(_shown(judged(cells, scenario, workers)) for cells in found.values())])
    return table(header, rows)


def drifts(found: dict[str, Cells]) -> str:
    """Return each task's drift beside the cost of a lag of every update."""
    rows = []
    for task, cells in found.items():
        drift = sorted(value for cell in cells[PLAIN_NAME, 1] for value in cell["drift"])
        if len(drift) < 2:
            continue
        quantiles = [f"{statistics.median(drift):.3f}", f"{statistics.quantiles(drift, n=10)[-1]:.3f}"]
        rows.append([task, *quantiles, _plain(cells), *(_shown(judged(cells, lag, 1)) for lag in LAGS)])
    explained = (
        "Drift is |g' - g| / |g|, g' the gradient of the same examples at the weights one update later, on one "
        "machine. With lag K every update is computed at the weights of exactly K updates before.\n\n"
    )
    return explained + table(["task", "drift, median", "90 %", "one machine", *LAGS], rows)


def stalenesses(found: dict[str, Cells]) -> str:
    """Return the staleness of the scenarios, the mean and the most over tasks and seeds."""
    rows = []
    for scenario, workers in [*DEFAULT, *OTHERS]:
        cells = [cell for of in found.values() for cell in of.get((scenario, workers), ())]
        if cells:
            mean = statistics.fmean(cell["staleness_mean"] for cell in cells)
            most = max(cell["staleness_max"] for cell in cells)
            rows.append([scenario, str(workers), f"{mean:.2f}", str(most), _speed(found, scenario, workers)])
    return table(["scenario", "workers", "staleness, mean", "most", "times as fast as one, virtual"], rows)


def _speed(found: dict[str, Cells], scenario: str, workers: int) -> str:
    ratios = [
        _first(cells)["virtual_s"] / statistics.median(cell["virtual_s"] for cell in cells[scenario, workers])
        for cells in found.values()
        if cells.get((scenario, workers)) and all(cell["virtual_s"] for cell in cells[scenario, workers])
    ]
    return f"{statistics.median(ratios):.2f}" if ratios else ""


def _first(cells: Cells) -> dict[str, Any]:
    return cells[PLAIN_NAME, 1][0]


def _plain(cells: Cells) -> str:
    values = [cell["value"] for cell in cells[PLAIN_NAME, 1]]
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{spread}, {counted(len(values), 'seed')}"


def _shown(found: Verdict | None) -> str:
    if found is None:
        return ""
    spread = "one seed" if found.seeds == 1 else f"± {2 * found.error:.4f}"
    text = f"{found.mean:.4f} ({found.worse:+.4f}, {spread})"
    return f"*{text}*" if found.needs_seeds else text if found.passes else f"**{text}**"


assert {scenario for scenario, _ in [*DEFAULT, *OTHERS]} | set(LAGS) | {PLAIN_NAME} == set(SCENARIOS)
