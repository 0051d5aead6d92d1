"""What a record of the log has for embedding tables, behind its dense gradient.

Pure: from values to bytes and back; knows neither file nor checksum. Called by `log` and `records`. All numbers are
little-endian.

    each table   length of its name u16, numbers of a row u32, rows u64, name; keys u64, gradients f32
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

import numpy as np

from parashard.errors import DamagedCheckpoint
from parashard_server.state.rows.tables import Pushed, RowGradients

_TABLE = struct.Struct("<HIQ")
TABLE_BYTES = _TABLE.size + 4 * 200
"""What a table has at most besides its rows: a name has up to 200 characters."""


def encode_rows(rows: Pushed) -> Iterator[bytes | memoryview]:
    """Yield the pieces of what a push has for tables; the large ones are views."""
    for name, (keys, values) in rows.items():
        encoded = name.encode()
        yield _TABLE.pack(len(encoded), values.shape[1], len(keys)) + encoded
        yield keys.astype("<u8", copy=False).view(np.uint8).data
        yield values.astype("<f4", copy=False).reshape(-1).view(np.uint8).data


def decode_rows(content: memoryview) -> Mapping[str, RowGradients]:
    """Return what a push has for tables, in arrays of its own.

    Raises
    ------
    DamagedCheckpoint
        If the content is nothing that `encode_rows` makes.
    """
    found: dict[str, RowGradients] = {}
    begin = 0
    while begin < content.nbytes:
        if begin + _TABLE.size > content.nbytes:
            raise DamagedCheckpoint(f"{content.nbytes - begin} bytes where a table begins")
        name_bytes, elements, rows = _TABLE.unpack_from(content, begin)
        names_at = begin + _TABLE.size
        keys_at = names_at + name_bytes
        values_at, end = keys_at + 8 * rows, keys_at + 8 * rows + 4 * elements * rows
        if end > content.nbytes:
            raise DamagedCheckpoint(f"a table of {rows} rows of {elements} numbers in {content.nbytes - begin} bytes")
        try:
            name = str(content[names_at:keys_at], "utf-8")
        except UnicodeDecodeError as error:
            raise DamagedCheckpoint(f"a table's name is no text: {error}") from None
        keys = np.frombuffer(content[keys_at:values_at], "<u8").copy()
        values = np.frombuffer(content[values_at:end], "<f4").reshape(rows, elements).copy()
        found[name] = RowGradients(keys, values)
        begin = end
    return found
