"""The update rules as machine code, on several threads: the signatures and the bits of `reference`.

Rounds scalars to float32 and hands each compiled loop to the lanes. Called by `parashard_server.state.optimizer` and by
the shard. See `reference` for what each function does; the bits do not depend on the number of threads.
"""

from __future__ import annotations

import struct
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parashard.plan.variables import Float32s
from parashard_server.state.kernels.lanes import Lanes
from parashard_server.state.kernels.machine_code import REFUSED, function
from parashard_server.state.kernels.scalars import (
    BLOCK_ELEMENTS,
    SMALLEST_FTRL_RATE,
    bias_corrected,
    corrections,
    epsilons,
    momentum_factors,
    trust_ratio,
)

_SCALARS_MAX = 10
_PACK = [struct.Struct(f"={count}f").pack for count in range(_SCALARS_MAX + 1)]
_lanes = Lanes(1)
_function = cache(function)


def _packed(scalars: tuple[float, ...]) -> bytes:
    """Return scalars as float32, each rounded once; beyond float32's range they are infinite."""
    try:
        return _PACK[len(scalars)](*scalars)
    except OverflowError:
        with np.errstate(over="ignore"):
            return np.array(scalars, np.float32).tobytes()


def _run(name: str, arrays: tuple[Float32s, ...], *scalars: float) -> list[int]:
    results = _lanes.run(_function(name, len(arrays)), arrays, _packed(scalars) if scalars else b"")
    if REFUSED in results:
        raise ValueError(f"{name}: vectors must be contiguous and of one length, found {_shapes(arrays)}")
    return results


def _shapes(arrays: tuple[NDArray[Any], ...]) -> str:
    return ", ".join(f"{array.dtype} {array.shape} of strides {array.strides}" for array in arrays)


def use_threads(threads: int) -> None:
    """Set how many threads work on one large call, for the whole process; while no kernel runs."""
    global _lanes  # noqa: PLW0603  # like the threads of BLAS: cores are the process's, and bits do not depend on it
    if threads != _lanes.threads:
        _lanes.close()
        _lanes = Lanes(threads)


def warm_up(*, rounds: bool = True) -> None:
    """Load the kernels that pushes need besides their optimizer's, or compile them.

    Parameters
    ----------
    rounds : bool
        With the kernel that adds gradients.
    """
    values = np.empty(0, np.float32)
    is_finite(values)
    copy(values, values)
    if rounds:
        accumulate(values, values)


def warm_up_rows() -> None:
    """Load the kernels that rows of tables need besides their optimizer's, or compile them."""
    for name, arrays in _RECORD_LOOPS.items():
        _function(name, arrays)


def sgd(
    weights: Float32s, gradient: Float32s, *, learning_rate: float, weight_decay: float, clip: float, scale: float
) -> None:
    """See `reference.sgd`."""
    _run("sgd", (weights, gradient), learning_rate, weight_decay, clip, scale)


def momentum(
    weights: Float32s, gradient: Float32s, velocity: Float32s,
    *, learning_rate: float, momentum: float, rate_in_velocity: float = 0.0, weight_decay: float, clip: float,
    scale: float,
) -> None:  # fmt: skip
    """See `reference.momentum`."""
    factors = momentum_factors(learning_rate, rate_in_velocity)
    _run("momentum", (weights, gradient, velocity), *factors, momentum, weight_decay, clip, scale)


def nesterov(
    weights: Float32s, gradient: Float32s, velocity: Float32s,
    *, learning_rate: float, momentum: float, rate_in_velocity: float = 0.0, weight_decay: float, clip: float,
    scale: float,
) -> None:  # fmt: skip
    """See `reference.nesterov`."""
    factors = momentum_factors(learning_rate, rate_in_velocity)
    _run("nesterov", (weights, gradient, velocity), *factors, momentum, weight_decay, clip, scale)


def adagrad(
    weights: Float32s, gradient: Float32s, accumulator: Float32s,
    *, learning_rate: float, epsilon: float, weight_decay: float, clip: float, scale: float,
) -> None:  # fmt: skip
    """See `reference.adagrad`."""
    _run("adagrad", (weights, gradient, accumulator), learning_rate, epsilon, weight_decay, clip, scale)


def rmsprop(
    weights: Float32s, gradient: Float32s, mean_square: Float32s,
    *, learning_rate: float, rho: float, epsilon: float, epsilon_in_root: float = 0.0, weight_decay: float, clip: float,
    scale: float,
) -> None:  # fmt: skip
    """See `reference.rmsprop`."""
    beside = epsilons(epsilon, epsilon_in_root)
    _run("rmsprop", (weights, gradient, mean_square), learning_rate, rho, 1.0 - rho, *beside, weight_decay, clip, scale)


def rmsprop_momentum(
    weights: Float32s, gradient: Float32s, mean_square: Float32s, velocity: Float32s,
    *, learning_rate: float, rho: float, epsilon: float, epsilon_in_root: float = 0.0, momentum: float,
    rate_in_velocity: float = 0.0, weight_decay: float, clip: float, scale: float,
) -> None:  # fmt: skip
    """See `reference.rmsprop_momentum`."""
    _run(
        "rmsprop_momentum", (weights, gradient, mean_square, velocity),
        *momentum_factors(learning_rate, rate_in_velocity), momentum, rho, 1.0 - rho,
        *epsilons(epsilon, epsilon_in_root), weight_decay, clip, scale,
    )  # fmt: skip


def rmsprop_centered(
    weights: Float32s, gradient: Float32s, mean_square: Float32s, mean: Float32s, velocity: Float32s,
    *, learning_rate: float, rho: float, epsilon: float, epsilon_in_root: float = 0.0, momentum: float,
    rate_in_velocity: float = 0.0, weight_decay: float, clip: float, scale: float,
) -> None:  # fmt: skip
    """See `reference.rmsprop_centered`."""
    _run(
        "rmsprop_centered", (weights, gradient, mean_square, mean, velocity),
        *momentum_factors(learning_rate, rate_in_velocity), momentum, rho, 1.0 - rho,
        *epsilons(epsilon, epsilon_in_root), weight_decay, clip, scale,
    )  # fmt: skip


def adam(
    weights: Float32s, gradient: Float32s, m: Float32s, v: Float32s,
    *, learning_rate: float, beta1: float, beta2: float, epsilon: float, weight_decay: float, clip: float,
    scale: float, t: int,
) -> None:  # fmt: skip
    """See `reference.adam`."""
    correction, epsilon_t = bias_corrected(beta1, beta2, epsilon, t)
    _run(
        "adam", (weights, gradient, m, v),
        learning_rate * correction, beta1, 1.0 - beta1, beta2, 1.0 - beta2,
        epsilon_t, weight_decay, clip, scale,
    )  # fmt: skip


def adamw(
    weights: Float32s, gradient: Float32s, m: Float32s, v: Float32s,
    *, learning_rate: float, beta1: float, beta2: float, epsilon: float, weight_decay: float, clip: float,
    scale: float, t: int,
) -> None:  # fmt: skip
    """See `reference.adamw`."""
    correction, epsilon_t = bias_corrected(beta1, beta2, epsilon, t)
    _run(
        "adamw", (weights, gradient, m, v),
        learning_rate * correction, beta1, 1.0 - beta1, beta2, 1.0 - beta2,
        epsilon_t, learning_rate * weight_decay, clip, scale,
    )  # fmt: skip


def ftrl(
    weights: Float32s, gradient: Float32s, z: Float32s, n: Float32s,
    *, learning_rate: float, beta: float, l1: float, l2: float, weight_decay: float, clip: float, scale: float,
) -> None:  # fmt: skip
    """See `reference.ftrl`."""
    if learning_rate < SMALLEST_FTRL_RATE:
        return
    _run("ftrl", (weights, gradient, z, n), 1.0 / learning_rate, beta, l1, l2, weight_decay, clip, scale)


def lamb(
    weights: Float32s, gradient: Float32s, m: Float32s, v: Float32s,
    *, learning_rate: float, beta1: float, beta2: float, epsilon: float, weight_decay: float, clip: float,
    scale: float, t: int,
) -> None:  # fmt: skip
    """See `reference.lamb`."""
    correction, epsilon_t = bias_corrected(beta1, beta2, epsilon, t)
    direction = (correction, epsilon_t, weight_decay)
    moments = (beta1, 1.0 - beta1, beta2, 1.0 - beta2)
    squares = _lanes.run(
        partial(_lamb_moments, _packed((*moments, *direction, clip, scale))), (weights, gradient, m, v)
    )
    ratio = trust_ratio(np.concatenate(squares))
    _run("lamb_step", (weights, m, v), *direction, learning_rate * ratio)


def _lamb_moments(scalars: bytes, *vectors: Float32s) -> NDArray[np.float64]:
    """Update m and v; return the squared norms of weights and direction, block by block: shape (blocks, 2)."""
    squares = np.zeros((-(-vectors[0].size // BLOCK_ELEMENTS), 2))
    scratch = np.empty(BLOCK_ELEMENTS, np.float32)
    result = _function("lamb_moments", len(vectors) + 2)(*vectors, squares.reshape(-1), scratch, scalars)
    if result == REFUSED:
        raise ValueError(f"lamb: vectors must be contiguous and of one length, found {_shapes(vectors)}")
    return squares


def decay(weights: Float32s, share: float) -> None:
    """See `reference.decay`."""
    _run("decay", (weights,), share)


def accumulate(total: Float32s, gradient: Float32s) -> None:
    """See `reference.accumulate`."""
    _run("accumulate", (total, gradient))


def is_finite(array: Float32s) -> bool:
    """See `reference.is_finite`."""
    return all(_run("is_finite", (array,)))


def copy(destination: Float32s, source: Float32s) -> None:
    """See `reference.copy`."""
    _run("copy", (destination, source))


# --- rows of tables: vectors are those of some rows, end to end ---


def adam_by_row(
    weights: Float32s, gradient: Float32s, m: Float32s, v: Float32s,
    *, learning_rate: float, beta1: float, beta2: float, epsilon: float, weight_decay: float, clip: float,
    scale: float, t: NDArray[np.uint32],
) -> None:  # fmt: skip
    """See `reference.adam_by_row`."""
    factors, roots = corrections(beta1, beta2).of(t)
    _by_row(
        "adam_by_row", (weights, gradient, m, v, _float32s(learning_rate * factors), _float32s(epsilon * roots)),
        beta1, 1.0 - beta1, beta2, 1.0 - beta2, weight_decay, clip, scale,
    )  # fmt: skip


def adamw_by_row(
    weights: Float32s, gradient: Float32s, m: Float32s, v: Float32s,
    *, learning_rate: float, beta1: float, beta2: float, epsilon: float, weight_decay: float, clip: float,
    scale: float, t: NDArray[np.uint32],
) -> None:  # fmt: skip
    """See `reference.adamw_by_row`."""
    factors, roots = corrections(beta1, beta2).of(t)
    _by_row(
        "adamw_by_row", (weights, gradient, m, v, _float32s(learning_rate * factors), _float32s(epsilon * roots)),
        beta1, 1.0 - beta1, beta2, 1.0 - beta2, learning_rate * weight_decay, clip, scale,
    )  # fmt: skip


def rowwise_adagrad(
    weights: Float32s, gradient: Float32s, accumulator: Float32s,
    *, learning_rate: float, epsilon: float, weight_decay: float, clip: float, scale: float,
) -> None:  # fmt: skip
    """See `reference.rowwise_adagrad`."""
    _by_row("rowwise_adagrad", (weights, gradient, accumulator), learning_rate, epsilon, weight_decay, clip, scale)


def _by_row(name: str, arrays: tuple[Float32s, ...], *scalars: float) -> None:
    if _function(name, len(arrays))(*arrays, _packed(scalars)) == REFUSED:
        raise ValueError(f"{name}: vectors must be contiguous and of one length, found {_shapes(arrays)}")


def _float32s(values: NDArray[np.float64]) -> Float32s:
    with np.errstate(over="ignore"):
        rounded: Float32s = values.astype(np.float32)
    return rounded


# --- their records, of which `row_loops` and `index_loops` say what each array is ---


def find_rows(*arrays: NDArray[Any]) -> int:
    """See `index_loops.find_rows`."""
    return _rows("find_rows", arrays)


def read_rows(*arrays: NDArray[Any]) -> int:
    """See `index_loops.read_rows`."""
    return _rows("read_rows", arrays)


def index_rows(*arrays: NDArray[Any]) -> None:
    """See `index_loops.index_rows`."""
    _rows("index_rows", arrays)


def remove_rows(*arrays: NDArray[Any]) -> None:
    """See `index_loops.remove_rows`."""
    _rows("remove_rows", arrays)


def hide_rows(*arrays: NDArray[Any]) -> int:
    """See `row_loops.hide_rows`."""
    return _rows("hide_rows", arrays)


def move_segment(*arrays: NDArray[Any]) -> None:
    """See `index_loops.move_segment`."""
    _rows("move_segment", arrays)


def use_rows(*arrays: NDArray[Any]) -> int:
    """See `row_loops.use_rows`."""
    return _rows("use_rows", arrays)


def keep_rows(*arrays: NDArray[Any]) -> int:
    """See `row_loops.keep_rows`."""
    return _rows("keep_rows", arrays)


def gather_records(*arrays: NDArray[Any]) -> None:
    """See `row_loops.gather_records`."""
    _rows("gather_records", arrays)


def gather_rows(*arrays: NDArray[Any]) -> None:
    """See `row_loops.gather_rows`."""
    _rows("gather_rows", arrays)


def scatter_rows(*arrays: NDArray[Any]) -> None:
    """See `row_loops.scatter_rows`."""
    _rows("scatter_rows", arrays)


_RECORD_LOOPS = {
    "find_rows": 9,
    "read_rows": 11,
    "index_rows": 7,
    "remove_rows": 8,
    "hide_rows": 5,
    "move_segment": 7,
    "use_rows": 7,
    "keep_rows": 8,
    "gather_records": 6,
    "gather_rows": 5,
    "scatter_rows": 5,
}
"""Loops over records, and how many arrays each takes."""


def _rows(name: str, arrays: tuple[NDArray[Any], ...]) -> int:
    result = _function(name, _RECORD_LOOPS[name])(*arrays, b"")
    if result == REFUSED:
        raise ValueError(f"{name}: arrays must be contiguous, of its types, found {_shapes(arrays)}")
    return result
