"""Whole jobs on real processes and sockets, without faults."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import load_file

from support.cluster_run import DEADLINE_S, ClusterRun, eventually, sets
from support.command_run import ROOT
from support.long_job import LongJob

Start = Callable[..., ClusterRun]

REPORT_KEYS = {
    "job",
    "steps_total",
    "steps_applied",
    "duplicate_pushes",
    "examples_per_s",
    "wall_s",
    "training_loss",
    "held_out",
    "staleness",
    "step_lag",
    "worker_restarts",
    "shard_restarts",
    "coordinator_restarts",
    "weights_sha256",
}

# A model of a user's own, beside its job file: least squares on one variable, with an array to start from.
OWN_MODEL = """
import numpy as np
from parashard.plan.variables import Variable

class Line:
    def __init__(self, inputs, start):
        self.inputs, self.start = inputs, start
    def initial_variables(self):
        return {"weight": np.full((self.inputs, 1), self.start, np.float32), "bias": Variable("bias", (1,))}
    def loss_and_gradients(self, variables, batch, xp):
        if batch.step == POISON:
            while HANGS:
                pass
            raise RuntimeError("this batch is poison")
        error = (batch.inputs @ variables["weight"] + variables["bias"])[:, 0] - batch.targets
        slope = (2 / len(error) * error).astype(np.float32)
        gradients = {"weight": batch.inputs.T @ slope[:, None], "bias": slope.sum(keepdims=True)}
        return float((error**2).mean()), gradients
    def evaluate(self, variables, batch, xp):
        error = (batch.inputs @ variables["weight"] + variables["bias"])[:, 0] - batch.targets
        return {"loss": float((error**2).mean())}

def build(spec, start=0.0):
    return Line(spec.input_shape[0], start)
"""
OWN_JOB = """
[job]
name = "own"
epochs = 2
batch_size = 16
max_attempts = 2
[data]
source = "synthetic"
examples = 800
features = 3
classes = 2
held_out = 100
[model]
kind = "line:build"
start = 0.5
[optimizer]
kind = "sgd"
learning_rate = 0.01
[cluster]
shards = 2
workers = 2
"""


def own_job(folder: Path, poison: int = -1, hangs: bool = False) -> str:
    (folder / "line.py").write_text(OWN_MODEL.replace("POISON", str(poison)).replace("HANGS", str(hangs)))
    (folder / "own.toml").write_text(OWN_JOB)
    return str(folder / "own.toml")


@pytest.mark.smoke
def test_the_demo_reaches_its_accuracy_and_writes_its_files(start_run: Start, tmp_path: Path) -> None:
    run = start_run("examples/digits.toml", "--output", str(tmp_path / "out" / "final.safetensors"))
    report = run.report()
    assert report.keys() >= REPORT_KEYS
    assert report["held_out"]["accuracy"] >= 0.95
    assert report["staleness"].keys() == {"p50", "p95", "mean", "max"}
    assert json.loads((run.dir / "report.json").read_text())["weights_sha256"] == report["weights_sha256"]
    history = [json.loads(line) for line in (run.dir / "history.jsonl").read_text().splitlines()]
    assert history[-1]["steps_complete"] == report["steps_total"]
    assert {path.name for path in (run.dir / "logs").iterdir()} == {
        f"{name}.log" for name in ("coordinator", "fork-server", "shard-0", "shard-1", "worker-0", "worker-1")
    }
    final = load_file(tmp_path / "out" / "final.safetensors")
    assert {name: array.shape for name, array in final.items()}["dense_0.weight"] == (64, 64)
    assert not run.left_over()


def test_ssp_never_lets_the_step_lag_pass_its_bound(start_run: Start) -> None:  # P9
    extra = sets(job__epochs=8, cluster__pipeline_depth=2)
    report = start_run("examples/digits.toml", "--consistency", "ssp:4", "--workers", "3", *extra).report()
    assert report["step_lag"]["max"] <= 4


def test_an_own_model_starts_from_its_array_and_from_a_file(start_run: Start, tmp_path: Path) -> None:
    job = own_job(tmp_path)
    first = start_run(job, *sets(optimizer__learning_rate=1e-30))  # so small that no weight moves
    first.report()
    weights = load_file(first.dir / "weights.safetensors")
    np.testing.assert_array_equal(weights["weight"], np.full((3, 1), 0.5, np.float32))
    trained = start_run(job)
    report = trained.report()
    again = start_run(job, "--init", str(trained.dir / "weights.safetensors"), *sets(optimizer__learning_rate=1e-30))
    assert again.report()["weights_sha256"] == report["weights_sha256"]


def test_a_poison_step_stops_the_job_and_is_named(start_run: Start, tmp_path: Path) -> None:  # P6
    run = start_run(own_job(tmp_path, poison=7))
    run.wait()
    assert run.process.returncode == 2  # the model is at fault
    complaint = run.complaint()
    assert "this batch is poison; step 7 failed 2 times (examples " in complaint
    assert not run.left_over()


def test_a_step_that_hangs_is_given_up(start_run: Start, tmp_path: Path) -> None:  # P6
    run = start_run(own_job(tmp_path, poison=7, hangs=True), *sets(cluster__step_timeout_s=3.0))
    run.wait()
    assert run.process.returncode == 1
    assert "step 7 has taken over 3 s; step 7 failed 2 times" in run.complaint()
    assert not run.left_over()


def test_a_target_ends_the_job_early_and_drains_it(start_run: Start) -> None:  # P7, P8
    extra = sets(evaluation__target_accuracy=0.8, evaluation__every_epochs=1, job__epochs=200)
    report = start_run("examples/digits.toml", *extra).report()
    reached = re.match(r"held-out accuracy ([\d.]+) reached the target 0.8", report["reason"])
    assert reached is not None
    assert float(reached[1]) >= 0.8
    assert report["held_out"]["accuracy"] > 0.5, (
        "that of the weights after what was under way, which may be a little worse"
    )
    assert report["steps_total"] < 200 * 45


def test_status_scale_join_and_metrics_of_a_running_job(start_run: Start, tmp_path: Path) -> None:
    run = start_run(LongJob(tmp_path, "digits.toml", quick_until=50).file, *sets(cluster__lease_ttl_s=2.0))
    run.wait_for_steps(50)
    shown = _command("status", str(run.dir), "--json")
    assert json.loads(shown)["job"] == "digits"
    assert "3 workers wanted" in _command("scale", str(run.dir), "--workers", "3")
    eventually(lambda: len(run.pids("worker")) == 3, "a third worker runs", told=run.told)
    joined = subprocess.Popen([sys.executable, "-m", "parashard", "worker", "--connect", str(run.dir)], cwd=ROOT)
    try:
        run.until(lambda status: any(w.name == "guest-0" and w.steps_complete for w in status.workers), "it computes")
    finally:
        joined.terminate()
        assert joined.wait(DEADLINE_S) == 0  # its leases went back
    _command("scale", str(run.dir), "--workers", "1")
    eventually(lambda: len(run.pids("worker")) == 1, "one worker is left", told=run.told)
    status = run.status()
    worker_0 = next(worker for worker in status.workers if worker.name == "worker-0")
    for address in [status.http_address, status.shards[0].http_address, worker_0.http_address]:
        metrics = urllib.request.urlopen(f"http://{address}/metrics", timeout=DEADLINE_S).read().decode()
        names = {family.name for family in text_string_to_metric_families(metrics)}
        assert names, address
        assert all(name.startswith(("parashard_", "process_")) for name in names)
        assert urllib.request.urlopen(f"http://{address}/livez", timeout=DEADLINE_S).status == 200
        assert urllib.request.urlopen(f"http://{address}/readyz", timeout=DEADLINE_S).status == 200
    page = urllib.request.urlopen(f"http://{status.http_address}/", timeout=DEADLINE_S).read().decode()
    assert "digits" in page
    assert "worker-0" in page


def _command(*arguments: str) -> str:
    command = [sys.executable, "-m", "parashard", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
