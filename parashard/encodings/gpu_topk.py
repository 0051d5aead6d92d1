"""Top-k on a GPU, bit-identical to `compiled.to_topk`: the largest elements of a partition, by magnitude.

A partition is divided into blocks, each of which one thread reads in order. Magnitudes of finite floats are ordered as
their bits, so the smallest magnitude to send is found digit by digit: blocks count the digits of the elements whose
higher digits are known, and the digit follows from the sums of the counts. Sums are of integers: their order does not
matter. Then the blocks' numbers of elements to send give each block its place among the payload's. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from parashard.encodings.gpu_blocks import EncodedPiece, Numbers, joined, runs_of
from parashard.process.cuda_code import elementwise

DIGITS = 256
SHIFTS = (24, 16, 8, 0)  # of the digits, the highest first

ADD = """
#ifdef __CUDACC__
__device__ void add_to(unsigned &sum, unsigned count) { atomicAdd(&sum, count); }
#else
__device__ void add_to(unsigned &sum, unsigned count) { sum += count; }
#endif
"""

COUNT = f"""
unsigned counts[{DIGITS}];
for (int digit = 0; digit < {DIGITS}; ++digit) counts[digit] = 0;
unsigned known = threshold[part] >> shift;
for (long long j = kept; j < kept + length; ++j) {{
    unsigned upper = (bits_of(left[j]) & 0x7FFFFFFFu) >> shift;
    if (shift == {SHIFTS[0]} || upper >> 8 == known >> 8) ++counts[upper & {DIGITS - 1}u];
}}
for (int digit = 0; digit < {DIGITS}; ++digit) {{
    if (counts[digit]) add_to(sums[{DIGITS} * part + digit], counts[digit]);
}}
"""
"""For one block: count the digits, at a shift, of the elements that have the known ones."""

CHOOSE = f"""
if (shift == {SHIFTS[0]}) {{
    threshold = 0;
    ties = count;
}}
bool chosen = false;
for (int digit = {DIGITS - 1}; digit >= 0; --digit) {{
    unsigned sum = sums[{DIGITS} * part + digit];
    sums[{DIGITS} * part + digit] = 0;
    if (chosen) continue;
    if (sum >= ties) {{
        threshold |= (unsigned)digit << shift;
        chosen = true;
    }} else {{
        ties -= sum;
    }}
}}
"""
"""For one partition: choose the next digit of the threshold; `ties` elements that have it are sent."""

TALLY = """
above = 0;
equal = 0;
for (long long j = kept; j < kept + length; ++j) {
    unsigned magnitude = bits_of(left[j]) & 0x7FFFFFFFu;
    above += magnitude > threshold[part];
    equal += magnitude == threshold[part];
}
"""
"""For one block: count the elements above the threshold, and those that equal it."""

PLACE = """
unsigned at = 0, missing = ties;
for (long long block = first; block < first + blocks; ++block) {
    if (equal[block] > missing) equal[block] = missing;
    missing -= equal[block];
    begin[block] = at;
    at += above[block] + equal[block];
}
"""
"""For one partition: the place of each block's elements; of those that equal the threshold the first are sent."""

FILL = """
unsigned at = begin, missing = equal;
for (long long j = 0; j < length; ++j) {
    unsigned bits = bits_of(left[kept + j]), magnitude = bits & 0x7FFFFFFFu;
    if (magnitude < threshold[part]) continue;
    if (magnitude == threshold[part]) {
        if (!missing) continue;
        --missing;
    }
    words[words_at[part] + at] = (unsigned)(offset + j);
    words[words_at[part] + count[part] + at] = bits;
    left[kept + j] = 0.0f;
    ++at;
}
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
        self._threshold, self._ties = cupy.empty(parts, np.uint32), cupy.empty(parts, np.uint32)
        self._sums = cupy.zeros(DIGITS * parts, np.uint32)
        self._above, self._equal, self._begin = (cupy.empty(blocks, np.uint32) for _ in range(3))
        of_block = "raw float32 left, int64 length, int64 kept, int64 part, raw uint32 threshold"
        self._count = elementwise(
            cupy, "topk_count", f"{of_block}, int32 shift", "raw uint32 sums", COUNT, preamble=ADD
        )
        self._choose = elementwise(
            cupy, "topk_choose", "int64 part, int64 count, int32 shift",
            "raw uint32 sums, uint32 threshold, uint32 ties", CHOOSE,
        )  # fmt: skip
        self._tally = elementwise(cupy, "topk_tally", of_block, "uint32 above, uint32 equal", TALLY)
        self._place = elementwise(
            cupy, "topk_place", "int64 first, int64 blocks, uint32 ties, raw uint32 above",
            "raw uint32 equal, raw uint32 begin", PLACE,
        )  # fmt: skip
        self._fill = elementwise(
            cupy, "topk_fill",
            "int64 length, int64 kept, int64 part, int64 offset, raw uint32 threshold, uint32 equal, uint32 begin, "
            "raw int64 count, raw int64 words_at",
            "raw float32 left, raw uint32 words", FILL,
        )  # fmt: skip

    def encode(self, left: Any, words: Any, names: Collection[str]) -> None:
        """Write the payloads of some variables to words of 32 bits, and zeros in place of what is sent."""
        pairs = zip(
            joined(of for name, of in self._blocks_of.items() if name in names),
            joined(of for name, of in self._parts_of.items() if name in names),
            strict=True,
        )
        for blocks, parts in pairs:
            lengths, kept, part, offsets = (table[blocks] for table in self._blocks)
            number, first, size, count, _ = (table[parts] for table in self._parts)
            of_block = left, lengths, kept, part, self._threshold
            above, equal, begin = (array[blocks] for array in (self._above, self._equal, self._begin))
            threshold, ties = self._threshold[parts], self._ties[parts]
            for shift in SHIFTS:
                self._count(*of_block, shift, self._sums)
                self._choose(number, count, shift, self._sums, threshold, ties)
            self._tally(*of_block, above, equal)
            self._place(first, size, ties, self._above, self._equal, self._begin)
            self._fill(lengths, kept, part, offsets, self._threshold, equal, begin, *self._parts[3:], left, words)
