"""Callback: base of user callbacks, with Keras' hook names; and Training, the state they can read and change."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from parashard.errors import ConfigurationError
from parashard.plan.variables import Float32s, as_imported
from parashard.store.arrays import read_arrays

Logs = dict[str, float]
"""Figures by name; the callbacks of an event get the same dict, one after the other."""

NEVER = {
    "on_train_batch_begin": "steps begin in workers, many at a time; allowed: on_train_batch_end",
    "on_batch_begin": "steps begin in workers, many at a time; allowed: on_train_batch_end",
    "on_batch_end": "its name is on_train_batch_end",
    "on_test_batch_begin": "workers evaluate, and tell only the result; allowed: on_test_end",
    "on_test_batch_end": "workers evaluate, and tell only the result; allowed: on_test_end",
    "on_predict_begin": "predict runs no callbacks",
    "on_predict_end": "predict runs no callbacks",
    "on_predict_batch_begin": "predict runs no callbacks",
    "on_predict_batch_end": "predict runs no callbacks",
}
"""Keras' hooks that are refused, with the reason."""


class Training:
    """State of the training for callbacks, which have it as `self.model`.

    Attributes
    ----------
    stop_training : bool
        Set it to True to end the training early.
    stop_reason : str
        Optional reason for the stop, for people.
    run_dir : Path
        The run's folder.
    """

    def __init__(self, learning_rate: float, run_dir: Path) -> None:
        self.stop_training = False
        self.stop_reason = ""
        self.run_dir = run_dir
        self._first_rate = self._learning_rate = learning_rate
        self._applied_rate: float | None = None
        self._ended = False
        self.weights_name = ""  # evaluated weights of the current event, in the checkpoint store
        self.copy_weights: Callable[[str, Path], None]  # copies stored weights to a file; set by `CallbackFollower`
        self._values: dict[str, Float32s] | None = None
        self.restored: Path | str | None = None  # weights to restore: a file, or a name in the checkpoint store
        self.evaluated_newer = True  # whether the current evaluation used newer weights than all before it

    @property
    def learning_rate(self) -> float:
        """The learning rate before the optimizer's schedule; a new value applies to steps that have not started."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        rate = learning_rate(value)
        if self._ended:
            raise ConfigurationError(
                "a learning rate was set in on_train_end, when no step is left: set it in another hook, or give the "
                "next Trainer an optimizer with it"
            )
        self._learning_rate = rate

    @property
    def applied_learning_rate(self) -> float:
        """In `on_epoch_end`: the learning rate of the epoch's last step.

        If training does not wait for callbacks, it may differ from a rate that was set when the epoch's steps had
        already started.
        """
        return self._learning_rate if self._applied_rate is None else self._applied_rate

    @property
    def has_weights(self) -> bool:
        """Whether the evaluated weights of the current event are available."""
        return bool(self.weights_name)

    def save_weights(self, path: str | Path) -> None:
        """Write the evaluated weights of the current event as safetensors, replacing the file atomically.

        Raises
        ------
        ConfigurationError
            If they are not available: nothing was evaluated, or no callback has `uses_weights`.
        OSError
            If the file cannot be written.
        """
        if not self.weights_name:
            raise ConfigurationError(
                "no weights are at hand: those of an evaluation are, in its event, where a callback has "
                "`uses_weights = True`; give fit validation_data"
            )
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.copy_weights(self.weights_name, path)

    def weights(self) -> dict[str, Float32s]:
        """Return the evaluated weights of the current event by variable; raises as `save_weights` does."""
        if self._values is None:
            path = self.run_dir / "callback_weights.safetensors"
            self.save_weights(path)
            self._values = as_imported(read_arrays(path))
            path.unlink()
        return self._values

    def restore_weights(self, path: str | Path) -> None:
        """Make a file's weights the trainer's once the training has ended."""
        self.restored = Path(path)

    def set_evaluated_weights(self, weights: str) -> None:
        """Set the evaluated weights of the current event; "" for none."""
        self.weights_name, self._values = weights, None

    def applied(self, rate: float | None) -> None:
        """Set the rate of the ending epoch's last step; NaN: the optimizer's; None: no epoch ends."""
        self._applied_rate = self._first_rate if rate is not None and math.isnan(rate) else rate

    def ended(self) -> None:
        """Refuse further learning rates, since no step is left."""
        self._ended = True


class Callback:
    """Base of all callbacks; its hooks do nothing.

    Hooks run in the process that called `fit`, one after the other, once per event, whatever the number of workers.
    `logs` maps names to figures: the training loss as "loss", figures of an evaluation as "val_NAME".

    Attributes
    ----------
    model : Training
        Has `stop_training`, `learning_rate` and `save_weights`.
    trainer : Trainer
        The trainer whose `fit` runs.
    decides : bool
        Whether it may stop the training or change the learning rate.
    uses_weights : bool
        Whether it needs the evaluated weights; workers then store them before they report.
    monitor : str or None
        The figure that it monitors; figures of an evaluation, such as "val_loss", need validation data.
    """

    decides: ClassVar[bool] = True
    uses_weights: bool = False
    held_weights: str = ""  # `model.weights_name` of an evaluation whose weights must be kept
    monitor: str | None = None
    _kept: ClassVar[Sequence[str]] = ()  # names of attributes that are the callback's state
    model: Training
    trainer: Any

    @property
    def waits(self) -> bool:
        """Whether training waits for it after each epoch if `wait_for_callbacks` is None; default: `decides`."""
        return self.decides

    def on_train_begin(self, logs: Logs) -> None:
        """Called when the training begins, or continues after a resume."""

    def on_train_end(self, logs: Logs) -> None:
        """Called when the training is done, with the last epoch's `logs`; not if it failed or was interrupted."""

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        """Called before epoch `epoch`, counted from 0; if training does not wait, some steps may have started."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Called when all steps of an epoch are applied, and its evaluation, if any, has finished."""

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Called when a batch is applied; `batch` is its number in the epoch. Batches come in order of completion.

        `logs["loss"]` is the mean over this batch (in Keras: over the epoch so far); NaN for a skipped step.
        """

    def on_test_begin(self, logs: Logs) -> None:
        """Called just before `on_test_end`, when a worker has already evaluated."""

    def on_test_end(self, logs: Logs) -> None:
        """Called with the result of an evaluation; names in `logs` have no "val_" prefix here."""

    def get_state(self) -> dict[str, Any]:
        """Return the state to continue from after a crash, as JSON; stored in the run folder after each event."""
        return {name: getattr(self, name) for name in self._kept}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `get_state` returned; called after `on_train_begin` when a run is resumed."""
        for name in self._kept:
            if state.get(name) is not None:  # earlier versions stored None for infinite values
                setattr(self, name, state[name])


class LambdaCallback(Callback):
    """A callback made of functions, given as keyword arguments by hook name.

    Examples
    --------
    >>> LambdaCallback(on_epoch_end=lambda epoch, logs: print(epoch, logs))  # doctest: +ELLIPSIS
    <parashard.callbacks.base.LambdaCallback object at ...>
    """

    def __init__(self, **hooks: Callable[..., None]) -> None:
        for name, function in hooks.items():
            if name in NEVER:
                raise ConfigurationError(f"LambdaCallback: {name}: {NEVER[name]}")
            if name not in HOOKS or not callable(function):
                raise ConfigurationError(f"LambdaCallback: {name} is no hook and function; allowed: {', '.join(HOOKS)}")
            setattr(self, name, function)


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def number(value: Any) -> float:
    """Return a user's value as a float; NaN if it is not a number."""
    try:
        return math.nan if isinstance(value, str | bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def learning_rate(given: Any) -> float:
    """Return a user's learning rate; raise ConfigurationError if it is invalid."""
    rate = number(given)
    if not 0.0 <= rate < math.inf:
        raise ConfigurationError(f"a learning rate must be a finite number, 0 or more, found {given!r}")
    return rate


def finite(given: Any, what: str) -> float:
    """Return a user's value as a finite number; raise ConfigurationError if it is not one."""
    found = number(given)
    if not math.isfinite(found):
        raise ConfigurationError(f"{what} must be a finite number, found {given!r}")
    return found


def overrides(callback: Callback, hook: str) -> bool:
    """Tell whether a callback overrides a hook."""
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook)


class History(Callback):
    """Records the logs of every epoch; `fit` adds one itself and returns its `history`.

    Attributes
    ----------
    epoch : list of int
    history : dict of str to list of float
        Figures by name, in the order of the epochs that had them.
    """

    decides = False
    _kept = ("epoch", "history")

    def __init__(self) -> None:
        self.epoch: list[int] = []
        self.history: dict[str, list[float]] = {}

    def on_train_begin(self, logs: Logs) -> None:
        self.epoch, self.history = [], {}

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)
