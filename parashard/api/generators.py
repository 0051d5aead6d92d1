"""The process's generators of random numbers: what draws from them leaves them as they were.

Called by `parashard.api.fits`, and around what a dataset computes.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


@contextmanager
def kept_generators(*, gpus: bool = True) -> Iterator[None]:
    """Leave Python's, NumPy's and PyTorch's generators as they were: the user's own draws go on as if there was none.

    PyTorch's are kept where it is imported already; those of GPUs, if they are asked for, where one is in use.
    """
    torch: Any = sys.modules.get("torch")
    pythons, numpys = random.getstate(), np.random.get_state()
    torchs = None if torch is None else torch.get_rng_state()
    in_use = gpus and torch is not None and torch.cuda.is_initialized()
    of_gpus = torch.cuda.get_rng_state_all() if in_use else None
    try:
        yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)
        if torchs is not None:
            torch.set_rng_state(torchs)
        if of_gpus is not None:
            torch.cuda.set_rng_state_all(of_gpus)


@contextmanager
def generators_seeded(seed: int) -> Iterator[None]:
    """Set the process's generators for a while: of Python, of NumPy, and of PyTorch where it is imported."""
    torch: Any = sys.modules.get("torch")
    with kept_generators(gpus=False):  # a step's items are computed on the host
        random.seed(seed)
        np.random.seed(seed % 2**32)
        if torch is not None:
            torch.default_generator.manual_seed(seed)
        yield
