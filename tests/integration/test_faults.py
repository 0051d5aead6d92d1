"""Whole jobs whose processes are killed, stopped and asked to leave (P5)."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parashard._proto import coordinator_pb2 as pb
from support.cluster_run import DEADLINE_S, ClusterRun, eventually, sets
from support.command_run import ROOT
from support.long_job import LongJob

Start = Callable[..., ClusterRun]
QUICK_DIGITS = 20  # steps of 1350


@pytest.fixture
def digits(tmp_path: Path) -> LongJob:
    """Return digits that go on, with little for the machine to do, until they are let end."""
    return LongJob(tmp_path, "digits.toml", QUICK_DIGITS)


def worker(status: pb.GetStatusReply, name: str) -> pb.WorkerStatus:
    return next(worker for worker in status.workers if worker.name == name)


def computes(name: str) -> Callable[[pb.GetStatusReply], bool]:
    return lambda status: any(worker.name == name and worker.steps_complete for worker in status.workers)


def test_a_worker_that_hangs_loses_its_leases_and_may_come_back(start_run: Start, digits: LongJob) -> None:
    run = start_run(digits.file, *sets(cluster__lease_ttl_s=1.0, cluster__speculate_after=0))
    run.until(computes("worker-0"), "it computes")
    run.kill("worker", "worker-0", signal.SIGSTOP)
    stopped = run.until(
        lambda status: not worker(status, "worker-0").live and any("worker-0 was silent" in e for e in status.events),
        "its leases end",
    )
    run.kill("worker", "worker-0", signal.SIGCONT)
    stopped_at = worker(stopped, "worker-0").steps_complete
    again = run.until(
        lambda status: worker(status, "worker-0").live and worker(status, "worker-0").steps_complete > stopped_at,
        "it computes again",
    )
    assert worker(again, "worker-0").incarnation == 1


def test_ctrl_c_ends_every_process(start_run: Start, digits: LongJob) -> None:
    run = start_run(digits.file)
    run.wait_for_steps(QUICK_DIGITS)
    run.process.send_signal(signal.SIGINT)
    run.wait()
    assert run.process.returncode == 130
    saved = r"\(saved( up to step [\d,]+; [\d,]+ steps? will be recomputed)?\)"
    assert re.search(rf"stopped at step [\d,]+ of [\d,]+ {saved}\. Continue: parashard resume ", run.complaint())
    assert json.loads((run.dir / "report.json").read_text())["state"] == "stopped"
    assert not run.left_over()


def test_kill_9_of_the_command_line_ends_every_process(start_run: Start, digits: LongJob) -> None:
    run = start_run(digits.file)
    run.wait_for_steps(QUICK_DIGITS)
    eventually(lambda: len(run.left_over()) == 5, "all processes run", told=run.left_over)
    run.process.kill()
    run.wait_until_all_exited()


def test_a_worker_of_another_job_is_refused_and_one_of_this_job_may_leave(
    start_run: Start, digits: LongJob
) -> None:  # P2
    run = start_run(digits.file)
    run.wait_for_steps(QUICK_DIGITS)
    for changed, told in ((sets(data__held_out=0.3), "data differ"), (sets(job__batch_size=16), "job.batch_size")):
        command = [sys.executable, "-m", "parashard", "worker", "--connect", str(run.dir), *changed]
        joined = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=DEADLINE_S, check=False)
        assert joined.returncode == 3
        assert told in joined.stderr
        assert "Traceback" not in joined.stderr
    leaver = subprocess.Popen([sys.executable, "-m", "parashard", "worker", "--connect", str(run.dir)], cwd=ROOT)
    run.until(computes("guest-0"), "one of the same job computes")
    leaver.send_signal(signal.SIGTERM)
    assert leaver.wait(DEADLINE_S) == 0
    assert any("guest-0 gave its leases back" in event for event in run.status().events)
