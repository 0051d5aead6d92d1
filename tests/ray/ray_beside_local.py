"""MNIST on Ray beside the same job without: `python tests/ray/ray_beside_local.py --data FOLDER --write`.

Both have two shards, and two workers with a thread each, on the same cores, and take turns; a ratio is of neighbours.
Ray is a head and two nodes. Start-up is from the command to the first step that all shards have. In `sync:4` the
weights must have one digest. Writes benchmarks/results/ray_beside_local.json; needs a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "chaos"))

from figures import say, write_figures
from ray_nodes import RayNodes

from parashard.errors import RetryLater
from parashard.protocol.coordinator_client import CoordinatorClient, coordinator_in
from support.cluster_run import ClusterRun, eventually
from support.command_run import ROOT

FIGURES = "ray_beside_local"
JOB = "examples/mnist.toml"


class Case(NamedTuple):
    """A policy, and how tensors travel."""

    policy: str
    transport: str

    def __str__(self) -> str:
        return f"{self.policy}/{self.transport}"


CASES = (Case("auto", "shm"), Case("auto", "tcp"), Case("sync:4", "shm"))


def one_run(case: Case, data: Path, epochs: int, where: Mapping[str, str]) -> dict[str, Any]:
    """Return the figures of one run; `where` has further flags of `parashard run`."""
    values = {
        "data.path": f'"{data}"',
        "job.epochs": epochs,
        "cluster.transport": f'"{case.transport}"',
        "cluster.worker_threads": 1,
    }
    words = [JOB, "--consistency", case.policy, *(word for flag in where.items() for word in flag)]
    words += [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    with tempfile.TemporaryDirectory(prefix="parashard-beside-") as folder:
        began_s = time.monotonic()
        run = ClusterRun(Path(folder) / "run", words, ROOT)
        try:
            until_first_step(run)
            start_s = time.monotonic() - began_s
            report = run.report()
            wall_s = time.monotonic() - began_s
        finally:
            run.clean_up()
    return {
        "examples_per_s": report["examples_per_s"],
        "start_s": round(start_s, 2),
        "wall_s": round(wall_s, 2),
        "accuracy": report["held_out"]["accuracy"],
        "weights_sha256": report["weights_sha256"],
    }


def until_first_step(run: ClusterRun) -> None:
    """Wait until a step is complete; a question every 20 ms is no load that counts."""
    eventually(lambda: coordinator_in(run.dir), "the coordinator serves", told=run.complaint)
    client = CoordinatorClient(str(coordinator_in(run.dir)["address"]), where=str(run.dir))

    def begun() -> bool:
        try:
            return client.get_status().steps_complete > 0
        except RetryLater:
            return False

    try:
        eventually(begun, "a step is complete", told=run.told)
    finally:
        client.close()


def compared(case: Case, runs: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return what a case's runs come to."""
    ratios = [
        there["examples_per_s"] / here["examples_per_s"] for there, here in zip(runs["ray"], runs["local"], strict=True)
    ]
    sums = {run["weights_sha256"] for some in runs.values() for run in some}
    return {
        "consistency": case.policy,
        "transport": case.transport,
        "ray_over_local": round(median(ratios), 4),
        "from": round(min(ratios), 4),
        "to": round(max(ratios), 4),
        **{f"start_{name}_s": median(run["start_s"] for run in some) for name, some in runs.items()},
        **{f"accuracy_{name}": [run["accuracy"] for run in some] for name, some in runs.items()},
        "one_digest": len(sums) == 1 if case.policy.startswith("sync") else None,
        "runs": runs,
    }


def main() -> int:
    """Measure all cases and return the exit code: 1 if digests differ that must not."""
    parser = argparse.ArgumentParser(description="Compares MNIST on Ray with MNIST on this machine alone.")
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST's four IDX files")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="of each run (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="NAME", help=f"one of {', '.join(map(str, CASES))}")
    parser.add_argument("--write", action="store_true", help=f"write benchmarks/results/{FIGURES}.json")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.only in ("", str(case))]
    if not cases:
        parser.error(f"--only is one of {', '.join(map(str, CASES))}")
    load, found = os.getloadavg()[0], []
    nodes = RayNodes(3)
    try:
        ways = {"local": {}, "ray": {"--on": f"ray:{nodes.address}"}}
        for case in cases:
            runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
            for turn in range(arguments.rounds):
                for name in ways if turn % 2 == 0 else reversed(ways):
                    runs[name].append(one_run(case, arguments.data.absolute(), arguments.epochs, ways[name]))
                    say(f"{case} {name}: {runs[name][-1]}")
            found.append(compared(case, runs))
            say(str({key: value for key, value in found[-1].items() if key != "runs"}))
    finally:
        nodes.down()
    if arguments.write:
        write_figures(FIGURES, {"load_before": round(load, 1), "cases": found})
    return int(any(case["one_digest"] is False for case in found))


if __name__ == "__main__":
    sys.exit(main())
