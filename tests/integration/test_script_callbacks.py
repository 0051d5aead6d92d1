"""Callbacks of a script's fit: once an event, and a learning rate is a step's, whatever is killed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from parashard.plan.steps import StepPlan
from parashard.protocol.coordinator_client import CoordinatorClient, find_coordinator
from parashard.store.arrays import read_arrays
from support.cluster_run import eventually
from support.script_run import LEDGER, ScriptRun

FIT = """
class Log(ps.callbacks.Callback):
    def __init__(self):
        self.file = open("events", "a", buffering=1)
    def on_epoch_begin(self, epoch, logs):
        print("begin", epoch, file=self.file)
    def on_epoch_end(self, epoch, logs):
        print("end", epoch, file=self.file)
    def on_test_end(self, logs):
        print("judged", logs["least"], file=self.file)
    def on_train_batch_end(self, batch, logs):
        print("step", batch, file=self.file)

halved = ps.callbacks.LearningRateScheduler(lambda epoch, rate: 1.0 if epoch < 2 else 0.5)
callbacks = [halved, ps.callbacks.CSVLogger("log.csv"), Log()]
history = trainer.fit(
    data, epochs=EPOCHS, batch_size=4, verbose=0, resume="resume" in sys.argv, callbacks=callbacks,
    validation_data=data,
)
print(json.dumps(history.history.get("val_least")))
"""


ADAM = """
class Line(Ledger):
    def initial_variables(self):
        return {"counts": np.linspace(-9.0, 9.0, EXAMPLES, dtype=np.float32)}

    def loss_and_gradients(self, variables, batch, xp):
        loss, gradients = super().loss_and_gradients(variables, batch, xp)
        return loss, {"counts": (0.5 - variables["counts"]) * gradients["counts"]}

trainer = ps.Trainer(Line(), ps.Adam(0.25), strategy, settings={"checkpoint.every_s": 0.2})
"""
"""Takes the place of the ledger's trainer: what a step's rate moves depends on all steps before it."""


@pytest.fixture
def start(start: Callable[..., ScriptRun]) -> Callable[..., ScriptRun]:
    return lambda *words, text=LEDGER + FIT: start(text, *words)


def expected_counts(report: dict[str, object], epochs: int) -> list[float]:
    """Return each example's count: the sum of the rates of the steps that have it."""
    plan = StepPlan(60, 4, epochs, 0)
    rates: list[dict[str, float]] = report["callbacks"]["learning_rates"]  # type: ignore[index]
    counts = np.zeros(60)
    for step in range(plan.total):
        rate = next((r["learning_rate"] for r in reversed(rates) if r["first_step"] <= step), 1.0)
        counts[plan.indices(step)] += rate
    return counts.tolist()


def told(run: ScriptRun, kind: str) -> list[str]:
    lines = (run.folder / "events").read_text().splitlines()
    return [line.split()[1] for line in lines if line.split()[0] == kind]


def changed(run: ScriptRun) -> bool:
    """Tell whether all steps with the first learning rate are complete."""
    if "coordinator" not in run.processes():
        return False
    client = CoordinatorClient(find_coordinator(str(run.runs()[-1])), where=str(run.runs()[-1]))
    try:
        return client.get_status().steps_complete >= 30
    finally:
        client.close()


def test_a_step_has_one_learning_rate_whatever_is_killed(  # P37, P38
    start: Callable[..., ScriptRun], tmp_path: Path
) -> None:
    (tmp_path / "slow").touch()
    run = start("6", "async")
    eventually(lambda: changed(run), "the rate has changed", told=run.complaint)
    for name in ("worker-0", "shard-1", "coordinator", "worker-1", "shard-0"):
        run.kill(name)
    (run.folder / "slow").unlink()
    assert run.wait() == 0, run.complaint()
    report = json.loads((run.runs()[-1] / "report.json").read_text())
    weights = read_arrays(run.runs()[-1] / "weights.safetensors")["counts"].tolist()
    assert weights == [2.0 + 4 * 0.5] * 60 == expected_counts(report, 6)
    assert len(told(run, "judged")) == 6
    assert (report["coordinator_restarts"], report["shard_restarts"] > 0) == (1, True)
    assert told(run, "begin") == told(run, "end") == [str(epoch) for epoch in range(6)]
    assert len((run.folder / "log.csv").read_text().splitlines()) == 7
    steps = told(run, "step")
    assert all(steps.count(str(batch)) <= 6 for batch in range(15))  # of each epoch at most once


@pytest.mark.full("kills; test_recovery.py has them, the simulation scheduled rates under kills")
def test_with_adam_and_a_scheduler_the_weights_are_those_of_the_quiet_run_whatever_is_killed(  # P13, P37
    tmp_path: Path,
) -> None:
    quiet = _with_adam(tmp_path / "quiet")
    assert _with_adam(tmp_path / "killed", kill=("worker-0", "shard-1", "coordinator")) == quiet


def _with_adam(folder: Path, kill: Sequence[str] = ()) -> str:
    """Train, kill processes when the rate has changed and the next epoch is under way; return the weights' digest."""
    folder.mkdir()
    if kill:
        (folder / "slow").touch()
    run = ScriptRun(folder, LEDGER + ADAM + FIT, "4", "sync:2")
    try:
        if kill:
            eventually(lambda: changed(run), "the rate has changed", told=run.complaint)
            for process in kill:
                run.kill(process)
            (folder / "slow").unlink()
        assert run.wait() == 0, run.complaint()
    finally:
        run.clean_up()
    report = json.loads((run.runs()[-1] / "report.json").read_text())
    rates = report["callbacks"]["learning_rates"]
    assert [(rate["first_step"], rate["learning_rate"]) for rate in rates] == [(0, 1.0), (30, 0.5)]
    assert [report[f"{role}_restarts"] > 0 for role in ("coordinator", "shard")] == [bool(kill)] * 2
    weights = read_arrays(run.runs()[-1] / "weights.safetensors")["counts"]
    return hashlib.sha256(weights.tobytes()).hexdigest()


def test_after_a_crash_of_the_script_an_effect_may_be_lost_and_is_never_repeated(  # P38
    start: Callable[..., ScriptRun], tmp_path: Path
) -> None:
    (tmp_path / "slow").touch()
    run = start("6", "sync:2")
    eventually(lambda: changed(run), "the rate has changed", told=run.complaint)
    run.process.kill()
    run.process.wait()
    (tmp_path / "slow").unlink()
    again = start("6", "sync:2", "resume")
    assert again.wait() == 0, again.complaint()
    assert len(again.runs()) == 1
    due = [str(epoch) for epoch in range(6)]
    calls = [told(again, "begin"), told(again, "end")]
    assert all(epochs == [epoch for epoch in due if epoch in epochs] for epochs in calls)  # none is repeated
    assert sum(len(due) - len(epochs) for epochs in calls) <= 1  # that of the call that was running
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 7
    assert json.loads(again.output().splitlines()[-1]) == [1.0, 2.0, 2.5, 3.0, 3.5, 4.0]
    weights = read_arrays(again.runs()[-1] / "weights.safetensors")["counts"].tolist()
    assert weights == [4.0] * 60


LATE = """
class Late(ps.callbacks.Callback):
    decides = False
    def on_epoch_end(self, epoch, logs):
        print("end", epoch, flush=True)
        if epoch == 2:
            client = CoordinatorClient(find_coordinator(str(self.model.run_dir)), where=str(self.model.run_dir))
            while client.get_status().steps_complete < 15 * EPOCHS:
                time.sleep(0.05)
            client.close()
            send(self.model.run_dir, "coordinator", signal.SIGKILL)

best = ps.callbacks.EarlyStopping("val_least", mode="max", patience=99, restore_best_weights=True)
best.decides = False
history = trainer.fit(data, epochs=EPOCHS, batch_size=4, verbose=0, validation_data=data, callbacks=[Late(), best])
restarts = history.report["coordinator_restarts"]
print(json.dumps([trainer.evaluate(data)["least"], restarts, history.history["val_least"]]))
"""
IMPORTS = """
import signal
from parashard.launch.programs import send
from parashard.protocol.coordinator_client import CoordinatorClient, find_coordinator
"""


@pytest.mark.parametrize("consistency", ["sync:2", "async"])
def test_callbacks_hear_of_each_epoch_though_the_coordinator_dies_when_every_step_is_in(  # P38
    start: Callable[..., ScriptRun], consistency: str
) -> None:
    run = start("6", consistency, text=LEDGER + IMPORTS + LATE)
    assert run.wait() == 0, run.complaint()
    *_, last = lines = run.output().splitlines()
    assert lines[:-1] == [f"end {epoch}" for epoch in range(6)]
    least, restarts, judged = json.loads(last)
    assert (least, restarts, len(judged)) == (6.0, 1, 6)
    assert consistency == "async" or judged == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


KILLED = """
class Killed(ps.callbacks.Callback):
    def on_epoch_end(self, epoch, logs):
        print("end", epoch, flush=True)
        if epoch == 1 and "resume" not in sys.argv:
            os.kill(os.getpid(), 9)

first = ps.callbacks.EarlyStopping("val_least", mode="min", patience=99, restore_best_weights=True)
history = trainer.fit(data, epochs=EPOCHS, batch_size=4, verbose=0, validation_data=data, resume="resume" in sys.argv,
    callbacks=[first, ps.callbacks.CSVLogger("log.csv"), Killed()])
print(json.dumps([trainer.evaluate(data)["least"], history.history["val_least"]]))
"""


def test_a_kill_in_a_hook_leaves_no_hole_in_figures_and_repeats_no_call(  # P38
    start: Callable[..., ScriptRun], tmp_path: Path
) -> None:
    run = start("3", "sync:2", text=LEDGER + KILLED)
    assert run.wait() == -9
    assert run.output() == "end 0\nend 1\n"
    again = start("3", "sync:2", "resume", text=LEDGER + KILLED)
    assert again.wait() == 0, again.complaint()
    assert again.output().splitlines() == ["end 2", json.dumps([1.0, [1.0, 2.0, 3.0]])]
    assert [line.split(",")[0] for line in (tmp_path / "log.csv").read_text().splitlines()] == ["epoch", "0", "1", "2"]


RAISING = """
def fail(epoch, logs):
    if epoch == 1:
        raise RuntimeError("no more room")

trainer.fit(data, epochs=EPOCHS, batch_size=4, verbose=0, callbacks=[ps.callbacks.LambdaCallback(on_epoch_end=fail)])
"""


def test_a_callback_that_raises_ends_the_run_saved_with_the_users_own_lines_once(
    start: Callable[..., ScriptRun],
) -> None:
    run = start("4", "sync:2", text=LEDGER + RAISING)
    assert run.wait() == 1
    lines = run.complaint().splitlines()
    assert lines[-1] == "RuntimeError: no more room"
    assert sum("in fail" in line for line in lines) == 1
    assert run.processes() == {}
    report = json.loads((run.runs()[-1] / "report.json").read_text())
    assert (report["state"], report["reason"]) == ("stopped", "a callback raised RuntimeError: no more room")
    assert report["steps_applied"] == [28, 28]  # a round is committed by the next one's first request


STOPPING = """
history = trainer.fit(
    data, epochs=EPOCHS, batch_size=4, verbose=0, validation_data=data, callbacks=[
        ps.callbacks.EarlyStopping("val_least", mode="min", patience=2, restore_best_weights=True),
        ps.callbacks.ModelCheckpoint("kept/{epoch}-{val_least}.safetensors"),
    ]
)
print(json.dumps([trainer.evaluate(data)["least"], history.report["reason"], history.history["val_least"]]))
"""


@pytest.mark.parametrize("consistency", [pytest.param("sync:3", marks=pytest.mark.smoke), "async"])
def test_an_early_stop_goes_on_with_the_weights_that_were_judged_best(
    start: Callable[..., ScriptRun], consistency: str
) -> None:
    run = start("9", consistency, text=LEDGER + STOPPING)
    assert run.wait() == 0, run.complaint()
    least, reason, judged = json.loads(run.output().splitlines()[-1])
    assert (least, judged) == (1.0, [1.0, 2.0, 3.0])
    assert reason == "EarlyStopping: val_least was best in epoch 1 (1)"
    kept = sorted((run.folder / "kept").iterdir())
    assert [path.name for path in kept] == [f"{epoch}-{epoch}.0.safetensors" for epoch in (1, 2, 3)]
    assert [read_arrays(path)["counts"].tolist() for path in kept] == [[float(epoch)] * 60 for epoch in (1, 2, 3)]
    report = json.loads((run.runs()[-1] / "report.json").read_text())
    assert (report["callbacks"]["stopped_after"], report["callbacks"]["stop_lag_steps"]) == (45, 0)
    assert list((run.runs()[-1] / "checkpoints" / "evaluated").glob("*")) == []


BATCHES = """
batches = []
class Count(ps.callbacks.Callback):
    def on_train_batch_end(self, batch, logs):
        batches.append(batch)
    def on_epoch_end(self, epoch, logs):
        self.model.learning_rate = 0.5
        self.model.stop_training = epoch == 2

history = trainer.fit(data, epochs=EPOCHS, batch_size=8, verbose=0, validation_data=data, callbacks=[Count()])
figures = history.history
print(json.dumps([batches, figures["val_steps"], figures["val_least"], history.report["consistency"]]))
"""


def test_where_workers_share_batches_callbacks_hear_of_batches_and_decide_in_time(
    start: Callable[..., ScriptRun],
) -> None:
    run = start("9", "auto", text=LEDGER + BATCHES)
    assert run.wait() == 0, run.complaint()
    batches, steps, least, policy = json.loads(run.output().splitlines()[-1])
    assert (batches, policy) == ([*range(8)] * 3, "auto:2")
    assert (steps, least) == ([8, 16, 24], [1.0, 1.5, 2.0])  # each example once in an epoch
    report = json.loads((run.runs()[-1] / "report.json").read_text())
    assert (report["callbacks"]["stopped_after"], report["callbacks"]["stop_lag_steps"]) == (48, 0)
