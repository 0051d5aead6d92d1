"""Standardisation of numbers: a column's mean and deviation, and (x - mean) / deviation.

All sums run in a fixed order, so that the inputs' bits (and with them the data's fingerprint) are the same on every
machine: `np.sum` adds in an order that depends on the width of the CPU's vectors. Called by the preprocessing of tables
and by `criteo`.
"""

from __future__ import annotations

import math

import numpy as np

from parashard.data.columns import Float64s
from parashard.errors import BadData
from parashard.plan.variables import Float32s


def mean_and_deviation(values: Float64s, origin: str) -> tuple[float, float]:
    """Return mean and standard deviation (1 where all are equal), summed in order; BadData if they overflow."""
    with np.errstate(over="ignore", invalid="ignore"):
        mean = _sum_in_order(values) / max(1, len(values))
        variance = _sum_in_order((values - mean) ** 2) / max(1, len(values))
    if not math.isfinite(variance):
        raise BadData(f"{origin}: values up to {np.abs(values).max():g} are too large to be standardised")
    return mean, math.sqrt(variance) or 1.0


def standardise(values: Float64s, mean: float, deviation: float, out: Float32s, origin: str) -> None:
    """Write (value - mean) / deviation into `out`, 0 for NaN; BadData where that is too large for float32."""
    with np.errstate(over="ignore"):
        out[:] = np.where(np.isnan(values), 0.0, (values - mean) / deviation)
    if not np.isfinite(out).all():
        raise BadData(f"{origin}: has values too far from those of the training rows for float32")


def _sum_in_order(values: Float64s) -> float:
    return float(np.cumsum(values)[-1]) if len(values) else 0.0
