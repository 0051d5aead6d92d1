"""Pulled: variables and rows of tables as pulled, with what they are of, in arrays that are used again.

Fresh memory costs more than the copy into it, and what a set of arrays already holds need not be sent again. A set is
one run, which goes to a GPU in one copy. Thread-safe. Knows no transport.
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

KEPT_MAX = 18  # free sets: a pipeline of depth d has 2 d + 1 in use, of which 8 is the greatest, and an evaluation one

Memory = Callable[[int], Float32s]
"""Returns a vector of so many float32, not filled, that begins at a multiple of `ALIGNMENT_BYTES`."""


def aligned(elements: int) -> Float32s:
    """Return ordinary memory, as `Memory` says."""
    size_bytes = elements * np.dtype(np.float32).itemsize
    memory = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[begin : begin + size_bytes].view(np.float32)


class PullBuffer:
    """One array for every variable, in its declared shape, all in one run, and what it holds by shard."""

    def __init__(self, plan: Plan, layout: FlatLayout, run: Float32s) -> None:
        begin = 0
        for place, _ in layout.places.values():
            run[begin : place.start] = 0  # what lies between two variables
            begin = place.stop
        run[begin:] = 0
        self.variables = layout.over(run)
        # The places of its flat vector's bytes.
        self.by_shard = tuple(
            Buffers(
                self.variables[placed.partition.variable][placed.partition.row_start : placed.partition.row_stop].data
                for placed in layout
            )
            for layout in plan.layouts
        )
        self.versions: tuple[int | None, ...] = (None,) * len(plan.layouts)  # after which moves lack; None: all do
        self.incarnations: tuple[int, ...] = ()  # whose versions these are


class PullBuffers:
    """The sets of arrays that are not in use."""

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
        """Take a set back; its arrays are filled again by a later pull."""
        with self._lock:
            if len(self._free) < KEPT_MAX:
                self._free.append(weights)


def read_only(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return read-only arrays over the memory of others: only what has moved is pulled again, so a write would stay."""
    return {name: _read_only(values) for name, values in variables.items()}


def _read_only(values: Any) -> Any:
    if not isinstance(values, np.ndarray):
        return values
    view = values.view()
    view.flags.writeable = False
    return view


class Pulled:
    """Variables and rows as pulled.

    The variables are the caller's until `release`, and to be given back unchanged; in `async` and `ssp` parts of one
    shard may be of neighbouring versions. The rows are the caller's. A worker on a GPU releases them once their step is
    pushed: by then they have been copied.
    """

    def __init__(self, weights: PullBuffer, sets: PullBuffers, rows: PulledRows, waited_s: float = 0.0) -> None:
        self.variables: Mapping[str, Float32s] = weights.variables  # by name, in their declared shapes
        self.rows, self.keys = rows.values, rows.keys  # by table: shape (keys, row_elements), and the keys in order
        self.versions = tuple(version or 0 for version in weights.versions)  # by shard: the lowest of what it sent
        self.incarnations = weights.incarnations  # by shard: the one that answered; 0: several, one after the other
        self._weights: PullBuffer | None = weights
        self._sets = sets
        self.waited_s = waited_s  # a shard, for the version that was asked for

    @property
    def values(self) -> Mapping[str, Float32s]:
        """Every variable, and of each table the rows that were asked for."""
        if not self.rows:
            return self.variables
        if isinstance(self.variables, FlatArrays):
            return self.variables.with_rows(self.rows)
        return {**self.variables, **self.rows}

    def include(self, parts: Sequence[RowPart], versions: Sequence[int], incarnations: Sequence[int]) -> None:
        """Count, too, what those parts of the rows were pulled from that came in requests of their own."""
        lowest, mixed = list(self.versions), list(self.incarnations)
        for part, version, incarnation in zip(parts, versions, incarnations, strict=True):
            lowest[part.shard] = min(lowest[part.shard], version)
            if incarnation != self.incarnations[part.shard]:
                mixed[part.shard] = 0
        self.versions, self.incarnations = tuple(lowest), tuple(mixed)

    def release(self) -> None:
        """Give the variables' arrays back, for a later pull to fill; they must not be used any more. Never needed."""
        if self._weights is not None:
            self._sets.give_back(self._weights)
            self._weights = None
