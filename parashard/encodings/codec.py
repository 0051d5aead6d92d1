"""Codec: converts a slice of a gradient, or row gradients of a table, to the bytes of a payload, and back.

Owns the layouts, and every check of received bytes. A row of a table is encoded by its own values alone (P35): no error
is fed back, so that rounds of `sync:N` have the same bits for any number of workers and shards. Knows nothing of jobs,
pushes or the use of a residue.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from parashard.encodings.encoding import INT8_SCALE_LARGEST, Codes8, Encoding, Indices
from parashard.errors import MalformedFrame, NonFiniteGradient
from parashard.plan.embedding import EmbeddingTable
from parashard.plan.partition import Partition
from parashard.plan.variables import Float32s, Variable
from parashard.protocol.messages import INT8_BLOCK_ELEMENTS, DType, RowSlice, Slice

_NONE: Float32s = np.empty(0, np.float32)


def kernels() -> ModuleType:
    """Return the compiled kernels; imported on first use, because Numba loads slowly and only encodings need it."""
    from parashard.encodings import compiled

    return compiled


def warm_up(variables: Iterable[Variable]) -> None:
    """Load or compile the kernels for the encodings of these variables, so that no push waits for it."""
    partition = Partition("warm-up", 0, 8)  # long enough that every encoding makes it shorter
    values = np.zeros(partition.rows, np.float32)
    for encoding in {variable.encoding for variable in variables if not variable.frozen}:
        piece = Encoding.parse(encoding).slice_of(partition, 1)
        payload = np.zeros(piece.size_bytes, np.uint8)
        encode(piece, values, payload, np.zeros_like(values), np.empty_like(values))
        decode(piece, payload.data, np.empty_like(values))


def encode(
    piece: Slice,
    values: Float32s,
    payload: npt.NDArray[np.uint8],
    residue: Float32s = _NONE,
    left: Float32s = _NONE,
) -> None:
    """Encode a slice into aligned memory, filling all of `payload`."""
    # `values` is the gradient: contiguous, finite, only read. INT8 and TOPK add `residue` first and write the new one
    # to `left`.
    values = read_only(values)
    match piece.dtype:
        case DType.FLOAT32:
            payload[:] = values.view(np.uint8)
        case DType.BFLOAT16:
            kernels().to_bfloat16(values, payload.view("<u2"))
        case DType.FLOAT16:
            kernels().to_float16(values, payload.view("<u2"))
        case DType.INT8:
            scales, codes = _int8_parts(piece, payload)
            kernels().to_int8(values, residue, scales, codes, left)
        case DType.TOPK:
            indices, kept = _topk_parts(piece, payload)
            kernels().to_topk(values, residue, indices, kept, left)


def decode(piece: Slice, payload: memoryview, into: Float32s) -> None:
    """Decode a slice, whose partition has been checked against the plan, to every element of `into`.

    `payload` is exactly the slice's bytes, at any address; only read. Raises MalformedFrame if it has another length, a
    scale is negative, NaN or too large, or indices are not ascending or not within the slice; NonFiniteGradient for NaN
    or infinity. `into` is undefined then.
    """
    name = f"variable {piece.partition.variable!r}: a slice in {piece.dtype.name}"
    if into.size != piece.elements:
        raise ValueError(f"{name} of {piece.elements} elements cannot be decoded into {into.size}")
    if payload.nbytes != piece.size_bytes:
        raise MalformedFrame(f"{name} has {payload.nbytes} bytes where {piece.size_bytes} were due")
    content = read_only(np.frombuffer(payload, np.uint8))
    finite = True
    match piece.dtype:
        case DType.FLOAT32:
            into.view(np.uint8)[:] = content
            finite = bool(np.isfinite(into).all())
        case DType.BFLOAT16:
            finite = kernels().from_bfloat16(aligned(content.view("<u2")), into)
        case DType.FLOAT16:
            finite = kernels().from_float16(aligned(content.view("<u2")), into)
        case DType.INT8:
            scales, codes = _int8_parts(piece, content)
            scales = aligned(scales)
            _check_scales(scales, name)
            kernels().from_int8(scales, codes, into)
        case DType.TOPK:
            indices, kept = (aligned(part) for part in _topk_parts(piece, content))
            indices = indices.copy()  # in shared memory the sender could change them after the check
            if indices.size and not (np.all(indices[1:] > indices[:-1]) and int(indices[-1]) < piece.elements):
                raise MalformedFrame(f"{name} has indices that are not ascending, or not below {piece.elements}")
            finite = bool(np.isfinite(kept).all())
            kernels().from_topk(indices, kept, into)
    if not finite:
        raise NonFiniteGradient(f"{name} holds NaN or infinity")


def _int8_parts(piece: Slice, content: npt.NDArray[np.uint8]) -> tuple[Float32s, Codes8]:
    scales_bytes = 4 * -(-piece.elements // INT8_BLOCK_ELEMENTS)
    return content[:scales_bytes].view("<f4"), content[scales_bytes:].view(np.int8)


def _topk_parts(piece: Slice, content: npt.NDArray[np.uint8]) -> tuple[Indices, Float32s]:
    return content[: 4 * piece.kept].view("<u4"), content[4 * piece.kept :].view("<f4")


def aligned(part: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the part itself or an aligned copy: slices lie end to end, and one of odd length moves the next."""
    return part if part.flags.aligned else read_only(part.copy())


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a read-only view: kernels are compiled for one kind of array, whatever memory a slice comes from."""
    view = array.view()
    view.flags.writeable = False
    return view


def _check_scales(scales: Float32s, what: str) -> None:
    if not np.all((scales >= 0) & (scales <= INT8_SCALE_LARGEST)):
        raise MalformedFrame(f"{what} has a scale that is not in [0, {INT8_SCALE_LARGEST:g}]")


# --- rows of tables ---


def dtype_of(table: EmbeddingTable) -> DType:
    """Return the encoding of a table's row gradients."""
    return Encoding(table.gradient_encoding).dtype


def warm_up_rows(tables: Iterable[EmbeddingTable]) -> None:
    """Load or compile the kernels for the encodings of these tables, so that no push waits for it."""
    for dtype in {dtype_of(table) for table in tables}:
        piece = RowSlice("warm-up", 1, 2, dtype)
        parts = encode_rows("warm-up", np.zeros((1, 2), "f4"), dtype)
        decode_rows(piece, memoryview(b"".join(part.tobytes() for part in parts)))


def encode_rows(table: str, values: Float32s, dtype: DType) -> tuple[npt.NDArray[Any], ...]:
    """Return the parts of an encoded gradient, each with a row for each row of values."""
    # The payload of some rows is these rows of every part, end to end. FLOAT32: the values themselves. Raises
    # NonFiniteGradient if values to be rounded are not finite, which codes cannot express.
    if dtype is DType.FLOAT32:
        return (values,)
    if not np.isfinite(values).all():
        raise NonFiniteGradient(f"table {table!r}: the gradient of a row has a value that is not finite")
    flat = read_only(values.reshape(-1))
    if dtype is DType.INT8:
        scales, codes8 = np.empty(len(values), np.float32), np.empty(values.shape, np.int8)
        kernels().to_int8_rows(flat, scales, codes8.reshape(-1))
        return scales, codes8
    codes = np.empty(values.shape, np.uint16)
    rounded = kernels().to_bfloat16 if dtype is DType.BFLOAT16 else kernels().to_float16
    rounded(flat, codes.reshape(-1))
    return (codes,)


def decode_rows(piece: RowSlice, content: memoryview) -> Float32s:
    """Return the gradients of rows, shape (rows, row_elements): aligned FLOAT32 as a view, else a new array.

    `content` are the bytes after the keys, at any address; only read. Raises MalformedFrame if it is not as long as the
    slice says, or a scale is negative, NaN or too large; NonFiniteGradient for an encoded value that is not finite;
    FLOAT32 is not checked.
    """
    due_bytes = piece.size_bytes - piece.keys_bytes
    if content.nbytes != due_bytes:
        raise MalformedFrame(
            f"table {piece.table!r}: {piece.rows} rows in {piece.dtype.name} have {due_bytes} bytes, found "
            f"{content.nbytes}"
        )
    shape, received = (piece.rows, piece.row_elements), read_only(np.frombuffer(content, np.uint8))
    if piece.dtype is DType.FLOAT32:
        return aligned(received.view("<f4")).reshape(shape)
    values = np.empty(shape, np.float32)
    flat, finite = values.reshape(-1), True
    if piece.dtype is DType.INT8:
        # A copy: in shared memory the sender could change them after the check.
        scales = read_only(received[: 4 * piece.rows].view("<f4").copy())
        _check_scales(scales, f"table {piece.table!r}: a row")
        kernels().from_int8_rows(scales, received[4 * piece.rows :].view(np.int8), flat)
    else:
        exact = kernels().from_bfloat16 if piece.dtype is DType.BFLOAT16 else kernels().from_float16
        finite = exact(aligned(received.view("<u2")), flat)
    if not finite:
        raise NonFiniteGradient(f"table {piece.table!r}: the gradient of a row has a value that is not finite")
    return values
