"""Scripts that train: each worker is the script run again, and what is killed changes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parashard.job.load import load_job
from parashard.job.policy import Policy
from parashard.process.run_files import JOB_FILE
from parashard.protocol.coordinator_client import CoordinatorClient, find_coordinator
from parashard.store.arrays import read_arrays
from support.cluster_run import DEADLINE_S, eventually
from support.command_run import DIES_WITH_US
from support.report_oracle import store_of, unsaved
from support.script_run import LEDGER, ScriptRun

FIT = 'history = trainer.fit(data, epochs=EPOCHS, batch_size=4, verbose=0, resume="resume" in sys.argv)\n'
TELL = 'print(json.dumps([trainer.evaluate(data)["least"], history.report["weights_sha256"]]))\n'
IN_PARTS = FIT.replace("batch_size=4", "batch_size=8")  # in `auto` a batch of 8 has two parts
OWN_LINE = LEDGER.count("\n") + 1  # the first line that a test adds
QUICK = 30  # steps before the first that waits until it may be quick


def reached(run: ScriptRun, steps: int, event: str = "") -> bool:
    """Tell whether so many steps of a run are complete, and something has happened."""
    if "coordinator" not in run.processes():
        return False
    client = CoordinatorClient(find_coordinator(str(run.runs()[-1])), where=str(run.runs()[-1]))
    try:
        status = client.get_status()
        return status.steps_complete >= steps and event in str(status.events)
    finally:
        client.close()


def done(run: ScriptRun) -> Any:
    """Return what the script printed last, of a run with every step in the last manifest of every shard (P1)."""
    assert run.wait() == 0, run.complaint()
    folder = run.runs()[-1]
    assert unsaved(store_of(folder), json.loads((folder / "report.json").read_text())) == []
    return json.loads(run.output().splitlines()[-1])


@pytest.mark.smoke
def test_calls_in_a_row_share_their_weights(start: Callable[..., ScriptRun]) -> None:
    again = "first = trainer.evaluate(data)\nother = ps.Trainer(Ledger(), ps.SGD(1.0), strategy)\n" + FIT
    told = """
other.fit(data, epochs=1, batch_size=4, verbose=0)
print(json.dumps([first["least"], trainer.evaluate(data)["least"], other.evaluate(data)["least"]]))
"""
    run = start(LEDGER + FIT + again + told, "3", "async")
    assert done(run) == [3.0, 6.0, 1.0]
    assert len(run.runs()) == 3
    assert run.processes() == {}


def test_fits_in_a_row_share_the_optimizers_state_and_rate(start: Callable[..., ScriptRun]) -> None:
    told = """
class Pulled(Ledger):
    def loss_and_gradients(self, variables, batch, xp):
        return 0.5, {"counts": variables["counts"] - batch.inputs[:, 0].mean()}

def fitted(strategy, *parts):
    trainer = ps.Trainer(Pulled(), ps.Adam(0.5), strategy)
    for first, last in parts:
        lower = ps.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
        trainer.fit(data, epochs=last, initial_epoch=first, batch_size=20, callbacks=[lower], verbose=0)
    return trainer._present.weights()["counts"].tolist()

strategy = ps.ParameterServerStrategy(shards=2, workers=1, consistency="sync:1")
parts = fitted(strategy, (0, 1), (1, 3))
print(json.dumps([fitted(ps.OneDeviceStrategy(), (0, 3)), parts]))
"""
    whole, parts = done(start(LEDGER + told, "3", "async"))
    assert parts == whole


def test_a_dataset_is_read_by_index_and_each_example_counts_once(start: Callable[..., ScriptRun]) -> None:
    lines = """
class Lines:
    def __len__(self): return EXAMPLES
    def __getitem__(self, i): return np.array([i, i]), 0.0, 1.0

def halved(example, rng): return example[0][:1], example[1]

Ledger.weighted = True
data = Lines()
"""
    fit = FIT.replace("batch_size=4", "global_batch_size=16, gradient_accumulation=2, transform=halved")
    run = start(LEDGER + lines + fit + TELL.replace('["least"]', ".get('least')"), "20", "sync:4")
    found = done(run)
    assert found[0] == 20.0 / 2, "two pieces of a step: each gradient is of half of its examples"
    assert json.loads((run.runs()[-1] / "report.json").read_text())["steps_total"] == 20 * 15


@pytest.mark.parametrize("consistency", ["auto", "sync:4"])
def test_every_example_counts_once_whatever_is_killed(
    start: Callable[..., ScriptRun], tmp_path: Path, consistency: str
) -> None:
    (tmp_path / "slow").touch()
    run = start(LEDGER + IN_PARTS + TELL, "20", consistency)
    eventually(lambda: reached(run, QUICK - 8), "steps are done", told=run.complaint)
    for name in ("worker-0", "shard-1", "coordinator", "worker-1"):
        run.kill(name)
    (tmp_path / "slow").unlink()
    assert done(run)[0] == 20.0
    assert read_arrays(run.runs()[-1] / "weights.safetensors")["counts"].tolist() == [20.0] * 60
    report = json.loads((run.runs()[-1] / "report.json").read_text())
    assert (report["coordinator_restarts"], report["shard_restarts"] > 0) == (1, True)


def test_after_ctrl_c_it_goes_on_with_the_policy_that_it_began_with(
    start: Callable[..., ScriptRun], tmp_path: Path
) -> None:
    (tmp_path / "slow").touch()
    run = start(LEDGER + FIT + TELL, "20", "async")
    eventually(lambda: reached(run, QUICK - 8), "steps are done", told=run.complaint)
    run.interrupt()
    assert run.wait() != 0
    last = run.complaint().splitlines()[-1]
    assert "KeyboardInterrupt: stopped at step" in last
    [folder] = run.runs()
    assert last.endswith(f". Continue: parashard resume runs/{folder.name}")
    (tmp_path / "slow").unlink()
    again = start("# resumed by hand\n" + LEDGER + FIT + TELL, "20", "auto", "resume")
    assert done(again)[0] == 20.0
    assert again.runs() == [folder]
    assert load_job(folder / JOB_FILE, environ={}).job.consistency.policy == Policy("async")


def test_a_script_that_was_stopped_at_a_checkpoint_goes_on_with_another_number_of_shards(
    start: Callable[..., ScriptRun], tmp_path: Path
) -> None:
    (tmp_path / "slow").touch()
    run = start(LEDGER + IN_PARTS + TELL, "20", "auto")
    eventually(lambda: reached(run, QUICK - 8), "steps are done", told=run.complaint)
    command = [sys.executable, "-m", "parashard", "checkpoint", "create", "--stop", str(run.runs()[0])]
    with subprocess.Popen([*DIES_WITH_US, *command], stdout=subprocess.PIPE, text=True) as asked:
        eventually(lambda: reached(run, 0, "leasing pauses"), "it drains", told=run.complaint)
        (tmp_path / "slow").unlink()
        assert run.wait() == 1
        told, _ = asked.communicate(timeout=DEADLINE_S)
    assert asked.returncode == 0
    assert "steps on every shard" in told
    last = run.complaint().splitlines()[-1]
    assert "JobFailed: stopped at the drained checkpoint j1" in last
    assert "Continue: parashard resume runs/" in last
    run.resume("--shards", "3")
    assert done(run)[0] == 20.0
    assert len(list((run.runs()[0] / "checkpoints" / "shards" / "p0002").iterdir())) == 3


def test_an_edit_of_what_is_not_computed_costs_a_running_script_no_worker(
    start: Callable[..., ScriptRun], tmp_path: Path
) -> None:
    (tmp_path / "slow").touch()
    (tmp_path / "words.py").write_text("LEAST = 'least'\n")
    text = LEDGER + FIT + "import words\n" + TELL.replace('"least"', "words.LEAST")
    run = start("import words\n" + text, "20", "async")
    eventually(lambda: reached(run, QUICK - 8), "steps are done", told=run.complaint)
    (tmp_path / "train.py").write_text("import words  # a comment\n" + text.replace("verbose=0", "verbose=1"))
    (tmp_path / "words.py").write_text('"""The words."""\n\nLEAST = "least"\n')
    for name in ("worker-0", "worker-1"):
        run.kill(name)
    (tmp_path / "slow").unlink()
    assert done(run)[0] == 20.0


MISTAKES = {
    "raises in a worker": (
        "if ps.is_worker(): raise ValueError('no such file')\n" + FIT,
        f"the script raised ValueError: no such file (train.py:{OWN_LINE}); a worker is your script, run again: what "
        "may happen only once comes after `import parashard as ps`, under `if not ps.is_worker():`",
    ),
    "no call in a worker": (
        "if not ps.is_worker(): " + FIT,
        "train.py ended before its call 1, fit, which this worker is for",
    ),
    "another call in a worker": (
        "if ps.is_worker(): EPOCHS = 7\n" + FIT,
        "epochs is 7 here and 20 in the process that started it",
    ),
    "other data in a worker": (
        "if ps.is_worker(): data = (data[0][::-1], data[1])\n" + FIT,
        "a script loads the same data wherever it runs; seed what it draws, such as numpy.random.default_rng(0)",
    ),
    "an example that cannot be read": (
        "class Lines:\n"
        "    def __len__(self): return EXAMPLES\n"
        "    def __getitem__(self, i):\n"
        "        if i == 33: raise KeyError(i)\n"
        "        return np.array([i]), 0.0\n"
        "data = Lines()\n" + FIT,
        f"data: example 33: KeyError: 33 (train.py:{OWN_LINE + 3})",
    ),
}


ONCE = {
    "before the import": (
        "import os; os.makedirs('once')\n" + LEDGER,
        "FileExistsError: [Errno 17] File exists: 'once'",
    ),
    "before the trainer": (
        LEDGER.replace("EXAMPLES, EPOCHS", "os.makedirs('once')\nEXAMPLES, EPOCHS"),
        "the script raised FileExistsError: [Errno 17] File exists: 'once' (train.py:7)",
    ),
}


@pytest.mark.parametrize("place", ONCE)
def test_what_happens_only_once_ends_the_run_with_the_advice(
    start: Callable[..., ScriptRun], tmp_path: Path, place: str
) -> None:
    text, sentence = ONCE[place]
    run = start(text + FIT, "20", "async")
    assert run.wait() == 1
    last = run.complaint().splitlines()[-1]
    assert sentence in last
    assert "a worker is your script, run again" in last
    assert "`if not ps.is_worker():`" in last


def test_a_worker_starts_where_the_script_was_started(start: Callable[..., ScriptRun], tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    run = start("import os; os.chdir('sub')\n" + LEDGER + FIT + TELL, "20", "async")
    assert run.wait() == 0, run.complaint()
    assert json.loads(run.output().splitlines()[-1])[0] == 20.0


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_ends_the_run(start: Callable[..., ScriptRun], mistake: str) -> None:
    text, sentence = MISTAKES[mistake]
    run = start(LEDGER + text, "20", "async")
    assert run.wait() == 1
    assert sentence in run.complaint().splitlines()[-1]
    assert run.complaint().count("Traceback") == 1, "of the script's own call"


def test_an_edited_script_is_a_changed_job_until_that_is_accepted(
    start: Callable[..., ScriptRun], tmp_path: Path
) -> None:
    (tmp_path / "slow").touch()
    run = start(LEDGER + FIT + TELL, "20", "async")
    eventually(lambda: reached(run, QUICK - 8), "steps are done", told=run.complaint)
    run.interrupt()
    run.wait()
    (tmp_path / "slow").unlink()
    edit = "EXAMPLES = 60\n"
    refused = start(LEDGER + edit + FIT + TELL, "20", "async", "resume")
    assert refused.wait() == 1
    assert refused.complaint().splitlines()[-1].endswith("or go on with it: accept_code_change=True")
    accepting = FIT.replace("verbose=0", "accept_code_change=True")
    accepted = start(LEDGER + edit + accepting + TELL, "20", "async", "resume")
    assert done(accepted)[0] == 20.0
    assert "going on with code that was changed" in accepted.output()
    [folder] = accepted.runs()
    assert "accepted_code_sha256" in json.loads((folder / "report.json").read_text())
