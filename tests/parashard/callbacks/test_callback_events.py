"""The order in which hooks are called, what callbacks decide, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from parashard.callbacks import Callback, EarlyStopping, LambdaCallback, ModelCheckpoint, ReduceLROnPlateau, Training
from parashard.callbacks.base import HOOKS
from parashard.callbacks.events import Decision, Milestone, StepEnd
from parashard.callbacks.running import Callbacks, checked, listed
from parashard.errors import ConfigurationError


def running(*callbacks: Callback, epochs: int = 3) -> Callbacks:
    return Callbacks(callbacks, Training(0.1, Path()), None, steps_per_epoch=4, epochs=epochs)


def recorder(calls: list[tuple[Any, ...]]) -> LambdaCallback:
    def hook(name: str) -> Any:
        return lambda *given: calls.append((name.removeprefix("on_"), *given))

    return LambdaCallback(**{name: hook(name) for name in HOOKS})


def test_hooks_come_in_the_order_that_keras_has() -> None:
    calls: list[tuple[Any, ...]] = []
    it = running(recorder(calls), epochs=2)
    it.begin()
    it.begin_epoch()
    it.steps_ended([StepEnd(1, 0.5), StepEnd(5, float("nan"))])
    it.reached(Milestone(4, 0, [0.25], {"loss": 0.75}))
    it.reached(Milestone(8, 1, [float("nan")]))
    it.end()
    assert calls == [
        ("train_begin", {}),
        ("epoch_begin", 0, {}),
        ("train_batch_end", 1, {"loss": 0.5}),
        ("train_batch_end", 1, {}),
        ("test_begin", {}),
        ("test_end", {"loss": 0.75}),
        ("epoch_end", 0, {"loss": 0.25, "val_loss": 0.75}),
        ("epoch_begin", 1, {}),
        ("epoch_end", 1, {}),
        ("train_end", {}),
    ]
    assert it.history.history == {"loss": [0.25], "val_loss": [0.75]}


def test_epochs_that_end_at_once_are_told_one_by_one_and_the_last_has_the_evaluation() -> None:
    calls: list[tuple[Any, ...]] = []
    it = running(recorder(calls))
    it.begin_epoch()
    it.reached(Milestone(8, 0, [0.5, 0.25], {"least": 1.0}))
    assert [call for call in calls if "epoch" in call[0]] == [
        ("epoch_begin", 0, {}),
        ("epoch_end", 0, {"loss": 0.5}),
        ("epoch_begin", 1, {}),
        ("epoch_end", 1, {"loss": 0.25, "val_least": 1.0}),
        ("epoch_begin", 2, {}),
    ]


class Deciding(Callback):
    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        self.model.learning_rate /= 2
        self.model.stop_training = epoch == 1


def test_what_they_set_is_what_they_decided() -> None:
    it = running(Deciding())
    assert it.begin_epoch() == Decision()
    assert it.reached(Milestone(4, 0, [0.5])) == Decision("", 0.05)
    assert it.reached(Milestone(8, 1, [0.5])) == Decision("callbacks ended the training", 0.025)


def test_after_a_crash_they_go_on_where_they_were() -> None:
    calls: list[tuple[Any, ...]] = []
    it = running(Deciding())
    it.begin()
    it.begin_epoch()
    it.reached(Milestone(4, 0, [0.5]))
    again = running(recorder(calls))
    again.begin(it.state())
    assert again.begin_epoch() == Decision()
    assert calls == [("train_begin", {})]  # epoch 1 had begun
    assert (again.training.learning_rate, again.history.history) == (0.05, {"loss": [0.5]})


def test_hooks_that_cannot_be_true_are_refused_by_name() -> None:
    class Early(Callback):
        def on_train_batch_begin(self, batch: int, logs: dict[str, float]) -> None: ...

    with pytest.raises(ConfigurationError, match=r"Early\.on_train_batch_begin: steps begin in workers"):
        checked([Early()], has_evaluations=True)
    with pytest.raises(ConfigurationError, match="on_train_batch_begin: steps begin in workers"):
        LambdaCallback(on_train_batch_begin=print)
    with pytest.raises(ConfigurationError, match="on_epoch is no hook"):
        LambdaCallback(on_epoch=print)


def test_what_is_no_callback_or_lacks_evaluations_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"found the class test_callback_events\.Deciding"):
        checked([Deciding], has_evaluations=True)  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="ModelCheckpoint keeps weights that were evaluated: give fit"):
        checked([ModelCheckpoint("a.safetensors")], has_evaluations=False)


@pytest.mark.parametrize("callback", [EarlyStopping(), ReduceLROnPlateau()])
def test_a_figure_of_evaluations_that_there_are_not_is_refused(callback: Callback) -> None:
    with pytest.raises(ConfigurationError, match="monitors 'val_loss', and nothing is evaluated: give fit"):
        checked([callback], has_evaluations=False)
    assert checked([callback], has_evaluations=True) == [callback]
    assert len(checked([EarlyStopping("loss"), Callback()], has_evaluations=False)) == 2


def test_one_callback_and_none_are_taken_as_keras_takes_them() -> None:
    one = Callback()
    assert [listed(None), listed(one), listed([one])] == [(), [one], [one]]


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf"), None, "0.1", True, [1, 2]])
def test_a_learning_rate_is_a_positive_number(rate: Any) -> None:
    training = Training(0.1, Path())
    with pytest.raises(ConfigurationError, match=f"finite number of more than 0, found {re.escape(repr(rate))}"):
        training.learning_rate = rate
    assert training.learning_rate == 0.1


def test_weights_are_at_hand_in_the_event_of_their_evaluation_only(tmp_path: Path) -> None:
    seen = []

    class Keeping(Callback):
        uses_weights = True

        def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
            seen.append(self.model.has_weights)
            if self.model.has_weights:
                self.model.save_weights(tmp_path / "deep" / "kept")

    it = running(Keeping())
    it.reached(Milestone(4, 0, [0.5], {}, lambda path: path.write_bytes(b"w") and None))
    it.reached(Milestone(8, 1, [0.5]))
    assert (seen, (tmp_path / "deep" / "kept").read_text()) == ([True, False], "w")
    with pytest.raises(ConfigurationError, match="no weights are at hand"):
        it.training.save_weights(tmp_path / "late")
