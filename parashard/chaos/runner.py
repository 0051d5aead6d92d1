"""Runs a job as `launch.run` does, behind a proxy and under a campaign of faults, and adds the faults to its report."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from parashard.chaos.campaign import (
    DISK_KINDS,
    LENGTHS_S,
    LINK_KINDS,
    Campaign,
    ScheduledFault,
    scheduled_faults,
    targets_of,
)
from parashard.chaos.proxied_cluster import ProxiedCluster, check_small
from parashard.chaos.proxy import Proxy
from parashard.display.live import JobView
from parashard.errors import ConfigurationError
from parashard.job.layers import Override
from parashard.launch.run import Outcome, run_job
from parashard.launch.runs import Run
from parashard.process.best_effort import BestEffort
from parashard.transports.base import allows

STRIKES_FILE = "strikes.jsonl"
CHAOS_FLAG = "chaos"

UNDER_CHAOS: tuple[Override, ...] = (
    ("checkpoint.every_s", 1.0, CHAOS_FLAG),  # checkpoints must be more frequent than kills
    ("cluster.lease_ttl_s", 2.0, CHAOS_FLAG),  # shorter than a long pause, so that a worker resumes without leases
    ("cluster.silence_s", 6.0, CHAOS_FLAG),  # longer than any pause, and short enough to detect a hang soon
    ("cluster.start_s", 60.0, CHAOS_FLAG),  # the same for a hang during a start
    ("cluster.max_restarts", 200, CHAOS_FLAG),  # kills are intended; a process that cannot start still ends the job
)
"""Overrides of a job under chaos, below `--set`."""

THROUGH_LINKS: Override = ("cluster.transport", "tcp", CHAOS_FLAG)
"""Transport of a job under chaos instead of "auto", which would bypass the links by shared memory."""


FLAGS: Mapping[str, tuple[str, ...]] = {
    "--pause": ("pause_worker", "pause_shard", "pause_coordinator"),  # SIGSTOP, later SIGCONT
    "--hang": ("hang_worker", "hang_shard", "hang_coordinator"),  # SIGSTOP without SIGCONT
    "--stray": ("stray_shard", "stray_coordinator"),  # duplicate processes, which claim an incarnation and die
    "--partition": ("partition", "one_way", "reset"),  # links held in one or both directions, or reset
    "--delay": ("delay", "duplicate"),  # links that deliver late, or twice
    "--disk": DISK_KINDS,  # the file system of the run directory is full
}
"""The kinds of faults of each flag, besides `--kill`."""


def kinds_of(kill: Sequence[str], flags: Collection[str]) -> tuple[str, ...]:
    """Return the kinds of faults that the flags select; all kinds except a full disk if they select none."""
    roles = [kind.removeprefix("kill_") for kind in LENGTHS_S if kind.startswith("kill_")]
    for role in kill:
        if role not in roles:
            raise ConfigurationError(f"--kill: found {role!r}; allowed: {', '.join(roles)}, separated by commas")
    asked = {f"kill_{role}" for role in kill}.union(*(FLAGS[flag] for flag in flags))
    return tuple(kind for kind in LENGTHS_S if kind in (asked or {*LENGTHS_S} - {*DISK_KINDS}))


def run_chaos(
    run: Run, view: JobView, seed: int, mean_interval_s: float, faults_max: int | None, kinds: Sequence[str]
) -> Outcome:
    """Run a job under faults of these kinds to its end; when this returns, all its processes have ended."""
    # The seed determines the schedule; which steps a fault hits depends on the machine. Faults stop after `faults_max`,
    # or, if None, at the end of the job. The report gets `faults` (the number of each kind), `seed` and `transport`;
    # `strikes.jsonl` in the run directory has every fault.
    transport = run.job.cluster.transport
    past = [kind for kind in kinds if kind in LINK_KINDS]
    if past and allows(transport, "shm"):
        raise ConfigurationError(
            f'cluster.transport is "{transport}", which goes past the links that {", ".join(past)} would strike; '
            'allowed: "tcp" or "grpc", or only --kill and --pause'
        )
    if set(kinds) & set(DISK_KINDS):
        check_small(run.folder)
    shards, workers = run.job.cluster.shards, run.job.cluster.workers
    with Proxy() as proxy, _CampaignThread(run.folder / STRIKES_FILE, view) as thread:
        cluster = ProxiedCluster(run.folder, proxy, shards, workers, before_end=thread.end)
        possible = [kind for kind in kinds if targets_of(kind, cluster.processes, cluster.links)]
        if not possible:
            raise ConfigurationError(f"these faults have no target: {shards} shards, {workers} workers")
        drawn = scheduled_faults(seed, mean_interval_s, possible, cluster.processes, cluster.links)
        campaign = Campaign(cluster, drawn, faults_max, thread.tell)
        thread.begin(campaign)
        outcome = run_job(run, view, cluster=cluster)
    faults = {kind: campaign.faults[kind] for kind in kinds}
    more = {"faults": faults, "seed": seed, "transport": transport}
    return replace(outcome, report={**outcome.report, **more})


class _CampaignThread:
    """The thread that advances a campaign, and the file of its faults."""

    def __init__(self, path: Path, view: JobView) -> None:
        self._file = path.open("w")
        self._lines = BestEffort("strikes", lambda text, _: view.say(text))
        self._view = view
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> _CampaignThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        with suppress(OSError):
            self._file.close()

    def begin(self, campaign: Campaign) -> None:
        """Start the campaign."""
        self._thread = threading.Thread(target=self._run, args=(campaign,), name="chaos", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End all faults and stop the campaign; return once that is done."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def tell(self, fault: ScheduledFault) -> None:
        """Record and show a fault."""
        line = json.dumps(asdict(fault)) + "\n"
        self._lines.attempt(lambda: self._write(line))
        self._view.say(f"chaos: {fault.kind} {fault.target}")

    def _write(self, line: str) -> None:
        self._file.write(line)
        self._file.flush()

    def _run(self, campaign: Campaign) -> None:
        pause_s = 0.0
        while not self._over.wait(None if pause_s == math.inf else pause_s):
            pause_s = campaign.advance(time.monotonic())
        campaign.lift()
