"""What does each wire encoding save, and what does it cost in accuracy? The MNIST job, trained once for each and seed.

`python -m benchmarks.encodings --data FOLDER [--write]`, with MNIST's four IDX files in FOLDER. Every run is
`examples/mnist.toml` (asynchronous, 2 workers, 2 shards) with one encoding for all variables; the encodings take turns
within a seed, so that what else the machine does falls on all of them. Bytes are those of the payload as the shards
count them. A difference in accuracy means something where it is larger than the spread of the float32 runs, which the
order of asynchronous pushes alone causes; so the table has both.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import table, write
from benchmarks.training import clean_up_when_ended, trained

JOB = Path(__file__).parent.parent / "examples" / "mnist.toml"
PLAIN = "float32"
ENCODINGS = (PLAIN, "bfloat16", "float16", "int8", "topk:0.1", "topk:0.01")
KEPT = ("examples_per_s", "wall_s", "steps_total", "steps_applied", "duplicate_pushes", "bytes")
ASYNC = "consistency.policy=async"
HEADER = (
    "encoding", "pushed per step", "of float32", "saved", "held-out accuracy", "to float32", "examples/s to float32",
)  # fmt: skip


def train(encoding: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the job and return the figures of interest from its report."""
    settings = [f"data.path={arguments.data}", f"job.seed={seed}", f"job.epochs={arguments.epochs}", ASYNC]
    if encoding != PLAIN:
        settings.append(f'variables."*".encoding={encoding}')
    report = trained("run", JOB, settings)
    judged = {name: report["held_out"][name] for name in ("accuracy", "loss")}
    return {"encoding": encoding, "seed": seed, **judged, **{key: report[key] for key in KEPT}}


def pushed_per_step(row: dict[str, Any]) -> float:
    """Return the payload of one step's pushes to all shards, in bytes; duplicates count as the pushes that they are."""
    pushes_per_shard = row["steps_total"] + row["duplicate_pushes"] / len(row["steps_applied"])
    return float(row["bytes"]["pushed"] / pushes_per_shard)


def compared(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a line of the table for each encoding that was run, compared with float32 seed by seed."""
    plain = {row["seed"]: row for row in rows if row["encoding"] == PLAIN}
    lines = []
    for encoding in dict.fromkeys(row["encoding"] for row in rows):
        mine = [row for row in rows if row["encoding"] == encoding]
        accuracies = [row["accuracy"] for row in mine]
        differences = [row["accuracy"] - plain[row["seed"]]["accuracy"] for row in mine]
        speeds = [row["examples_per_s"] / plain[row["seed"]]["examples_per_s"] for row in mine]
        pushed = statistics.fmean(pushed_per_step(row) for row in mine)
        part = statistics.fmean(pushed_per_step(row) / pushed_per_step(plain[row["seed"]]) for row in mine)
        lines.append(
            [
                encoding,
                f"{pushed / 1000:,.1f} kB",
                f"{part:.1%}",
                f"{1 - part:.1%}",
                f"{statistics.fmean(accuracies):.4f} ({min(accuracies):.4f} to {max(accuracies):.4f})",
                f"{statistics.fmean(differences):+.4f}",
                f"{statistics.median(speeds):.2f}",
            ]
        )
    return lines


def main() -> None:
    """Train every case, print a line for each run and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with MNIST's four IDX files")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each encoding (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of a run (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="write encodings.json and .md in benchmarks/results")
    arguments = parser.parse_args()
    clean_up_when_ended()
    rows = []
    for seed in range(arguments.seeds):
        for encoding in ENCODINGS:
            row = train(encoding, seed, arguments)
            rows.append(row)
            print(
                f"{encoding:9} seed {seed}: accuracy {row['accuracy']:.4f}, {pushed_per_step(row) / 1000:,.1f} kB a "
                f"step, {row['examples_per_s']:,.0f} examples/s",
                flush=True,
            )
    text = f"{table(HEADER, compared(rows))}\n\n" + (
        f"`examples/mnist.toml`, asynchronous, 2 workers, 2 shards, {arguments.epochs} epochs, {arguments.seeds} "
        "seeds: mean accuracy (lowest to highest), its mean difference to float32 of the same seed, and the median of "
        "the ratios of examples per second."
    )
    print(f"\n{text}", flush=True)
    if arguments.write:
        write("encodings", {"Encodings of gradients on MNIST": text}, {"rows": rows})


if __name__ == "__main__":
    main()
