"""The user's generators of random numbers, which steps that are computed in this process seed and draw from.

Called by `parashard.api.fits`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


@contextmanager
def kept_generators() -> Iterator[None]:
    """Leave Python's, NumPy's and PyTorch's generators as they were: the user's own draws go on as if there was none.

    PyTorch's are kept where it is imported already; those of GPUs, where one is in use.
    """
    torch: Any = sys.modules.get("torch")
    pythons, numpys = random.getstate(), np.random.get_state()
    torchs = None if torch is None else torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if torch is not None and torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)
        if torchs is not None:
            torch.set_rng_state(torchs)
        if gpus is not None:
            torch.cuda.set_rng_state_all(gpus)
