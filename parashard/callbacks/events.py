"""What callbacks are told, and what they decide: values, wherever they come from.

Knows no cluster and no file. Made by `parashard.api.callback_follower` from a coordinator's answers, and by strategies
that train in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple


class StepEnd(NamedTuple):
    """A batch that is in the weights, by its number, with its mean loss (NaN: it was skipped) and its metrics."""

    step: int
    loss: float
    metrics: Mapping[str, float] = MappingProxyType({})


class Milestone(NamedTuple):
    """A number of steps at which epochs have ended, or the model was evaluated, or both; after 0 steps neither.

    Attributes
    ----------
    after_steps : int
        Its name; rises from one milestone to the next.
    first_epoch : int
        The first epoch that ended there.
    epoch_losses : sequence of float
        By epoch from that one on: mean loss of its examples; NaN if it is not known. Empty: no epoch ended.
    epoch_metrics : sequence of mapping of str to float
        By epoch, as `epoch_losses`: the model's metrics over its own batches.
    metrics : mapping of str to float, optional
        Of the evaluation; None: there was none.
    weights : str
        The file of the weights that were evaluated, in the checkpoint store; "": they are not at hand.
    judged_steps : int
        Batches in the weights that were evaluated; 0: exactly `after_steps`.
    learning_rates : sequence of float
        By epoch, as `epoch_losses`: the rate that its last step was leased with; NaN: the job's own.
    """

    after_steps: int
    first_epoch: int = 0
    epoch_losses: Sequence[float] = ()
    metrics: Mapping[str, float] | None = None
    weights: str = ""
    judged_steps: int = 0
    learning_rates: Sequence[float] = ()
    epoch_metrics: Sequence[Mapping[str, float]] = ()


class Decision(NamedTuple):
    """What callbacks decided.

    Attributes
    ----------
    stop_reason : str
        Why to stop; "": go on.
    learning_rate : float, optional
        Another learning rate.
    number : int
        How many other learning rates there were, with this one.
    between : bool
        Decided after one milestone and before the next, not at one.
    planned : sequence of (int, float)
        With another learning rate: known changes after it, each the epoch that it begins with and the rate.
    """

    stop_reason: str = ""
    learning_rate: float | None = None
    number: int = 0
    between: bool = False
    planned: Sequence[tuple[int, float]] = ()
