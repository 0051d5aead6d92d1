"""The memory of a shard's weights, with versions for lock-free readers (a sequence lock).

Pure. Memory that other processes may read is `parashard.transports.shared_weights`; the writer is
`parashard_server.state.storage`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from parashard.plan.variables import Float32s

Versions = NDArray[np.uint64]


class WeightMemory(Protocol):
    """A shard's weights, and by which versions their partitions have moved.

    Attributes
    ----------
    weights : ndarray of float32, shape (elements,)
        Every partition's values, end to end.
    begun, done : ndarray of uint64, shape (partitions,)
        The version whose write of the partition was the last to begin, and to end (a sequence lock). The writer of
        version v of partition i sets begun[i] = v before its first write and done[i] = v after its last; all start
        as the first version.
    """

    weights: Float32s
    begun: Versions
    done: Versions


class PrivateWeights:
    """Weights that no other process sees; `offsets` say where each partition begins, and where the last one ends."""

    def __init__(self, offsets: Sequence[int]) -> None:
        self.weights: Float32s = np.zeros(offsets[-1], np.float32)
        self.begun: Versions = np.zeros(len(offsets) - 1, np.uint64)
        self.done: Versions = np.zeros(len(offsets) - 1, np.uint64)
