"""CudaStorage: a shard's weights and optimizer slots on a GPU, with a mirror of the weights in the host's memory.

Pure except for the device, which is behind an interface: `ShardDevice`, implemented with CuPy in
`parashard_server.state.cuda_device` and with NumPy in the tests. Other processes read the mirror (`memory.weights`),
which may be shared with workers of this host. A pull copies partitions that changed on the device into it, under the
lock and with the versions for lock-free readers (`parashard.transports.shared_weights`). A push is copied to the device
from page-locked memory, checked to be finite and applied there; its slices are checked and decoded on the host, by
`Storage`, whose interface this class has. A snapshot is of copies on the device, which leave it beside later pushes.

The number of copies, launches and waits of a push or a pull does not depend on the number of partitions, except for
copies of vectors in a `FlatLayout`, which its gaps split: one launch updates all partitions of a kind, by a mask of
kinds, and adjacent partitions are copied at once.

With a `FlatLayout` the device's vectors have the layout of a model's arrays. A model of the same process then computes
with the live weights, and its gradient is applied in place, without copies and without waiting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from parashard.errors import ConfigurationError, QueueFull
from parashard.plan.flat import FlatLayout
from parashard.plan.partition import ELEMENT_BYTES, Placed, Plan
from parashard.plan.state import COUNTER, COUNTER_BYTES
from parashard.plan.variables import Float32s, Variable
from parashard.process.logs import log
from parashard.protocol.messages import Slice, VectorRun
from parashard.transports.shared_weights import Versions, WeightMemory
from parashard_server.state.optimizer import Optimizer
from parashard_server.state.storage import InitialRows, Snapshot, Storage, UpdateGroup

GAP_BYTES_MAX = 1 << 18
"""Largest gap of unchanged weights that is copied with its changed neighbours: it costs no more than another copy."""
MIRROR_BYTES_MAX = 1 << 25
"""Most that a pull copies to the mirror at once: readers cannot use it meanwhile, for less than a millisecond."""
KINDS_MAX = 255
"""Kinds of partitions in one mask, which has a byte for each element; more kinds need another mask."""

Resident = Any
"""A flat vector of float32 on the device: has `size`, `shape` and `nbytes`, and a slice of it is a view."""


class ShardDevice(Protocol):
    """One GPU, its memory, and one stream, whose operations run in order."""

    kernels: ModuleType
    """`update`, `decay`, `move`, `accumulate` and `is_finite` of `kernels.cuda`, on vectors of this device; all but the
    last are asynchronous."""

    def use(self) -> None:
        """Make this device and its stream current in the calling thread."""

    def full(self, elements: int, value: float) -> Resident:
        """Return a new vector on the device, filled with a value."""

    def bytes_in(self, host: NDArray[np.uint8]) -> Any:
        """Return a copy of bytes on the device; synchronous."""

    def staging(self, elements: int) -> Float32s:
        """Return page-locked host memory, for fast copies."""

    def lock_pages(self, host: NDArray[Any]) -> None:
        """Page-lock host memory for its lifetime, if possible."""

    def is_locked(self, host: Float32s) -> bool:
        """Tell whether memory is within memory that `lock_pages` has locked."""

    def copy_in(self, destination: Resident, host: Float32s) -> None:
        """Begin to copy a vector to the device; the host's must not change until `wait`."""

    def copy_out(self, host: Float32s, source: Resident) -> None:
        """Begin to copy a vector from the device, after the stream's earlier operations; complete after `wait`."""

    def wait(self) -> None:
        """Synchronise the stream; raise if an operation failed."""

    def copied(self, vectors: Sequence[Resident]) -> list[Resident]:
        """Begin to copy vectors on the device; raise QueueFull if they would leave too little memory free."""

    def fetch(self, pairs: Iterable[tuple[Float32s, Resident]]) -> None:
        """Copy `copied` vectors from the device in any thread, beside the stream's later operations; synchronous."""
        # Raises Unavailable if the device fails.


@dataclass
class _Live:
    """The weights on the device: a private WeightMemory."""

    weights: Resident
    begun: Versions
    done: Versions


class CudaStorage(Storage):
    """The arrays of one shard on a GPU; the optimizer must have the GPU's kernels.

    Gradients are vectors of the device, which `received`, `decode_gradient` and `zeros` return. With a `flat` layout
    they may also be a model's; the caller ensures the order of streams: the device's stream is the model's own.

    Attributes
    ----------
    weights : ndarray of float32, shape (elements,)
        The mirror in host memory. Partition i has version `memory.done[i]`; `moved` updates it.
    slots : dict of str to vector of float32
        Optimizer state, on the device, in its layout.
    resident : FlatArrays or None
        The live weights, with a `flat` layout: only read, and not while they move.
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
        flat: FlatLayout | None = None,
    ) -> None:
        layout = plan.layouts[shard]
        self._device = device
        self._places = [
            slice(placed.offset, placed.stop) if flat is None else flat.places[placed.partition.variable][0]
            for placed in layout
        ]
        """Each partition's place in the device's vectors."""
        self._index = {placed: index for index, placed in enumerate(layout)}
        self._device_elements = plan.shard_elements(shard) if flat is None else flat.elements
        super().__init__(plan, shard, optimizer, initial, memory=memory)
        device.lock_pages(self.weights)
        self._gradient = self.new_sum() if flat is None else None  # with a flat layout allocated on first use
        weights = device.full(self._device_elements, 0.0)
        self._live = _Live(weights, self.memory.begun.copy(), self.memory.done.copy())
        self.resident = None if flat is None else flat.over(weights)
        self._copy_in(weights, self.weights, self.layout)
        device.wait()

    def begin_at(self, version: int) -> None:
        """Set the version of the values that an incarnation starts with."""
        super().begin_at(version)
        self._live.begun[:] = self._live.done[:] = version

    def changed_runs(self, begin_bytes: int, end_bytes: int, since: int | None) -> tuple[VectorRun, ...]:
        """Update a run of the mirror; return views of the parts that changed since a version."""
        if begin_bytes < end_bytes:
            self._mirror(begin_bytes, end_bytes)
        return super().changed_runs(begin_bytes, end_bytes, since)

    def lock_pages(self, host: NDArray[np.uint8]) -> None:
        """Page-lock a receive buffer for its lifetime: gradients are copied to the device from there."""
        self._device.lock_pages(host)

    def decode_gradient(self, slices: tuple[Slice, ...], payload: memoryview) -> Resident:
        """Return a copy on the device of a gradient in the shard's layout, valid until the next call."""
        return self.received(super().decode_gradient(slices, payload))

    def received(self, gradient: Float32s) -> Resident:
        """Begin to copy a gradient to the device, through page-locked memory; `is_finite` or `apply` waits for it."""
        staged = gradient
        if gradient is not self._scratch and not self._device.is_locked(gradient):
            staged = self._scratch_memory()
            np.copyto(staged, gradient)
        if self._gradient is None:
            self._gradient = self.new_sum()
        self._copy_in(self._gradient, staged, self.layout)
        if self.resident is not None:
            self._device.wait()  # `_settle` does not then
        return self._gradient

    def is_finite(self, gradient: Resident) -> bool:
        """Tell whether no element of a gradient is NaN or infinite, after its copy to the device has ended."""
        self._device.use()
        return bool(self._device.kernels.is_finite(gradient))

    def squares(self, gradient: Resident) -> list[float]:
        """Return the squared norms of a gradient's runs, from a copy on the host."""
        copied = self._scratch_memory()
        self._copy_live(self.layout, [(copied, gradient)])
        return super().squares(copied)

    def new_sum(self) -> Resident:
        """Return memory on the device for a sum of gradients."""
        return self._device.full(self._device_elements, 0.0)

    def copy_of(self, gradient: Resident) -> Resident:
        """Return a copy of a gradient, or raise QueueFull if the device has no memory for it now."""
        try:
            copied = self.new_sum()
        except ConfigurationError as error:
            raise QueueFull(f"a gradient that comes before its turn waits for room: {error}") from None
        self.add(copied, gradient, first=True)
        return copied

    def add(self, total: Resident, gradient: Resident, *, first: bool) -> None:
        """Add a gradient to a sum. See `Storage.add`."""
        self._device.use()
        self._device.kernels.accumulate(total, gradient, first=first)
        self._settle()

    def apply(
        self,
        gradient: Resident,
        *,
        t: int,
        scale: float = 1.0,
        pushes: int = 1,
        learning_rate: float | None = None,
    ) -> None:
        """Apply one gradient on the device, and wait until it is applied, unless the weights are resident."""
        if self._snapshot is not None:
            missing = self._snapshot.missing
            self.copies_forced += self._snapshot.save(*missing)  # in a few copies, not some for each kind
        self._device.use()
        super().apply(gradient, t=t, scale=scale, pushes=pushes, learning_rate=learning_rate)
        self._settle()

    def snapshot(self) -> Snapshot:
        """Begin a snapshot, of copies on the device if it has room, so that no push waits for it."""
        try:
            weights, *slots = self._device.copied([self._live.weights, *self.slots.values()])
        except QueueFull as error:
            log.info("checkpoint-holds-pushes", error=str(error))
            return super().snapshot()
        return Snapshot(self.layout, weights, dict(zip(self.slots, slots, strict=True)), self._fetch, is_kept=True)

    def _settle(self) -> None:
        """Wait for the device, unless a model of this process uses its stream: then the model's results are awaited."""
        if self.resident is None:
            self._device.wait()

    def _mirror(self, begin_bytes: int, end_bytes: int) -> None:
        begin, end = begin_bytes // ELEMENT_BYTES, -(-end_bytes // ELEMENT_BYTES)
        due: list[int] = []
        for index in np.flatnonzero(self.memory.done != self._live.done).tolist():
            placed = self.layout[index]
            if placed.offset < end and begin < placed.stop:
                if due and (placed.offset - self.layout[due[-1]].stop) * ELEMENT_BYTES <= GAP_BYTES_MAX:
                    due += range(due[-1] + 1, index)  # unchanged: the mirror gets the values that it already has
                due.append(index)
        for some in self._in_pieces(due):
            versions = self._live.done[some]
            self.memory.begun[some] = versions
            self._copy_live([self.layout[index] for index in some], [(self.weights, self._live.weights)])
            self.memory.done[some] = versions

    def _in_pieces(self, partitions: Sequence[int]) -> Iterator[list[int]]:
        """Group partitions in order, at most `MIRROR_BYTES_MAX` in each group, or a single longer one."""
        piece: list[int] = []
        for index in partitions:
            if piece and (self.layout[index].stop - self.layout[piece[0]].offset) * ELEMENT_BYTES > MIRROR_BYTES_MAX:
                yield piece
                piece = []
            piece.append(index)
        if piece:
            yield piece

    def _alike(self) -> list[UpdateGroup]:
        """Group the partitions by the settings of their update."""
        groups: dict[Any, list[int]] = defaultdict(list)
        for index in range(len(self.layout)):
            if not self._variable(index).frozen:
                groups[self._kind(index)].append(index)
        masks: list[NDArray[np.uint8]] = []
        found: list[tuple[list[int], slice, Variable, tuple[int, int] | None]] = []
        marked = 0
        for indices in groups.values():
            runs, variable, mark = _joined(self._places[index] for index in indices), self._variable(indices[0]), None
            if len(runs) > 1 or variable.state:
                mask, kind = divmod(marked, KINDS_MAX)
                if not kind:
                    masks.append(np.zeros(self._device_elements, np.uint8))
                mark, marked = (mask, kind + 1), marked + 1
                for index in indices:  # of a counter only the first byte
                    masks[mask][self._places[index]][:: COUNTER_BYTES if variable.state == COUNTER else 1] = kind + 1
            found.append((indices, slice(runs[0].start, runs[-1].stop), variable, mark))
        there = [self._device.bytes_in(mask) for mask in masks]
        return [
            UpdateGroup(indices, run, variable, None if mark is None else (there[mark[0]][run], mark[1]))
            for indices, run, variable, mark in found
        ]

    def _new_scratch(self) -> Float32s:
        return self._device.staging(self.elements)

    def _new_slot(self, value: float) -> Resident:
        return self._device.full(self._device_elements, value)

    def _fill(self, live: Resident, placed: Placed, values: Float32s) -> None:
        self._device.copy_in(live[self._places[self._index[placed]]], values)
        self._device.wait()

    def _copy_in(self, live: Resident, host: Float32s, partitions: Sequence[Placed]) -> None:
        for of_host, of_device in self._adjacent(partitions):
            self._device.copy_in(live[of_device], host[of_host])

    def _copy_live(self, partitions: Sequence[Placed], pairs: Sequence[tuple[Float32s, Resident]]) -> None:
        for host, live in self._runs(partitions, pairs):
            self._device.copy_out(host, live)
        self._device.wait()

    def _fetch(self, partitions: Sequence[Placed], pairs: Sequence[tuple[Float32s, Resident]]) -> None:
        self._device.fetch(self._runs(partitions, pairs))

    def _runs(
        self, partitions: Sequence[Placed], pairs: Sequence[tuple[Float32s, Resident]]
    ) -> Iterator[tuple[Float32s, Resident]]:
        """Return the parts of pairs of vectors that partitions, in order, occupy."""
        for of_host, of_device in self._adjacent(partitions):
            for host, there in pairs:
                yield host[of_host], there[of_device]

    def _adjacent(self, partitions: Sequence[Placed]) -> list[tuple[slice, slice]]:
        """Return the runs on host and device that partitions, in order, occupy; adjacent ones are merged."""
        runs: list[tuple[slice, slice]] = []
        for placed in partitions:
            here, there = slice(placed.offset, placed.stop), self._places[self._index[placed]]
            if runs and (runs[-1][0].stop, runs[-1][1].stop) == (here.start, there.start):
                before = runs.pop()
                here, there = slice(before[0].start, here.stop), slice(before[1].start, there.stop)
            runs.append((here, there))
        return runs

    def _move_state(self, group: UpdateGroup, pushed: Resident, pushes: int) -> None:
        weights = self._live.weights[group.run]
        self._device.kernels.move(weights, pushed[group.run], group.variable.state, pushes, where=group.where)


def _joined(places: Iterable[slice]) -> list[slice]:
    """Sort runs and merge adjacent ones."""
    runs: list[slice] = []
    for place in sorted(places, key=lambda place: place.start):
        joins = bool(runs) and runs[-1].stop == place.start
        runs.append(slice(runs.pop().start, place.stop) if joins else place)
    return runs


def warm_up(device: ShardDevice, optimizer: Optimizer, states: Iterable[str] = ()) -> None:
    """Compile a device's kernels, for these kinds of state, or load them from the cache, so that no push waits."""
    device.use()
    vector = device.full(COUNTER_BYTES, 0.0)
    where = device.bytes_in(np.zeros(COUNTER_BYTES, np.uint8)), 1
    optimizer.warm_up(lambda: device.full(1, 0.0))
    if optimizer.by_element:
        named = {name: vector for name in optimizer.slots}
        optimizer.update(vector, vector, named, t=1, scale=1.0, variable=Variable("warm_up", (1,)), where=where)
    for state in sorted({*states} - {""}):
        device.kernels.move(vector, vector, state, 1, where=where)
    for first in (True, False):
        device.kernels.accumulate(vector, vector, first=first)
    device.kernels.is_finite(vector)
    device.wait()
