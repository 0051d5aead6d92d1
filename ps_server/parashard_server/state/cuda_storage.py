"""CudaStorage: a shard's weights and optimizer slots on a GPU, with a mirror of the weights in the host's memory.

Pure except for the device, which is behind an interface: `ShardDevice`, by CuPy in `parashard_server.state.cuda_device`
and by NumPy in the tests. All readers of weights read the mirror (`memory.weights`), which may be shared with workers
of this host. A pull copies partitions that have moved on the device into it, under the lock and with the versions for
lock-free readers (`parashard.transports.shared_weights`). A push is copied in through page-locked memory and moves the
weights partition by partition, as on the host; checks, layouts and decoding are those of `Storage`, on the host. Called
as `Storage`.

Not implemented: CUDA IPC handles, by which a worker on the same device would read weights without a copy through the
host (docs/decisions/0014-gpu-resident-shards.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from parashard.plan.partition import ELEMENT_BYTES, Plan
from parashard.plan.variables import Float32s
from parashard.protocol.messages import VectorRun
from parashard.transports.shared_weights import Versions, WeightMemory
from parashard_server.state.optimizer import Optimizer
from parashard_server.state.storage import InitialRows, Storage

Resident = Any
"""A flat vector of float32 on the device: has `size`, `shape` and `nbytes`, and a slice of it is a view."""


class ShardDevice(Protocol):
    """One GPU, its memory, and one stream, whose operations run in order."""

    kernels: ModuleType
    """`update` and `decay` of `kernels.fused`, on vectors of this device; asynchronous."""

    def use(self) -> None:
        """Make this device and its stream current in the calling thread."""

    def full(self, elements: int, value: float) -> Resident:
        """Return a new vector on the device, filled with a value."""

    def staging(self, elements: int) -> Float32s:
        """Return page-locked host memory, for fast copies."""

    def lock_pages(self, host: Float32s) -> None:
        """Page-lock host memory for its lifetime, if possible."""

    def copy_in(self, destination: Resident, host: Float32s) -> None:
        """Copy a vector to the device; synchronous."""

    def copy_out(self, host: Float32s, source: Resident) -> None:
        """Copy a vector from the device, after the stream's earlier operations; synchronous."""

    def wait(self) -> None:
        """Synchronise the stream; raise if an operation failed."""


@dataclass
class _Moving:
    """The weights on the device: a private WeightMemory."""

    weights: Resident
    begun: Versions
    done: Versions


class CudaStorage(Storage):
    """The arrays of one shard, on a GPU, whose kernels the optimizer has.

    Attributes
    ----------
    weights : ndarray of float32, shape (elements,)
        The mirror in host memory. Partition i has version `memory.done[i]`; `moved` updates it.
    slots : dict of str to vector of float32, shape (elements,)
        Optimizer state, on the device.
    """

    def __init__(
        self,
        plan: Plan,
        shard: int,
        optimizer: Optimizer,
        initial: InitialRows,
        *,
        device: ShardDevice,
        memory: WeightMemory | None = None,
    ) -> None:
        self._device = device
        super().__init__(plan, shard, optimizer, initial, memory=memory)
        device.lock_pages(self.weights)
        self._gradient = device.full(self.elements, 0.0)
        self._live = _Moving(device.full(self.elements, 0.0), self.memory.begun.copy(), self.memory.done.copy())
        device.copy_in(self._live.weights, self.weights)

    def begin_at(self, version: int) -> None:
        """Set the version of the values that an incarnation starts with."""
        super().begin_at(version)
        self._live.begun[:] = self._live.done[:] = version

    def moved(self, begin_bytes: int, end_bytes: int, since: int | None) -> tuple[VectorRun, ...]:
        """Update a run of the mirror; return views of the parts that have moved since a version."""
        self._mirror(begin_bytes, end_bytes)
        return super().moved(begin_bytes, end_bytes, since)

    def apply(
        self,
        gradient: Float32s,
        *,
        t: int,
        scale: float = 1.0,
        pushes: int = 1,
        learning_rate: float | None = None,
    ) -> None:
        """Apply one gradient on the device; return when the weights have moved. See `Storage.apply`."""
        staged = self._scratch_memory()
        if gradient is not staged:
            np.copyto(staged, gradient)
        self._device.copy_in(self._gradient, staged)
        self._device.use()
        super().apply(self._gradient, t=t, scale=scale, pushes=pushes, learning_rate=learning_rate)
        self._device.wait()

    def _mirror(self, begin_bytes: int, end_bytes: int) -> None:
        mirror = self.memory
        for index, placed in enumerate(self.layout):
            version = self._live.done[index]
            outside = placed.stop * ELEMENT_BYTES <= begin_bytes or end_bytes <= placed.offset * ELEMENT_BYTES
            if outside or mirror.done[index] == version:
                continue
            run = slice(placed.offset, placed.stop)
            mirror.begun[index] = version
            self._device.copy_out(self.weights[run], self._live.weights[run])
            mirror.done[index] = version

    def _new_scratch(self) -> Float32s:
        return self._device.staging(self.elements)

    def _new_slot(self, value: float) -> Resident:
        return self._device.full(self.elements, value)

    def _fill(self, live: Resident, values: Float32s) -> None:
        self._device.copy_in(live, values)

    def _copy_live(self, destination: Float32s, live: Resident) -> None:
        self._device.copy_out(destination, live)


def warm_up(device: ShardDevice, optimizer: Optimizer) -> None:
    """Compile the optimizer's kernel for a device, or load it from the cache, so that no push waits for it."""
    device.use()
    optimizer.warm_up(lambda: device.full(1, 0.0))
    device.wait()
