"""`parashard worker --connect RUN train.py ARGS`: one more worker of a run that a script has started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from support.cluster_run import DEADLINE_S, eventually
from support.command_run import DIES_WITH_US
from support.script_run import LEDGER, ScriptRun

FIT = 'trainer.fit(data, epochs=EPOCHS, batch_size=4, verbose=0)\nprint(json.dumps(trainer.evaluate(data)["least"]))\n'
NO_WORKERS = LEDGER.replace("workers=2", "workers=int(os.environ.get('WORKERS', '2'))")


def worker(run: ScriptRun, connect: str, *words: str) -> subprocess.Popen[str]:
    command = [
        *DIES_WITH_US,
        sys.executable,
        "-m",
        "parashard",
        "worker",
        "--connect",
        connect,
        "--name",
        "mine",
        *words,
    ]
    return subprocess.Popen(
        command, cwd=run.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ
    )


def address_of(run: ScriptRun) -> str:
    return str(json.loads((run.runs()[-1] / "coordinator.json").read_text())["address"])


@pytest.mark.parametrize("by", ["folder", "address"])
def test_the_whole_run_is_computed_by_workers_from_elsewhere(
    start: Callable[..., ScriptRun], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setenv("WORKERS", "0")
    run = start(NO_WORKERS + FIT, "5", "async")
    eventually(lambda: "shard-1" in run.processes(), "the cluster is up", told=run.complaint)
    connect = str(run.runs()[-1]) if by == "folder" else address_of(run)
    other = worker(run, connect, "train.py", "5", "async")
    assert run.wait() == 0, run.complaint()
    assert json.loads(run.output()) == 5.0
    assert other.wait(DEADLINE_S) == 0, other.stderr and other.stderr.read()


MISTAKES = (
    (("train.py", "6", "async"), "epochs is 6 here and 5"),
    (("there/train.py", "5", "async"), "edited"),
    ((), "parashard worker --connect RUN SCRIPT ARGS"),
    (("away.py",), "away.py is not there"),
)


def test_what_differs_is_refused_by_name(start: Callable[..., ScriptRun], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKERS", "0")
    run = start(NO_WORKERS + FIT, "5", "async")
    (run.folder / "there").mkdir()
    (run.folder / "there" / "train.py").write_text(NO_WORKERS + "EXAMPLES = 60\n" + FIT)
    eventually(lambda: "shard-1" in run.processes(), "the cluster is up", told=run.complaint)
    refused = [(worker(run, address_of(run), *words), says) for words, says in MISTAKES]
    for other, says in refused:
        _, said = other.communicate(timeout=DEADLINE_S)
        assert other.returncode != 0
        assert says in said.splitlines()[-1], said
