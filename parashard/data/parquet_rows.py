"""Rows of an embedding table as Apache Parquet: columns `key` and `row`, written piece by piece.

Knows no checkpoint. pyarrow (the extra `parquet`) is imported by the first call. Called for `checkpoint export`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from parashard.errors import ConfigurationError
from parashard.plan.embedding import Keys
from parashard.plan.variables import Float32s


def write_rows(path: Path, pieces: Iterable[tuple[Keys, Float32s]]) -> int:
    """Write keys (uint64) and rows (fixed-size lists of float32), and return how many.

    Raises
    ------
    ConfigurationError
        If pyarrow is not installed.
    OSError
        If the file cannot be written.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigurationError(
            f"{path.suffix} files need pyarrow, which cannot be imported ({error}); run: pip install parashard[parquet]"
        ) from None
    writer, count = None, 0
    try:
        for keys, rows in pieces:
            lists = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
            piece = pa.table({"key": pa.array(keys), "row": lists})
            writer = writer or parquet.ParquetWriter(path, piece.schema)
            writer.write_table(piece)
            count += len(keys)
    finally:
        if writer is not None:
            writer.close()
    return count
