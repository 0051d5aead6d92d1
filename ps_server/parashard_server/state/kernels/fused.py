"""The update rules as machine code, on several threads, whose number does not change the bits.

Every function works in place on 1-D contiguous float32 arrays of one length: a run of a shard's flat vector. Nothing is
checked but shapes: the caller ensures finite gradients before the first write. The tests compare the bits with those of
the rules in NumPy.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parashard.plan.variables import Float32s
from parashard.process.lanes import Lanes
from parashard_server.state.kernels import index_loops, loops, row_loops
from parashard_server.state.kernels.compiling import LOOPS
from parashard_server.state.kernels.rules import OF_PREPARED, RULES, Values
from parashard_server.state.kernels.scalars import BLOCK_ELEMENTS, trust_ratio

_lanes = Lanes(1)


def _run(name: str, vectors: tuple[Float32s, ...], *scalars: float) -> list[int]:
    """Call a loop that takes vectors of one length, on all threads."""
    _check_lengths(name, vectors)
    try:
        return _lanes.run(LOOPS[name].code, vectors, *scalars)
    except TypeError:
        raise _misfit(name, vectors) from None


def _check_lengths(name: str, vectors: tuple[Float32s, ...]) -> None:
    if any(vector.size != vectors[0].size for vector in vectors):
        raise _misfit(name, vectors)


def _misfit(name: str, vectors: tuple[NDArray[Any], ...]) -> ValueError:
    found = ", ".join(f"{vector.dtype} {vector.shape} of strides {vector.strides}" for vector in vectors)
    return ValueError(f"{name}: vectors must be contiguous and of one length, or have one for each row, found {found}")


def use_threads(threads: int) -> None:
    """Set how many threads work on one large call, for the whole process; while no kernel runs."""
    global _lanes  # noqa: PLW0603  # like the threads of BLAS: cores are the process's, and bits do not depend on it
    if threads != _lanes.threads:
        _lanes.close()
        _lanes = Lanes(threads)


def warm_up(*, rounds: bool = True) -> None:
    """Load or compile the kernels that pushes need besides their optimizer's; `rounds`: also the sum."""
    values = np.empty(0, np.float32)
    is_finite(values)
    if rounds:
        accumulate(values, values)


def warm_up_rows() -> None:
    """Load or compile the kernels that rows of tables need besides their optimizer's."""
    for declared in LOOPS.values():
        if declared.function.__module__ in (row_loops.__name__, index_loops.__name__):
            declared.code  # noqa: B018  # loads it


def update(rule: str, values: Values | None, weights: Float32s, gradient: Float32s, *slots: Float32s) -> None:
    """Apply a rule of `rules.RULES` by its scalars (None: nothing changes) to weights and slots; read the gradient."""
    # With arrays among the scalars, one for each row of a table, the vectors are rows end to end. Slots are in the
    # rule's order, of the weights' length; that of `rowwise_adagrad` has a number for each row.
    if values is None:
        return
    if rule == "lamb":
        _lamb(values, weights, gradient, *slots)
    elif rule == "rowwise_adagrad":
        _on_rows(rule, (weights, gradient), slots, values, "learning_rate", "epsilon", *OF_PREPARED)
    elif RULES[rule].by_t and isinstance(values["t"], np.ndarray):
        by_t = RULES[rule].by_t
        of_rows = tuple(_float32s(values[name]) for name in by_t)
        others = [name for name in RULES[rule].scalars if name not in by_t]
        _on_rows(f"{rule}_by_row", (weights, gradient, *slots), of_rows, values, *others)
    else:
        _run(rule, (weights, gradient, *slots), *[values[name] for name in RULES[rule].scalars])


def _on_rows(
    name: str, vectors: tuple[Float32s, ...], of_rows: tuple[Float32s, ...], values: Values, *scalars: str
) -> None:
    """Call a loop over rows that lie end to end in vectors of one length; `of_rows` have a number for each row."""
    _check_lengths(name, vectors)
    rows, elements = of_rows[0].size, vectors[0].size
    if any(array.size != rows for array in of_rows) or (elements % rows if rows else elements):
        raise _misfit(name, (*vectors, *of_rows))
    try:
        LOOPS[name](*vectors, *of_rows, *[values[scalar] for scalar in scalars])
    except TypeError:
        raise _misfit(name, (*vectors, *of_rows)) from None


def _float32s(values: NDArray[np.float64]) -> Float32s:
    with np.errstate(over="ignore"):
        rounded: Float32s = values.astype(np.float32)
    return rounded


def _lamb(values: Values, *vectors: Float32s) -> None:
    direction = [values[name] for name in ("correction", "epsilon_t", "decay")]
    scalars = (*direction, *[values[name] for name in RULES["lamb"].scalars])
    _check_lengths("lamb", vectors)
    try:
        ratio = trust_ratio(np.concatenate(_lanes.run(partial(_lamb_moments, scalars), vectors)))
    except TypeError:
        raise _misfit("lamb", vectors) from None
    weights, _, m, v = vectors
    _run("lamb_step", (weights, m, v), *direction, values["learning_rate"] * ratio)


def _lamb_moments(scalars: tuple[float, ...], *vectors: Float32s) -> NDArray[np.float64]:
    """Update m and v; return the squared norms of weights and direction, block by block: shape (blocks, 2)."""
    squares = np.zeros((-(-vectors[0].size // BLOCK_ELEMENTS), 2))
    scratch = np.empty(BLOCK_ELEMENTS, np.float32)
    loops.lamb_moments(*vectors, squares.reshape(-1), scratch, *scalars)
    return squares


def decay(weights: Float32s, share: float) -> None:
    """Shrink weights: w <- w - share w (the decoupled weight decay of rules other than `adamw` and `lamb`)."""
    _run("decay", (weights,), share)


def accumulate(total: Float32s, gradient: Float32s) -> None:
    """Add a gradient to a round's sum: total <- total + gradient. The caller keeps the order of steps."""
    _run("accumulate", (total, gradient))


def is_finite(array: Float32s) -> bool:
    """Return whether no element is NaN or infinite."""
    return all(_run("is_finite", (array,)))
