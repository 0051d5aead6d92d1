"""Whole clusters that stand still for longer than every timeout, and go on as if nothing had been."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from support.cluster_run import ClusterRun, eventually, sets
from support.long_job import LongJob

Start = Callable[..., ClusterRun]
QUICK = 400  # steps of 2048
# A worker is silent after 3 s, a process dead after 10, a step hung after 10, a peer given up after 12.
TIMEOUTS = sets(
    cluster__lease_ttl_s=3.0, cluster__silence_s=10.0, cluster__step_timeout_s=10.0, cluster__retry_budget_s=12.0
)
SUSPENDED_S = 15.0  # longer than each of them, and than every deadline of a call
FALSE = ("silent", "killed", "ended", "does not answer", "not answered", "has taken over", "failed at", "recomputed")


def processes(run: ClusterRun) -> list[int]:
    """Return the ids of all processes of a run, the launcher's first."""
    pids = [run.process.pid, *(pid for role in ("coordinator", "shard", "worker") for pid in run.pids(role).values())]
    assert len(pids) == 7
    return pids


def suspend(pids: list[int]) -> None:
    """Stop processes for a while, and continue them in this order: those that judge silence first."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        eventually(lambda pid=pid: "T (stopped)" in Path(f"/proc/{pid}/status").read_text(), "it stands still")
    end_s = time.monotonic() + SUSPENDED_S
    eventually(lambda: time.monotonic() > end_s, "every timeout has passed")  # the fault itself is a time
    for pid in pids:
        with suppress(ProcessLookupError):  # then the report says so
            os.kill(pid, signal.SIGCONT)


@pytest.mark.full("own pauses do not count as silence: test_exclusive.py, test_leasing.py, test_running.py")
def test_suspended_clusters_go_on_without_failures(start_run: Start, tmp_path: Path) -> None:  # P1, P22, P26
    jobs: dict[str, tuple[LongJob, ClusterRun]] = {}
    for policy in ("async", "sync:4"):
        (tmp_path / policy).mkdir()
        job = LongJob(tmp_path / policy, "ledger.toml", QUICK)
        settings = sets(consistency__policy=policy, job__epochs=2, checkpoint__every_s=0.5)
        jobs[policy] = job, start_run(job.file, *TIMEOUTS, *settings)
    for _, run in jobs.values():
        run.wait_for_steps(QUICK + 8)  # each worker is at a step that takes a second
    suspend([pid for _, run in jobs.values() for pid in processes(run)])
    for _, run in jobs.values():
        run.wait_for_steps(QUICK + 16)
    for job, _ in jobs.values():
        job.let_end()
    for _, run in jobs.values():
        report = run.report()
        assert report["ledger_wrong"] == 0
        assert (report["worker_restarts"], report["shard_restarts"], report["coordinator_restarts"]) == (0, 0, 0)
        assert (report["rollbacks"], report["skipped_steps"], report["problems"]) == (0, 0, [])
        logs = "\n".join(path.read_text() for path in (run.dir / "logs").iterdir()) + run.complaint()
        assert [line for line in logs.splitlines() if any(word in line for word in FALSE)] == []
