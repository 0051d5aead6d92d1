"""Failpoint sweep: SIGKILL at every named failpoint of every service, each so often, and every promise kept.

`python tests/chaos/failpoint_sweep.py --firings 20 --write` prints a line for each job and writes
benchmarks/results/chaos_failpoints.json. A failpoint that did not fire as often as asked for is a failure. The tests
run the same sweeps with fewer firings.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import conclude, say, write_figures
from job_run import NOTHING_EXPECTED, JobRun, fault_free, sets, violations
from sweeps import ONCE, SWEEPS, Sweep

from parashard.process.failpoints import FAILPOINTS, FOLDER_VARIABLE, SEED_VARIABLE, SPEC_VARIABLE, firings

FUEL_TIMES = 3  # as often as what it brings a job to
FULL_FIRINGS = 20  # what the sweeps' epochs are for
DEADLINE_S = 300.0  # of a job, besides its kills
KILL_S = 5.0  # at most from one kill to the next
FIGURES = "chaos_failpoints"


@dataclass(frozen=True)
class Swept:
    """What a sweep showed: how often each of its failpoints fired, and which promises were broken, in words."""

    sweep: Sweep
    fired: Counter[str]
    wall_s: float
    broken: list[str]

    def __str__(self) -> str:
        counts = ", ".join(f"{self.fired[name]} {name}" for name in self.sweep.failpoints)
        return f"{self.sweep.name}: {'; '.join(self.broken) or 'every promise kept'}; {counts}; {self.wall_s:.0f} s"


def run_sweep(sweep: Sweep, times: int, seed: int, folder: Path) -> Swept:
    """Run a sweep's job with each of its failpoints armed to kill so many times."""
    started_s = time.monotonic()
    at, markers = folder / "run", folder / "markers"
    markers.mkdir(parents=True)
    job = [sweep.file, *sets(values_of(sweep, times))]
    expected = fault_free(job, sweep.policy, folder / "fault-free") if sweep.digest else NOTHING_EXPECTED
    armed = {SPEC_VARIABLE: spec(sweep, times), FOLDER_VARIABLE: str(markers), SEED_VARIABLE: str(seed)}
    kills = times * (len(sweep.failpoints) + FUEL_TIMES * len(sweep.fuel))
    provoke = sweep.provoke() if sweep.provoke else None
    with JobRun(at, ["run", *job, "--consistency", sweep.policy], environ=armed) as run:
        ended = run.wait(
            time.monotonic() + DEADLINE_S + KILL_S * kills,
            lambda: provoke(run, firings(markers), times) if provoke else None,
        )
    fired = firings(markers)
    broken = violations(ended, expected)
    broken += [f"{name} fired {fired[name]} of {times} times" for name in sweep.failpoints if fired[name] < times]
    return Swept(sweep, fired, time.monotonic() - started_s, broken)


def spec(sweep: Sweep, times: int) -> str:
    """Return what arms a sweep's failpoints."""
    # With a single firing there may be no later kill of an incarnation that passes the failpoint only once.
    last = {name: 1 if often == ONCE and times == 1 else often for name, often in sweep.failpoints.items()}
    kills = [f"{name}=kill@1..{often}*{times}" for name, often in last.items()]
    return ";".join(kills + [f"{name}=kill@1..{often}*{FUEL_TIMES * times}" for name, often in sweep.fuel.items()])


def values_of(sweep: Sweep, times: int) -> dict[str, Any]:
    """Return the job's other keys: restarts are unlimited and without back-off."""
    epochs = max(1, sweep.epochs * times // FULL_FIRINGS)
    restarts = {"cluster.max_restarts": 1_000_000, "cluster.restart_backoff_s": 0.0, "cluster.lease_ttl_s": 2.0}
    return {"job.epochs": epochs, **restarts, **sweep.values}


def main() -> int:
    """Run the sweeps and return the exit code."""
    parser = argparse.ArgumentParser(description="Kills processes at every failpoint, each so often.")
    parser.add_argument("--firings", type=int, default=FULL_FIRINGS, help="number of kills at each failpoint")
    parser.add_argument("--seed", type=int, default=1, help="seed of the hits at which they kill")
    parser.add_argument(
        "--only", default="", choices=list(FAILPOINTS), metavar="NAME", help="run only the job that passes it"
    )
    parser.add_argument("--write", action="store_true", help=f"write benchmarks/results/{FIGURES}.json")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="parashard-failpoints-"))
    done = []
    for number, sweep in enumerate(SWEEPS):
        if arguments.only in ("", *sweep.failpoints):
            done.append(run_sweep(sweep, arguments.firings, arguments.seed, folder / str(number)))
            say(str(done[-1]))
    code = conclude(done, "jobs", folder)
    if arguments.write:
        write_figures(FIGURES, summed(done))
    return code


def summed(done: Sequence[Swept]) -> dict[str, Any]:
    """Return the figures of sweeps, as the results' table has them."""
    fired = {name: swept.fired[name] for swept in done for name in swept.sweep.failpoints}
    return {
        "violations": f"{sum(bool(swept.broken) for swept in done)} of {len(done)}",
        "kills": sum(swept.fired.total() for swept in done),
        "failpoints": fired,
        "rows": [
            {
                "job": swept.sweep.name,
                "file": swept.sweep.file,
                "consistency": swept.sweep.policy,
                "kills": swept.fired.total(),
                "wall_s": round(swept.wall_s, 1),
                "violations": swept.broken,
            }
            for swept in done
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
