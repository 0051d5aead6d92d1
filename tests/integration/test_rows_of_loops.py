"""Rows of tables in loops of a program's own: every use of an id is in its row once, whatever is killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.cluster_run import eventually
from support.script_run import ScriptRun

QUICK = 30  # steps before the first that waits until it may be quick

USES = """
import json, sys, threading, time
from pathlib import Path
import numpy as np
import parashard as ps

STEPS, EXAMPLES = 120, 60
IDS = np.random.default_rng(0).integers(-(10**15), 10**15, 20)[np.arange(EXAMPLES) % 20]
TABLE = ps.Table("uses", 1, optimizer=ps.SGD(1.0), initializer="zeros")
SETTINGS = {"checkpoint.every_s": 0.2}

def waiting(number):
    while Path("slow").exists() and number >= 30:
        time.sleep(0.02)

def told(owner):
    keys, rows = owner.table("uses")
    due = sorted(np.unique(IDS).view(np.uint64).tolist())
    print(json.dumps([len(keys), keys.tolist() == due, sorted(set(rows.ravel().tolist()))]))
"""
SCHEDULED = (
    USES
    + """
@ps.function(keys=lambda number: {"uses": IDS[number % EXAMPLES :][:1].repeat(2)})
def use(weights, number):
    waiting(number)
    return number, {"uses": np.full((2, 1), -0.5, np.float32)}

strategy = ps.ParameterServerStrategy(shards=2, workers=2)
variables = {"b": np.zeros(1)}
with ps.Coordinator(strategy, variables=variables, optimizer=ps.SGD(1.0), tables=[TABLE], settings=SETTINGS) as it:
    for number in range(STEPS):
        it.schedule(use, args=(number,))
    it.close()
told(it)
"""
)
SESSIONS = (
    USES
    + """
def work(run_dir):
    with ps.connect(run_dir, keys=lambda step: {"uses": IDS[step.indices]}) as session:
        for step in session.steps():
            waiting(step.number)
            rows = session.pull()["uses"]
            session.push(step, {"uses": -np.ones_like(rows)})

strategy = ps.ParameterServerStrategy(shards=2, consistency="sync:3")
settings = {**SETTINGS, "consistency.reduce": "sum"}
sizes = {"examples": EXAMPLES, "epochs": 2, "batch_size": 1}
with ps.Cluster({"b": np.zeros(1)}, ps.SGD(1.0), strategy, **sizes, tables=[TABLE], settings=settings) as cluster:
    threads = [threading.Thread(target=work, args=(cluster.run_dir,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    cluster.finish(60.0)
    for thread in threads:
        thread.join()
told(cluster)
"""
)


@pytest.mark.full("test_scheduled_rows.py and test_session_rows.py prove the same in memory, without kills")
@pytest.mark.parametrize(
    ("script", "killed"),
    [(SCHEDULED, ["worker-0", "shard-1"]), (SESSIONS, ["shard-0"])],
    ids=["scheduled functions", "sessions"],
)
def test_every_use_of_an_id_is_in_its_row_once_whatever_is_killed(
    start: Callable[..., ScriptRun], tmp_path: Path, script: str, killed: list[str]
) -> None:
    (tmp_path / "slow").touch()
    run = start(script)
    eventually(lambda: run.steps_complete() >= QUICK - 8, "steps are complete", told=run.complaint)
    for name in killed:
        before = run.processes()[name]
        run.kill(name)
        eventually(lambda name=name, before=before: run.processes().get(name, before) != before, f"{name} is back")
    (tmp_path / "slow").unlink()
    assert run.wait() == 0, run.complaint()
    assert json.loads(run.output().splitlines()[-1]) == [20, True, [6.0]]
