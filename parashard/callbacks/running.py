"""Callbacks: runs a user's callbacks, event by event, and says what they decided.

Owns the order of hooks within an event, and the callbacks' state as JSON. Knows neither where events come from nor
where the state is kept. Called by `parashard.api.following`, and by strategies that train in one process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from parashard.callbacks.base import NEVER, Callback, Logs, Training, overrides
from parashard.callbacks.events import Decision, Milestone, StepEnd
from parashard.callbacks.history import History
from parashard.errors import ConfigurationError


def listed(callbacks: Sequence[Callback] | Callback | None) -> Sequence[Callback]:
    """Return callbacks as a sequence: Keras takes one, or None, too."""
    if callbacks is None:
        return ()
    return callbacks if isinstance(callbacks, Sequence) else [callbacks]


def checked(callbacks: Sequence[Callback], *, has_evaluations: bool) -> list[Callback]:
    """Return callbacks that can be run.

    Raises
    ------
    ConfigurationError
        If one is none, has a hook that cannot be true here, or needs evaluations that there are not.
    """
    for callback in callbacks:
        name = type(callback).__name__
        if not isinstance(callback, Callback):
            kind = callback if isinstance(callback, type) else type(callback)
            raise ConfigurationError(
                "callbacks are objects of parashard.callbacks, or of a class derived from its Callback; found "
                f"{'the class ' if kind is callback else ''}{kind.__module__.partition('.')[0]}.{kind.__name__}"
            )
        for hook, why in NEVER.items():
            if hasattr(callback, hook):
                raise ConfigurationError(f"{name}.{hook}: {why}")
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


class Callbacks:
    """The callbacks of one `fit`, with a `History` after them.

    Parameters
    ----------
    callbacks : sequence of Callback
        As `checked` returned them.
    training : Training
        What they see as `self.model`.
    trainer : object
        What they see as `self.trainer`.
    steps_per_epoch : int
    epochs : int
    first_epoch : int
        What the first one is called.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        training: Training,
        trainer: object,
        *,
        steps_per_epoch: int,
        epochs: int,
        first_epoch: int = 0,
    ) -> None:
        self.history = History()
        self.training = training
        self._all: list[Callback] = [*callbacks, self.history]  # which keeps what the others add to the logs
        self._steps_per_epoch = steps_per_epoch
        self._epochs = epochs
        self._first_epoch = first_epoch  # what callbacks are told for 0
        self._epoch = 0  # whose on_epoch_begin was called last, or is to be
        self._begun = False
        self._judged_steps = 0  # most steps in weights that were evaluated
        for callback in self._all:
            callback.model = training
            callback.trainer = trainer
        self.decides = any(callback.decides for callback in callbacks)
        self.uses_weights = any(callback.uses_weights for callback in callbacks)
        self.wants_steps = any(overrides(callback, "on_train_batch_end") for callback in callbacks)

    @property
    def names(self) -> list[str]:
        """The classes of the user's callbacks, in order."""
        return [type(callback).__name__ for callback in self._all[:-1]]

    def begin(self, state: Mapping[str, Any] | None = None) -> None:
        """Begin the training, or go on from a state."""
        self._call("on_train_begin", {})
        if state:
            self.training.learning_rate = state["learning_rate"]
            self._epoch, self._begun = state["epoch"], state["epoch_begun"]
            self._judged_steps = state["judged_steps"]
            for callback, one in zip(self._all, state["callbacks"], strict=True):
                callback.set_state(one)

    def begin_epoch(self) -> Decision:
        """Begin the present epoch, unless that was done; return what is decided by then."""
        before = self.training.learning_rate
        self._begin_epoch()
        return self._decision(before)

    def steps_ended(self, ends: Sequence[StepEnd]) -> None:
        """Tell of steps, in the order of their completion."""
        for end in ends:
            logs = {} if math.isnan(end.loss) else {"loss": end.loss}
            self._call("on_train_batch_end", end.step % self._steps_per_epoch, logs)

    def reached(self, milestone: Milestone) -> Decision:
        """Tell of a milestone; return what the callbacks decided."""
        before, training = self.training.learning_rate, self.training
        training.at(milestone.save_weights)
        if milestone.metrics is not None:
            judged_steps = milestone.judged_steps or milestone.after_steps
            training.judged_newer = judged_steps > self._judged_steps
            self._judged_steps = max(self._judged_steps, judged_steps)
        if milestone.metrics is not None:
            self._call("on_test_begin", {})
            self._call("on_test_end", dict(milestone.metrics))
        last = len(milestone.epoch_losses) - 1
        for index, loss in enumerate(milestone.epoch_losses):
            self._epoch = milestone.first_epoch + index
            self._begin_epoch()
            logs: Logs = {} if math.isnan(loss) else {"loss": loss}
            if index == last:
                logs |= {f"val_{name}": value for name, value in (milestone.metrics or {}).items()}
                if milestone.judged_steps:
                    logs["val_steps"] = milestone.judged_steps
            self._call("on_epoch_end", self._first_epoch + self._epoch, logs)
            self._epoch, self._begun = self._epoch + 1, False
        if last >= 0 and not training.stop_training:
            self._begin_epoch()
        training.at(None)
        return self._decision(before)

    def end(self) -> None:
        """End the training: it is done."""
        self._call("on_train_end", {})

    def state(self) -> dict[str, Any]:
        """Return what `begin` goes on from, as JSON."""
        return {
            "learning_rate": self.training.learning_rate,
            "epoch": self._epoch,
            "epoch_begun": self._begun,
            "judged_steps": self._judged_steps,
            "callbacks": [callback.get_state() for callback in self._all],
        }

    def _begin_epoch(self) -> None:
        if not self._begun and self._epoch < self._epochs:
            self._begun = True
            self._call("on_epoch_begin", self._first_epoch + self._epoch, {})

    def _decision(self, rate_before: float) -> Decision:
        training = self.training
        rate = training.learning_rate
        reason = (training.stop_reason or "callbacks ended the training") if training.stop_training else ""
        return Decision(reason, rate if rate != rate_before else None)

    def _call(self, hook: str, *arguments: Any) -> None:
        for callback in self._all:
            getattr(callback, hook)(*arguments)
