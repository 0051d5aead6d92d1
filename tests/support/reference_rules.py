"""The update rules in NumPy: what the shard's kernels, `fused` and `cuda`, are held against, bit for bit.

Every function works in place on 1-D contiguous float32 arrays of one length: a run of a shard's flat vector. Nothing is
checked: the caller ensures finite gradients and matching lengths before the first write.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from parashard.plan.variables import Float32s
from parashard_server.state.kernels.rules import OF_PREPARED, RULES, Values, decayed, lamb_direction, prepared
from parashard_server.state.kernels.scalars import BLOCK_ELEMENTS, trust_ratio

_f32 = np.float32


def update(rule: str, values: Values | None, weights: Float32s, gradient: Float32s, *slots: Float32s) -> None:
    """Apply a rule; see `fused.update`."""
    if values is None:
        return
    g = prepared(gradient, weights, *_rounded(values, *OF_PREPARED))
    if rule == "lamb":
        _lamb(values, weights, g, *slots)
    elif rule == "rowwise_adagrad":
        _rowwise_adagrad(values, weights, g, *slots)
    else:
        scalars = _rounded(values, *RULES[rule].of_step, elements=weights.size)
        _assign((weights, *slots), RULES[rule].step(weights, g, *slots, *scalars))


def _lamb(values: Values, weights: Float32s, g: Float32s, m: Float32s, v: Float32s) -> None:
    rule = RULES["lamb"]
    _assign((m, v), rule.step(weights, g, m, v, *_rounded(values, *rule.of_step)))
    u = lamb_direction(weights, m, v, *_rounded(values, "correction", "epsilon_t", "decay"))
    ratio = trust_ratio(np.stack([_squares_of_blocks(weights), _squares_of_blocks(u)], axis=1))
    weights -= _f32(values["learning_rate"] * ratio) * u


def _rowwise_adagrad(values: Values, weights: Float32s, g: Float32s, accumulator: Float32s) -> None:
    length = max(weights.size // max(accumulator.size, 1), 1)
    rows, g, of_row = weights.reshape(-1, length), g.reshape(-1, length), accumulator[:, None]
    squares = np.zeros_like(accumulator)
    for column in g.T:
        squares += column * column
    mean_square = (squares / _f32(length))[:, None]
    step = RULES["rowwise_adagrad"].step
    _assign((rows, of_row), step(rows, g, of_row, mean_square, *_rounded(values, "learning_rate", "epsilon")))


def decay(weights: Float32s, share: float) -> None:
    """Shrink weights: w <- w - share w (the decoupled weight decay of rules other than `adamw` and `lamb`)."""
    weights[:] = decayed(weights, _f32(share))


def accumulate(total: Float32s, gradient: Float32s) -> None:
    """Add a gradient to a round's sum: total <- total + gradient. The caller keeps the order of steps."""
    total += gradient


def is_finite(array: Float32s) -> bool:
    """Return whether no element is NaN or infinite."""
    return bool(np.isfinite(array).all())


def _rounded(values: Values, *names: str, elements: int = 0) -> list[Any]:
    """Return scalars as float32; those that each row has its own of, for each of so many elements."""
    scalars = [np.asarray(values[name], np.float32) for name in names]
    return [np.repeat(one, elements // max(one.size, 1)) if one.ndim else one for one in scalars]


def _assign(arrays: tuple[Float32s, ...], values: tuple[Float32s, ...]) -> None:
    for array, value in zip(arrays, values, strict=True):
        array[:] = value


def _squares_of_blocks(values: Float32s) -> NDArray[np.float64]:
    squares = values.astype(np.float64) ** 2
    starts = range(0, squares.size, BLOCK_ELEMENTS)
    sums = [np.add.accumulate(squares[start : start + BLOCK_ELEMENTS])[-1] for start in starts]  # np.sum adds in pairs
    return np.array(sums, np.float64)
