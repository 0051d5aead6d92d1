"""What changes the learning rate: LearningRateScheduler and ReduceLROnPlateau."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from parashard.callbacks.base import Callback, Logs, finite, learning_rate, number
from parashard.callbacks.stopping import Mode, Monitor, check_patience
from parashard.errors import ConfigurationError


class LearningRateScheduler(Callback):
    """Sets the learning rate of each epoch.

    Parameters
    ----------
    schedule : callable
        (epoch, present rate) -> the epoch's rate, or of the epoch alone.
    in_advance : bool
        True: call it for all epochs before the training, so that each step has its epoch's rate and nothing waits. If
        another callback changes the rate, it is called for the remaining epochs again. False: call it once, when an
        epoch begins, while training waits; for a schedule that depends on more than epoch and rate.

    Raises
    ------
    ConfigurationError
        If the schedule is no such function. In `fit`, if a rate is none, or the schedule gives two rates for one epoch
        though it is called in advance.
    """

    def __init__(self, schedule: Callable[..., float], verbose: int = 0, *, in_advance: bool = True) -> None:
        self._with_rate = _takes(schedule, 2)
        if not self._with_rate and not _takes(schedule, 1):
            raise ConfigurationError(
                f"LearningRateScheduler: schedule is no function of epoch and rate, or of the epoch: {schedule!r}"
            )
        self._schedule = schedule
        self._known: dict[int, tuple[float, float]] = {}  # by epoch: the rate before, and the one that it will have
        self.in_advance = in_advance and type(self).on_epoch_begin is LearningRateScheduler.on_epoch_begin

    @property
    def waits(self) -> bool:
        """Whether the schedule is not known before an epoch begins."""
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
        """Return the rate that an epoch will have after another one; a schedule that gives two rates is refused."""
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
        """Tell the rate that the epoch's last step had."""
        logs["learning_rate"] = self.model.applied_learning_rate


def _takes(function: Any, arguments: int) -> bool:
    """Tell whether a function may be called with so many arguments; one that does not tell may."""
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
    """Lowers the learning rate when a figure has not become better for a while.

    Parameters
    ----------
    monitor : str
        Name of the figure.
    factor : float
        What the rate is multiplied with, less than 1.
    patience : int
        Epochs without a better value after which that happens.
    mode : {"auto", "min", "max"}
        What is better; "auto" goes by the name, and refuses one that does not tell.
    min_delta : float
        A smaller change is none.
    cooldown : int
        Epochs after a change that are not counted.
    min_lr : float
        The rate never falls below it.
    """

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

    def get_state(self) -> dict[str, Any]:
        best = self.best if math.isfinite(self.best) else None
        return {"best": best, "wait": self.wait, "cooldown": self.cooldown_counter}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.best = self._monitor.worst if state["best"] is None else state["best"]
        self.wait, self.cooldown_counter = state["wait"], state["cooldown"]
