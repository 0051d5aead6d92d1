"""Turns: what uses something that a process has once is done by one thread after the other.

Such as PyTorch's default generator, which a step seeds and then draws from, or a user's dataset, which need not be safe
for threads. In a process of one worker nobody else waits. A thread that was given up has no turn any more: the next one
has it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

TURN_S = 600.0
"""How long a thread waits for the others."""


class _Turns:
    """Whose turn it is, and who has none any more."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.holder: threading.Thread | None = None
        self.given_up: WeakSet[threading.Thread] = WeakSet()


_turns = _Turns()


@contextmanager
def turn() -> Iterator[None]:
    """Be the one thread of this process that is in such a block, or that runs a function with it as a decorator.

    Raises
    ------
    TimeoutError
        If another thread has not left its block for `TURN_S`, or this thread was given up.
    """
    this = threading.current_thread()
    with _turns.changed:
        again = _turns.holder is this
        if not _turns.changed.wait_for(lambda: this in _turns.given_up or _turns.holder in (None, this), TURN_S):
            raise TimeoutError(
                f"another thread of this process has computed for {TURN_S:.0f} s, and this one waits for it"
            )
        if this in _turns.given_up:
            raise TimeoutError("this thread was given up, and has no turn any more")
        _turns.holder = this
    try:
        yield
    finally:
        if not again:
            with _turns.changed:
                if _turns.holder is this:
                    _turns.holder = None
                    _turns.changed.notify_all()


def no_more_turns(thread: threading.Thread) -> None:
    """End a thread's turn, though it may still be in its block, and its wait for one: it was given up."""
    with _turns.changed:
        _turns.given_up.add(thread)
        if _turns.holder is thread:
            _turns.holder = None
        _turns.changed.notify_all()
