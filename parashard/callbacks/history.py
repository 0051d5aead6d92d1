"""History: the figures of every epoch, as Keras has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parashard.callbacks.base import Callback, Logs


class History(Callback):
    """Keeps the logs of every epoch; `fit` has one of its own, whose `history` it returns.

    Attributes
    ----------
    epoch : list of int
    history : dict of str to list of float
        By name, in the order of the epochs that had it.
    """

    decides = False

    def __init__(self) -> None:
        self.epoch: list[int] = []
        self.history: dict[str, list[float]] = {}

    def on_train_begin(self, logs: Logs) -> None:
        """Begin anew."""
        self.epoch, self.history = [], {}

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Keep an epoch's figures."""
        self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)

    def get_state(self) -> dict[str, Any]:
        """Return all of it."""
        return {"epoch": self.epoch, "history": self.history}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from it."""
        self.epoch = list(state["epoch"])
        self.history = {name: list(values) for name, values in state["history"].items()}
