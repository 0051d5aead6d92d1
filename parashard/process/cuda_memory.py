"""Measure how much of a GPU's memory is used, and by which libraries of this process.

Asks the driver, through CuPy, and the libraries that are loaded. A GPU that does not answer has no figures, which is no
error here.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from parashard.figures import gibibytes
from parashard.process import cuda

ASKED_EVERY_S = 1.0


def index_in(device: str) -> int | None:
    """Return the GPU's number in a device's name, such as "cuda:0 NVIDIA L4"; None if it is no GPU."""
    return cuda.index_of(device.partition(" ")[0], "")


class DeviceMemory:
    """Memory of one GPU, read at most once a second; thread-safe."""

    def __init__(self, index: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._index = index
        self._clock = clock
        self._asked_s = -math.inf
        self._lock = threading.Lock()
        self._found: tuple[int, int] | None = None

    def read(self) -> tuple[int, int] | None:
        """Return the bytes that all processes use, and the total; None if the driver does not answer."""
        with self._lock:
            if self._clock() - self._asked_s >= ASKED_EVERY_S:
                self._asked_s, self._found = self._clock(), None
                with suppress(Exception):  # such as a context that is lost
                    free, total = cuda.namespace().cuda.Device(self._index).mem_info
                    self._found = total - free, total
            return self._found


def memory_in_words(device: str) -> str:
    """Return a sentence on the use of a GPU's memory; "" if the device is no GPU, or does not answer."""
    index = index_in(device)
    found = None if index is None else DeviceMemory(index).read()
    if index is None or found is None:
        return ""
    used, total = found
    held = ", ".join(f"{name} has {gibibytes(size)}" for name, size in _held(index))
    here = f"; in this process {held}" if held else ""
    return f"{gibibytes(total - used)} of {gibibytes(total)} GiB are free{here}"


def is_of_jax_on_cpu(error: BaseException) -> bool:
    """Tell whether the host's memory ran out: XLA has one message for all devices, and JAX computes on a CPU."""
    jax: Any = sys.modules.get("jax")
    return jax is not None and "RESOURCE_EXHAUSTED" in str(error) and jax.default_backend() == "cpu"


def _held(index: int) -> Iterator[tuple[str, int]]:
    """Yield the libraries of this process that hold memory of a GPU, and the bytes that they report."""
    for name, ask in (("PyTorch", _of_torch), ("JAX", _of_jax), ("CuPy", _of_cupy)):
        with suppress(Exception):  # a library of another version, or a context that is lost
            size = ask(index)
            if size:
                yield name, size


def _of_torch(index: int) -> int:
    torch: Any = sys.modules["torch"]
    return int(torch.cuda.memory_reserved(index)) if torch.cuda.is_initialized() else 0


def _of_jax(index: int) -> int:
    jax: Any = sys.modules["jax"]
    if not jax._src.xla_bridge.backends_are_initialized():  # asking would make JAX allocate memory
        return 0
    figures = jax.local_devices(backend="gpu")[index].memory_stats()
    return int(figures.get("pool_bytes", figures["bytes_in_use"]))


def _of_cupy(index: int) -> int:
    cupy = cuda.namespace()
    with cupy.cuda.Device(index):  # each has its own pool
        return int(cupy.get_default_memory_pool().total_bytes())
