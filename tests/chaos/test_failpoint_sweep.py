"""SIGKILL at each failpoint, once; `make chaos` does it twenty times at each."""

from pathlib import Path

import pytest
from failpoint_sweep import run_sweep
from sweeps import SWEEPS, Sweep

from parashard.process.failpoints import FAILPOINTS


def test_the_sweeps_kill_at_every_failpoint():
    assert sorted(name for sweep in SWEEPS for name in sweep.failpoints) == sorted(FAILPOINTS)


@pytest.mark.full("a kill at every failpoint; the five clusters and the simulation kill every role")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: sweep.name)
def test_every_promise_is_kept_across_kills_at_the_failpoints_of(sweep: Sweep, tmp_path: Path) -> None:  # P1-P14
    swept = run_sweep(sweep, times=1, seed=1, folder=tmp_path)
    assert swept.broken == [], f"{swept}; see {tmp_path}"
