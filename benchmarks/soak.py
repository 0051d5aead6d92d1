"""Resident memory over time: does any process of a running job grow?

    python -m benchmarks.soak [--minutes 30] [--most-mib-per-hour 16] [--write]

The digits job without an end in sight, asynchronously, with a checkpoint every five seconds and an evaluation every
epoch. RSS of every process every ten seconds; its growth is the slope of a line through the samples of
the second half, since the first fills caches and pools. Ends with exit code 1 if a process grows by more than the
bound, or was started again. A run of less than 20 minutes shows the figures and judges nothing: one allocation then
counts as tens of MiB an hour. For the first 32 minutes the coordinator fills the timeline of its status page, a point a
second (`parashard_coordinator.endpoints.history`): about 3 of its MiB an hour until then, none afterwards.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.races.memory import rolled_up
from benchmarks.races.push_pull import MIB
from benchmarks.tables import table, write
from benchmarks.training import clean_up_when_ended
from benchmarks.watched_run import Watch, run_watched
from parashard.job.layers import parse_set

JOB = Path(__file__).resolve().parents[1] / "examples" / "digits.toml"
SETTINGS = (
    "job.epochs=200000",
    "consistency.policy=async",
    "evaluation.every_epochs=1",
    "checkpoint.every_s=5",
)
PROCESSES = ("coordinator", "shard-0", "shard-1", "worker-0", "worker-1")
LAUNCHER = "launcher"  # this process, which is `parashard run` and looks at the others
SAMPLE_S = 10.0
JUDGED_MINUTES = 20.0
GROWTH_MAX = 16.0

Sample = tuple[float, int]
"""Seconds since the beginning, and bytes."""


def main() -> None:
    """Run the job, print the table, write it, and end with the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="duration of the measurement (default: %(default)s)"
    )
    parser.add_argument(
        "--most-mib-per-hour", type=float, default=GROWTH_MAX, help="the bound for each process (default: %(default)s)"
    )
    parser.add_argument("--note", default="", help="what else the machine did, for the page")
    parser.add_argument("--scratch", type=Path, help="folder for the run's files (default: the system's)")
    parser.add_argument("--write", action="store_true", help="write soak.json and .md in benchmarks/results")
    arguments = parser.parse_args()
    clean_up_when_ended()
    seen = run_watched(
        JOB,
        [parse_set(setting) for setting in SETTINGS],
        arguments.scratch,
        partial(sampled, minutes=arguments.minutes),
    )
    figures = judged(seen["samples"], arguments.minutes, arguments.most_mib_per_hour, seen["again"])
    text = "\n\n".join(filter(None, [drawn(figures), verdict(figures, seen["steps"]), arguments.note]))
    print(text, flush=True)
    if arguments.write:
        write("soak", {"Resident memory of a job that goes on": text}, {**figures, **seen, "note": arguments.note})
    sys.exit(bool(figures["over"]))


def sampled(watch: Watch, minutes: float) -> dict[str, Any]:
    """Watch every process for some time; return samples by name, restarted processes, and the steps done."""
    watch.eventually(lambda: (status := watch.status()) and status.steps_complete, "the first steps")
    pids = {LAUNCHER: os.getpid(), **{name: watch.cluster.pid(name) for name in PROCESSES}}
    samples: dict[str, list[Sample]] = {name: [] for name in pids}
    began_s = time.monotonic()
    while (elapsed_s := time.monotonic() - began_s) < 60 * minutes:
        for name, pid in pids.items():
            if name == LAUNCHER or watch.cluster.pid(name) == pid:
                rss = rolled_up((Path("/proc") / str(pid) / "smaps_rollup").read_text())["rss"]
                samples[name].append((round(elapsed_s, 1), rss))
        watch.pause(SAMPLE_S)
    status = watch.eventually(watch.status, "the job's status")
    again = [name for name in PROCESSES if watch.cluster.pid(name) != pids[name]]
    return {"samples": samples, "again": again, "steps": status.steps_complete}


def growth_mib_per_hour(samples: Sequence[Sample]) -> float:
    """Return the slope of the line of least squares through the second half of some samples; 0 of fewer than two."""
    last_s = samples[-1][0] if samples else 0.0
    half = [sample for sample in samples if sample[0] >= last_s / 2]
    if len(half) < 2:
        return 0.0
    slope, _ = statistics.linear_regression([s for s, _ in half], [rss / MIB for _, rss in half])
    return 3600 * slope


def judged(
    samples: Mapping[str, Sequence[Sample]], minutes: float, most_mib_per_hour: float, again: Sequence[str]
) -> dict[str, Any]:
    """Return for each process its RSS at the beginning, halfway, at the end and at most, and its growth, in MiB.

    `over` names those that break the bound or were started again; in a run that is too short there are none.
    """
    rows = {}
    for name, series in samples.items():
        sizes = [rss / MIB for _, rss in series]
        rows[name] = {
            "first": sizes[0],
            "halfway": sizes[len(sizes) // 2],
            "last": sizes[-1],
            "most": max(sizes),
            "growth_per_hour": growth_mib_per_hour(series),
        }
    long_enough = minutes >= JUDGED_MINUTES
    over = [name for name, row in rows.items() if row["growth_per_hour"] > most_mib_per_hour]
    return {
        "minutes": minutes,
        "most_mib_per_hour": most_mib_per_hour,
        "mib": rows,
        "long_enough": long_enough,
        "over": sorted({*over, *again}) if long_enough else [],
    }


def drawn(figures: Mapping[str, Any]) -> str:
    """Return the table."""
    rows = [
        [name, *(f"{row[key]:,.1f}" for key in ("first", "halfway", "last", "most")), f"{row['growth_per_hour']:+.1f}"]
        for name, row in figures["mib"].items()
    ]
    return table(["process", "RSS first, MiB", "halfway", "last", "most", "growth of the second half, MiB/h"], rows)


def verdict(figures: Mapping[str, Any], steps: int) -> str:
    """Return a summary of the figures, in one sentence."""
    looked = f"{figures['minutes']:g} minutes, {steps:,} steps, the bound {figures['most_mib_per_hour']:g} MiB/h"
    if not figures["long_enough"]:
        return f"{looked}: too short to judge."
    return f"{looked}: {'broken by ' + ', '.join(figures['over']) if figures['over'] else 'kept by every process'}."


if __name__ == "__main__":
    main()
