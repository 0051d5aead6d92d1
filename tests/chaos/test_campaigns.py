"""Every oracle under faults of every kind, for a short time; `make chaos` does it for longer, in every policy."""

from dataclasses import replace
from pathlib import Path

import pytest
from campaigns import (
    COMING_AND_GOING,
    DIGEST_ON_FULL_DISK,
    LEDGER,
    ROW_LEDGER,
    TORN,
    Oracle,
    run_campaign,
    run_where_it_fits,
)

from support.small_mount import NotPermitted

FAULTS = 7
BRIEF = ("--kill", "worker,shard,coordinator", "--pause")
ON_LINKS = ("--partition", "--delay")
ENVIRONMENT = ("--hang", "--stray")
MEAN_INTERVAL_S = 0.7

LEDGER_IN_PARTS = replace(LEDGER, steps_per_s=200)
"""In `auto` a step is a part of a batch, and a second has fewer steps."""

full = pytest.mark.full("campaigns on real processes; the simulation has the same faults in virtual time")


@full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("oracle", "policy", "transport", "seed", "kinds"),
    # Seeds that draw every kind of fault, and for each job deaths of the coordinator and, late enough to have saved
    # something, of a shard. A digest sees a single element that was read while it was written; torn sees a mix.
    [
        (LEDGER_IN_PARTS, "auto", "grpc", 24, (*BRIEF, *ON_LINKS)),
        (TORN, "ssp:8", "tcp", 66, (*BRIEF, *ON_LINKS)),
        (LEDGER, "ssp:8", "shm", 3, ENVIRONMENT),
        (ROW_LEDGER, "async", "tcp", 24, (*BRIEF, *ON_LINKS)),
        (COMING_AND_GOING, "sync:4", "shm", 188, BRIEF),
    ],
    ids=lambda value: getattr(value, "name", value) if not isinstance(value, tuple) else "",
)
def test_every_promise_is_kept_under_faults(  # P1-P14, P22, P23
    oracle: Oracle, policy: str, transport: str, seed: int, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    campaign = run_campaign(
        oracle,
        policy,
        transport,
        faults=FAULTS,
        seed=seed,
        folder=tmp_path,
        mean_interval_s=MEAN_INTERVAL_S,
        kinds=kinds,
    )
    assert campaign.broken == [], f"{campaign}; see {tmp_path}"
    assert campaign.faults.total() >= FAULTS


@full
@pytest.mark.timeout(900)
def test_a_job_ends_whose_disk_is_full_now_and_then(tmp_path: Path) -> None:  # P21
    """Logs, history and checkpoints lie together on a disk that fills and empties, while processes are killed."""
    seed = 107  # fills the disk first, then kills a shard and the coordinator while it is full, on a slow machine, too
    try:
        campaign = run_where_it_fits(
            DIGEST_ON_FULL_DISK, "sync:4", "shm", faults=FAULTS, seed=seed, folder=tmp_path, mean_interval_s=1.5
        )
    except NotPermitted as error:
        pytest.skip(str(error))
    assert campaign.broken == [], f"{campaign}; see {tmp_path}"
    assert campaign.faults["fill_disk"] > 0, campaign
