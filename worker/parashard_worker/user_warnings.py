"""What Python warns of while a model computes, told to the run: a worker's output is a log that nobody reads.

Each text is told once, and a bounded number of them; all are in the log as before. Called by `parashard_worker.worker`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from parashard.models.user_errors import users_line

TOLD_MAX = 10
TEXT_MAX = 300


@contextmanager
def warnings_told(tell: Callable[[str], None]) -> Iterator[None]:
    """Tell of warnings within, such as "UserWarning: far too few (train.py:12)"; `tell` is called in any thread."""
    before, told = warnings.showwarning, set[str]()

    def show(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
        before(message, category, *place, **more)
        line = users_line(sys._getframe())
        text = f"{category.__name__}: {' '.join(str(message).split())[:TEXT_MAX]}{f' ({line})' if line else ''}"
        if text not in told and len(told) < TOLD_MAX:
            told.add(text)
            tell(text)

    warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = before
