"""The requests and answers of the data plane as plain values, which pure cores take and give.

Knows nothing of bytes: `parashard.wire` translates to and from frames.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from parashard.partition import Partition

CHUNK_BYTES_MAX = 4 << 20
"""Greatest payload of one message; gRPC in Python moves messages of this size fastest (DESIGN.md, "Data plane")."""


class PushResult(enum.Enum):
    """What became of a chunk; the values are the wire's."""

    APPLIED = 1
    DUPLICATE = 2
    BUFFERED = 3
    PENDING = 4


@dataclass(frozen=True, slots=True)
class Target:
    """Which life of which shard, in which run and by which plan, a request is meant for (P2, P3)."""

    run_id: str
    job_digest: str
    plan_version: int
    shard: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows of a variable in a payload, row-major float32 without padding."""

    partition: Partition
    row_elements: int

    @property
    def size_bytes(self) -> int:
        """Length in the payload."""
        return self.partition.rows * self.row_elements * 4


@dataclass(frozen=True, slots=True)
class PushChunk:
    """A run of the bytes of a push.

    Invariant: the chunk at offset 0 lists every slice of the push, and `total_bytes` is the sum of their sizes.
    """

    target: Target
    worker: str
    step: int
    attempt: int
    offset_bytes: int
    total_bytes: int
    slices: tuple[Slice, ...]
    skipped: bool
    pulled_version: int | None  # None: unknown, or of another incarnation (P16)
    payload: memoryview | bytes


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a shard answers to a chunk; any result but PENDING ends the step's lease at this shard (P5)."""

    result: PushResult
    version: int
    staleness: int | None


@dataclass(frozen=True, slots=True)
class PullRun:
    """Asks for bytes [offset_bytes, offset_bytes + length_bytes) of a shard's flat vector."""

    target: Target
    round: int | None  # sync mode: only the weights that this round starts from will do (P11)
    step: int | None  # the step that the weights are for; None: an evaluation or an export
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Weights:
    """A run of a shard's weights; `values` is a view that is valid only while its owner says so."""

    version: int
    values: memoryview
