"""Device: where gradients are computed. The only file that imports CuPy; models get the array namespace `xp`.

On a GPU, copies go through pinned host buffers on a stream of their own, beside the compute stream.
"""

from __future__ import annotations

import os
import platform
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import threadpoolctl

from parashard.data.base import Array, Batch
from parashard.errors import ConfigurationError
from parashard.variables import Float32s


class Device(Protocol):
    """Arrays in, arrays out, and the namespace in between."""

    xp: Any
    name: str

    def variables_from_host(self, variables: Mapping[str, Float32s]) -> Mapping[str, Array]:
        """Return the variables as arrays of `xp`, ready for computing."""

    def batch_from_host(self, batch: Batch) -> Batch:
        """Return the batch with inputs and targets as arrays of `xp`."""

    def to_host(self, gradients: Mapping[str, Array]) -> dict[str, Float32s]:
        """Return gradients as NumPy arrays of float32; valid until the caller drops them."""

    def fingerprint(self) -> str:
        """Describe all that decides the bits of a gradient here (P13)."""


class Cpu:
    """NumPy on the host."""

    def __init__(self) -> None:
        self.xp: Any = np
        self.name = "cpu"

    def variables_from_host(self, variables: Mapping[str, Float32s]) -> Mapping[str, Array]:
        """Return them as they are."""
        return variables

    def batch_from_host(self, batch: Batch) -> Batch:
        """Return it as it is."""
        return batch

    def to_host(self, gradients: Mapping[str, Array]) -> dict[str, Float32s]:
        """Return them as float32."""
        return {name: np.asarray(gradient, np.float32) for name, gradient in gradients.items()}

    def fingerprint(self) -> str:
        """Name the processor, NumPy and BLAS with its kernel and threads."""
        pools = [
            f"{pool['internal_api']} {pool.get('version')} {pool.get('architecture', '')} x{pool['num_threads']}"
            for pool in threadpoolctl.threadpool_info()
            if pool["user_api"] == "blas"
        ]
        return "; ".join([f"{_processor()}", f"numpy {np.__version__}", *sorted(set(pools))])


class Gpu:
    """CuPy on one CUDA device.

    Parameters
    ----------
    index : int
        CUDA device number.

    Raises
    ------
    ConfigurationError
        If CuPy or the device is not there.
    """

    def __init__(self, index: int) -> None:
        cupy = _cupy()
        count = _device_count(cupy)
        if index >= count:
            raise ConfigurationError(f"device cuda:{index} is not there: this machine has {count} CUDA devices")
        self.xp: Any = cupy
        self._cupy = cupy
        self._device = cupy.cuda.Device(index)
        self._device.use()
        self._copies = cupy.cuda.Stream(non_blocking=True)
        self._staged: deque[tuple[Any, Any]] = deque()  # (event after the copy, pinned buffer that it reads)
        self._index = index
        model = cupy.cuda.runtime.getDeviceProperties(index)["name"]
        self.name = f"cuda:{index} {model.decode() if isinstance(model, bytes) else model}"

    def variables_from_host(self, variables: Mapping[str, Float32s]) -> Mapping[str, Array]:
        """Copy from pinned memory on the copy stream; the compute stream waits for it on the device, not the host."""
        self._device.use()  # the current device belongs to the thread
        arrays = {name: self._copied_in(values) for name, values in variables.items()}
        self._join(self._copies, self._cupy.cuda.get_current_stream())
        return arrays

    def batch_from_host(self, batch: Batch) -> Batch:
        """Copy inputs and targets likewise."""
        self._device.use()
        inputs, targets = self._copied_in(batch.inputs), self._copied_in(batch.targets)
        self._join(self._copies, self._cupy.cuda.get_current_stream())
        return Batch(batch.step, batch.epoch, batch.indices, inputs, targets)

    def to_host(self, gradients: Mapping[str, Array]) -> dict[str, Float32s]:
        """Copy into pinned memory on the copy stream, and wait: the step's one synchronisation beside the loss."""
        self._device.use()
        compact = {name: self._cupy.ascontiguousarray(g, dtype=self._cupy.float32) for name, g in gradients.items()}
        self._join(self._cupy.cuda.get_current_stream(), self._copies)  # after the last kernel that writes them
        host = {}
        for name, gradient in compact.items():
            host[name] = self._pinned(gradient.shape, np.dtype(np.float32))
            gradient.get(stream=self._copies, out=host[name], blocking=False)
        self._copies.synchronize()
        return host

    def fingerprint(self) -> str:
        """Name the card, CuPy and the CUDA runtime, which brings cuBLAS."""
        runtime = self._cupy.cuda.runtime.runtimeGetVersion()
        return f"{self.name.partition(' ')[2]}; cupy {self._cupy.__version__}; cuda {runtime}"

    def _copied_in(self, values: Any) -> Array:
        staged = self._pinned(values.shape, values.dtype)
        np.copyto(staged, values)
        array = self._cupy.empty(values.shape, values.dtype)
        self._join(self._cupy.cuda.get_current_stream(), self._copies)  # the pool may reuse memory still being read
        array.set(staged, stream=self._copies)
        self._keep(staged)
        return array

    def _keep(self, staged: Any) -> None:
        """Hold a pinned buffer until its copy is done: the pool would hand it out while the device still reads it."""
        while self._staged and self._staged[0][0].done:
            self._staged.popleft()
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(self._copies)
        self._staged.append((event, staged))

    def _pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return an array in page-locked memory, from CuPy's pool of such memory."""
        elements = int(np.prod(shape, dtype=np.int64))
        memory = self._cupy.cuda.alloc_pinned_memory(max(1, elements * dtype.itemsize))
        return np.frombuffer(memory, dtype, elements).reshape(shape)

    def _join(self, first: Any, then: Any) -> None:
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(first)
        then.wait_event(event)


def open_device(asked: str) -> Device:
    """Return the device that a job file or a flag names.

    Parameters
    ----------
    asked : str
        "cpu", "cuda" (the first device), "cuda:N", or "auto": the first CUDA device if there is one, else the CPU.

    Raises
    ------
    ConfigurationError
        If a GPU is asked for and there is none, or the name is not one of these.
    """
    if asked == "cpu":
        return Cpu()
    if asked == "auto":
        try:
            return Gpu(0)
        except ConfigurationError:
            return Cpu()
    kind, _, index = asked.partition(":")
    if kind != "cuda" or not (asked == "cuda" or (index.isascii() and index.isdigit())):
        raise ConfigurationError(f"device {asked!r} is unknown; allowed: auto, cpu, cuda, cuda:N")
    return Gpu(int(index or 0))


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ConfigurationError(
            f"a CUDA device needs CuPy, which is not here ({error}); install parashard[cuda12] or parashard[cuda13]"
        ) from None
    return cupy


def _device_count(cupy: Any) -> int:
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ConfigurationError(f"no CUDA device can be used here: {error}") from None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        models = []
    return f"{platform.machine()} {models[0] if models else os.uname().release}"
