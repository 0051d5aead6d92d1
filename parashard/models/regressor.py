"""The base of all regressions: from outputs to loss, gradients and metrics.

Owns the scale of their outputs. Knows no option. Called by the built-in models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from parashard.data.base import Array, Batch, DataSpec
from parashard.errors import ConfigurationError
from parashard.layers.base import Layer
from parashard.layers.sequential import Sequential
from parashard.metrics import Sums
from parashard.models.evaluation import Told
from parashard.plan.embedding import Keys
from parashard.plan.variables import Float32s
from parashard.protocol.messages import NO_KEYS


class Regressor(Sequential):
    """A model that predicts a number: y = mean + deviation * z, of its output z and the scale of the training targets.

    The loss is the mean of (z - (y - mean) / deviation)^2: the mean squared error as a share of the targets' variance,
    so that a learning rate does not depend on the targets' unit. A model that always predicts the mean has loss 1 on
    the training examples; 1 - loss is R^2 there.

    Parameters
    ----------
    layers : sequence of Layer
        From inputs to one output.
    spec : DataSpec
        `spec.preprocessing` has the scale; without it mean is 0 and deviation is 1.
    seed : int
        The job's; keys the dropout masks.
    """

    def __init__(self, layers: Sequence[Layer], spec: DataSpec, seed: int) -> None:
        super().__init__(
            layers, input_shape=spec.input_shape, loss="mean_squared_error", metrics=["mean_absolute_error"]
        )
        self.seed(seed)
        target = spec.preprocessing.target if spec.preprocessing is not None else None
        self._mean, self._deviation = 0.0, 1.0
        if target is not None and target.kind == "value":
            self._mean, self._deviation = target.mean, target.deviation

    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float | Array, Mapping[str, Array]]:
        """Return the mean squared error of the standardised targets, and its gradient by every variable."""
        return super().loss_and_gradients(variables, self._standardised(variables, batch), xp)

    def evaluate(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> Mapping[str, Told]:
        """Return the loss, and in the targets' own unit "mean_squared_error" and "mean_absolute_error"."""
        found = cast(
            "Mapping[str, float | Sums]", super().evaluate(variables, self._standardised(variables, batch), xp)
        )
        loss, error = float(found["loss"]), float(found["mean_absolute_error"])
        return {
            "loss": loss,
            "mean_squared_error": loss * self._deviation**2,
            "mean_absolute_error": error * self._deviation,
        }

    def predict(self, values: Mapping[str, Float32s], inputs: Any, keys: Mapping[str, Keys] = NO_KEYS) -> Array:
        """Return the predictions in the targets' own unit, shape (examples, 1)."""
        return self._mean + self._deviation * super().predict(values, inputs, keys)

    def _standardised(self, variables: Mapping[str, Array], batch: Batch) -> Batch:
        """Return the batch with its targets in units of their deviation, in the variables' dtype."""
        dtype = next(iter(variables.values())).dtype
        return replace(batch, targets=(batch.targets.astype(dtype) - self._mean) / self._deviation)


def need_values(spec: DataSpec, kind: str) -> None:
    """Raise ConfigurationError where the data has classes, whose labels are not amounts."""
    if spec.classes:
        raise ConfigurationError(
            f'model kind {kind!r} with loss "squared" predicts values, and the data has {spec.classes:,} classes; '
            'leave loss out to tell them apart, or say data.target = "value" if the labels are numbers to predict'
        )
