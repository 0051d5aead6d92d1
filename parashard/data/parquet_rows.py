"""Rows of an embedding table as Apache Parquet: columns `key` and `row`, written piece by piece.

Knows no checkpoint. pyarrow (the extra `parquet`) is imported by the first call. Called for `checkpoint export`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from parashard.errors import ConfigurationError
from parashard.plan.embedding import Keys, as_numpys
from parashard.process.extras import install


def write_rows(path: Path, pieces: Iterable[tuple[Keys, NDArray[Any]]]) -> int:
    """Write keys (uint64) and rows (fixed-size lists of float32, or float16 where that is kept); return how many.

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
            f"{path.suffix} files need pyarrow, which cannot be imported ({error}); run: {install('parquet')}"
        ) from None
    writer, count = None, 0
    try:
        for keys, kept in pieces:
            rows = as_numpys(kept)
            lists = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
            piece = pa.table({"key": pa.array(keys), "row": lists})
            writer = writer or parquet.ParquetWriter(path, piece.schema)
            writer.write_table(piece)
            count += len(keys)
    finally:
        if writer is not None:
            writer.close()
    return count
