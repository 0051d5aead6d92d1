"""Functions that a script schedules: every push is in once, whatever is killed; results and errors come back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parashard.checkpoints.catalogue import Catalogue
from parashard.launch.stopping import restorable_in_all
from support.cluster_run import DEADLINE_S, eventually
from support.command_run import DIES_WITH_US
from support.report_oracle import store_of, unsaved
from support.script_run import ScriptRun

QUICK = 30  # calls before the first that waits until it may be quick

LEDGER = """
import json, os, sys, time
from pathlib import Path
import numpy as np
import parashard as ps

CALLS, QUICK = 120, 30

@ps.function
def count(weights, number, row):
    while Path("slow").exists() and number >= QUICK:
        time.sleep(0.02)
    gradient = np.zeros(CALLS, np.float32)
    gradient[number] = -1.0
    return {"number": number, "row": row * 2}, {"counts": gradient}

@ps.function(pushes=0)
def total(weights, scale=1.0):
    return weights["counts"].sum() * scale

@ps.function
def fail(weights, text):
    raise ValueError(text)

@ps.function
def misshape(weights):
    return 0.5, {"counts": np.zeros(3, np.float32)}

@ps.function(pushes=0)
def pair(weights, ones, others):
    return next(ones), next(others), os.getpid()

def numbers():
    return range(100)

strategy = ps.ParameterServerStrategy(shards=2, workers=2, consistency=sys.argv[1])
settings = {"checkpoint.every_s": 0.2}
variables = {"counts": np.zeros(CALLS), "other": np.zeros((3, 2))}
optimizer = ps.Adam(0.5) if "adam" in sys.argv else ps.SGD(1.0)
"""
OPEN = (
    "with ps.Coordinator(strategy, variables=variables, optimizer=optimizer, settings=settings, timeout_s=60) as it:\n"
)


def done(run: ScriptRun) -> Any:
    """Return what the script printed last, of a run with every step in the last manifest of every shard (P1)."""
    assert run.wait() == 0, run.complaint()
    folder = run.runs()[-1]
    assert unsaved(store_of(folder), json.loads((folder / "report.json").read_text())) == []
    return json.loads(run.output().splitlines()[-1])


def test_every_function_counts_once_whatever_is_killed(start: Callable[..., ScriptRun], tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    text = """
    values = [it.schedule(count, (i,), {"row": np.arange(3) + i}) for i in range(CALLS)]
    it.join()
    results = it.fetch(values)
    joined = it.weights()["counts"].tolist()
right = all(r["number"] == i and r["row"].tolist() == [2 * i, 2 * i + 2, 2 * i + 4] for i, r in enumerate(results))
print(json.dumps([joined, it.weights()["counts"].tolist(), right]))
"""
    run = start(LEDGER + OPEN + text, "ssp:3")
    eventually(lambda: run.steps_complete() >= QUICK - 8, "calls are done", told=run.complaint)
    for name in ("worker-0", "worker-1", "shard-1", "coordinator", "worker-0", "shard-0"):
        run.kill(name)
    (tmp_path / "slow").unlink()
    assert done(run) == [[1.0] * 120, [1.0] * 120, True]
    report = json.loads((run.runs()[-1] / "report.json").read_text())
    assert report["steps_total"] == 120
    assert report["coordinator_restarts"] == 1
    assert report["shard_restarts"] > 0
    assert list((run.runs()[-1] / "calls").iterdir()) == [], "what is used is removed"


def test_what_join_has_said_holds_although_a_shard_is_killed(start: Callable[..., ScriptRun], tmp_path: Path) -> None:
    text = """
    for i in range(CALLS): it.schedule(count, (i, 0))
    it.join()
    Path("slow").touch()  # what the shard lost takes until it is gone
    Path("joined").touch()
    lost = time.monotonic() + 60
    while len(it._control.complete) == CALLS and time.monotonic() < lost: time.sleep(0.001)
    done, missing = it.done(), CALLS - len(it._control.complete)
    Path("slow").unlink()
    counts = it.weights()["counts"].sum().item()
print(json.dumps([done, missing > 0, counts]))
"""
    run = start(LEDGER.replace("0.2}", "60}") + OPEN + text, "async")
    eventually((tmp_path / "joined").exists, "all are joined", told=run.complaint)
    run.kill("shard-0")
    assert done(run) == [True, True, 120.0]


def test_a_job_that_has_failed_takes_no_call_and_names_the_one(start: Callable[..., ScriptRun]) -> None:
    text = """
    told = []
    for call in (lambda: it.schedule(die).fetch(), lambda: it.schedule(total)):
        try:
            call()
        except ps.JobFailed as error:
            told.append(str(error))
    print(json.dumps(told))
    os._exit(0)
"""
    die = "@ps.function\ndef die(weights):\n    os._exit(3)\n"
    run = start(LEDGER + die + OPEN + text, "async")
    assert run.wait() == 0, run.complaint()
    told = json.loads(run.output().splitlines()[-1])
    assert len(told) == 2
    assert told[0] == told[1]
    assert "call 0 of coordinator.schedule, counted from 0" in told[0]


def test_what_close_has_not_waited_for_goes_on_and_is_saved_at_the_end(
    start: Callable[..., ScriptRun], tmp_path: Path
) -> None:
    (tmp_path / "slow").touch()
    text = """
it = ps.Coordinator(strategy, variables=variables, optimizer=optimizer, settings=settings, timeout_s=60)
it.schedule(count, (0, 0)).fetch()
stuck = it.schedule(count, (QUICK, 0))
try:
    it.close(timeout_s=0.01)
except TimeoutError as error:
    print(json.dumps([str(error), int(it.weights()["counts"].sum())]))
"""
    run = start(LEDGER.replace("0.2}", '600, "cluster.grace_s": 2}') + text, "async")
    assert run.wait() == 0, run.complaint()
    says, counted = json.loads(run.output().splitlines()[-1])
    assert says.startswith("after 0.01 s the job is not done; it goes on until the program ends")
    assert counted == 1
    assert list(restorable_in_all(Catalogue(store_of(run.runs()[-1])), 1).intervals()) == [(0, 1)]


def test_what_a_function_pushes_nothing_for_moves_nothing(start: Callable[..., ScriptRun]) -> None:
    text = """
    it.schedule(count, (3, 0))
    it.join()
    before = it.weights()
    looks = it.fetch([it.schedule(total, kwargs={"scale": 2.0}) for _ in range(20)])
    after = it.weights()
    same = all(np.array_equal(before[name], after[name]) for name in before)
    print(json.dumps([float(looks[0]), len({float(look) for look in looks}), same]))
"""
    run = start(LEDGER + OPEN + text, "async", "adam")
    first, different, same = done(run)
    assert np.isclose(first, 2 * 0.5)
    assert (different, same) == (1, True)


def test_errors_come_once_with_the_line_and_the_worker(start: Callable[..., ScriptRun]) -> None:
    text = """
    told = []
    def note(call):
        try:
            call()
            told.append("")
        except (ps.FunctionFailed, ps.errors.ConfigurationError, TimeoutError) as error:
            told.append(f"{type(error).__name__}: {error}")
    bad = it.schedule(fail, ("no such file",))
    note(it.join)
    note(it.join)
    note(bad.fetch)
    wrong = it.schedule(misshape)
    note(wrong.fetch)
    note(it.join)
    good = it.schedule(count, (5, 1))
    note(good.fetch)
    note(lambda: it.schedule(lambda weights: 1))
    note(lambda: it.schedule(ps.function(lambda weights: 1)))
    note(lambda: it.schedule(count, (object(), 1)))
    Path("slow").touch()
    stuck = it.schedule(count, (40, 1))
    note(lambda: stuck.fetch(timeout_s=0.01))
    note(lambda: it.join(timeout_s=0.01))
    Path("slow").unlink()
print(json.dumps([told, it.weights()["counts"].sum().item()]))
"""
    run = start(LEDGER + "import parashard.errors\n" + OPEN + text, "async")
    told, counted = done(run)
    assert counted == 2.0
    assert told[0].startswith("FunctionFailed: worker-")
    assert told[0].endswith(": ValueError: no such file (train.py:23)")
    assert told[1] == ""
    assert told[2] == told[0]
    assert "misshape: it returned a gradient for 'counts' that is float32 (3,); due is float32 (120,)" in told[3]
    assert told[4:6] == ["", ""]
    assert "due is a function of the top level that @ps.function marks" in told[6]
    assert "<lambda> is not at the top level of __main__" in told[7]
    assert "found object; allowed are arrays, numbers, text" in told[8]
    assert told[9].startswith("TimeoutError: after 0.01 s call")
    assert told[10].startswith("TimeoutError: after 0.01 s functions are not complete")


def test_each_worker_has_an_iterator_of_its_own(start: Callable[..., ScriptRun]) -> None:
    text = """
    ones, others = it.create_per_worker_dataset(numbers), it.create_per_worker_dataset(numbers)
    found = it.fetch([it.schedule(pair, (ones,), {"others": others}) for _ in range(20)])
    print(json.dumps(found))
"""
    by_worker: dict[int, list[int]] = {}
    for one, other, pid in done(start(LEDGER + OPEN + text, "async")):
        assert one == other
        by_worker.setdefault(pid, []).append(one)
    assert all(sorted(seen) == list(range(len(seen))) for seen in by_worker.values())


MISTAKES = {
    "rounds": (OPEN + "    pass\n", "sync:2", 'ps.Coordinator with consistency = "sync:2"', "allowed: async, ssp:K"),
    "two": (
        OPEN + "    pass\n" + OPEN + "    pass\n",
        "async",
        "ps.Coordinator after ps.Coordinator(...)",
        "a script has",
    ),
    "edited": (
        "if ps.is_worker(): optimizer = ps.SGD(2.0)\n" + OPEN + "    it.schedule(total).fetch()\n",
        "async",
        "optimizer.learning_rate is 2.0 here and 1.0",
        "",
    ),
    "late": (
        OPEN + "    @ps.function\n    def late(weights): return 0, {}\n    it.schedule(late)\n",
        "async",
        "late is defined after ps.Coordinator(...)",
        "define it before",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(start: Callable[..., ScriptRun], mistake: str) -> None:
    text, consistency, *sentences = MISTAKES[mistake]
    run = start(LEDGER + text, consistency)
    assert run.wait() == 1
    assert all(sentence in run.complaint().splitlines()[-1] for sentence in sentences), run.complaint()


def test_a_worker_from_elsewhere_calls_them_too(start: Callable[..., ScriptRun], tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    text = """
    values = [it.schedule(count, (i, i)) for i in range(CALLS)]
    it.join()
print(json.dumps(sorted(set(it.weights()["counts"].tolist()))))
"""
    run = start(LEDGER.replace("workers=2", "workers=1") + OPEN + text, "async")
    eventually(lambda: run.steps_complete() >= QUICK - 8, "calls are done", told=run.complaint)
    where = json.loads((run.runs()[-1] / "coordinator.json").read_text())["address"]
    command = [*DIES_WITH_US, sys.executable, "-m", "parashard", "worker", "--connect"]

    def other(connect: str) -> subprocess.Popen[str]:
        words = [*command, connect, "train.py", "async"]
        return subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)

    refused, taken = other(where), other(str(run.runs()[-1]))
    _, said = refused.communicate(timeout=DEADLINE_S)
    assert "a worker of ps.Coordinator gets its arguments from the run folder" in said.splitlines()[-1]
    eventually(lambda: "guest-0" in _status(run), "it has joined", told=run.complaint)
    (tmp_path / "slow").unlink()
    assert done(run) == [1.0]
    assert taken.wait(DEADLINE_S) == 0, taken.stderr and taken.stderr.read()


def _status(run: ScriptRun) -> str:
    words = [sys.executable, "-m", "parashard", "status", str(run.runs()[-1])]
    return subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=False).stdout
