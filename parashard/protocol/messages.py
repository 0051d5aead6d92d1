"""The requests and answers of the data plane as plain values, for the pure cores.

Knows nothing of bytes: `parashard.protocol.wire` translates to and from frames.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parashard.plan.embedding import KEY_BYTES, Keys
from parashard.plan.partition import ELEMENT_BYTES, Partition

MESSAGE_BYTES_MAX = 4 << 20
"""Greatest payload of one gRPC message."""
MESSAGE_BYTES = 1 << 20
"""Payload of each gRPC message of a longer push or pull (docs/decisions/0022 compares sizes)."""
ROWS_BYTES_MAX = MESSAGE_BYTES_MAX - MESSAGE_BYTES
"""Most bytes of rows in one answer, which may have a part of a run, too."""
INT8_BLOCK_ELEMENTS = 256
"""Elements that share a scale in DType.INT8."""


NO_KEYS: Mapping[str, Keys] = MappingProxyType({})
"""Of a pull without rows."""
NO_ROWS: Mapping[str, FoundRows] = MappingProxyType({})
"""Of the answer to a pull without rows."""


class Buffers:
    """A run of bytes in pieces: several memory areas that are sent or filled without joining them first.

    The pieces are contiguous, in order, and writable if they are to be filled.
    """

    # Instead of the pieces, from a model in the shard's process: a whole gradient, finite, in the layout of the shard's
    # vectors on that GPU.
    on_device: Any = None

    def __init__(self, pieces: Iterable[memoryview | bytes | bytearray] = ()) -> None:
        views = [memoryview(piece) for piece in pieces]
        self.pieces: tuple[memoryview, ...] = tuple(view.cast("B") for view in views if view.nbytes)
        self._starts = (0, *accumulate(piece.nbytes for piece in self.pieces))
        self.nbytes = self._starts[-1]

    @classmethod
    def of_device(cls, run: Any, size_bytes: int) -> Buffers:
        """Wrap a gradient on a GPU, which counts as `size_bytes`."""
        made = cls()
        made.on_device, made.nbytes = run, size_bytes
        return made

    def whole(self) -> memoryview:
        """Return the run as one view; several pieces are copied into one."""
        return self.pieces[0] if len(self.pieces) == 1 else memoryview(b"".join(self.pieces))

    def run(self, begin: int, end: int) -> Sequence[memoryview]:
        """Return views of the bytes [begin, end), in order, or raise ValueError if they are not all in the run."""
        if not 0 <= begin <= end <= self.nbytes:
            raise ValueError(f"bytes [{begin}, {end}) are not within {self.nbytes}")
        views = []
        index = bisect_right(self._starts, begin) - 1
        while begin < end:
            start, piece = self._starts[index], self.pieces[index]
            stop = min(end, start + piece.nbytes)
            views.append(piece[begin - start : stop - start])
            begin, index = stop, index + 1
        return views


class DType(enum.Enum):
    """How the elements of a slice are encoded (protos/tensor.proto has the layouts); the values are the wire's."""

    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3
    INT8 = 4
    TOPK = 5


class PushResult(enum.Enum):
    """Result of a push; the values are the wire's."""

    APPLIED = 1
    DUPLICATE = 2
    BUFFERED = 3


class Target(NamedTuple):
    """The run, plan, shard and incarnation that a request is meant for."""

    run_id: str
    job_digest: str
    plan_version: int
    shard: int
    incarnation: int


class Slice(NamedTuple):
    """Rows of a variable in a payload, row-major, without padding."""

    partition: Partition
    row_elements: int
    dtype: DType = DType.FLOAT32
    kept: int = 0  # DType.TOPK: how many elements the payload names

    @property
    def elements(self) -> int:
        """Number of elements that the slice stands for."""
        return self.partition.rows * self.row_elements

    @property
    def size_bytes(self) -> int:
        """Length in the payload."""
        match self.dtype:
            case DType.FLOAT32:
                return 4 * self.elements
            case DType.BFLOAT16 | DType.FLOAT16:
                return 2 * self.elements
            case DType.INT8:
                return 4 * -(-self.elements // INT8_BLOCK_ELEMENTS) + self.elements
            case DType.TOPK:
                return 8 * self.kept


class RowSlice(NamedTuple):
    """Gradients of rows of an embedding table in a payload: the rows' mixed keys, ascending, then their values."""

    table: str
    rows: int
    row_elements: int
    dtype: DType = DType.FLOAT32  # not TOPK

    @property
    def keys_bytes(self) -> int:
        """Length of the keys."""
        return KEY_BYTES * self.rows

    @property
    def float32_bytes(self) -> int:
        """Its length in float32."""
        return self.rows * (KEY_BYTES + ELEMENT_BYTES * self.row_elements)

    @property
    def size_bytes(self) -> int:
        """Length in the payload."""
        match self.dtype:
            case DType.BFLOAT16 | DType.FLOAT16:
                of_row = 2 * self.row_elements
            case DType.INT8:
                of_row = 4 + self.row_elements
            case _:
                of_row = ELEMENT_BYTES * self.row_elements
        return self.keys_bytes + self.rows * of_row


class Push(NamedTuple):
    """A step's whole gradient for one shard."""

    target: Target
    worker: str
    step: int
    slices: tuple[Slice, ...]  # these and `rows` determine the payload's length
    skipped: bool
    pulled_version: int | None  # None: unknown, or of another incarnation
    payload: Buffers
    traceparent: str = ""  # the sender's span (docs/tracing.md), as received: a shard does not check it
    learning_rate: float | None = None  # the step's, in place of the job's (P37)
    void: bool = False  # the step is recorded, and changes nothing: no weight, no moment, no decay
    rows: tuple[RowSlice, ...] = ()  # of tables; in the payload after the slices
    norm: float | None = None  # of the step's gradient on all shards, if these clip batches


class Ack(NamedTuple):
    """A shard's answer to a push; any result ends the step's lease at this shard."""

    result: PushResult
    version: int
    staleness: int | None


class PullRun(NamedTuple):
    """Request for bytes [offset_bytes, offset_bytes + length_bytes) of a shard's flat vector, and for rows."""

    target: Target
    round: int | None  # sync mode: the round whose starting weights are requested
    step: int | None  # the step that the weights are for; None: an evaluation or an export
    offset_bytes: int
    length_bytes: int
    known_version: int | None = None  # of the caller's weights; None: it has none of this incarnation
    traceparent: str = ""  # as in a push
    keys: Mapping[str, Keys] = NO_KEYS  # of the requested rows, by table: mixed, ascending, of the shard's buckets
    least_version: int = 0  # the shard waits briefly for this one


def answer_bytes_of(keys: int, row_elements: int) -> int:
    """Return the most bytes of an answer to `keys` keys of a table: a bit and a row of float32 for each."""
    return -(-keys // 8) + 4 * keys * row_elements


class VectorRun(NamedTuple):
    """Bytes of a shard's flat vector that begin at an offset."""

    offset_bytes: int
    values: memoryview


class FoundRows(NamedTuple):
    """The existing rows of some keys; the other keys have their initial values (P27)."""

    present: NDArray[np.bool_]  # shape (keys,)
    values: NDArray[Any]  # float32, float16 or BFLOAT16, shape (present keys, row_elements)


class Weights(NamedTuple):
    """Answer to a pull: the changed runs, as views that are valid only as long as their owner allows."""

    version: int
    runs: tuple[VectorRun, ...]
    rows: Mapping[str, FoundRows] = NO_ROWS  # the requested ones, by table
    waited_s: float = 0.0  # for the requested least version


class Fetched(NamedTuple):
    """Result of a pull: the lowest version of the weights, and how long the shard waited for them."""

    version: int
    waited_s: float = 0.0


def fetched(parts: Sequence[Fetched]) -> Fetched:
    """Combine the results of the parts of one pull."""
    return Fetched(min(part.version for part in parts), sum(part.waited_s for part in parts))
