"""Jobs on a real Slurm: tasks that are queued again, preempted, out of time and on lost nodes; nothing is lost."""

from __future__ import annotations

import os
import time

import pytest
from slurm_cluster import eventually

pytestmark = pytest.mark.full("a real Slurm; test_render_slurm.py has what the script does with each signal")
at_length = pytest.mark.skipif(
    os.environ.get("PARASHARD_SLURM") != "1", reason="takes minutes: `make test-slurm` asks for it"
)
ROLES = ("coordinator", "shard", "worker")


def test_digits_train_to_the_end_though_workers_are_preempted_and_a_shard_is_queued_again(slurm, job, tell):
    running = job("digits.toml", "job.epochs=15", quick_until=100)
    running.under_way()
    assert running.status()["state"] == "JOB_STATE_RUNNING"
    began_s = time.monotonic()
    slurm.run("sbatch", "--partition=safe", "--array=1-8", "--job-name=urgent", "--wrap=sleep 600", "-o", "/dev/null")
    slurm.run("scontrol", "requeue", running.tasks("shard")[1][0])
    eventually(lambda: not running.tasks("worker"), "both workers are preempted", told=slurm.queue)
    slurm.run("scancel", "--name=urgent")
    for name in ("worker-0", "worker-1"):
        running.heard("joined", name, times=2)
        assert "reason=SIGTERM" in running.log(name), "it left by itself"
    running.heard("event=serving", "shard-1", times=2)
    back_s = time.monotonic() - began_s
    report = running.report()
    assert (report["shard_restarts"], report["held_out"]["accuracy"] >= 0.95) == (1, True)
    assert running.run_dir.joinpath("weights.safetensors").exists()
    event = "both workers preempted by a job that is then cancelled, `scontrol requeue` of a shard"
    tell(event, back_s, f"digits to an accuracy of {report['held_out']['accuracy']:.3f}")


def lose_a_node(slurm, running, node: str, *, told_by_operator: bool) -> float:
    """Lose a node with tasks of a job; return after how long a later copy of each has its place.

    The older copies run until they are refused.
    """
    tasks = [(f"{role}-{number}", at) for role in ROLES for number, (_, at) in running.tasks(role).items()]
    names = [name for name, at in tasks if at == node]
    older = [pid for name in names for pid in slurm.processes_of(node, name)]
    assert len(older) == len(names) > 0
    began_s = time.monotonic()
    slurm.lose(node)
    if told_by_operator:
        slurm.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")
    for name in names:
        running.heard("start 1,", name)
    for pid in older:
        os.kill(pid, 0)  # it is alive: two copies of each process run
    for name in names:
        running.heard("exit_code=3", name)  # the older one was refused, and ends
    return time.monotonic() - began_s


def test_after_a_lost_node_two_copies_of_a_task_run_and_the_later_one_has_it(slurm, job, tell):
    running = job("ledger.toml", "cluster.workers=2", "job.epochs=1")
    running.under_way()
    back_s = lose_a_node(slurm, running, running.tasks("shard")[1][1], told_by_operator=True)
    report = running.report()
    assert (report["ledger_wrong"], report["shard_restarts"] > 0) == (0, True)
    tell("a node with a shard lost, of which Slurm is told; two copies of each task", back_s, "ledger_wrong 0")


@at_length
def test_tasks_that_are_queued_again_and_scaled_lose_nothing(slurm, job, tell):
    running = job("ledger.toml", "cluster.workers=2", "job.epochs=1")
    running.under_way()
    (worker, _), (shard, _) = running.tasks("worker")[0], running.tasks("shard")[1]
    began_s = time.monotonic()
    for task in (worker, shard):
        slurm.run("scontrol", "requeue", task)
    running.heard("event=serving", "shard-1", times=2)
    running.heard("joined", "worker-0", times=2)
    back_s = time.monotonic() - began_s
    running.script("scale", "3")
    running.heard("joined", "worker-2")
    running.script("scale", "2")
    eventually(lambda: set(running.tasks("worker")) == {0, 1}, "the third worker is gone", told=slurm.queue)
    report = running.report()
    assert (report["ledger_wrong"], report["worker_restarts"], report["shard_restarts"]) == (0, 1, 1)
    tell("`scontrol requeue` of a worker and a shard, `scale 3`, `scale 2`", back_s, "ledger_wrong 0")


@at_length
def test_slurm_finds_a_lost_node_by_itself(slurm, job, tell):
    running = job("ledger.toml", "cluster.workers=2", "job.epochs=1")
    running.under_way()
    back_s = lose_a_node(slurm, running, running.tasks("worker")[0][1], told_by_operator=False)
    assert running.report()["ledger_wrong"] == 0
    tell("a node with a worker lost, which Slurm finds; two copies of each task", back_s, "ledger_wrong 0")


@at_length
def test_the_node_of_the_coordinator_is_lost(slurm, job, tell):
    running = job("ledger.toml", "cluster.workers=2", "job.epochs=1")
    running.under_way()
    back_s = lose_a_node(slurm, running, running.tasks("coordinator")[0][1], told_by_operator=True)
    assert running.report()["ledger_wrong"] == 0
    tell("the coordinator's node lost, of which Slurm is told; two copies of each task", back_s, "ledger_wrong 0")


@at_length
def test_a_job_goes_on_beyond_the_time_limit_of_its_tasks(slurm, job, tell):
    running = job("ledger.toml", "cluster.workers=2", "job.epochs=1", options="--time=2")
    began_s = time.monotonic()
    for name in ("coordinator-0", "shard-0", "shard-1", "worker-0", "worker-1"):
        running.heard("start 2,", name)
        assert "DUE TO TIME LIMIT" not in running.log(name), "it has left before"
    running.heard("joined", "worker-0", times=3)
    back_s = time.monotonic() - began_s
    assert running.report()["ledger_wrong"] == 0
    tell("notice of a time limit of two minutes to each task, twice; since the start", back_s, "ledger_wrong 0")


@at_length
def test_what_was_cancelled_goes_on_from_its_checkpoints(slurm, job, tell):
    running = job("ledger.toml", "cluster.workers=2", "job.epochs=1")
    running.under_way()
    began_s = time.monotonic()
    running.script("down")
    eventually(lambda: not slurm.queue(), "everything is cancelled", told=slurm.queue)
    running.script("up")
    running.heard("joined", "worker-0", times=2)
    back_s = time.monotonic() - began_s
    assert running.report()["ledger_wrong"] == 0
    tell("`down`, and `up`", back_s, "ledger_wrong 0")
