"""Processes that claim a place in a running job and die: each costs one restart (P23)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parashard.launch.local_cluster import MODULES
from parashard.process.failpoints import FOLDER_VARIABLE, SPEC_VARIABLE
from support.cluster_run import DEADLINE_S, ClusterRun, eventually, sets
from support.command_run import ROOT
from support.long_job import LongJob

Start = Callable[..., ClusterRun]
QUICK_LEDGER = 400  # steps of 1024


def start_and_kill(marks: Path, failpoint: str, role: str, *arguments: str) -> None:
    """Start a process that is killed at a failpoint, and wait for its end."""
    faults = {SPEC_VARIABLE: f"{failpoint}=kill", FOLDER_VARIABLE: str(marks)}
    stray = subprocess.run(
        [sys.executable, "-m", MODULES[role], *arguments],
        cwd=ROOT,
        env={**os.environ, **faults},
        timeout=DEADLINE_S,
        check=False,
        capture_output=True,
    )
    assert stray.returncode == -signal.SIGKILL, stray.stderr


@pytest.mark.parametrize("role", ["shard", "coordinator"])
def test_a_process_that_claims_and_dies_costs_one_restart(start_run: Start, tmp_path: Path, role: str) -> None:
    job = LongJob(tmp_path, "ledger.toml", QUICK_LEDGER)
    run = start_run(job.file, *sets(job__epochs=1, checkpoint__every_s=0.5))
    run.wait_for_steps(QUICK_LEDGER // 2)
    if role == "shard":
        arguments = ["--index", "0", "--connect", str(run.dir)]
        start_and_kill(tmp_path / "marks", "shard.boot.claimed", "shard", *arguments)
        run.wait_for_event("shard-0 restarted")
    else:
        arguments = ["--job", job.file, "--run-dir", str(run.dir), "--resume", "--model-folder", str(tmp_path)]
        arguments += [word for key in ("job.epochs=1", "checkpoint.every_s=0.5") for word in ("--set", key)]
        start_and_kill(tmp_path / "marks", "coordinator.boot.claimed", "coordinator", *arguments)
        log = run.dir / "logs" / "coordinator.log"
        eventually(lambda: "incarnation=3" in log.read_text(), "it has a number beyond the stray's", told=run.told)
    job.let_end()
    report = run.report()
    assert report["ledger_wrong"] == 0
    assert report["shard_restarts"] == (role == "shard")
    log = (run.dir / "logs" / f"{role}{'-0' if role == 'shard' else ''}.log").read_text()
    assert (
        "another process has claimed incarnation 2" if role == "shard" else "a later coordinator has this run"
    ) in log
