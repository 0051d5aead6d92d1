"""Encodings with error feedback on a GPU, bit-identical to `compiled` and `feedback`: int8, and top-k by `gpu_topk`.

Residues stay on the GPU. A push in flight holds those of its blocks; each shard's answer decides the residue that is
returned. All kernels run on one stream, in the order of the host's calls. Knows no socket.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from parashard.encodings.encoding import INT8_SCALE_LARGEST
from parashard.encodings.gpu_blocks import EncodedPiece, Numbers, joined, runs_of
from parashard.encodings.gpu_topk import TopkOnGpu
from parashard.process.cuda_code import elementwise
from parashard.process.logs import log

_LARGEST = repr(float(np.finfo(np.float32).max))
_SCALE_SMALLEST = repr(float(np.finfo(np.float32).tiny))
_SCALE_LARGEST = repr(float(INT8_SCALE_LARGEST))

CORRECT = f"""
for (long long j = 0; j < length; ++j) {{
    float before = residue[kept + j];
    float x = exact_sum(run[begin + j], present ? before : 0.0f);
    if (x > {_LARGEST}f) x = {_LARGEST}f;
    if (x < -{_LARGEST}f) x = -{_LARGEST}f;
    taken[kept + j] = before;
    left[kept + j] = x;
}}
had = present;
present = 0;
"""
"""For one block: compute the corrected gradient, and keep the previous residue."""

TO_INT8 = f"""
unsigned largest = 0;
for (long long j = kept; j < kept + length; ++j) {{
    unsigned magnitude = bits_of(left[j]) & 0x7FFFFFFFu;
    if (magnitude > largest) largest = magnitude;
}}
float scale = exact_quotient(float_of(largest), 127.0f);
if (scale > {_SCALE_LARGEST}f) scale = {_SCALE_LARGEST}f;
if (scale < {_SCALE_SMALLEST}f) scale = 0.0f;
words[scale_at] = bits_of(scale) & 0xFFFFu;
words[scale_at + 1] = bits_of(scale) >> 16;
for (long long j = 0; j < length; ++j) {{
    float code = 0.0f;
    if (scale != 0.0f) {{
        float x = left[kept + j];
        code = rintf(exact_quotient(x, scale));
        if (code < -127.0f) code = -127.0f;
        if (code > 127.0f) code = 127.0f;
        left[kept + j] = exact_difference(x, exact_product(code, scale));
    }}
    codes[code_at + j] = (signed char)(int)code;
}}
"""
"""For one block: from the corrected gradient compute scale and codes; what they leave out replaces it."""

SETTLE = """
if (of_shard == shard && (applied || had)) {
    for (long long j = kept; j < kept + length; ++j) {
        residue[j] = present ? exact_sum(residue[j], source[j]) : source[j];
    }
    present = 1;
}
"""
"""For one block: add the returned residue to those that later pushes have returned already."""


class HeldResidues:
    """Memory of the GPU for one push: the residues that it has taken, and its encoding errors."""

    def __init__(self, cupy: Any, elements: int, blocks: int) -> None:
        self.residue, self.left = cupy.empty(elements, np.float32), cupy.empty(elements, np.float32)
        self.had = cupy.empty(blocks, np.uint8)
        self.runs: list[slice] = []  # of blocks that are encoded
        self.open: set[int] = set()  # shards whose answer is not known


class FeedbackOnGpu:
    """The blocks of some variables, and their residues. Any thread may settle.

    Parameters
    ----------
    cupy : module
    pieces : mapping of str to sequence of EncodedPiece
        Every partition of each variable.
    use : callable
        Returns a context in which the device and the stream are current.
    """

    def __init__(
        self, cupy: Any, pieces: Mapping[str, Sequence[EncodedPiece]], use: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._cupy, self._use = cupy, use
        self._lock = threading.RLock()  # reentrant: a push may be dropped, and so settled, at any point
        int8 = {name: of_variable for name, of_variable in pieces.items() if of_variable[0].is_int8}
        topk = {name: of_variable for name, of_variable in pieces.items() if name not in int8}
        self._shards = {name: {piece.shard for piece in of_variable} for name, of_variable in pieces.items()}
        self._runs = runs_of({
            name: sum(len(piece.offsets) for piece in of_variable) for name, of_variable in (int8 | topk).items()
        })  # fmt: skip
        self._in_int8 = int8.keys()
        every = [piece for of_variable in (int8 | topk).values() for piece in of_variable]
        begins = np.concatenate([piece.begin + piece.offsets for piece in every])
        lengths = np.concatenate([piece.lengths for piece in every])
        shards = np.repeat([piece.shard for piece in every], [len(piece.offsets) for piece in every])
        kept = np.cumsum(lengths) - lengths
        self._elements, self._blocks = int(lengths.sum()), len(lengths)
        self._begins, self._lengths, self._kept, self._of_shard = map(cupy.asarray, (begins, lengths, kept, shards))
        places = [_places_in_int8(piece) for of_variable in int8.values() for piece in of_variable]
        self._places = [cupy.asarray(np.concatenate(of_blocks)) for of_blocks in zip(*places, strict=True)]
        first = self._runs[next(iter(topk))].start if topk else self._blocks
        self._topk = TopkOnGpu(cupy, topk, kept[first:]) if topk else None
        self._residue = cupy.zeros(self._elements, np.float32)
        self._present = cupy.zeros(self._blocks, np.uint8)
        self._correct = elementwise(
            cupy, "correct",
            "raw float32 run, raw float32 residue, int64 begin, int64 length, int64 kept",
            "raw float32 taken, raw float32 left, uint8 present, uint8 had", CORRECT,
        )  # fmt: skip
        self._to_int8 = elementwise(
            cupy, "to_int8", "int64 length, int64 kept, int64 scale_at, int64 code_at",
            "raw float32 left, raw uint16 words, raw int8 codes", TO_INT8,
        )  # fmt: skip
        self._give = elementwise(
            cupy, "settle",
            "raw float32 source, int64 length, int64 kept, int64 of_shard, int64 shard, uint8 applied, uint8 had",
            "raw float32 residue, uint8 present", SETTLE,
        )  # fmt: skip

    def new(self) -> HeldResidues:
        """Return memory for a push."""
        return HeldResidues(self._cupy, self._elements, self._blocks)

    def encode(self, run: Any, words: Any, names: Collection[str], taken: HeldResidues) -> None:
        """Encode the gradients of some variables plus their residues, which the push then holds."""
        with self._lock, self._use():
            taken.runs = []
            taken.open = set().union(*(self._shards[name] for name in self._shards if name in names))
            for of in joined(self._runs[name] for name in self._runs if name in names):
                tables = self._begins[of], self._lengths[of], self._kept[of]
                outputs = taken.residue, taken.left, self._present[of], taken.had[of]
                self._correct(run, self._residue, *tables, *outputs)
                taken.runs.append(of)  # not before: a failed call took no residue to return
            for of in joined(self._runs[name] for name in self._in_int8 if name in names):
                places = [place[of] for place in self._places]
                self._to_int8(self._lengths[of], self._kept[of], *places, taken.left, words, words.view(np.int8))
            if self._topk is not None:
                self._topk.encode(taken.left, words.view(np.uint32), names)

    def settle(self, taken: HeldResidues, shard: int, applied: bool) -> None:
        """Record the outcome of a push to a shard, as `GradientEncoder.settle` does; later ones are ignored."""
        with self._lock:
            if shard not in taken.open:
                return
            taken.open.remove(shard)
            source = taken.left if applied else taken.residue
            try:
                with self._use():
                    for of in taken.runs:
                        tables = self._lengths[of], self._kept[of], self._of_shard[of]
                        given = source, *tables, shard, np.uint8(applied), taken.had[of]
                        self._give(*given, self._residue, self._present[of])
            except Exception as error:  # noqa: BLE001  # such as a context that is lost, and residues with it
                log.warning("residue-lost", shard=shard, error=str(error))

    def settle_when_dropped(self, push: object, taken: HeldResidues) -> None:
        """Return a push's residues once it is dropped, for the shards without an answer."""
        weakref.finalize(push, self._give_back, taken).atexit = False

    def _give_back(self, taken: HeldResidues) -> None:
        for shard in sorted(taken.open):
            self.settle(taken, shard, applied=False)


def _places_in_int8(piece: EncodedPiece) -> tuple[Numbers, Numbers]:
    """Return where each block's scale is among the words to send, and where its codes are among the bytes."""
    # All scales come first, then all codes.
    number = np.arange(len(piece.offsets))
    return piece.begin_bytes // 2 + 2 * number, piece.begin_bytes + 4 * len(number) + piece.offsets
