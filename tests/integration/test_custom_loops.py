"""Loops of a program's own: sessions compute a cluster's steps, and each is in once, whatever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.cluster_run import DEADLINE_S, eventually
from support.command_run import DIES_WITH_US
from support.report_oracle import store_of, unsaved
from support.script_run import ScriptRun

ROOT = Path(__file__).resolve().parents[2]
QUICK = 30  # steps before the first that waits until it may be quick
CLUSTER = """
import json, os, sys, threading, time
from pathlib import Path
import numpy as np
import parashard as ps

EXAMPLES, EPOCHS = 60, 20

def work(run_dir):
    with ps.connect(run_dir) as session:
        for step in session.steps():
            while Path("slow").exists() and step.number >= 30:
                time.sleep(0.02)
            gradient = np.zeros(EXAMPLES, np.float32)
            gradient[step.indices] = -1.0
            session.push(step, {"counts": gradient})

if __name__ == "__main__" and "join" in sys.argv:
    work(sys.argv[2])
elif __name__ == "__main__":
    strategy = ps.ParameterServerStrategy(shards=2, consistency=sys.argv[1])
    settings = {"checkpoint.every_s": 0.2, "consistency.reduce": "sum"}
    variables = {"counts": np.zeros(EXAMPLES)}
    with ps.Cluster(variables, ps.SGD(1.0), strategy, examples=EXAMPLES, epochs=EPOCHS, batch_size=4,
                    settings=settings, resume="resume" in sys.argv) as cluster:
        threads = [threading.Thread(target=work, args=(cluster.run_dir,)) for _ in range(int(sys.argv[2]))]
        for thread in threads:
            thread.start()
        cluster.finish(60.0)
        for thread in threads:
            thread.join()
    print(json.dumps(sorted(set(cluster.weights()["counts"].tolist()))))
"""


def joined(run: ScriptRun) -> subprocess.Popen[bytes]:
    command = [*DIES_WITH_US, sys.executable, "train.py", "join", str(run.runs()[-1])]
    return subprocess.Popen(command, cwd=run.folder, stderr=(run.folder / "join-err").open("w"))


def check(run: ScriptRun) -> None:
    assert run.wait() == 0, run.complaint()
    folder = run.runs()[-1]
    assert unsaved(store_of(folder), json.loads((folder / "report.json").read_text())) == []
    assert json.loads(run.output().splitlines()[-1]) == [20.0]


def test_every_step_is_in_once_whatever_is_killed(start: Callable[..., ScriptRun], tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    run = start(CLUSTER, "sync:4", "1")
    eventually(lambda: "shard-1" in run.processes(), "the cluster is up", told=run.complaint)
    first, second = joined(run), joined(run)
    try:
        eventually(lambda: run.steps_complete() >= QUICK - 8, "steps are done", told=run.complaint)
        first.kill()
        run.kill("shard-1")
        run.kill("coordinator")
        second.send_signal(signal.SIGKILL)
        (tmp_path / "slow").unlink()
        check(run)
    finally:
        for process in (first, second):
            process.kill()
            process.wait(DEADLINE_S)


def test_a_session_that_stays_ends_with_the_job(start: Callable[..., ScriptRun]) -> None:
    run = start(CLUSTER, "async", "0")
    eventually(lambda: "shard-1" in run.processes(), "the cluster is up", told=run.complaint)
    only = joined(run)
    check(run)
    assert only.wait(DEADLINE_S) == 0, (run.folder / "join-err").read_text()


def test_after_ctrl_c_it_goes_on(start: Callable[..., ScriptRun], tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    run = start(CLUSTER, "async", "1")
    eventually(lambda: run.steps_complete() >= QUICK - 8, "steps are done", told=run.complaint)
    run.interrupt()
    (tmp_path / "slow").unlink()
    assert run.wait() != 0
    assert "KeyboardInterrupt" in run.complaint()
    again = start(CLUSTER, "async", "1", "resume")
    check(again)
    assert len(again.runs()) == 1


@pytest.mark.full("whole examples; the tests of sessions and of the Coordinator run their calls")
@pytest.mark.parametrize(
    ("example", "says"),
    [("custom_loop.py", "3200 steps, mean squared error 0.000"), ("custom_schedule.py", "800 steps, loss 32.8304 at")],
)
def test_the_examples_are_whole_programs(tmp_path: Path, example: str, says: str) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / example)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
