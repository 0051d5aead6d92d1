"""State without gradients: variables other than weights, such as the statistics of batch normalisation.

Pure. `parashard_server.state.storage` updates such state; models push it in place of a gradient.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from parashard.errors import ConfigurationError, shortened

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]

AVERAGE: Final = "average"
COUNTER: Final = "counter"
SUM: Final = "sum"
ALLOWED: Final = "average:M with 0 < M <= 1, such as average:0.1, or counter, or sum"
COUNTER_BYTES: Final = 8
ROUND_STEPS_MAX: Final = (1 << 16) - 1
"""Most increments of a counter that are summed before carrying: this many bytes and a carry are below 2^24."""


def check_state(state: object) -> str | None:
    """Return the reason why a kind of state is invalid; None: it is valid.

    - "": the variable has a gradient.
    - "average:M": a push carries the batch's value b, and r becomes r + M (b - r): a running average that stays between
      the values it has seen, at any staleness. In `sync:N`, b is the mean of the round's.
    - "counter": a whole number; a push carries what is added to it, which is exact.
    - "sum": a push carries what is added to it.
    """
    if state in ("", COUNTER, SUM):
        return None
    kind, _, factor = state.partition(":") if isinstance(state, str) else ("", "", "")
    if kind == AVERAGE and 0 < _number(factor) <= 1:
        return None
    return f"state must be {ALLOWED}, found {shortened(repr(state))}"


def average_factor(state: str) -> float:
    """Return M of "average:M"."""
    return _number(state.partition(":")[2])


def counter_rows(values: npt.ArrayLike) -> Float32s:
    """Return whole numbers in the form of a counter variable: each as its eight bytes, the lowest first."""
    # The result is float32 of shape (*values.shape, 8); a scalar is one row.
    found = np.asarray(values)
    if found.dtype.kind not in "iub":
        raise ConfigurationError(f"a counter has whole numbers, found {found.dtype}")
    numbers = np.ascontiguousarray(np.atleast_1d(found), "<i8")
    return numbers.view(np.uint8).reshape(*numbers.shape, COUNTER_BYTES).astype(np.float32)


def counter_values(rows: Float32s) -> Int64s:
    """Return the whole numbers of a counter variable, shape `rows.shape[:-1]`; sums of increments too."""
    worth = np.uint64(1) << (np.uint64(COUNTER_BYTES) * np.arange(COUNTER_BYTES, dtype=np.uint64))
    total: npt.NDArray[np.uint64] = (np.asarray(rows).astype(np.uint64) * worth).sum(-1, dtype=np.uint64)
    return total.view(np.int64)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
