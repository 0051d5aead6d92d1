"""What `cluster.pipeline_depth` gains and costs: `python -m benchmarks.pipeline_depth --data FOLDER [--write]`.

The MNIST job of race 3 (`benchmarks/races/mnist.toml`) with Adam, and with momentum 0.9 at a rate of 0.1, at depth 0,
the default, and 1, in turns, by 1 and 2 workers on 1 shard. A ratio is of two neighbours.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from benchmarks.tables import spread, table, write
from benchmarks.training import clean_up_when_ended, trained

JOB = Path(__file__).parent / "races" / "mnist.toml"
OPTIMIZERS = {
    "Adam": (),
    "momentum": ('optimizer={kind="momentum", learning_rate=0.1, momentum=0.9}',),
}
WORKERS = (1, 2)
DEPTHS = (0, 1)
Runs = dict[int, list[tuple[float, float]]]
"""Examples per second and accuracy in percent, by depth."""


def measure(settings: tuple[str, ...], rounds: int) -> Runs:
    """Return the figures of each depth's runs, which take turns."""
    runs: Runs = {depth: [] for depth in DEPTHS}
    for turn in range(rounds):
        for depth in DEPTHS if turn % 2 == 0 else DEPTHS[::-1]:
            report = trained("run", JOB, (*settings, f"cluster.pipeline_depth={depth}"))
            runs[depth].append((report["examples_per_s"], 100 * report["held_out"]["accuracy"]))
    return runs


def row(optimizer: str, workers: int, runs: Runs) -> list[str]:
    """Return a line of the table."""
    ratios = [zero / one for (zero, _), (one, _) in zip(runs[0], runs[1], strict=True)]
    return [
        optimizer,
        str(workers),
        *(f"{median(rate for rate, _ in runs[depth]):,.0f}" for depth in DEPTHS),
        spread(ratios),
        *(spread([accuracy for _, accuracy in runs[depth]]) for depth in DEPTHS),
    ]


def main() -> None:
    """Run all, print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST's four IDX files")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each depth (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="write pipeline_depth.json and .md in benchmarks/results")
    arguments = parser.parse_args()
    clean_up_when_ended()
    rows, figures = [], []
    for optimizer, words in OPTIMIZERS.items():
        for workers in WORKERS:
            places = (f"data.path={arguments.data.absolute()}", f"cluster.workers={workers}", "cluster.shards=1")
            runs = measure((*words, *places), arguments.rounds)
            rows.append(row(optimizer, workers, runs))
            figures.append({"optimizer": optimizer, "workers": workers, "runs": runs})
    header = ["optimizer", "workers", "examples/s, depth 0", "depth 1", "0 over 1", "accuracy %, depth 0", "depth 1"]
    text = table(header, rows)
    print(text)
    if arguments.write:
        write("pipeline_depth", {"Depth 0, the default, and 1": text}, {"runs": figures})


if __name__ == "__main__":
    main()
