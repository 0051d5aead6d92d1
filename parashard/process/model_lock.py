"""The model lock: one thread of a process at a time uses what the process has only once.

Such as PyTorch's default generator, which a step seeds and then draws from, or a user's dataset, which need not be safe
for threads. In a process of one worker nobody else waits. A thread that was given up loses the lock to the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

LOCK_WAIT_S = 600.0
"""How long a thread waits for the others."""


class _ModelLock:
    """Which thread holds the lock, and which were given up."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.holder: threading.Thread | None = None
        self.given_up: WeakSet[threading.Thread] = WeakSet()


_lock = _ModelLock()


@contextmanager
def holding_model_lock() -> Iterator[None]:
    """Hold the lock in a block, or in a function with this as its decorator; a thread that holds it may enter again."""
    this = threading.current_thread()
    with _lock.changed:
        again = _lock.holder is this
        if not _lock.changed.wait_for(lambda: this in _lock.given_up or _lock.holder in (None, this), LOCK_WAIT_S):
            raise TimeoutError(
                f"another thread of this process has computed for {LOCK_WAIT_S:.0f} s, and this one waits for it"
            )
        if this in _lock.given_up:
            raise TimeoutError("this thread was given up, and does not get the model lock again")
        _lock.holder = this
    try:
        yield
    finally:
        if not again:
            with _lock.changed:
                if _lock.holder is this:
                    _lock.holder = None
                    _lock.changed.notify_all()


def abandon_model_lock(thread: threading.Thread) -> None:
    """Take the lock from a thread that was given up, and end its wait for it, though it may still be in its block."""
    with _lock.changed:
        _lock.given_up.add(thread)
        if _lock.holder is thread:
            _lock.holder = None
        _lock.changed.notify_all()
