"""Scalars of update rules that depend on t, computed in float64 once per update.

`reference` and `fused` both use them and round them to float32 in the same places. Knows nothing of weights and
gradients.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

BLOCK_ELEMENTS = 1 << 14
"""A sum over a variable is the sum of its blocks of this length, so that its bits do not depend on the threads."""

SMALLEST_FTRL_RATE = 1e-20
"""FTRL divides by its learning rate. Below this bound (a warm-up or a decay may reach 0) an update changes nothing."""


def bias_corrected(beta1: float, beta2: float, epsilon: float, t: int) -> tuple[float, float]:
    """Return (c, epsilon_t) such that m_hat / (sqrt(v_hat) + epsilon) = c * m / (sqrt(v) + epsilon_t).

    With m_hat = m / (1 - beta1^t) and v_hat = v / (1 - beta2^t): c = sqrt(1 - beta2^t) / (1 - beta1^t) and
    epsilon_t = epsilon * sqrt(1 - beta2^t). This is the rearrangement that closes section 2 of Kingma and Ba (ICLR
    2015), but with the epsilon of their algorithm 1 kept; it saves a division per element.
    """
    assert t >= 1, f"updates count from 1, found {t}"
    root = math.sqrt(1.0 - beta2**t)
    return root / (1.0 - beta1**t), epsilon * root


class Corrections:
    """`bias_corrected` for many t at once: figures for each t are computed once, and kept.

    Parameters
    ----------
    beta1, beta2 : float
    """

    def __init__(self, beta1: float, beta2: float) -> None:
        self._betas = (beta1, beta2)
        self._known = np.empty((0, 2))

    def of(self, t: NDArray[np.uint32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return c, and sqrt(1 - beta2^t), which epsilon is multiplied by, of each t."""
        missing = range(len(self._known) + 1, int(t.max(initial=0)) + 1)
        if missing:
            ends = range(missing.start, missing.start + -(-len(missing) // _KNOWN_AT_ONCE) * _KNOWN_AT_ONCE)
            more = np.array([bias_corrected(*self._betas, 1.0, one) for one in ends])
            self._known = np.concatenate([self._known, more])
        found = self._known[t - 1]
        return found[:, 0], found[:, 1]


_KNOWN_AT_ONCE = 4096  # takes 2 ms, once in so many pushes of a row


@cache
def corrections(beta1: float, beta2: float) -> Corrections:
    """Return the figures of one optimizer, which all its tables share."""
    return Corrections(beta1, beta2)


def momentum_factors(learning_rate: float, rate_in_velocity: float) -> tuple[float, float]:
    """Return what multiplies the gradient as it enters the velocity, and the velocity as it moves the weights."""
    return (learning_rate, 1.0) if rate_in_velocity else (1.0, learning_rate)


def epsilons(epsilon: float, epsilon_in_root: float) -> tuple[float, float]:
    """Return the epsilon within RMSProp's root, and the one beside it: one of them is 0."""
    return (epsilon, 0.0) if epsilon_in_root else (0.0, epsilon)


def trust_ratio(squares: NDArray[np.float64]) -> float:
    """Return |w| / |u| of LAMB; 1 where either norm is 0, as in the authors' program.

    Parameters
    ----------
    squares : ndarray of float64, shape (blocks, 2)
        The squared norms of w and u, block by block; added in this order.
    """
    weights, direction = np.add.accumulate(squares)[-1] if squares.size else (0.0, 0.0)  # np.sum might add in pairs
    if weights == 0.0 or direction == 0.0:
        return 1.0
    return math.sqrt(weights) / math.sqrt(direction)
