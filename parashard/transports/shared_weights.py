"""A shard's weights in private memory, or in memory that other processes of its host may read during updates.

Owns the layout of shared memory, its creation by the shard and its reading by the worker. Knows no socket:
`parashard.transports.shm` and `parashard_server.serving.stream_services` pass the descriptor.
`parashard_server.state.storage` updates the weights.

The layout:

    bytes 0-7    the ASCII letters "PSW1" and four zero bytes
    bytes 8-23   elements and partitions, unsigned 64-bit, as all that follows
    then         begun[partitions], done[partitions], offsets[partitions + 1] (in elements, from 0 to `elements`)
    then         from the next page on the weights: float32[elements]

Each partition has a sequence lock (Lameter 2005, "Effective synchronization on Linux/NUMA systems"; ours counts
versions): the one writer sets begun[i] = v, updates partition i, sets done[i] = v; a reader takes d = done[i], copies,
and has a consistent partition of version d if begun[i] is still d. Stores and loads must happen in program order, which
x86-64 guarantees; other machines need fences, which Python lacks, so they share no weights.
"""

from __future__ import annotations

import mmap
import os
import platform
import struct
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from parashard.errors import MalformedFrame, StaleRound
from parashard.plan.partition import ELEMENT_BYTES
from parashard.plan.variables import Float32s
from parashard.process.logs import log
from parashard.protocol.messages import Buffers
from parashard.transports import memory
from parashard.transports.memory import Bytes

MAGIC = b"PSW1\0\0\0\0"
ATTEMPTS_MAX = 3  # copies of one partition, before its reader asks the shard for it

_HEAD = struct.Struct("<8sQQ")


Versions = NDArray[np.uint64]


class WeightMemory(Protocol):
    """A shard's weights and the versions of their partitions: the writer's side of the sequence locks."""

    weights: Float32s  # every partition's values, end to end
    begun: Versions  # by partition: the version whose write was the last to begin; 0 at first
    done: Versions  # and to end


class PrivateWeights:
    """Weights that no other process sees; `offsets` are the beginnings of the partitions, and the end of the last."""

    def __init__(self, offsets: Sequence[int]) -> None:
        self.weights: Float32s = np.zeros(offsets[-1], np.float32)
        self.begun: Versions = np.zeros(len(offsets) - 1, np.uint64)
        self.done: Versions = np.zeros(len(offsets) - 1, np.uint64)


class SharedWeights:
    """Weights that other processes may map, read-only; the writer's side, all zero at first.

    The memory is freed with its last user; `read_descriptor`, for reading only, is valid as long as this object exists.
    Raises OSError if the system gives no such memory.
    """

    def __init__(self, offsets: Sequence[int]) -> None:
        elements, partitions = offsets[-1], len(offsets) - 1
        descriptor = memory.create("parashard-weights", memory_bytes(elements, partitions))
        try:
            whole = memory.mapped(descriptor, writable=True)
            _HEAD.pack_into(whole.data, 0, MAGIC, elements, partitions)
            self.begun, self.done, its_offsets, content = _parts(whole, elements, partitions)
            its_offsets[:] = offsets
            self.weights: Float32s = content.view(np.float32)
            memory.seal(descriptor, writable=False)
            self.read_descriptor = memory.read_only(descriptor)
            weakref.finalize(self, os.close, self.read_descriptor)
        finally:
            os.close(descriptor)


def weight_memory(offsets: Sequence[int], *, shared: bool) -> PrivateWeights | SharedWeights:
    """Return memory for a shard's weights: shared if requested and possible, else private."""
    if shared and can_share():
        try:
            return SharedWeights(offsets)
        except OSError as error:
            log.info("weights-not-shared", error=str(error))
    return PrivateWeights(offsets)


def can_share() -> bool:
    """Return whether this machine has anonymous shared memory, and keeps loads and stores in program order."""
    return memory.can_share() and platform.machine() in ("x86_64", "AMD64")


class WeightsReader:
    """Reads weights that another process updates; `offsets` as in `PrivateWeights`, in elements."""

    def __init__(self, content: Bytes, begun: Versions, done: Versions, offsets: Sequence[int]) -> None:
        self._content = content
        self._begun = begun
        self._done = done
        self.elements = offsets[-1]
        self._starts_bytes = [ELEMENT_BYTES * offset for offset in offsets]

    @classmethod
    def mapped(cls, descriptor: int, elements: int, partitions: int) -> WeightsReader:
        """Map a shard's shared weights; the descriptor stays the caller's."""
        # Raises MalformedFrame if the memory is not what a shard of that size shares, or could be cut short; nothing
        # was read from it.
        memory.check(descriptor, memory_bytes(elements, partitions), "a shard's weights")
        whole = memory.mapped(descriptor, writable=False)
        head = _HEAD.unpack_from(whole.data)
        if head != (MAGIC, elements, partitions):
            raise MalformedFrame(f"a shard's weights begin with {(MAGIC, elements, partitions)}, found {head}")
        begun, done, offsets, content = _parts(whole, elements, partitions)
        bounds = [int(offset) for offset in offsets]
        if bounds[0] != 0 or bounds[-1] != elements or sorted(bounds) != bounds:
            raise MalformedFrame(f"the offsets of a shard's partitions ascend from 0 to {elements}; found others")
        return cls(content, begun, done, bounds)

    def read(
        self, begin_bytes: int, end_bytes: int, into: Buffers, *, known: int | None, version: int, exact: bool
    ) -> int:
        """Copy bytes [begin_bytes, end_bytes) of the weights, each partition consistent; return the end of the copy.

        Partitions that have not changed since `known` are left as they are in `into`. The shard had reached `version`
        before the call. Returns less than `end_bytes` if a partition changed too often: bytes of it and after it are
        invalid. Raises StaleRound if `exact` and a partition has changed beyond `version`; the content of `into` is
        undefined then. Many bytes are read on several threads.
        """

        def some(run: slice) -> int:
            return self._read(run, into, begin_bytes, known=known, version=version, exact=exact)

        runs = self._runs(begin_bytes, end_bytes)
        stops = memory.lanes.each(some, runs)
        return next((stop for run, stop in zip(runs, stops, strict=True) if stop < run.stop), end_bytes)

    def _runs(self, begin_bytes: int, end_bytes: int) -> list[slice]:
        """Split the bytes into one run for each thread, at the ends of partitions: one thread checks a partition."""
        starts, bounds = self._starts_bytes, [begin_bytes]
        for run in memory.copy_runs(end_bytes - begin_bytes)[1:]:
            bound = starts[bisect_left(starts, begin_bytes + run.start)]
            if bounds[-1] < bound < end_bytes:
                bounds.append(bound)
        return [slice(*pair) for pair in pairwise([*bounds, end_bytes])]

    def _read(
        self, run: slice, into: Buffers, begin_bytes: int, *, known: int | None, version: int, exact: bool
    ) -> int:
        """Read a run of bytes as `read` does, `into` beginning with the byte `begin_bytes` of the weights."""
        starts = self._starts_bytes
        position: int = run.start
        end: int = run.stop
        index = max(bisect_right(starts, position) - 1, 0)
        while position < end:
            stop = min(end, starts[index + 1])
            for _ in range(ATTEMPTS_MAX):
                done = int(self._done[index])
                if exact and done > version:
                    raise StaleRound(f"partition {index} has moved to version {done}; asked was for version {version}")
                if known is not None and done <= known:
                    break  # an update that has begun since has a later version than the requested one
                if int(self._begun[index]) != done:
                    return position  # an update is in progress: wait in the shard's own queue instead
                memory.scatter(self._content[position:stop], into, position - begin_bytes)
                if int(self._begun[index]) == done:
                    break
            else:
                return position
            index, position = index + 1, stop
        return position


def memory_bytes(elements: int, partitions: int) -> int:
    """Return the length of shared memory for so large a shard, in bytes."""
    return _weights_start(partitions) + ELEMENT_BYTES * elements


def _weights_start(partitions: int) -> int:
    head = _HEAD.size + 8 * (3 * partitions + 1)
    return -(-head // mmap.PAGESIZE) * mmap.PAGESIZE


def _parts(whole: Bytes, elements: int, partitions: int) -> tuple[Versions, Versions, Versions, Bytes]:
    """Return views of begun, done, offsets and the weights."""
    numbers = whole[_HEAD.size : _HEAD.size + 8 * (3 * partitions + 1)].view(np.uint64)
    start = _weights_start(partitions)
    return (
        numbers[:partitions],
        numbers[partitions : 2 * partitions],
        numbers[2 * partitions :],
        whole[start : start + ELEMENT_BYTES * elements],
    )
