"""A GPU of NumPy arrays whose kernels run as late as they may: at a wait or a copy.

Kernels are the reference, and may be called only by a thread that has made the GPU its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from parashard.plan.variables import Float32s
from support import reference_rules as reference


class LateDevice:
    """See `parashard_server.state.cuda_storage.ShardDevice`.

    Attributes
    ----------
    asked : deque
        Kernels that have not run.
    copied_in, copied_out : list of ndarray
        The host's side of every copy.
    staged, locked : list of ndarray
        Memory that was given out, or locked.
    while_copying_out : callable
        Called in the middle of every copy from the GPU.
    """

    def __init__(self) -> None:
        self.asked: deque[Callable[[], None]] = deque()
        self.copied_in: list[Float32s] = []
        self.copied_out: list[Float32s] = []
        self.staged: list[Float32s] = []
        self.locked: list[Float32s] = []
        self.while_copying_out: Callable[[], None] = lambda: None
        self.kernels = ModuleType("late kernels")
        self._using = threading.local()
        for kernel in (reference.update, reference.decay):
            setattr(self.kernels, kernel.__name__, partial(self._ask, kernel))

    def use(self) -> None:
        self._using.here = True

    def full(self, elements: int, value: float) -> Float32s:
        return np.full(elements, value, np.float32)

    def staging(self, elements: int) -> Float32s:
        self.staged.append(np.full(elements, np.nan, np.float32))
        return self.staged[-1]

    def lock_pages(self, host: Float32s) -> None:
        self.locked.append(host)

    def copy_in(self, destination: Float32s, host: Float32s) -> None:
        self.wait()
        self.copied_in.append(host)
        destination[:] = host

    def copy_out(self, host: Float32s, source: Float32s) -> None:
        self.wait()
        self.copied_out.append(host)
        half = host.size // 2
        host[:half] = source[:half]
        self.while_copying_out()
        host[half:] = source[half:]

    def wait(self) -> None:
        while self.asked:
            self.asked.popleft()()

    def _ask(self, kernel: Callable[..., None], *given: Any) -> None:
        assert self._using.here, "a kernel was called in a thread that does not use the GPU"
        self.asked.append(partial(kernel, *given))
