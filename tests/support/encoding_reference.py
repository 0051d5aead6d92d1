"""The arithmetic of the encodings in NumPy: the readable specification of the compiled kernels, bit for bit.

Conventions, the same for all: arrays are 1-D and contiguous; `values` is the float32 gradient and finite when it is
encoded; the function fills every element of the arrays that it is to write (named last) and changes no other. Where
there is error feedback, what is encoded is the *corrected* gradient, values + residue, cut to what float32 can hold,
and `left` becomes what its encoding leaves out (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from parashard.plan.variables import Float32s
from parashard.protocol.messages import INT8_BLOCK_ELEMENTS

Codes16 = npt.NDArray[np.uint16]
Codes8 = npt.NDArray[np.int8]
Indices = npt.NDArray[np.uint32]

LARGEST = np.finfo(np.float32).max
FLOAT16_LARGEST = np.float32(65504.0)
BFLOAT16_LARGEST_BITS = np.uint32(0x7F7F)
INT8_SCALE_SMALLEST = np.finfo(np.float32).tiny
INT8_SCALE_LARGEST = np.float32(LARGEST / 128)  # exact; no code times it is beyond float32

_u32 = np.uint32


def to_bfloat16(values: Float32s, codes: Codes16) -> None:
    """Write the upper halves of the values, rounded to nearest, ties to even; beyond 3.39e38 the largest there is."""
    bits = values.view(_u32)
    magnitude = bits & _u32(0x7FFFFFFF)
    rounded = (magnitude + _u32(0x7FFF) + ((magnitude >> _u32(16)) & _u32(1))) >> _u32(16)
    codes[:] = np.minimum(rounded, BFLOAT16_LARGEST_BITS) | ((bits >> _u32(16)) & _u32(0x8000))


def from_bfloat16(codes: Codes16, values: Float32s) -> bool:
    """Write the values, exactly; return whether all are finite."""
    values.view(_u32)[:] = codes.astype(_u32) << _u32(16)
    return bool(np.isfinite(values).all())


def to_float16(values: Float32s, codes: Codes16) -> None:
    """Write the nearest binary16, ties to even; beyond 65504 the largest there is.

    The shard would refuse an infinity, and the job would stop; saturation loses nothing useful of such a gradient.
    """
    codes.view(np.float16)[:] = np.clip(values, -FLOAT16_LARGEST, FLOAT16_LARGEST)


def from_float16(codes: Codes16, values: Float32s) -> bool:
    """Write the values, exactly; return whether all are finite."""
    values[:] = codes.view(np.float16)
    return bool(np.isfinite(values).all())


def to_int8(values: Float32s, residue: Float32s, scales: Float32s, codes: Codes8, left: Float32s) -> None:
    """Write codes of -127 to 127, each to be multiplied by the scale of its block of 256: max|x| / 127.

    A code is x / scale, rounded half to even, so that |left| <= scale / 2 and a little rounding. A block with a scale
    below float32's normal numbers has scale 0 and goes to the residue whole: x / scale would be imprecise or infinite.
    Only in a block with a value beyond 127/128 of float32's range is the scale less, and |left| up to 2.7e36.
    """
    corrected = _corrected(values, residue)
    for block in range(scales.size):
        run = slice(block * INT8_BLOCK_ELEMENTS, (block + 1) * INT8_BLOCK_ELEMENTS)
        x = corrected[run]
        scale = np.minimum(np.abs(x).max() / np.float32(127), INT8_SCALE_LARGEST)
        if scale < INT8_SCALE_SMALLEST:
            scale = np.float32(0)
            code = np.zeros_like(x)
        else:
            code = np.clip(np.rint(x / scale), -127, 127)
        scales[block] = scale
        codes[run] = code
        left[run] = x - code * scale


def from_int8(scales: Float32s, codes: Codes8, values: Float32s) -> None:
    """Write codes times scales; finite where every scale is in [0, INT8_SCALE_LARGEST]."""
    values[:] = codes.astype(np.float32) * np.repeat(scales, INT8_BLOCK_ELEMENTS)[: codes.size]


def to_int8_rows(values: Float32s, scales: Float32s, codes: Codes8) -> None:
    """Write codes of -127 to 127, each to be multiplied by its row's scale, max|x| / 127; nothing is kept of the rest.

    As `to_int8`, with a row of values.size / scales.size elements in the place of a block: a row is a function of its
    own values alone, whatever rows are encoded beside it. One with a scale below float32's normal numbers becomes 0.
    """
    rows = values.reshape(scales.size, values.size // max(1, scales.size))
    scales[:] = np.minimum(np.abs(rows).max(1, initial=0) / np.float32(127), INT8_SCALE_LARGEST)
    scales[scales < INT8_SCALE_SMALLEST] = 0
    divisors = np.where(scales == 0, np.float32(np.inf), scales)[:, None]
    codes[:] = np.clip(np.rint(rows / divisors), -127, 127).reshape(-1)


def from_int8_rows(scales: Float32s, codes: Codes8, values: Float32s) -> None:
    """Write codes times their rows' scales; finite where every scale is in [0, INT8_SCALE_LARGEST]."""
    rows = values.reshape(scales.size, values.size // max(1, scales.size))
    rows[:] = codes.reshape(rows.shape).astype(np.float32) * scales[:, None]


def to_topk(values: Float32s, residue: Float32s, indices: Indices, kept: Float32s, left: Float32s) -> None:
    """Write the `kept.size` largest elements by magnitude, of equal ones the first, in the order of their indices."""
    corrected = _corrected(values, residue)
    largest = np.argsort(-np.abs(corrected), kind="stable")[: kept.size]
    indices[:] = np.sort(largest)
    kept[:] = corrected[indices]
    left[:] = corrected
    left[indices] = 0


def from_topk(indices: Indices, kept: Float32s, values: Float32s) -> None:
    """Write `kept` where `indices` say, which are ascending and in range, and zero elsewhere."""
    values[:] = 0
    values[indices] = kept


def _corrected(values: Float32s, residue: Float32s) -> Float32s:
    with np.errstate(over="ignore"):
        corrected: Float32s = np.clip(values + residue, -LARGEST, LARGEST)
    return corrected
