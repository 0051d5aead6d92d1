"""What callbacks are told, and what they decide: values, wherever they come from.

Knows no cluster and no file. Made by `parashard.api.following` from what a coordinator says, and by strategies that
train in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class StepEnd(NamedTuple):
    """A step that is in the weights, with the mean loss of its batch; NaN: it was skipped."""

    step: int
    loss: float


class Milestone(NamedTuple):
    """A number of steps at which epochs have ended, or the model was evaluated, or both.

    Attributes
    ----------
    after_steps : int
        Its name; rises from one milestone to the next.
    first_epoch : int
        The first epoch that ended there.
    epoch_losses : sequence of float
        By epoch from that one on: mean loss of its examples; NaN if it is not known. Empty: no epoch ended.
    metrics : mapping of str to float, optional
        Of the evaluation; None: there was none.
    save_weights : callable, optional
        Writes the weights that were evaluated to a file, as safetensors; None: they are not at hand.
    judged_steps : int
        Steps in the weights that were evaluated; 0: exactly `after_steps`.
    """

    after_steps: int
    first_epoch: int
    epoch_losses: Sequence[float] = ()
    metrics: Mapping[str, float] | None = None
    save_weights: Callable[[Path], None] | None = None
    judged_steps: int = 0


class Decision(NamedTuple):
    """What callbacks decided at a milestone: why to stop ("": go on), and another learning rate, if so."""

    stop_reason: str = ""
    learning_rate: float | None = None
