"""Stateful: how state without gradients moves (`parashard.plan.state`).

No optimizer, decay, clipping or schedule has a part in it, and an empty push leaves it alone. A few elements a layer:
plain array operations, the same on NumPy's and CuPy's arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parashard.plan.state import AVERAGE, COUNTER, COUNTER_BYTES, average_factor

_BYTE = np.float32(256.0)


def move(values: Any, pushed: Any, state: str, pushes: int) -> None:
    """Move one partition's state of a kind, in place, by `pushed`, the sum of what `pushes` >= 1 carry."""
    if state.startswith(AVERAGE):
        batch = pushed if pushes == 1 else pushed / np.float32(pushes)
        values += np.float32(average_factor(state)) * (batch - values)
    elif state == COUNTER:
        _count(values.reshape(-1, COUNTER_BYTES), pushed.reshape(-1, COUNTER_BYTES))
    else:
        values += pushed


def _count(values: Any, added: Any) -> None:
    """Add 64-bit integers, byte by byte with a carry; beyond the highest byte it is lost, as in int64.

    Every number here is a whole one below 2^24, which float32 has exactly: `ROUND_STEPS_MAX` bytes and a carry.
    """
    carry = np.float32(0.0)
    for place in range(COUNTER_BYTES):
        column = values[:, place] + added[:, place] + carry
        carry = column // _BYTE
        values[:, place] = column - _BYTE * carry
