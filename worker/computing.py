"""Task: a step's gradient and an evaluation's metrics, by the job's model on the worker's device.

Owns the way of a batch and of variables to the device and of gradients back, and every check of what a model returns
(P6). Knows neither leases nor shards. Called by `worker.loop`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from parashard.data.base import Array, Batch, DataSource
from parashard.errors import ConfigurationError, NonFiniteGradient
from parashard.models.base import Model
from parashard.partition import Plan
from parashard.steps import StepPlan
from parashard.variables import Float32s
from worker.device import Device

EVALUATION_EXAMPLES = 1000  # held-out examples that are judged at once


@dataclass(frozen=True)
class Task:
    """What a worker computes: the model over the data, on a device."""

    model: Model
    source: DataSource
    steps: StepPlan
    plan: Plan
    device: Device
    clip_norm: float | None
    round_steps: int | None  # sync mode: N

    def gradients(self, step: int, values: Mapping[str, Float32s]) -> tuple[float, int, dict[str, Float32s]]:
        """Compute a step.

        Parameters
        ----------
        step : int
            Names the examples.
        values : mapping of str to ndarray of float32
            Every variable, as pulled; only read.

        Returns
        -------
        loss : float
        examples : int
            How many the step has.
        gradients : dict of str to ndarray of float32
            Finite, of every variable that is not frozen and that the model gave one for; clipped to `clip_norm`
            together. On a CPU they may be views of `values`, if the model made them so.

        Raises
        ------
        ConfigurationError
            If the model returns what fits none of its variables: no step would go better.
        NonFiniteGradient
            If a gradient has a value that is not finite (P6).
        """
        indices = self.steps.indices(step)
        inputs, targets = self.source.examples(indices)
        batch = self.device.batch_from_host(Batch(step, self.steps.epoch_of(step), indices, inputs, targets))
        variables = self.device.variables_from_host(values)
        raw_loss, raw = self.model.loss_and_gradients(variables, batch, self.device.xp)
        loss, gradients = self.device.to_host(raw_loss, self._trainable(raw))
        norm = _global_norm(gradients) if self.clip_norm is not None else 0.0
        # P6: before the first shard is sent anything.
        if not all(bool(np.isfinite(gradient).all()) for gradient in gradients.values()):
            raise NonFiniteGradient(f"step {step}: the gradient has a value that is not finite (loss {loss:.3g})")
        if self.clip_norm is not None and norm > self.clip_norm:
            factor = np.float32(self.clip_norm / norm)
            gradients = {name: gradient * factor for name, gradient in gradients.items()}
        return loss, len(indices), gradients

    def metrics(
        self, values: Mapping[str, Float32s], computing: Callable[[], AbstractContextManager[None]]
    ) -> dict[str, float]:
        """Judge values of the variables by all held-out examples.

        Parameters
        ----------
        values : mapping of str to ndarray of float32
            Every variable, as pulled; only read.
        computing : callable
            Entered around each of the model's computations.

        Returns
        -------
        dict of str to float
            Means over the examples.
        """
        totals: dict[str, float] = {}
        examples = self.source.spec.held_out
        variables = self.device.variables_from_host(values)
        for start in range(0, examples, EVALUATION_EXAMPLES):
            stop = min(examples, start + EVALUATION_EXAMPLES)
            inputs, targets = self.source.held_out(start, stop)
            batch = self.device.batch_from_host(Batch(-1, -1, np.arange(start, stop), inputs, targets))
            with computing():
                metrics = self.model.evaluate(variables, batch, self.device.xp)
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + float(value) * (stop - start)
        return {name: total / examples for name, total in totals.items()}

    def examples_of(self, step: int) -> str:
        """Return a step's examples for people, to be put behind why it failed."""
        indices = self.steps.indices(step)
        shown = ", ".join(str(i) for i in indices[:8])
        return f" (examples {shown}{', ...' if len(indices) > 8 else ''})"

    def _trainable(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Check a model's gradients against its variables, and leave out frozen ones."""
        variables = self.plan.variables
        for name, gradient in gradients.items():
            if name not in variables:
                raise ConfigurationError(f"the model returned a gradient for {name!r}, which is none of its variables")
            if tuple(gradient.shape) != variables[name].shape:
                raise ConfigurationError(
                    f"the model's gradient for {name!r} has shape {tuple(gradient.shape)}, the variable has "
                    f"{variables[name].shape}"
                )
        return {name: g for name, g in gradients.items() if not variables[name].frozen}


def _global_norm(gradients: Mapping[str, Float32s]) -> float:
    """Return the Euclidean norm of all gradients together, in float64, in name order."""
    squares = (np.square(gradients[name], dtype=np.float64).sum() for name in sorted(gradients))
    return float(np.sqrt(sum(squares)))
