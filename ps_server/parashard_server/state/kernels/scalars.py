"""Scalars of update rules that depend on t or on norms, computed in float64 once per update.

Knows nothing of weights and gradients.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_ELEMENTS = 1 << 14
"""A sum over a variable is the sum of its blocks of this length, so that its bits do not depend on the threads."""


def bias_corrections(beta1: float, beta2: float, t: int | NDArray[np.uint32]) -> tuple[Any, Any]:
    """Return c and the root such that m_hat / (sqrt(v_hat) + epsilon) = c * m / (sqrt(v) + epsilon * root)."""
    # With m_hat = m / (1 - beta1^t) and v_hat = v / (1 - beta2^t): root = sqrt(1 - beta2^t), c = root / (1 - beta1^t).
    # This is the rearrangement that closes section 2 of Kingma and Ba (ICLR 2015), but with the epsilon of their
    # algorithm 1 kept; it saves a division per element. Rows of a table have a t each: two arrays are returned then.
    if isinstance(t, np.ndarray):
        return _known(beta1, beta2).of(t)
    assert t >= 1, f"updates count from 1, found {t}"
    root = math.sqrt(1.0 - beta2**t)
    return root / (1.0 - beta1**t), root


class _Known:
    """`bias_corrections` for many t at once: each t is computed once, and cached."""

    def __init__(self, beta1: float, beta2: float) -> None:
        self._betas = (beta1, beta2)
        self._known = np.empty((0, 2))

    def of(self, t: NDArray[np.uint32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return c and the root of each t."""
        missing = range(len(self._known) + 1, int(t.max(initial=0)) + 1)
        if missing:
            ends = range(missing.start, missing.start + -(-len(missing) // _KNOWN_AT_ONCE) * _KNOWN_AT_ONCE)
            more = np.array([bias_corrections(*self._betas, one) for one in ends])
            self._known = np.concatenate([self._known, more])
        found = self._known[t - 1]
        return found[:, 0], found[:, 1]


_KNOWN_AT_ONCE = 4096  # takes 2 ms, once in this many pushes of a row


@cache
def _known(beta1: float, beta2: float) -> _Known:
    """Return the cache of one optimizer, which all its tables share."""
    return _Known(beta1, beta2)


def trust_ratio(squares: NDArray[np.float64]) -> float:
    """Return |w| / |u| of LAMB; 1 where either norm is 0, as in the authors' program."""
    # `squares` are the squared norms of w and u, block by block, shape (blocks, 2); they are added in this order.
    weights, direction = np.add.accumulate(squares)[-1] if squares.size else (0.0, 0.0)  # np.sum might add in pairs
    if weights == 0.0 or direction == 0.0:
        return 1.0
    return math.sqrt(weights) / math.sqrt(direction)
