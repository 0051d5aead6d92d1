"""Callback: what a user's code hooks into, with Keras' names; and Training, what such code may see and change."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from parashard.errors import ConfigurationError
from parashard.plan.variables import Float32s, as_imported
from parashard.store.arrays import read_arrays

Logs = dict[str, float]
"""Figures by name; callbacks of one event share the mapping, in their order."""

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
"""Hooks of Keras that are refused, and why."""


class Training:
    """The training as callbacks see it, under the name `self.model`.

    Attributes
    ----------
    stop_training : bool
        Set it to True to end the training early.
    stop_reason : str
        Why, for people; "": the callback's name is enough.
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
        self.weights_name = ""  # of the present event's evaluation, in the checkpoint store
        self.copy_weights: Callable[[str, Path], None]  # from there to a file; set by whoever feeds callbacks
        self._values: dict[str, Float32s] | None = None
        self.restored: Path | str | None = None  # a file, or a name in the checkpoint store
        self.judged_newer = True  # this event's evaluation judged newer weights than all before it

    @property
    def learning_rate(self) -> float:
        """The learning rate before the optimizer's schedule; setting it governs steps that nobody has begun."""
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
        """In `on_epoch_end`: the learning rate that the last step of the epoch was computed with.

        Where training does not wait for callbacks, a rate may be set when the epoch's steps are under way or over; then
        it is not this one.
        """
        return self._learning_rate if self._applied_rate is None else self._applied_rate

    @property
    def has_weights(self) -> bool:
        """Whether the weights that were evaluated last are at hand."""
        return bool(self.weights_name)

    def save_weights(self, path: str | Path) -> None:
        """Write the weights that the present event's evaluation judged, as safetensors, replacing the file at once.

        Raises
        ------
        ConfigurationError
            If they are not at hand: nothing was evaluated, or no callback has `uses_weights`.
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
        """Return the weights that the present event's evaluation judged, by variable; as `save_weights`."""
        if self._values is None:
            path = self.run_dir / "callback_weights.safetensors"
            self.save_weights(path)
            self._values = as_imported(read_arrays(path))
            path.unlink()
        return self._values

    def restore_weights(self, path: str | Path) -> None:
        """Let the trainer go on with the weights of a file once the training has ended."""
        self.restored = Path(path)

    def at(self, weights: str) -> None:
        """Have an event's weights at hand, or none."""
        self.weights_name, self._values = weights, None

    def applied(self, rate: float | None) -> None:
        """Take the learning rate of the epoch that ends; NaN: that of the optimizer; None: no epoch ends."""
        self._applied_rate = self._first_rate if rate is not None and math.isnan(rate) else rate

    def ended(self) -> None:
        """Refuse further learning rates: no step is left."""
        self._ended = True


class Callback:
    """Base of all callbacks; every hook does nothing here.

    Hooks run in the process that called `fit`, one after the other, once for each event, however many workers there
    are. `logs` maps names to figures: the training loss as "loss", those of an evaluation as "val_NAME".

    Attributes
    ----------
    model : Training
        `stop_training`, `learning_rate` and `save_weights`.
    trainer : Trainer
        The one whose `fit` runs.
    decides : bool
        Whether it may stop the training or change the learning rate.
    uses_weights : bool
        Whether it needs the weights that were evaluated: workers store them before they report.
    monitor : str or None
        The figure that it follows; one of an evaluation, such as "val_loss", needs validation data.
    """

    decides: ClassVar[bool] = True
    uses_weights: bool = False
    held_weights: str = ""  # `model.weights_name` of an evaluation whose weights are not deleted yet
    monitor: str | None = None
    _kept: ClassVar[Sequence[str]] = ()  # attributes of a callback of this package that are its state
    model: Training
    trainer: Any

    @property
    def waits(self) -> bool:
        """Whether training waits for it at the end of each epoch, if `fit` is not told; by default, if it decides."""
        return self.decides

    def on_train_begin(self, logs: Logs) -> None:
        """The training begins, or goes on after a resume."""

    def on_train_end(self, logs: Logs) -> None:
        """The training is done; not called where it failed or was interrupted. `logs` are those of the last epoch."""

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        """Epoch `epoch`, counted from 0, is next; where training does not wait some of its steps may be under way."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """All steps of an epoch are in the weights, and the evaluation due there, if any, has its result."""

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """A batch is in the weights; `batch` is its number in its epoch. They come in the order of their completion.

        `logs["loss"]` is the mean over this batch, where Keras has that over the epoch so far; NaN of a skipped step.
        """

    def on_test_begin(self, logs: Logs) -> None:
        """Comes just before `on_test_end`: a worker has evaluated."""

    def on_test_end(self, logs: Logs) -> None:
        """An evaluation has its result; names have no prefix here."""

    def get_state(self) -> dict[str, Any]:
        """Return what to go on from after a crash, as JSON; kept in the run folder after each event."""
        return {name: getattr(self, name) for name in self._kept}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `get_state` returned; called after `on_train_begin`, when a run is resumed."""
        for name in self._kept:
            if state.get(name) is not None:  # earlier versions had None for what is infinite
                setattr(self, name, state[name])


class LambdaCallback(Callback):
    """A callback of functions, by the names of hooks.

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
    """Return a number that somebody gave as a float; NaN for what is none."""
    try:
        return math.nan if isinstance(value, str | bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def learning_rate(given: Any) -> float:
    """Return a learning rate that somebody gave; ConfigurationError: it is none."""
    rate = number(given)
    if not 0.0 <= rate < math.inf:
        raise ConfigurationError(f"a learning rate must be a finite number, 0 or more, found {given!r}")
    return rate


def finite(given: Any, what: str) -> float:
    """Return a finite number that somebody gave; ConfigurationError: it is none."""
    found = number(given)
    if not math.isfinite(found):
        raise ConfigurationError(f"{what} must be a finite number, found {given!r}")
    return found


def overrides(callback: Callback, hook: str) -> bool:
    """Tell whether a callback does something in a hook."""
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook)


class History(Callback):
    """Keeps the logs of every epoch; `fit` has one of its own, whose `history` it returns.

    Attributes
    ----------
    epoch : list of int
    history : dict of str to list of float
        By name, in the order of the epochs that had it.
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
