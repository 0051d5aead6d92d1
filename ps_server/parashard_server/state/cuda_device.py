"""CudaDevice: a GPU as `parashard_server.state.cuda_storage` sees it, by CuPy.

Owns the one stream of a shard's work on a device, which keeps it in order; knows no partition and no push. Opened by
`parashard_server.build` where a job or a flag names a device, called under the shard's lock. It can be tested only with
a CUDA device; the logic above it is tested on NumPy.
"""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Any

import numpy as np

from parashard.errors import ConfigurationError
from parashard.plan.variables import Float32s
from parashard.process import cuda
from parashard.process.logs import log
from parashard_server.state.cuda_storage import Resident
from parashard_server.state.kernels import cuda as kernels

REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device and thread of the process


class CudaDevice:
    """One CUDA device; see `parashard_server.state.cuda_storage.ShardDevice`."""

    kernels: ModuleType = kernels

    def __init__(self, index: int) -> None:
        self._device = cuda.device(index)
        self._cupy: Any = cuda.namespace()
        self._stream = self._cupy.cuda.Stream(non_blocking=True)
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

    def staging(self, elements: int) -> Float32s:
        """Return page-locked memory."""
        self.use()
        return cuda.page_locked((elements,), np.float32)

    def lock_pages(self, host: Float32s) -> None:
        """Page-lock memory until `host` is dropped; where CUDA refuses, it is copied as pageable memory."""
        if not host.size:
            return
        self.use()
        runtime, address = self._cupy.cuda.runtime, host.ctypes.data
        try:
            runtime.hostRegister(address, host.nbytes, REGISTER_PORTABLE)
        except runtime.CUDARuntimeError as error:
            log.info("weights-not-page-locked", error=str(error))
            return
        weakref.finalize(host, runtime.hostUnregister, address).atexit = False

    def copy_in(self, destination: Resident, host: Float32s) -> None:
        """Copy to the device, and wait."""
        if host.size:
            self.use()
            destination.set(host, stream=self._stream)
            self._stream.synchronize()

    def copy_out(self, host: Float32s, source: Resident) -> None:
        """Copy from the device, and wait."""
        if host.size:
            self.use()
            source.get(stream=self._stream, out=host)
            self._stream.synchronize()

    def wait(self) -> None:
        """Wait for the stream; an error of any kernel in it is raised here."""
        self._stream.synchronize()


def open_device(asked: str, shard: int) -> CudaDevice | None:
    """Return the device that "cuda" or "cuda:N" selects for a shard; None for "cpu"."""
    if asked == "cpu":
        return None
    index = cuda.index_of(asked, f"shard-{shard}")
    if index is None:
        raise ConfigurationError(f"device {asked!r} is unknown; allowed: cpu, cuda, cuda:N")
    return CudaDevice(index)
