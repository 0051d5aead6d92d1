"""Loops over the rows of an embedding table: find them, copy them to vectors and back, move a segment of the index.

Compiled by `parashard_server.state.kernels.compiling`, under the conditions that `loops` states. What the arrays mean
is said where they are owned: `parashard_server.state.rows.row_index` and `row_memory`. A loop trusts its arguments:
references are of rows that exist, and the index has room.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import numpy as np

from parashard_server.state.kernels.compiling import (
    BLOCK_WORDS,
    KEYS,
    NUMBERS,
    REFERENCES,
    SUMS,
    TAGS,
    VECTOR,
    ahead,
    copy_block,
    inlined,
    loop,
)

_u8, _u32, _u64, _i64 = np.uint8, np.uint32, np.uint64, np.int64
_ABSENT = np.uint32(0xFFFFFFFF)
_SEGMENT_MASK = np.uint64(1023)
_HOME_SHIFT, _HOME_MASK, _HOME_BITS = np.uint64(10), np.uint64(0xFFFFFFFF), np.uint64(32)
_TAG_SHIFT, _TAG_MASK = np.uint64(42), np.uint64(0xFF)
_HEADER_WORDS = 4  # of a record, in float32s: key, t, last use
_LINE_WORDS = 16  # of a cache line
_AHEAD = 16  # records that are brought while one is copied: memory takes as long as so many copies


@inlined
def _home(key, capacity):
    """Return where the search for a key begins in its segment: in the order of its 32 bits, whatever the capacity."""
    return _i64((((key >> _HOME_SHIFT) & _HOME_MASK) * _u64(capacity)) >> _HOME_BITS)


@inlined
def _tag(key):
    return _u8((key >> _TAG_SHIFT) & _TAG_MASK) | _u8(1)  # 0 marks an empty place


@inlined
def _bring(records, begin, stride):
    """Have a record brought to the cache."""
    for at in range(0, stride, _LINE_WORDS):
        ahead(records, begin + at)


@inlined
def _copy(target, to, source, begin, length):
    """Copy float32s from one array to another; a loop over so few would cost more than what it copies."""
    whole = length // BLOCK_WORDS * BLOCK_WORDS
    for at in range(0, whole, BLOCK_WORDS):
        copy_block(target, to + at, source, begin + at)
    for at in range(whole, length):
        target[to + at] = source[begin + at]


@inlined
def _bring_place(key, tags, references, begins, capacities):
    """Have the place where the search for a key begins brought to the cache."""
    segment = _i64(key & _SEGMENT_MASK)
    place = begins[segment] + _home(key, capacities[segment])
    ahead(tags, place)
    ahead(references, place)


@inlined
def _first_like(key, tags, references, begins, capacities):
    """Return the first reference that has a key's tag, _ABSENT if there is none: then the key has no row."""
    segment = _i64(key & _SEGMENT_MASK)
    begin, capacity = begins[segment], capacities[segment]
    at, tag = _home(key, capacity), _tag(key)
    while tags[begin + at] != _u8(0):
        if tags[begin + at] == tag:
            return references[begin + at]
        at += 1
        if at == capacity:
            at = 0
    return _ABSENT


@inlined
def _reference_of(key, tags, references, begins, capacities, records, stride):
    """Return the reference of a key's row, _ABSENT if it has none; `stride` is of a record, in uint64s."""
    segment = _i64(key & _SEGMENT_MASK)
    begin, capacity = begins[segment], capacities[segment]
    at, tag = _home(key, capacity), _tag(key)
    for _ in range(capacity):
        seen = tags[begin + at]
        if seen == _u8(0):
            break
        if seen == tag and records[_i64(references[begin + at]) * stride] == key:
            return references[begin + at]
        at += 1
        if at == capacity:
            at = 0
    return _ABSENT


@loop(0, KEYS, REFERENCES, VECTOR, TAGS, REFERENCES, NUMBERS, NUMBERS, KEYS, VECTOR, NUMBERS)
def read_rows(keys, found, values, tags, references, begins, capacities, records, words, sizes):
    """Put the reference of each key's row into `found`, _ABSENT where it has none; return how many have none.

    The values of the rows that there are are copied to `values`, end to end. `records` and `words` are the same memory;
    `sizes`: stride, and elements of the values, 0 where none are wanted.
    """
    stride, length = sizes[0], sizes[1]
    absent = read = 0
    for i in range(min(_AHEAD, keys.size)):
        found[i] = _first_like(keys[i], tags, references, begins, capacities)
    for i in range(keys.size):
        if i + 2 * _AHEAD < keys.size:
            _bring_place(keys[i + 2 * _AHEAD], tags, references, begins, capacities)
        if i + _AHEAD < keys.size:
            later = _first_like(keys[i + _AHEAD], tags, references, begins, capacities)
            found[i + _AHEAD] = later
            if later != _ABSENT:
                _bring(words, _i64(later) * stride, _HEADER_WORDS + length)
        if found[i] != _ABSENT and records[_i64(found[i]) * (stride // 2)] != keys[i]:  # another key has its tag
            found[i] = _reference_of(keys[i], tags, references, begins, capacities, records, stride // 2)
        if found[i] == _ABSENT:
            absent += 1
            continue
        _copy(values, read, words, _i64(found[i]) * stride + _HEADER_WORDS, length)
        read += length
    return absent


@loop(0, KEYS, REFERENCES, TAGS, REFERENCES, NUMBERS, NUMBERS)
def index_rows(keys, rows, tags, references, begins, capacities):
    """Enter keys that are not in the index, with the references of their rows."""
    for i in range(keys.size):
        if i + _AHEAD < keys.size:
            _bring_place(keys[i + _AHEAD], tags, references, begins, capacities)
        key = keys[i]
        segment = _i64(key & _SEGMENT_MASK)
        begin, capacity = begins[segment], capacities[segment]
        at = _home(key, capacity)
        while tags[begin + at] != _u8(0):
            at += 1
            if at == capacity:
                at = 0
        tags[begin + at] = _tag(key)
        references[begin + at] = rows[i]


@loop(0, KEYS, TAGS, REFERENCES, NUMBERS, NUMBERS, KEYS, NUMBERS)
def remove_rows(keys, tags, references, begins, capacities, records, sizes):
    """Take keys that are in the index out of it; what a search would no longer find behind the gap moves into it."""
    stride = sizes[0] // 2
    for i in range(keys.size):
        key = keys[i]
        segment = _i64(key & _SEGMENT_MASK)
        begin, capacity = begins[segment], capacities[segment]
        gap, tag = _home(key, capacity), _tag(key)
        while tags[begin + gap] != tag or records[_i64(references[begin + gap]) * stride] != key:
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
            home = _home(records[_i64(references[begin + at]) * stride], capacity)
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


@loop(0, REFERENCES, REFERENCES, VECTOR, NUMBERS, SUMS)
def hide_rows(found, headers, records, sizes, limits):
    """Put _ABSENT in place of references whose rows are gone by the rules, and return how many; some may be _ABSENT.

    `sizes`: stride, elements of a row, the time, steps after which an unused row is gone, the last time that norms
    counted; `limits`: the square of the least norm.
    """
    stride, elements, now, unused, checked = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]
    hidden = 0
    for i in range(found.size):
        if i + 2 * _AHEAD < found.size and found[i + 2 * _AHEAD] != _ABSENT:
            ahead(headers, _i64(found[i + 2 * _AHEAD]) * stride)
        if found[i] == _ABSENT:
            continue
        begin = _i64(found[i]) * stride
        last_use = _i64(headers[begin + 3])
        gone = now - last_use >= unused
        if not gone and checked >= max(last_use, 1) and limits[0] > 0.0:
            squares = 0.0
            for j in range(elements):
                value = np.float64(records[begin + _HEADER_WORDS + j])
                squares += value * value
            gone = squares < limits[0]
        if gone:
            found[i] = _ABSENT
            hidden += 1
    return hidden


@loop(0, TAGS, REFERENCES, TAGS, REFERENCES, KEYS, NUMBERS)
def move_segment(tags, references, new_tags, new_references, records, sizes):
    """Enter a segment's keys into an empty one of another capacity."""
    stride = sizes[0] // 2
    capacity = new_tags.size
    for place in range(tags.size):
        later = place + 2 * _AHEAD
        if later < tags.size and tags[later] != _u8(0):
            ahead(records, _i64(references[later]) * stride)
        if tags[place] == _u8(0):
            continue
        at = _home(records[_i64(references[place]) * stride], capacity)
        while new_tags[at] != _u8(0):
            at += 1
            if at == capacity:
                at = 0
        new_tags[at] = tags[place]
        new_references[at] = references[place]


@inlined
def _least(counts):
    """Return the place of the smallest of some counts."""
    at = 0
    for j in range(1, counts.size):
        if counts[j] < counts[at]:
            at = j
    return at


@loop(0, REFERENCES, REFERENCES, REFERENCES, KEYS, KEYS, NUMBERS, NUMBERS)
def use_rows(rows, headers, first, records_keys, hot_keys, hot_counts, sizes):
    """Count a use of each row at a time; put those that were last used before a cut into `first`, return how many.

    Rows used more often than the least of `hot_counts` are noted there, in place of that one, with their keys.
    """
    stride, clock, cut = sizes[0], _u32(sizes[1]), _u32(sizes[2])
    firsts = 0
    at, least = 0, _i64(0xFFFFFFFF)
    if hot_counts.size > 0:
        at = _least(hot_counts)
        least = hot_counts[at]
    for i in range(rows.size):
        if i + 2 * _AHEAD < rows.size:
            ahead(headers, _i64(rows[i + 2 * _AHEAD]) * stride)
        header = _i64(rows[i]) * stride
        if headers[header + 3] <= cut:
            first[firsts] = rows[i]
            firsts += 1
        headers[header + 2] += _u32(1)
        headers[header + 3] = clock
        uses = _i64(headers[header + 2])
        if uses > least:
            key, place = records_keys[header // 2], at
            for j in range(hot_keys.size):
                if hot_keys[j] == key and hot_counts[j] > 0:
                    place = j
            hot_keys[place], hot_counts[place] = key, uses
            at = _least(hot_counts)
            least = hot_counts[at]
    return firsts


@loop(0, REFERENCES, VECTOR, REFERENCES, KEYS, REFERENCES, VECTOR, NUMBERS, KEYS)
def keep_rows(rows, records, headers, records_keys, image_of, images, sizes, next_key):
    """Copy the records of rows that a save still lacks to `images`; return how many it has then, or -2 if not all fit.

    It lacks those last used from one time to another, whose keys are at least `next_key`.
    """
    stride, first, until, count, most = sizes[0], _u32(sizes[1]), _u32(sizes[2]), sizes[3], sizes[4]
    for i in range(rows.size):
        begin = _i64(rows[i]) * stride
        used = headers[begin + 3]
        if used < first or used > until or records_keys[begin // 2] < next_key[0] or image_of[rows[i]] != _u32(0):
            continue
        if count == most:
            return _i64(-2)
        _copy(images, count * stride, records, begin, stride)
        count += 1
        image_of[rows[i]] = _u32(count)
    return count


@loop(0, REFERENCES, VECTOR, REFERENCES, VECTOR, VECTOR, NUMBERS)
def gather_records(rows, records, image_of, images, out, sizes):
    """Copy whole records, or the images that were kept of them, end to end."""
    stride = sizes[0]
    for i in range(rows.size):
        image = image_of[rows[i]]
        target = i * stride
        if image == _u32(0):
            _copy(out, target, records, _i64(rows[i]) * stride, stride)
        else:
            _copy(out, target, images, (_i64(image) - 1) * stride, stride)


@loop(0, REFERENCES, VECTOR, VECTOR, NUMBERS, NUMBERS)
def gather_rows(rows, records, values, parts, sizes):
    """Copy parts of records to a vector: the first part of all rows, then the second of all, and so on."""
    stride = sizes[0]
    for i in range(rows.size):
        if i + _AHEAD < rows.size:
            _bring(records, _i64(rows[i + _AHEAD]) * stride, stride)
        source = _i64(rows[i]) * stride + _HEADER_WORDS
        begin = 0
        for p in range(parts.size):
            length = parts[p]
            _copy(values, begin + i * length, records, source, length)
            source += length
            begin += rows.size * length


@loop(0, REFERENCES, VECTOR, VECTOR, NUMBERS, NUMBERS)
def scatter_rows(rows, records, values, parts, sizes):
    """Copy parts of records back from such a vector."""
    stride = sizes[0]
    for i in range(rows.size):
        if i + _AHEAD < rows.size:
            _bring(records, _i64(rows[i + _AHEAD]) * stride, stride)
        target = _i64(rows[i]) * stride + _HEADER_WORDS
        begin = 0
        for p in range(parts.size):
            length = parts[p]
            _copy(records, target, values, begin + i * length, length)
            target += length
            begin += rows.size * length
