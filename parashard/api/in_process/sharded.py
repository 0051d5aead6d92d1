"""Steps of `TPUStrategy`: a round's steps at once, one on each of JAX's devices, which sum their gradients.

The sum is pushed as the gradient of the round's first step, and none for the others, which gives the same mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from parashard.api.strategies import devices
from parashard.data.base import Batch
from parashard.data.tree import rows_of
from parashard.errors import ConfigurationError
from parashard.jax import Model, Summed
from parashard.job.schema import Job
from parashard.metrics import Sums
from parashard.models.base import Model as AnyModel
from parashard.plan.variables import Float32s
from parashard_worker.computing import Task
from parashard_worker.gpu_copies import Gradients


def check(model: AnyModel, job: Job) -> None:
    """Refuse a model that is not JAX's, embedding tables, and clipping of each step's gradient norm."""
    if not isinstance(model, Model):
        framework = type(model).__module__.rpartition("parashard.")[2]
        raise ConfigurationError(
            f"ps.TPUStrategy spreads arrays over JAX's devices: it trains a ps.jax.Model, found "
            f"{f'ps.{framework}.' if framework in ('torch', 'keras') else ''}{type(model).__name__}"
        )
    if job.tables:
        raise ConfigurationError(
            f"ps.TPUStrategy does not look up rows of tables ({', '.join(sorted(job.tables))}): another strategy does"
        )
    for name in ("clip_norm", "variable_clip_norm"):
        if getattr(job.optimizer, name) is not None:
            raise ConfigurationError(
                f"optimizer.{name} clips each step's gradient, and ps.TPUStrategy adds them up on the devices; "
                "allowed: clip_value, or another strategy"
            )


class ShardedSteps:
    """Computes the steps of a round, one on each device."""

    def __init__(self, task: Task, replicas: int) -> None:
        assert isinstance(task.model, Model), task.model
        self._task = task
        self._replicas = replicas
        self._together: Sequence[int] = ()  # steps of the current round that are computed at once
        self._batches: dict[int, Batch] = {}
        self._computed: dict[int, tuple[float, dict[str, Float32s]]] = {}  # loss and gradients to push, by step
        self._summed: Summed = task.model.summed_over(jax.sharding.Mesh(np.array(devices(replicas)), ("steps",)))

    def granted(self, steps: Sequence[int]) -> None:
        """Store the granted steps of a round; a whole round is computed at once if its steps have one size."""
        sizes = {len(self._task.steps.indices(step)) for step in steps}
        whole = len(steps) == self._replicas > 1 and len(sizes) == 1
        self._together = steps if whole else ()
        self._batches, self._computed = {}, {}

    def batch_of(self, step: int) -> Batch:
        """Read a step's examples, and those of steps that are computed with it."""
        if step in self._together and not self._batches:
            self._batches = {one: self._task.batch_of(one) for one in self._together}
        return self._batches[step] if step in self._batches else self._task.batch_of(step)

    def gradients(
        self, batch: Batch, values: Mapping[str, Float32s], meanwhile: Callable[[], Batch | None]
    ) -> tuple[float | None, int, Gradients | None]:
        """Compute a step, with its round if all gradients are finite; else alone, to find the step at fault."""
        step = batch.step - self._task.steps.steps_before
        if self._together and step == self._together[0]:
            self._compute(values)
        if step not in self._computed:
            return self._task.gradients(batch, values, meanwhile)
        loss, gradients = self._computed[step]
        return loss, rows_of(batch.inputs), gradients

    def step_metrics(self, examples: int) -> Mapping[str, Sums]:
        """Return none: JAX models have no step metrics."""
        return {}

    def _compute(self, values: Mapping[str, Float32s]) -> None:
        losses, gradients, states = self._summed(values, list(self._batches.values()))
        if not all(np.isfinite(gradient).all() for found in (gradients, *states) for gradient in found.values()):
            return
        trained = {name: gradients[name] for name in gradients if not self._task.plan.variables[name].frozen}
        for step, loss, state in zip(self._together, losses, states, strict=True):
            self._computed[step] = loss, (trained if step == self._together[0] else {}) | state
