"""Race 4: how the cost of a step grows with shards, with workers and with its bytes.

    python -m benchmarks.races.growth [--transport shm] [--sweeps shards workers bytes] [--write]

Every figure is a whole `parashard run` of `ballast.toml`, whose steps compute nothing: each pulls and pushes all of the
model. Cases of a sweep take turns, and are told relative to the sweep's first case in the same turn. A run is checked:
every shard must have applied every step, and the final weights be what they add up to.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.races.push_pull import MIB, settings_of
from benchmarks.races.rows import milliseconds
from benchmarks.tables import spread, table, write
from benchmarks.training import clean_up_when_ended, trained

JOB = Path(__file__).parent / "ballast.toml"
KIB = 1 << 10
STEPS_MAX, STEPS_MIN = 8000, 16


@dataclass(frozen=True)
class Case:
    """What one run has: the bytes are those of the model, so a step moves them twice."""

    shards: int
    workers: int
    size_bytes: int

    @property
    def size(self) -> str:
        """The bytes, for a table."""
        return f"{self.size_bytes // MIB} MiB" if self.size_bytes >= MIB else f"{self.size_bytes // KIB} KiB"


SWEEPS: dict[str, tuple[Case, ...]] = {
    "shards": tuple(Case(shards, 2, 16 * MIB) for shards in (1, 2, 4)),
    "workers": tuple(Case(1, workers, 4 * MIB) for workers in (1, 2, 4, 8)),
    "bytes": tuple(Case(1, 1, 64 * KIB << shift) for shift in range(0, 13, 2)),
}


def main() -> None:
    """Run the sweeps, print their tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="auto", help='"default" leaves it to the job file')
    parser.add_argument("--sweeps", nargs="+", default=list(SWEEPS), choices=list(SWEEPS))
    parser.add_argument("--rounds", type=int, default=5, help="turns of each case (default: %(default)s)")
    parser.add_argument(
        "--budget-mib",
        type=int,
        default=4096,
        help="a run's steps move so much, in one direction (default: %(default)s)",
    )
    parser.add_argument("--write", action="store_true", help="write growth.json and .md in benchmarks/results")
    arguments = parser.parse_args()
    clean_up_when_ended()
    sections, figures = {}, {}
    for sweep in arguments.sweeps:
        cases = SWEEPS[sweep]
        rates: dict[Case, list[float]] = {case: [] for case in cases}
        for _ in range(arguments.rounds):
            for case in cases:
                rates[case].append(steps_per_s(case, arguments.budget_mib * MIB, settings_of(arguments.transport)))
                print(f"{case}: {rates[case][-1]:,.1f} steps/s", flush=True)
        sections[f"Growth with {sweep}"] = section(rates)
        figures[sweep] = rows_of(rates)
        print(f"\n{sections[f'Growth with {sweep}']}\n", flush=True)
    if arguments.write:
        write("growth", sections, {"transport": arguments.transport, "sweeps": figures})


def steps_of(size_bytes: int, budget_bytes: int) -> int:
    """Return how many steps a run has: as many as move the budget, within bounds."""
    return max(STEPS_MIN, min(STEPS_MAX, budget_bytes // size_bytes))


def steps_per_s(case: Case, budget_bytes: int, settings: Iterable[str]) -> float:
    """Run a case and return its speed, from the first lease to the last step complete."""
    own = [
        f"cluster.shards={case.shards}",
        f"cluster.workers={case.workers}",
        f"model.elements={case.size_bytes // 4}",
        f"data.examples={steps_of(case.size_bytes, budget_bytes)}",
    ]
    report = trained("run", JOB, [*own, *settings])
    assert report["wrong"] == 0, f"{report['wrong']:,} weights are not what the pushes add up to"
    assert set(report["steps_applied"]) == {report["steps_total"]}, report["steps_applied"]
    rate: float = report["examples_per_s"]  # a step has one example
    return rate


def rows_of(rates: dict[Case, list[float]]) -> list[dict[str, Any]]:
    """Return a row for each case, with the time of a step relative to the first case, by turn."""
    first = next(iter(rates.values()))
    return [
        {
            "shards": case.shards,
            "workers": case.workers,
            "size_bytes": case.size_bytes,
            "steps_per_s": own,
            "step_ms": 1000 / statistics.median(own),
            "moved_mib_per_s": 2 * case.size_bytes / MIB * statistics.median(own),
            "relative": [base / rate for base, rate in zip(first, own, strict=True)],
        }
        for case, own in rates.items()
    ]


def section(rates: dict[Case, list[float]]) -> str:
    """Return the Markdown table of a sweep."""
    lines: list[Sequence[str]] = []
    for case, row in zip(rates, rows_of(rates), strict=True):
        own = [milliseconds(row["step_ms"]), f"{row['moved_mib_per_s']:,.0f}", spread(row["relative"])]
        lines.append([str(case.shards), str(case.workers), case.size, *own])
    header = ["shards", "workers", "bytes of the model", "ms per step", "MiB/s pulled and pushed", "relative (spread)"]
    return table(header, lines)


if __name__ == "__main__":
    main()
