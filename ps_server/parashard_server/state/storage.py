"""Storage: a shard's weights and optimizer slots, as flat float32 vectors, partitioned by the plan.

Pure except for memory that may be shared with workers on this host (`parashard.transports.shared_weights`). Knows
partitions, their encodings and the optimizer; knows no step, round or message.

A snapshot is copy-on-write by partition: `Storage.apply` copies a partition before it first changes it, and the
checkpointer copies the others one at a time, so that a push waits only for copies of partitions that it changes. Every
call is made under the shard's lock, except reading a complete snapshot. State without gradients
(`parashard.plan.state`) is updated here, without optimizer, decay, clipping or schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parashard.encodings import codec
from parashard.encodings.encoding import Encoding
from parashard.errors import ShapeMismatch, UnknownVariable
from parashard.plan.flat import FlatArrays
from parashard.plan.partition import ELEMENT_BYTES, Partition, Placed, Plan
from parashard.plan.state import AVERAGE, COUNTER, COUNTER_BYTES, average_factor
from parashard.plan.variables import Float32s, Variable, initial_rows
from parashard.protocol.messages import DType, Slice, VectorRun
from parashard.transports.shared_weights import PrivateWeights, WeightMemory
from parashard_server.state.kernels import fused
from parashard_server.state.optimizer import Optimizer

Copy = Callable[[Sequence[Placed], Sequence[tuple[Float32s, Any]]], None]
"""Copies partitions into the first vector of each pair, in the shard's layout, from the second, which is live."""


def copy_partitions(partitions: Sequence[Placed], pairs: Sequence[tuple[Float32s, Any]]) -> None:
    """Copy partitions between vectors of the host."""
    for placed in partitions:
        run = slice(placed.offset, placed.stop)
        for copied, live in pairs:
            np.copyto(copied[run], live[run])


class Snapshot:
    """Copies of a shard's vectors, taken partition by partition; complete once `missing` is empty.

    `is_kept`: no update changes the given vectors, which are dropped at the end, so that `save` needs no lock.
    """

    def __init__(
        self,
        layout: Sequence[Placed],
        weights: Float32s,
        slots: Mapping[str, Float32s],
        copy: Copy = copy_partitions,
        *,
        is_kept: bool = False,
    ) -> None:
        self.is_kept = is_kept
        self.layout = tuple(layout)
        self.missing: dict[Placed, None] = dict.fromkeys(layout)
        elements = layout[-1].stop if layout else 0
        self.weights: Float32s = np.empty(elements, np.float32)
        self.slots: dict[str, Float32s] = {name: np.empty(elements, np.float32) for name in slots}
        self._pairs = [(self.weights, weights), *((self.slots[name], slot) for name, slot in slots.items())]
        self._copy = copy

    def save(self, *partitions: Placed) -> bool:
        """Copy those of some partitions that are not copied yet; return whether there were any."""
        due = [placed for placed in partitions if placed in self.missing]
        if due:
            self._copy(due, self._pairs)
            for placed in due:
                del self.missing[placed]
        if not self.missing:
            self._pairs = []
        return bool(due)

    def save_next(self) -> bool:
        """Copy one missing partition; return whether more are missing."""
        if self.missing:
            self.save(next(iter(self.missing)))
        return bool(self.missing)


JOINED_ELEMENTS_MAX = 1 << 15  # a lock-free reader of one partition waits for the update of all that are joined


class UpdateGroup(NamedTuple):
    """Partitions that one call updates: on a GPU all that share an update, else neighbours, if they are small."""

    indices: Sequence[int]  # in the shard's layout
    run: slice  # of the live vectors
    variable: Variable  # one of theirs: all share the settings of their update
    where: Any = None  # mask of their elements in the run, for the kernels; None: all


InitialRows = Callable[[Variable, int, int], Float32s]
"""From (variable, row_start, row_stop) to the initial values of these rows."""


def drawn_from(seed: int) -> InitialRows:
    """Return the source of initial values that draws them from the job's seed."""
    return lambda variable, start, stop: initial_rows(variable, seed, start, stop)


class Storage:
    """The arrays of one shard of a plan; `memory` holds the weights."""

    resident: FlatArrays | None = None  # live weights on a GPU that a model of this process computes with in place

    def __init__(
        self,
        plan: Plan,
        shard: int,
        optimizer: Optimizer,
        initial: InitialRows,
        *,
        memory: WeightMemory | None = None,
    ) -> None:
        self.variables = plan.variables
        self._optimizer = optimizer
        self.layout: tuple[Placed, ...] = plan.layouts[shard]
        self._placed = {placed.partition: placed for placed in self.layout}
        self._slices = {p: _slice_of(plan.variables[p.variable], p) for p in self._placed}
        self._slice_bytes = {p: piece.size_bytes for p, piece in self._slices.items()}
        self.elements = plan.shard_elements(shard)
        stateful = [placed for placed in self.layout if plan.variables[placed.partition.variable].state]
        self._stateful = frozenset(p.partition for p in stateful if not plan.variables[p.partition.variable].frozen)
        # Runs of the weights, without the state that has no gradients.
        self.trained = _between([(placed.offset, placed.stop) for placed in stateful], self.elements)
        self.memory = PrivateWeights(offsets_of(self.layout)) if memory is None else memory
        # Shape (elements,): every partition's values, end to end in plan order. Owned here; changed only by `apply`.
        self.weights = self.memory.weights
        self._live: WeightMemory = self.memory  # weights that updates change; on a GPU `memory` only mirrors them
        for placed in self.layout:
            p = placed.partition
            rows = initial(plan.variables[p.variable], p.row_start, p.row_stop)
            self.weights[placed.offset : placed.stop] = rows.reshape(-1)
        # Shape (elements,): optimizer state in the same layout.
        self.slots: dict[str, Float32s] = {
            name: self._new_slot(value) for name, value in optimizer.initial_values.items()
        }
        self._update_groups = self._alike()
        self._snapshot: Snapshot | None = None
        self.copies_forced = 0  # partitions that a push had to copy for a snapshot before changing them
        self._scratch: Float32s | None = None
        # The last valid slices, and their size: within one process each push passes the same object.
        self._checked: tuple[tuple[Slice, ...] | None, tuple[int, int]] = None, (0, 0)

    def begin_at(self, version: int) -> None:
        """Set the version of the values that an incarnation starts with."""
        self.memory.begun[:] = self.memory.done[:] = version

    def restore_slots(self, slots: Mapping[str, Mapping[Partition, Float32s]]) -> None:
        """Load slots by slot and partition from arrays of the partition's length; others keep their initial values."""
        for name, slot in self.slots.items():
            for placed in self.layout:
                if placed.partition in slots.get(name, {}):
                    self._fill(slot, placed, slots[name][placed.partition].reshape(-1))

    def snapshot(self) -> Snapshot:
        """Begin a snapshot, after completing an earlier one, which may still be being written."""
        while self._snapshot is not None and self._snapshot.save_next():
            pass
        self._snapshot = Snapshot(self.layout, self._live.weights, self.slots, self._copy_live)
        return self._snapshot

    @property
    def slot_bytes(self) -> int:
        """Size of the optimizer slots in bytes."""
        return sum(slot.nbytes for slot in self.slots.values())

    def check_slices(self, slices: tuple[Slice, ...]) -> tuple[int, int]:
        """Return the total size of slices in bytes, and the number of their variables' elements."""
        # Raises UnknownVariable if one is not of the shard's partitions, or is named twice, or is frozen; ShapeMismatch
        # if its rows or its encoding are not the plan's, or a push that is not empty lacks state without gradients.
        if slices is self._checked[0]:
            return self._checked[1]
        seen: set[Partition] = set()
        for piece in slices:
            p = piece.partition
            if p not in self._placed or p in seen:
                where = "comes twice" if p in seen else "is not on this shard"
                raise UnknownVariable(f"rows [{p.row_start}, {p.row_stop}) of variable {p.variable!r}: {where}")
            seen.add(p)
            variable, expected = self.variables[p.variable], self._slices[p]
            if variable.frozen:
                raise UnknownVariable(f"variable {p.variable!r} is frozen; no gradient is taken for it")
            if piece.row_elements != expected.row_elements:
                raise ShapeMismatch(
                    f"variable {p.variable!r}: rows have {expected.row_elements} elements, found {piece.row_elements}"
                )
            if piece != expected:
                raise ShapeMismatch(
                    f"variable {p.variable!r} travels as {variable.encoding}: {expected.dtype.name} of "
                    f"{expected.size_bytes} bytes; found {piece.dtype.name} of {piece.size_bytes}"
                )
        missing = self._stateful - seen if slices else ()
        if missing:
            name = min(partition.variable for partition in missing)
            raise ShapeMismatch(
                f"variable {name!r} is {self.variables[name].state}: every push but an empty one has it"
            )
        size = sum(self._slice_bytes[p] for p in seen), sum(self._placed[p].elements for p in seen)
        self._checked = slices, size
        return size

    def decode_gradient(self, slices: tuple[Slice, ...], payload: memoryview) -> Float32s:
        """Return a gradient in the shard's layout, as float32; elements without a slice are zero."""
        # Returns a view of `payload` if it has that layout, else scratch memory, valid until the next call.
        if tuple(s.partition for s in slices) == tuple(self._placed) and all(s.dtype is DType.FLOAT32 for s in slices):
            return np.frombuffer(payload, "<f4")
        gradient = self._scratch_memory()
        if sum(piece.elements for piece in slices) < self.elements:
            gradient[:] = 0.0
        position = 0
        for piece in slices:
            placed = self._placed[piece.partition]
            content = payload[position : position + piece.size_bytes]
            codec.decode(piece, content, gradient[placed.offset : placed.stop])
            position += piece.size_bytes
        return gradient

    def lock_pages(self, host: NDArray[np.uint8]) -> None:
        """Do nothing: only a GPU needs page-locked receive buffers."""

    is_finite = staticmethod(fused.is_finite)
    """Tells whether no element of a gradient is NaN or infinite."""

    def squares(self, gradient: Float32s) -> list[float]:
        """Return the squared norm of each run in `trained`, which excludes state without gradients."""
        return [float(np.vdot(gradient[run], gradient[run])) for run in self.trained]

    def new_sum(self) -> Float32s:
        """Return memory for a sum of gradients."""
        return np.empty(self.elements, np.float32)

    def copy_of(self, gradient: Float32s) -> Float32s:
        """Return a copy of a borrowed gradient."""
        return gradient.copy()

    def add(self, total: Float32s, gradient: Float32s, *, first: bool) -> None:
        """Add a gradient to a sum; `first` replaces the memory's content, as if adding to zeros (-0.0 becomes 0.0)."""
        if first:
            np.add(gradient, _ZERO, out=total)
        else:
            fused.accumulate(total, gradient)

    def zeros(self) -> Float32s:
        """Return a gradient of zeros in scratch memory, valid until the next call."""
        return self.decode_gradient((), memoryview(b""))

    def changed_runs(self, begin_bytes: int, end_bytes: int, since: int | None) -> tuple[VectorRun, ...]:
        """Return views of those parts of a run of the weights that changed since a version; None: of the whole run."""
        content = self.weights.data.cast("B")
        if since is None:
            return (VectorRun(begin_bytes, content[begin_bytes:end_bytes]),) if end_bytes > begin_bytes else ()
        runs: list[tuple[int, int]] = []
        for placed, version in zip(self.layout, self.memory.done.tolist(), strict=True):
            begin = max(begin_bytes, placed.offset * ELEMENT_BYTES)
            end = min(end_bytes, placed.stop * ELEMENT_BYTES)
            if version <= since or begin >= end:
                continue
            if runs and runs[-1][1] == begin:
                begin = runs.pop()[0]
            runs.append((begin, end))
        return tuple(VectorRun(begin, content[begin:end]) for begin, end in runs)

    def _alike(self) -> list[UpdateGroup]:
        """Group neighbouring partitions that share the settings of their update."""
        groups: list[list[int]] = []
        for index, placed in enumerate(self.layout):
            if self._variable(index).frozen:
                continue
            joins = (
                bool(groups)
                and groups[-1][-1] == index - 1
                and placed.stop - self.layout[groups[-1][0]].offset <= JOINED_ELEMENTS_MAX
                and self._kind(index) == self._kind(index - 1)
            )
            groups.append([*(groups.pop() if joins else []), index])
        runs = [slice(self.layout[group[0]].offset, self.layout[group[-1]].stop) for group in groups]
        return [UpdateGroup(group, run, self._variable(group[0])) for group, run in zip(groups, runs, strict=True)]

    def _kind(self, index: int) -> Any:
        """Return what partitions that are updated by one call have in common."""
        variable = self._variable(index)
        if variable.state:
            return variable.state
        alone = None if self._optimizer.by_element else index
        return variable.learning_rate_factor, variable.decay and self._optimizer.decays, alone

    def _variable(self, index: int) -> Variable:
        return self.variables[self.layout[index].partition.variable]

    def _scratch_memory(self) -> Float32s:
        if self._scratch is None:
            self._scratch = self._new_scratch()
        return self._scratch

    def _new_scratch(self) -> Float32s:
        return np.empty(self.elements, np.float32)

    def _new_slot(self, value: float) -> Float32s:
        return np.full(self.elements, value, np.float32)

    def _fill(self, live: Float32s, placed: Placed, values: Float32s) -> None:
        live[placed.offset : placed.stop] = values

    def _copy_live(self, partitions: Sequence[Placed], pairs: Sequence[tuple[Float32s, Any]]) -> None:
        copy_partitions(partitions, pairs)

    def _move_state(self, group: UpdateGroup, pushed: Float32s, pushes: int) -> None:
        move(self._live.weights[group.run], pushed[group.run], group.variable.state, pushes)

    def apply(
        self,
        gradient: Float32s,
        *,
        t: int,
        scale: float = 1.0,
        pushes: int = 1,
        learning_rate: float | None = None,
    ) -> None:
        """Update the weights by one gradient in the shard's layout, which is only read."""
        # `t` is the number of this update: steps (in sync mode: rounds) applied, this one included, and the new version
        # of the weights; `scale` multiplies the gradient. `pushes` is the number of non-empty pushes in the sum; at 0
        # state without gradients stays unchanged. `learning_rate` replaces the optimizer's own.
        snapshot = self._snapshot
        if snapshot is not None and not snapshot.missing:
            snapshot = self._snapshot = None  # complete: its owner frees its memory
        for group in self._update_groups:
            run, variable = group.run, group.variable
            if variable.state and not pushes:
                continue
            for index in group.indices:
                if snapshot is not None:
                    self.copies_forced += snapshot.save(self.layout[index])
                self._live.begun[index] = t
            if variable.state:
                self._move_state(group, gradient, pushes)
            else:
                self._optimizer.update(
                    self._live.weights[run],
                    gradient[run],
                    {name: slot[run] for name, slot in self.slots.items()},
                    t=t,
                    scale=scale,
                    variable=variable,
                    learning_rate=learning_rate,
                    where=group.where,
                )
            for index in group.indices:
                self._live.done[index] = t


def offsets_of(layout: Sequence[Placed]) -> list[int]:
    """Return the offset of each partition in a shard's vector, in elements, and the end of the last one."""
    return [0, *(placed.stop for placed in layout)]


def _between(runs: list[tuple[int, int]], end: int) -> tuple[slice, ...]:
    """Return the gaps that ascending runs leave in [0, end)."""
    begins, stops = [0, *(stop for _, stop in runs)], [*(begin for begin, _ in runs), end]
    return tuple(slice(begin, stop) for begin, stop in zip(begins, stops, strict=True) if begin < stop)


def _slice_of(variable: Variable, partition: Partition) -> Slice:
    return Encoding.parse(variable.encoding).slice_of(partition, variable.row_elements)


_BYTE = np.float32(256.0)
_ZERO = np.float32(0.0)


def move(values: Any, pushed: Any, state: str, pushes: int) -> None:
    """Update one partition's state without gradients in place by `pushed`, the sum over `pushes` >= 1 pushes."""
    if state.startswith(AVERAGE):
        batch = pushed if pushes == 1 else pushed / np.float32(pushes)
        values += np.float32(average_factor(state)) * (batch - values)
    elif state == COUNTER:
        _count(values.reshape(-1, COUNTER_BYTES), pushed.reshape(-1, COUNTER_BYTES))
    else:
        values += pushed


def _count(values: Any, added: Any) -> None:
    """Add 64-bit integers byte by byte; a carry out of the highest byte is lost, as in int64."""
    # Every number here is an integer below 2^24, exact in float32: the sum of `ROUND_STEPS_MAX` bytes, and a carry.
    carry = np.float32(0.0)
    for place in range(COUNTER_BYTES):
        column = values[:, place] + added[:, place] + carry
        carry = column // _BYTE
        values[:, place] = column - _BYTE * carry
