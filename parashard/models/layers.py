"""Activations, losses and dropout: the arithmetic that the models share.

Pure functions over the array namespace `xp` (NumPy or CuPy); the dtype is that of the arrays given, float32 in a job
and float64 where gradients are checked. Knows no variables' names and no model. Called by `dense` and `classifier`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from parashard.data.base import Array
from parashard.models.options import ActivationName
from parashard.plan.splitmix import splitmix64

_LANES = 4  # 16-bit uniforms cut from one 64-bit hash
_LANE_VALUES = 1 << 16


@dataclass(frozen=True)
class Activation:
    """An elementwise function and its derivative.

    Parameters
    ----------
    apply : callable (z, xp) -> (output, saved)
        May overwrite `z`. `saved` is what `derive` needs; it may be `output` itself, so neither may be changed before
        the backward pass.
    derive : callable (gradient, saved, xp) -> gradient
        From the gradient by the output to the gradient by `z`; overwrites and returns its first argument.
    """

    apply: Callable[[Array, Any], tuple[Array, Any]]
    derive: Callable[[Array, Any, Any], Array]


def _relu(z: Array, xp: Any) -> tuple[Array, Array]:
    output = xp.maximum(z, 0, out=z)
    return output, output


def _relu_derivative(gradient: Array, output: Array, xp: Any) -> Array:
    return xp.multiply(gradient, output > 0, out=gradient)


def _tanh(z: Array, xp: Any) -> tuple[Array, Array]:
    output = xp.tanh(z, out=z)
    return output, output


def _tanh_derivative(gradient: Array, output: Array, xp: Any) -> Array:
    slope = output * output
    xp.subtract(1, slope, out=slope)
    return xp.multiply(gradient, slope, out=gradient)


_GELU_LINEAR = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715


def _gelu(z: Array, xp: Any) -> tuple[Array, tuple[Array, Array]]:
    """Return z (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))) / 2: Hendrycks and Gimpel (arXiv:1606.08415, section 2)."""
    t = z * z
    t *= _GELU_LINEAR * _GELU_CUBIC
    t += _GELU_LINEAR
    t *= z
    xp.tanh(t, out=t)
    output = t + 1
    output *= z
    output *= 0.5
    return output, (z, t)


def _gelu_derivative(gradient: Array, saved: tuple[Array, Array], xp: Any) -> Array:
    z, t = saved
    slope = z * z
    slope *= 3 * _GELU_LINEAR * _GELU_CUBIC
    slope += _GELU_LINEAR
    slope *= z
    slope *= 1 - t * t
    slope += t
    slope += 1
    slope *= 0.5
    return xp.multiply(gradient, slope, out=gradient)


ACTIVATIONS: Mapping[ActivationName, Activation] = {
    "relu": Activation(_relu, _relu_derivative),
    "gelu": Activation(_gelu, _gelu_derivative),
    "tanh": Activation(_tanh, _tanh_derivative),
}


def softmax_cross_entropy(logits: Array, targets: Array, xp: Any) -> tuple[Array, Array]:
    """Return the mean cross-entropy of softmax(logits) and its gradient by the logits.

    loss = mean_i(log sum_j exp(z_ij) - z_i,t_i); gradient_ij = (softmax(z_i)_j - [j = t_i]) / n. The row's maximum is
    subtracted first, so no logit overflows.

    Parameters
    ----------
    logits : array of float32 or float64, shape (n, classes)
        Unchanged.
    targets : array of int64, shape (n,)
        Each in [0, classes). Not checked here, where it would cost a GPU synchronisation: data sources guarantee it.

    Returns
    -------
    loss : array, shape ()
        Still an array, so that a GPU is not waited for.
    gradient : array, shape (n, classes)
        A new array with the logits' dtype.
    """
    rows = xp.arange(len(logits))
    shifted = logits - logits.max(axis=1, keepdims=True)
    at_target = shifted[rows, targets]
    gradient = xp.exp(shifted, out=shifted)
    total = gradient.sum(axis=1, keepdims=True)
    loss = (xp.log(total[:, 0]) - at_target).mean()
    gradient /= total
    gradient[rows, targets] -= 1
    gradient /= len(logits)
    return loss, gradient


def mean_squared_error(outputs: Array, targets: Array) -> tuple[Array, Array, Array]:
    """Return the mean squared error, its gradient by the outputs, and the errors.

    loss = mean_i((z_i - t_i)^2); gradient_i = 2 (z_i - t_i) / n.

    Parameters
    ----------
    outputs : array of float32 or float64, shape (n, 1)
        Unchanged.
    targets : array of the same dtype, shape (n,)

    Returns
    -------
    loss : array, shape ()
        Still an array, so that a GPU is not waited for.
    gradient : array, shape (n, 1)
    error : array, shape (n,)
        Both are new arrays with the outputs' dtype.
    """
    error = outputs[:, 0] - targets
    return (error * error).mean(), (error * (2 / len(error)))[:, None], error


def dropout_mask(shape: tuple[int, ...], rate: float, key: tuple[int, int, int], dtype: Any, xp: Any) -> Array:
    """Return the factors of inverted dropout (Srivastava et al., JMLR 2014, section 10): 0 or 1 / P(kept).

    Element e (row-major) is dropped where 16-bit lane e mod 4 of the e // 4-th hash lies below round(rate * 2^16).
    The hash is a counter-based SplitMix64 under the key, in 64-bit integers: the same mask on NumPy and on CuPy, and
    on every worker. The factor uses the rounded rate, so the expectation of the mask is exactly 1.

    Parameters
    ----------
    shape : tuple of int
        Shape of the activations.
    rate : float
        Probability of dropping an element, in [0, 0.99]; 2^-16 is its resolution.
    key : (seed, step, layer)
        Identifies the mask.
    dtype : dtype
        float32 or float64.
    """
    elements = math.prod(shape)
    threshold = round(rate * _LANE_VALUES)
    hashes = splitmix64(xp.arange(-(-elements // _LANES), dtype=xp.uint64), _dropout_key(*key))
    lanes = hashes.view(xp.uint16)
    mask = (lanes[:elements] >= threshold).astype(dtype)
    mask *= _LANE_VALUES / (_LANE_VALUES - threshold)
    return mask.reshape(shape)


def _dropout_key(seed: int, step: int, layer: int) -> int:
    text = f"parashard dropout\0{seed}\0{step}\0{layer}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
