"""SplitMix64: 64-bit words that look random, each a function of a counter and a key alone.

Pure integer arithmetic, so the words are the same on every machine, on NumPy and on CuPy. Knows nothing of what is
drawn with them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_U64 = np.uint64  # CuPy's, too


def splitmix64(counters: Any, key: int) -> Any:
    """Return SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) at these counters under a key.

    The k-th output of the authors' splitmix64.c from the state `key` is the value at counter k, from 1 on.

    Parameters
    ----------
    counters : array of uint64, at least one-dimensional, of NumPy or CuPy
        Overwritten with the result, which is this array: large ones need no temporaries of their size but one.
    key : int
        In [0, 2**64).
    """
    z = counters
    z *= _U64(0x9E3779B97F4A7C15)
    z += _U64(key)
    z ^= z >> _U64(30)
    z *= _U64(0xBF58476D1CE4E5B9)
    z ^= z >> _U64(27)
    z *= _U64(0x94D049BB133111EB)
    z ^= z >> _U64(31)
    return z
