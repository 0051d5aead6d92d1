"""Turns: what uses something that a process has once is done by one thread after the other.

Such as PyTorch's default generator, which a step seeds and then draws from, or a user's dataset, which need not be safe
for threads. In a process of one worker nobody else waits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

TURN_S = 600.0
"""How long a thread waits for the others."""

_taken = threading.RLock()


@contextmanager
def turn() -> Iterator[None]:
    """Be the one thread of this process that is in such a block, or that runs a function with it as a decorator.

    Raises
    ------
    TimeoutError
        If another thread has not left its block for `TURN_S`.
    """
    if not _taken.acquire(timeout=TURN_S):
        raise TimeoutError(f"another thread of this process has computed for {TURN_S:.0f} s, and this one waits for it")
    try:
        yield
    finally:
        _taken.release()
