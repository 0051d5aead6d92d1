"""Jobs on a real Slurm: tasks that are queued again, preempted, out of time and on lost nodes; nothing is lost."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest
from slurm_cluster import eventually
from slurm_job import fault_free_digest

pytestmark = pytest.mark.full("a real Slurm; test_render_slurm.py has what the script does with each signal")
at_length = pytest.mark.skipif(
    os.environ.get("PARASHARD_SLURM") != "1", reason="takes minutes: `make test-slurm` asks for it"
)
ROOT = Path(__file__).resolve().parents[2]
ROLES = ("coordinator", "shard", "worker")
THIS_CLUSTER = {
    "partition=cpu": "partition=safe",
    " --gres=gpu:1": "",
    "time=2-0": "time=60",
    "time=4:00:00": "time=60",
}
STEPS = 600


def preempted(slurm, running, *roles: str) -> None:
    """Have a job of higher priority take all nodes, until no task of these roles runs; then it is cancelled."""
    slurm.run("sbatch", "--partition=safe", "--array=1-8", "--job-name=urgent", "--wrap=sleep 600", "-o", "/dev/null")
    eventually(lambda: not any(map(running.tasks, roles)), f"{roles} are preempted", told=slurm.queue)
    slurm.run("scancel", "--name=urgent")


def test_digits_have_the_same_bits_though_workers_are_preempted_and_a_shard_is_queued_again(slurm, job, tell, tmp_path):
    sets = ("consistency.policy=sync:4", "job.epochs=15")
    weights_sha256 = fault_free_digest(tmp_path / "fault-free", "digits.toml", *sets)
    running = job("digits.toml", *sets, quick_until=100)
    running.under_way()
    assert running.status()["state"] == "JOB_STATE_RUNNING"
    began_s = time.monotonic()
    slurm.run("scontrol", "requeue", running.tasks("shard")[1][0])
    preempted(slurm, running, "worker")
    for name in ("worker-0", "worker-1"):
        running.heard("joined", name, times=2)
        assert "reason=SIGTERM" in running.log(name), "it left by itself"
    running.heard("event=serving", "shard-1", times=2)
    back_s = time.monotonic() - began_s
    report = running.report()
    assert (report["shard_restarts"], report["weights_sha256"]) == (1, weights_sha256)
    assert report["held_out"]["accuracy"] >= 0.9
    assert running.run_dir.joinpath("weights.safetensors").exists()
    tell(
        "both workers preempted by a job that is then cancelled, `scontrol requeue` of a shard; `sync:4`",
        back_s,
        f"digits: the bits of a run without faults, accuracy {report['held_out']['accuracy']:.3f}",
    )


@at_length
@pytest.mark.parametrize(
    ("servers", "roles"), [("safe", ("worker",)), ("spot", ROLES)], ids=["its workers", "all of its tasks"]
)
def test_a_job_loses_nothing_when_a_job_of_higher_priority_takes(slurm, job, tell, servers, roles):
    running = job("ledger.toml", "cluster.workers=2", "job.epochs=1", quick_until=STEPS, servers=servers)
    running.under_way()
    running.until_steps(STEPS)
    began_s = time.monotonic()
    preempted(slurm, running, *roles)
    names = [f"{role}-{number}" for role in roles for number in (range(2) if role != "coordinator" else range(1))]
    for name in names:
        running.heard("start 1,", name)
    for name in ("worker-0", "worker-1"):
        running.heard("joined", name, times=2)
    back_s = time.monotonic() - began_s
    report = running.report()
    assert (report["ledger_wrong"], report["worker_restarts"]) == (0, 2)
    event = "both workers" if len(roles) == 1 else "coordinator, shards and workers"
    tell(f"{event} preempted by a job that is then cancelled, after {STEPS} steps", back_s, "ledger_wrong 0")


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


@at_length
@pytest.mark.usefixtures("job")  # which leaves nothing
def test_every_command_of_the_page_about_slurm_runs(slurm, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (block,) = re.findall(r"```console\n(.*?)```", (ROOT / "docs" / "slurm.md").read_text(), re.DOTALL)
    for there, here in {**THIS_CLUSTER, "/shared": str(tmp_path)}.items():
        assert there in block
        block = block.replace(there, here)
    commands = [line.removeprefix("$ ") for line in block.replace("\\\n", "").splitlines()]
    for command in commands:
        slurm.run("sh", "-c", f"cd {tmp_path} && PATH={Path(sys.executable).parent}:$PATH && {command}")
        if command.startswith("./slurm-digits.sh up "):
            log = tmp_path / "digits" / "logs" / "coordinator-0.log"
            eventually(lambda log=log: log.exists() and "every shard is up" in log.read_text(), "the job is under way")
    eventually(lambda: not slurm.queue(), "`down` has cancelled everything", told=slurm.queue)
