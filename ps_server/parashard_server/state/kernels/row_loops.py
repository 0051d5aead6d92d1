"""Loops over the rows of an embedding table: count uses, copy rows to vectors and back, find evicted rows.

Compiled by `parashard_server.state.kernels.compiling`, under the conditions that `loops` states.
`parashard_server.state.rows.row_memory` owns and describes the arrays. A loop trusts its arguments: references are of
existing rows.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import numpy as np

from parashard.process.cached_code import const, inlined
from parashard_server.state.kernels.compiling import (
    BLOCK_WORDS,
    KEYS,
    NUMBERS,
    REFERENCES,
    SUMS,
    VECTOR,
    ahead,
    copy_block,
    loop,
)

_u32, _i64 = np.uint32, np.int64
ABSENT = np.uint32(0xFFFFFFFF)
"""In place of a reference."""
HEADER_WORDS = 4
"""Of a record, in float32s: key, t, last use."""
AHEAD = 24
"""Prefetch distance in records: a read from memory takes as long as this many copies."""
_LINE_WORDS = 16  # of a cache line


@inlined
def bring(records, begin, stride):
    """Prefetch a record."""
    for at in range(0, stride, _LINE_WORDS):
        ahead(records, begin + at)


@inlined
def copy_words(target, to, source, begin, length):
    """Copy float32s from one array to another in blocks: for so few, a plain loop would cost more than the copy."""
    at = 0
    while at + BLOCK_WORDS <= length:
        copy_block(target, to + at, source, begin + at)
        at += BLOCK_WORDS
    if at < length:
        for last in range(at, length):
            target[to + last] = source[begin + last]


@loop(REFERENCES, const(REFERENCES), const(VECTOR), const(NUMBERS), const(SUMS))
def hide_rows(found, headers, records, sizes, limits):
    """Replace references of evicted rows by ABSENT, and return how many; some may be ABSENT before."""
    # `sizes`: stride, elements of a row, the time, steps after which an unused row is evicted, the last time at which
    # norms were checked; `limits`: the square of the least norm.
    stride, elements, now, unused, checked = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]
    hidden = 0
    for i in range(found.size):
        if i + 2 * AHEAD < found.size and found[i + 2 * AHEAD] != ABSENT:
            ahead(headers, _i64(found[i + 2 * AHEAD]) * stride)
        if found[i] == ABSENT:
            continue
        begin = _i64(found[i]) * stride
        last_use = _i64(headers[begin + 3])
        gone = now - last_use >= unused
        if not gone and checked >= max(last_use, 1) and limits[0] > 0.0:
            squares = 0.0
            for j in range(elements):
                value = np.float64(records[begin + HEADER_WORDS + j])
                squares += value * value
            gone = squares < limits[0]
        if gone:
            found[i] = ABSENT
            hidden += 1
    return hidden


@inlined
def _least(counts):
    """Return the index of the smallest count."""
    at = 0
    for j in range(1, counts.size):
        if counts[j] < counts[at]:
            at = j
    return at


@loop(const(REFERENCES), REFERENCES, REFERENCES, const(KEYS), KEYS, NUMBERS, const(NUMBERS))
def use_rows(rows, headers, first, records_keys, hot_keys, hot_counts, sizes):
    """Count a use of each row at a time; write those last used until a cut to `first`, and return how many."""
    # A row used more often than the smallest of `hot_counts` replaces that entry, with its key.
    stride, clock, cut = sizes[0], _u32(sizes[1]), _u32(sizes[2])
    firsts = 0
    at, least = 0, _i64(0xFFFFFFFF)
    if hot_counts.size > 0:
        at = _least(hot_counts)
        least = hot_counts[at]
    for i in range(rows.size):
        if i + 2 * AHEAD < rows.size:
            ahead(headers, _i64(rows[i + 2 * AHEAD]) * stride)
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


@loop(const(REFERENCES), const(VECTOR), const(REFERENCES), const(KEYS), REFERENCES, VECTOR, const(NUMBERS), const(KEYS))
def keep_rows(rows, records, headers, records_keys, image_of, images, sizes, next_key):
    """Copy to `images` records last used in a span, with keys from `next_key`, that a save lacks; -2 if not all fit."""
    stride, first, until, count, most = sizes[0], _u32(sizes[1]), _u32(sizes[2]), sizes[3], sizes[4]
    for i in range(rows.size):
        begin = _i64(rows[i]) * stride
        used = headers[begin + 3]
        if used < first or used > until or records_keys[begin // 2] < next_key[0] or image_of[rows[i]] != _u32(0):
            continue
        if count == most:
            return _i64(-2)
        copy_words(images, count * stride, records, begin, stride)
        count += 1
        image_of[rows[i]] = _u32(count)
    return count


@loop(const(REFERENCES), const(VECTOR), const(REFERENCES), const(VECTOR), VECTOR, const(NUMBERS))
def gather_records(rows, records, image_of, images, out, sizes):
    """Copy whole records, or their images if there are some, end to end."""
    stride = sizes[0]
    for i in range(rows.size):
        if i + AHEAD < rows.size:
            bring(records, _i64(rows[i + AHEAD]) * stride, stride)
            ahead(image_of, _i64(rows[i + AHEAD]))
        image = image_of[rows[i]]
        target = i * stride
        if image == _u32(0):
            copy_words(out, target, records, _i64(rows[i]) * stride, stride)
        else:
            copy_words(out, target, images, (_i64(image) - 1) * stride, stride)


@loop(const(REFERENCES), const(VECTOR), VECTOR, const(NUMBERS), const(NUMBERS))
def gather_rows(rows, records, values, parts, sizes):
    """Copy parts of records to a vector: the first part of all rows, then the second of all, and so on."""
    stride = sizes[0]
    for i in range(rows.size):
        if i + AHEAD < rows.size:
            bring(records, _i64(rows[i + AHEAD]) * stride, stride)
        source = _i64(rows[i]) * stride + HEADER_WORDS
        begin = 0
        for p in range(parts.size):
            length = parts[p]
            copy_words(values, begin + i * length, records, source, length)
            source += length
            begin += rows.size * length


@loop(const(REFERENCES), VECTOR, const(VECTOR), const(NUMBERS), const(NUMBERS))
def scatter_rows(rows, records, values, parts, sizes):
    """Copy parts of records back from a vector of `gather_rows`."""
    stride = sizes[0]
    for i in range(rows.size):
        if i + AHEAD < rows.size:
            bring(records, _i64(rows[i + AHEAD]) * stride, stride)
        target = _i64(rows[i]) * stride + HEADER_WORDS
        begin = 0
        for p in range(parts.size):
            length = parts[p]
            copy_words(records, target, values, begin + i * length, length)
            target += length
            begin += rows.size * length
