"""A job on a real Ray, briefly: the one test of this folder that `make test-frameworks` has, and so every change."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from ray_nodes import RayNodes
from ray_run import LEDGER, RayRun, ledger

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]


def test_a_killed_worker_costs_no_step_and_nothing_is_left(nodes: RayNodes, tmp_path: Path) -> None:
    job = ledger(tmp_path, "ledger.toml")
    run = RayRun(nodes, tmp_path, job.file, *LEDGER, "--set", "cluster.workers=2")
    try:
        run.until_live(2)
        run.wait_for_steps(8)
        os.kill(run.processes()["worker-0"], signal.SIGKILL)
        run.until(lambda status: any(worker.restarts for worker in status.workers), "a worker is started again")
        run.until_live(2)
        job.let_end()
        assert run.report()["ledger_wrong"] == 0
        run.until_gone()
        assert run.shared_memory() == []
    finally:
        run.clean_up()
