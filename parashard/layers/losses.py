"""Losses: the mean over a batch, and its gradient by the model's outputs.

With example weights the loss is sum(weight * loss) / examples. Pure functions over the array namespace `xp`. Targets
out of range are detected only with NumPy, where the check is cheap.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parashard.data.base import Array
from parashard.errors import WrongModel


def softmax_cross_entropy(
    logits: Array, targets: Array, xp: Any, sample_weight: Array | None = None
) -> tuple[Array, Array]:
    """Return the mean cross-entropy of softmax(logits) and its gradient by the logits.

    loss = mean_i(log sum_j exp(z_ij) - z_i,t_i); gradient_ij = (softmax(z_i)_j - [j = t_i]) / n. The row's maximum is
    subtracted first, so no logit overflows.

    Parameters
    ----------
    logits : array of float32 or float64, shape (..., classes)
        Not modified. The mean is over all axes but the last.
    targets : array of int64 or bool, of the logits' shape without its last axis
        Each in [0, classes).
    sample_weight : array, shape (examples,), optional
        Multiplies the loss of each example.

    Returns
    -------
    loss : array, shape ()
        Kept as an array, so that the call does not wait for a GPU.
    gradient : array of the logits' shape
        A new array with the logits' dtype.

    Raises
    ------
    WrongModel
        If the targets are not class labels for these logits.
    """
    classes = logits.shape[-1]
    if targets.shape != logits.shape[:-1] or targets.dtype.kind not in "biu":
        raise WrongModel(
            f"softmax_cross_entropy: targets are {targets.dtype} of shape {targets.shape}; due for outputs of shape "
            f"{logits.shape} are class labels (whole numbers) of shape {logits.shape[:-1]}"
        )
    shape, logits, targets = logits.shape, logits.reshape(-1, classes), targets.reshape(-1)
    if targets.dtype.kind == "b":
        targets = targets.astype(np.int64)
    if isinstance(targets, np.ndarray) and targets.size and not 0 <= targets.min() <= targets.max() < classes:
        wrong = targets.max() if targets.max() >= classes else targets.min()
        raise WrongModel(f"softmax_cross_entropy: found class {wrong}; the outputs have classes 0 to {classes - 1}")
    rows = xp.arange(len(logits))
    shifted = logits - logits.max(axis=1, keepdims=True)
    at_target = shifted[rows, targets]
    gradient = xp.exp(shifted, out=shifted)
    total = gradient.sum(axis=1, keepdims=True)
    each = xp.log(total[:, 0]) - at_target
    gradient /= total
    gradient[rows, targets] -= 1
    gradient /= len(logits)
    if sample_weight is not None:
        weights = _weights(sample_weight, shape[:-1], logits.dtype, xp).reshape(-1)
        each *= weights
        gradient *= weights[:, None]
    loss = each.mean()
    return loss, gradient.reshape(shape)


def sigmoid_cross_entropy(
    logits: Array, targets: Array, xp: Any, sample_weight: Array | None = None
) -> tuple[Array, Array]:
    """Return the mean cross-entropy of sigmoid(logits) and its gradient by the logits.

    loss = mean(max(z, 0) - z t + log(1 + exp(-abs(z)))); gradient = (sigmoid(z) - t) / size. No logit overflows.
    Otherwise as `softmax_cross_entropy`.

    Parameters
    ----------
    logits : array of float32 or float64
        The mean is over all its numbers.
    targets : array of the logits' shape, or without a last axis of length 1
        Probabilities in [0, 1], usually 0 or 1.
    """
    due = _like(targets, logits, "sigmoid_cross_entropy")
    small = xp.exp(-abs(logits))  # in (0, 1]
    each = xp.maximum(logits, 0) - logits * due + xp.log1p(small)
    gradient = xp.maximum(small, logits >= 0) / (1 + small)  # 1 / (1 + e^-z) for z >= 0, e^z / (1 + e^z) below
    gradient -= due
    gradient /= logits.size
    if sample_weight is not None:
        weights = _weights(sample_weight, logits.shape, logits.dtype, xp)
        each *= weights
        gradient *= weights
    return each.mean(), gradient


def mean_squared_error(
    outputs: Array, targets: Array, xp: Any, sample_weight: Array | None = None
) -> tuple[Array, Array]:
    """Return the mean squared error and its gradient by the outputs.

    loss = mean((z - t)^2), over all numbers; gradient = 2 (z - t) / size. Otherwise as `sigmoid_cross_entropy`.
    """
    error = outputs - _like(targets, outputs, "mean_squared_error")
    each, gradient = error * error, error * (2 / error.size)
    if sample_weight is not None:
        weights = _weights(sample_weight, outputs.shape, outputs.dtype, xp)
        each *= weights
        gradient *= weights
    return each.mean(), gradient


def _weights(given: Array, shape: tuple[int, ...], dtype: Any, xp: Any) -> Array:
    """Broadcast example weights to a shape whose first axis is the examples."""
    spread: Array = xp.broadcast_to(given.astype(dtype).reshape(-1, *[1] * (len(shape) - 1)), shape)
    return spread


def _like(targets: Array, outputs: Array, loss: str) -> Array:
    """Return targets in the outputs' shape and dtype; only a last axis of length 1 may be missing."""
    if outputs.shape not in (targets.shape, (*targets.shape, 1)):
        raise WrongModel(f"{loss}: targets have shape {targets.shape}, and the outputs {outputs.shape}")
    return targets.reshape(outputs.shape).astype(outputs.dtype, copy=False)
