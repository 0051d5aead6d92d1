"""No garbage collection while a service loads its modules, nor of what they made.

All of it lives as long as the process. To look through it takes a tenth of the start, and as long again at each full
collection. Imported first by each service's `__main__`, which calls `imported` below its imports.
"""

from __future__ import annotations

import gc

_collects = gc.isenabled()
gc.disable()


def imported() -> None:
    """Collect garbage again, if that was so before: of objects that are made from now on."""
    gc.freeze()
    if _collects:
        gc.enable()
