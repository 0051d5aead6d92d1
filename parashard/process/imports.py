"""Garbage collection is paused while a service imports its modules: it would take a tenth of the start or more.

Imported first by each service's `__main__`, which calls `imported` below its imports.
"""

from __future__ import annotations

import gc

_collects = gc.isenabled()
gc.disable()


def imported() -> None:
    """Collect garbage again, if that was so before."""
    if _collects:
        gc.enable()
