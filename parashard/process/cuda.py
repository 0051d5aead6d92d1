"""CUDA: CuPy, the cards that it sees, and page-locked memory. The only file that imports CuPy.

Owns which card a name such as "cuda" means to a process, and what is said where there is none. Knows nothing of steps
and shards. Called by `parashard_worker.device` and by the shard's `parashard_server.state.cuda_device`; nothing is
imported before they ask.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from parashard.errors import ConfigurationError, Unavailable

_NOT_HERE = (35, 100)  # cudaErrorInsufficientDriver, also said where there is no driver, and cudaErrorNoDevice
_NUMBER_AT_END = re.compile(r"-([0-9]+)\Z")


def namespace() -> Any:
    """Return the module `cupy`.

    Raises
    ------
    ConfigurationError
        If it is not installed.
    """
    try:
        import cupy
    except ImportError as error:
        raise ConfigurationError(
            f"a CUDA device needs CuPy, which is not here ({error}); install parashard[cuda12] or parashard[cuda13]"
        ) from None
    return cupy


def card(index: int) -> Any:
    """Return a CUDA device, a `cupy.cuda.Device`, and make it the calling thread's.

    Raises
    ------
    ConfigurationError
        If CuPy or the device is not there.
    Unavailable
        If the driver or the device is at fault.
    """
    cupy, count = namespace(), cards()
    if index >= count:
        raise ConfigurationError(f"device cuda:{index} is not there: this machine has {count} CUDA devices")
    device = cupy.cuda.Device(index)
    with _driver(cupy):
        device.use()
    return device


def check(asked: str) -> None:
    """Refuse a device that a process here could not open; nothing is opened, and CPUs are not looked at.

    Raises
    ------
    ConfigurationError
        If CuPy or the device is not there.
    Unavailable
        If the driver is at fault.
    """
    if asked != "cuda" and not asked.startswith("cuda:"):
        return
    count, index = cards(), index_of(asked, "")
    if index is None or index >= count:
        raise ConfigurationError(f"device {asked} is not there: this machine has {count} CUDA devices")


def card_name(index: int) -> str:
    """Return a card's number and model, such as "cuda:0 NVIDIA L4"."""
    model = namespace().cuda.runtime.getDeviceProperties(index)["name"]
    return f"cuda:{index} {model.decode() if isinstance(model, bytes) else model}"


def cards() -> int:
    """Return how many CUDA devices this machine has.

    Raises
    ------
    ConfigurationError
        If CuPy is not installed, or there is no driver or no card.
    Unavailable
        If the driver says anything else.
    """
    cupy = namespace()
    with _driver(cupy):
        found = int(cupy.cuda.runtime.getDeviceCount())
    return found


@contextmanager
def _driver(cupy: Any) -> Iterator[None]:
    """Raise what the driver says as ours: that nothing of it is here, or that it, or a card, is at fault now."""
    try:
        yield
    except cupy.cuda.runtime.CUDARuntimeError as error:
        kind = ConfigurationError if getattr(error, "status", None) in _NOT_HERE else Unavailable
        raise kind(f"no CUDA device can be used here: {error}") from None


def spread(process: str, count: int) -> int:
    """Return which of `count` cards a process takes where none is named: worker-3 takes 3 % count.

    Parameters
    ----------
    process : str
        Its name in the job, which ends with its number; one without a number takes card 0.
    count : int
        Cards of this machine; may be 0, and then 0 is the card that is missed.
    """
    number = _NUMBER_AT_END.search(process)
    return int(number[1]) % max(1, count) if number else 0


def index_of(asked: str, process: str) -> int | None:
    """Return which card "cuda" or "cuda:N" means to a process; None if the text is neither.

    Raises
    ------
    ConfigurationError
        If the cards must be counted and cannot be.
    """
    if asked == "cuda":
        return spread(process, cards())
    kind, _, index = asked.partition(":")
    return int(index) if kind == "cuda" and index.isascii() and index.isdigit() else None


def page_locked(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an array in page-locked memory, from CuPy's pool of such memory, with undefined values."""
    kind = np.dtype(dtype)
    elements = int(np.prod(shape, dtype=np.int64))
    memory = namespace().cuda.alloc_pinned_memory(max(1, elements * kind.itemsize))
    return np.frombuffer(memory, kind, elements).reshape(shape)
