"""The base of all regressions: from outputs to loss, gradients and metrics.

Owns the `Model` methods of regressions and the scale of their outputs; subclasses own the network from inputs to
outputs and its pullback. Knows no layer and no option.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from parashard.data.base import Array, Batch, DataSpec
from parashard.errors import ConfigurationError
from parashard.models.classifier import Pullback
from parashard.models.layers import mean_squared_error
from parashard.plan.variables import Variable


class Regressor(ABC):
    """A model that predicts a number: y = mean + deviation * z, of its output z and the scale of the training targets.

    The loss is the mean of (z - (y - mean) / deviation)^2: the mean squared error as a share of the targets' variance,
    so that a learning rate does not depend on the targets' unit. A model that always predicts the mean has loss 1 on
    the training examples; 1 - loss is R^2 there.

    Parameters
    ----------
    spec : DataSpec
        `spec.preprocessing` has the scale; without it mean is 0 and deviation is 1.
    """

    def __init__(self, spec: DataSpec) -> None:
        target = spec.preprocessing.target if spec.preprocessing is not None else None
        self._mean, self._deviation = 0.0, 1.0
        if target is not None and target.kind == "value":
            self._mean, self._deviation = target.mean, target.deviation

    @abstractmethod
    def initial_variables(self) -> Mapping[str, Variable]:
        """Return the declared variables by name."""

    @abstractmethod
    def forward(
        self, variables: Mapping[str, Array], inputs: Array, step: int | None, xp: Any
    ) -> tuple[Array, Pullback]:
        """Return the outputs, shape (n, 1) in the variables' dtype, and the pullback of their gradient.

        Parameters
        ----------
        step : int or None
            Keys dropout; None: an evaluation, nothing is dropped.
        """

    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float | Array, Mapping[str, Array]]:
        """Return the mean squared error of the standardised targets, and its gradient by every variable."""
        outputs, pull_back = self.forward(variables, batch.inputs, batch.step, xp)
        loss, gradient, _ = mean_squared_error(outputs, self._standardised(batch.targets, outputs.dtype))
        return loss, pull_back(gradient)  # not float(loss), which would synchronise a GPU

    def evaluate(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> Mapping[str, float]:
        """Return the loss, and in the targets' own unit "mean_squared_error" and "mean_absolute_error"."""
        outputs, _ = self.forward(variables, batch.inputs, None, xp)
        loss, _, error = mean_squared_error(outputs, self._standardised(batch.targets, outputs.dtype))
        squared, absolute = xp.stack((loss, abs(error).mean())).tolist()  # one synchronisation
        return {
            "loss": squared,
            "mean_squared_error": squared * self._deviation**2,
            "mean_absolute_error": absolute * self._deviation,
        }

    def _standardised(self, targets: Array, dtype: Any) -> Array:
        return (targets.astype(dtype) - self._mean) / self._deviation


def need_values(spec: DataSpec, kind: str) -> None:
    """Raise ConfigurationError where the data has classes, whose labels are not amounts."""
    if spec.classes:
        raise ConfigurationError(
            f'model kind {kind!r} with loss "squared" predicts values, and the data has {spec.classes:,} classes; '
            'leave loss out to tell them apart, or say data.target = "value" if the labels are numbers to predict'
        )
