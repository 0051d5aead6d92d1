"""Gradients to encode: every magnitude that float32 has, ties, zeros of both signs; and the kernels under test."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from parashard.encodings import compiled
from parashard.plan.variables import Float32s
from support import encoding_reference as reference

KERNELS = (reference, compiled)
LARGEST = float(np.finfo(np.float32).max)


def drawn(seed: int, size: int) -> Float32s:
    """Return numbers of many magnitudes, with equal ones and zeros of both signs among them."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(size) * 10.0 ** rng.integers(-9, 4, size)).astype(np.float32)
    values[rng.random(size) < 0.1] = 0.5
    values[rng.random(size) < 0.1] = -0.5
    values[rng.random(size) < 0.1] = 0.0
    values[rng.random(size) < 0.05] = -0.0
    return values


def gradients(sizes: st.SearchStrategy[int]) -> st.SearchStrategy[Float32s]:
    """Return any finite float32s, of all magnitudes, as arrays of these sizes."""
    anything = st.floats(width=32, allow_nan=False, allow_infinity=False)
    some = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0**-149, 2.0**-126, 65504.0, 65520.0, LARGEST, -LARGEST])
    return sizes.flatmap(lambda size: arrays(np.float32, size, elements=anything | some))
