"""Whole jobs whose processes are killed, stopped and asked to leave."""

from __future__ import annotations

import json
import random
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
STEPS_BETWEEN_KILLS = range(200, 1701, 500)  # of 3072
QUICK_DIGITS = 20  # steps of 1350


@pytest.fixture
def digits(tmp_path: Path) -> LongJob:
    """Return digits that go on, with little for the machine to do, until they are let end."""
    return LongJob(tmp_path, "digits.toml", QUICK_DIGITS)


def test_the_ledger_balances_with_one_worker_after_another_killed(  # P1, P4, P5
    start_run: Start, tmp_path: Path
) -> None:
    job = LongJob(tmp_path, "ledger.toml", quick_until=0)
    run = start_run(job.file, "--workers", "3", *sets(job__epochs=3))
    draw = random.Random(1)
    for steps in STEPS_BETWEEN_KILLS:
        job.quick_until(steps)
        run.wait_for_steps(steps)
        run.kill("worker", draw.choice(["worker-0", "worker-1", "worker-2"]))
    run.until(lambda status: any(worker.incarnation > 1 for worker in status.workers), "a killed worker is there again")
    job.let_end()
    report = run.report()
    assert report["ledger_wrong"] == 0
    assert report["worker_restarts"] >= 1
    assert not run.left_over()


def test_the_ledger_balances_in_ssp(start_run: Start, tmp_path: Path) -> None:
    job = LongJob(tmp_path, "ledger.toml", quick_until=500)
    run = start_run(job.file, "--consistency", "ssp:8", *sets(job__epochs=1))
    run.wait_for_steps(200)
    run.kill("worker", "worker-1")
    run.wait_for_event("worker-1 ended: killed by SIGKILL")
    job.let_end()
    report = run.report()
    assert report["ledger_wrong"] == 0


def test_sync_ends_with_the_fault_free_bits_when_a_worker_is_killed(  # P10, P11
    start_run: Start, tmp_path: Path
) -> None:
    arguments = ["--consistency", "sync:4", *sets(job__epochs=20)]
    expected = start_run("examples/digits.toml", *arguments).report()["weights_sha256"]
    job = LongJob(tmp_path, "digits.toml", quick_until=200)
    run = start_run(job.file, *arguments)
    run.wait_for_steps(100)
    run.kill("worker", "worker-0")
    run.wait_for_event("worker-0 ended: killed by SIGKILL")
    run.until(lambda status: any(w.name == "worker-0" and w.live for w in status.workers), "worker-0 is there again")
    job.let_end()
    report = run.report()
    assert report["weights_sha256"] == expected
    assert report["worker_restarts"] == 1


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
