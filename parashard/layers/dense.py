"""Dense layers, activations, dropout, layer normalisation and flattening."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

from parashard.data.base import Array
from parashard.errors import ConfigurationError
from parashard.job.model_options import DROPOUT_RATE_MAX, ActivationName
from parashard.layers.base import Layer, Pass, Pullback, Shape, Start, need_start, start_of
from parashard.plan.seeding import key_of, splitmix64
from parashard.plan.variables import Initializer, Variable
from parashard.process.arguments import checked_whole


@dataclass(frozen=True)
class Dense(Layer):
    """x W + b along the last axis.

    Variables: "weight", shape (inputs, units), and "bias", shape (units,), which does not decay.

    Parameters
    ----------
    units : int
        Number of outputs, per position if an example has several.
    bias : bool
        False: omit b.
    initializer : {"glorot_uniform", "he_normal"} or Initializer
        Initialises the weight; the bias starts at zero. "he_normal" suits a layer before a ReLU.
    """

    name: ClassVar[str] = "dense"

    units: int
    bias: bool = True
    initializer: Start = "glorot_uniform"

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", checked_whole("Dense: units", self.units))
        need_start("Dense", self.initializer)

    def output_shape(self, shape: Shape) -> Shape:
        if not shape:
            raise ConfigurationError("an example has no axis; its input_shape has at least one, such as (1,)")
        return (*shape[:-1], self.units)

    def variables(self, shape: Shape) -> dict[str, Variable]:
        start = start_of(self.initializer, shape[-1], self.units)
        declared = {"weight": Variable("weight", (shape[-1], self.units), start)}
        return declared | ({"bias": Variable("bias", (self.units,), decay=False)} if self.bias else {})

    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
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
    """Reshapes an example to one axis, in row-major order."""

    name: ClassVar[str] = "flatten"

    def output_shape(self, shape: Shape) -> Shape:
        """Return the shape of one axis with all numbers of an example."""
        return (math.prod(shape),)

    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
        return x.reshape(len(x), -1), lambda gradient, to_input: (gradient.reshape(x.shape), {})


@dataclass(frozen=True)
class ReLU(Layer):
    """max(z, 0); the derivative at 0 is 0."""

    name: ClassVar[str] = "relu"

    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
        xp = at.xp
        output = xp.maximum(x, 0)
        return output, lambda gradient, to_input: (xp.multiply(gradient, output > 0, out=gradient), {})


@dataclass(frozen=True)
class Tanh(Layer):
    """tanh(z)."""

    name: ClassVar[str] = "tanh"

    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
        xp = at.xp
        output = xp.tanh(x)

        def pull_back(gradient: Array, to_input: bool) -> tuple[Array, dict[str, Array]]:
            slope = output * output
            xp.subtract(1, slope, out=slope)
            return xp.multiply(gradient, slope, out=gradient), {}

        return output, pull_back


@dataclass(frozen=True)
class Sigmoid(Layer):
    """1 / (1 + exp(-z)), computed as (1 + tanh(z / 2)) / 2, which never overflows."""

    name: ClassVar[str] = "sigmoid"

    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
        xp = at.xp
        output = x * 0.5
        xp.tanh(output, out=output)
        output += 1
        output *= 0.5

        def pull_back(gradient: Array, to_input: bool) -> tuple[Array, dict[str, Array]]:
            slope = 1 - output
            slope *= output
            return xp.multiply(gradient, slope, out=gradient), {}

        return output, pull_back


_GELU_LINEAR = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715


@dataclass(frozen=True)
class GELU(Layer):
    """z (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))) / 2: Hendrycks and Gimpel (arXiv:1606.08415, section 2).

    The tanh approximation; it differs by at most 5e-4 from z times the normal distribution function.
    """

    name: ClassVar[str] = "gelu"

    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
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
"""Activations that a job file can name."""


@dataclass(frozen=True)
class LayerNorm(Layer):
    """(x - mean) / sqrt(variance + epsilon) * w + b along the last axis (Ba, Kiros, Hinton, arXiv:1607.06450).

    The variance is the biased one. Variables: "weight", initially ones, and "bias", initially zeros, both of the last
    axis's length; neither decays.

    Parameters
    ----------
    epsilon : float
        Added to the variance to avoid division by zero.
    """

    name: ClassVar[str] = "norm"

    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        if not isinstance(self.epsilon, Real) or not self.epsilon > 0:
            raise ConfigurationError(f"LayerNorm: epsilon is a float greater than 0, found {self.epsilon!r}")
        object.__setattr__(self, "epsilon", float(self.epsilon))

    def output_shape(self, shape: Shape) -> Shape:
        """Return the same shape; it must have at least one axis."""
        if not shape:
            raise ConfigurationError("an example has no axis to normalise along")
        return shape

    def variables(self, shape: Shape) -> dict[str, Variable]:
        return {
            "weight": Variable("weight", shape[-1:], Initializer("constant", 1.0), decay=False),
            "bias": Variable("bias", shape[-1:], decay=False),
        }

    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
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


_LANES = 4  # 16-bit uniforms cut from one 64-bit word
_LANE_VALUES = 1 << 16


@dataclass(frozen=True)
class Dropout(Layer):
    """Inverted dropout (Srivastava et al., JMLR 2014, section 10): sets each number to 0, or divides it by P(kept).

    The mask depends only on the seed, the step and the layer's number among the dropout layers. Evaluations drop
    nothing.

    Parameters
    ----------
    rate : float
        Probability of dropping a number, in [0, 0.99], with a resolution of 2^-16.
    """

    name: ClassVar[str] = "dropout"

    rate: float

    def __post_init__(self) -> None:
        if not isinstance(self.rate, Real) or not 0 <= self.rate <= DROPOUT_RATE_MAX:
            raise ConfigurationError(f"Dropout: rate is between 0 and {DROPOUT_RATE_MAX}, found {self.rate!r}")
        object.__setattr__(self, "rate", float(self.rate))  # a NumPy float64 would promote float32 arrays

    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
        if at.key is None or not self.rate:
            return x, lambda gradient, to_input: (gradient, {})
        mask = dropout_mask(x.shape, self.rate, at.key, x.dtype, at.xp)
        return x * mask, lambda gradient, to_input: (at.xp.multiply(gradient, mask, out=gradient), {})


def dropout_mask(shape: tuple[int, ...], rate: float, key: tuple[int, int, int], dtype: Any, xp: Any) -> Array:
    """Return the factors of inverted dropout in a dtype, float32 or float64: 0 or 1 / P(kept).

    Element e (row-major) is dropped if 16-bit lane e mod 4 of random word e // 4 for (seed, step, layer) is below
    round(rate * 2^16). The factor uses the rounded rate, so the expectation of the mask is exactly 1.
    """
    seed, step, layer = key
    elements = math.prod(shape)
    threshold = round(rate * _LANE_VALUES)
    hashes = splitmix64(
        xp.arange(-(-elements // _LANES), dtype=xp.uint64), key_of(f"parashard dropout\0{seed}\0{step}\0{layer}")
    )
    lanes = hashes.view(xp.uint16)
    mask = (lanes[:elements] >= threshold).astype(dtype)
    mask *= _LANE_VALUES / (_LANE_VALUES - threshold)
    return mask.reshape(shape)
