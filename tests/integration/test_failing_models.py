"""A model of a user's own that cannot work, on real processes: what the screen says first, and how soon."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.cluster_run import ClusterRun, sets

Start = Callable[..., ClusterRun]

MODEL = """
import ctypes
import numpy as np
from parashard.plan.variables import Variable

class Line:
    def initial_variables(self):
        return {"weight": Variable("weight", (3, 1))}
    def loss_and_gradients(self, variables, batch, xp):
        if MODE == "dies" and 700 in batch.indices:
            ctypes.string_at(0)
        if MODE == "lost" and 700 in batch.indices:  # as PyTorch raises it
            raise RuntimeError("CUDA error: device-side assert triggered")
        if MODE == "raises":
            raise KeyError("bias")
        error = (batch.inputs @ variables["weight"])[:, 0] - batch.targets
        gradient = batch.inputs.T @ error[:, None] / np.float32(len(error))
        return float((error**2).mean()), {"weight": gradient.T if MODE == "turned" else gradient}
    def evaluate(self, variables, batch, xp):
        return {"loss": float((((batch.inputs @ variables["weight"])[:, 0] - batch.targets) ** 2).mean())}

def build(spec):
    return Line()
"""
JOB = """
[job]
name = "failing"
epochs = 1
batch_size = 16
[data]
source = "synthetic"
examples = 800
features = 3
classes = 2
[model]
kind = "failing_line:build"
[optimizer]
kind = "sgd"
learning_rate = 0.01
[cluster]
shards = 2
workers = 2
"""


def job(folder: Path, mode: str) -> Path:
    (folder / "failing_line.py").write_text(MODEL.replace("MODE", repr(mode)))
    file = folder / "job.toml"
    file.write_text(JOB)
    return file


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        (
            "turned",
            "failing_line.py:9: loss_and_gradients returned a gradient for 'weight' of shape (1, 3); the variable ",
        ),
        ("raises", "failing_line.py:15: KeyError: 'bias'; the first 5 attempts at steps all failed"),
    ],
)
def test_a_model_that_works_at_no_step_ends_the_run_with_its_line(
    start_run: Start, tmp_path: Path, mode: str, says: str
) -> None:
    run = start_run(job(tmp_path, mode))
    run.wait()
    assert run.process.returncode == 2
    assert says in run.complaint()
    assert json.loads((run.dir / "report.json").read_text())["worker_restarts"] == 0
    assert not run.left_over()


def test_a_step_that_kills_its_workers_ends_the_run_with_its_name_and_examples(
    start_run: Start, tmp_path: Path
) -> None:  # P26
    run = start_run(job(tmp_path, "dies"), *sets(job__max_attempts=2))
    run.wait()
    assert run.process.returncode == 1
    complaint = run.complaint()
    assert "killed by SIGSEGV; step " in complaint
    assert " failed 2 times (examples " in complaint
    assert not run.left_over()


def test_a_step_that_kills_its_workers_is_skipped_where_the_job_says_so(start_run: Start, tmp_path: Path) -> None:
    report = start_run(job(tmp_path, "dies"), *sets(job__max_attempts=2, job__on_bad_step="skip")).report()
    assert (report["skipped_steps"], report["partly_skipped"]) == (1, 0)
    assert report["worker_restarts"] >= 3


def test_a_step_that_loses_the_gpu_is_tried_in_a_new_process_each_time(start_run: Start, tmp_path: Path) -> None:  # P26
    run = start_run(job(tmp_path, "lost"), *sets(job__max_attempts=2))
    run.wait()
    assert run.process.returncode == 2, "the model is at fault"
    complaint = run.complaint()
    assert "the GPU's context is lost: " in complaint
    assert "failing_line.py:13: RuntimeError: CUDA error: device-side assert triggered; " in complaint
    assert "CUDA_LAUNCH_BLOCKING=1" in complaint
    assert " failed 2 times (examples " in complaint
    assert json.loads((run.dir / "report.json").read_text())["worker_restarts"] >= 1
    assert not run.left_over()
