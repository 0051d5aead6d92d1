"""EarlyStopping, ReduceLROnPlateau, ModelCheckpoint and CSVLogger, each over the figures of some epochs."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parashard.callbacks import (
    Callback,
    CSVLogger,
    EarlyStopping,
    LearningRateScheduler,
    ModelCheckpoint,
    ReduceLROnPlateau,
    TensorBoard,
    TerminateOnNaN,
    Training,
)
from parashard.callbacks.deciding import Monitor
from parashard.callbacks.running import Callbacks, Milestone
from parashard.errors import ConfigurationError


def run(
    callback: Callback,
    values: Sequence[float],
    folder: Path,
    name: str = "loss",
    crash_after: int | None = None,
    judged: Sequence[int] | None = None,
) -> Callbacks:
    """Have epochs with these figures, until the callback stops; after a crash another object goes on by JSON."""
    it = _begun(callback, folder)
    for epoch, value in enumerate(values):
        if epoch == crash_after:
            state = json.loads(json.dumps(it.state()))
            it = _begun(type(callback)(**_GIVEN[callback]), folder, state)
        it.reached(Milestone(epoch + 1, epoch, [1.0], {name: value}, f"{value}", judged[epoch] if judged else 0))
        if it.training.stop_training:
            break
    it.end()
    return it


def _begun(callback: Callback, folder: Path, state: Any = None) -> Callbacks:
    training = Training(0.1, folder)
    training.copy_weights = lambda name, path: path.write_text(name) and None
    it = Callbacks([callback], training, None, steps_per_epoch=1, epochs=99)
    it.begin(state)
    if state is None:
        it.reached(Milestone(0))
    return it


_GIVEN: dict[Callback, dict[str, Any]] = {}


def made(kind: type[Callback], **given: Any) -> Callback:
    callback = kind(**given)
    _GIVEN[callback] = given
    return callback


@pytest.mark.parametrize("crash_after", [None, 2])
@pytest.mark.parametrize(
    ("given", "values", "epochs"),
    [
        ({"patience": 2}, [3, 2, 2, 2, 1], 4),
        ({"patience": 0}, [3, 2, 2, 1], 3),
        ({"patience": 1, "min_delta": 0.5}, [3, 2.8, 2.6], 2),
        ({"patience": 1, "mode": "max"}, [1, 2, 3, 2, 9], 4),
        ({"monitor": "val_accuracy", "patience": 1}, [1, 2, 3, 2, 9], 4),
        ({"monitor": "val_f1_score", "patience": 1}, [1, 2, 3, 2, 9], 4),
        ({"patience": 2, "baseline": 1.0}, [3, 2, 1.5], 2),
        ({"patience": 1, "start_from_epoch": 2}, [1, 9, 5, 6, 7], 4),
        ({"patience": 1}, [math.nan, math.nan, 1], 2),
    ],
)
def test_early_stopping_stops_after_its_patience(
    tmp_path: Path, given: dict[str, Any], values: list[float], epochs: int, crash_after: int | None
) -> None:
    callback = made(EarlyStopping, **given)
    name = given.get("monitor", "val_loss").removeprefix("val_")
    it = run(callback, values, tmp_path, name, crash_after)
    assert len(it.history.epoch) == epochs


@pytest.mark.parametrize("crash_after", [None, 2])
def test_epochs_whose_evaluations_judged_the_same_weights_count_once(tmp_path: Path, crash_after: int | None) -> None:
    judged = [1, 4, 4, 4, 5, 6]
    callback = made(EarlyStopping, patience=2)
    it = run(callback, [3, 2, 2, 2, 2, 2], tmp_path, crash_after=crash_after, judged=judged)
    assert it.history.history["val_steps"] == judged
    assert (it.history.epoch[-1], it.training.stop_training) == (5, True)
    reducing = made(ReduceLROnPlateau, patience=1)
    assert run(reducing, [3, 2, 2, 2], tmp_path, judged=judged).training.learning_rate == 0.1


@pytest.mark.parametrize("crash_after", [None, 2])
def test_early_stopping_has_the_weights_of_the_best_value_restored(tmp_path: Path, crash_after: int | None) -> None:
    callback = made(EarlyStopping, patience=2, restore_best_weights=True)
    it = run(callback, [3, 1, 2, 2], tmp_path, crash_after=crash_after)
    assert (it.training.restored, it.held_weights) == ("1", {"1"})


def test_where_the_best_weights_could_not_be_stored_the_best_that_were_come_back_and_a_warning_says_so(
    tmp_path: Path,
) -> None:
    it = _begun(EarlyStopping(patience=9, restore_best_weights=True), tmp_path)
    for epoch, (value, stored) in enumerate([(5, "a"), (1, ""), (4, "b"), (6, "c")]):
        it.reached(Milestone(epoch + 1, epoch, [1.0], {"loss": value}, stored))
    with pytest.warns(UserWarning, match="the weights of epoch 2, the best, could not be stored; those of epoch 3 are"):
        it.end()
    assert it.training.restored == "b"


def test_where_the_best_weights_could_not_be_stored_the_final_ones_stay_if_they_are_better_than_those_that_were(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    for values, said in (([5, 2, 1], 0), ([5, 1, 2], 1)):
        it = _begun(EarlyStopping(patience=9, restore_best_weights=True), tmp_path)
        for epoch, value in enumerate(values):
            it.reached(Milestone(epoch + 1, epoch, [1.0], {"loss": value}, "" if epoch else "a"))
        it.end()
        assert (it.training.restored, len(recwarn)) == (None, said)


def test_of_two_callbacks_that_restore_weights_the_last_one_wins(tmp_path: Path) -> None:
    for modes in (("min", "max"), ("max", "min")):
        stopping = [EarlyStopping(mode=mode, patience=9, restore_best_weights=True) for mode in modes]
        it = Callbacks(stopping, Training(0.1, tmp_path), None, steps_per_epoch=1, epochs=99)
        it.begin()
        for epoch, value in enumerate([2.0, 1.0, 3.0]):
            it.reached(Milestone(epoch + 1, epoch, [1.0], {"loss": value}, f"{value}"))
        assert it.held_weights == {"1.0", "3.0"}
        it.end()
        assert it.training.restored == {"min": "1.0", "max": "3.0"}[modes[1]]


def test_a_figure_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"monitor 'val_los' is not among the figures: loss, val_loss"):
        run(EarlyStopping("val_los", mode="min"), [1], tmp_path)


@pytest.mark.parametrize("crash_after", [None, 2])
def test_a_plateau_lowers_the_rate_and_not_below_the_least(tmp_path: Path, crash_after: int | None) -> None:
    callback = made(ReduceLROnPlateau, patience=2, factor=0.5, cooldown=1, min_lr=0.03)
    it = run(callback, [1, 1, 1, 1, 1, 1, 1, 1], tmp_path, crash_after=crash_after)
    assert it.history.history["learning_rate"] == [0.1, 0.1, 0.1, 0.05, 0.05, 0.03, 0.03, 0.03]


def test_a_schedule_is_asked_before_each_epoch(tmp_path: Path) -> None:
    it = run(LearningRateScheduler(lambda epoch, rate: rate if epoch < 1 else rate / 2), [1, 1, 1], tmp_path)
    assert it.history.history["learning_rate"] == [0.1, 0.05, 0.025]


def test_a_schedule_may_be_of_the_epoch_alone(tmp_path: Path) -> None:
    it = run(LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch)), [1, 1], tmp_path)
    assert it.history.history["learning_rate"] == [0.1, 0.05]


@pytest.mark.parametrize("schedule", [None, 0.1, lambda: 0.1, lambda a, b, c: 0.1])
def test_what_is_no_schedule_is_refused_at_once(schedule: Any) -> None:
    with pytest.raises(ConfigurationError, match="no function of epoch and rate, or of the epoch"):
        LearningRateScheduler(schedule)


@pytest.mark.parametrize("crash_after", [None, 2])
def test_a_checkpoint_keeps_what_is_better_than_all_before(tmp_path: Path, crash_after: int | None) -> None:
    callback = made(ModelCheckpoint, filepath=tmp_path / "{epoch:02d}-{val_loss:.1f}.safetensors", save_best_only=True)
    run(callback, [3, 1, 2, 0.5], tmp_path, crash_after=crash_after)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "01-3.0.safetensors": "3",
        "02-1.0.safetensors": "1",
        "04-0.5.safetensors": "0.5",
    }


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"filepath": "a.keras"}, "must end in .safetensors"),
        ({"filepath": "a.safetensors", "save_freq": 10}, "save_freq is 10"),
        ({"filepath": "a.safetensors", "save_weights_only": False}, "weights only"),
        ({"filepath": "a.safetensors", "mode": "best"}, "allowed: auto, min, max"),
    ],
)
def test_a_checkpoint_that_cannot_be_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        ModelCheckpoint(**given)


def test_a_name_that_cannot_be_filled_in_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be filled in \('val_acc'\); there are epoch, loss, val_loss"):
        run(ModelCheckpoint(tmp_path / "{val_acc}.safetensors"), [1], tmp_path)


@pytest.mark.parametrize("crash_after", [None, 1])
def test_a_line_of_figures_for_each_epoch(tmp_path: Path, crash_after: int | None) -> None:
    path = tmp_path / "log.csv"
    path.write_text("of an earlier run\n")
    callback = made(CSVLogger, filename=path, separator=";")
    run(callback, [3, 1], tmp_path, crash_after=crash_after)
    assert path.read_text() == "epoch;loss;val_loss\n0;1.0;3\n1;1.0;1\n"
    run(CSVLogger(path, ";", append=True), [9], tmp_path)
    assert path.read_text().splitlines()[2:] == ["1;1.0;1", "0;1.0;9"]


RISING = [
    *("accuracy", "acc", "auc", "precision", "recall", "f1", "f1_score", "fbeta_score", "f2_score", "r2", "r2_score"),
    *("sparse_top_k_categorical_accuracy", "top_5", "precision_at_recall", "recall_at_5", "cosine_similarity"),
    *("mean_io_u", "iou", "true_positives", "AUC"),
]
FALLING = [
    *("loss", "loss_of_the_head", "mae", "mse", "rmse", "error", "top_5_error", "error_rate", "mean_absolute_error"),
    *("mean_squared_logarithmic_error", "binary_crossentropy", "hinge", "kl_divergence", "perplexity"),
    "false_negatives",
]


@pytest.mark.parametrize(("name", "rises"), [*((name, True) for name in RISING), *((name, False) for name in FALLING)])
def test_what_is_better_goes_by_the_name(name: str, rises: bool) -> None:
    for figure in (name, f"val_{name}", f"{name}_1", f"val_head_{name}_12"):
        monitor = Monitor(EarlyStopping(), figure)
        assert [monitor.better(2.0, 1.0), monitor.better(1.0, 2.0)] == [rises, not rises]


@pytest.mark.parametrize("name", ["val_least", "inaccuracy", "val_score", "terror", "val_steps", "accuracy_x", ""])
def test_a_name_that_does_not_tell_what_is_better_needs_a_mode(name: str) -> None:
    for make in (
        EarlyStopping,
        ReduceLROnPlateau,
        lambda monitor, **given: ModelCheckpoint("a.safetensors", monitor=monitor, save_best_only=True, **given),
    ):
        with pytest.raises(ConfigurationError) as refused:
            make(name)
        assert re.fullmatch(
            f"(EarlyStopping|ReduceLROnPlateau|ModelCheckpoint): the name of monitor '{name}' does not tell what is "
            'better: write mode="max" where a higher value is, or mode="min"',
            refused.value.message,
        )
        assert make(name, mode="max")
    assert ModelCheckpoint("a.safetensors", monitor=name), "it compares nothing"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: EarlyStopping(monitor=None), "EarlyStopping: monitor is the name of a figure, .*, found None"),
        (lambda: EarlyStopping(min_delta=math.nan), "EarlyStopping: min_delta must be a finite number, found nan"),
        (lambda: EarlyStopping(baseline=math.inf), "EarlyStopping: baseline must be a finite number, found inf"),
        (lambda: ReduceLROnPlateau(min_lr=math.nan), "ReduceLROnPlateau: min_lr must be a finite number, found nan"),
        (lambda: EarlyStopping(patience="3"), "EarlyStopping: patience is a number of epochs, 0 or more, found '3'"),
        (lambda: EarlyStopping(patience=-3), "EarlyStopping: patience is a number of epochs, 0 or more, found -3"),
        (lambda: ReduceLROnPlateau(patience=math.nan), "ReduceLROnPlateau: patience is .*, found nan"),
        (lambda: ReduceLROnPlateau(factor="a"), "ReduceLROnPlateau: factor must be more than 0 .*, found 'a'"),
        (lambda: ReduceLROnPlateau(factor=None), "ReduceLROnPlateau: factor must be more than 0 .*, found None"),
        (lambda: ReduceLROnPlateau(factor=1), "ReduceLROnPlateau: factor must be more than 0 .*, found 1"),
    ],
)
def test_an_argument_that_cannot_be_is_refused_by_name(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{says}$"):
        make()


def test_numbers_of_numpy_are_numbers() -> None:
    assert ReduceLROnPlateau(factor=np.float32(0.5), patience=np.int64(2))
    assert EarlyStopping(patience=math.inf)


def test_tensorboard_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigurationError, match=r"pip install '.*\[tensorboard\]'"):
        TensorBoard()


def test_a_line_written_just_before_a_crash_comes_once(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    it = _begun(CSVLogger(path), tmp_path)
    it.reached(Milestone(1, 0, [0.5]))
    state = json.loads(json.dumps(it.state()))
    it.reached(Milestone(2, 1, [0.25]))  # and then it dies
    _begun(CSVLogger(path), tmp_path, state).reached(Milestone(2, 1, [0.25]))
    assert path.read_text() == "epoch,loss\n0,0.5\n1,0.25\n"


def test_a_full_disk_keeps_no_callback_from_going_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    path, keeping = tmp_path / "log.csv", ModelCheckpoint(tmp_path / "{epoch}.safetensors", save_best_only=True)
    it, kept = _begun(CSVLogger(path), tmp_path), _begun(keeping, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        kept.training.copy_weights = full
        for each, what in ((it, "CSVLogger"), (kept, "ModelCheckpoint")):
            with pytest.warns(UserWarning, match=rf"{what}: .* no space left on device"):
                each.reached(Milestone(1, 0, [0.5], {"loss": 1.0}, "a"))
    kept.training.copy_weights = lambda name, path: path.write_text(name) and None
    for each in (it, kept):
        each.reached(Milestone(2, 1, [0.25], {"loss": 2.0}, "b"))
    assert path.read_text() == "epoch,loss,val_loss\n0,0.5,1.0\n1,0.25,2.0\n"
    assert (tmp_path / "2.safetensors").read_text() == "b"  # the best that could be kept


@pytest.mark.parametrize(("losses", "epochs"), [([1.0, math.nan, 1.0], 2), ([math.inf, 1.0], 1), ([1.0, 2.0], 2)])
def test_a_loss_that_is_not_finite_ends_the_training(tmp_path: Path, losses: list[float], epochs: int) -> None:
    it = _begun(TerminateOnNaN(), tmp_path)
    for epoch, loss in enumerate(losses):
        if not it.training.stop_training:
            it.reached(Milestone(epoch + 1, epoch, [loss]))
    assert len(it.history.epoch) == epochs
    assert ("TerminateOnNaN: the loss of epoch" in it.training.stop_reason) == (not math.isfinite(losses[epochs - 1]))


def test_a_tensorboard_that_is_to_write_more_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", type(sys)("tensorboard"))
    TensorBoard(tmp_path, histogram_freq=0, update_freq="epoch", profile_batch=0, write_graph=False)
    for given in ({"histogram_freq": 1}, {"update_freq": 100}, {"write_graph": True}, {"folder": "x"}):
        with pytest.raises(ConfigurationError, match=f"nothing else: leave out {next(iter(given))}="):
            TensorBoard(tmp_path, **given)
