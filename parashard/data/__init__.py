"""Data sources: one per format, each with its options; `open_source` opens any of them.

Optional libraries (scikit-learn, pyarrow) are imported when a source that needs them is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from parashard.data.array_files import open_idx, open_npz
from parashard.data.base import DataSource
from parashard.data.criteo import open_criteo
from parashard.data.generated import ClicksSource, SyntheticSource, open_digits
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
from parashard.data.table_files import open_csv, open_parquet
from parashard.errors import ConfigurationError

_OPEN: Mapping[type[Any], Callable[[Any], DataSource]] = {
    ClicksOptions: ClicksSource,
    CriteoOptions: open_criteo,
    CsvOptions: open_csv,
    DigitsOptions: open_digits,
    IdxOptions: open_idx,
    NpzOptions: open_npz,
    ParquetOptions: open_parquet,
    SyntheticOptions: SyntheticSource,
}


def open_source(options: DataOptions) -> DataSource:
    """Load the data that the options describe."""
    if isinstance(options, ScriptDataOptions):
        raise ConfigurationError(
            'data.source is "script": run the script, which has the data; another worker of its run is `parashard '
            "worker --connect RUN SCRIPT ARGS`"
        )
    return _OPEN[type(options)](options)
