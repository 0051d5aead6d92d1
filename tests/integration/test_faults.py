"""Whole jobs whose processes are killed, stopped and asked to leave."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from cluster_run import ROOT, ClusterRun, eventually, sets

from protos import coordinator_pb2 as pb

Start = Callable[..., ClusterRun]


def kill_a_worker_every(interval_s: float, run: ClusterRun, seed: int) -> int:
    """Kill one worker after another until the run ends; return how many died."""
    draw, kills, over = random.Random(seed), 0, threading.Event()
    while run.process.poll() is None:
        over.wait(interval_s)
        pids = run.pids("worker")
        if pids:
            with suppress(ProcessLookupError):
                os.kill(pids[draw.choice(sorted(pids))], signal.SIGKILL)
                kills += 1
    return kills


def test_the_ledger_balances_with_a_worker_killed_every_second(start_run: Start) -> None:  # P1, P4, P5
    run = start_run("examples/ledger.toml", "--workers", "3", *sets(job__epochs=4))
    run.wait_for_steps(1)
    kills = kill_a_worker_every(1.0, run, seed=1)
    report = run.report()
    assert kills >= 3
    assert report["ledger_wrong"] == 0
    assert report["steps_applied"] == [report["steps_total"]] * 2
    assert report["worker_restarts"] >= 1
    assert not run.left_over()


@pytest.mark.parametrize("consistency", ["ssp:8", "sync:4"])
def test_the_ledger_balances_in_every_consistency(start_run: Start, consistency: str) -> None:
    run = start_run("examples/ledger.toml", "--consistency", consistency, *sets(job__epochs=2))
    run.wait_for_steps(200)
    run.kill("worker", "worker-1")
    report = run.report()
    assert report["ledger_wrong"] == 0
    assert report["steps_applied"] == [report["steps_total"]] * 2


def test_sync_ends_with_the_fault_free_bits_when_a_worker_is_killed(start_run: Start) -> None:  # P10, P11
    arguments = ["examples/digits.toml", "--consistency", "sync:4", *sets(job__epochs=20)]
    expected = start_run(*arguments).report()["weights_sha256"]
    run = start_run(*arguments)
    run.wait_for_steps(100)
    run.kill("worker", "worker-0")
    report = run.report()
    assert report["weights_sha256"] == expected
    assert report["worker_restarts"] == 1


def worker_0(run: ClusterRun) -> pb.WorkerStatus:
    return next(worker for worker in run.status().workers if worker.name == "worker-0")


def test_a_worker_that_hangs_loses_its_leases_and_may_come_back(start_run: Start) -> None:
    extra = sets(job__epochs=2000, cluster__lease_ttl_s=1.0, cluster__speculate_after=0)
    run = start_run("examples/digits.toml", *extra)
    run.wait_for_steps(50)
    eventually(lambda: any(w.name == "worker-0" and w.steps_complete for w in run.status().workers), "it computes")
    run.kill("worker", "worker-0", signal.SIGSTOP)
    eventually(lambda: any("worker-0 was silent" in event for event in run.status().events), "its leases end")
    run.kill("worker", "worker-0", signal.SIGCONT)
    stopped_at = worker_0(run).steps_complete
    eventually(lambda: worker_0(run).live and worker_0(run).steps_complete > stopped_at, "it computes again")
    assert worker_0(run).incarnation == 1


def test_a_worker_asked_to_leave_gives_its_leases_back_and_exits_0(start_run: Start) -> None:
    run = start_run("examples/digits.toml", *sets(job__epochs=2000))
    run.wait_for_steps(20)
    leaver = subprocess.Popen([sys.executable, "-m", "parashard", "worker", "--connect", str(run.dir)], cwd=ROOT)
    eventually(lambda: any(w.name == "guest-0" and w.steps_complete for w in run.status().workers), "it computes")
    leaver.send_signal(signal.SIGTERM)
    assert leaver.wait(timeout=10) == 0
    assert any("guest-0 gave its leases back" in event for event in run.status().events)


def test_ctrl_c_ends_every_process(start_run: Start) -> None:
    run = start_run("examples/digits.toml", *sets(job__epochs=2000))
    run.wait_for_steps(20)
    run.process.send_signal(signal.SIGINT)
    run.wait()
    assert run.process.returncode == 130
    assert "interrupted" in run.complaint()
    assert not run.left_over()


def test_kill_9_of_the_command_line_ends_every_process(start_run: Start) -> None:
    run = start_run("examples/digits.toml", *sets(job__epochs=2000))
    run.wait_for_steps(20)
    assert len(run.left_over()) == 5
    run.process.kill()
    eventually(lambda: not run.left_over(), "every process has noticed", 10.0)


def test_a_worker_with_other_data_is_refused(start_run: Start) -> None:  # P2
    run = start_run("examples/digits.toml", *sets(job__epochs=2000))
    run.wait_for_steps(20)
    command = [sys.executable, "-m", "parashard", "worker", "--connect", str(run.dir), *sets(data__held_out=0.3)]
    joined = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert joined.returncode == 3
    assert "data differ" in joined.stderr
    assert "Traceback" not in joined.stderr


def test_a_worker_that_would_compute_another_job_is_refused(start_run: Start) -> None:  # P2
    run = start_run("examples/digits.toml", *sets(job__epochs=2000))
    run.wait_for_steps(20)
    command = [sys.executable, "-m", "parashard", "worker", "--connect", str(run.dir), *sets(job__batch_size=16)]
    joined = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert joined.returncode == 3
    assert "job.batch_size" in joined.stderr
