"""Race 4: how the cost of a step grows with shards, with workers and with its bytes.

    python -m benchmarks.races.growth [--transport shm] [--sweeps shards workers bytes] [--write]

Every figure is from two whole runs (`parashard run`) of `ballast.toml`, whose steps compute nothing: each pulls and
pushes all of the model. One run ends after the first steps; the other goes on, and what it takes longer is the cost
of a step. In the first steps memory comes from the system, page by page. That costs as much as several steps, once, and
has a column of its own: shared out among the steps, it would make few large steps look slow. Cases of a sweep take
turns, and are told relative to the sweep's first case in the same turn. A run is checked: every shard must have applied
every step, and the final weights be what they add up to.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.races.push_pull import MIB, settings_of
from benchmarks.races.rows import milliseconds
from benchmarks.tables import spread, table, write
from benchmarks.training import clean_up_when_ended, trained

JOB = Path(__file__).parent / "ballast.toml"
KIB = 1 << 10
STEPS_MAX, STEPS_MIN = 8000, 64  # after the first ones
FIRST_STEPS = 16  # of each worker: one lease, in which it allocates all of its memory


class Cost(NamedTuple):
    """Cost of a case in seconds: of every step, and once the extra cost of the first steps."""

    step_s: float
    once_s: float


@dataclass(frozen=True)
class Case:
    """Settings of one run; the bytes are those of the model, so a step moves them twice."""

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
        help="data that a run moves in each direction (default: %(default)s)",
    )
    parser.add_argument("--write", action="store_true", help="write growth.json and .md in benchmarks/results")
    arguments = parser.parse_args()
    clean_up_when_ended()
    sections, figures = {}, {}
    for sweep in arguments.sweeps:
        cases = SWEEPS[sweep]
        costs: dict[Case, list[Cost]] = {case: [] for case in cases}
        for _ in range(arguments.rounds):
            for case in cases:
                cost = cost_of(case, arguments.budget_mib * MIB, settings_of(arguments.transport))
                costs[case].append(cost)
                print(f"{case}: {1000 * cost.step_s:,.2f} ms a step, {1000 * cost.once_s:,.0f} ms once", flush=True)
        sections[f"Growth with {sweep}"] = section(costs)
        figures[sweep] = rows_of(costs)
        print(f"\n{sections[f'Growth with {sweep}']}\n", flush=True)
    if arguments.write:
        write("growth", sections, {"transport": arguments.transport, "sweeps": figures})


def steps_of(size_bytes: int, budget_bytes: int) -> int:
    """Return how many steps are timed: as many as move the budget, within bounds."""
    return max(STEPS_MIN, min(STEPS_MAX, budget_bytes // size_bytes))


def cost_of(case: Case, budget_bytes: int, settings: Sequence[str]) -> Cost:
    """Run a case for its first steps only and for more of them; return its cost."""
    first, steps = FIRST_STEPS * case.workers, steps_of(case.size_bytes, budget_bytes)
    first_s = seconds_of(case, first, settings)
    return cost_between(first, first_s, first + steps, seconds_of(case, first + steps, settings))


def cost_between(first: int, first_s: float, steps: int, all_s: float) -> Cost:
    """Return the cost of a case from the times of its first steps and of all steps."""
    step_s = (all_s - first_s) / (steps - first)
    return Cost(step_s, first_s - first * step_s)


def seconds_of(case: Case, steps: int, settings: Iterable[str]) -> float:
    """Run a case and return how long its steps took, from the first lease to the last step complete."""
    own = [
        f"cluster.shards={case.shards}",
        f"cluster.workers={case.workers}",
        f"model.elements={case.size_bytes // 4}",
        f"data.examples={steps}",
    ]
    report = trained("run", JOB, [*own, *settings])
    assert report["wrong"] == 0, f"{report['wrong']:,} weights are not what the pushes add up to"
    assert set(report["steps_applied"]) == {report["steps_total"]}, report["steps_applied"]
    rate: float = report["examples_per_s"]  # a step has one example
    return steps / rate


def rows_of(costs: dict[Case, list[Cost]]) -> list[dict[str, Any]]:
    """Return a row for each case, with the time of a step relative to the first case, by turn."""
    first = next(iter(costs.values()))
    return [
        {
            "shards": case.shards,
            "workers": case.workers,
            "size_bytes": case.size_bytes,
            "steps_per_s": [1 / cost.step_s for cost in own],
            "once_s": [cost.once_s for cost in own],
            "step_ms": 1000 * statistics.median(cost.step_s for cost in own),
            "once_ms": 1000 * statistics.median(cost.once_s for cost in own),
            "moved_mib_per_s": 2 * case.size_bytes / MIB / statistics.median(cost.step_s for cost in own),
            "relative": [cost.step_s / base.step_s for base, cost in zip(first, own, strict=True)],
        }
        for case, own in costs.items()
    ]


def section(costs: dict[Case, list[Cost]]) -> str:
    """Return the Markdown table of a sweep."""
    lines: list[Sequence[str]] = []
    for case, row in zip(costs, rows_of(costs), strict=True):
        own = [milliseconds(row["step_ms"]), f"{row['moved_mib_per_s']:,.0f}", spread(row["relative"])]
        lines.append([str(case.shards), str(case.workers), case.size, *own, f"{row['once_ms']:,.0f}"])
    header = ["shards", "workers", "bytes of the model", "ms per step", "MiB/s pulled and pushed", "relative (spread)"]
    return table([*header, "ms once"], lines)


if __name__ == "__main__":
    main()
