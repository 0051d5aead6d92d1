"""Loops over the index of an embedding table: find rows by their keys, enter and remove keys, move a segment.

Compiled by `parashard_server.state.kernels.compiling`, under the conditions that `loops` states.
`parashard_server.state.rows.row_index` owns and describes the layout. A loop trusts its arguments: references are of
existing rows, and the index has room.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import numpy as np

from parashard.process.cached_code import const, inlined
from parashard_server.state.kernels.compiling import (
    KEYS,
    NUMBERS,
    REFERENCES,
    TAGS,
    VECTOR,
    ahead,
    eight,
    loop,
    lowest,
)
from parashard_server.state.kernels.row_loops import ABSENT, AHEAD, HEADER_WORDS, bring, copy_words

_u8, _u32, _u64, _i64 = np.uint8, np.uint32, np.uint64, np.int64
_SEGMENT_SHIFT = np.uint64(54)
_HOME_SHIFT, _HOME_MASK, _HOME_BITS = np.uint64(22), np.uint64(0xFFFFFFFF), np.uint64(32)
_TAG_SHIFT, _TAG_MASK = np.uint64(14), np.uint64(0xFF)
_CHECKED = 64  # rows whose keys are compared at once
_EIGHT = 8  # tags that are compared at once
_ONES, _HIGHEST, _NONE = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080), np.uint64(0)


@inlined
def _spread(key, spread):
    """Spread a key of the shard's range over all 64 bits, in order; `spread` has the range's first key and a shift."""
    return (key - spread[0]) << spread[1]


@inlined
def _segment(word):
    """Return the segment of a spread key."""
    return _i64(word >> _SEGMENT_SHIFT)


@inlined
def _home(word, capacity):
    """Return a key's home place in its segment: in the order of 32 of its bits, for any capacity."""
    return _i64((((word >> _HOME_SHIFT) & _HOME_MASK) * _u64(capacity)) >> _HOME_BITS)


@inlined
def _tag(word):
    return _u8((word >> _TAG_SHIFT) & _TAG_MASK) | _u8(1)  # 0 marks an empty place


@inlined
def _bring_place(word, tags, begins, capacities):
    """Prefetch the tag at a key's home place, and return that place in the whole index."""
    segment = _segment(word)
    place = begins[segment] + _home(word, capacities[segment])
    ahead(tags, place)
    return place


@inlined
def _zeros(tags):
    """Return a number whose lowest set bit is in the first of eight tags that is 0; return 0 if there is none."""
    return (tags - _ONES) & ~tags & _HIGHEST


@inlined
def _within(found, left):
    """Clear the bits of tags in the next segment: of eight, those after the first `left`."""
    return found & ((_u64(1) << _u64(8 * left)) - _u64(1)) if left < _EIGHT else found


@inlined
def _place_like(word, tags, begin, capacity):
    """Return the first place in the segment with a key's tag, or ABSENT: then the key has no row."""
    at, like = _home(word, capacity), _u64(_tag(word)) * _ONES
    while True:
        seen, left = eight(tags, begin + at), capacity - at
        empty, found = _within(_zeros(seen), left), _within(_zeros(seen ^ like), left)
        if found != _NONE and (empty == _NONE or lowest(found) < lowest(empty)):
            return _u32(at + _i64(lowest(found) >> _u64(3)))
        if empty != _NONE:
            return ABSENT
        at = at + _EIGHT if left > _EIGHT else 0


@inlined
def _empty_place(word, tags, begin, capacity):
    """Return the first empty place in the segment from a key's home place on; there is one."""
    at = _home(word, capacity)
    while True:
        left = capacity - at
        empty = _within(_zeros(eight(tags, begin + at)), left)
        if empty != _NONE:
            return at + _i64(lowest(empty) >> _u64(3))
        at = at + _EIGHT if left > _EIGHT else 0


@inlined
def _reference_of(key, spread, tags, references, begins, capacities, records, stride):
    """Return the reference of a key's row, ABSENT if it has none; `stride` is a record's length in uint64s."""
    word = _spread(key, spread)
    segment = _segment(word)
    begin, capacity = begins[segment], capacities[segment]
    at, tag = _home(word, capacity), _tag(word)
    for _ in range(capacity):
        seen = tags[begin + at]
        if seen == _u8(0):
            break
        if seen == tag and records[_i64(references[begin + at]) * stride] == key:
            return references[begin + at]
        at += 1
        if at == capacity:
            at = 0
    return ABSENT


@loop(
    const(KEYS),
    REFERENCES,
    const(KEYS),
    const(TAGS),
    const(REFERENCES),
    const(NUMBERS),
    const(NUMBERS),
    const(KEYS),
    const(NUMBERS),
)
def find_rows(keys, found, spread, tags, references, begins, capacities, records, sizes):
    """Write the reference of each key's row to `found`, ABSENT if it has none; return the number of ABSENT ones."""
    # One loop per array: for a table far larger than the caches that is a fifth faster than the single loop of
    # `read_rows`. `sizes`: stride.
    stride = sizes[0] // 2
    for i in range(keys.size):
        if i + AHEAD < keys.size:
            _bring_place(_spread(keys[i + AHEAD], spread), tags, begins, capacities)
        word = _spread(keys[i], spread)
        segment = _segment(word)
        found[i] = _place_like(word, tags, begins[segment], capacities[segment])
    for i in range(keys.size):
        if i + AHEAD < keys.size and found[i + AHEAD] != ABSENT:
            ahead(references, begins[_segment(_spread(keys[i + AHEAD], spread))] + _i64(found[i + AHEAD]))
        if found[i] != ABSENT:
            found[i] = references[begins[_segment(_spread(keys[i], spread))] + _i64(found[i])]
    for begin in range(0, keys.size, _CHECKED):
        end = min(begin + _CHECKED, keys.size)
        others = 0
        for i in range(begin, end):  # without a branch, so that its reads overlap
            there = found[i] != ABSENT
            at = _i64(found[i]) * stride if there else 0
            others += there & (records[at] != keys[i])
        if others > 0:
            for i in range(begin, end):
                if found[i] != ABSENT and records[_i64(found[i]) * stride] != keys[i]:  # another key has its tag
                    found[i] = _reference_of(keys[i], spread, tags, references, begins, capacities, records, stride)
    absent = 0
    for i in range(keys.size):
        absent += found[i] == ABSENT
    return absent


@loop(
    const(KEYS),
    REFERENCES,
    VECTOR,
    const(KEYS),
    const(TAGS),
    const(REFERENCES),
    const(NUMBERS),
    const(NUMBERS),
    const(KEYS),
    const(VECTOR),
    const(NUMBERS),
)
def read_rows(keys, found, values, spread, tags, references, begins, capacities, records, words, sizes):
    """Write references to `found` as `find_rows` does, and copy the found rows' values to `values`, end to end."""
    # `records` and `words` are the same memory; `sizes`: stride, and elements of the values.
    stride, length = sizes[0], sizes[1]
    absent = read = 0
    for step in range(keys.size + 3 * AHEAD):
        if step < keys.size:
            _bring_place(_spread(keys[step], spread), tags, begins, capacities)
        i = step - AHEAD
        if 0 <= i < keys.size:
            word = _spread(keys[i], spread)
            begin = begins[_segment(word)]
            found[i] = _place_like(word, tags, begin, capacities[_segment(word)])
            if found[i] != ABSENT:
                ahead(references, begin + _i64(found[i]))
        i = step - 2 * AHEAD
        if 0 <= i < keys.size and found[i] != ABSENT:
            found[i] = references[begins[_segment(_spread(keys[i], spread))] + _i64(found[i])]
            bring(words, _i64(found[i]) * stride, HEADER_WORDS + length)
        i = step - 3 * AHEAD
        if i < 0:
            continue
        if found[i] != ABSENT and records[_i64(found[i]) * (stride // 2)] != keys[i]:  # another key has its tag
            found[i] = _reference_of(keys[i], spread, tags, references, begins, capacities, records, stride // 2)
        if found[i] == ABSENT:
            absent += 1
            continue
        copy_words(values, read, words, _i64(found[i]) * stride + HEADER_WORDS, length)
        read += length
    return absent


@loop(const(KEYS), const(REFERENCES), const(KEYS), TAGS, REFERENCES, const(NUMBERS), const(NUMBERS))
def index_rows(keys, rows, spread, tags, references, begins, capacities):
    """Enter keys that are not in the index, with the references of their rows."""
    for i in range(keys.size):
        if i + AHEAD < keys.size:
            ahead(references, _bring_place(_spread(keys[i + AHEAD], spread), tags, begins, capacities))
        word = _spread(keys[i], spread)
        segment = _segment(word)
        place = begins[segment] + _empty_place(word, tags, begins[segment], capacities[segment])
        tags[place] = _tag(word)
        references[place] = rows[i]


@loop(const(KEYS), const(KEYS), TAGS, REFERENCES, const(NUMBERS), const(NUMBERS), const(KEYS), const(NUMBERS))
def remove_rows(keys, spread, tags, references, begins, capacities, records, sizes):
    """Remove keys from the index; move later entries into the gaps that would hide them from a search."""
    stride = sizes[0] // 2
    for i in range(keys.size):
        word = _spread(keys[i], spread)
        segment = _segment(word)
        begin, capacity = begins[segment], capacities[segment]
        gap, tag = _home(word, capacity), _tag(word)
        while tags[begin + gap] != tag or records[_i64(references[begin + gap]) * stride] != keys[i]:
            gap += 1
            if gap == capacity:
                gap = 0
        at = gap
        while True:
            at += 1
            if at == capacity:
                at = 0
            if tags[begin + at] == _u8(0) or at == gap:
                break
            home = _home(_spread(records[_i64(references[begin + at]) * stride], spread), capacity)
            from_home, from_gap = at - home, at - gap
            if from_home < 0:
                from_home += capacity
            if from_gap < 0:
                from_gap += capacity
            if from_home >= from_gap:  # its search passes the gap
                tags[begin + gap] = tags[begin + at]
                references[begin + gap] = references[begin + at]
                gap = at
        tags[begin + gap] = _u8(0)


@loop(const(KEYS), const(TAGS), const(REFERENCES), TAGS, REFERENCES, const(KEYS), const(NUMBERS))
def move_segment(spread, tags, references, new_tags, new_references, records, sizes):
    """Enter a segment's keys into an empty segment of another capacity."""
    stride = sizes[0] // 2
    capacity = new_tags.size
    for place in range(tags.size):
        later = place + 2 * AHEAD
        if later < tags.size and tags[later] != _u8(0):
            ahead(records, _i64(references[later]) * stride)
        if tags[place] == _u8(0):
            continue
        at = _home(_spread(records[_i64(references[place]) * stride], spread), capacity)
        while new_tags[at] != _u8(0):
            at += 1
            if at == capacity:
                at = 0
        new_tags[at] = tags[place]
        new_references[at] = references[place]
