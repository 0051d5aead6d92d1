"""The data of a job file in a script: `ps.open_data`.

Owns nothing but the way from arguments to a source of `parashard.data`. Called by scripts.
"""

from __future__ import annotations

from typing import Any

from parashard.data import open_source
from parashard.data.base import DataSource
from parashard.data.options import DataOptions
from parashard.job.validation import validated_words


def open_data(source: str, **options: Any) -> DataSource:
    """Open the data that a job file's `[data]` table would name, for `fit`.

    Parameters
    ----------
    source : str
        clicks, criteo, csv, digits, idx, npz, parquet or synthetic.
    **options
        The other keys of the table, such as path="titanic.csv", label="survived".

    Raises
    ------
    ConfigurationError
        If the options are not valid, or a library is not installed.
    BadData, Unavailable
        If the data cannot be read.
    """
    return open_source(validated_words(DataOptions, {"source": source, **options}, "open_data: "))
