"""Do kills change what is learned? Loss and accuracy on MNIST under chaos, beside runs without a fault.

`python -m benchmarks.mnist_under_chaos --data FOLDER [--write]`, with MNIST's four IDX files in FOLDER. Trains
`examples/mnist.toml` once for each seed without faults, and once under `parashard chaos`, which kills processes of all
roles every few seconds from the beginning to the end. The band is what the seeds without a fault span; that the mean
under chaos lies in it is what is promised. (A single run need not: even if nothing had changed, one in three would lie
outside the span of five others.)
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import table, write
from benchmarks.training import clean_up_when_ended, trained

JOB = Path(__file__).parent.parent / "examples" / "mnist.toml"
CASES = ("no faults", "chaos")
FIGURES = ("loss", "accuracy")
ASYNC = "consistency.policy=async"
SMALL_STEPS = "job.batch_size=32"  # four times as many steps as the job file's, and a run long enough for many kills


def train(case: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the job and return its report."""
    settings = (f"data.path={arguments.data}", f"job.seed={seed}", f"job.epochs={arguments.epochs}", SMALL_STEPS, ASYNC)
    if case == "no faults":
        return trained("run", JOB, settings)
    kills = ("--kill", "worker,shard,coordinator", "--mean-interval-s", str(arguments.mean_interval_s))
    return trained("chaos", JOB, settings, (*kills, "--seed", str(seed)))


def in_band(values: Sequence[float], band: Sequence[float]) -> bool:
    """Tell whether the mean of some figures lies within the span of others."""
    return min(band) <= statistics.fmean(values) <= max(band)


def compared(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return for each figure the band, mean and span under chaos, and whether the mean is in the band."""
    lines = []
    for figure in FIGURES:
        calm, chaos = ([row[figure] for row in rows if row["case"] == case] for case in CASES)
        lines.append(
            [
                figure,
                f"{min(calm):.4f} to {max(calm):.4f}",
                f"{statistics.fmean(chaos):.4f}",
                f"{min(chaos):.4f} to {max(chaos):.4f}",
                "yes" if in_band(chaos, calm) else "no",
            ]
        )
    return lines


def main() -> None:
    """Train every case, print a line for each run, and say whether chaos has moved the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with MNIST's four IDX files")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each case (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="epochs of a run (default: %(default)s)")
    parser.add_argument(
        "--mean-interval-s", type=float, default=3.0, help="mean seconds between two kills (default: %(default)s)"
    )
    parser.add_argument(
        "--write", action="store_true", help="write mnist_under_chaos.json and .md in benchmarks/results"
    )
    arguments = parser.parse_args()
    clean_up_when_ended()
    rows = []
    for seed in range(arguments.seeds):
        for case in CASES:
            began_s = time.monotonic()
            report = train(case, seed, arguments)
            wall_s = time.monotonic() - began_s
            kept = ("steps_total", "steps_applied", "duplicate_pushes")
            faults, held_out = report.get("faults", {}), report["held_out"]
            rows.append(
                {
                    "case": case,
                    "seed": seed,
                    "loss": held_out["loss"],
                    "accuracy": held_out["accuracy"],
                    **{key: report[key] for key in kept},
                    "wall_s": wall_s,
                    "faults": faults,
                }
            )
            killed = ", ".join(f"{count} {kind}" for kind, count in faults.items())
            print(
                f"{case:9} seed {seed}: held-out loss {held_out['loss']:.4f}, accuracy {held_out['accuracy']:.4f}, "
                f"{wall_s:.0f} s, every step applied by every shard: "
                f"{set(report['steps_applied']) == {report['steps_total']}} {killed}",
                flush=True,
            )
    lines = compared(rows)
    kills = sum(sum(row["faults"].values()) for row in rows)
    header = ["figure", "band without faults", "mean under chaos", "span under chaos", "mean in the band"]
    text = f"{table(header, lines)}\n\n{arguments.seeds} runs of {arguments.epochs} epochs each; {kills} kills."
    print(f"\n{text}", flush=True)
    if arguments.write:
        write("mnist_under_chaos", {"MNIST under chaos": text}, {"rows": rows})
    if any(line[-1] == "no" for line in lines):
        sys.exit("kills have changed what is learned")


if __name__ == "__main__":
    main()
