"""A model in the working directory, beside files that are named as our packages, in processes that others start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parashard.process.resources import THREAD_VARIABLES
from support.cluster_run import DEADLINE_S, ClusterRun, eventually, sets
from support.small_job import SMALL_JOB

# What a library would find in the environment that is imported with the model.
MODEL = """
import os, sys
with open("noted", "a") as file:
    file.write(f"{sys.argv[0].split(os.sep)[-2]} {' '.join(os.environ.get(name, '-') for name in NAMES)}\\n")

from parashard.models.networks import SoftmaxRegression as build
"""


@pytest.mark.parametrize("by_hand", [True, False], ids=["parashard worker", "parashard run"])
def test_a_model_of_the_working_directory_is_imported_within_its_process_s_threads(
    start_run: Callable[..., ClusterRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_hand: bool
) -> None:
    for variable in THREAD_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "7")  # the user's, unless the job file has a number
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    (elsewhere / "job.toml").write_text(SMALL_JOB.replace('"softmax"', '"mine:build"'))
    (here / "mine.py").write_text(MODEL.replace("NAMES", repr(THREAD_VARIABLES)))
    for name in ("coordinator", "protos", "ps_server", "worker", "shard", "core"):
        (here / f"{name}.py").write_text("raise RuntimeError('the file of the user was run')\n")
    threads, workers = (0, 0) if by_hand else (3, 1)
    job = [str(elsewhere / "job.toml"), *sets(cluster__worker_threads=threads), "--workers", str(workers)]
    run = start_run(*job, "--shards", "1", cwd=here)
    if by_hand:
        eventually((run.dir / "coordinator.json").exists, "the coordinator serves", told=run.told)
        command = [sys.executable, "-m", "parashard", "worker", "--connect", str(run.dir)]
        subprocess.run(command, cwd=here, timeout=DEADLINE_S, check=True)
    assert run.report()["state"] == "done"
    noted = dict(line.split(" ", 1) for line in (here / "noted").read_text().splitlines())
    of_the_user = THREAD_VARIABLES.index("MKL_NUM_THREADS")
    assert noted["parashard_coordinator"].split() == [
        "7" if at == of_the_user else "1" for at in range(len(THREAD_VARIABLES))
    ]
    assert noted["parashard_worker"].split() == ["7" if by_hand else "3"] * len(THREAD_VARIABLES)
