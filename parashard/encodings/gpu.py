"""Gradients encoded on a GPU, with the bits of `compiled`: what leaves it is what is sent.

A variable in bfloat16 or float16 leaves as its codes. All others leave in float32: what has a residue is encoded on the
host, where its pushes settle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from parashard.plan.flat import ALIGNMENT_BYTES, FlatLayout
from parashard.plan.variables import Variable
from parashard.process.cuda_code import EXACT, OPTIONS

Words = npt.NDArray[np.uint16]
_CHUNK = ALIGNMENT_BYTES // 4  # elements: all those of a chunk of a run are of one variable
_FLOAT32, _BFLOAT16, _FLOAT16 = 1, 2, 3  # how a chunk leaves; 0: not at all
_HOW = {"bfloat16": _BFLOAT16, "float16": _FLOAT16}

TO_CODES = """
#ifdef __CUDACC__
__device__ unsigned bits_of(float x) { return __float_as_uint(x); }
__device__ float float_of(unsigned x) { return __uint_as_float(x); }
#else
__device__ unsigned bits_of(float x) { unsigned bits; __builtin_memcpy(&bits, &x, 4); return bits; }
__device__ float float_of(unsigned x) { float value; __builtin_memcpy(&value, &x, 4); return value; }
#endif
__device__ unsigned to_bfloat16(unsigned bits) {
    unsigned magnitude = bits & 0x7FFFFFFFu;
    unsigned rounded = (magnitude + 0x7FFFu + ((magnitude >> 16) & 1u)) >> 16;
    return (rounded < 0x7F7Fu ? rounded : 0x7F7Fu) | ((bits >> 16) & 0x8000u);
}
__device__ unsigned to_float16(unsigned bits) {
    unsigned magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x477FE000u) magnitude = 0x477FE000u;
    unsigned code;
    if (magnitude >= 0x38800000u) {
        code = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    } else {
        code = bits_of(exact_sum(float_of(magnitude), 0.5f)) - 0x3F000000u;
    }
    return code | ((bits >> 16) & 0x8000u);
}
"""
"""`compiled.to_bfloat16` and `compiled.to_float16`, of one number."""

WRITE = f"""
long long chunk = i / {_CHUNK}, at = begins[chunk], within = i % {_CHUNK};
unsigned bits = bits_of(value);
if (how[chunk] == {_FLOAT32}) {{
    words[at + 2 * within] = bits & 0xFFFFu;
    words[at + 2 * within + 1] = bits >> 16;
}} else if (how[chunk] == {_BFLOAT16}) {{
    words[at + within] = to_bfloat16(bits);
}} else if (how[chunk] == {_FLOAT16}) {{
    words[at + within] = to_float16(bits);
}}
"""


def leaves_shorter(variables: Iterable[Variable]) -> bool:
    """Tell whether any gradient leaves a GPU in fewer bytes than it has there."""
    return any(variable.encoding in _HOW and not variable.frozen for variable in variables)


class LeavingWords:
    """Where each variable's gradient lies, in words of 16 bits, in what leaves a GPU; frozen ones do not leave.

    Attributes
    ----------
    words : int
        Length of what leaves.
    """

    def __init__(self, cupy: Any, layout: FlatLayout, variables: Mapping[str, Variable]) -> None:
        chunks = -(-layout.elements // _CHUNK)
        how, begins, self.words = np.zeros(chunks, np.uint8), np.zeros(chunks, np.int64), 0
        self._places: dict[str, tuple[slice, bool, tuple[int, ...]]] = {}  # words, whether they are codes, shape
        for name, (place, shape) in layout.places.items():
            if variables[name].frozen:
                continue
            of_variable = slice(place.start // _CHUNK, -(-place.stop // _CHUNK))
            each = 1 if variables[name].encoding in _HOW else 2
            how[of_variable] = _HOW.get(variables[name].encoding, _FLOAT32)
            count = of_variable.stop - of_variable.start
            begins[of_variable] = self.words + each * _CHUNK * np.arange(count)
            stop = self.words + each * (place.stop - place.start)
            self._places[name] = slice(self.words, stop), each == 1, shape
            self.words += each * _CHUNK * count
        self._how, self._begins = cupy.asarray(how), cupy.asarray(begins)
        self._write = cupy.ElementwiseKernel(
            "raw uint8 how, raw int64 begins, float32 value",
            "raw uint16 words",
            WRITE,
            "parashard_leaving",
            preamble=EXACT + TO_CODES,
            options=OPTIONS,
            no_return=True,
        )

    def write(self, run: Any, words: Any) -> None:
        """Write what leaves of a run of gradients; launched on the calling thread's current stream."""
        self._write(self._how, self._begins, run, words)

    def over(self, words: Words) -> dict[str, npt.NDArray[Any]]:
        """Return the variables as views of what has left: float32, or uint16 where they are codes."""
        return {
            name: (words[place] if codes else words[place].view(np.float32)).reshape(shape)
            for name, (place, codes, shape) in self._places.items()
        }
