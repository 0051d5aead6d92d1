"""Logarithm, exponential and functions of them, bit-identical on every machine.

NumPy's own differ in their last bits between processors and versions, and would change data's fingerprints. These are
sums, products and quotients in a fixed order, each rounded as IEEE 754 says.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from parashard.errors import BadData
from parashard.plan.variables import Float32s

Float64s = npt.NDArray[np.float64]

_ROOT_OF_HALF = math.sqrt(0.5)  # exact rounding is part of IEEE 754
_LN_2 = 0.6931471805599453
_LN_2_HIGH, _LN_2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # their sum has 33 bits more
_ODD = tuple(1.0 / number for number in range(23, 1, -2))  # of the series of artanh, the highest power first
_FACTORIAL = tuple(1.0 / math.factorial(number) for number in range(14, 1, -1))
_EXPONENT_MAX = 700.0


def log(values: Float64s) -> Float64s:
    """Return natural logarithms of finite numbers > 0, within 4e-16 of max(1, result)."""
    # ln(m 2^e) = e ln 2 + 2 artanh(s), s = (m - 1) / (m + 1), with m from sqrt(1/2) to sqrt(2).
    part, power = np.frexp(values)
    low = part < _ROOT_OF_HALF
    part *= 1.0 + low
    s = (part - 1.0) / (part + 1.0)
    square = s * s
    series = np.zeros_like(s)
    for factor in _ODD:
        series += factor
        series *= square
    series += 1.0
    series *= 2.0 * s
    series += (power - low) * _LN_2
    return series


def exp(values: Float64s) -> Float64s:
    """Return exponentials of finite numbers, clipped to [-700, 700] first; the relative error is below 1e-15."""
    x = np.clip(values, -_EXPONENT_MAX, _EXPONENT_MAX)
    power = np.rint(x / _LN_2)
    rest = x - power * _LN_2_HIGH - power * _LN_2_LOW
    series = np.zeros_like(rest)
    for factor in _FACTORIAL:
        series += factor
        series *= rest
    series += 1.0
    series *= rest
    series += 1.0
    return np.ldexp(series, power.astype(np.int32))


def sigmoid(values: Float64s) -> Float64s:
    """Return 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + exp(-values))


def signed_log(values: Float64s) -> Float64s:
    """Return ln(1 + x) for x >= 0, x for negative x, and NaN for NaN."""
    return np.where(values > 0.0, log(1.0 + np.maximum(values, 0.0)), values)


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
    """Return the sum; `np.sum` adds in an order that depends on the width of the CPU's vectors."""
    return float(np.cumsum(values)[-1]) if len(values) else 0.0
