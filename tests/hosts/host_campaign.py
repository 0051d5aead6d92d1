"""Faults of hosts and of their network: jobs on five hosts inside TLS, each fault until it is over and all go on.

`python tests/hosts/host_campaign.py --faults 102 --write` divides the faults among the jobs of `MATRIX`, which run at
once, prints a line for each fault and writes benchmarks/results/chaos_hosts.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "chaos"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))  # for `long_model`, which the oracles build

from figures import conclude, say, write_figures
from host_faults import KINDS, Fault, draw
from hosted_job import HOSTS, WORKERS, HostedJob
from job_run import NOTHING_EXPECTED, Ended, Expected, fault_free, sets, violations
from network_hosts import Hosts, unavailable_reason

from support.long_job import LongJob

FIGURES = "chaos_hosts"
POLL_S = 0.2
START_S = 300.0  # until the first steps are complete
BACK_S = 180.0  # from a fault's end until every process works again
END_S = 180.0  # without a step, while the job goes on to its end: it may be as slow as the machine is busy
QUICK_SHARE = 0.5  # of the steps, a part of it for each fault, as it begins; others take a second until all are over
STEPS_LEAST = 8  # of the job, after a fault, before it counts as over
STEPS_EACH = 128  # of the job's length, for each fault: half of them take a second on one of four workers


class Row(NamedTuple):
    """A job under faults: an example, its policy, how its tensors travel, and the steps of an epoch."""

    example: str
    policy: str
    transport: str
    epoch_steps: int

    def __str__(self) -> str:
        return f"{self.example.removesuffix('.toml')}/{self.policy}/{self.transport}"


MATRIX = (
    Row("ledger.toml", "async", "tcp", 1024),
    Row("ledger.toml", "auto", "auto", 4096),
    Row("digits.toml", "sync:4", "grpc", 36),
)
"""The policy `auto` cuts batches into parts. The transport `auto` is shared memory where a worker is beside a shard."""


@dataclass
class Outcome:
    """What a job under faults of hosts showed."""

    row: Row  # which job
    seed: int  # of the schedule, and of the frames that are lost
    # By kind of fault: seconds from its end until every worker had completed a step again.
    back_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    exits: Counter[int] = field(default_factory=Counter)  # exit codes of processes that were started again
    lost_frames: int = 0  # that faults have lost
    broken: list[str] = field(default_factory=list)  # promises that were broken, in words
    wall_s: float = 0.0  # how long all of it took

    @property
    def faults(self) -> int:
        """How many struck."""
        return sum(map(len, self.back_s.values()))

    def __str__(self) -> str:
        verdict = "; ".join(self.broken) or "every promise kept"
        figures = f"{self.faults} faults, which lost {self.lost_frames} frames; {self.wall_s:.0f} s"
        return f"{self.row}, seed {self.seed}: {verdict}; {figures}"


def run_row(row: Row, schedule: Sequence[Fault], seed: int, folder: Path) -> Outcome:
    """Run a job under a schedule of faults, one after the other, and judge it."""
    started_s, outcome = time.monotonic(), Outcome(row, seed)
    folder.mkdir()
    long = LongJob(folder, row.example, sys.maxsize)
    epochs = -(-STEPS_EACH * len(schedule) // row.epoch_steps)
    values = {
        "job.epochs": epochs,
        "cluster.transport": row.transport,
        "evaluation.every_epochs": max(1, epochs // 4),
    }
    expected = NOTHING_EXPECTED
    if row.policy.startswith("sync"):
        expected = fault_free([long.file, *sets(values)], row.policy, folder / "fault-free")
    long.quick_until(4 * STEPS_LEAST)
    texts = [f"{key}={value}" for key, value in values.items()]
    with (
        Hosts(HOSTS, folder, seed=seed) as hosts,
        HostedJob(hosts, folder / "hosted", long.file, [*texts, f"consistency.policy={row.policy}"]) as job,
    ):
        watch = _Watch(job, outcome, each=row.policy != "auto")
        if watch.until(watch.works({}), START_S, "the job has not begun"):
            for number, fault in enumerate(schedule):
                complete, total = (int(watch.seen[key]) for key in ("steps_complete", "steps_total"))
                long.quick_until(complete + int(QUICK_SHARE * (total - complete)) // (len(schedule) - number))
                if not watch.strike(hosts, fault):
                    break
        long.let_end()
        watch.to_the_end()
        outcome.exits, outcome.lost_frames = job.exits, hosts.switch.lost
        outcome.broken += _judged(job, expected)
    outcome.wall_s = time.monotonic() - started_s
    return outcome


def _judged(job: HostedJob, expected: Expected) -> list[str]:
    report = job.report()
    coordinator_left = "coordinator" in job.running
    ended = Ended(int(coordinator_left), report, job.last_line("coordinator"), job.running, job.run_dir)
    return job.broken + violations(ended, expected)


class _Watch:
    """Looks at a job, again and again, and tends its processes meanwhile."""

    def __init__(self, job: HostedJob, outcome: Outcome, *, each: bool) -> None:
        self._job = job
        self._outcome = outcome
        self._each = each
        self.seen: dict[str, Any] = {}

    def strike(self, hosts: Hosts, fault: Fault) -> bool:
        """Let a fault begin and end; return whether the job has gone on after it."""
        self._tend_for(fault.pause_s)
        with ExitStack() as ends:
            KINDS[fault.kind].begin(hosts, fault, ends)
            self._tend_for(fault.seconds)
        healed_s = time.monotonic()
        before = self._job.status() or self.seen
        on = f"{fault.kind}, host {fault.host}"
        told = self.until(self.works(before), BACK_S, f"the job has not gone on after: {on}")
        if told:
            self._outcome.back_s[fault.kind].append(round(time.monotonic() - healed_s, 1))
            say(f"{self._outcome.row}: {on}: back after {self._outcome.back_s[fault.kind][-1]} s")
        return told

    def to_the_end(self) -> None:
        """Tend until the job is over, as long as steps are completed."""
        steps = -1

        def moved() -> bool:
            self.seen = self._job.status() or self.seen
            return not self._job.running or int(self.seen["steps_complete"]) != steps

        while self._job.running and not self._outcome.broken:
            steps = int(self.seen.get("steps_complete", 0))
            self.until(moved, END_S, f"no step and no end for {END_S:.0f} s")

    def works(self, before: dict[str, Any]) -> Callable[[], bool]:
        """Return what tells whether all are there, and each worker has completed a step since."""
        earlier = {worker["name"]: worker["steps_complete"] for worker in before.get("workers", ())}
        steps_before = int(before.get("steps_complete", 0))

        def works() -> bool:
            status = self._job.status()
            if status is None:
                return False
            self.seen = status
            workers = {worker["name"]: worker["steps_complete"] for worker in status["workers"] if worker["live"]}
            return (
                workers.keys() >= set(WORKERS)
                and all(shard["live"] for shard in status["shards"])
                and int(status["steps_complete"]) >= steps_before + STEPS_LEAST
                and not (self._each and any(int(steps) <= int(earlier.get(name, 0)) for name, steps in workers.items()))
            )

        return works

    def until(self, condition: Callable[[], bool], within_s: float, otherwise: str) -> bool:
        """Tend until a condition holds; return whether it came to that, and note what is broken if not."""
        end_s = time.monotonic() + within_s
        while not condition():
            self._job.tend()
            if self._job.broken:
                return False  # told by the job
            if time.monotonic() > end_s:
                events = self.seen.get("events", ())[-3:]
                self._outcome.broken.append(f"{otherwise}; running: {self._job.running}; seen last: {events}")
                return False
            time.sleep(POLL_S)
        return True

    def _tend_for(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self._job.tend()
            time.sleep(min(POLL_S, left_s))


def figures_of(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the figures of all jobs, as the results have them."""
    back_s: defaultdict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        for kind, seconds in outcome.back_s.items():
            back_s[kind] += seconds
    return {
        "violations": f"{sum(bool(outcome.broken) for outcome in outcomes)} of {len(outcomes)}",
        "faults": sum(outcome.faults for outcome in outcomes),
        "kinds": {
            kind: {
                "faults": len(back_s[kind]),
                "lasts_s": KINDS[kind].seconds,
                "back_median_s": round(statistics.median(back_s[kind]), 1),
                "back_worst_s": max(back_s[kind]),
            }
            for kind in KINDS
            if back_s[kind]
        },
        "rows": [
            {
                "job": outcome.row.example,
                "consistency": outcome.row.policy,
                "transport": outcome.row.transport,
                "seed": outcome.seed,
                "faults": {kind: len(seconds) for kind, seconds in sorted(outcome.back_s.items())},
                "exits": dict(sorted(outcome.exits.items())),
                "frames_lost": outcome.lost_frames,
                "wall_s": round(outcome.wall_s, 1),
                "violations": outcome.broken,
            }
            for outcome in outcomes
        ],
    }


def main() -> int:
    """Run the matrix and return the exit code."""
    parser = argparse.ArgumentParser(description="Runs jobs on five hosts under faults of hosts and their network.")
    parser.add_argument("--faults", type=int, default=102, help="number of faults in all jobs together")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first job; the others have the next ones")
    parser.add_argument("--only", default="", metavar="NAME", help=f"run only one of {', '.join(map(str, MATRIX))}")
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="inject only this kind; may be repeated")
    parser.add_argument("--write", action="store_true", help=f"write benchmarks/results/{FIGURES}.json")
    arguments = parser.parse_args()
    if why := unavailable_reason():
        say(f"not run: {why}")
        return 2
    rows = [row for row in MATRIX if arguments.only in ("", str(row))]
    if not rows:
        parser.error(f"--only is one of {', '.join(map(str, MATRIX))}")
    folder = Path(tempfile.mkdtemp(prefix="parashard-hosts-"))
    each = -(-arguments.faults // len(rows))

    def run(number: int) -> Outcome:
        seed = arguments.seed + number
        schedule = draw(seed, each, HOSTS, arguments.kind or tuple(KINDS))
        outcome = run_row(rows[number], schedule, seed, folder / f"job-{number}")
        say(str(outcome))
        return outcome

    with ThreadPoolExecutor(len(rows)) as at_once:
        outcomes = list(at_once.map(run, range(len(rows))))
    code = conclude(outcomes, "jobs", folder)
    if arguments.write:
        write_figures(FIGURES, figures_of(outcomes))
    return code


if __name__ == "__main__":
    sys.exit(main())
