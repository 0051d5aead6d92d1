"""The cost of checkpoints: examples per second with them, relative to the job without.

The cases take turns, a whole `parashard run` each. Called by `benchmarks.recovery`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import spread, table
from benchmarks.training import trained

OFF = "no checkpoints"
CASES: dict[str, Sequence[str]] = {
    OFF: ("checkpoint.every_s=0.0",),
    "checkpoint every 5 s": ("checkpoint.every_s=5.0",),
}


def measured(job: Path, settings: Sequence[str], scratch: Path | None, repeats: int) -> list[dict[str, Any]]:
    """Run every case `repeats` times, in turn; return a row for each run."""
    rows = []
    for turn in range(repeats):
        for case, own in CASES.items():
            report = trained("run", job, [*settings, *own], scratch=scratch)
            row = {"case": case, "turn": turn, "examples_per_s": report["examples_per_s"], **report["checkpoints"]}
            rows.append(row)
            print(
                f"{case}: {row['examples_per_s']:,.0f} examples/s, {row['stored']} checkpoints, "
                f"longest stall {1000 * row['stall_s']:.1f} ms",
                flush=True,
            )
    return rows


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return by case each run's speed, relative to the run without checkpoints of the same turn."""
    off = {row["turn"]: row["examples_per_s"] for row in rows if row["case"] == OFF}
    return {
        case: [row["examples_per_s"] / off[row["turn"]] for row in rows if row["case"] == case]
        for case in dict.fromkeys(row["case"] for row in rows)
    }


def section(rows: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown table: speed relative to off, and the longest that pushes waited for a checkpoint."""
    lines = []
    for case, values in ratios(rows).items():
        own = [row for row in rows if row["case"] == case]
        speed = f"{statistics.median(row['examples_per_s'] for row in own):,.0f}"
        stall = f"{1000 * max(row['stall_s'] for row in own):.1f} ms"
        lines.append([case, str(len(own)), speed, spread(values), str(sum(row["stored"] for row in own)), stall])
    header = ["case", "runs", "examples/s, median", "relative to off, median (spread)", "checkpoints", "longest stall"]
    return table(header, lines)
