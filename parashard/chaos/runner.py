"""Runs a job as `launch.run` does, behind a proxy and under a campaign of faults, and adds the faults to its report.

Owns the thread that strikes and the record of what struck. Decides neither what strikes whom (`schedule`) nor what a
strike does (`campaign`). Called by `parashard chaos`.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from parashard.chaos.campaign import Campaign
from parashard.chaos.proxied_cluster import ProxiedCluster
from parashard.chaos.proxy import Proxy
from parashard.chaos.schedule import DISK_KINDS, LENGTHS_S, LINK_KINDS, Strike, strikes, targets_of
from parashard.chaos.small_disk import check_small
from parashard.display.live import JobView
from parashard.errors import ConfigurationError
from parashard.job.layers import Override
from parashard.job.load import LoadedJob
from parashard.launch.run import Outcome, run_job
from parashard.process.side_effects import SideEffect
from parashard.transports.base import allows

STRIKES_FILE = "strikes.jsonl"
CHAOS_FLAG = "chaos"

UNDER_CHAOS: tuple[Override, ...] = (
    ("checkpoint.every_s", 1.0, CHAOS_FLAG),  # saves must be oftener than kills
    ("cluster.lease_ttl_s", 2.0, CHAOS_FLAG),  # shorter than a long pause: its leases end, and then it comes back
    ("cluster.silence_s", 6.0, CHAOS_FLAG),  # a process that hangs is soon noticed; longer than any pause
    ("cluster.start_s", 60.0, CHAOS_FLAG),  # likewise, one that hangs in its start
    ("cluster.max_restarts", 200, CHAOS_FLAG),  # deaths are on purpose; a process that cannot start still ends the job
)
"""What a job under chaos has for other values, unless a `--set` says otherwise."""

THROUGH_LINKS: Override = ("cluster.transport", "tcp", CHAOS_FLAG)
"""What a job under chaos has in the place of "auto", which would take shared memory, past the links."""


@dataclass(frozen=True)
class ChaosOptions:
    """What strikes, and how often.

    Attributes
    ----------
    seed : int
        Repeats the schedule; moments and steps that it meets are the machine's.
    mean_interval_s : float
        Mean time between the beginnings of two faults; > 0.
    faults_max : int or None
        Stop striking after so many; None: when the job ends.
    kinds : tuple of str
        Of `parashard.chaos.schedule.LENGTHS_S`; not empty.
    """

    seed: int
    mean_interval_s: float
    faults_max: int | None
    kinds: tuple[str, ...]


FLAGS: Mapping[str, tuple[str, ...]] = {
    "--pause": ("pause_worker", "pause_shard", "pause_coordinator"),  # SIGSTOP, later SIGCONT
    "--hang": ("hang_worker", "hang_shard", "hang_coordinator"),  # SIGSTOP for good
    "--stray": ("stray_shard", "stray_coordinator"),  # second processes, which claim an incarnation and die
    "--partition": ("partition", "one_way", "reset"),  # links that carry nothing, one way or both, or reset
    "--delay": ("delay", "duplicate"),  # links that carry everything late, or twice
    "--disk": DISK_KINDS,  # no room on the file system of the run directory
}
"""The kinds of faults that each flag asks for, beside `--kill`."""


def kinds_of(kill: Sequence[str], flags: Collection[str]) -> tuple[str, ...]:
    """Return the kinds of faults that are asked for; all kinds but a full disk if none is.

    Parameters
    ----------
    kill : sequence of str
        Roles to kill: worker, shard, coordinator.
    flags : collection of str
        Of `FLAGS`.

    Raises
    ------
    ConfigurationError
        If a role is none.
    """
    roles = [kind.removeprefix("kill_") for kind in LENGTHS_S if kind.startswith("kill_")]
    for role in kill:
        if role not in roles:
            raise ConfigurationError(f"--kill: found {role!r}; allowed: {', '.join(roles)}, separated by commas")
    asked = {f"kill_{role}" for role in kill}.union(*(FLAGS[flag] for flag in flags))
    return tuple(kind for kind in LENGTHS_S if kind in (asked or {*LENGTHS_S} - {*DISK_KINDS}))


def run_chaos(
    loaded: LoadedJob, run_dir: Path, view: JobView, options: ChaosOptions, tls_dir: Path | None = None
) -> Outcome:
    """Run a job under faults to its end; when this returns, no process of it is left.

    Returns
    -------
    Outcome
        As of `parashard.launch.run.run_job`; its report also has `faults`, how many of each kind have struck (each of
        `options.kinds` is there), `seed` and `transport`. The run directory has every strike in `strikes.jsonl`.

    Raises
    ------
    ConfigurationError
        If links are to be struck and gradients and weights would not go through them, if the disk is to be filled and
        is not a small one, or if nobody can be struck.
    """
    transport = loaded.job.cluster.transport
    past = [kind for kind in options.kinds if kind in LINK_KINDS]
    if past and allows(transport, "shm"):
        raise ConfigurationError(
            f'cluster.transport is "{transport}", which goes past the links that {", ".join(past)} would strike; '
            'allowed: "tcp" or "grpc", or only --kill and --pause'
        )
    if set(options.kinds) & set(DISK_KINDS):
        check_small(run_dir)
    shards, workers = loaded.job.cluster.shards, loaded.job.cluster.workers
    with Proxy() as proxy, _Striking(run_dir / STRIKES_FILE, view) as striking:
        cluster = ProxiedCluster(run_dir, proxy, shards, workers, before_end=striking.end)
        kinds = [kind for kind in options.kinds if targets_of(kind, cluster.processes, cluster.links)]
        if not kinds:
            raise ConfigurationError(f"there is nobody to strike: {shards} shards, {workers} workers")
        drawn = strikes(options.seed, options.mean_interval_s, kinds, cluster.processes, cluster.links)
        campaign = Campaign(cluster, drawn, options.faults_max, striking.tell)
        striking.begin(campaign)
        outcome = run_job(loaded, run_dir, view, init=None, output=None, cluster=cluster, tls_dir=tls_dir)
    faults = {kind: campaign.faults[kind] for kind in options.kinds}
    more = {"faults": faults, "seed": options.seed, "transport": transport}
    return replace(outcome, report={**outcome.report, **more})


class _Striking:
    """The thread that advances a campaign, and the file of what struck."""

    def __init__(self, path: Path, view: JobView) -> None:
        self._file = path.open("w")
        self._lines = SideEffect("strikes", lambda text, _: view.say(text))
        self._view = view
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> _Striking:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        with suppress(OSError):
            self._file.close()

    def begin(self, campaign: Campaign) -> None:
        """Strike from now on."""
        self._thread = threading.Thread(target=self._run, args=(campaign,), name="chaos", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Lift what lasts and strike no more; return once that is so."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def tell(self, strike: Strike) -> None:
        """Write a strike down and show it."""
        line = json.dumps(asdict(strike)) + "\n"
        self._lines.attempt(lambda: self._write(line))
        self._view.say(f"chaos: {strike.kind} {strike.target}")

    def _write(self, line: str) -> None:
        self._file.write(line)
        self._file.flush()

    def _run(self, campaign: Campaign) -> None:
        pause_s = 0.0
        while not self._over.wait(None if pause_s == math.inf else pause_s):
            pause_s = campaign.advance(time.monotonic())
        campaign.lift()
