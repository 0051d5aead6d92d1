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
SMALLEST = np.finfo(np.float32).tiny
"""Below it are the denormals."""
_RAISED = 2.0**64
"""Raises what is denormal to where float32 has 24 bits of it."""


class Flushed(np.ndarray):
    """Float32s whose operations take a denormal number for a zero of its sign, and give such a zero in its place.

    A result is denormal if it is below the smallest normal number after it is rounded to 24 bits. So x86-64 has it by
    FTZ and DAZ; NumPy, which has fewer bits there, may have rounded it up to that number.
    """

    def __array_ufunc__(self, operation: np.ufunc, method: str, *operands: Any, **options: Any) -> Any:
        """Apply an operation of NumPy, which makes a new array."""
        assert method == "__call__", f"{operation.__name__}.{method} is no operation of a rule"
        assert not options, f"{operation.__name__} with {[*options]} is no operation of a rule"
        given = [_with_zeros(np.asarray(one), np.abs(one) < SMALLEST) for one in map(np.asarray, operands)]
        if operation in (np.maximum, np.minimum):
            a, b = given
            return np.where(a < b if operation is np.maximum else b < a, b, a).view(Flushed)
        found = operation(*given)
        if found.dtype == np.bool_:
            return found
        below = np.abs(found) < SMALLEST
        if (np.abs(found) == SMALLEST).any():
            with np.errstate(all="ignore"):
                wide = operation(*(one.astype(np.float64) for one in given))
                below = np.abs((wide * _RAISED).astype(np.float32)) < SMALLEST * _RAISED
        return _with_zeros(found, below).view(Flushed)

    def __array_function__(self, function: Any, types: Any, given: Any, options: Any) -> Any:
        """Call a function of NumPy, such as `where`."""
        return super().__array_function__(function, types, given, options).view(Flushed)


def _with_zeros(values: Any, where: Any) -> NDArray[np.float32]:
    return np.where(where, np.copysign(_f32(0.0), values), values) if where.any() else values


def update(
    rule: str, values: Values | None, weights: Float32s, gradient: Float32s, *slots: Float32s, kind: Any = Flushed
) -> None:
    """Apply a rule; see `fused.update`. `kind`: of the arrays; ndarray keeps denormals, and is quicker."""
    if values is None:
        return
    weights, gradient, *state = (vector.view(kind) for vector in (weights, gradient, *slots))
    g = prepared(gradient, weights, *_rounded(values, *OF_PREPARED))
    if rule == "lamb":
        _lamb(values, weights, g, *state)
    elif rule == "rowwise_adagrad":
        _rowwise_adagrad(values, weights, g, *state)
    else:
        scalars = _rounded(values, *RULES[rule].of_step, elements=weights.size)
        _assign((weights, *state), RULES[rule].step(weights, g, *state, *scalars))


def _lamb(values: Values, weights: Float32s, g: Float32s, m: Float32s, v: Float32s) -> None:
    rule = RULES["lamb"]
    _assign((m, v), rule.step(weights, g, m, v, *_rounded(values, *rule.of_step)))
    u = lamb_direction(weights, m, v, *_rounded(values, "correction", "epsilon_t", "decay"))
    ratio = trust_ratio(np.stack([_squares_of_blocks(weights), _squares_of_blocks(u)], axis=1))
    _assign((weights,), (weights - _f32(values["learning_rate"] * ratio) * u,))


def _rowwise_adagrad(values: Values, weights: Float32s, g: Float32s, accumulator: Float32s) -> None:
    length = max(weights.size // max(accumulator.size, 1), 1)
    rows, g, of_row = weights.reshape(-1, length), g.reshape(-1, length), accumulator[:, None]
    squares = np.zeros(accumulator.size, np.float32).view(type(accumulator))
    for column in g.T:
        squares = squares + column * column
    mean_square = (squares / _f32(length))[:, None]
    step = RULES["rowwise_adagrad"].step
    _assign((rows, of_row), step(rows, g, of_row, mean_square, *_rounded(values, "learning_rate", "epsilon")))


def decay(weights: Float32s, share: float) -> None:
    """Shrink weights: w <- w - share w (the decoupled weight decay of rules other than `adamw` and `lamb`)."""
    weights[:] = decayed(weights.view(Flushed), _f32(share))


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
    squares = np.asarray(abs(values), np.float64) ** 2  # abs is an operation: it flushes
    starts = range(0, squares.size, BLOCK_ELEMENTS)
    sums = [np.add.accumulate(squares[start : start + BLOCK_ELEMENTS])[-1] for start in starts]  # np.sum adds in pairs
    return np.array(sums, np.float64)
