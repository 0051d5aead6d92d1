"""Blocks of partitions that a GPU encodes with error feedback: a thread for each, in NumPy's integers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parashard.protocol.messages import INT8_BLOCK_ELEMENTS, DType, Slice

Numbers = npt.NDArray[np.int64]
TOPK_BLOCK_ELEMENTS = 1024  # at least, unless the partition has fewer
TOPK_BLOCKS_MAX = 1 << 14  # of a partition: one thread adds up their numbers


class EncodedPiece(NamedTuple):
    """A partition in int8 or top-k, in which its slice is shorter than in float32."""

    shard: int
    slice: Slice
    begin: int  # in the run of gradients
    begin_bytes: int  # of its payload, among the bytes to send

    @property
    def is_int8(self) -> bool:
        """Whether it is in int8, else in top-k."""
        return self.slice.dtype is DType.INT8

    @property
    def block_elements(self) -> int:
        """Number of elements of each block but the last."""
        fewest = max(TOPK_BLOCK_ELEMENTS, -(-self.slice.elements // TOPK_BLOCKS_MAX))
        return INT8_BLOCK_ELEMENTS if self.is_int8 else fewest

    @property
    def offsets(self) -> Numbers:
        """The first element of each block, in the partition."""
        return np.arange(0, self.slice.elements, self.block_elements)

    @property
    def lengths(self) -> Numbers:
        """The number of elements of each block."""
        return np.minimum(self.block_elements, self.slice.elements - self.offsets)


def runs_of(sizes: Mapping[str, int]) -> dict[str, slice]:
    """Return the places of pieces of these sizes that lie end to end."""
    ends = np.cumsum(list(sizes.values())).tolist()
    return {name: slice(end - sizes[name], end) for name, end in zip(sizes, ends, strict=True)}


def joined(runs: Iterable[slice]) -> list[slice]:
    """Merge adjacent ones of ascending runs."""
    merged: list[slice] = []
    for run in runs:
        joins = bool(merged) and merged[-1].stop == run.start
        merged.append(slice(merged.pop().start, run.stop) if joins else run)
    return merged
