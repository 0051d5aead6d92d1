"""A CuPy of a few lines whose streams run as late as they may: what is not ordered by an event happens out of order.

Work on a stream is done when it must be: when the host waits for it, or another stream waits for an event behind it.
Pinned memory goes back to a pool when its last reference dies, and comes out of it again at once, as in CuPy.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np


class Stream:
    """Work in the order of its submission, done as late as possible."""

    def __init__(self, non_blocking: bool = False) -> None:
        self._late: list[Callable[[], None]] = []
        self.synchronisations = 0

    def submit(self, work: Callable[[], None]) -> None:
        self._late.append(work)

    def wait_event(self, event: Event) -> None:
        self.submit(event.run)

    def synchronize(self) -> None:
        self.synchronisations += 1
        while self._late:
            self._late.pop(0)()

    def run_until(self, marker: Callable[[], None]) -> None:
        while marker in self._late:
            self._late.pop(0)()


class Event:
    """A place in a stream."""

    def __init__(self, disable_timing: bool = False) -> None:
        self._stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self._stream = stream
        self._marker = lambda: None
        stream.submit(self._marker)

    def run(self) -> None:
        assert self._stream is not None
        self._stream.run_until(self._marker)

    @property
    def done(self) -> bool:
        assert self._stream is not None
        return self._marker not in self._stream._late


class Array:
    """Device memory."""

    def __init__(self, values: np.ndarray, cuda: LateCuda) -> None:
        self.values = values
        self.shape, self.dtype = values.shape, values.dtype
        self._cuda = cuda

    def set(self, host: np.ndarray, stream: Stream) -> None:
        source = host.__array_interface__["data"][0]  # an address, and no reference: as the driver has it
        stream.submit(lambda: np.copyto(self.values, self._cuda.read(source, self.values)))

    def get(self, stream: Stream, out: np.ndarray, blocking: bool) -> None:
        assert not blocking
        stream.submit(lambda: np.copyto(out, self.values))


class LateCuda:
    """What `parashard_worker.device` and `parashard.process.cuda` use of the module `cupy`."""

    float32 = np.float32
    __version__ = "0.late"

    def __init__(self, devices: int = 1) -> None:
        self._free: dict[int, list[np.ndarray]] = {}
        self._blocks: dict[int, np.ndarray] = {}
        self.compute = Stream()

        class CUDARuntimeError(RuntimeError):
            pass

        runtime = SimpleNamespace(
            getDeviceCount=lambda: devices,
            getDeviceProperties=lambda index: {"name": b"Late GPU"},
            runtimeGetVersion=lambda: 12080,
            CUDARuntimeError=CUDARuntimeError,
        )
        self.cuda = SimpleNamespace(
            runtime=runtime,
            Device=lambda index: SimpleNamespace(use=lambda: None),
            Stream=Stream,
            Event=Event,
            get_current_stream=lambda: self.compute,
            alloc_pinned_memory=self._alloc,
        )

    def _alloc(self, size_bytes: int) -> Any:
        free = self._free.setdefault(size_bytes, [])
        block = free.pop() if free else np.zeros(size_bytes, np.uint8)
        self._blocks[block.__array_interface__["data"][0]] = block
        memory = (ctypes.c_uint8 * size_bytes).from_buffer(block.data)
        weakref.finalize(memory, free.append, block)
        return memory

    def read(self, address: int, like: np.ndarray) -> np.ndarray:
        return self._blocks[address][: like.nbytes].view(like.dtype).reshape(like.shape)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return Array(np.zeros(shape, dtype), self)

    def computed(self, values: Any) -> Array:
        """Return what a kernel on the compute stream writes, late."""
        result = Array(np.zeros_like(values), self)
        self.compute.submit(lambda: np.copyto(result.values, values))
        return result

    def ascontiguousarray(self, array: Array, dtype: Any) -> Array:
        if array.dtype == dtype and array.values.flags.c_contiguous:
            return array
        result = Array(np.zeros(array.shape, dtype), self)
        self.compute.submit(lambda: np.copyto(result.values, array.values, casting="same_kind"))
        return result

    def value_of(self, array: Array) -> np.ndarray:
        """Return an array's value as a kernel on the compute stream would see it."""
        self.compute.synchronize()
        return array.values
