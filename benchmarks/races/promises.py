"""Race 5: what the promises cost: exactly-once bookkeeping and checkpoints (mutual TLS: `benchmarks.races.secured`).

    python -m benchmarks.races.promises [--data FOLDER] [--write]

with MNIST's four IDX files in FOLDER for checkpoints: there whole runs of `mnist.toml` take turns, with them and
without. Bookkeeping cannot be switched off, so the shard's own part of it (the applied set is asked
and grows, staleness and step lag are noted) is timed beside the kernel, in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import recovery_costs
from benchmarks.peers import seam
from benchmarks.races.push_pull import MIB, settings_of
from benchmarks.races.rows import Row, as_json, compared
from benchmarks.tables import spread, table, write
from benchmarks.training import clean_up_when_ended
from parashard.plan.optimizers import SGD, Adam, OptimizerSpec
from parashard.plan.partition import place, split, whole
from parashard.plan.variables import Variable
from parashard.process.resources import cores
from parashard_server.core.shard import ShardCounters
from parashard_server.core.update_policies import ImmediateUpdates
from parashard_server.state.kernels import fused
from parashard_server.state.optimizer import Optimizer
from parashard_server.state.storage import Storage, drawn_from

JOB = Path(__file__).parent / "mnist.toml"
SIZES = (64 << 10, MIB, 16 * MIB)
RULES: dict[str, OptimizerSpec] = {"SGD": SGD(learning_rate=0.01), "Adam": Adam(learning_rate=0.001)}
PUSHES = 64
STRIDE = 16  # of two workers, each with a lease batch of 16, the steps arrive in turns
CALLS = 20_000
BATCH = 128  # examples of a step of `mnist.toml`


def main() -> None:
    """Measure, print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with MNIST's four IDX files (default: bookkeeping only)")
    parser.add_argument("--transport", default="auto", help='"default" leaves it to the job file')
    parser.add_argument("--rounds", type=int, default=5, help="turns of each case (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=8, help="epochs of a run (default: %(default)s)")
    parser.add_argument("--scratch", type=Path, help="folder on the disk to measure with (default: the system's)")
    parser.add_argument("--write", action="store_true", help="write promises.json and .md in benchmarks/results")
    arguments = parser.parse_args()
    clean_up_when_ended()
    kept = bookkeeping(arguments.rounds)
    sections = {"Exactly-once bookkeeping": bookkeeping_section(kept)}
    figures: dict[str, Any] = {"bookkeeping": kept}
    if arguments.data is not None:
        settings = [f"data.path={arguments.data.absolute()}", f"job.epochs={arguments.epochs}"]
        settings += settings_of(arguments.transport)
        rows = recovery_costs.measured(JOB, settings, arguments.scratch, arguments.rounds)
        sections["Checkpoints"] = recovery_costs.section(rows)
        figures["runs"] = rows
    figures["rows"] = as_json([*bookkeeping_rows(kept), *run_rows(figures.get("runs", []))])
    print("\n\n".join(f"## {name}\n\n{text}" for name, text in sections.items()), flush=True)
    if arguments.write:
        write("promises", sections, figures)


def bookkeeping(rounds: int) -> list[dict[str, Any]]:
    """Return for each rule and size the microseconds of a push's kernel and of its bookkeeping, by turn."""
    fused.use_threads(cores())
    rows = []
    for name, spec in RULES.items():
        for size_bytes in SIZES:
            variable = Variable("w", (size_bytes // 4,))
            plan = place({"w": variable}, split({"w": variable}, whole), 1)
            storage = Storage(plan, 0, Optimizer(spec), drawn_from(0))
            gradient = np.full(storage.elements, 1e-3, np.float32)
            kernel = [kernel_us(storage, gradient) for _ in range(rounds)]
            rows.append({"optimizer": name, "size_bytes": size_bytes, "kernel_us": kernel})
    for row in rows:
        row["bookkeeping_us"] = [bookkeeping_us() for _ in range(rounds)]
    return rows


def kernel_us(storage: Storage, gradient: seam.Floats) -> float:
    """Return the microseconds that a storage takes to apply a gradient."""
    times = iter(range(1, PUSHES + 2))
    storage.apply(gradient, t=next(times))  # touches every page
    return _us(lambda: storage.apply(gradient, t=next(times)), PUSHES)


def bookkeeping_us() -> float:
    """Return the microseconds of a push's bookkeeping: all that a shard does for it except moving weights and bytes."""
    updates, record = ImmediateUpdates(_Still()), ShardCounters()  # type: ignore[arg-type]  # stands in for a storage
    steps = iter(interleaved(CALLS))
    nothing = np.empty(0, np.float32)

    def push() -> None:
        step = next(steps)
        assert not updates.holds(step)
        updates.admit(step)
        lag = step - updates.applied.lowest_missing()
        updates.take(step, nothing)
        record.saw_staleness(1)
        record.step_lag_max = max(record.step_lag_max, lag)
        record.applied_pushes += 1

    taken_us = _us(push, CALLS)
    assert list(updates.applied.intervals()) == [(0, CALLS)], "every step is applied once"
    return taken_us


class _Still:
    """A storage that applies nothing, so that only the bookkeeping takes time."""

    def apply(self, gradient: seam.Floats, *, t: int, pushes: int, learning_rate: float | None) -> None:
        """Nothing."""


def interleaved(steps: int) -> list[int]:
    """Return 0 .. steps - 1 in the order in which two workers that hold STRIDE steps each push them."""
    pairs = np.arange(steps).reshape(-1, 2, STRIDE)
    order: list[int] = pairs.transpose(0, 2, 1).ravel().tolist()
    return order


def bookkeeping_section(rows: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown table of bookkeeping beside kernels."""
    lines = []
    for row in rows:
        shares = [100 * own / kernel for own, kernel in zip(row["bookkeeping_us"], row["kernel_us"], strict=True)]
        kernel, own = (f"{statistics.median(row[name]):,.1f}" for name in ("kernel_us", "bookkeeping_us"))
        lines.append([row["optimizer"], f"{row['size_bytes'] >> 10:,} KiB", kernel, own, spread(shares)])
    return table(["optimizer", "push", "kernel, us", "bookkeeping, us", "% of the kernel (spread)"], lines)


def bookkeeping_rows(rows: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the rows of a push with bookkeeping against one without."""
    return [
        compared(
            "promises",
            f"{row['size_bytes'] >> 10:,} KiB, {row['optimizer']}",
            ("bookkeeping", [(k + b) / 1000 for k, b in zip(row["kernel_us"], row["bookkeeping_us"], strict=True)]),
            ("off", [kernel / 1000 for kernel in row["kernel_us"]]),
        )
        for row in rows
    ]


def run_rows(runs: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the rows of runs with checkpoints against those without: milliseconds per batch."""
    ms: dict[str, list[float]] = {}
    for run in runs:
        ms.setdefault(run["case"], []).append(1000 * BATCH / run["examples_per_s"])
    off = ms.pop(recovery_costs.OFF, [])
    return [compared("promises", "MNIST", (case, own), (recovery_costs.OFF, off)) for case, own in ms.items()]


def _us(call: Callable[[], object], calls: int) -> float:
    began_s = time.perf_counter()
    for _ in range(calls):
        call()
    return 1e6 * (time.perf_counter() - began_s) / calls


if __name__ == "__main__":
    main()
