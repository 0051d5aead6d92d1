"""Layer normalisation: no statistics over the batch, so nothing to keep beside the weights.

Knows no other layer. Called by users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from parashard.data.base import Array
from parashard.errors import ConfigurationError
from parashard.layers.base import Layer, Pass, Pullback, Shape
from parashard.plan.variables import Initializer, Variable


@dataclass(frozen=True)
class LayerNorm(Layer):
    """(x - mean) / sqrt(variance + epsilon) * w + b along the last axis (Ba, Kiros, Hinton, arXiv:1607.06450).

    The variance is the biased one. Variables: "weight", ones, and "bias", zeros, both of the last axis's length;
    neither decays.

    Parameters
    ----------
    epsilon : float
        Added to the variance, against division by zero.
    """

    name: ClassVar[str] = "norm"

    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        if not isinstance(self.epsilon, float) or not self.epsilon > 0:
            raise ConfigurationError(f"LayerNorm: epsilon is a float greater than 0, found {self.epsilon!r}")

    def output_shape(self, shape: Shape) -> Shape:
        """Return the shape, which has at least one axis."""
        if not shape:
            raise ConfigurationError("an example has no axis to normalise along")
        return shape

    def variables(self, shape: Shape) -> dict[str, Variable]:
        """Return the declared weight and bias."""
        return {
            "weight": Variable("weight", shape[-1:], Initializer("constant", 1.0), decay=False),
            "bias": Variable("bias", shape[-1:], decay=False),
        }

    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
        """Return the output in a new array, and the pullback."""
        weight, others = weights["weight"], tuple(range(x.ndim - 1))
        unit = x - x.mean(axis=-1, keepdims=True)
        scale = 1 / at.xp.sqrt((unit * unit).mean(axis=-1, keepdims=True) + self.epsilon)
        unit *= scale

        def pull_back(gradient: Array, to_input: bool) -> tuple[Array | None, dict[str, Array]]:
            gradients = {"weight": (gradient * unit).sum(axis=others), "bias": gradient.sum(axis=others)}
            if not to_input:
                return None, gradients
            gradient *= weight
            along = (gradient * unit).mean(axis=-1, keepdims=True)
            gradient -= gradient.mean(axis=-1, keepdims=True)
            gradient -= along * unit
            gradient *= scale
            return gradient, gradients

        return unit * weight + weights["bias"], pull_back
