"""Where examples come from: one source per format, each with its options, and `open_source` for any of them.

A source's file, and the libraries that only it needs (scikit-learn, pyarrow), are imported when that source is opened.
"""

from __future__ import annotations

from typing import assert_never

from parashard.data.base import DataSource
from parashard.data.options import (
    ClicksOptions,
    CriteoOptions,
    CsvOptions,
    DataOptions,
    DigitsOptions,
    IdxOptions,
    NpzOptions,
    ParquetOptions,
    ScriptDataOptions,
    SyntheticOptions,
)
from parashard.errors import ConfigurationError


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
        case ClicksOptions() | SyntheticOptions():
            return _generated(options)
        case CriteoOptions() | CsvOptions() | ParquetOptions():
            return _table(options)
        case DigitsOptions():
            from parashard.data.digits import open_digits

            return open_digits(options)
        case IdxOptions():
            from parashard.data.idx import open_idx

            return open_idx(options)
        case NpzOptions():
            from parashard.data.npz import open_npz

            return open_npz(options)
        case ScriptDataOptions():
            raise ConfigurationError(
                'data.source is "script": run the script, which has the data; another worker of its run is `parashard '
                "worker --connect RUN SCRIPT ARGS`"
            )
        case _:
            assert_never(options)


def _generated(options: ClicksOptions | SyntheticOptions) -> DataSource:
    match options:
        case ClicksOptions():
            from parashard.data.clicks import ClicksSource

            return ClicksSource(options)
        case _:
            from parashard.data.synthetic import SyntheticSource

            return SyntheticSource(options)


def _table(options: CriteoOptions | CsvOptions | ParquetOptions) -> DataSource:
    match options:
        case CriteoOptions():
            from parashard.data.criteo import open_criteo

            return open_criteo(options)
        case CsvOptions():
            from parashard.data.csv import open_csv

            return open_csv(options)
        case _:
            from parashard.data.parquet import open_parquet

            return open_parquet(options)
