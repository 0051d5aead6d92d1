"""A round's steps at once, one on each of JAX's devices, which add up their gradients: what `TPUStrategy` computes by.

The sum is pushed as the gradient of the round's first step, and nothing as that of the others: their mean is the same.
Knows neither shard nor run. Called by `parashard.api.in_process.training`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from parashard.api.in_process.computing import ComputedStep, PullRows, Replicas
from parashard.api.strategies import devices
from parashard.data.tree import rows_of
from parashard.errors import ConfigurationError
from parashard.jax import Model, Summed
from parashard.job.schema import Job
from parashard.models.base import Model as AnyModel
from parashard.plan.variables import Float32s
from parashard_worker.computing import Task


def check(model: AnyModel, job: Job) -> None:
    """Refuse what cannot be computed so.

    Raises
    ------
    ConfigurationError
        If the model is not one of JAX, or each step's gradient is to be clipped by itself.
    """
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
    """Steps of a round, one on each device.

    Parameters
    ----------
    task : Task
        Of a model that `check` lets pass.
    replicas : int
        Devices.
    """

    def __init__(self, task: Task, replicas: int) -> None:
        assert isinstance(task.model, Model), task.model
        self._task = task
        self._replicas = replicas
        self._alone = Replicas(task)
        self._summed: Summed = task.model.summed_over(jax.sharding.Mesh(np.array(devices(replicas)), ("steps",)))

    def groups(self, steps: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return the whole round where there is a step of the same size for each device, else each step by itself."""
        sizes = {len(self._task.steps.indices(step)) for step in steps}
        if len(steps) == self._replicas and len(sizes) == 1:
            return [steps]
        return self._alone.groups(steps)

    def compute(
        self, steps: Sequence[int], values: Mapping[str, Float32s], pull_rows: PullRows
    ) -> Sequence[ComputedStep]:
        """Compute them at once; where a gradient is not finite each by itself, which says whose it is."""
        if len(steps) < self._replicas or self._replicas == 1:
            return self._alone.compute(steps, values, pull_rows)
        batches = [self._task.batch_of(step) for step in steps]
        losses, gradients, states = self._summed(values, batches)
        if not all(np.isfinite(gradient).all() for found in (gradients, *states) for gradient in found.values()):
            return self._alone.compute(steps, values, pull_rows)
        trained = {name: gradients[name] for name in gradients if not self._task.plan.variables[name].frozen}
        return [
            ComputedStep(
                batch.step - self._task.steps.steps_before,
                loss,
                rows_of(batch.inputs),
                (trained if batch is batches[0] else {}) | state,
            )
            for batch, loss, state in zip(batches, losses, states, strict=True)
        ]
