"""Callbacks: runs a user's callbacks, event by event, and returns their decisions."""

from __future__ import annotations

import importlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from parashard.callbacks.base import HOOKS, NEVER, Callback, History, LambdaCallback, Logs, Training, overrides
from parashard.callbacks.deciding import LearningRateScheduler
from parashard.errors import ConfigurationError


class StepEnd(NamedTuple):
    """An applied batch: its number, its mean loss (NaN: skipped) and its metrics."""

    step: int
    loss: float
    metrics: Mapping[str, float] = MappingProxyType({})


class Milestone(NamedTuple):
    """A number of steps at which epochs ended, or the model was evaluated, or both; neither for 0 steps."""

    after_steps: int  # identifies the milestone; increasing
    first_epoch: int = 0  # the first epoch that ended there
    epoch_losses: Sequence[float] = ()  # mean losses of the ended epochs; NaN: not known
    metrics: Mapping[str, float] | None = None  # result of the evaluation, if there was one
    weights: str = ""  # file of the evaluated weights in the checkpoint store; "": not stored
    judged_steps: int = 0  # batches in the evaluated weights; 0: exactly those up to `after_steps`
    learning_rates: Sequence[float] = ()  # of each epoch's last step; NaN: the job's own
    epoch_metrics: Sequence[Mapping[str, float]] = ()  # the model's metrics over each epoch's batches


class CallbackDecision(NamedTuple):
    """A decision of callbacks: end the training, or change its learning rate."""

    stop_reason: str = ""  # "": continue
    learning_rate: float | None = None  # the new rate; None: unchanged
    number: int = 0  # count of changes of the rate, including this one
    between: bool = False  # decided between two milestones, not at one
    planned: Sequence[tuple[int, float]] = ()  # known later changes: first epoch and rate


def listed(callbacks: Sequence[Callback] | Callback | None) -> Sequence[Callback]:
    """Return callbacks as a sequence; as in Keras, a single one or None is allowed."""
    if callbacks is None:
        return ()
    return callbacks if isinstance(callbacks, Sequence) else [callbacks]


def checked(callbacks: Sequence[Callback], *, has_evaluations: bool) -> list[Callback]:
    """Return the callbacks as a list; refuse those that cannot run."""
    for callback in callbacks:
        name = type(callback).__name__
        if not isinstance(callback, Callback):
            kind = callback if isinstance(callback, type) else type(callback)
            found = f"{'the class ' if kind is callback else ''}{kind.__module__.partition('.')[0]}.{kind.__name__}"
            ours = getattr(importlib.import_module(__package__), kind.__name__, None)
            hint = f"; use ps.callbacks.{kind.__name__}" if isinstance(ours, type) and ours is not kind else ""
            raise ConfigurationError(
                "callbacks are objects of parashard.callbacks, or of a class derived from its Callback; found "
                f"{found}{hint}"
            )
        for hook, why in NEVER.items():
            if hasattr(callback, hook):
                raise ConfigurationError(f"{name}.{hook}: {why}")
        for method in dir(type(callback)):
            if method.startswith("on_") and method not in HOOKS:
                raise ConfigurationError(
                    f"{name}.{method} is no hook, and is never called; hooks are {', '.join(HOOKS)}"
                )
        if callback.uses_weights and not has_evaluations:
            raise ConfigurationError(
                f"{name} keeps weights that were evaluated: give fit validation_data or validation_split"
            )
        monitor = callback.monitor
        if isinstance(monitor, str) and monitor.startswith("val_") and not has_evaluations:
            raise ConfigurationError(
                f"{name} monitors {monitor!r}, and nothing is evaluated: give fit validation_data or validation_split, "
                "or take monitor='loss'"
            )
    return list(callbacks)


_DECIDED = "a callback set {}, but every callback of this fit has decides = False: remove that from its class"


class EpochProgress(NamedTuple):
    """Progress: the epoch that begins next or has begun, and the most batches in any evaluated weights."""

    epoch: int = 0
    epoch_begun: bool = False
    judged_steps: int = 0


class Callbacks:
    """The callbacks of one `fit`, with a `History` after them."""

    def __init__(
        self,
        callbacks: Sequence[Callback],
        training: Training,
        trainer: object,
        *,
        steps_per_epoch: int,
        epochs: int,
        first_epoch: int = 0,
        wait: bool | None = None,
    ) -> None:
        self.history = History()
        self.training = training
        self._all: list[Callback] = [*callbacks, self.history]  # last: it records figures that others add to the logs
        self._steps_per_epoch = steps_per_epoch
        self._epochs = epochs
        self._first_epoch = first_epoch  # number of epoch 0 for callbacks
        self._progress = EpochProgress()  # at the beginning of the current event
        self._last_logs: Logs = {}  # of the last epoch that ended
        self._rates: list[tuple[int, float]] = [(-1, training.learning_rate)]  # as last decided, by epoch
        self._is_planned = False
        self._rates_decided = 0
        self._calls = 0  # calls of hooks in the current event
        self._calls_made_before = 0  # number of these that an earlier process began
        self._logs: Logs = {}  # of the current call
        self._record: Callable[[], object] = lambda: None
        for callback in self._all:
            callback.model = training
            callback.trainer = trainer
        self.decides = any(callback.decides for callback in callbacks)
        self.ahead: int | None = None  # milestones that training may run ahead; 0: it waits, None: as many as are kept
        if any(callback.waits for callback in callbacks) if wait is None else wait:
            self.ahead = 0
        elif any(callback.decides and callback.waits for callback in callbacks):
            self.ahead = 1
        self.uses_weights = any(callback.uses_weights for callback in callbacks)
        self.wants_steps = any(overrides(callback, "on_train_batch_end") for callback in callbacks)

    @property
    def names(self) -> list[str]:
        """The classes of the user's callbacks, in order."""
        return [type(callback).__name__ for callback in self._all[:-1]]

    @property
    def held_weights(self) -> set[str]:
        """Names of evaluated weights that callbacks still need."""
        return {callback.held_weights for callback in self._all} - {""}

    def begin(self, state: Mapping[str, Any] | None = None) -> None:
        """Begin the training, or continue from a state."""
        training = self.training
        if state:
            training.learning_rate = state["learning_rate"]
            earlier = [(-1, state.get("rate", training.learning_rate))]  # state of a version without planned rates
            self._rates = [(epoch, rate) for epoch, rate in state.get("rates", earlier)]
            self._rates_decided, self._is_planned = state.get("rates_decided", 0), state.get("is_planned", False)
        self._call("on_train_begin", {})
        if state:
            self._progress = EpochProgress(state["epoch"], state["epoch_begun"], state["judged_steps"])
            self._last_logs = state.get("last_logs", {})
            training.stop_training = state.get("stop_training", False)
            training.stop_reason = state.get("stop_reason", "")
            self._calls_made_before, self._logs = state.get("calls", 0), state.get("logs", {})
            for callback, one in zip(self._all, state["callbacks"], strict=True):
                callback.set_state(one)

    def steps_ended(self, ends: Sequence[StepEnd]) -> CallbackDecision:
        """Pass applied batches to callbacks, in order of completion; return the changed learning rate, if any."""
        for end in ends:
            self._call("on_train_batch_end", end.step % self._steps_per_epoch, {"loss": end.loss, **end.metrics})
        return self.changed_rate()

    def reached(self, milestone: Milestone, record: Callable[[], object] = lambda: None) -> CallbackDecision:
        """Pass a milestone to callbacks; return their decision. `record` stores `state()` before each user hook."""
        training, progress, newer = self.training, self._progress, self.training.evaluated_newer
        self._record = record
        training.set_evaluated_weights(milestone.weights)
        if milestone.metrics is not None:
            judged_steps = milestone.judged_steps or milestone.after_steps
            newer = judged_steps > progress.judged_steps
            progress = progress._replace(judged_steps=max(progress.judged_steps, judged_steps))
            self._tell("on_test_begin", {})
            self._tell("on_test_end", dict(milestone.metrics))
        last = len(milestone.epoch_losses) - 1
        for index, loss in enumerate(milestone.epoch_losses):
            progress = self._begin_epoch(progress._replace(epoch=milestone.first_epoch + index))
            logs: Logs = {"loss": loss}
            logs |= dict(milestone.epoch_metrics[index]) if milestone.epoch_metrics else {}
            logs |= {f"val_{name}": value for name, value in (milestone.metrics or {}).items()}
            if milestone.judged_steps:
                logs["val_steps"] = milestone.judged_steps
            # Several epochs that end in one round share an evaluation.
            training.evaluated_newer = newer and index == last
            training.applied(milestone.learning_rates[index] if milestone.learning_rates else None)
            self._tell("on_epoch_end", self._first_epoch + progress.epoch, logs)
            self._last_logs = logs
            progress = progress._replace(epoch=progress.epoch + 1, epoch_begun=False)
        training.applied(None)
        if not training.stop_training:
            progress = self._begin_epoch(progress)
        training.set_evaluated_weights("")
        self._progress, self._calls, self._calls_made_before, self._logs = progress, 0, 0, {}
        if training.stop_training and not self.decides:
            raise ConfigurationError(_DECIDED.format("stop_training"))
        reason = (training.stop_reason or "callbacks ended the training") if training.stop_training else ""
        return self.changed_rate()._replace(stop_reason=reason, between=False)

    def changed_rate(self) -> CallbackDecision:
        """Return the learning rate and planned later rates, if they differ from those decided before."""
        rate, begun = self.training.learning_rate, self._progress.epoch - (not self._progress.epoch_begun)
        expected = self._rates[bisect_right(self._rates, begun, key=lambda known: known[0]) - 1][1]
        planned = () if begun < 0 or (self._is_planned and rate == expected) else self._plan(begun, rate)
        self._is_planned |= begun >= 0
        if rate == expected and not planned:
            return CallbackDecision(number=self._rates_decided)
        if not self.decides:
            raise ConfigurationError(_DECIDED.format("learning_rate"))
        self._rates, self._rates_decided = [(begun, rate), *planned], self._rates_decided + 1
        return CallbackDecision("", rate, self._rates_decided, between=True, planned=planned)

    def _plan(self, begun: int, rate: float) -> tuple[tuple[int, float], ...]:
        """Return the schedules' changes of the learning rate after an epoch with this rate, by epoch."""
        schedulers = [one for one in self._all if isinstance(one, LearningRateScheduler) and one.in_advance]
        changes = []
        for epoch in range(begun + 1, self._epochs) if schedulers else ():
            before = rate
            for scheduler in schedulers:
                rate = scheduler.known_rate(self._first_epoch + epoch, rate)
            if rate != before:
                changes.append((epoch, rate))
        return tuple(changes)

    def end(self) -> None:
        """Call the last hook, with the training done."""
        self.training.ended()
        self._call("on_train_end", dict(self._last_logs))

    def state(self) -> dict[str, Any]:
        """Return the state for `begin`, as JSON."""
        training = self.training
        return {
            "learning_rate": training.learning_rate,
            "rates": self._rates,
            "is_planned": self._is_planned,
            "rates_decided": self._rates_decided,
            "stop_training": training.stop_training,
            "stop_reason": training.stop_reason,
            **self._progress._asdict(),
            "last_logs": self._last_logs,
            "calls": max(self._calls, self._calls_made_before),
            "logs": self._logs,
            "callbacks": [callback.get_state() for callback in self._all],
        }

    def _begin_epoch(self, progress: EpochProgress) -> EpochProgress:
        if progress.epoch_begun or progress.epoch >= self._epochs:
            return progress
        self._tell("on_epoch_begin", self._first_epoch + progress.epoch, {})
        return progress._replace(epoch_begun=True)

    def _call(self, hook: str, *arguments: Any) -> None:
        for callback in self._all:
            getattr(callback, hook)(*arguments)

    def _tell(self, hook: str, *arguments: Any) -> None:
        """Call a hook in the current event, skipping calls that an earlier process began."""
        logs = arguments[-1]
        if self._calls < self._calls_made_before <= self._calls + len(self._all):
            logs.update(self._logs)  # restore figures that the skipped calls added
        for callback in self._all:
            self._calls += 1
            if self._calls <= self._calls_made_before:
                continue
            if overrides(callback, hook) and not _is_built_in(callback):
                self._logs = logs
                self._record()
            getattr(callback, hook)(*arguments)


def _is_built_in(callback: Callback) -> bool:
    """Tell whether a callback is this package's, whose hooks are idempotent."""
    return type(callback).__module__.startswith(__package__) and not isinstance(callback, LambdaCallback)
