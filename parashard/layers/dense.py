"""Dense layers, and what makes an image a vector.

Knows no other layer. Called by users and by the built-in models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from parashard.data.base import Array
from parashard.errors import ConfigurationError
from parashard.layers.base import Layer, Pass, Pullback, Shape, Start, need_count, need_start, start_of
from parashard.plan.variables import Variable


@dataclass(frozen=True)
class Dense(Layer):
    """x W + b along the last axis.

    Variables: "weight", shape (inputs, units), and "bias", shape (units,), which does not decay.

    Parameters
    ----------
    units : int
        Outputs of an example, or of each of its positions.
    bias : bool
        False: there is no b.
    initializer : {"glorot_uniform", "he_normal"} or Initializer
        Of the weight; the bias begins with zeros. "he_normal" suits a layer before a ReLU.
    """

    name: ClassVar[str] = "dense"

    units: int
    bias: bool = True
    initializer: Start = "glorot_uniform"

    def __post_init__(self) -> None:
        need_count("Dense", "units", self.units)
        need_start("Dense", self.initializer)

    def output_shape(self, shape: Shape) -> Shape:
        """Return the shape with `units` in place of its last axis."""
        if not shape:
            raise ConfigurationError("an example has no axis; its input_shape has at least one, such as (1,)")
        return (*shape[:-1], self.units)

    def variables(self, shape: Shape) -> dict[str, Variable]:
        """Return the declared weight and bias."""
        start = start_of(self.initializer, shape[-1], self.units)
        declared = {"weight": Variable("weight", (shape[-1], self.units), start)}
        return declared | ({"bias": Variable("bias", (self.units,), decay=False)} if self.bias else {})

    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
        """Return the output and the pullback."""
        xp, weight = at.xp, weights["weight"]
        inputs = x.reshape(-1, x.shape[-1])
        output = xp.matmul(inputs, weight)
        if self.bias:
            output += weights["bias"]

        def pull_back(gradient: Array, to_input: bool) -> tuple[Array | None, dict[str, Array]]:
            gradient = gradient.reshape(-1, self.units)
            gradients = {"weight": xp.matmul(inputs.T, gradient)}
            if self.bias:
                gradients["bias"] = gradient.sum(axis=0)
            return xp.matmul(gradient, weight.T).reshape(x.shape) if to_input else None, gradients

        return output.reshape(*x.shape[:-1], self.units), pull_back


@dataclass(frozen=True)
class Flatten(Layer):
    """All axes of an example as one, in row-major order."""

    name: ClassVar[str] = "flatten"

    def output_shape(self, shape: Shape) -> Shape:
        """Return one axis with all numbers of an example."""
        return (math.prod(shape),)

    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
        """Return a view where there can be one, and the pullback."""
        return x.reshape(len(x), -1), lambda gradient, to_input: (gradient.reshape(x.shape), {})
