"""The row codec: gradients of rows of an embedding table to the bytes of a payload, and back.

Owns the layout of encoded rows, and every check of received bytes. What a row becomes is a function of its own values
(P35): no error is fed back, and nothing depends on the rows beside it, so that rounds of `sync:N` have the same bits
for any number of workers and shards. Knows no push.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from parashard.encodings import reference
from parashard.encodings.codec import aligned, kernels, read_only
from parashard.encodings.encoding import Encoding
from parashard.errors import MalformedFrame, NonFiniteGradient
from parashard.plan.embedding import EmbeddingTable
from parashard.plan.variables import Float32s
from parashard.protocol.messages import DType, RowSlice


def dtype_of(table: EmbeddingTable) -> DType:
    """Return how gradients of a table's rows travel."""
    return Encoding(table.gradient_encoding).dtype


def warm_up(tables: Iterable[EmbeddingTable]) -> None:
    """Load or compile the kernels for the encodings of these tables, so that no push waits for it."""
    for dtype in {dtype_of(table) for table in tables}:
        piece = RowSlice("warm-up", 1, 2, dtype)
        decode(piece, memoryview(b"".join(part.tobytes() for part in encode("warm-up", np.zeros((1, 2), "f4"), dtype))))


def encode(table: str, values: Float32s, dtype: DType) -> tuple[npt.NDArray[Any], ...]:
    """Return the parts of an encoded gradient, each with a row of a part for each row of values.

    The bytes of some rows are those of the same rows of every part, end to end. FLOAT32: the values themselves. Raises
    NonFiniteGradient if values that are to be rounded are not finite: no code would say so.
    """
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


def decode(piece: RowSlice, content: memoryview) -> Float32s:
    """Return the gradients of rows, shape (rows, row_elements): FLOAT32 as a view where its address allows, else new.

    `content` is what follows the keys, at any address; only read. Raises MalformedFrame if it is not as long as the
    slice says, or a scale is negative, NaN or too large; NonFiniteGradient for an encoded value that is not finite; of
    FLOAT32 nobody has looked.
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
        if not np.all((scales >= 0) & (scales <= reference.INT8_SCALE_LARGEST)):
            raise MalformedFrame(
                f"table {piece.table!r}: a row has a scale that is not in [0, {reference.INT8_SCALE_LARGEST:g}]"
            )
        kernels().from_int8_rows(scales, received[4 * piece.rows :].view(np.int8), flat)
    else:
        exact = kernels().from_bfloat16 if piece.dtype is DType.BFLOAT16 else kernels().from_float16
        finite = exact(aligned(received.view("<u2")), flat)
    if not finite:
        raise NonFiniteGradient(f"table {piece.table!r}: the gradient of a row has a value that is not finite")
    return values
