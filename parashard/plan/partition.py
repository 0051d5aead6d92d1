"""Partitions and plans: which shard holds which rows of which variable.

Pure functions and frozen values; no arrays are touched. A *partition* is a half-open row range of a variable, the unit
of placement. A *plan* is a versioned map from partitions to shards. Each shard keeps its partitions end to end in one
flat float32 vector, in plan order: a push or a pull of the shard is a run of that vector.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from parashard.plan.variables import Variable, in_name_order

ELEMENT_BYTES = 4  # float32

Partitioner = Callable[[Variable], list[tuple[int, int]]]
"""A pure function from a variable to the half-open row ranges that cut it, in order, none empty."""


class Partition(NamedTuple):
    """Rows [row_start, row_stop) of a variable."""

    variable: str
    row_start: int
    row_stop: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.row_stop - self.row_start


class Placed(NamedTuple):
    """A partition and where it lies in its shard's flat vector: elements [offset, offset + elements)."""

    partition: Partition
    offset: int
    elements: int

    @property
    def stop(self) -> int:
        """First element after the partition."""
        return self.offset + self.elements


@dataclass(frozen=True)
class Plan:
    """Versioned map from partitions to shards; a variable's partitions cover [0, rows) without gap or overlap."""

    version: int
    variables: Mapping[str, Variable]
    shards: tuple[tuple[Partition, ...], ...]

    @cached_property
    def layouts(self) -> tuple[tuple[Placed, ...], ...]:
        """For each shard its partitions with their offsets in its flat vector."""
        layouts = []
        for partitions in self.shards:
            offset, layout = 0, []
            for p in partitions:
                elements = p.rows * self.variables[p.variable].row_elements
                layout.append(Placed(p, offset, elements))
                offset += elements
            layouts.append(tuple(layout))
        return tuple(layouts)

    def shard_elements(self, shard: int) -> int:
        """Return the length of a shard's flat vector, in elements."""
        layout = self.layouts[shard]
        return layout[-1].stop if layout else 0


def fixed_shards(shards: int) -> Partitioner:
    """Cut every variable into `shards` ranges whose lengths differ by at most one row (fewer if it has fewer rows)."""
    return lambda variable: _equal_ranges(variable.rows, min(shards, variable.rows))


def minimum_size(min_bytes: int, shards: int) -> Partitioner:
    """Cut into at most `shards` equal ranges, none smaller than `min_bytes` (small variables stay whole)."""

    def cut(variable: Variable) -> list[tuple[int, int]]:
        min_rows = -(-min_bytes // (variable.row_elements * ELEMENT_BYTES))
        return _equal_ranges(variable.rows, max(1, min(shards, variable.rows // min_rows)))

    return cut


def maximum_size(max_bytes: int) -> Partitioner:
    """Cut into the fewest equal ranges of which none is larger than `max_bytes` (but a single row is never cut)."""

    def cut(variable: Variable) -> list[tuple[int, int]]:
        max_rows = max(1, max_bytes // (variable.row_elements * ELEMENT_BYTES))
        return _equal_ranges(variable.rows, -(-variable.rows // max_rows))

    return cut


def whole(variable: Variable) -> list[tuple[int, int]]:
    """Leave the variable in one piece."""
    return [(0, variable.rows)]


def split(variables: Mapping[str, Variable], partitioner: Partitioner) -> list[Partition]:
    """Cut every variable with a partitioner, in name order."""
    return [
        Partition(variable.name, start, stop)
        for variable in in_name_order(variables)
        for start, stop in partitioner(variable)
    ]


def place(variables: Mapping[str, Variable], partitions: Sequence[Partition], shards: int, version: int = 1) -> Plan:
    """Assign partitions to shards: the largest first, each to that with the fewest bytes; ties to the lower number."""
    sized = [(-p.rows * variables[p.variable].row_elements, p) for p in partitions]
    loads = [(0, shard) for shard in range(shards)]
    placed: list[list[Partition]] = [[] for _ in range(shards)]
    for minus_elements, partition in sorted(sized):
        load, shard = heapq.heappop(loads)
        placed[shard].append(partition)
        heapq.heappush(loads, (load - minus_elements, shard))
    return Plan(version, dict(variables), tuple(tuple(sorted(p)) for p in placed))


def _equal_ranges(rows: int, pieces: int) -> list[tuple[int, int]]:
    bounds = [rows * i // pieces for i in range(pieces + 1)]
    return list(itertools.pairwise(bounds))
