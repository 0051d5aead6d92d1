"""Keys of texts are XXH64 of their UTF-8: those of Collet's own code, for every length, seed and place in a buffer."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from parashard.data.hashing import keys_of_bytes, keys_of_texts, seed_of

SEEDS = st.integers(0, 2**64 - 1)


@given(st.lists(st.text(max_size=40), max_size=8), SEEDS)
def test_texts_have_the_keys_of_xxhash(texts: list[str], seed: int) -> None:
    due = [xxhash.xxh64_intdigest(text.encode(), seed) for text in texts]
    found = keys_of_texts(texts, seed)
    assert found.dtype == np.uint64
    assert found.tolist() == due


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_every_length_has_the_key_of_xxhash(seed: int) -> None:
    content = np.random.default_rng(0).bytes(200)
    texts = [content[:length] for length in range(200)]
    offsets = np.concatenate(([0], np.cumsum([len(text) for text in texts])))
    found = keys_of_bytes(np.frombuffer(b"".join(texts), np.uint8), offsets, seed)
    assert found.tolist() == [xxhash.xxh64_intdigest(text, seed) for text in texts]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_texts_may_lie_anywhere_in_a_buffer(dtype: type[np.signedinteger]) -> None:
    content = np.frombuffer(b"--abcdefgh--", np.uint8)
    found = keys_of_bytes(content, np.array([2, 5, 5, 10], dtype), 7)
    assert found.tolist() == [xxhash.xxh64_intdigest(text, 7) for text in (b"abc", b"", b"defgh")]


def test_the_keys_of_published_texts_are_pinned() -> None:
    """Of the reference's own documents and tests; a table's rows are found by these for ever."""
    assert keys_of_texts(["", "a", "abc"]).tolist() == [0xEF46DB3751D8E999, 0xD24EC4F1A98C6E5B, 0x44BC2CF5AD770999]


def test_of_no_text_and_of_empty_ones_there_are_keys() -> None:
    assert keys_of_texts([]).shape == (0,)
    assert keys_of_texts(["", ""]).tolist() == [0xEF46DB3751D8E999] * 2


def test_columns_have_seeds_of_their_own() -> None:
    names = ["C1", "C2", "c1", "city", "city ", "Stadt: Köln"]
    assert [seed_of(name) for name in names] == [xxhash.xxh64_intdigest(name.encode()) for name in names]
    keys = [keys_of_texts(["red"], seed_of(name))[0] for name in names]
    assert len(set(keys)) == len(names)


def _text_of(key: int, seed: int) -> bytes:
    """Return the text of 8 bytes that has a key: each operation of XXH64 on such a text has an inverse."""
    mask, inverse = 2**64 - 1, [pow(prime, -1, 2**64) for prime in PRIMES]
    key ^= key >> 32
    key = key * inverse[2] & mask
    key ^= (key >> 29) ^ (key >> 58)
    key = key * inverse[1] & mask
    key ^= key >> 33
    key = (key - PRIMES[3]) * inverse[0] & mask
    rounded = ((key >> 27 | key << 37) & mask) ^ ((seed + PRIMES[4] + 8) & mask)
    word = rounded * inverse[0] & mask
    return ((word >> 31 | word << 33) * inverse[1] & mask).to_bytes(8, "little")


PRIMES = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)


@given(st.binary(min_size=8, max_size=8), SEEDS)
def test_two_texts_of_8_bytes_never_share_a_key(text: bytes, seed: int) -> None:
    (key,) = keys_of_bytes(np.frombuffer(text, np.uint8), np.array([0, 8]), seed).tolist()
    assert _text_of(key, seed) == text
