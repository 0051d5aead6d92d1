"""Faults of Ray's nodes: ledgers on a real Ray, a worker's node killed every five seconds, and what else may go.

`python tests/ray/ray_campaign.py --write` runs the jobs of `MATRIX`, one after the other, on a Ray of a head and three
nodes. Nodes of workers are killed (-9) again and again, and once each, in between, a node of a shard, the coordinator,
and a node that was drained; a new node follows each. It prints a line for each job and writes
benchmarks/results/chaos_ray.json.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "chaos"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))  # for `long_model`, which the oracles build

from figures import conclude, say, write_figures
from job_run import NOTHING_EXPECTED, Ended, fault_free, violations
from ray_nodes import RayNodes
from ray_run import LEDGER, SHARED_MEMORY, RayRun

from support.cluster_run import eventually
from support.long_job import LongJob

FIGURES = "chaos_ray"
NODES, CPUS = 4, 2  # the head has no process: two shards and three workers leave one CPU of six
WORKERS = 3
EVERY_S = 5.0  # from one fault to the next, or longer where no worker has a place again
QUICK_STEPS = 64  # after each fault; further ones take a second each
STEPS_LEAST = 8  # complete after the last fault, before the job may end
DRAIN_S = 60
END_S = 300.0
RESTARTS = ("worker_restarts", "shard_restarts", "coordinator_restarts", "rollbacks")


class Row(NamedTuple):
    """A job under faults: an example and its policy."""

    example: str
    policy: str

    def __str__(self) -> str:
        return f"{self.example.removesuffix('.toml')}/{self.policy}"


MATRIX = tuple(Row(example, policy) for example in ("ledger.toml", "row_ledger.toml") for policy in ("async", "sync:4"))


@dataclass
class Outcome:
    """What a job under faults of Ray's nodes showed.

    Attributes
    ----------
    row : Row
        Which job.
    seed : int
        Of the nodes that were chosen.
    faults : Counter of str
        How many of each kind struck.
    gone : Counter of str
        Processes that went with killed nodes, by role.
    every_s : list of float
        Seconds from each fault to the next.
    back_s : float
        From the last fault until all processes were live, and steps were complete.
    restarts : dict of str to int
        As the report has them: a shard that is lost again before it is registered counts once.
    broken : list of str
        Promises that were broken, in words.
    wall_s : float
        How long all of it took.
    """

    row: Row
    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    gone: Counter[str] = field(default_factory=Counter)
    every_s: list[float] = field(default_factory=list)
    back_s: float = 0.0
    restarts: dict[str, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    wall_s: float = 0.0

    def __str__(self) -> str:
        verdict = "; ".join(self.broken) or "every promise kept"
        struck = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        gone = ", ".join(f"{count} {role}s" for role, count in sorted(self.gone.items()))
        return f"{self.row}, seed {self.seed}: {verdict}; {struck}; gone with nodes: {gone}; {self.wall_s:.0f} s"


def schedule(kills: int) -> list[str]:
    """Return the faults in their order: nodes of workers, and the others once each in between."""
    faults = ["worker's node"] * kills
    for quarter, kind in ((3, "drained node"), (2, "coordinator"), (1, "shard's node")):
        faults.insert(kills * quarter // 4, kind)
    return faults


def run_row(row: Row, nodes: RayNodes, kills: int, seed: int, folder: Path) -> Outcome:
    """Run a job under faults, and judge it."""
    started_s, outcome = time.monotonic(), Outcome(row, seed)
    folder.mkdir()
    long, expected = LongJob(folder, row.example, sys.maxsize), NOTHING_EXPECTED
    words = [long.file, *LEDGER]
    if row.policy.startswith("sync"):
        expected = fault_free(words, row.policy, folder / "fault-free")
    long.quick_until(QUICK_STEPS)
    run = RayRun(nodes, folder, *words, "--consistency", row.policy)
    try:
        run.until_live(WORKERS)
        _strike_all(run, long, schedule(kills), outcome)
        long.let_end()
        ended = _ended(run)
        outcome.restarts = {key: int(ended.report.get(key, 0)) for key in RESTARTS}
        outcome.broken += violations(ended, expected)
        outcome.broken += [f"never happened: {key}" for key in RESTARTS[:3] if not outcome.restarts[key]]
        run.until_gone()
        outcome.broken += [f"left over: {path}" for path in run.shared_memory()]
    except (AssertionError, pytest.fail.Exception) as error:  # what has not come, and what was seen last
        outcome.broken.append(str(error))
    finally:
        run.clean_up()
    outcome.wall_s = time.monotonic() - started_s
    return outcome


def _strike_all(run: RayRun, long: LongJob, faults: Sequence[str], outcome: Outcome) -> None:
    """Let faults strike, one every few seconds, whether or not all is well again; at the end wait until it is."""
    chance, last_s = random.Random(outcome.seed), time.monotonic()
    for fault in faults:
        time.sleep(max(0.0, last_s + EVERY_S - time.monotonic()))
        struck_s = _strike(run, fault, chance, outcome)
        outcome.every_s.append(round(struck_s - last_s, 1))
        outcome.faults[fault] += 1
        last_s = struck_s
        long.quick_until(run.status().steps_complete + QUICK_STEPS)
    steps = run.status().steps_complete + STEPS_LEAST
    run.until_live(WORKERS)
    run.wait_for_steps(steps)
    outcome.back_s = round(time.monotonic() - last_s, 1)


def _strike(run: RayRun, fault: str, chance: random.Random, outcome: Outcome) -> float:
    """Let a fault strike, and have another node follow one that went; return when it struck."""
    if fault == "coordinator":
        run.kill("coordinator", "coordinator")
        return time.monotonic()
    role = "worker" if fault == "worker's node" else "shard"

    def candidates() -> list[str]:
        places = run.places()
        with_it = {node for name, node in places.items() if name.startswith(role)}
        return sorted(with_it - {node for name, node in places.items() if not name.startswith(role)} or with_it)

    node = chance.choice(eventually(candidates, f"a {role} has a place", told=run.told))
    if fault == "drained node":
        run.nodes.drain(node, DRAIN_S)
        eventually(lambda: node not in run.places().values(), f"{node} is left", told=run.told)
    outcome.gone.update(name.partition("-")[0] for name, at in run.places().items() if at == node)
    struck_s = time.monotonic()
    run.nodes.kill(node)
    run.nodes.add()
    return struck_s


def _ended(run: RayRun) -> Ended:
    try:
        code = run.process.wait(END_S)
    except subprocess.TimeoutExpired:
        return Ended(-1, {}, f"the job has not ended within its time; seen last: {run.told()}", ())
    lines = run.output().splitlines()
    return Ended(code, json.loads(lines[-1]) if lines else {}, run.complaint(), (), run.dir)


def _shared_by_ray() -> set[str]:
    """Return what shared memory has that is of no run."""
    return {path.name for path in SHARED_MEMORY.iterdir() if not path.name.startswith("parashard-")}


def figures_of(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the figures of all jobs, as the results have them."""
    every_s = [seconds for outcome in outcomes for seconds in outcome.every_s]
    faults = sum((outcome.faults for outcome in outcomes), Counter[str]())
    return {
        "violations": f"{sum(bool(outcome.broken) for outcome in outcomes)} of {len(outcomes)}",
        "faults": faults.total(),
        "faults_by_kind": dict(sorted(faults.items())),
        "every_median_s": round(statistics.median(every_s), 1) if every_s else None,
        "rows": [
            {
                "job": outcome.row.example,
                "consistency": outcome.row.policy,
                "seed": outcome.seed,
                "faults": dict(sorted(outcome.faults.items())),
                "gone_with_nodes": dict(sorted(outcome.gone.items())),
                "every_s": outcome.every_s,
                "back_after_last_s": outcome.back_s,
                **outcome.restarts,
                "wall_s": round(outcome.wall_s, 1),
                "violations": outcome.broken,
            }
            for outcome in outcomes
        ],
    }


def main() -> int:
    """Run the matrix and return the exit code."""
    parser = argparse.ArgumentParser(description="Runs ledgers on a real Ray whose nodes are killed and drained.")
    parser.add_argument("--kills", type=int, default=6, help="number of killed nodes in each job")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first job; the others have the next ones")
    parser.add_argument("--only", default="", metavar="NAME", help=f"run only one of {', '.join(map(str, MATRIX))}")
    parser.add_argument("--write", action="store_true", help=f"write benchmarks/results/{FIGURES}.json")
    arguments = parser.parse_args()
    rows = [row for row in MATRIX if arguments.only in ("", str(row))]
    if not rows:
        parser.error(f"--only is one of {', '.join(map(str, MATRIX))}")
    folder, outcomes = Path(tempfile.mkdtemp(prefix="parashard-ray-")), []
    before = _shared_by_ray()
    nodes = RayNodes(NODES, CPUS)
    try:
        for number, row in enumerate(rows):
            seed = arguments.seed + number
            outcomes.append(run_row(row, nodes, arguments.kills, seed, folder / f"job-{number}"))
            say(str(outcomes[-1]))
    finally:
        nodes.down()
    outcomes[-1].broken += [f"left over: /dev/shm/{name}" for name in sorted(_shared_by_ray() - before)]
    code = conclude(outcomes, "jobs", folder)
    if arguments.write:
        write_figures(FIGURES, figures_of(outcomes))
    return code


if __name__ == "__main__":
    sys.exit(main())
