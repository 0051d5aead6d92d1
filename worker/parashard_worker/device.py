"""Device: where gradients are computed, on the CPU or one CUDA GPU; models get the array namespace `xp`.

On a GPU, copies go through pinned host buffers on a stream of their own, and the host waits once in a step: for loss
and gradients together. Knows no model and no shard.
"""

from __future__ import annotations

import os
import platform
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import threadpoolctl

from parashard.data.base import Array, Batch
from parashard.data.tree import map_leaves
from parashard.errors import ConfigurationError, Unavailable
from parashard.plan.variables import Float32s
from parashard.process import cuda


class Cpu:
    """NumPy on the host."""

    def __init__(self) -> None:
        self.xp: Any = np
        self.name = "cpu"

    def variables_from_host(self, variables: Mapping[str, Float32s]) -> Mapping[str, Array]:
        """Return the variables as arrays of `xp`, ready for computing."""
        return variables

    def batch_from_host(self, batch: Batch) -> Batch:
        """Return the batch with inputs and targets as arrays of `xp`."""
        return batch

    def to_host(self, loss: Array | float, gradients: Mapping[str, Array]) -> tuple[float, dict[str, Float32s]]:
        """Return a loss and gradients of `xp` as a number and NumPy arrays of float32; the step's one synchronisation.

        The arrays are valid until the caller drops them.
        """
        return float(loss), {name: np.asarray(gradient, np.float32) for name, gradient in gradients.items()}

    def fingerprint(self) -> str:
        """Name the processor, NumPy, BLAS with its kernel and threads, and the frameworks that a model has loaded."""
        pools = [
            f"{pool['internal_api']} {pool.get('version')} {pool.get('architecture', '')} x{pool['num_threads']}"
            for pool in threadpoolctl.threadpool_info()
            if pool["user_api"] == "blas" and ("jax" in sys.modules or "scipy.libs" not in pool["filepath"])
        ]  # Numba loads SciPy's BLAS, which of our libraries only JAX calls
        return "; ".join([f"{_processor()}", f"numpy {np.__version__}", *sorted(set(pools)), *_frameworks()])


class Gpu:
    """CuPy on one CUDA device; raise ConfigurationError if CuPy or the device is not there."""

    def __init__(self, index: int) -> None:
        self._device = cuda.device(index)
        self._cupy = self.xp = cuda.namespace()
        self._copies = self._cupy.cuda.Stream(non_blocking=True)
        self._staged: deque[tuple[Any, Any]] = deque()  # (event after the copy, pinned buffer that it reads)
        self.name = cuda.device_name(index)

    def variables_from_host(self, variables: Mapping[str, Float32s]) -> Mapping[str, Array]:
        """Copy from pinned memory on the copy stream; the compute stream waits for it on the device, not the host."""
        self._device.use()  # the current device belongs to the thread
        arrays = {name: self._copied_in(values) for name, values in variables.items()}
        self._join(self._copies, self._cupy.cuda.get_current_stream())
        return arrays

    def batch_from_host(self, batch: Batch) -> Batch:
        """Copy inputs and targets likewise."""
        self._device.use()
        given = batch.inputs, batch.targets, batch.places, *([] if batch.weights is None else [batch.weights])
        inputs, targets, places, *weights = map_leaves(self._copied_in, given)
        self._join(self._copies, self._cupy.cuda.get_current_stream())
        there = replace(batch, inputs=inputs, targets=targets, weights=weights[0] if weights else None, places=places)
        return replace(there, on_host=batch)

    def to_host(self, loss: Array | float, gradients: Mapping[str, Array]) -> tuple[float, dict[str, Float32s]]:
        """Copy into pinned memory on the copy stream, and wait for all of it at once."""
        self._device.use()
        float32 = self._cupy.float32
        compact = {name: self._cupy.ascontiguousarray(g, dtype=float32) for name, g in gradients.items()}
        on_device = not isinstance(loss, float | int | np.generic | np.ndarray)
        self._join(self._cupy.cuda.get_current_stream(), self._copies)  # after the last kernel that writes them
        host = {name: self._copying_out(gradient) for name, gradient in compact.items()}
        host_loss = self._copying_out(loss) if on_device else loss
        self._copies.synchronize()
        return float(host_loss), host

    def fingerprint(self) -> str:
        """Name the GPU, CuPy, the CUDA runtime, which brings cuBLAS, and the frameworks that a model has loaded."""
        runtime = self._cupy.cuda.runtime.runtimeGetVersion()
        names = [self.name.partition(" ")[2], f"cupy {self._cupy.__version__}", f"cuda {runtime}", *_frameworks()]
        return "; ".join(names)

    def _copied_in(self, values: Any) -> Array:
        staged = cuda.page_locked(values.shape, values.dtype)
        np.copyto(staged, values)
        array = self._cupy.empty(values.shape, values.dtype)
        self._join(self._cupy.cuda.get_current_stream(), self._copies)  # the pool may reuse memory still being read
        array.set(staged, stream=self._copies)
        self._keep(staged)
        return array

    def _copying_out(self, array: Array) -> Any:
        host = cuda.page_locked(array.shape, array.dtype)
        array.get(stream=self._copies, out=host, blocking=False)
        return host

    def _keep(self, staged: Any) -> None:
        """Hold a pinned buffer until its copy is done: the pool would hand it out while the device still reads it."""
        while self._staged and self._staged[0][0].done:
            self._staged.popleft()
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(self._copies)
        self._staged.append((event, staged))

    def _join(self, first: Any, then: Any) -> None:
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(first)
        then.wait_event(event)


Device = Cpu | Gpu
"""Arrays in, arrays out, and the namespace in between; its fingerprint says all that decides the bits of a gradient."""


def open_device(asked: str, worker: str = "") -> Device:
    """Return the device that a job file or a flag names, for a worker such as "worker-3".

    "cuda" is one of the GPUs: workers of a machine are spread over them by their numbers; "auto" is the same where that
    can be, else the CPU. Raises ConfigurationError if a GPU is asked for and there is none, or the name is not one of
    these; Unavailable if a GPU that is asked for, or its driver, is at fault.
    """
    if asked == "cpu":
        return Cpu()
    if asked == "auto":
        try:
            return Gpu(cuda.spread(worker, cuda.device_count()))
        except (ConfigurationError, Unavailable):
            return Cpu()
    index = cuda.index_of(asked, worker)
    if index is None:
        raise ConfigurationError(f"device {asked!r} is unknown; allowed: auto, cpu, cuda, cuda:N")
    return Gpu(index)


def _frameworks() -> list[str]:
    """Return the frameworks that are loaded, with their versions; PyTorch with its threads, which change its sums."""
    loaded = [(name, sys.modules[name]) for name in ("jax", "jaxlib", "keras", "torch") if name in sys.modules]
    found = [f"{name} {getattr(module, '__version__', '')}" for name, module in loaded]
    torch = sys.modules.get("torch")
    return found if torch is None else [*found[:-1], f"{found[-1]} x{torch.get_num_threads()}"]


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        models = []
    return f"{platform.machine()} {models[0] if models else os.uname().release}"
