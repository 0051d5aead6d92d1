"""Storage: a shard's weights and optimizer slots, as flat float32 vectors cut into partitions by the plan.

Pure but for memory. Knows partitions and the optimizer; knows no step, round or message. Called by `ps_server.ingest`
(apply) and `ps_server.shard` (read).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from parashard.errors import ShapeMismatch, UnknownVariable
from parashard.messages import Slice
from parashard.partition import Partition, Placed, Plan
from parashard.variables import Float32s, Variable, initial_rows
from ps_server.optimizer import Optimizer
from ps_server.snapshot import Snapshot

InitialRows = Callable[[Variable, int, int], Float32s]
"""From (variable, row_start, row_stop) to the first values of these rows."""


def drawn_from(seed: int) -> InitialRows:
    """Return the source of initial values that draws them from the job's seed."""
    return lambda variable, start, stop: initial_rows(variable, seed, start, stop)


class Storage:
    """The arrays of one shard.

    Parameters
    ----------
    plan : Plan
        Which partitions the shard holds.
    shard : int
        Its index in the plan.
    optimizer : Optimizer
        Says which slots there are, and how a gradient moves the weights.
    initial : InitialRows
        Where the first values come from.

    Attributes
    ----------
    weights : ndarray of float32, shape (elements,)
        Every partition's values, end to end in plan order. Owned here; changed only by `apply`.
    slots : dict of str to ndarray of float32, shape (elements,)
        Optimizer state in the same layout.
    """

    def __init__(self, plan: Plan, shard: int, optimizer: Optimizer, initial: InitialRows) -> None:
        self.variables = plan.variables
        self._optimizer = optimizer
        self.layout: tuple[Placed, ...] = plan.layouts[shard]
        self._placed = {placed.partition: placed for placed in self.layout}
        self.elements = plan.shard_elements(shard)
        self.weights: Float32s = np.empty(self.elements, np.float32)
        for placed in self.layout:
            p = placed.partition
            rows = initial(plan.variables[p.variable], p.row_start, p.row_stop)
            self.weights[placed.offset : placed.stop] = rows.reshape(-1)
        self.slots: dict[str, Float32s] = {
            name: np.full(self.elements, value, np.float32) for name, value in optimizer.initial_values.items()
        }
        self._snapshot: Snapshot | None = None

    def restore_slots(self, slots: Mapping[str, Mapping[Partition, Float32s]]) -> None:
        """Fill every slot from a checkpoint: by slot and partition, arrays of the partition's length."""
        for name, slot in self.slots.items():
            for placed in self.layout:
                slot[placed.offset : placed.stop] = slots[name][placed.partition].reshape(-1)

    @property
    def uncopied(self) -> int:
        """Partitions that a snapshot still lacks; a push copies those that it moves."""
        return 0 if self._snapshot is None else len(self._snapshot.missing)

    def snapshot(self) -> Snapshot:
        """Begin a snapshot of this moment; an earlier one is completed first, since somebody may still be saving it."""
        while self._snapshot is not None and self._snapshot.save_next():
            pass
        self._snapshot = Snapshot(self.layout, self.weights, self.slots)
        return self._snapshot

    @property
    def slot_bytes(self) -> int:
        """Bytes of optimizer slots."""
        return sum(slot.nbytes for slot in self.slots.values())

    def check_slices(self, slices: tuple[Slice, ...]) -> int:
        """Return the total size of slices in bytes.

        Raises
        ------
        UnknownVariable
            If a slice is not one of the shard's partitions, or is named twice, or is frozen.
        ShapeMismatch
            If its rows have another length.
        """
        seen: set[Partition] = set()
        for piece in slices:
            p = piece.partition
            if p not in self._placed or p in seen:
                where = "comes twice" if p in seen else "is not on this shard"
                raise UnknownVariable(f"rows [{p.row_start}, {p.row_stop}) of variable {p.variable!r}: {where}")
            seen.add(p)
            variable = self.variables[p.variable]
            if variable.frozen:
                raise UnknownVariable(f"variable {p.variable!r} is frozen; no gradient is taken for it")
            if piece.row_elements != variable.row_elements:
                raise ShapeMismatch(
                    f"variable {p.variable!r}: rows have {variable.row_elements} elements, found {piece.row_elements}"
                )
        return sum(piece.size_bytes for piece in slices)

    def laid_out(self, slices: tuple[Slice, ...], content: Float32s) -> Float32s:
        """Return a gradient in the shard's layout; what no slice covers is zero (P15).

        Returns `content` itself where its slices are the shard's partitions in order.
        """
        if tuple(piece.partition for piece in slices) == tuple(self._placed):
            return content
        gradient = np.zeros(self.elements, np.float32)
        position = 0
        for piece in slices:
            placed = self._placed[piece.partition]
            gradient[placed.offset : placed.stop] = content[position : position + placed.elements]
            position += placed.elements
        return gradient

    def apply(self, gradient: Float32s, *, t: int, scale: float = 1.0, damping: float = 1.0) -> None:
        """Move the weights by one gradient, in place.

        Parameters
        ----------
        gradient : ndarray of float32, shape (elements,)
            In the shard's layout; not changed.
        t : int
            Number of this update: steps (in sync mode: rounds) applied, this one included (P15).
        scale : float
            Multiplies the gradient (the mean of a round).
        damping : float
            Multiplies the learning rate (staleness damping).
        """
        snapshot = self._snapshot
        if snapshot is not None and not snapshot.missing:
            snapshot = self._snapshot = None  # it is whole: let its memory go with its owner
        for placed in self.layout:
            run = slice(placed.offset, placed.stop)
            if snapshot is not None:
                snapshot.save(placed)
            self._optimizer.update(
                self.weights[run],
                gradient[run],
                {name: slot[run] for name, slot in self.slots.items()},
                t=t,
                scale=scale,
                damping=damping,
                variable=self.variables[placed.partition.variable],
            )
