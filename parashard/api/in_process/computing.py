"""What computes the steps of a round: replicas one after the other, by the worker's own arithmetic.

Knows neither shard nor run. Called by `parashard.api.in_process.training`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from parashard.metrics import Sums
from parashard.plan.embedding import Keys
from parashard.plan.variables import Float32s
from parashard.protocol.messages import NO_KEYS
from parashard_worker.computing import Task


class ComputedStep(NamedTuple):
    """A step, and what is pushed for it."""

    step: int
    loss: float
    examples: int
    gradients: Mapping[str, Float32s]
    keys: Mapping[str, Keys] = NO_KEYS  # of tables: whose rows these are of
    metrics: Mapping[str, Sums] = MappingProxyType({})


PullRows = Callable[[Mapping[str, Keys]], Mapping[str, Float32s]]
"""Pulls the rows of some keys, by table, as the present round begins with them."""


class Computing(Protocol):
    """Computes steps."""

    def groups(self, steps: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return a round's steps in parts, in order, each of which is computed by one call."""

    def compute(
        self, steps: Sequence[int], values: Mapping[str, Float32s], pull_rows: PullRows
    ) -> Sequence[ComputedStep]:
        """Compute steps at values of the variables, which are only read; raises as `Task.gradients`."""


class Replicas:
    """Steps one after the other.

    A replica's threads are those of the libraries: on one device nothing is gained by threads of the replicas, and a
    model need not be safe for them.
    """

    def __init__(self, task: Task) -> None:
        self._task = task

    def groups(self, steps: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return each step by itself."""
        return [(step,) for step in steps]

    def compute(
        self, steps: Sequence[int], values: Mapping[str, Float32s], pull_rows: PullRows
    ) -> Sequence[ComputedStep]:
        """Compute them in order."""
        return [self._computed(step, values, pull_rows) for step in steps]

    def _computed(self, step: int, values: Mapping[str, Float32s], pull_rows: PullRows) -> ComputedStep:
        batch = self._task.batch_of(step)
        if batch.keys:
            values = {**values, **pull_rows(batch.keys)}
        loss, examples, gradients = self._task.gradients(batch, values)
        assert loss is not None, "a trainer's model returns one"
        assert gradients is not None, "a trainer's model returns them"
        return ComputedStep(step, loss, examples, gradients, batch.keys, self._task.step_metrics(examples))
