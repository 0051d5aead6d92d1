"""Callbacks that end the training or change its learning rate, and the comparison of figures."""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

from parashard.callbacks.base import Callback, Logs, finite, learning_rate, number
from parashard.errors import ConfigurationError

_RISING = (
    *("acc", "accuracy", "auc", "cosine_similarity", "sensitivity", "specificity", r"top_?(?:k|\d+)"),
    *(r"(?:precision|recall)(?:_at_(?:k|\d+))?", r"(?:sensitivity|precision|recall|specificity)_at_[a-z]+"),
    *(r"f(?:1|_?beta)(?:_score)?", r"f\d+_score", r"r2(?:_score)?", "m?iou", "io_u", "true_(?:posi|nega)tives"),
    *("pearson_correlation", "concordance_correlation"),
)
_FALLING = (
    *("mae", "mse", "rmse", "mape", "msle", "rmsle", "error", "error_rate", "cross_?entropy", "hinge", "poisson"),
    *("kl_divergence", "kullback_leibler_divergence", "log_?cosh", "nll", "perplexity", "false_(?:posi|nega)tives"),
)
"""Patterns for the ends of metric names: Keras' names, to which it appends a number if repeated, and common ones."""


def _ends(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"(?:^|_)(?:{'|'.join(words)})(?:_\d+)?$")


_RISES, _FALLS = _ends(_RISING), _ends(_FALLING)


def rises(name: str) -> bool | None:
    """Tell whether higher values of a figure are better; None if the name is unknown."""
    name = name.lower()
    if "loss" in name or _FALLS.search(name):
        return False
    return True if _RISES.search(name) else None


Mode = Literal["auto", "min", "max"]


class Monitor:
    """Compares values of one figure for a callback, its owner; mode "auto" infers the direction from the name."""

    def __init__(self, owner: Callback, name: str, mode: Mode = "auto", min_delta: float = 0.0) -> None:
        of = type(owner).__name__
        if mode not in ("auto", "min", "max"):
            raise ConfigurationError(f"{of}: mode {mode!r} is unknown; allowed: auto, min, max")
        if not isinstance(name, str):
            raise ConfigurationError(f"{of}: monitor is the name of a figure, such as 'val_loss', found {name!r}")
        higher = rises(name) if mode == "auto" else mode == "max"
        if higher is None:
            raise ConfigurationError(
                f'{of}: the name of monitor {name!r} does not tell what is better: write mode="max" where a higher '
                'value is, or mode="min"'
            )
        self.name = name
        self.rises = higher
        self._min_delta = abs(finite(min_delta, f"{of}: min_delta"))
        self.worst = -math.inf if self.rises else math.inf

    def better(self, value: float, reference: float) -> bool:
        """Tell whether a value is better than a reference; NaN never is."""
        if self.rises:
            return value - self._min_delta > reference
        return value + self._min_delta < reference

    def value(self, owner: Callback, logs: Logs) -> float | None:
        """Return the figure in an epoch's logs; None if there is none, or its weights were evaluated before."""
        found = logs.get(self.name)
        of_evaluation = self.name.startswith("val_")
        evaluated = any(name.startswith("val_") for name in logs)  # an epoch may have no evaluation
        known = evaluated if of_evaluation else not math.isnan(logs.get("loss", math.nan))  # or only skipped steps
        if found is None and known:
            raise ConfigurationError(
                f"{type(owner).__name__}: monitor {self.name!r} is not among the figures: {', '.join(sorted(logs))}"
            )
        shown_before = self.name.startswith("val_") and not owner.model.evaluated_newer
        return None if shown_before else found


def check_patience(owner: Callback, patience: Any) -> None:
    """Refuse a patience that is not a number of epochs; infinity is allowed."""
    if not number(patience) >= 0:
        raise ConfigurationError(
            f"{type(owner).__name__}: patience is a number of epochs, 0 or more, found {patience!r}"
        )


class EarlyStopping(Callback):
    """Ends the training when a figure has stopped improving.

    Training waits for it at the end of each epoch, and ends there. With `fit(wait_for_callbacks=False)` steps that have
    started are finished; the report has the number of steps after the epoch (`callbacks.stop_lag_steps`).

    Parameters
    ----------
    monitor : str
        Name of the figure.
    min_delta : float
        Smallest change that counts as an improvement.
    patience : int
        Number of epochs without improvement after which training ends.
    mode : {"auto", "min", "max"}
        Whether lower or higher values are better; "auto" infers it from the name, and refuses an unknown one.
    baseline : float, optional
        Only values better than this count as improvements.
    restore_best_weights : bool
        True: the trainer continues with the weights of the best value, bit-identical to those evaluated.
    start_from_epoch : int
        Epochs before this one are ignored.
    """

    _kept = (
        *("best", "best_epoch", "wait", "stopped_epoch", "held", "held_epoch", "held_weights", "last", "last_epoch"),
    )

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        min_delta: float = 0.0,
        patience: int = 0,
        verbose: int = 0,
        mode: Mode = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        check_patience(self, patience)
        self.monitor = monitor
        self._monitor = Monitor(self, monitor, mode, min_delta)
        self._patience = patience
        self._baseline = None if baseline is None else finite(baseline, "EarlyStopping: baseline")
        self._start_from_epoch = start_from_epoch
        self.uses_weights = restore_best_weights
        self._reset()

    def _reset(self) -> None:
        self.best, self.best_epoch, self.wait = self._monitor.worst, -1, 0
        self.stopped_epoch = 0
        self.held, self.held_epoch, self.held_weights = self._monitor.worst, -1, ""
        self.last, self.last_epoch = self._monitor.worst, -1

    def on_train_begin(self, logs: Logs) -> None:
        self._reset()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        value = self._monitor.value(self, logs)
        if value is None or epoch < self._start_from_epoch:
            return
        self.wait += 1
        self.last, self.last_epoch = value, epoch
        if self.uses_weights and self.model.has_weights and self._monitor.better(value, self.held):
            self.held, self.held_epoch, self.held_weights = value, epoch, self.model.weights_name
        if self._monitor.better(value, self.best):
            self.best, self.best_epoch = value, epoch
            if self._baseline is None or self._monitor.better(value, self._baseline):
                self.wait = 0
                return
        if self.wait >= self._patience and epoch > 0:
            self.stopped_epoch = epoch
            self.model.stop_training = True
            best = f"best in epoch {self.best_epoch + 1} ({self.best:.6g})" if self.best_epoch >= 0 else "never finite"
            self.model.stop_reason = f"EarlyStopping: {self._monitor.name} was {best}"

    def on_train_end(self, logs: Logs) -> None:
        """Restore the best weights if requested."""
        if self.uses_weights and self.held_epoch != self.best_epoch:
            self._best_is_lost()
        if self.held_weights:
            self.model.restored = self.held_weights

    def _best_is_lost(self) -> None:
        """Restore the best weights that were stored, unless the final ones are better; warn that the best are lost."""
        kept = f"those of epoch {self.held_epoch + 1} are restored"
        if self._monitor.better(self.last, self.held):
            self.held_weights, kept = "", "the final weights stay, which are the best of the others"
            if self.last_epoch == self.best_epoch:
                return  # the final weights are the best
        warnings.warn(
            f"EarlyStopping: the weights of epoch {self.best_epoch + 1}, the best, could not be stored; {kept}",
            stacklevel=2,
        )


class TerminateOnNaN(Callback):
    """Ends the training at the end of an epoch whose loss is not finite.

    A step whose gradient is not finite fails the run without this callback, or is skipped (`job.on_bad_step`).
    """

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if not math.isfinite(logs["loss"]):
            self.model.stop_training = True
            self.model.stop_reason = f"TerminateOnNaN: the loss of epoch {epoch + 1} is {logs['loss']}"


class LearningRateScheduler(Callback):
    """Sets the learning rate of each epoch.

    Parameters
    ----------
    schedule : callable (epoch, rate) or (epoch) -> float
        Returns the epoch's rate; `rate` is the current one.
    in_advance : bool
        True: call it for all epochs before the training, so that each step has its epoch's rate without waiting. If
        another callback changes the rate, it is called again for the remaining epochs. False: call it once per epoch,
        at its beginning, while training waits; for a schedule that depends on more than epoch and rate.

    Raises
    ------
    ConfigurationError
        If the schedule is not such a function. In `fit`, if it returns an invalid rate, or two rates for one epoch
        although it is called in advance.
    """

    def __init__(self, schedule: Callable[..., float], verbose: int = 0, *, in_advance: bool = True) -> None:
        self._with_rate = _takes(schedule, 2)
        if not self._with_rate and not _takes(schedule, 1):
            raise ConfigurationError(
                f"LearningRateScheduler: schedule is no function of epoch and rate, or of the epoch: {schedule!r}"
            )
        self._schedule = schedule
        self._known: dict[int, tuple[float, float]] = {}  # by epoch: the rate before it, and its planned rate
        self.in_advance = in_advance and type(self).on_epoch_begin is LearningRateScheduler.on_epoch_begin

    @property
    def waits(self) -> bool:
        """Whether the schedule must be called when an epoch begins."""
        return not self.in_advance

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        before = self.model.learning_rate
        self.model.learning_rate = self._rate(epoch, before)
        now, known = self.model.learning_rate, self._known.pop(epoch, None)
        if known is not None and known[0] == before and known[1] != now:
            warnings.warn(
                f"LearningRateScheduler: the schedule gave {known[1]:g} for epoch {epoch} before the training and "
                f"gives {now:g} now, which comes late; write LearningRateScheduler(schedule, in_advance=False)",
                stacklevel=2,
            )

    def known_rate(self, epoch: int, rate: float) -> float:
        """Return an epoch's rate, given the rate before it; refuse a schedule that returns two different rates."""
        known, again = learning_rate(self._rate(epoch, rate)), learning_rate(self._rate(epoch, rate))
        if known != again:
            raise ConfigurationError(
                f"LearningRateScheduler: the schedule gave {known:g} and then {again:g} for epoch {epoch}, and it is "
                "called in advance; LearningRateScheduler(schedule, in_advance=False) calls it once an epoch"
            )
        self._known[epoch] = rate, known
        return known

    def _rate(self, epoch: int, rate: float) -> Any:
        return self._schedule(epoch, rate) if self._with_rate else self._schedule(epoch)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Add the rate of the epoch's last step to the logs."""
        logs["learning_rate"] = self.model.applied_learning_rate


def _takes(function: Any, arguments: int) -> bool:
    """Tell whether a function accepts this number of arguments; True if its signature is unknown."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*[0] * arguments)
    except TypeError:
        return False
    except ValueError:
        pass
    return True


class ReduceLROnPlateau(Callback):
    """Lowers the learning rate when a figure has stopped improving.

    Parameters
    ----------
    monitor : str
        Name of the figure.
    factor : float
        Multiplies the rate; more than 0 and less than 1.
    patience : int
        Number of epochs without improvement after which the rate is lowered.
    mode : {"auto", "min", "max"}
        Whether lower or higher values are better; "auto" infers it from the name, and refuses an unknown one.
    min_delta : float
        Smallest change that counts as an improvement.
    cooldown : int
        Epochs after a reduction that do not count towards `patience`.
    min_lr : float
        Lower bound of the rate.
    """

    _kept = ("best", "wait", "cooldown_counter")

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 0,
        mode: Mode = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        if not 0.0 < number(factor) < 1.0:
            raise ConfigurationError(f"ReduceLROnPlateau: factor must be more than 0 and less than 1, found {factor!r}")
        check_patience(self, patience)
        self.monitor = monitor
        self._monitor = Monitor(self, monitor, mode, min_delta)
        self._factor, self._patience, self._cooldown = factor, patience, cooldown
        self._min_lr = finite(min_lr, "ReduceLROnPlateau: min_lr")
        self._reset()

    def _reset(self) -> None:
        self.best, self.wait, self.cooldown_counter = self._monitor.worst, 0, 0

    def on_train_begin(self, logs: Logs) -> None:
        self._reset()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        logs["learning_rate"] = self.model.applied_learning_rate
        value = self._monitor.value(self, logs)
        if value is None:
            return
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.wait = 0
        if self._monitor.better(value, self.best):
            self.best, self.wait = value, 0
        elif self.cooldown_counter <= 0:
            self.wait += 1
            if self.wait >= self._patience and self.model.learning_rate > self._min_lr:
                self.model.learning_rate = max(self.model.learning_rate * self._factor, self._min_lr)
                self.cooldown_counter, self.wait = self._cooldown, 0

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state({"cooldown_counter": state.get("cooldown"), **state})  # an earlier version's name
