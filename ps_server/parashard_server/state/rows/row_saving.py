"""RowSaving: copy-on-write save of a table's rows as of a cut, piece by piece, concurrent with pushes.

The first push that changes a row after the cut keeps an image of its record, unless the row is saved by then; a piece
has the images, and the records of rows without one. Pushes wait for a piece of at most PIECE_BYTES, and the images'
bytes are bounded: beyond that the save is given up, never a push. `keep` and `next_piece` are called under the shard's
lock.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from parashard.checkpoints.row_files import StoredRows
from parashard.errors import Unavailable
from parashard.plan.embedding import Keys
from parashard.plan.variables import Float32s
from parashard_server.state.kernels import row_loops
from parashard_server.state.rows.row_memory import HEADER_BYTES, Region, RowMemory, RowValues

PIECE_BYTES = 1 << 19
IMAGES_BYTES_LEAST = 64 << 20
IMAGES_SHARE = 4  # images may have this part of the records' bytes: a quarter
_NOT_ALL = -2
_LAST_KEY = np.uint64(0xFFFFFFFFFFFFFFFF)


class RowSaving:
    """The rows of a table that a checkpoint saves: all, or those of `moved`, last used from `first` until the cut.

    `moved` may have references several times, and of records that are free by now; `gone` may have mixed keys several
    times, and some that have a row again. This object keeps the references for its lifetime: freeing many of them takes
    longer than a push may wait.
    """

    def __init__(
        self,
        memory: RowMemory,
        moved: Sequence[NDArray[np.uint32]],
        full: bool,
        gone: Sequence[Keys],
        first: int,
        until: int,
        values: RowValues,
        slots: Mapping[str, int],
    ) -> None:
        self._memory = memory
        self._values = values
        self._slots = slots
        self._moved = moved
        self.full = full
        self._gone = gone
        self._all_rows = memory.end
        self._rows: NDArray[np.uint32] = np.empty(0, np.uint32)
        self._at = 0
        self._over = False
        self._next_key = np.zeros(1, np.uint64)  # those below it are saved
        most = max(IMAGES_BYTES_LEAST, memory.end * memory.record_bytes // IMAGES_SHARE) // memory.record_bytes
        self._image_of: NDArray[np.uint32] = Region(4 * memory.rows_max, dense=False).view(np.uint32)
        self._images: Float32s = Region(most * memory.record_bytes).view(np.float32)
        self._sizes = np.array([memory.stride, first, until, 0, most], np.int64)  # [3]: how many images there are
        self.given_up = False  # no room for an image, or a push needed the records: the save is incomplete

    @property
    def images(self) -> int:
        """Number of images."""
        return int(self._sizes[3])

    def keep(self, rows: NDArray[np.uint32]) -> None:
        """Keep images of those rows that a push is about to change and the save still needs."""
        if self.given_up or self._over:
            return
        memory = self._memory
        count = row_loops.keep_rows(
            rows,
            memory.words,
            memory.headers,
            memory.keys,
            self._image_of,
            self._images,
            self._sizes,
            self._next_key,
        )
        if count == _NOT_ALL:
            self.given_up = True
        else:
            self._sizes[3] = count

    def prepare(self) -> None:
        """Sort the rows by key; before the first piece, without the lock: keys never change."""
        if self.full:
            rows = np.arange(self._all_rows, dtype=np.uint32)
        else:
            rows = np.unique(np.concatenate([self._rows, *self._moved]))
        rows = rows[~self._memory.is_free(rows)]  # until the save ends no record is freed or reused
        self._rows = rows[np.argsort(self._memory.keys_of(rows))]
        self._image_of[: self._all_rows : mmap.PAGESIZE // 4].any()  # touches each page, so that it exists

    def room(self, most_bytes: int) -> Float32s:
        """Return memory for records of about `most_bytes`, or of all rows; after `prepare`, without the lock."""
        # All its pages exist: a piece does not wait for the kernel to clear them.
        rows = min(len(self._rows), most_bytes // self._memory.record_bytes)
        room = np.empty(rows * self._memory.stride, np.float32)
        room.fill(0.0)
        return room

    def next_piece(self, into: Float32s) -> int:
        """Copy records of the next rows to the beginning of `into`; return how many floats these are, 0: no more."""
        if self.given_up:
            raise Unavailable(
                "while a checkpoint was saved pushes moved more rows than "
                f"{self._images.nbytes >> 20:,} MiB of images hold, or needed the records of rows that are gone: the "
                "next one tries again"
            )
        if self._at == len(self._rows):
            self._over = True
            return 0
        memory = self._memory
        most = min(max(1, PIECE_BYTES // memory.record_bytes), len(into) // memory.stride)
        rows = self._rows[self._at : self._at + most]
        row_loops.gather_records(rows, memory.words, self._image_of, self._images, into, self._sizes)
        self._at += len(rows)
        over = self._at == len(self._rows)
        self._next_key[0] = _LAST_KEY if over else memory.keys_of(self._rows[self._at : self._at + 1])[0]
        return len(rows) * memory.stride

    def stored(self, records: Float32s) -> StoredRows:
        """Return records, end to end, in the form of a checkpoint, in part as views of them; pure."""
        records = records.reshape(-1, self._memory.stride)
        keys = records[:, :2].copy().view(np.uint64)[:, 0]
        header = records[:, 2:4].copy().view(np.uint32)
        lengths = [HEADER_BYTES // 4, self._values.words, *self._slots.values()]
        _, words, *slots = np.split(records, np.cumsum(lengths), axis=1)[:-1]
        values = self._values.kept(np.ascontiguousarray(words).reshape(-1), len(records))
        return StoredRows(keys, header[:, 0], header[:, 1], values, dict(zip(self._slots, slots, strict=True)))

    def gone(self) -> Keys:
        """Return the keys removed before the cut, ascending; some of them may have a row again."""
        return np.unique(np.concatenate([np.empty(0, np.uint64), *self._gone]))

    def without_rows(self) -> StoredRows:
        """Return an empty set of rows in the form of a checkpoint."""
        return self.stored(np.empty(0, np.float32))
