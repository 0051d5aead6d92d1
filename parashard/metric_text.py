"""How a held-out metric reads on every screen: its name in words, and its value. Pure; called by whatever shows one."""

from __future__ import annotations

FIXED_MIN, GROUPED_MIN, FIXED_MAX = 1e-3, 1e3, 1e7


def metric_name(name: str) -> str:
    """Return a metric's name in words: "mean_squared_error" becomes "mean squared error"."""
    return name.replace("_", " ")


def metric_value(value: float) -> str:
    """Return a metric's value: with four decimals, with one from a thousand on, or four digits if very small or large.

    >>> metric_value(0.96944), metric_value(13100.4954), metric_value(23.5e8), metric_value(0.0)
    ('0.9694', '13,100.5', '2.35e+09', '0.0000')
    """
    size = abs(value)
    if size == 0 or FIXED_MIN <= size < GROUPED_MIN:
        return f"{value:.4f}"
    return f"{value:,.1f}" if GROUPED_MIN <= size < FIXED_MAX else f"{value:.4g}"
