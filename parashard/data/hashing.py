"""Keys of texts: XXH64 (Yann Collet's xxHash, 64 bits) of their UTF-8, so that a text has the same key everywhere."""

# Numba infers the types of the loops.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]


def keys_of_texts(texts: Sequence[str], seed: int = 0) -> Hashes:
    """Return a key of 64 bits for each text; two of n distinct ones collide with a probability of about n^2 / 2^65."""
    parts = [text.encode() for text in texts]
    lengths = np.fromiter((len(part) for part in parts), np.int64, len(parts))
    return keys_of_bytes(np.frombuffer(b"".join(parts), np.uint8), np.concatenate(([0], np.cumsum(lengths))), seed)


def keys_of_bytes(content: npt.NDArray[np.uint8], offsets: npt.NDArray[Any], seed: int = 0) -> Hashes:
    """Return the same for concatenated texts in Arrow's layout, with one offset more than texts."""
    keys = np.empty(len(offsets) - 1, np.uint64)
    _compiled()(content, offsets.astype(np.int64, copy=False), np.uint64(seed), keys)
    return keys


def seed_of(name: str) -> int:
    """Return the seed of a column, so that equal texts of two columns have different keys."""
    return int(keys_of_texts([name])[0])


@functools.cache
def _compiled() -> Any:
    """Return the loop; Numba loads slowly, and only texts need it."""
    from parashard.data import xxh64

    return xxh64.keys_of
