"""Pulled: pulled variables and rows of tables with their versions, in reused arrays.

Fresh memory costs more than the copy into it, and partitions that a set of arrays already holds need not be sent again.
A set is one run, which goes to a GPU in one copy. Thread-safe. Knows no transport.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from parashard.client.pulled_rows import PulledRows, RowPart
from parashard.plan.flat import ALIGNMENT_BYTES, FlatArrays, FlatLayout
from parashard.plan.partition import Plan
from parashard.plan.variables import Float32s
from parashard.protocol.messages import Buffers

KEPT_MAX = 18  # free sets: a pipeline has at most 2 * depth + 1 in use, with depth <= 8, and an evaluation one

Memory = Callable[[int], Float32s]
"""Allocates an uninitialized vector of a number of float32, aligned to `ALIGNMENT_BYTES`."""


def aligned(elements: int) -> Float32s:
    """Allocate ordinary memory; see `Memory`."""
    size_bytes = elements * np.dtype(np.float32).itemsize
    memory = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[begin : begin + size_bytes].view(np.float32)


class PullBuffer:
    """One array for every variable, in its declared shape, all in one run, and their versions by shard."""

    def __init__(self, plan: Plan, layout: FlatLayout, run: Float32s) -> None:
        begin = 0
        for place, _ in layout.places.values():
            run[begin : place.start] = 0  # the gap between two variables
            begin = place.stop
        run[begin:] = 0
        self.variables = layout.over(run)
        # The places in the run of each shard's flat vector.
        self.by_shard = tuple(
            Buffers(
                self.variables[placed.partition.variable][placed.partition.row_start : placed.partition.row_stop].data
                for placed in layout
            )
            for layout in plan.layouts
        )
        self.versions: tuple[int | None, ...] = (None,) * len(plan.layouts)  # of the values; None: unknown
        self.incarnations: tuple[int, ...] = ()  # whose versions these are


class PullBuffers:
    """Pool of the sets of arrays that are not in use."""

    def __init__(self, plan: Plan, memory: Memory = aligned) -> None:
        self._plan = plan
        self._layout = FlatLayout.of(plan.variables)
        self._memory = memory
        self._lock = threading.Lock()
        self._free: list[PullBuffer] = []

    def take(self, incarnations: tuple[int, ...]) -> PullBuffer:
        """Return a set for these incarnations of the shards: the one given back last, else a new one."""
        with self._lock:
            weights = self._free.pop() if self._free else None
        if weights is None:
            weights = PullBuffer(self._plan, self._layout, self._memory(self._layout.elements))
        known = zip(weights.incarnations or incarnations, incarnations, weights.versions, strict=True)
        weights.versions = tuple(version if was == now else None for was, now, version in known)
        weights.incarnations = incarnations
        return weights

    def give_back(self, weights: PullBuffer) -> None:
        """Return a set to the pool; a later pull overwrites its arrays."""
        with self._lock:
            if len(self._free) < KEPT_MAX:
                self._free.append(weights)


def read_only(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return read-only views of arrays: only changed partitions are pulled again, so a write would persist."""
    return {name: _read_only(values) for name, values in variables.items()}


def _read_only(values: Any) -> Any:
    if not isinstance(values, np.ndarray):
        return values
    view = values.view()
    view.flags.writeable = False
    return view


class Pulled:
    """Variables and rows as pulled.

    The caller borrows the variables until `release`, and must not change them; in `async` and `ssp` parts of one shard
    may be of neighbouring versions. The rows are the caller's. A worker on a GPU releases the variables once their step
    is pushed: by then they have been copied.
    """

    def __init__(self, weights: PullBuffer, sets: PullBuffers, rows: PulledRows, waited_s: float = 0.0) -> None:
        self.variables: Mapping[str, Float32s] = weights.variables  # by name, in their declared shapes
        self.rows, self.keys = rows.values, rows.keys  # by table: shape (keys, row_elements), and the keys in order
        self.versions = tuple(version or 0 for version in weights.versions)  # by shard: the lowest that it sent
        self.incarnations = weights.incarnations  # by shard: the one that answered; 0: several, one after the other
        self._weights: PullBuffer | None = weights
        self._sets = sets
        self.waited_s = waited_s  # by a shard, for the requested version

    @property
    def values(self) -> Mapping[str, Float32s]:
        """Every variable, and of each table the requested rows."""
        if not self.rows:
            return self.variables
        if isinstance(self.variables, FlatArrays):
            return self.variables.with_rows(self.rows)
        return {**self.variables, **self.rows}

    def include(self, parts: Sequence[RowPart], versions: Sequence[int], incarnations: Sequence[int]) -> None:
        """Include the versions and incarnations of the parts of rows that were pulled in separate requests."""
        lowest, mixed = list(self.versions), list(self.incarnations)
        for part, version, incarnation in zip(parts, versions, incarnations, strict=True):
            lowest[part.shard] = min(lowest[part.shard], version)
            if incarnation != self.incarnations[part.shard]:
                mixed[part.shard] = 0
        self.versions, self.incarnations = tuple(lowest), tuple(mixed)

    def release(self) -> None:
        """Return the variables' arrays to the pool; they must not be used any more. Optional."""
        if self._weights is not None:
            self._sets.give_back(self._weights)
            self._weights = None
