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
from parashard_server.state.kernels.rules import OF_PREPARED, RULES, Values
from parashard_server.state.kernels.scalars import BLOCK_ELEMENTS, trust_ratio

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


def update(rule: str, values: Values | None, weights: Float32s, gradient: Float32s, *slots: Float32s) -> None:
    """See `reference.update`."""
    if values is None:
        return
    if rule == "lamb":
        _lamb(values, weights, gradient, *slots)
    elif rule == "rowwise_adagrad":
        _on_rows(rule, (weights, gradient, *slots), values, "learning_rate", "epsilon", *OF_PREPARED)
    elif RULES[rule].by_t and isinstance(values["t"], np.ndarray):
        by_t = RULES[rule].by_t
        arrays = (weights, gradient, *slots, *[_float32s(values[name]) for name in by_t])
        _on_rows(f"{rule}_by_row", arrays, values, *[name for name in RULES[rule].scalars if name not in by_t])
    else:
        _run(rule, (weights, gradient, *slots), *[values[name] for name in RULES[rule].scalars])


def _on_rows(name: str, arrays: tuple[Float32s, ...], values: Values, *scalars: str) -> None:
    packed = _packed(tuple(values[scalar] for scalar in scalars))
    if _function(name, len(arrays))(*arrays, packed) == REFUSED:
        raise ValueError(f"{name}: vectors must be contiguous and of one length, found {_shapes(arrays)}")


def _float32s(values: NDArray[np.float64]) -> Float32s:
    with np.errstate(over="ignore"):
        rounded: Float32s = values.astype(np.float32)
    return rounded


def _lamb(values: Values, *vectors: Float32s) -> None:
    direction = [values[name] for name in ("correction", "epsilon_t", "decay")]
    scalars = _packed((*direction, *[values[name] for name in RULES["lamb"].scalars]))
    ratio = trust_ratio(np.concatenate(_lanes.run(partial(_lamb_moments, scalars), vectors)))
    weights, _, m, v = vectors
    _run("lamb_step", (weights, m, v), *direction, values["learning_rate"] * ratio)


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


# --- records of tables, of which `row_loops` and `index_loops` say what each array is ---


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
