"""Training in this process: what it leaves, how it goes on, and what becomes of mistakes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.api import backends, fits
from parashard.api import trainer as module
from parashard.api.in_process import training
from parashard.api.script import Script
from parashard.api.strategies import InProcessStrategy
from parashard.errors import ConfigurationError, JobFailed, StoreFailed
from parashard.plan.variables import Variable
from parashard.store.arrays import read_arrays
from parashard_worker import computing
from support.line_model import Line, X, Y

STEPS, EPOCH = 48, 12  # of 4 epochs with 90 examples in batches of 8


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """No script: pytest is none, as a notebook."""
    monkeypatch.chdir(tmp_path)
    script = Script(None)
    for user in (module, fits):
        monkeypatch.setattr(user, "SCRIPT", script)
    return script


def trainer(strategy: InProcessStrategy | None = None, model: Line | None = None, **settings: Any) -> ps.Trainer:
    return ps.Trainer(model or Line(), ps.Adam(0.05), strategy or ps.MirroredStrategy(4), seed=3, settings=settings)


def fit(trainer: ps.Trainer, **arguments: Any) -> ps.History:
    return trainer.fit((X, Y), **{"epochs": 4, "batch_size": 8, "verbose": 0, **arguments})


def digest(history: ps.History) -> str:
    return str(history.report["weights_sha256"])


def test_mirrored_and_central_storage_have_the_same_bits_and_one_device_others() -> None:
    mirrored, central, one = (
        digest(fit(trainer(strategy)))
        for strategy in (ps.MirroredStrategy(4), ps.CentralStorageStrategy(4), ps.OneDeviceStrategy())
    )
    assert mirrored == central != one
    assert one == digest(fit(trainer(ps.MirroredStrategy(["cpu"], threads=1))))


class Square(Line):
    """A line, and a matrix whose gradient `given` changes."""

    def __init__(self, given: Callable[[np.ndarray], np.ndarray], encoding: str = "float32") -> None:
        super().__init__()
        self.given, self.encoding = given, encoding

    def initial_variables(self) -> Mapping[str, Any]:
        return {**super().initial_variables(), "m": Variable("m", (3, 3), encoding=self.encoding)}

    def loss_and_gradients(self, variables: Any, batch: Any, xp: Any) -> Any:
        loss, gradients = super().loss_and_gradients(variables, batch, xp)
        slope = batch.inputs.T @ batch.inputs[:, [1, 2, 0]] + variables["m"]
        return loss, gradients | {"m": self.given(slope)}


def test_a_gradient_may_lie_in_memory_as_it_likes() -> None:
    straight, turned = (
        digest(fit(trainer(ps.OneDeviceStrategy(), Square(given))))
        for given in (np.ascontiguousarray, np.asfortranarray)
    )
    assert straight == turned


def test_an_encoded_gradient_is_encoded_in_one_process_too() -> None:
    encoded, rounded, neither = (
        digest(fit(trainer(ps.OneDeviceStrategy(), model)))
        for model in (
            Square(np.ascontiguousarray, "float16"),
            Square(lambda slope: slope.astype(np.float16).astype(np.float32)),
            Square(np.ascontiguousarray),
        )
    )
    assert encoded == rounded != neither


class Still(Line):
    """A model that does not move: its loss is only the noise between batches."""

    def loss_and_gradients(self, variables: Any, batch: Any, xp: Any) -> Any:
        loss, gradients = super().loss_and_gradients(variables, batch, xp)
        return 2.3 + 0.01 * np.tanh(loss), {name: 0 * gradient for name, gradient in gradients.items()}


def test_a_fit_whose_model_does_not_learn_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    told = "done, but the model did not learn: the training loss has not fallen: 2.3"
    with pytest.warns(UserWarning, match=told):
        history = fit(trainer(ps.OneDeviceStrategy(), Still()), epochs=20)
    assert history.report["reason"] == "every step is in, but the model did not learn"
    assert history.report["problems"] == [history.report["not_learned"]]
    assert history.report["not_learned"].endswith(
        " (no staleness, learning rate 0.05); try a lower and a higher optimizer.learning_rate, "
        "and check labels, inputs and loss"
    )
    fit(trainer(ps.OneDeviceStrategy(), Still()), epochs=20, verbose=1)
    assert capsys.readouterr().out.splitlines()[-1].startswith(told)


@pytest.mark.filterwarnings("error")
def test_a_second_fit_may_begin_at_its_best() -> None:
    mine = trainer(ps.OneDeviceStrategy(), Still())
    fit(mine, epochs=2)
    assert fit(mine, epochs=20).report["not_learned"] == ""


def test_a_fit_leaves_report_weights_and_history() -> None:
    mine = trainer()
    history = fit(mine, validation_split=0.1)
    report = json.loads((history.run_dir / "report.json").read_text())
    assert report == history.report
    assert (report["state"], report["consistency"], report["steps_applied"]) == ("done", "sync:4", [44])
    assert [one["steps"] for one in report["evaluations"]] == [12, 24, 36, 44]  # moved up to the end of a round
    assert history.history["val_loss"][-1] < history.history["val_loss"][0]
    assert sorted(read_arrays(history.run_dir / "weights.safetensors")) == ["b", "w"]
    assert (history.run_dir / "history.jsonl").exists()
    assert history.run_dir.name.startswith("interactive-")
    assert mine.evaluate((X, Y))["loss"] < ps.Trainer(Line()).evaluate((X, Y))["loss"]


def test_a_second_fit_goes_on_from_the_weights() -> None:
    mine = trainer()
    first = fit(mine).history["loss"][0]
    assert fit(mine).history["loss"][0] < first


def interrupt_at(step: int) -> Line:
    model = Line()
    model.before = lambda batch: os.kill(os.getpid(), signal.SIGINT) if batch.step == step else None
    return model


@pytest.mark.parametrize("step", [0, 21, 47])
def test_after_ctrl_c_a_resumed_run_has_the_digest_of_a_quiet_one(step: int) -> None:
    quiet = fit(trainer(), validation_data=(X, Y))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match=rf"stopped at step {step // 4 * 4} of 48 \(saved\). Continue: fit\("):
        fit(trainer(model=interrupt_at(step)), validation_data=(X, Y))
    assert signal.getsignal(signal.SIGINT) is before
    again = fit(trainer(), validation_data=(X, Y), resume=True)
    assert len(list(Path("runs").iterdir())) == 2
    assert digest(again) == digest(quiet)
    assert again.history["val_loss"] == quiet.history["val_loss"]
    assert json.loads((again.run_dir / "report.json").read_text())["duplicate_pushes"] == 0


def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = fit(trainer())

    class Killed(BaseException):
        pass

    model = Line()
    with monkeypatch.context() as patched:

        def die(batch: Any) -> None:
            if batch.step == 30:
                patched.setattr(training.State, "save", lambda self: None)
                patched.setattr(training.LocalLeasing, "failed", lambda *reported: (_ for _ in ()).throw(Killed()))
                raise ValueError

        model.before = die
        with pytest.raises(Killed):
            fit(trainer(model=model, **{"checkpoint.every_steps": 8}))
    begun: list[int] = []
    model.before = lambda batch: begun.append(batch.step)
    assert digest(fit(trainer(model=model, **{"checkpoint.every_steps": 8}), resume=True)) == digest(quiet)
    assert 0 < begun[0] <= 28


def test_a_changed_job_does_not_go_on() -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(trainer(model=interrupt_at(9)))
    with pytest.raises(ConfigurationError, match=r"cannot go on with a changed job: .*consistency\.policy"):
        fit(trainer(ps.MirroredStrategy(2)), resume=True)
    assert fit(trainer(), resume=True).report["state"] == "done"


def test_what_a_model_raises_is_one_sentence_with_its_line_and_the_error_is_the_cause() -> None:
    model = Line()
    model.before = lambda batch: {}["w"]  # type: ignore[call-overload]
    with pytest.raises(
        JobFailed, match=r"process_training.py:\d+: KeyError: 'w'; step 0 failed once \(examples "
    ) as caught:
        fit(trainer(model=model))
    assert isinstance(caught.value.__cause__, KeyError)


class AcceleratorError(RuntimeError):
    """PyTorch's."""


def test_a_lost_context_of_a_gpu_fails_the_job_in_words_though_nothing_can_be_saved_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(*given: Any) -> Any:
        raise AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(training.State, "save", lost)
    monkeypatch.setattr(Line, "loss_and_gradients", lost)
    with pytest.raises(JobFailed, match=r"step 0 \(examples .*the GPU's context is lost: .*CUDA_LAUNCH_BLOCKING=1"):
        fit(trainer(ps.OneDeviceStrategy()))


def test_what_a_model_can_tell_before_is_said_before_a_run_begins(tmp_path: Path) -> None:
    model = Line()
    model.check = lambda batch: {}["w"]  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match=r"the model cannot compute a step: KeyError: 'w' \(.*training.py:"):
        fit(trainer(model=model))
    assert not list(tmp_path.glob("runs/*"))


def test_a_failed_run_goes_on_after_what_was_in() -> None:
    quiet = digest(fit(trainer()))
    model = Line()
    model.before = lambda batch: 1 / 0 if batch.step == 25 else None  # type: ignore[assignment,return-value]
    with pytest.raises(JobFailed, match="ZeroDivisionError"):
        fit(trainer(model=model))
    computed: list[int] = []
    model.before = lambda batch: computed.append(batch.step)
    assert digest(fit(trainer(model=model), resume=True)) == quiet
    assert computed == list(range(24, STEPS))


def test_a_bad_step_is_skipped_where_the_job_says_so() -> None:
    model = Line()
    model.before = lambda batch: 1 / 0 if batch.step == 25 else None  # type: ignore[assignment,return-value]
    report = fit(trainer(model=model, **{"job.on_bad_step": "skip"})).report
    assert (report["skipped_steps"], report["steps_applied"]) == (1, [STEPS])


WRONG: dict[str, tuple[Any, str]] = {
    "a gradient of another shape": (
        lambda self, v, b, xp: (0.5, {"w": np.zeros(2, np.float32), "b": np.zeros(1, np.float32)}),
        r"returned a gradient for 'w' of shape \(2,\); the variable has \(3, 1\)",
    ),
    "a loss that is not finite": (
        lambda self, v, b, xp: (np.nan, {"w": v["w"] * np.nan, "b": v["b"]}),
        "loss became NaN at step 0, and no step was in before it",
    ),
    "weights that are written": (
        lambda self, v, b, xp: (v["w"].fill(0), {}),
        "assignment destination is read-only",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_model_is_one_sentence(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, sentence = WRONG[mistake]
    monkeypatch.setattr(Line, "loss_and_gradients", method)
    with pytest.raises(JobFailed, match=sentence):
        fit(trainer())


def test_an_evaluation_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Line, "evaluate", lambda self, v, b, xp: {"loss": "low"})
    with pytest.raises(JobFailed, match=r"evaluate returned a str for 'loss'.*; the evaluation after step 12 failed"):
        fit(trainer(), validation_data=(X, Y))


def test_a_target_ends_the_run_early() -> None:
    report = fit(trainer(**{"evaluation.target_loss": 1e9}), validation_data=(X, Y)).report
    assert (report["steps_total"], report["reason"][:13]) == (12, "held-out loss")


def test_settings_of_a_cluster_are_refused_and_no_run_begins() -> None:
    with pytest.raises(ConfigurationError, match=r"'cluster.transport' is of a cluster, and MirroredStrategy has none"):
        fit(trainer(**{"cluster.transport": "tcp"}))
    assert not Path("runs").exists()


def test_wrong_settings_leave_no_folder() -> None:
    with pytest.raises(ConfigurationError, match=r"evaluation\.target_accuracy: the data's targets are values"):
        fit(trainer(**{"evaluation.target_accuracy": 0.5}), validation_data=(X, Y))
    assert list(Path("runs").iterdir()) == []


class Notes(ps.callbacks.Callback):
    """Notes what it is told; after so many epochs it stops the run."""

    def __init__(self, epochs: int = 99) -> None:
        self.seen: list[Any] = []
        self.epochs = epochs

    def on_train_begin(self, logs: Any = None) -> None:
        self.seen.append("begin")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(f"step {batch}")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(sorted(logs))
        if epoch + 1 == self.epochs:
            self.model.stop_training = True

    def on_train_end(self, logs: Any = None) -> None:
        self.seen.append("end")


def test_callbacks_see_steps_evaluations_and_epochs_in_this_order() -> None:
    notes = Notes()
    history = fit(trainer(), epochs=2, validation_data=(X, Y), callbacks=[notes])
    steps, known = [f"step {step}" for step in range(EPOCH)], ["loss", "val_loss"]
    assert notes.seen == ["begin", 0, *steps, known, 1, *steps, known, "end"]
    assert {name: len(values) for name, values in history.history.items()} == {"loss": 2, "val_loss": 2}


@pytest.mark.parametrize("held_out", [None, (X, Y)])
def test_a_callback_stops_the_run_at_the_end_of_an_epoch(held_out: Any) -> None:
    report = fit(trainer(), validation_data=held_out, callbacks=[Notes(epochs=2)]).report
    assert report["steps_applied"] == [2 * EPOCH]
    assert [one["steps"] for one in report["evaluations"]] == ([EPOCH, 2 * EPOCH] if held_out else [])


def test_a_learning_rate_that_a_callback_sets_is_that_of_the_steps_after_it() -> None:
    slower = ps.callbacks.LearningRateScheduler(lambda epoch, rate: rate if epoch < 2 else 1e-30)
    still = fit(trainer(), callbacks=[slower])
    assert digest(still) != digest(fit(trainer()))
    expected, found = read_arrays(fit(trainer(), epochs=2).run_dir / "weights.safetensors"), still.run_dir
    for name, values in read_arrays(found / "weights.safetensors").items():
        np.testing.assert_allclose(values, expected[name], atol=1e-6)


@pytest.mark.parametrize(
    ("hook", "first"),
    [
        ("on_train_begin", 0),
        ("on_epoch_begin", 0),
        ("on_train_batch_end", 1),
        ("on_test_end", EPOCH),
        ("on_epoch_end", EPOCH),
    ],
)
def test_a_rate_set_in_a_hook_is_that_of_the_next_step_which_nobody_has_begun(hook: str, first: int) -> None:
    class Still(ps.callbacks.Callback):
        pass

    setattr(Still, hook, lambda self, *given: setattr(self.model, "learning_rate", 0))
    plateau = ps.callbacks.ReduceLROnPlateau("loss", patience=99)
    callbacks = [Still(), plateau]
    history = fit(trainer(ps.OneDeviceStrategy()), epochs=2, validation_data=(X, Y), callbacks=callbacks)
    rates = history.report["callbacks"]["learning_rates"]
    assert [(rate["first_step"], rate["learning_rate"]) for rate in rates] == [(first, 0.0)]
    assert history.history["learning_rate"] == [0.05 if first == EPOCH else 0.0, 0.0]
    moved = read_arrays(history.run_dir / "weights.safetensors")["w"] - Line().initial_variables()["w"]
    assert moved.any() == (first > 0)


def test_callbacks_hear_of_each_step_before_the_next_one_and_of_all_before_the_end() -> None:
    heard: list[Any] = []
    notes = ps.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: heard.append(batch), on_epoch_end=lambda epoch, logs: heard.append("end")
    )
    fit(trainer(ps.OneDeviceStrategy()), epochs=2, callbacks=[notes])
    assert heard == [*range(EPOCH), "end"] * 2


def test_a_full_disk_costs_records_and_the_end_waits_for_room(  # P21
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts = {"records": 0, "weights": 0}

    def full(what: str, call: Any) -> Any:
        def write(*given: Any) -> Any:
            attempts[what] += 1
            if what == "weights" and attempts[what] > 2:
                return call(*given)
            raise StoreFailed(f"{what} cannot be written: no space left on device")

        return write

    monkeypatch.setattr(training, "retry_pause_s", lambda failures: 0.0)
    monkeypatch.setattr(training, "save_weights", full("weights", training.save_weights))
    begun = training.begin_or_resume

    def begin_or_resume(*given: Any, **named: Any) -> Any:
        run = begun(*given, **named)
        monkeypatch.setattr(run.records, "save", full("records", run.records.save))
        return run

    monkeypatch.setattr(training, "begin_or_resume", begin_or_resume)
    slower = ps.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    report = fit(trainer(), validation_data=(X, Y), callbacks=[slower], verbose=1).report
    assert (report["state"], report["steps_applied"], attempts["weights"]) == ("done", [STEPS], 3)
    assert attempts["records"] > 0
    assert "the run's records cannot be written: records cannot be written: no space left" in capsys.readouterr().out


def test_the_best_weights_are_those_that_were_evaluated() -> None:
    kept = trainer()
    stop = ps.callbacks.EarlyStopping("val_loss", mode="max", patience=1, restore_best_weights=True)
    history = fit(kept, validation_data=(X, Y), callbacks=[stop])
    assert kept.evaluate((X, Y))["loss"] == pytest.approx(max(history.history["val_loss"]), rel=1e-6)


def test_the_loss_of_an_epoch_in_which_a_callback_raised_is_of_the_whole_epoch() -> None:
    class Cut(ps.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch in cuts:
                cuts.remove(batch)
                raise KeyError(batch)

    cuts: list[int] = []
    whole = fit(trainer(ps.OneDeviceStrategy()), epochs=2, callbacks=[Cut()])
    cuts += [3, 7]
    for _ in range(2):
        with pytest.raises(KeyError):
            fit(trainer(ps.OneDeviceStrategy()), epochs=2, callbacks=[Cut()], resume=True)
    resumed = fit(trainer(ps.OneDeviceStrategy()), epochs=2, callbacks=[Cut()], resume=True)
    assert resumed.history == whole.history


def test_what_a_callback_raises_ends_the_run_saved_and_is_raised_by_fit() -> None:
    class Raising(ps.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            raise KeyError(epoch)

    with pytest.raises(KeyError):
        fit(trainer(), callbacks=[Raising()])


def test_lines_are_printed_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    fit(trainer(), validation_data=(X, Y), verbose=1)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("step 48: held-out loss") for line in lines)
    assert lines[-1].startswith("done in ")


def test_a_worker_of_a_cluster_refuses_a_call_that_trains_here(script: Script) -> None:
    script.is_worker = True
    script.results, script._arguments = [], ["--name", "worker-0"]
    call = trainer()._call(module.source_of((X, Y), None, 0.0, 0), {"epochs": 1, "batch_size": 8}, 1, [])
    with pytest.raises(ConfigurationError, match="this call trains in its own process, by MirroredStrategy"):
        backends.Here(ps.MirroredStrategy(4)).work(call)


def test_a_metric_that_is_no_mean_is_that_of_all_examples_wherever_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def far(outputs: Any, targets: Any) -> Any:
        return abs(outputs[:, 0]) > 1

    def made() -> ps.Sequential:
        metrics = [ps.metrics.AUC(from_logits=True), "binary_accuracy", far]
        dense = [ps.layers.Dense(1)]
        return ps.Sequential(dense, input_shape=(3,), loss="sigmoid_cross_entropy", metrics=metrics)

    monkeypatch.setattr(computing, "EVALUATION_EXAMPLES", 7)
    rng = np.random.default_rng(5)
    x = rng.normal(size=(120, 3)).astype(np.float32)
    y = (x @ [1.0, -2.0, 0.5] + rng.normal(size=120) > 0).astype(np.float32)
    mine = ps.Trainer(made(), ps.Adam(0.05), ps.OneDeviceStrategy(), seed=3)
    stop = ps.callbacks.EarlyStopping("val_auc", patience=9, restore_best_weights=True)
    validation = x[:50], y[:50]
    history = mine.fit((x, y), epochs=4, batch_size=8, verbose=0, validation_data=validation, callbacks=[stop])
    told = history.history["val_auc"]
    assert stop.best == max(told) > told[0]
    figures = [mine.evaluate(validation, batch_size=size) for size in (1, 9, 50)]
    assert figures[0]["auc"] == figures[1]["auc"] == figures[2]["auc"] == max(told)
    logits = mine.predict(validation[0])[:, 0]
    apart = logits[y[:50] == 1][:, None] - logits[y[:50] == 0]
    assert figures[0]["auc"] == pytest.approx(np.mean(apart > 0), abs=0.01)
    assert figures[0]["far"] == pytest.approx(np.mean(abs(logits) > 1))
    assert figures[0]["binary_accuracy"] == np.mean((logits > 0) == (y[:50] == 1))


def test_a_metric_that_does_not_fit_the_model_ends_the_job_with_a_sentence() -> None:
    model = ps.Sequential([ps.layers.Dense(10)], input_shape=(3,), loss="softmax_cross_entropy", metrics=["auc"])
    data = np.zeros((16, 3), np.float32), np.arange(16) % 10
    mine = ps.Trainer(model, ps.Adam(0.05), ps.OneDeviceStrategy(), seed=3)
    says = r"metric 'auc' is of one output an example for two classes, found outputs of shape \(4, 10\) for targets"
    with pytest.raises(JobFailed, match=says):
        mine.fit(data, epochs=1, batch_size=4, verbose=0, validation_split=0.25)
    with pytest.raises(ConfigurationError, match="metric 'auc' is of one output an example"):
        mine.evaluate(data)
