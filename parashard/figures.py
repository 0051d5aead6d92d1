"""Formatting of figures: one format for each kind of number, in every view, page and log line.

Pure.
"""

from __future__ import annotations

import math
import re

FIXED_MIN, GROUPED_MIN, FIXED_MAX = 1e-3, 1e3, 1e7
MINUTES_FROM_S = 120.0
HOURS_FROM_S = 7200.0


def count(number: int) -> str:
    """Return a count with separators: "13,500"."""
    return f"{number:,}"


def counted(number: int, noun: str) -> str:
    """Return a count with its noun: "1 step", "13,500 steps"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def rate(per_s: float) -> str:
    """Return an amount per second, as a whole number: "12,346"."""
    return f"{per_s:,.0f}"


def metric_name(name: str) -> str:
    """Return a metric's display name: "mean_squared_error" becomes "mean squared error"."""
    return name.replace("_", " ")


def metric(value: float) -> str:
    """Return a metric's value: four decimals, one from 1,000 on; four significant digits if very small or large.

    >>> [metric(value) for value in (0.96944, 13100.4954, 23.5e8, 0.0, float("nan"))]
    ['0.9694', '13,100.5', '2.35e+09', '0.0000', 'NaN']
    """
    size = abs(value)
    if size == 0 or FIXED_MIN <= size < GROUPED_MIN:
        return f"{value:.4f}"
    if GROUPED_MIN <= size < FIXED_MAX:
        return f"{value:,.1f}"
    return "NaN" if math.isnan(value) else f"{value:.4g}"


def percent(share: float | None) -> str:
    """Return a fraction as "56 %"; "-" for None or a value that is not finite, as a worker may report."""
    return "-" if share is None or not math.isfinite(share) else f"{round(100 * share)} %"


def duration(seconds: float) -> str:
    """Return a length of time: "1.4 s", "87 s", "5 min 12 s", "3 h 20 min"."""
    if seconds < MINUTES_FROM_S:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if seconds < HOURS_FROM_S:
        return f"{minutes} min {rest_s} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def mebibytes(size_bytes: int) -> str:
    """Return a size in MiB, without the unit: "16,384.0"."""
    return f"{size_bytes / 2**20:,.1f}"


def gibibytes(size_bytes: int) -> str:
    """Return a size in GiB, without the unit: "79.1"."""
    return f"{size_bytes / 2**30:,.1f}"


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a key for natural sort order: worker-2 before worker-10."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return tuple((int(part), "") if part[0] in "0123456789" else (-1, part) for part in parts)
