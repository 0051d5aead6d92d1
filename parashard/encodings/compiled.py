"""The arithmetic of the encodings as one pass over memory each, compiled by Numba, the GIL released.

Arrays are 1-D and contiguous; `values` is the float32 gradient and finite when it is encoded; a function fills every
element of its output arrays (named last) and changes no other. Error feedback (Seide et al., Interspeech 2014;
Karimireddy et al., ICML 2019) encodes the *corrected* gradient, values + residue, clamped to the range of float32;
`left` becomes its encoding error. The tests compare with NumPy, bit for bit.

No fastmath: it lets results depend on where a vector is cut.
"""

# The loops take what Numba infers.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import numpy as np

from parashard.encodings.encoding import INT8_SCALE_LARGEST, Codes8, Codes16, Indices
from parashard.plan.variables import Float32s
from parashard.process.cached_code import Vector, const, inlined, loop
from parashard.protocol.messages import INT8_BLOCK_ELEMENTS

_f32 = np.float32
_u16 = np.uint16
_u32 = np.uint32
_MAGNITUDE = _u32(0x7FFFFFFF)
_LARGEST = np.finfo(np.float32).max
_INT8_LARGEST = INT8_SCALE_LARGEST
_INT8_SMALLEST = np.finfo(np.float32).tiny
_BFLOAT16_LARGEST = _u32(0x7F7F)
_FLOAT16_LARGEST_BITS = _u32(0x477FE000)  # 65504 as float32
_FLOAT16_NORMAL = _f32(2.0**-14)
_FLOAT16_NORMAL_BITS = _u32(0x38800000)
_HALF_BITS = _u32(0x3F000000)  # 0.5, whose last bit has the value 2^-24, float16's smallest number

_FLOATS, _BITS, _CODES16, _CODES8 = Vector("float32"), Vector("uint32"), Vector("uint16"), Vector("int8")


def to_bfloat16(values: Float32s, codes: Codes16) -> None:
    """Write the upper halves of the values, rounded to nearest, ties to even; beyond 3.39e38 the largest finite one."""
    _to_bfloat16(values.view(_u32), codes)


def from_bfloat16(codes: Codes16, values: Float32s) -> bool:
    """Write the values, exactly; return whether all are finite."""
    return bool(_from_bfloat16(codes, values.view(_u32)))


def to_float16(values: Float32s, codes: Codes16) -> None:
    """Write the nearest binary16, ties to even; beyond 65504 the largest finite one."""
    # The shard would refuse an infinity, and the job would stop; saturation loses nothing useful of such a gradient.
    _to_float16(values.view(_u32), codes)


def from_float16(codes: Codes16, values: Float32s) -> bool:
    """Write the values, exactly; return whether all are finite."""
    return bool(_from_float16(codes, values))


def to_int8(values: Float32s, residue: Float32s, scales: Float32s, codes: Codes8, left: Float32s) -> None:
    """Write codes of -127 to 127, each to be multiplied by the scale of its block of 256: max|x| / 127."""
    # A code is x / scale, rounded half to even, so that |left| <= scale / 2 and a little rounding. A block with a scale
    # below float32's normal numbers has scale 0 and goes to the residue whole: x / scale would be imprecise or
    # infinite. Only in a block with a value beyond 127/128 of float32's range is the scale less, and |left| up to
    # 2.7e36.
    _to_int8(values, residue, scales, codes, left, left.view(_u32))


def to_int8_rows(values: Float32s, scales: Float32s, codes: Codes8) -> None:
    """Write codes of -127 to 127, each to be multiplied by its row's scale, max|x| / 127; the error is discarded.

    As `to_int8`, with a row of values.size / scales.size elements in the place of a block: a row's encoding depends on
    its own values alone. A row with a scale below float32's normal numbers becomes 0.
    """
    _to_int8_rows(values, values.view(_u32), scales, codes)


def to_topk(values: Float32s, residue: Float32s, indices: Indices, kept: Float32s, left: Float32s) -> None:
    """Write the `kept.size` largest elements by magnitude (ties: the first ones), in the order of their indices."""
    _to_topk(values, residue, indices, kept, left, left.view(_u32))


@inlined
def _corrected(value, residue):
    return max(min(value + residue, _LARGEST), -_LARGEST)


@loop(const(_BITS), _CODES16)
def _to_bfloat16(bits, codes):
    for i in range(bits.size):
        magnitude = bits[i] & _MAGNITUDE
        rounded = (magnitude + _u32(0x7FFF) + ((magnitude >> _u32(16)) & _u32(1))) >> _u32(16)
        codes[i] = min(rounded, _BFLOAT16_LARGEST) | ((bits[i] >> _u32(16)) & _u32(0x8000))


@loop(const(_CODES16), _BITS)
def _from_bfloat16(codes, bits):
    largest = _u16(0)
    for i in range(codes.size):
        bits[i] = _u32(codes[i]) << _u32(16)
        largest = max(largest, codes[i] & _u16(0x7FFF))
    return largest <= _BFLOAT16_LARGEST


@loop(const(_BITS), _CODES16)
def _to_float16(bits, codes):
    # After Giesen, "float->half variants" (2012): a normal number is rounded as an integer; a subnormal one by the
    # float adder, as the last bit of 0.5 + x has the value of float16's.
    for i in range(bits.size):
        magnitude = _u32(min(bits[i] & _MAGNITUDE, _FLOAT16_LARGEST_BITS))
        normal = (magnitude - _u32(0x38000000) + _u32(0xFFF) + ((magnitude >> _u32(13)) & _u32(1))) >> _u32(13)
        subnormal = _f32(magnitude.view(_f32) + _f32(0.5)).view(_u32) - _HALF_BITS
        code = normal if magnitude >= _FLOAT16_NORMAL_BITS else subnormal
        codes[i] = code | ((bits[i] >> _u32(16)) & _u32(0x8000))


@loop(const(_CODES16), _FLOATS)
def _from_float16(codes, values):
    largest = _u16(0)
    for i in range(codes.size):
        magnitude = _u16(codes[i] & _u16(0x7FFF))
        largest = max(largest, magnitude)
        shifted = _u32(magnitude) << _u32(13)
        normal = _u32(shifted + _u32(0x38000000)).view(_f32)
        subnormal = _u32(shifted + _FLOAT16_NORMAL_BITS).view(_f32) - _FLOAT16_NORMAL
        value = normal if magnitude >= _u16(0x400) else subnormal
        values[i] = -value if codes[i] >= _u16(0x8000) else value
    return largest <= _u16(0x7BFF)


@inlined
def _scale_of(largest_bits):
    """Return the scale of int8 codes whose largest magnitude has these bits; 0 where all codes are 0."""
    scale = min(_u32(largest_bits).view(_f32) / _f32(127.0), _INT8_LARGEST)
    return _f32(0.0) if scale < _INT8_SMALLEST else _f32(scale)


@inlined
def _code_of(value, scale):
    return min(max(np.rint(value / scale), _f32(-127.0)), _f32(127.0))


@loop(const(_FLOATS), const(_FLOATS), _FLOATS, _CODES8, _FLOATS, _BITS)
def _to_int8(values, residue, scales, codes, left, left_bits):
    for block in range(scales.size):
        begin = block * INT8_BLOCK_ELEMENTS
        run = slice(begin, begin + INT8_BLOCK_ELEMENTS)  # views of a block: indices from 0 let its loops be vectorised
        x, bits, g, r, code = left[run], left_bits[run], values[run], residue[run], codes[run]
        largest = _u32(0)  # as bits, which are ordered as the magnitudes are: integers' maximum is vectorised
        for i in range(x.size):
            x[i] = _corrected(g[i], r[i])
        for i in range(x.size):
            largest = max(largest, bits[i] & _MAGNITUDE)
        scale = _scale_of(largest)
        if scale == 0:
            code[:] = 0
        else:
            for i in range(x.size):
                rounded = _code_of(x[i], scale)
                code[i] = np.int8(np.int32(rounded))
                x[i] -= rounded * scale
        scales[block] = scale


@loop(const(_FLOATS), const(_CODES8), _FLOATS)
def from_int8(scales, codes, values):
    """Write codes times scales; finite where every scale is in [0, INT8_SCALE_LARGEST]."""
    for block in range(scales.size):
        begin = block * INT8_BLOCK_ELEMENTS
        run = slice(begin, begin + INT8_BLOCK_ELEMENTS)
        scale, code, x = scales[block], codes[run], values[run]
        for i in range(code.size):
            x[i] = _f32(code[i]) * scale


@loop(const(_FLOATS), const(_BITS), _FLOATS, _CODES8)
def _to_int8_rows(values, bits, scales, codes):
    length = values.size // max(1, scales.size)
    for row in range(scales.size):
        run = slice(row * length, row * length + length)
        x, magnitudes, code = values[run], bits[run], codes[run]
        largest = _u32(0)
        for i in range(length):
            largest = max(largest, magnitudes[i] & _MAGNITUDE)
        scale = _scale_of(largest)
        scales[row] = scale
        if scale == 0:
            code[:] = 0
        else:
            for i in range(length):
                code[i] = np.int8(np.int32(_code_of(x[i], scale)))


@loop(const(_FLOATS), const(_CODES8), _FLOATS)
def from_int8_rows(scales, codes, values):
    """Write codes times their rows' scales; finite where every scale is in [0, INT8_SCALE_LARGEST]."""
    length = values.size // max(1, scales.size)
    for row in range(scales.size):
        run = slice(row * length, row * length + length)
        scale, code, x = scales[row], codes[run], values[run]
        for i in range(length):
            x[i] = _f32(code[i]) * scale


@inlined
def _rank_th_largest(bits, rank):
    """Return the `rank`-th largest magnitude, as bits, and how many of the `rank` largest elements have it."""
    # Magnitudes of finite floats are ordered as their bits. So the first histogram finds the upper bits of the result,
    # and each that follows, over the elements with these bits, the next ones: no sorting, three reads.
    found = _u32(0)
    for shift in (21, 11, 0):  # 10, 10 and 11 of the 31 bits
        bins = np.zeros(1 << 11, np.int64)
        above = shift + (10 if shift else 11)
        for i in range(bits.size):
            magnitude = bits[i] & _MAGNITUDE
            if magnitude >> _u32(above) == found >> _u32(above):
                bins[(magnitude - found) >> _u32(shift)] += 1
        index = bins.size - 1
        while bins[index] < rank:
            rank -= bins[index]
            index -= 1
        found |= _u32(index) << _u32(shift)
    return _u32(found), rank


@loop(const(_FLOATS), const(_FLOATS), _BITS, _FLOATS, _FLOATS, const(_BITS))
def _to_topk(values, residue, indices, kept, left, bits):
    for i in range(values.size):
        left[i] = _corrected(values[i], residue[i])
    threshold, ties = _rank_th_largest(bits, kept.size)
    position = 0
    for i in range(values.size):
        magnitude = bits[i] & _MAGNITUDE
        if magnitude < threshold:
            continue
        if magnitude == threshold:
            if ties == 0:
                continue
            ties -= 1
        indices[position] = i
        kept[position] = left[i]
        left[i] = _f32(0.0)
        position += 1


@loop(const(_BITS), const(_FLOATS), _FLOATS)
def from_topk(indices, kept, values):
    """Write `kept` at `indices`, which are ascending and in range, and zero elsewhere."""
    values[:] = _f32(0.0)
    for position in range(indices.size):
        values[indices[position]] = kept[position]
