"""The order in which hooks are called, what callbacks decide, and what is refused (P38)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from parashard.callbacks import (
    Callback,
    EarlyStopping,
    History,
    LambdaCallback,
    LearningRateScheduler,
    ModelCheckpoint,
    ReduceLROnPlateau,
    Training,
)
from parashard.callbacks.base import HOOKS
from parashard.callbacks.running import CallbackDecision, Callbacks, Milestone, StepEnd, checked, listed
from parashard.errors import ConfigurationError

NAN = float("nan")  # one object, so that equality finds it


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
    it.reached(Milestone(0))
    it.steps_ended([StepEnd(1, 0.5), StepEnd(5, NAN)])
    it.reached(Milestone(4, 0, [0.25], {"loss": 0.75}))
    it.reached(Milestone(8, 1, [NAN]))
    it.end()
    assert calls == [
        ("train_begin", {}),
        ("epoch_begin", 0, {}),
        ("train_batch_end", 1, {"loss": 0.5}),
        ("train_batch_end", 1, {"loss": NAN}),
        ("test_begin", {}),
        ("test_end", {"loss": 0.75}),
        ("epoch_end", 0, {"loss": 0.25, "val_loss": 0.75}),
        ("epoch_begin", 1, {}),
        ("epoch_end", 1, {"loss": NAN}),
        ("train_end", {"loss": NAN}),
    ]
    assert it.history.history == {"loss": [0.25, NAN], "val_loss": [0.75]}


def test_epochs_that_end_at_once_are_told_one_by_one_and_each_has_the_evaluation_of_their_weights() -> None:
    calls: list[tuple[Any, ...]] = []
    it = running(recorder(calls))
    it.reached(Milestone(0))
    it.reached(Milestone(8, 0, [0.5, 0.25], {"least": 1.0}))
    assert [call for call in calls if "epoch" in call[0]] == [
        ("epoch_begin", 0, {}),
        ("epoch_end", 0, {"loss": 0.5, "val_least": 1.0}),
        ("epoch_begin", 1, {}),
        ("epoch_end", 1, {"loss": 0.25, "val_least": 1.0}),
        ("epoch_begin", 2, {}),
    ]


class Deciding(Callback):
    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        self.model.learning_rate /= 2
        self.model.stop_training = epoch == 1


def test_patience_counts_once_for_epochs_that_end_with_the_same_weights() -> None:
    stop = EarlyStopping(patience=2)
    it = running(stop, epochs=9)
    it.begin()
    it.reached(Milestone(0))
    it.reached(Milestone(2, 0, [0.5] * 3, {"loss": 1.0}))
    assert (stop.wait, stop.best_epoch) == (0, 2)
    assert it.reached(Milestone(4, 3, [0.5] * 3, {"loss": 1.0})).stop_reason == ""
    assert it.history.history["val_loss"] == [1.0] * 6 == [2 * loss for loss in it.history.history["loss"]]


def test_what_they_set_is_what_they_decided() -> None:
    it = running(Deciding())
    assert it.reached(Milestone(0)) == CallbackDecision()
    assert it.reached(Milestone(4, 0, [0.5])) == CallbackDecision("", 0.05, 1)
    assert it.reached(Milestone(8, 1, [0.5])) == CallbackDecision("callbacks ended the training", 0.025, 2)


@pytest.mark.parametrize("hook", ["on_train_begin", "on_epoch_begin", "on_test_end", "on_epoch_end"])
def test_a_rate_that_is_set_in_any_hook_is_decided_with_that_event(hook: str) -> None:
    it = running(LambdaCallback(**{hook: lambda *given: setattr(it.training, "learning_rate", 0.0)}))
    it.begin()
    begun = it.reached(Milestone(0))
    ended = it.reached(Milestone(4, 0, [0.5], {"loss": 1.0}))
    decided = CallbackDecision("", 0.0, 1)
    assert [begun, ended] == (
        [decided, CallbackDecision(number=1)] if "begin" in hook else [CallbackDecision(), decided]
    )


def test_a_rate_that_is_set_after_a_step_is_decided_then_and_one_at_the_end_is_refused() -> None:
    def set_it(*given: Any) -> None:
        it.training.learning_rate = 0.5

    it = running(LambdaCallback(on_train_batch_end=set_it, on_train_end=set_it))
    it.reached(Milestone(0))
    assert it.steps_ended([StepEnd(0, 1.0)]) == CallbackDecision("", 0.5, 1, between=True)
    assert it.steps_ended([StepEnd(1, 1.0)]) == CallbackDecision(number=1)
    with pytest.raises(ConfigurationError, match="set in on_train_end, when no step is left"):
        it.end()


def halving(*also: Callback) -> Callbacks:
    return running(LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch else rate), *also, epochs=4)


def test_a_schedule_is_decided_for_all_epochs_before_the_first_one() -> None:
    it = halving()
    it.begin()
    assert it.reached(Milestone(0)) == CallbackDecision("", 0.1, 1, planned=((1, 0.05), (2, 0.025), (3, 0.0125)))
    assert [it.reached(Milestone(4 * n + 4, n, [0.5])) for n in range(4)] == [CallbackDecision(number=1)] * 4
    assert it.training.learning_rate == 0.0125


def test_a_rate_that_another_callback_sets_changes_what_is_known_from_there_on() -> None:
    plateau = ReduceLROnPlateau("loss", factor=0.5, patience=1)
    it = halving(plateau)
    it.begin()
    it.reached(Milestone(0))
    assert it.reached(Milestone(4, 0, [0.5])) == CallbackDecision(number=1)
    assert it.reached(Milestone(8, 1, [0.5])) == CallbackDecision("", 0.0125, 2, planned=((3, 0.00625),))
    of_the_epoch = running(LearningRateScheduler(lambda epoch: 0.5**epoch), ReduceLROnPlateau("loss", patience=0))
    of_the_epoch.begin()
    of_the_epoch.reached(Milestone(0))
    assert [of_the_epoch.reached(Milestone(4 * n + 4, n, [0.5])) for n in range(2)] == [CallbackDecision(number=1)] * 2


def test_a_stop_does_not_change_the_rate_of_epochs_that_do_not_begin() -> None:
    it = halving(LambdaCallback(on_epoch_end=lambda *given: setattr(it.training, "stop_training", True)))
    it.begin()
    it.reached(Milestone(0))
    assert it.reached(Milestone(4, 0, [0.5])) == CallbackDecision("callbacks ended the training", number=1)
    assert it.training.learning_rate == 0.1


def test_after_a_crash_a_schedule_is_not_decided_again() -> None:
    it = halving()
    it.begin()
    it.reached(Milestone(0))
    again = halving()
    again.begin(json.loads(json.dumps(it.state())))
    assert again.changed_rate() == CallbackDecision(number=1)
    assert again.reached(Milestone(4, 0, [0.5])) == CallbackDecision(number=1)
    earlier = {name: value for name, value in it.state().items() if name not in ("rates", "is_planned")}
    late = halving()
    late.begin({**earlier, "rate": 0.1})  # of a version that decided at each epoch
    assert late.changed_rate() == CallbackDecision("", 0.1, 2, True, planned=((1, 0.05), (2, 0.025), (3, 0.0125)))


def test_a_schedule_that_is_no_function_is_refused_unless_it_is_called_once_an_epoch() -> None:
    counted = iter([1.0, 0.5, 0.25, 0.125])
    it = running(LearningRateScheduler(lambda epoch: next(counted)))
    with pytest.raises(ConfigurationError, match=r"0\.5 and then 0\.25 for epoch 1.*in_advance=False"):
        it.reached(Milestone(0))
    late = iter([1.0, 0.5, 0.25])
    it = running(LearningRateScheduler(lambda epoch: next(late), in_advance=False))
    decisions = [it.reached(milestone) for milestone in (Milestone(0), Milestone(4, 0, [0.5]), Milestone(8, 1, [0.5]))]
    assert decisions == [CallbackDecision("", rate, number + 1) for number, rate in enumerate((1.0, 0.5, 0.25))]
    assert it.ahead == 0


def test_a_schedule_that_depends_on_what_happens_meanwhile_is_warned_of_and_decided_late() -> None:
    figures = {"loss": 1.0}
    it = running(LearningRateScheduler(lambda epoch, rate: rate * figures["loss"]), epochs=4)
    it.reached(Milestone(0))
    figures["loss"] = 0.5
    with pytest.warns(
        UserWarning, match=r"gave 0\.1 for epoch 1 before the training and gives 0\.05 now.*in_advance=False"
    ):
        decided = it.reached(Milestone(4, 0, [0.5]))
    assert decided == CallbackDecision("", 0.05, 1, planned=((2, 0.025), (3, 0.0125)))
    assert it.reached(Milestone(8, 1, [0.5])) == CallbackDecision(number=1)


def test_a_rate_that_is_none_is_refused_before_the_first_step() -> None:
    it = running(LearningRateScheduler(lambda epoch: 1.0 - epoch))
    with pytest.raises(ConfigurationError, match=r"finite number, 0 or more, found -1\.0"):
        it.reached(Milestone(0))


class Own(LearningRateScheduler):
    def on_epoch_begin(self, epoch: int, logs: dict[str, float]) -> None:
        super().on_epoch_begin(epoch, logs)


class Watching(Callback):
    decides = False


SCHEDULE = LearningRateScheduler(lambda epoch: 0.5)


@pytest.mark.parametrize(
    ("callbacks", "ahead", "told_not_to_wait"),
    [
        ([], None, None),
        ([Watching(), History()], None, None),
        ([SCHEDULE], None, None),
        ([ModelCheckpoint("a.safetensors")], None, None),
        ([ModelCheckpoint("a.safetensors", save_best_only=True)], 0, None),
        ([SCHEDULE, EarlyStopping("loss")], 0, 1),
        ([ReduceLROnPlateau("loss")], 0, 1),
        ([Callback()], 0, 1),
        ([Own(lambda epoch: 0.5)], 0, 1),
    ],
)
def test_training_waits_for_callbacks_that_may_decide_or_as_it_is_told(
    callbacks: list[Callback], ahead: int | None, told_not_to_wait: int | None
) -> None:
    found = [
        Callbacks(callbacks, Training(0.1, Path()), None, steps_per_epoch=4, epochs=3, wait=wait).ahead
        for wait in (None, False, True)
    ]
    assert found == [ahead, told_not_to_wait, 0]


@pytest.mark.parametrize(("name", "value"), [("learning_rate", 0.5), ("stop_training", True)])
def test_a_decision_of_a_callback_that_promised_none_is_refused(name: str, value: float) -> None:
    class Promising(Callback):
        decides = False

        def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
            setattr(self.model, name, value)

    with pytest.raises(ConfigurationError, match=f"a callback set {name}, but every callback"):
        running(Promising()).reached(Milestone(4, 0, [0.5]))


def test_logs_have_the_rate_that_the_last_step_of_the_epoch_had() -> None:
    it = running(ReduceLROnPlateau("loss", patience=0))
    it.begin()
    it.reached(Milestone(0))
    it.training.learning_rate = 0.5
    it.reached(Milestone(4, 0, [0.5], learning_rates=[float("nan")]))
    it.reached(Milestone(8, 1, [0.5], learning_rates=[0.25]))
    assert it.history.history["learning_rate"] == [0.1, 0.25]


def test_after_a_crash_they_go_on_where_they_were() -> None:
    calls: list[tuple[Any, ...]] = []
    it = running(Deciding())
    it.begin()
    it.reached(Milestone(0))
    it.reached(Milestone(4, 0, [0.5]))
    again = running(recorder(calls))
    again.begin(it.state())
    assert again.changed_rate() == CallbackDecision(number=1)
    assert calls == [("train_begin", {})]  # epoch 1 had begun
    assert (again.training.learning_rate, again.history.history) == (0.05, {"loss": [0.5]})


class Best(EarlyStopping):
    """One of a user's own."""


def test_after_a_crash_in_the_midst_of_an_event_each_call_of_a_users_hook_that_had_not_begun_is_made() -> None:
    event, records, told = Milestone(4, 0, [0.5], {"loss": 0.25}), list[dict[str, Any]](), list[str]()

    def added(epoch: int, logs: dict[str, float]) -> None:
        told.append("added")
        logs["added"] = 1.0

    def kill(epoch: int, logs: dict[str, float]) -> None:
        told.append("kill")
        raise SystemExit

    def last(epoch: int, logs: dict[str, float]) -> None:
        told.append(f"last {sorted(logs)}")

    def made() -> tuple[Callbacks, Best]:
        own, hooks = Best(patience=9), [LambdaCallback(on_epoch_end=hook) for hook in (added, kill, last)]
        return running(own, EarlyStopping(patience=9), *hooks), own

    it, _ = made()
    it.begin()
    it.reached(Milestone(0))
    with pytest.raises(SystemExit):
        it.reached(event, lambda: records.append(json.loads(json.dumps(it.state()))))
    again, own = made()
    again.begin(records[-1])
    assert again.state()["calls"] == records[-1]["calls"]  # until the event is over
    again.reached(event)
    assert told == ["added", "kill", "last ['added', 'loss', 'val_loss']"]
    assert again.history.history == {"loss": [0.5], "val_loss": [0.25], "added": [1.0]}
    assert own.best == 0.25
    assert again.state()["calls"] == 0


def test_a_history_of_ones_own_begins_anew_with_each_fit_and_the_end_has_the_last_figures() -> None:
    own, ends = History(), list[dict[str, float]]()
    for _ in range(2):
        it = running(own, LambdaCallback(on_train_end=ends.append))
        it.begin()
        it.reached(Milestone(4, 0, [0.5], {"loss": 0.25}))
        it.end()
    assert own.history == {"loss": [0.5], "val_loss": [0.25]}
    assert ends == [{"loss": 0.5, "val_loss": 0.25}] * 2


def test_hooks_that_cannot_be_true_are_refused_by_name() -> None:
    class Early(Callback):
        def on_train_batch_begin(self, batch: int, logs: dict[str, float]) -> None: ...

    with pytest.raises(ConfigurationError, match=r"Early\.on_train_batch_begin: steps begin in workers"):
        checked([Early()], has_evaluations=True)
    with pytest.raises(
        ConfigurationError,
        match=r"Misnamed\.on_epoch_start is no hook, and is never called; hooks are .*on_epoch_begin",
    ):
        checked([type("Misnamed", (Callback,), {"on_epoch_start": print})()], has_evaluations=True)
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


def test_a_callback_of_another_library_is_refused_with_the_one_of_that_name_here() -> None:
    for name, hint in (("EarlyStopping", "; use ps.callbacks.EarlyStopping$"), ("SwapEMAWeights", "SwapEMAWeights$")):
        foreign = type(name, (), {"__module__": "keras.src.callbacks"})
        with pytest.raises(ConfigurationError, match=rf"found keras\.{name}.*{hint}" if "use" in hint else hint):
            checked([foreign()], has_evaluations=True)


def test_one_callback_and_none_are_taken_as_keras_takes_them() -> None:
    one = Callback()
    assert [listed(None), listed(one), listed([one])] == [(), [one], [one]]


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf"), None, "0.1", True, [1, 2]])
def test_a_learning_rate_is_a_finite_number(rate: Any) -> None:
    training = Training(0.1, Path())
    with pytest.raises(ConfigurationError, match=f"finite number, 0 or more, found {re.escape(repr(rate))}"):
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
    it.training.copy_weights = lambda name, path: path.write_text(name) and None
    it.reached(Milestone(4, 0, [0.5], {}, "w"))
    it.reached(Milestone(8, 1, [0.5]))
    assert (seen, (tmp_path / "deep" / "kept").read_text()) == ([True, False], "w")
    with pytest.raises(ConfigurationError, match="no weights are at hand"):
        it.training.save_weights(tmp_path / "late")
