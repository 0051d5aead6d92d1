"""CudaStorage: a shard's weights and optimizer slots on a GPU, with a mirror of the weights in the host's memory.

Pure but for the card, which is behind a seam: `Card`, by CuPy in `parashard_server.state.cuda_device` and by NumPy in
the tests. Whoever reads weights reads the mirror (`memory.weights`), as with any storage, which may be shared with
workers of this host. Partitions that have moved on the card are copied into it when a pull asks for them, under the
lock and with the versions that lock-free readers go by (`parashard.transports.shared_weights`): the mirror is
then a storage that moves less often. A push is copied in through page-locked memory and moves the weights partition by
partition, as on the host; checks, layouts and decoding are those of `Storage`, on the host. Called as `Storage`.

Not built: CUDA IPC handles, by which a worker on the same card would read weights without the way through the host
(docs/decisions/0014-gpu-resident-shards.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from parashard.plan.partition import ELEMENT_BYTES, Partition, Plan
from parashard.plan.variables import Float32s, Variable
from parashard.protocol.messages import Run
from parashard.transports.weight_memory import Versions, WeightMemory
from parashard_server.state.optimizer import Optimizer
from parashard_server.state.storage import InitialRows, Storage

Resident = Any
"""A flat vector of float32 on the card: has `size`, `shape` and `nbytes`, and a slice of it is a view."""


class Card(Protocol):
    """One GPU, its memory, and one line of work on it, which is done in the order in which it was asked for."""

    kernels: ModuleType
    """The update rules of `kernels.reference` on vectors of this card; they may return before it is done."""

    def use(self) -> None:
        """Make kernels that this thread calls work on this card, in its line."""

    def full(self, elements: int, value: float) -> Resident:
        """Return a new vector on the card, filled with a value."""

    def staging(self, elements: int) -> Float32s:
        """Return memory of the host that is quickly copied to and from the card."""

    def lock_pages(self, host: Float32s) -> None:
        """Make memory of the host such memory, as long as it is there, if that can be."""

    def copy_in(self, destination: Resident, host: Float32s) -> None:
        """Copy a vector to the card; done when this returns."""

    def copy_out(self, host: Float32s, source: Resident) -> None:
        """Copy a vector from the card, after the work that was asked for before; done when this returns."""

    def wait(self) -> None:
        """Return when all work that was asked for is done; raise if any failed."""


@dataclass
class _Moving:
    """The weights on the card: a WeightMemory that nobody else sees."""

    weights: Resident
    begun: Versions
    done: Versions


class CudaStorage(Storage):
    """The arrays of one shard, on a card.

    Parameters
    ----------
    plan, shard, optimizer, initial, memory
        As for `Storage`; the optimizer has the card's kernels.
    card : Card
        Where weights and slots are to lie.

    Attributes
    ----------
    weights : ndarray of float32, shape (elements,)
        The mirror, in the host's memory. Partition i is as new as `memory.done[i]`; `moved` brings it up to date.
    slots : dict of str to vector of float32, shape (elements,)
        Optimizer state, on the card.
    """

    def __init__(
        self,
        plan: Plan,
        shard: int,
        optimizer: Optimizer,
        initial: InitialRows,
        *,
        card: Card,
        memory: WeightMemory | None = None,
    ) -> None:
        self._card = card
        super().__init__(plan, shard, optimizer, initial, memory=memory)
        card.lock_pages(self.weights)
        self._gradient = card.full(self.elements, 0.0)
        self._live = _Moving(card.full(self.elements, 0.0), self.memory.begun.copy(), self.memory.done.copy())
        card.copy_in(self._live.weights, self.weights)

    def begin_at(self, version: int) -> None:
        """Say which version the values are that a life begins with."""
        super().begin_at(version)
        self._live.begun[:] = self._live.done[:] = version

    def restore_slots(self, slots: Mapping[str, Mapping[Partition, Float32s]]) -> None:
        """Fill every slot from a checkpoint: by slot and partition, arrays of the partition's length."""
        for name, slot in self.slots.items():
            for placed in self.layout:
                self._card.copy_in(slot[placed.offset : placed.stop], slots[name][placed.partition].reshape(-1))

    def moved(self, begin_bytes: int, end_bytes: int, since: int | None) -> tuple[Run, ...]:
        """Bring a run of the mirror up to date; return views of what has moved in it since a version."""
        self._mirror(begin_bytes, end_bytes)
        return super().moved(begin_bytes, end_bytes, since)

    def apply(self, gradient: Float32s, *, t: int, scale: float = 1.0, damping: float = 1.0) -> None:
        """Move the weights by one gradient, on the card; return when they have moved (P14). See `Storage.apply`."""
        self._card.copy_in(self._gradient, self.writable(gradient))
        self._card.use()
        super().apply(self._gradient, t=t, scale=scale, damping=damping)
        self._card.wait()

    def _mirror(self, begin_bytes: int, end_bytes: int) -> None:
        mirror = self.memory
        for index, placed in enumerate(self.layout):
            version = self._live.done[index]
            outside = placed.stop * ELEMENT_BYTES <= begin_bytes or end_bytes <= placed.offset * ELEMENT_BYTES
            if outside or mirror.done[index] == version:
                continue
            run = slice(placed.offset, placed.stop)
            mirror.begun[index] = version
            self._card.copy_out(self.weights[run], self._live.weights[run])
            mirror.done[index] = version

    def _new_scratch(self) -> Float32s:
        return self._card.staging(self.elements)

    def _new_slot(self, value: float) -> Resident:
        return self._card.full(self.elements, value)

    def _copy_live(self, destination: Float32s, live: Resident) -> None:
        self._card.copy_out(destination, live)


def warm_up(card: Card, optimizer: Optimizer) -> None:
    """Compile the optimizer's kernel for a card, or load it from the cache, so that no push waits for it."""
    card.use()
    weights, gradient, *slots = (card.full(1, 0.0) for _ in range(2 + len(optimizer.slots)))
    one = Variable("warm_up", (1,))
    state = dict(zip(optimizer.slots, slots, strict=True))
    optimizer.update(weights, gradient, state, t=1, scale=1.0, damping=1.0, variable=one)
    card.wait()
