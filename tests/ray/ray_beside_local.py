"""MNIST on Ray beside the same job without: `python tests/ray/ray_beside_local.py --data FOLDER --write`.

Both have two shards, and two workers with a thread each, on the same cores; Ray is a head and two nodes. First each
runs alone to its end: start-up is from the command to the first step that all shards have, and in `sync:4` the weights
must have one digest. Then both run in turns of half a second (`benchmarks.slices`), the nodes' own processes all the
time. Writes benchmarks/results/ray_beside_local.json; needs a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "chaos"))
sys.path.append(str(Path(__file__).resolve().parents[2]))

from figures import say, write_figures
from ray_nodes import RayNodes

from benchmarks.slices import Pace, Sliced, duel, parents
from benchmarks.training import clean_up_when_ended
from parashard.errors import RetryLater
from parashard.protocol.coordinator_client import CoordinatorClient, coordinator_in
from support.cluster_run import ENDLESS, ClusterRun, eventually
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


def started(case: Case, data: Path, epochs: int, where: Mapping[str, str], folder: str) -> ClusterRun:
    """Start a run; `where` has further flags of `parashard run`."""
    values = {
        "data.path": f'"{data}"',
        "job.epochs": epochs,
        "cluster.transport": f'"{case.transport}"',
        "cluster.worker_threads": 1,
    }
    words = [JOB, "--consistency", case.policy, *(word for flag in where.items() for word in flag)]
    words += [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    return ClusterRun(Path(folder) / "run", words, ROOT)


def one_run(case: Case, data: Path, epochs: int, where: Mapping[str, str]) -> dict[str, Any]:
    """Return the figures of a run that has the machine to itself."""
    with tempfile.TemporaryDirectory(prefix="parashard-beside-") as folder:
        began_s = time.monotonic()
        run = started(case, data, epochs, where, folder)
        try:
            until_first_step(run)
            start_s = time.monotonic() - began_s
            report = run.report()
        finally:
            run.clean_up()
    return {
        "start_s": round(start_s, 2),
        "accuracy": report["held_out"]["accuracy"],
        "weights_sha256": report["weights_sha256"],
    }


def in_turns(
    case: Case, data: Path, ways: Mapping[str, Mapping[str, str]], nodes: RayNodes, rounds: int
) -> dict[str, Pace]:
    """Return what a run of each way does in turns."""
    with ExitStack() as stack:
        jobs = []
        for where in ways.values():
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="parashard-beside-"))
            before = parents().keys()
            run = started(case, data, ENDLESS, where, folder)
            stack.callback(run.clean_up)
            until_first_step(run)
            job = Sliced(run.dir, [run.process.pid, *nodes.processes()], before)
            stack.callback(job.signalled, signal.SIGCONT)
            job.signalled(signal.SIGSTOP)
            jobs.append(job)
        return dict(zip(ways, duel(jobs, rounds), strict=True))


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


def compared(case: Case, alone: Mapping[str, dict[str, Any]], turns: list[dict[str, Pace]]) -> dict[str, Any]:
    """Return what a case's runs come to."""
    ratios = [there["local"].step_ms / there["ray"].step_ms for there in turns]
    one = alone["local"]["weights_sha256"] == alone["ray"]["weights_sha256"]
    return {
        "consistency": case.policy,
        "transport": case.transport,
        "ray_over_local": round(median(ratios), 3),
        "from": round(min(ratios), 3),
        "to": round(max(ratios), 3),
        **{f"cpu_ms_{name}": round(median(turn[name].cpu_ms for turn in turns), 2) for name in alone},
        "one_digest": one if case.policy.startswith("sync") else None,
        "alone": alone,
        "turns": turns,
    }


def main() -> int:
    """Measure all cases and return the exit code: 1 if digests differ that must not."""
    parser = argparse.ArgumentParser(description="Compares MNIST on Ray with MNIST on this machine alone.")
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST's four IDX files")
    parser.add_argument("--runs", type=int, default=3, help="runs of both, in turns (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of a run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="turns of each job in a run (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="NAME", help=f"run only one of {', '.join(map(str, CASES))}")
    parser.add_argument("--write", action="store_true", help=f"write benchmarks/results/{FIGURES}.json")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.only in ("", str(case))]
    if not cases:
        parser.error(f"--only is one of {', '.join(map(str, CASES))}")
    clean_up_when_ended()
    data = arguments.data.absolute()
    load, found = os.getloadavg()[0], []
    nodes = RayNodes(3)
    try:
        ways: dict[str, dict[str, str]] = {"local": {}, "ray": {"--on": f"ray:{nodes.address}"}}
        for case in cases:
            alone = {name: one_run(case, data, arguments.epochs, where) for name, where in ways.items()}
            say(f"{case} alone: {alone}")
            turns = [in_turns(case, data, ways, nodes, arguments.rounds) for _ in range(arguments.runs)]
            found.append(compared(case, alone, turns))
            say(str({key: value for key, value in found[-1].items() if key != "turns"}))
    finally:
        nodes.down()
    if arguments.write:
        write_figures(FIGURES, {"load_before": round(load, 1), "cases": found})
    return int(any(case["one_digest"] is False for case in found))


if __name__ == "__main__":
    sys.exit(main())
