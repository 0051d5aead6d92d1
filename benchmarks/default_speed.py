"""How fast the default is beside `async`: `python -m benchmarks.default_speed --data FOLDER [--write]`.

The MNIST network of race 3 (`benchmarks/races/mnist.toml`) with momentum 0.9, 2 workers and 1 shard, in `auto` and in
`async` with and without a pipeline, which take turns. Larger batches make steps longer, and transfers a smaller share
of them; the rate grows with the batch, as its square root, at most twice. A ratio is of neighbours.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.tables import spread, table, write
from benchmarks.training import clean_up_when_ended, trained

JOB = Path(__file__).parent / "races" / "mnist.toml"
POLICIES = {
    "auto": ('consistency.policy="auto"',),
    "async, depth 0": ('consistency.policy="async"', "cluster.pipeline_depth=0"),
    "async, depth 1": ('consistency.policy="async"', "cluster.pipeline_depth=1"),
}
EPOCHS = {128: 5, 512: 8, 2048: 15, 8192: 30}
"""By length of a batch."""
RATE = 0.01  # of batches of 128

Runs = dict[str, list[dict[str, Any]]]
"""The figures from each run's report, by policy."""


def measure(batch: int, data: Path, rounds: int) -> Runs:
    """Return the figures of each policy's runs, which take turns."""
    runs: Runs = {policy: [] for policy in POLICIES}
    rate = RATE * min(2.0, (batch / 128) ** 0.5)  # more, and `async` diverges
    settings = (
        f"data.path={data}",
        "cluster.shards=1",
        f"job.batch_size={batch}",
        f"job.epochs={EPOCHS[batch]}",
        f'optimizer={{kind="momentum", learning_rate={rate}, momentum=0.9}}',
    )
    for turn in range(rounds):
        for policy in POLICIES if turn % 2 == 0 else reversed(POLICIES):
            report = trained("run", JOB, (*settings, *POLICIES[policy]))
            told = {
                "examples_per_s": report["examples_per_s"],
                "accuracy": 100 * report["held_out"]["accuracy"],
                "transfers": 100 * report["network"]["step_share"],
            }
            runs[policy].append(told)
    return runs


def row(batch: int, runs: Runs) -> list[str]:
    """Return a line of the table."""

    def ratio(other: str) -> str:
        pairs = zip(runs["auto"], runs[other], strict=True)
        return spread([own["examples_per_s"] / its["examples_per_s"] for own, its in pairs])

    return [
        str(batch),
        f"{median(run['transfers'] for run in runs['auto']):.0f}",
        *(f"{median(run['examples_per_s'] for run in runs[policy]):,.0f}" for policy in POLICIES),
        ratio("async, depth 0"),
        ratio("async, depth 1"),
        *(spread([run["accuracy"] for run in runs[policy]]) for policy in POLICIES),
    ]


def main() -> None:
    """Run all, print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST's four IDX files")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each policy (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="write default_speed.json and .md in benchmarks/results")
    arguments = parser.parse_args()
    clean_up_when_ended()
    found = {batch: measure(batch, arguments.data.absolute(), arguments.rounds) for batch in EPOCHS}
    header = ["batch", "transfers, % of a part", *(f"examples/s, {policy}" for policy in POLICIES)]
    header += ["auto over depth 0", "auto over depth 1", *(f"accuracy %, {policy}" for policy in POLICIES)]
    text = table(header, [row(batch, runs) for batch, runs in found.items()])
    print(text)
    if arguments.write:
        write("default_speed", {"The default beside async, 2 workers, 1 shard": text}, {"runs": found})


if __name__ == "__main__":
    main()
