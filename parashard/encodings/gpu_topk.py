"""Top-k on a GPU, bit-identical to `compiled.to_topk`: the largest elements of a partition, by magnitude.

A partition is divided into blocks, each of which one thread reads in order. Magnitudes of finite floats are ordered as
their bits, so the smallest magnitude to send is found digit by digit: blocks count the values of a digit, of the
elements whose higher digits are known, and the digit follows from the sums of the counts. Sums are of integers: their
order does not matter. Then the blocks' numbers of elements to send give each block its place among the payload's.
Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from parashard.encodings.gpu_blocks import EncodedPiece, Numbers, joined, runs_of
from parashard.process.cuda_code import elementwise

DIGITS = 8  # of a magnitude, in base 16
BASE = 16

FUNCTIONS = f"""
__device__ unsigned magnitude_of(float x) {{ return bits_of(x) & 0x7FFFFFFFu; }}
// Returns the first digits of the smallest magnitude to send; `ties` of the elements that begin with them are sent.
__device__ unsigned chosen(const unsigned *sums, unsigned count, int digits, unsigned &ties) {{
    unsigned found = 0;
    ties = count;
    for (int digit = 0; digit < digits; ++digit) {{
        unsigned value = {BASE - 1};
        while (value && sums[{BASE} * digit + value] < ties) ties -= sums[{BASE} * digit + value--];
        found = found * {BASE} + value;
    }}
    return found;
}}
#ifdef __CUDACC__
__device__ void add_to(unsigned &sum, unsigned count) {{ atomicAdd(&sum, count); }}
#else
__device__ void add_to(unsigned &sum, unsigned count) {{ sum += count; }}
#endif
"""

COUNT = f"""
unsigned counts[{BASE}], ties;
for (int value = 0; value < {BASE}; ++value) counts[value] = 0;
long long at = {BASE * DIGITS} * part;
unsigned known = chosen(&sums[at], (unsigned)count[part], digit, ties);
int shift = 4 * ({DIGITS - 1} - digit);
for (long long j = kept; j < kept + length; ++j) {{
    unsigned upper = magnitude_of(left[j]) >> shift;
    if (upper / {BASE} == known) ++counts[upper % {BASE}];
}}
for (int value = 0; value < {BASE}; ++value) {{
    if (counts[value]) add_to(sums[at + {BASE} * digit + value], counts[value]);
}}
"""
"""For one block: count the values of a digit, of the elements that begin with the digits before it."""

TALLY = f"""
unsigned more = 0, same = 0, ties;
unsigned threshold = chosen(&sums[{BASE * DIGITS} * part], (unsigned)count[part], {DIGITS}, ties);
for (long long j = kept; j < kept + length; ++j) {{
    unsigned magnitude = magnitude_of(left[j]);
    more += magnitude > threshold;
    same += magnitude == threshold;
}}
above = more;
equal = same;
"""
"""For one block: count the elements above the threshold, and those that equal it."""

PLACE = f"""
unsigned at = 0, missing;
chosen(&sums[{BASE * DIGITS} * part], (unsigned)count, {DIGITS}, missing);
for (long long block = first; block < first + blocks; ++block) {{
    unsigned sent = equal[block] < missing ? equal[block] : missing;
    equal[block] = sent;
    begin[block] = at;
    missing -= sent;
    at += above[block] + sent;
}}
"""
"""For one partition: the place of each block's elements; of those that equal the threshold the first are sent."""

FILL = f"""
unsigned at = begin, missing = equal, ties;
unsigned threshold = chosen(&sums[{BASE * DIGITS} * part], (unsigned)count[part], {DIGITS}, ties);
for (long long j = 0; j < length; ++j) {{
    unsigned bits = bits_of(left[kept + j]), magnitude = bits & 0x7FFFFFFFu;
    if (magnitude < threshold) continue;
    if (magnitude == threshold) {{
        if (!missing) continue;
        --missing;
    }}
    words[words_at[part] + at] = (unsigned)(offset + j);
    words[words_at[part] + count[part] + at] = bits;
    left[kept + j] = 0.0f;
    ++at;
}}
"""
"""For one block: send indices and values; what they leave out stays."""


class TopkOnGpu:
    """The top-k partitions of some variables. All calls are on one stream.

    Parameters
    ----------
    cupy : module
    variables : mapping of str to sequence of EncodedPiece
        Every partition of each variable.
    kept : ndarray of int64, shape (blocks,)
        The place of each of their blocks in the memory of corrected gradients.
    """

    def __init__(self, cupy: Any, variables: Mapping[str, Sequence[EncodedPiece]], kept: Numbers) -> None:
        every = [piece for of_variable in variables.values() for piece in of_variable]
        sizes = np.array([len(piece.offsets) for piece in every])
        blocks, parts = int(sizes.sum()), len(every)
        self._parts_of = runs_of({name: len(of_variable) for name, of_variable in variables.items()})
        self._blocks_of = runs_of({name: int(sizes[run].sum()) for name, run in self._parts_of.items()})
        lengths = np.concatenate([piece.lengths for piece in every])
        offsets = np.concatenate([piece.offsets for piece in every])
        of_blocks = lengths, kept, np.repeat(np.arange(parts), sizes), offsets
        counts, words_at = [piece.slice.kept for piece in every], [piece.begin_bytes // 4 for piece in every]
        of_parts = np.arange(parts), np.cumsum(sizes) - sizes, sizes, np.array(counts), np.array(words_at)
        self._blocks, self._parts = list(map(cupy.asarray, of_blocks)), list(map(cupy.asarray, of_parts))
        self._sums = cupy.empty(DIGITS * BASE * parts, np.uint32)  # by partition, digit and value
        self._above, self._equal, self._begin = (cupy.empty(blocks, np.uint32) for _ in range(3))
        of_block = "raw float32 left, int64 length, int64 kept, int64 part, raw int64 count"
        self._count = elementwise(
            cupy, "topk_count", f"{of_block}, int32 digit", "raw uint32 sums", COUNT, preamble=FUNCTIONS
        )
        self._tally = elementwise(
            cupy, "topk_tally", f"{of_block}, raw uint32 sums", "uint32 above, uint32 equal", TALLY, preamble=FUNCTIONS
        )
        self._place = elementwise(
            cupy, "topk_place",
            "int64 part, int64 first, int64 blocks, int64 count, raw uint32 sums, raw uint32 above",
            "raw uint32 equal, raw uint32 begin", PLACE, preamble=FUNCTIONS,
        )  # fmt: skip
        self._fill = elementwise(
            cupy, "topk_fill",
            "int64 length, int64 kept, int64 part, int64 offset, raw int64 count, raw int64 words_at, "
            "raw uint32 sums, uint32 equal, uint32 begin",
            "raw float32 left, raw uint32 words", FILL, preamble=FUNCTIONS,
        )  # fmt: skip

    def encode(self, left: Any, words: Any, names: Collection[str]) -> None:
        """Write payloads of the named variables into `words` (uint32); elements of `left` that are sent become zero."""
        self._sums.fill(0)
        pairs = zip(
            joined(of for name, of in self._blocks_of.items() if name in names),
            joined(of for name, of in self._parts_of.items() if name in names),
            strict=True,
        )
        for blocks, parts in pairs:
            lengths, kept, part, offsets = (table[blocks] for table in self._blocks)
            above, equal, begin = (array[blocks] for array in (self._above, self._equal, self._begin))
            counts, words_at = self._parts[3:]
            of_block = left, lengths, kept, part, counts
            for digit in range(DIGITS):
                self._count(*of_block, digit, self._sums)
            self._tally(*of_block, self._sums, above, equal)
            self._place(*(table[parts] for table in self._parts[:4]), self._sums, self._above, self._equal, self._begin)
            self._fill(lengths, kept, part, offsets, counts, words_at, self._sums, equal, begin, left, words)
