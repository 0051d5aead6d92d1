"""Distinct keys: the keys that a step uses, each once, and where each of its look-ups has its row among them.

Mixed keys are spread evenly, so that a hash table whose places are in the order of the keys' high bits has them almost
sorted. Compiled by Numba; `numpy.unique` says the same, readably, and takes over where keys are not spread.
"""

# The loops take what Numba infers.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from parashard.plan.embedding import Keys
from parashard.process.cached_code import Vector, const, loop

KEY_BITS = 64
PROBES_MAX = 256  # places that are searched for one key: even spreading needs a tenth of it
PLACES_EACH = 2  # of the table, for each look-up


def distinct_keys(words: Keys) -> tuple[Keys, NDArray[np.int64]]:
    """Return what `numpy.unique(words, return_inverse=True)` does.

    Returns
    -------
    keys : ndarray of uint64, shape (keys,)
        Ascending, each once.
    places : ndarray of int64, in the words' shape
        Where each word is among the keys.
    """
    flat = np.ascontiguousarray(words).reshape(-1)
    bits = max(1, (PLACES_EACH * len(flat)).bit_length())
    numbers = np.zeros((1 << bits) + PROBES_MAX, np.int32)  # the last search goes on beyond the last place
    seen, places = np.empty(len(flat), np.uint64), np.empty(len(flat), np.int64)
    count = _number(flat, numbers, np.uint64(KEY_BITS - bits), seen, places)
    if count < 0:
        keys, inverse = np.unique(flat, return_inverse=True)
        return keys, inverse.astype(np.int64, copy=False).reshape(words.shape)
    keys = np.empty(count, np.uint64)
    _order(numbers, seen, keys, places)
    return keys, places.reshape(words.shape)


_WORDS, _NUMBERS, _PLACES = Vector("uint64"), Vector("int32"), Vector("int64")


@loop(const(_WORDS), _NUMBERS, "uint64", _WORDS, _PLACES)
def _number(words, numbers, shift, seen, places):
    """Number words as they first come; return how many differ, -1 if they are too crowded.

    A place of `numbers` has 1 more than the number of the word there, 0 if it has none.
    """
    count = 0
    for i in range(len(words)):
        at, probes = np.int64(words[i] >> shift), 0
        while numbers[at] != 0 and seen[numbers[at] - 1] != words[i]:
            at, probes = at + 1, probes + 1
            if probes == PROBES_MAX:
                return -1
        if numbers[at] == 0:
            seen[count] = words[i]
            count += 1
            numbers[at] = count
        places[i] = numbers[at] - 1
    return count


@loop(const(_NUMBERS), const(_WORDS), _WORDS, _PLACES)
def _order(numbers, seen, keys, places):
    """Put the words that were seen into order, and have `places` say where each is."""
    by_key, place_of = np.empty(len(keys), np.int64), np.empty(len(keys), np.int64)
    count = 0
    for at in range(len(numbers)):
        if numbers[at] == 0:
            continue
        number = numbers[at] - 1
        to = count
        while to > 0 and keys[to - 1] > seen[number]:
            keys[to], by_key[to] = keys[to - 1], by_key[to - 1]
            to -= 1
        keys[to], by_key[to] = seen[number], number
        count += 1
    for place in range(count):
        place_of[by_key[place]] = place
    for i in range(len(places)):
        places[i] = place_of[places[i]]
