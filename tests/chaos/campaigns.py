"""Campaigns: jobs of every oracle and policy under every kind of fault, `parashard chaos` for each.

`python tests/chaos/campaigns.py --faults 55 --write` prints a line for each job and writes
benchmarks/results/chaos_campaigns.json. The tests run some of the same campaigns for a shorter time.

Rule P29.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from figures import conclude, say, write_figures
from job_run import NOTHING_EXPECTED, JobRun, fault_free, sets, violations

from support.small_mount import NotPermitted, mounted

MEAN_INTERVAL_S = 1.0
JOBS_MAX = 4  # of one campaign, where the first ended before all faults had struck
DEADLINE_S = 300.0  # of one job, besides the time in which faults strike
FIGURES = "chaos_campaigns"
SMALL_MIB = 32
WORKERS = 3  # of each job that runs in `auto`
RESTARTS = ("worker_restarts", "shard_restarts", "coordinator_restarts", "rollbacks")


@dataclass(frozen=True)
class Oracle:
    """A job whose end shows what went wrong."""

    name: str  # as in the guarantees: ledger, torn or digest
    file: str  # the job file, of which a campaign changes the number of epochs
    # steps_per_epoch, steps_per_s: how many batches an epoch has, and how many steps a second of faults asks for, so
    # that the job outlasts them.
    steps_per_epoch: int
    steps_per_s: int
    digest: bool = False  # whether the weights must be those of a run without faults
    values: Mapping[str, Any] = field(default_factory=dict)  # other keys of the job
    kinds: Sequence[str] = ()  # flags of `parashard chaos`, where not every kind may strike

    def epochs(self, policy: str, faulty_s: float) -> int:
        """Return how many epochs outlast faults of so many seconds; in `auto` each worker has a step of a batch."""
        steps = self.steps_per_epoch * (WORKERS if policy == "auto" else 1)
        return max(1, math.ceil(faulty_s * self.steps_per_s / steps))


LEDGER = Oracle("ledger", "examples/ledger.toml", 1024, 500)
ROW_LEDGER = Oracle("ledger of rows", "examples/row_ledger.toml", 1024, 400, values={"checkpoint.every_steps": 300})
COMING_AND_GOING = Oracle(
    "ledger of rows that come and go",
    "examples/row_ledger.toml",
    1024,
    400,
    digest=True,
    values={"checkpoint.every_steps": 300, "tables.ledger.admit_after": 2, "tables.ledger.evict_unused_steps": 300},
)
TORN = Oracle("torn", "examples/torn.toml", 100, 25)
DIGEST = Oracle("digest", "examples/digits.toml", 36, 250, digest=True)

FULL_DISK = Oracle(
    "ledger on a small disk",
    "examples/ledger.toml",
    1024,
    500,
    kinds=("--kill", "worker,shard,coordinator", "--pause", "--disk"),
)
DIGEST_ON_FULL_DISK = Oracle(
    "digest on a small disk",
    "examples/digits.toml",
    36,
    250,
    digest=True,
    kinds=("--kill", "worker,shard,coordinator", "--disk"),
)

MATRIX = (
    (LEDGER, "auto", "grpc"),
    (LEDGER, "async", "tcp"),
    (LEDGER, "ssp:8", "tcp"),
    (LEDGER, "sync:4", "shm"),
    (ROW_LEDGER, "auto", "tcp"),
    (ROW_LEDGER, "async", "shm"),
    (ROW_LEDGER, "ssp:8", "grpc"),
    (ROW_LEDGER, "sync:4", "tcp"),
    (COMING_AND_GOING, "async", "tcp"),
    (COMING_AND_GOING, "sync:4", "shm"),
    (TORN, "auto", "grpc"),
    (TORN, "async", "shm"),
    (TORN, "ssp:8", "tcp"),
    (TORN, "sync:4", "grpc"),
    (DIGEST, "sync:4", "tcp"),
    (FULL_DISK, "async", "shm"),
    (DIGEST_ON_FULL_DISK, "sync:4", "tcp"),
)
"""Oracle, policy and transport of each campaign: every policy with each oracle, every transport with several."""

PROCESSES_ONLY = ("--kill", "worker,shard,coordinator", "--pause", "--hang", "--stray")
"""What strikes a job whose transport is shm, which goes past all links."""


@dataclass
class Campaign:
    """What a campaign showed."""

    # oracle, policy, transport: which job it was.
    oracle: str
    policy: str
    transport: str
    seeds: list[int] = field(default_factory=list)  # of the jobs that it took; each repeats its schedule of faults
    faults: Counter[str] = field(default_factory=Counter)  # how many of each kind struck
    restarts: Counter[str] = field(default_factory=Counter)  # of workers, shards and the coordinator, and rollbacks
    broken: list[str] = field(default_factory=list)  # promises that were broken, in words
    wall_s: float = 0.0  # how long all of it took

    def __str__(self) -> str:
        struck = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()) if count)
        verdict = "; ".join(self.broken) or "every promise kept"
        return (
            f"{self.oracle}/{self.policy}/{self.transport}, seeds {self.seeds}: {verdict}; "
            f"{self.faults.total()} faults: {struck}; {self.wall_s:.0f} s"
        )


def run_campaign(
    oracle: Oracle,
    policy: str,
    transport: str,
    *,
    faults: int,
    seed: int,
    folder: Path,
    mean_interval_s: float = MEAN_INTERVAL_S,
    kinds: Sequence[str] = (),
) -> Campaign:
    """Run jobs until so many faults have struck; each job must keep every promise.

    A machine may be fast enough for a job to end before its last fault: then a longer one takes the faults that are
    left, with the next seed. `kinds` are flags of `parashard chaos`; without any, every kind strikes that can.
    """
    started_s, campaign = time.monotonic(), Campaign(oracle.name, policy, transport)
    while (left := faults - campaign.faults.total()) > 0 and not campaign.broken:
        if len(campaign.seeds) == JOBS_MAX:
            campaign.broken.append(f"only {campaign.faults.total()} of {faults} faults struck in {JOBS_MAX} jobs")
            break
        faulty_s = left * mean_interval_s
        longer = 4 ** len(campaign.seeds)  # on a machine that is faster than thought
        values = {
            "job.epochs": longer * oracle.epochs(policy, faulty_s),
            "cluster.transport": transport,
            **oracle.values,
        }
        job = [oracle.file, *sets(values)]
        name = f"{oracle.name.replace(' ', '-')}-{policy.replace(':', '-')}-{len(campaign.seeds)}"
        expected = NOTHING_EXPECTED
        if oracle.digest:
            with tempfile.TemporaryDirectory(
                prefix="parashard-fault-free-"
            ) as aside:  # it takes no room from the other
                expected = fault_free(job, policy, Path(aside) / "run")
        campaign.seeds.append(seed + len(campaign.seeds))
        strikes = ["--seed", str(campaign.seeds[-1]), "--mean-interval-s", str(mean_interval_s), "--faults", str(left)]
        strikes += kinds or oracle.kinds or (PROCESSES_ONLY if transport == "shm" else ())
        with JobRun(folder / name, ["chaos", *job, "--consistency", policy, *strikes]) as run:
            ended = run.wait(time.monotonic() + DEADLINE_S + 3 * faulty_s)
        campaign.faults.update(ended.report.get("faults", {}))
        campaign.restarts.update({key: ended.report.get(key, 0) for key in RESTARTS})
        campaign.broken.extend(violations(ended, expected))
    campaign.wall_s = time.monotonic() - started_s
    return campaign


def run_where_it_fits(
    oracle: Oracle,
    policy: str,
    transport: str,
    *,
    faults: int,
    seed: int,
    folder: Path,
    mean_interval_s: float = MEAN_INTERVAL_S,
) -> Campaign:
    """Run a campaign; one that fills the disk gets a small one, whose files are copied to `folder` if it breaks.

    Raises
    ------
    NotPermitted
        If it needs a small disk, and none may be mounted.
    """

    def run(where: Path) -> Campaign:
        return run_campaign(
            oracle, policy, transport, faults=faults, seed=seed, folder=where, mean_interval_s=mean_interval_s
        )

    if "--disk" not in oracle.kinds:
        return run(folder)
    with mounted(SMALL_MIB) as small:
        campaign = run(small)
        if campaign.broken:
            shutil.copytree(small, folder / oracle.name.replace(" ", "-"))
    return campaign


def main() -> int:
    """Run the matrix and return the exit code."""
    parser = argparse.ArgumentParser(description="Runs jobs of every oracle and policy under every kind of fault.")
    parser.add_argument("--faults", type=int, default=45, help="number of faults in each job")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first job; the others have the next ones")
    parser.add_argument("--only", default="", metavar="NAME", help="run only this job, such as torn/async/shm")
    parser.add_argument("--write", action="store_true", help=f"write benchmarks/results/{FIGURES}.json")
    arguments = parser.parse_args()
    named = {f"{oracle.name}/{policy}/{transport}": (oracle, policy, transport) for oracle, policy, transport in MATRIX}
    if arguments.only and arguments.only not in named:
        parser.error(f"--only is one of {', '.join(named)}")
    folder = Path(tempfile.mkdtemp(prefix="parashard-campaigns-"))
    campaigns = []
    for number, (name, row) in enumerate(named.items()):
        if arguments.only in ("", name):
            seed = arguments.seed + number * JOBS_MAX
            try:
                campaigns.append(run_where_it_fits(*row, faults=arguments.faults, seed=seed, folder=folder))
                say(str(campaigns[-1]))
            except NotPermitted as why:
                say(f"{name}: not run: {why}")
    code = conclude(campaigns, "campaigns", folder)
    if arguments.write:
        write_figures(FIGURES, summed(campaigns))
    return code


def summed(campaigns: Sequence[Campaign]) -> dict[str, Any]:
    """Return the figures of campaigns, as the results' table has them."""
    faults = sum((campaign.faults for campaign in campaigns), Counter[str]())
    return {
        "violations": f"{sum(bool(campaign.broken) for campaign in campaigns)} of {len(campaigns)}",
        "faults": faults.total(),
        "faults_by_kind": dict(sorted(faults.items())),
        "rows": [
            {
                "oracle": campaign.oracle,
                "consistency": campaign.policy,
                "transport": campaign.transport,
                "seeds": campaign.seeds,
                "faults": {kind: count for kind, count in sorted(campaign.faults.items()) if count},
                **campaign.restarts,
                "wall_s": round(campaign.wall_s, 1),
                "violations": campaign.broken,
            }
            for campaign in campaigns
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
