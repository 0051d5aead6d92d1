"""int8 encoding of gradients on a GPU, bit-identical to `compiled.to_int8`, with error feedback as in `feedback`.

Residues stay on the GPU. A push in flight holds those of its blocks; each shard's answer decides the residue that is
returned. All kernels run on one stream, in the order of the host's calls. Knows no socket.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from parashard.encodings.encoding import INT8_SCALE_LARGEST
from parashard.process.cuda_code import EXACT, OPTIONS
from parashard.process.logs import log
from parashard.protocol.messages import INT8_BLOCK_ELEMENTS

Table = npt.NDArray[np.int64]
_LARGEST = repr(float(np.finfo(np.float32).max))
_SCALE_SMALLEST = repr(float(np.finfo(np.float32).tiny))
_SCALE_LARGEST = repr(float(INT8_SCALE_LARGEST))

BITS = """
#ifdef __CUDACC__
__device__ unsigned bits_of(float x) { return __float_as_uint(x); }
__device__ float float_of(unsigned x) { return __uint_as_float(x); }
#else
__device__ unsigned bits_of(float x) { unsigned bits; __builtin_memcpy(&bits, &x, 4); return bits; }
__device__ float float_of(unsigned x) { float value; __builtin_memcpy(&value, &x, 4); return value; }
#endif
"""

TO_INT8 = f"""
unsigned largest = 0;
for (long long j = 0; j < length; ++j) {{
    float before = residue[kept + j];
    float x = exact_sum(run[begin + j], present ? before : 0.0f);
    if (x > {_LARGEST}f) x = {_LARGEST}f;
    if (x < -{_LARGEST}f) x = -{_LARGEST}f;
    taken[kept + j] = before;
    left[kept + j] = x;
    unsigned magnitude = bits_of(x) & 0x7FFFFFFFu;
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
had = present;
present = 0;
"""
"""For one block: compute corrected gradient, scale, codes and encoding error, and keep the previous residue."""

SETTLE = """
if (of_shard == shard && (applied || had)) {
    for (long long j = kept; j < kept + length; ++j) {
        residue[j] = present ? exact_sum(residue[j], source[j]) : source[j];
    }
    present = 1;
}
"""
"""For one block: add the returned residue to those that later pushes have returned already."""


def blocks_of(begin: int, elements: int, begin_bytes: int, shard: int) -> Table:
    """Return the blocks of a partition as a table, with a column for each block.

    Its rows: begin in the run, length, place of the scale among the words to send, place of the codes in bytes, shard.
    All scales come first, then all codes.
    """
    at = np.arange(0, elements, INT8_BLOCK_ELEMENTS)
    lengths, places = np.minimum(INT8_BLOCK_ELEMENTS, elements - at), np.arange(len(at))
    codes = begin_bytes + 4 * len(at) + at
    return np.stack([begin + at, lengths, begin_bytes // 2 + 2 * places, codes, np.full(len(at), shard)])


class HeldResidues:
    """Memory of the GPU for one push: the residues that it has taken, and its encoding errors."""

    def __init__(self, cupy: Any, elements: int, blocks: int) -> None:
        self.residue, self.left = cupy.empty(elements, np.float32), cupy.empty(elements, np.float32)
        self.had = cupy.empty(blocks, np.uint8)
        self.runs: list[slice] = []  # of blocks that are encoded
        self.open: set[int] = set()  # shards whose answer is not known


class Int8OnGpu:
    """The blocks of some variables, and their residues. Any thread may settle.

    Parameters
    ----------
    cupy : module
    blocks : mapping of str to ndarray
        By variable, as `blocks_of` returns them.
    use : callable
        Returns a context in which the device and the stream are current.
    """

    def __init__(self, cupy: Any, blocks: Mapping[str, Table], use: Callable[[], AbstractContextManager[Any]]) -> None:
        self._cupy, self._use = cupy, use
        self._lock = threading.RLock()  # reentrant: a push may be dropped, and so settled, at any point
        ends = np.cumsum([of_variable.shape[1] for of_variable in blocks.values()]).tolist()
        self._runs = {name: slice(end - blocks[name].shape[1], end) for name, end in zip(blocks, ends, strict=True)}
        self._shards = {name: set(of_variable[4].tolist()) for name, of_variable in blocks.items()}
        begins, lengths, scales, codes, shards = np.concatenate(list(blocks.values()), axis=1)
        self._elements, self._blocks = int(lengths.sum()), len(lengths)
        kept = np.cumsum(lengths) - lengths
        self._encoded = tuple(cupy.asarray(np.array(table)) for table in (begins, lengths, kept, scales, codes))
        self._settled = tuple(cupy.asarray(np.array(table)) for table in (lengths, kept, shards))
        self._residue = cupy.zeros(self._elements, np.float32)
        self._present = cupy.zeros(self._blocks, np.uint8)
        self._to_int8 = self._kernel(
            "to_int8",
            "raw float32 run, raw float32 residue, int64 begin, int64 length, int64 kept, int64 scale_at, "
            "int64 code_at",
            "raw float32 taken, raw float32 left, raw uint16 words, raw int8 codes, uint8 present, uint8 had",
            TO_INT8,
        )
        self._give = self._kernel(
            "settle",
            "raw float32 source, int64 length, int64 kept, int64 of_shard, int64 shard, uint8 applied, uint8 had",
            "raw float32 residue, uint8 present",
            SETTLE,
        )

    def _kernel(self, name: str, inputs: str, outputs: str, operation: str) -> Any:
        return self._cupy.ElementwiseKernel(
            inputs,
            outputs,
            operation,
            f"parashard_{name}",
            preamble=EXACT + BITS,
            options=OPTIONS,
            no_return=True,
        )

    def new(self) -> HeldResidues:
        """Return memory for a push."""
        return HeldResidues(self._cupy, self._elements, self._blocks)

    def encode(self, run: Any, words: Any, names: Collection[str], taken: HeldResidues) -> None:
        """Encode the gradients of some variables plus their residues, which the push then holds."""
        with self._lock, self._use():
            taken.runs = []
            taken.open = set().union(*(self._shards[name] for name in self._shards if name in names))
            for of in _joined(self._runs[name] for name in self._runs if name in names):
                tables = [table[of] for table in self._encoded]
                outputs = taken.residue, taken.left, words, words.view(np.int8), self._present[of], taken.had[of]
                self._to_int8(run, self._residue, *tables, *outputs)
                taken.runs.append(of)  # not before: a failed call took no residue to return

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
                        lengths, kept, shards = (table[of] for table in self._settled)
                        given = source, lengths, kept, shards, shard, np.uint8(applied), taken.had[of]
                        self._give(*given, self._residue, self._present[of])
            except Exception as error:  # noqa: BLE001  # such as a context that is lost, and residues with it
                log.warning("residue-lost", shard=shard, error=str(error))

    def settle_when_dropped(self, push: object, taken: HeldResidues) -> None:
        """Return a push's residues once it is dropped, for the shards without an answer."""
        weakref.finalize(push, self._give_back, taken).atexit = False

    def _give_back(self, taken: HeldResidues) -> None:
        for shard in sorted(taken.open):
            self.settle(taken, shard, applied=False)


def _joined(runs: Iterable[slice]) -> list[slice]:
    """Merge adjacent ones of ascending runs."""
    joined: list[slice] = []
    for run in runs:
        joins = bool(joined) and joined[-1].stop == run.start
        joined.append(slice(joined.pop().start, run.stop) if joins else run)
    return joined
