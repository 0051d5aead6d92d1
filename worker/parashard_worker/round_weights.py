"""RoundWeights: factors of the steps' gradients, so that each example weighs the same in the mean of its round.

A shard divides the sum of a round's gradients, each the mean over its step, by the number of steps (P13); the last step
of an epoch may be shorter. Invariant: the factors of a round sum to its number of steps, and are exactly 1 if its steps
have the same size.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from parashard.data.base import DataSource, examples_of
from parashard.data.tree import rows_of
from parashard.errors import ConfigurationError
from parashard.job.schema import Job
from parashard.models.base import Model, adds_losses
from parashard.plan.steps import StepPlan


class UnevenBatches(ConfigurationError):
    """A batch of the data has a different number of examples than its round's weights assume."""


class RoundWeights:
    """Factors of the steps of rounds; `batches`: the data source, if each of its indices is a whole batch."""

    def __init__(self, steps: StepPlan, round_steps: int, batches: DataSource | None = None) -> None:
        self._steps, self._round_steps = steps, round_steps
        self._rows: tuple[int, int] | None = None
        self._last = 0
        if batches is not None:
            self._last = batches.spec.examples - 1
            self._rows = _rows_of_batch(batches, 0), _rows_of_batch(batches, self._last)
        self._examples_of_round = lru_cache(maxsize=4)(self._sum_of_round)

    def factor(self, step: int, rows: int | None = None) -> float:
        """Return a step's factor, n * steps / (examples of the round); `rows` is its batch's number of examples."""
        # Raises UnevenBatches if the data are batches, and this one differs in size from the first, or if it is the
        # last of the data, from the last.
        size = self._size(step)
        if self._rows is not None and rows != size:
            raise UnevenBatches(
                f"batch {self._steps.indices(step)[0]} of the data has {rows} examples and the first has "
                f"{self._rows[0]}: in rounds of {self._round_steps} steps each example weighs the same only if all "
                "batches but the last are of one size; make them so, or train with rounds of one step"
            )
        steps, examples = self._examples_of_round(step // self._round_steps)
        return size * steps / examples

    def _sum_of_round(self, number: int) -> tuple[int, int]:
        """Return the numbers of steps and examples of a round."""
        first = number * self._round_steps
        of_round = range(first, min(first + self._round_steps, self._steps.total))
        return len(of_round), sum(map(self._size, of_round))

    def _size(self, step: int) -> int:
        if self._rows is None:
            return self._steps.size(step)
        return self._rows[int(self._steps.indices(step)[0]) == self._last]


def round_weights(
    job: Job, steps: StepPlan, source: DataSource | None = None, model: Model | None = None
) -> RoundWeights | None:
    """Return the factors of a job's steps; None if all are 1: no mean over steps is taken, or each loss is a sum."""
    policy = job.consistency.policy
    if policy.kind != "sync" or policy.bound == 1 or job.consistency.reduce != "mean":
        return None
    if adds_losses(model):
        return None
    return RoundWeights(steps, policy.bound, source if source is not None and source.spec.batched else None)


def _rows_of_batch(source: DataSource, index: int) -> int:
    return rows_of(examples_of(source, 0, np.array([index]))[0])
