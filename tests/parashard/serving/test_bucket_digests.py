"""Bucket digests: equal for equal rows however they come, and different for whatever differs."""

from __future__ import annotations

import numpy as np
import pytest

from parashard.plan.embedding import buckets_of, mixed
from parashard.serving.published_rows import BucketDigests

KEYS = np.sort(mixed(np.arange(9000)))
USES = np.arange(9000, dtype=np.uint32)
VALUES = np.random.default_rng(1).standard_normal((9000, 3)).astype(np.float32)


def digests(keys=KEYS, uses=USES, values=VALUES, piece: int = 9000):  # type: ignore[no-untyped-def]
    found = BucketDigests(0, 4096)
    for begin in range(0, len(keys), piece):
        some = slice(begin, begin + piece)
        found.add(keys[some], uses[some], values[some])
    return found.digests()


@pytest.mark.parametrize("piece", [1, 7, 500])
def test_pieces_do_not_matter(piece: int) -> None:
    assert digests(piece=piece) == digests()


def test_a_bucket_without_rows_is_empty() -> None:
    there = set(buckets_of(KEYS).tolist())
    assert [bucket for bucket, digest in enumerate(digests()) if digest] == sorted(there)
    assert digests(KEYS[:0], USES[:0], VALUES[:0]) == [b""] * 4096


@pytest.mark.parametrize("what", ["key", "use", "value", "row"])
def test_whatever_differs_is_seen_in_its_bucket_alone(what: str) -> None:
    keys, uses, values = KEYS.copy(), USES.copy(), VALUES.copy()
    at = 4000
    bucket = int(buckets_of(keys[at : at + 1])[0])
    if what == "key":
        keys[at] += np.uint64(1)
    elif what == "use":
        uses[at] += 1
    elif what == "value":
        values[at, 2] = np.nextafter(values[at, 2], np.float32(9))
    else:
        keys, uses, values = (np.delete(array, at, axis=0) for array in (keys, uses, values))
    pairs = zip(digests(), digests(keys, uses, values), strict=True)
    assert [number for number, (one, other) in enumerate(pairs) if one != other] == [bucket]
