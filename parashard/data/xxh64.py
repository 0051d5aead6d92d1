"""XXH64 of concatenated texts, compiled by Numba, with the GIL released.

The algorithm is xxHash's specification (doc/xxhash_spec.md, "XXH64"). Imported only when there are texts.
"""

# Numba infers the types of the loops.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import numpy as np

from parashard.process.cached_code import Vector, const, inlined, loop

_u64 = np.uint64
_PRIME_1 = _u64(0x9E3779B185EBCA87)
_PRIME_2 = _u64(0xC2B2AE3D27D4EB4F)
_PRIME_3 = _u64(0x165667B19E3779F9)
_PRIME_4 = _u64(0x85EBCA77C2B2AE63)
_PRIME_5 = _u64(0x27D4EB2F165667C5)
_STRIPE_BYTES = 32


@inlined
def _rotated(word, bits):
    return (word << _u64(bits)) | (word >> _u64(64 - bits))


@inlined
def _word(content, at, size):
    word = _u64(0)
    for byte in range(size):
        word |= _u64(content[at + byte]) << _u64(8 * byte)
    return word


@inlined
def _round(lane, word):
    return _rotated(lane + word * _PRIME_2, 31) * _PRIME_1


@inlined
def _merged(key, lane):
    return (key ^ _round(_u64(0), lane)) * _PRIME_1 + _PRIME_4


@inlined
def _key_of(content, begin, end, seed):
    at = begin
    if end - begin >= _STRIPE_BYTES:
        a, b, c, d = seed + _PRIME_1 + _PRIME_2, seed + _PRIME_2, seed, seed - _PRIME_1
        while at + _STRIPE_BYTES <= end:
            a = _round(a, _word(content, at, 8))
            b = _round(b, _word(content, at + 8, 8))
            c = _round(c, _word(content, at + 16, 8))
            d = _round(d, _word(content, at + 24, 8))
            at += _STRIPE_BYTES
        key = _rotated(a, 1) + _rotated(b, 7) + _rotated(c, 12) + _rotated(d, 18)
        key = _merged(_merged(_merged(_merged(key, a), b), c), d)
    else:
        key = seed + _PRIME_5
    key += _u64(end - begin)
    while at + 8 <= end:
        key = _rotated(key ^ _round(_u64(0), _word(content, at, 8)), 27) * _PRIME_1 + _PRIME_4
        at += 8
    if at + 4 <= end:
        key = _rotated(key ^ (_word(content, at, 4) * _PRIME_1), 23) * _PRIME_2 + _PRIME_3
        at += 4
    while at < end:
        key = _rotated(key ^ (_u64(content[at]) * _PRIME_5), 11) * _PRIME_1
        at += 1
    key = (key ^ (key >> _u64(33))) * _PRIME_2
    key = (key ^ (key >> _u64(29))) * _PRIME_3
    return key ^ (key >> _u64(32))


@loop(const(Vector("uint8")), const(Vector("int64")), "uint64", Vector("uint64"))
def keys_of(content, offsets, seed, keys):
    """Write the key of each text."""
    for text in range(len(keys)):
        keys[text] = _key_of(content, offsets[text], offsets[text + 1], seed)
