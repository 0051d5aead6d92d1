"""Seeding: counter-based random words and shuffles; integer arithmetic only, so the same bits on every machine."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from parashard.errors import ConfigurationError

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

MAX_LENGTH = 1 << 40
ROUNDS = 8  # twice the four of Luby and Rackoff (SIAM J. Comput. 1988), for tiny halves and a cheap F; must be even
_U64 = np.uint64  # CuPy's, too


def key_of(text: str) -> int:
    """Return the SplitMix64 key that a text, such as a variable's name, determines."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def splitmix64(counters: Any, key: int) -> Any:
    """Return SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) at these counters under a key.

    The k-th output of the authors' splitmix64.c from the state `key` is the value at counter k, from 1 on. The array of
    uint64, of NumPy or CuPy and of one axis or more, is overwritten with the result, and returned.
    """
    z = counters
    z *= _U64(0x9E3779B97F4A7C15)
    z += _U64(key)
    z ^= z >> _U64(30)
    z *= _U64(0xBF58476D1CE4E5B9)
    z ^= z >> _U64(27)
    z *= _U64(0x94D049BB133111EB)
    z ^= z >> _U64(31)
    return z


def _word(value: int) -> _Words:
    # Zero-dimensional arrays, because NumPy's ufuncs take them faster than Python integers or NumPy scalars.
    return np.array(value, np.uint64)


_MULTIPLIER_1, _MULTIPLIER_2 = _word(0xBF58476D1CE4E5B9), _word(0x94D049BB133111EB)
_SHIFT = _word(32)


class Permutation:
    """A bijection of [0, length) chosen by (seed, epoch).

    A generalised Feistel network with cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
    CT-RSA 2002). A position is the pair x = left * b + right of Z_a x Z_b, where a = ceil(sqrt(length)) and
    b = ceil(length / a), and rounds alternate between

        left  <- (left  + F_j(right)) mod a
        right <- (right + F_j(left))  mod b,

    with F_j a keyed mix of two multiplications by SplitMix64's constants (Steele, Lea, Flood, OOPSLA 2014). A result in
    [length, a * b) goes through the network again. Since a * b - length < a, at most one position in sqrt(length)
    does; a binary network over the next even number of bits would repeat up to three of four.

    It shuffles well; it is no cipher. The length is 1 to 2**40; every pair of seed and epoch is another permutation.

    >>> Permutation(5, seed=0, epoch=0)(np.arange(5))
    array([4, 1, 3, 0, 2])
    """

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        if not 1 <= length <= MAX_LENGTH:
            raise ConfigurationError(f"a permutation has a length of 1 to {MAX_LENGTH}, found {length}")
        self.length = length
        a = math.isqrt(length - 1) + 1
        b = -(-length // a)
        self._a, self._b = _word(a), _word(b)
        self._walks = a * b > length
        text = f"parashard permutation\0{seed}\0{epoch}".encode()
        keys = np.frombuffer(hashlib.shake_256(text).digest(8 * ROUNDS), "<u8").reshape(-1, 2).tolist()
        self._keys = [(_word(left), _word(right)) for left, right in keys]

    def __call__(self, positions: Indices) -> Indices:
        """Return where the permutation sends each position, in a new array of the positions' shape."""
        x = np.asarray(positions, np.int64).view(np.uint64)  # a negative position becomes a huge one
        if x.size and x.max() >= self.length:
            raise ValueError(f"a position is not in [0, {self.length})")
        images = self._network(x)
        if self._walks:
            outside = images >= self.length
            while outside.any():
                images[outside] = self._network(images[outside])
                outside = images >= self.length
        return images.view(np.int64)

    def _network(self, x: _Words) -> _Words:
        a, b = self._a, self._b
        left, right = np.divmod(x, b)
        left, right = np.atleast_1d(left), np.atleast_1d(right)
        for left_key, right_key in self._keys:
            _add_mix(left, right, left_key, a)
            _add_mix(right, left, right_key, b)
        left *= b
        left += right
        return left.reshape(x.shape)


def _add_mix(target: _Words, source: _Words, key: _Words, modulus: _Words) -> None:
    """Add F(source) to `target` in place, modulo `modulus`; target < 2**20 and F < 2**32, so nothing overflows."""
    z = source + key  # wraps, as the multiplications do
    z *= _MULTIPLIER_1
    z ^= z >> _SHIFT
    z *= _MULTIPLIER_2
    z >>= _SHIFT
    target += z
    target %= modulus
