"""Data sources: one per format, each with its options, and `open_source` for any of them.

Libraries that only one source needs (scikit-learn, pyarrow) are imported when that source is opened.
"""

from __future__ import annotations

from typing import Annotated, assert_never

from pydantic import Field

from parashard.data.base import DataSource
from parashard.data.csv import CsvOptions, open_csv
from parashard.data.digits import DigitsOptions, open_digits
from parashard.data.idx import IdxOptions, open_idx
from parashard.data.npz import NpzOptions, open_npz
from parashard.data.parquet import ParquetOptions, open_parquet
from parashard.data.synthetic import SyntheticOptions, SyntheticSource

DataOptions = Annotated[
    CsvOptions | DigitsOptions | IdxOptions | NpzOptions | ParquetOptions | SyntheticOptions,
    Field(discriminator="source"),
]
"""The `[data]` table of a job file; its key `source` says which."""


def open_source(options: DataOptions) -> DataSource:
    """Load the data that the options describe.

    Raises
    ------
    BadData
        A file is missing, damaged or of another format; the message names it.
    Unavailable
        A file is there and the system does not give its content now.
    ConfigurationError
        A library that the source needs is not installed; the message names the extra to install.
    """
    match options:
        case CsvOptions():
            return open_csv(options)
        case DigitsOptions():
            return open_digits(options)
        case IdxOptions():
            return open_idx(options)
        case NpzOptions():
            return open_npz(options)
        case ParquetOptions():
            return open_parquet(options)
        case SyntheticOptions():
            return SyntheticSource(options)
        case _:
            assert_never(options)
