"""RowIndex: a hash index from mixed keys to references of rows, in segments that grow one at a time.

The shard's keys are spread over all 64 bits; the highest bits of the result are a key's segment, the next 32 determine
its home place there, in proportion, and 8 more are its tag. So the ascending keys of a push or a pull visit the index
from one end to the other. A place has a tag (0: empty) and a reference; the key itself is in the row's record. Open
addressing with linear probing; a segment doubles at a load of 85 %. Segments begin with different sizes, so that they
do not all grow in the same push, and their mean load hardly changes. Owns these arrays;
`parashard_server.state.kernels.index_loops` knows the layout, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from parashard.plan.embedding import BUCKET_BITS, BUCKETS, Keys
from parashard.plan.variables import Float32s
from parashard_server.state.kernels import index_loops
from parashard_server.state.rows.row_memory import Region, RowMemory

ABSENT = np.uint32(0xFFFFFFFF)
"""In place of a reference: the key has no row."""
SEGMENT_BITS = 10
SEGMENTS = 1 << SEGMENT_BITS
KEY_BITS = 64
PLACE_BYTES = 5
SMALL_BYTES = 16 << 20  # of references: a small index goes without large pages, which would cost it more than half
_SEGMENT_SHIFT = np.uint64(KEY_BITS - SEGMENT_BITS)
_LEAST_PLACES = 16  # of a segment; the others have up to twice as many
_FULL = (17, 20)  # load at which a segment grows: 85 %


class RowIndex:
    """The index of one table on a shard with some buckets; references are those of `memory`."""

    def __init__(self, memory: RowMemory, buckets: tuple[int, int] = (0, BUCKETS)) -> None:
        self._memory = memory
        first, end = buckets
        shift = BUCKET_BITS - (end - first - 1).bit_length()
        self._spread = np.array([first << (KEY_BITS - BUCKET_BITS), shift], np.uint64)
        segments = np.arange(SEGMENTS)
        self._capacities = _LEAST_PLACES + segments % _LEAST_PLACES
        self._begins = np.cumsum(self._capacities) - self._capacities
        self._counts = np.zeros(SEGMENTS, np.int64)
        self._end = int(self._capacities.sum())
        # A segment's successive sizes add up to less than twice the last one; tags are read eight at a time.
        most = 8 * (1 + self._end + memory.rows_max)
        self._tags_region = Region(most, small_bytes=SMALL_BYTES // 4)
        self._references_region = Region(4 * most, small_bytes=SMALL_BYTES)
        self._tags = self._tags_region.view(np.uint8)
        self._references = self._references_region.view(np.uint32)
        self._sizes = np.array([memory.stride], np.int64)
        self.grown_places = 0

    @property
    def memory_bytes(self) -> int:
        """Memory of the places, and of released ones that still take memory."""
        unused_bytes = self._tags_region.unused_bytes + self._references_region.unused_bytes
        return int(self._capacities.sum()) * PLACE_BYTES + unused_bytes

    def find(self, keys: Keys) -> tuple[NDArray[np.uint32], int]:
        """Return the reference of each key's row, ABSENT if there is none, and the number of ABSENT ones."""
        found = np.empty(len(keys), np.uint32)
        absent = index_loops.find_rows(
            keys,
            found,
            *self._arrays,
            self._memory.keys,
            self._sizes,
        )
        return found, absent

    def read(self, keys: Keys, values: Float32s) -> tuple[NDArray[np.uint32], int]:
        """Find as `find` does, and copy the values of the rows found to the beginning of `values`, end to end."""
        # `values` has room for the rows of all keys.
        found = np.empty(len(keys), np.uint32)
        memory = self._memory
        sizes = np.array([memory.stride, len(values) // max(1, len(keys))], np.int64)
        absent = index_loops.read_rows(
            keys,
            found,
            values,
            *self._arrays,
            memory.keys,
            memory.words,
            sizes,
        )
        return found, absent

    def enter(self, keys: Keys, rows: NDArray[np.uint32]) -> None:
        """Enter keys that are not in the index, each once, with the references of their records."""
        self._counts += self._counted(keys)
        for segment in np.flatnonzero(self._counts * _FULL[1] > self._capacities * _FULL[0]).tolist():
            self._grow(segment)
        index_loops.index_rows(keys, rows, *self._arrays)

    def remove(self, keys: Keys) -> None:
        """Remove keys that are in the index, each once; their records must still have them."""
        self._counts -= self._counted(keys)
        index_loops.remove_rows(
            keys,
            *self._arrays,
            self._memory.keys,
            self._sizes,
        )

    @property
    def _arrays(self) -> tuple[NDArray[Any], ...]:
        return self._spread, self._tags, self._references, self._begins, self._capacities

    def _counted(self, keys: Keys) -> NDArray[np.int64]:
        """Return the number of these keys in each segment."""
        first, shift = self._spread
        return np.bincount((((keys - first) << shift) >> _SEGMENT_SHIFT).astype(np.int64), minlength=SEGMENTS)

    def _grow(self, segment: int) -> None:
        """Move a segment to a larger place, with room for the counted keys."""
        begin, capacity = int(self._begins[segment]), int(self._capacities[segment])
        room = capacity
        while int(self._counts[segment]) * _FULL[1] > room * _FULL[0]:
            room *= 2
        old, new = slice(begin, begin + capacity), slice(self._end, self._end + room)
        assert new.stop + 8 <= len(self._tags), "the regions are too short for a growth"
        index_loops.move_segment(
            self._spread,
            self._tags[old],
            self._references[old],
            self._tags[new],
            self._references[new],
            self._memory.keys,
            self._sizes,
        )
        self._tags_region.give_back(old.start, old.stop)
        self._references_region.give_back(4 * old.start, 4 * old.stop)
        self._begins[segment], self._capacities[segment], self._end = new.start, room, new.stop
        self.grown_places += room
