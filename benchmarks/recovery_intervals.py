"""The cost of a shard's death at each interval between two checkpoints, and the cost of the interval in speed.

A run for each interval. Speed: the steps applied per second, relative to a run without checkpoints. A death: the shard
is killed when its newest checkpoint is half an interval old, which is the mean age at a random moment; it costs the
seconds until every shard has as many steps again as before. Called by `benchmarks.recovery`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.recovery_goodput import applied_everywhere
from benchmarks.recovery_times import steady
from benchmarks.tables import spread, table
from benchmarks.watched_run import Watch, run_watched
from parashard.job.layers import parse_set

EVERY_S = (1.0, 5.0, 30.0, 60.0)
POLICIES = ("async", "sync:2")
PATIENCE = 4
"""A wait fails after this many intervals plus a minute."""
SPEED_S = 10.0
"""Seconds over which a speed is measured; two intervals if these are longer."""
STEADY_STEPS = 2  # of each worker; a step with 1 GiB takes seconds


def measured(
    job: Path, settings: Sequence[str], scratch: Path | None, deaths: int, every_s: Sequence[float] = EVERY_S
) -> list[dict[str, Any]]:
    """Run a job with each policy and interval; return a row for each run.

    Parameters
    ----------
    job : Path
        A job file.
    settings : sequence of str
        `KEY=VALUE`; the job must not end by itself.
    scratch : Path, optional
        Folder on the disk to measure with; None: the system's.
    deaths : int
        Deaths of shards in each run.
    every_s : sequence of float
        Seconds between two checkpoints.
    """
    rows = []
    for policy in POLICIES:
        for interval_s in (0.0, *every_s):
            own = (*settings, f"consistency.policy={policy}", f"checkpoint.every_s={interval_s}")
            watch = partial(watched, every_s=interval_s, deaths=deaths)
            row = {"policy": policy, "every_s": interval_s, **run_watched(job, [*map(parse_set, own)], scratch, watch)}
            rows.append(row)
            cost = f"; deaths cost {row['lost_s']}" if row["lost_s"] else ""
            print(f"{policy}, every {interval_s:.0f} s: {row['steps_per_s']:,.1f} steps/s{cost}", flush=True)
    return rows


def watched(watch: Watch, every_s: float, deaths: int) -> dict[str, Any]:
    """Watch a job with this checkpoint interval: measure its speed, then kill its shards in turn."""
    shards = len(steady(watch, STEADY_STEPS).shards)
    rate = speed(watch, max(SPEED_S, 2 * every_s))
    if not every_s:
        return {"steps_per_s": rate, "lost_s": []}
    return {"steps_per_s": rate, "lost_s": [lost_s(watch, turn % shards, every_s) for turn in range(deaths)]}


def speed(watch: Watch, seconds: float) -> float:
    """Return the steps that every shard applied, per second."""
    began_s, first = time.monotonic(), watch.eventually(lambda: applied_everywhere(watch), "shards that answer")
    watch.pause(seconds)
    last = watch.eventually(lambda: applied_everywhere(watch), "shards that answer")
    return (last - first) / (time.monotonic() - began_s)


def lost_s(watch: Watch, shard: int, every_s: float) -> float:
    """Kill a shard half an interval after it saved; return the seconds until the job has as many steps as before."""
    wait_s = PATIENCE * every_s + 60.0
    address = watch.eventually(watch.view, "where the shards are").shards[shard].address

    before = watch.eventually(lambda: watch.inspect(address), "a shard that answers").checkpoints

    def stored() -> bool:
        record = watch.inspect(address)
        return record is not None and record.checkpoints > before

    watch.eventually(stored, "the shard's next checkpoint", wait_s)
    watch.pause(every_s / 2)
    steps = watch.eventually(lambda: applied_everywhere(watch), "shards that answer")
    killed_s = watch.kill(f"shard-{shard}")
    watch.eventually(lambda: (applied_everywhere(watch) or 0) >= steps, "the steps that were lost", wait_s)
    return round(time.monotonic() - killed_s, 3)


def section(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the Markdown table."""
    off = {row["policy"]: row["steps_per_s"] for row in rows if not row["every_s"]}
    lines = []
    for row in rows:
        speed_told = f"{row['steps_per_s'] / off[row['policy']]:.2f}"
        every = f"{row['every_s']:.0f} s" if row["every_s"] else "never"
        cost = f"{spread(row['lost_s'])} s" if row["lost_s"] else ""
        lines.append([row["policy"], every, speed_told, cost, _hourly(row["lost_s"])])
    header = [
        "policy",
        "a checkpoint",
        "speed, relative to never",
        "a death costs, median (spread)",
        "one an hour costs",
    ]
    return table(header, lines)


def _hourly(lost: Sequence[float]) -> str:
    return f"{statistics.median(lost) / 36:.2f} %" if lost else ""
