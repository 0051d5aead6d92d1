"""TrainingObserver: what sees a training in this process, and may end it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class TrainingObserver(Protocol):
    """Called in the thread of `fit`, between rounds: the next one waits for it.

    What it raises ends the training as a failure of the user's own code.
    """

    def steps_done(self, steps: int, loss: float | None) -> None:
        """See that so many steps are in, with the mean loss of those of the last round; None: all were skipped."""

    def epoch_ended(self, epoch: int, loss: float | None) -> None:
        """See that an epoch's steps are in (epochs count from 0), with the mean loss of its steps computed here.

        After the evaluation at its end, where there is one.
        """

    def evaluated(self, steps: int, metrics: Mapping[str, float]) -> None:
        """See what the held-out examples say of the weights after so many steps."""

    def stop_reason(self) -> str:
        """Say why to stop after the present round; "": go on."""


class NoObserver:
    """Sees nothing."""

    def steps_done(self, steps: int, loss: float | None) -> None:
        """Nothing."""

    def epoch_ended(self, epoch: int, loss: float | None) -> None:
        """Nothing."""

    def evaluated(self, steps: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def stop_reason(self) -> str:
        """Go on."""
        return ""
