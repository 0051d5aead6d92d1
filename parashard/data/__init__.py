"""Where examples come from: one source per format, each with its options, and `open_source` for any of them.

Libraries that are optional (scikit-learn, pyarrow) are imported when a source that needs them is opened.
"""

from __future__ import annotations

from typing import assert_never

from parashard.data.base import DataSource
from parashard.data.clicks import ClicksSource
from parashard.data.criteo import open_criteo
from parashard.data.csv import open_csv
from parashard.data.idx import open_idx
from parashard.data.npz import open_npz
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
from parashard.data.parquet import open_parquet
from parashard.data.synthetic import SyntheticSource, open_digits
from parashard.errors import ConfigurationError


def open_source(options: DataOptions) -> DataSource:
    """Load the data that the options describe."""
    match options:
        case ClicksOptions() | SyntheticOptions():
            return _generated(options)
        case CriteoOptions() | CsvOptions() | ParquetOptions():
            return _table(options)
        case DigitsOptions():
            return open_digits(options)
        case IdxOptions():
            return open_idx(options)
        case NpzOptions():
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
            return ClicksSource(options)
        case _:
            return SyntheticSource(options)


def _table(options: CriteoOptions | CsvOptions | ParquetOptions) -> DataSource:
    match options:
        case CriteoOptions():
            return open_criteo(options)
        case CsvOptions():
            return open_csv(options)
        case _:
            return open_parquet(options)
