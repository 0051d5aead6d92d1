"""Task: a step's gradient and an evaluation's metrics, by the job's model on the worker's device.

Owns the way of a batch and of variables to the device and of gradients back, and every check of what a model returns
(P6). Knows neither leases nor shards. Called by `worker.loop`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from parashard.blame import place_of
from parashard.data.base import Array, Batch, DataSource, Indices
from parashard.errors import ConfigurationError, NonFiniteGradient, ParashardError
from parashard.models.base import Model
from parashard.partition import Plan
from parashard.steps import StepPlan
from parashard.variables import Float32s
from worker.device import Device

EVALUATION_EXAMPLES = 1000  # held-out examples that are judged at once


class WrongResult(ConfigurationError):
    """The model returned what fits none of its variables: no step would go better."""


class BadExample(ParashardError):
    """An example has a value that is not finite: whatever a model makes of it, it is not the model's fault."""


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
        WrongResult
            If the model returns what fits none of its variables.
        NonFiniteGradient
            If the loss's gradient has a value that is not finite, though the examples have none (P6).
        BadExample
            If it has one since an example does.
        """
        indices = self.steps.indices(step)
        inputs, targets = self.source.examples(indices)
        batch = self.device.batch_from_host(Batch(step, self.steps.epoch_of(step), indices, inputs, targets))
        variables = self.device.variables_from_host(values)
        raw_loss, raw = self._checked(self.model.loss_and_gradients(variables, batch, self.device.xp))
        loss, gradients = self.device.to_host(raw_loss, self._trainable(raw))
        norm = _global_norm(gradients) if self.clip_norm is not None else 0.0
        # P6: before the first shard is sent anything.
        bad = [name for name in sorted(gradients) if not np.isfinite(gradients[name]).all()]
        if bad:
            _check_examples(indices, inputs, targets)
            raise NonFiniteGradient(_not_finite(step, loss, bad[0], gradients[bad[0]]))
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

    def _checked(self, result: object) -> tuple[Any, Mapping[str, Array]]:
        """Return a model's loss and gradients if that is what it returned."""
        due = "due is a loss and a mapping of gradients by variable"
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise self._wrong(f"returned {_with_article(type(result).__name__)}; {due}")
        loss, gradients = result
        if not isinstance(gradients, Mapping):
            raise self._wrong(f"returned a loss and {_with_article(type(gradients).__name__)}; {due}")
        if math.prod(getattr(loss, "shape", ())) != 1:
            raise self._wrong(f"returned a loss of shape {tuple(loss.shape)}; due is the mean over the batch")
        return loss, gradients

    def _trainable(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Check a model's gradients against its variables, and leave out frozen ones."""
        variables = self.plan.variables
        for name, gradient in gradients.items():
            if name not in variables:
                known = ", ".join(sorted(variables))
                raise self._wrong(f"returned a gradient for {name!r}, which is none of its variables: {known}")
            if not hasattr(gradient, "shape"):
                raise self._wrong(f"returned {_with_article(type(gradient).__name__)} for {name!r}; due is an array")
            if tuple(gradient.shape) != variables[name].shape:
                raise self._wrong(
                    f"returned a gradient for {name!r} of shape {tuple(gradient.shape)}; the variable has "
                    f"{variables[name].shape}"
                )
        return {name: g for name, g in gradients.items() if not variables[name].frozen}

    def _wrong(self, what: str) -> WrongResult:
        return WrongResult(f"{place_of(self.model.loss_and_gradients)}loss_and_gradients {what}")


def _check_examples(indices: Indices, inputs: Array, targets: Array) -> None:
    for index, example, target in zip(indices, inputs, targets, strict=True):
        if any(values.dtype.kind == "f" and not np.isfinite(values).all() for values in (example, target)):
            raise BadExample(f"example {index} of the data has a value that is not finite")


def _not_finite(step: int, loss: float, variable: str, gradient: Float32s) -> str:
    if not math.isfinite(loss):
        return f"loss became {'NaN' if math.isnan(loss) else 'infinite'} at step {step}"
    what = "NaN" if np.isnan(gradient).any() else "infinite"
    return f"the gradient of {variable!r} became {what} at step {step}, with a loss of {loss:.3g}"


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def _global_norm(gradients: Mapping[str, Float32s]) -> float:
    """Return the Euclidean norm of all gradients together, in float64, in name order."""
    squares = (np.square(gradients[name], dtype=np.float64).sum() for name in sorted(gradients))
    return float(np.sqrt(sum(squares)))
