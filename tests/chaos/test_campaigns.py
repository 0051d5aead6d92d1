"""Every oracle under faults of every kind, for a short time; `make chaos` does it for longer, in every policy."""

from pathlib import Path

import pytest
from campaigns import DIGEST, LEDGER, TORN, Oracle, run_campaign

FAULTS = 10
MEAN_INTERVAL_S = 0.7


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("oracle", "policy", "transport", "seed"),
    # Seeds that draw every kind of fault, and for each job deaths of the coordinator and, late enough to have saved
    # something, of a shard. The digest sees a single element that was read while it was written; torn sees rooms mixed.
    [
        (LEDGER, "async", "grpc", 24),
        (TORN, "ssp:8", "tcp", 66),
        (DIGEST, "sync:4", "shm", 188),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_promise_is_kept_under_faults(  # P1-P14
    oracle: Oracle, policy: str, transport: str, seed: int, tmp_path: Path
) -> None:
    campaign = run_campaign(
        oracle, policy, transport, faults=FAULTS, seed=seed, folder=tmp_path, mean_interval_s=MEAN_INTERVAL_S
    )
    assert campaign.broken == [], f"{campaign}; see {tmp_path}"
    assert campaign.faults.total() >= FAULTS
