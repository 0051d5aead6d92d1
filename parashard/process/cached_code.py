"""Loops compiled by Numba, whose machine code is cached on disk where a process may write, and compiled anew elsewhere.

Used where loops are: in encodings, hashing of texts, and the sums and keys of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any


def compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loop as machine code, made at its first call per kind of arguments, and run without the GIL."""
    import numba  # loads slowly

    with suppress(RuntimeError):  # no cache: neither the package nor the user's folder can be written
        cached: Callable[..., Any] = numba.njit(nogil=True, cache=True, error_model="numpy")(loop)
        return cached
    uncached: Callable[..., Any] = numba.njit(nogil=True, error_model="numpy")(loop)
    return uncached
