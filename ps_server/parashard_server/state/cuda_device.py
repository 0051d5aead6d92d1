"""CudaDevice: the `ShardDevice` of `parashard_server.state.cuda_storage`, implemented with CuPy.

Has one stream for a shard's work on a device, which keeps it in order: its own, or that of the thread which opens it,
if a model of this process computes on it. Another stream is for copies of what no longer changes. Knows no partition
and no push. Opened by `parashard_server.build` if a job or a flag names a device, called under the shard's lock. It can
be tested only with a CUDA device; the logic above it is tested on NumPy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parashard.errors import ConfigurationError, QueueFull, Unavailable
from parashard.plan.variables import Float32s
from parashard.process import cuda
from parashard.process.logs import log
from parashard_server.state.cuda_storage import Resident
from parashard_server.state.kernels import cuda as kernels

REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device and thread of the process


RESERVE = 0.1
"""Share of a device's memory that a checkpoint's copies leave free: CuPy does not return what they took."""


class CudaDevice:
    """One CUDA device; see `parashard_server.state.cuda_storage.ShardDevice`."""

    kernels: ModuleType = kernels

    def __init__(self, index: int, *, own_stream: bool = True) -> None:
        self._device = cuda.device(index)
        self._cupy: Any = cuda.namespace()
        streams = self._cupy.cuda
        self._stream = streams.Stream(non_blocking=True) if own_stream else streams.get_current_stream()
        self._beside, self._copied = streams.Stream(non_blocking=True), streams.Event(disable_timing=True)
        self._locked: dict[int, int] = {}  # lengths by address, in bytes
        self.name = cuda.device_name(index)

    def use(self) -> None:
        """Make this device and its stream the calling thread's."""
        self._device.use()
        self._stream.use()

    def full(self, elements: int, value: float) -> Resident:
        """Return a new vector."""
        self.use()
        try:
            return self._cupy.full(elements, value, np.float32)
        except self._cupy.cuda.memory.OutOfMemoryError as error:
            raise ConfigurationError(
                f"{self.name} has no room for {4 * elements} bytes of this shard: {error}; take more shards, or "
                'cluster.shard_device = "cpu"'
            ) from None

    def bytes_in(self, host: NDArray[np.uint8]) -> Any:
        """Return a copy of bytes on the device."""
        self.use()
        copied = self._cupy.empty(host.shape, np.uint8)
        copied.set(host, stream=self._stream)
        self._stream.synchronize()
        return copied

    def staging(self, elements: int) -> Float32s:
        """Return page-locked memory."""
        self.use()
        return cuda.page_locked((elements,), np.float32)

    def lock_pages(self, host: NDArray[Any]) -> None:
        """Page-lock memory until `host` is dropped; where CUDA refuses, it is copied as pageable memory."""
        if not host.size:
            return
        self.use()
        runtime, address = self._cupy.cuda.runtime, host.ctypes.data
        try:
            runtime.hostRegister(address, host.nbytes, REGISTER_PORTABLE)
        except runtime.CUDARuntimeError as error:
            log.info("not-page-locked", bytes=host.nbytes, error=str(error))
            return
        self._locked[address] = host.nbytes
        weakref.finalize(host, self._unlock, address).atexit = False

    def _unlock(self, address: int) -> None:
        del self._locked[address]
        runtime = self._cupy.cuda.runtime
        with suppress(runtime.CUDARuntimeError):  # of a context that is lost
            self._device.use()  # else the runtime may open another device for this thread
            runtime.hostUnregister(address)

    def is_locked(self, host: Float32s) -> bool:
        """Tell whether memory is within a page-locked range."""
        begin, stop = host.ctypes.data, host.ctypes.data + host.nbytes
        return any(address <= begin and stop <= address + size for address, size in list(self._locked.items()))

    def copy_in(self, destination: Resident, host: Float32s) -> None:
        """Begin to copy to the device."""
        if host.size:
            self.use()
            destination.set(host, stream=self._stream)

    def copy_out(self, host: Float32s, source: Resident) -> None:
        """Begin to copy from the device; to memory that is not page-locked the copy is complete on return."""
        if host.size:
            self.use()
            source.get(stream=self._stream, out=host, blocking=False)

    def wait(self) -> None:
        """Wait for the stream; an error of any kernel in it is raised here."""
        self._stream.synchronize()

    def copied(self, vectors: Sequence[Resident]) -> list[Resident]:
        """Begin to copy vectors on the device; see `ShardDevice.copied`."""
        self.use()
        needed = sum(vector.nbytes for vector in vectors)
        free, total = self._device.mem_info
        free += self._cupy.get_default_memory_pool().free_bytes()
        if free - needed < RESERVE * total:
            raise QueueFull(f"{self.name} has {free:,} bytes free, and its checkpoint would take {needed:,} of them")
        try:
            made = [self._cupy.empty(len(vector), np.float32) for vector in vectors]
        except self._cupy.cuda.memory.OutOfMemoryError as error:  # another process was quicker
            raise QueueFull(f"{self.name} has no room for a checkpoint of {needed:,} bytes: {error}") from None
        for into, vector in zip(made, vectors, strict=True):
            into[...] = vector
        self._copied.record(self._stream)
        return made

    def fetch(self, pairs: Iterable[tuple[Float32s, Resident]]) -> None:
        """Copy `copied` vectors from the device in any thread, on a stream of their own, and wait."""
        try:
            self._device.use()
            self._beside.wait_event(self._copied)
            for host, source in pairs:
                if host.size:
                    source.get(stream=self._beside, out=host, blocking=False)
            self._beside.synchronize()
        except Exception as error:  # of the driver, or for want of memory
            raise Unavailable(f"{self.name} failed while a checkpoint was copied from it: {error}") from error


def open_device(asked: str, shard: int, *, own_stream: bool = True) -> CudaDevice | None:
    """Return the device that "cuda" or "cuda:N" selects for a shard; None for "cpu"."""
    if asked == "cpu":
        return None
    index = cuda.index_of(asked, f"shard-{shard}")
    if index is None:
        raise ConfigurationError(f"device {asked!r} is unknown; allowed: cpu, cuda, cuda:N")
    return CudaDevice(index, own_stream=own_stream)
