"""Bucket digests: whether two readers of a table have the same rows in a part of its key space.

Owns what a digest is of: keys, the time of each row's last push, and float32 values, in the order of the keys. Pure.
Called by shards, and by `parashard.serving.live_shard`, which compares.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from parashard.plan.embedding import Keys, buckets_of
from parashard.plan.variables import Float32s

DIGEST_BYTES = 16


class BucketDigests:
    """Digests of buckets [first, stop), whose rows come piece by piece in the order of their keys.

    Parameters
    ----------
    first, stop : int
    """

    def __init__(self, first: int, stop: int) -> None:
        self._first, self._stop = first, stop
        self._of: dict[int, tuple[hashlib.blake2b, ...]] = {}

    def add(self, keys: Keys, last_use: NDArray[np.uint32], values: Float32s) -> None:
        """Add rows."""
        buckets, begins = np.unique(buckets_of(keys), return_index=True)
        bounds = itertools.pairwise([*begins.tolist(), len(keys)])
        for bucket, (begin, stop) in zip(buckets.tolist(), bounds, strict=True):
            if bucket not in self._of:
                self._of[bucket] = tuple(hashlib.blake2b(digest_size=DIGEST_BYTES) for _ in range(3))
            parts = (keys[begin:stop], "<u8"), (last_use[begin:stop], "<u4"), (values[begin:stop], "<f4")
            for of, (part, dtype) in zip(self._of[bucket], parts, strict=True):
                of.update(np.ascontiguousarray(part, dtype).data)

    def digests(self) -> Sequence[bytes]:
        """Return the digest of each bucket; empty: it has no row."""
        return [self._digest(bucket) for bucket in range(self._first, self._stop)]

    def _digest(self, bucket: int) -> bytes:
        if bucket not in self._of:
            return b""
        whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for of in self._of[bucket]:
            whole.update(of.digest())
        return whole.digest()
