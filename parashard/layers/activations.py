"""Activations: elementwise functions and their derivatives.

Knows no other layer. Called by users and by the built-in models, which name them as a job file does (`ACTIVATIONS`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from parashard.data.base import Array
from parashard.layers.base import Layer, Pass, Pullback
from parashard.models.options import ActivationName


@dataclass(frozen=True)
class ReLU(Layer):
    """max(z, 0); the derivative at 0 is 0."""

    name: ClassVar[str] = "relu"

    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
        """Return max(x, 0) in a new array, and the pullback."""
        xp = at.xp
        output = xp.maximum(x, 0)
        return output, lambda gradient, to_input: (xp.multiply(gradient, output > 0, out=gradient), {})


@dataclass(frozen=True)
class Tanh(Layer):
    """tanh(z)."""

    name: ClassVar[str] = "tanh"

    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
        """Return tanh(x) in a new array, and the pullback."""
        xp = at.xp
        output = xp.tanh(x)

        def pull_back(gradient: Array, to_input: bool) -> tuple[Array, dict[str, Array]]:
            slope = output * output
            xp.subtract(1, slope, out=slope)
            return xp.multiply(gradient, slope, out=gradient), {}

        return output, pull_back


@dataclass(frozen=True)
class Sigmoid(Layer):
    """1 / (1 + exp(-z)), computed as (1 + tanh(z / 2)) / 2, which overflows nowhere."""

    name: ClassVar[str] = "sigmoid"

    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
        """Return the sigmoid of x in a new array, and the pullback."""
        xp = at.xp
        output = sigmoid(x, at)

        def pull_back(gradient: Array, to_input: bool) -> tuple[Array, dict[str, Array]]:
            slope = 1 - output
            slope *= output
            return xp.multiply(gradient, slope, out=gradient), {}

        return output, pull_back


def sigmoid(z: Array, at: Pass) -> Array:
    """Return 1 / (1 + exp(-z)) in a new array."""
    output = z * 0.5
    at.xp.tanh(output, out=output)
    output += 1
    output *= 0.5
    return output


_GELU_LINEAR = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715


@dataclass(frozen=True)
class GELU(Layer):
    """z (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))) / 2: Hendrycks and Gimpel (arXiv:1606.08415, section 2).

    The approximation with tanh, at most 5e-4 from z times the normal distribution function.
    """

    name: ClassVar[str] = "gelu"

    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
        """Return the function of x in a new array, and the pullback."""
        xp = at.xp
        t = x * x
        t *= _GELU_LINEAR * _GELU_CUBIC
        t += _GELU_LINEAR
        t *= x
        xp.tanh(t, out=t)
        output = t + 1
        output *= x
        output *= 0.5

        def pull_back(gradient: Array, to_input: bool) -> tuple[Array, dict[str, Array]]:
            slope = x * x
            slope *= 3 * _GELU_LINEAR * _GELU_CUBIC
            slope += _GELU_LINEAR
            slope *= x
            slope *= 1 - t * t
            slope += t
            slope += 1
            slope *= 0.5
            return xp.multiply(gradient, slope, out=gradient), {}

        return output, pull_back


ACTIVATIONS: Mapping[ActivationName, Layer] = {"relu": ReLU(), "gelu": GELU(), "tanh": Tanh()}
"""Those that a job file can name."""
