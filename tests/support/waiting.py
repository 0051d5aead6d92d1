"""Waiting for what others do: it ends with the state, and where a deadline passes the failure tells what was seen last.

Deadlines are for what hangs, not for what is slow: they cost nothing where the state comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

DEADLINE_S = 60.0  # pytest gives a test twice as long
POLL_S = 0.02


def eventually(
    condition: Callable[[], Any],
    what: str,
    deadline_s: float = DEADLINE_S,
    *,
    told: Callable[[], object] | None = None,
    poll_s: float = POLL_S,
) -> Any:
    """Return the first true value of a condition; fail after the deadline with what is told then.

    Without `told` that is the condition's last value.
    """
    end_s = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > end_s:
            seen = told() if told else repr(value)
            pytest.fail(f"not within {deadline_s:.0f} s: {what}; seen last: {seen}")
        time.sleep(poll_s)
    return value
