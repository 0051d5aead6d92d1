"""CUDA: CuPy, its devices, and page-locked memory. The only file that imports CuPy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from parashard.errors import ConfigurationError, Unavailable

_NOT_HERE = (35, 100)  # cudaErrorInsufficientDriver, also raised without a driver, and cudaErrorNoDevice
_PORTABLE = 1  # cudaHostAllocPortable: page-locked for every device and thread of the process
_NUMBER_AT_END = re.compile(r"-([0-9]+)\Z")


def namespace() -> Any:
    """Return the module `cupy`."""
    try:
        import cupy
    except ImportError as error:
        raise ConfigurationError(
            f"a CUDA device needs CuPy, which is not here ({error}); install parashard[cuda12] or parashard[cuda13]"
        ) from None
    return cupy


def device(index: int) -> Any:
    """Return a CUDA device, a `cupy.cuda.Device`, and make it current in the calling thread."""
    cupy, count = namespace(), device_count()
    if index >= count:
        raise ConfigurationError(f"device cuda:{index} is not there: this machine has {count} CUDA devices")
    found = cupy.cuda.Device(index)
    with _driver(cupy):
        found.use()
    return found


def check(asked: str) -> None:
    """Refuse a CUDA device that a process on this machine could not open, without opening it."""
    if asked != "cuda" and not asked.startswith("cuda:"):
        return
    count, index = device_count(), index_of(asked, "")
    if index is None or index >= count:
        raise ConfigurationError(f"device {asked} is not there: this machine has {count} CUDA devices")


def device_name(index: int) -> str:
    """Return a device's number and model, such as "cuda:0 NVIDIA L4"."""
    model = namespace().cuda.runtime.getDeviceProperties(index)["name"]
    return f"cuda:{index} {model.decode() if isinstance(model, bytes) else model}"


def device_count() -> int:
    """Return the number of CUDA devices of this machine."""
    cupy = namespace()
    with _driver(cupy):
        found = int(cupy.cuda.runtime.getDeviceCount())
    return found


@contextmanager
def _driver(cupy: Any) -> Iterator[None]:
    """Map the driver's errors: ConfigurationError without a driver or device, else Unavailable."""
    try:
        yield
    except cupy.cuda.runtime.CUDARuntimeError as error:
        kind = ConfigurationError if getattr(error, "status", None) in _NOT_HERE else Unavailable
        raise kind(f"no CUDA device can be used here: {error}") from None


def spread(process: str, count: int) -> int:
    """Return the device of a process if none is named: worker-3 gets 3 % count."""
    number = _NUMBER_AT_END.search(process)
    return int(number[1]) % max(1, count) if number else 0


def index_of(asked: str, process: str) -> int | None:
    """Return the device that "cuda" or "cuda:N" selects for a process; None if the text is neither."""
    if asked == "cuda":
        return spread(process, device_count())
    kind, _, index = asked.partition(":")
    return int(index) if kind == "cuda" and index.isascii() and index.isdigit() else None


def page_locked(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an array in its own page-locked memory, with undefined values."""
    # CuPy's pool of page-locked memory would round its size up to a power of two, and keep it.
    kind = np.dtype(dtype)
    elements = int(np.prod(shape, dtype=np.int64))
    pinned = namespace().cuda
    memory = pinned.PinnedMemoryPointer(pinned.PinnedMemory(max(1, elements * kind.itemsize), _PORTABLE), 0)
    return np.frombuffer(memory, kind, elements).reshape(shape)
