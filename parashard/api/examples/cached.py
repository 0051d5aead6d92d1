"""Iterables and Parquet files as arrays for `fit`: `ps.cached` and `ps.parquet`.

Examples are written to a folder once and memory-mapped from there, so they may be larger than memory. Workers use the
written folder and do not iterate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from parashard.api.examples.datasets import Targets, check_form, example_of, form_of, named_parts
from parashard.api.examples.indexed import as_bad_data, is_loader
from parashard.data.arrays import check_digits
from parashard.data.base import BadExample
from parashard.data.cache import CacheWriter, read_cache
from parashard.data.data_files import data_files, read_rows
from parashard.data.tree import Tree, leaves, map_leaves
from parashard.errors import BadData
from parashard.models.framework import generators_seeded
from parashard.models.user_errors import named_with_line

ROWS_AT_ONCE = 1024


def cached(examples: Iterable[Any], folder: str | Path, *, targets: Targets = None) -> Tree:
    """Write the examples of an iterable to a folder, once, and return them as arrays for `fit`.

    Parameters
    ----------
    examples : iterable
        Finite, of (inputs, targets), (inputs, targets, weight) or dicts, all with the same shapes and types. If the
        folder is already written, it is not iterated: delete the folder when the examples change.
    folder : str or Path
        On a local disk. It is created atomically, once complete.
    targets : str or sequence of str, optional
        Names of the target fields, if examples are dicts.

    Returns
    -------
    tuple of trees of ndarray
        (inputs, targets) or (inputs, targets, weights), memory-mapped.

    Raises
    ------
    BadData
        If an example cannot be used, or the folder has other content; nothing is written.
    """
    place = Path(folder)
    found = read_cache(place, "")
    if found is not None:
        return found
    if is_loader(examples):
        raise BadData("ps.cached takes examples, and a DataLoader gives batches: pass its dataset")
    with as_bad_data(), generators_seeded(0), CacheWriter(place, "") as writer:
        for stacked in _stacked(examples, targets):
            writer.write(stacked)
    return read_cache(place, "")


def parquet(
    files: str | Path | Sequence[str | Path],
    *,
    targets: str | Sequence[str],
    inputs: Sequence[str] | None = None,
    cache: str | Path | None = None,
) -> Tree:
    """Read Parquet files, part of a row group at a time, and return them as arrays for `fit`.

    Parameters
    ----------
    files : str or Path, or sequence of these
        Paths, or URLs such as `s3://bucket/train-*.parquet`; their rows are concatenated.
    targets : str or sequence of str
        The columns to predict: one becomes an array, several a dict.
    inputs : sequence of str, optional
        The input columns; default: all others. Columns of numbers become one array of shape (rows, columns). If a
        column has lists, which must have one length, inputs become a dict of arrays by column.
    cache : str or Path, optional
        A folder to write the rows to, once, and to memory-map them from; they may then be larger than memory. None:
        read the rows into memory.

    Returns
    -------
    tuple of trees of ndarray
        (inputs, targets).

    Raises
    ------
    BadData
        If a column is missing, has an empty value or is not numeric, or the cache was made from other files.
    ConfigurationError
        If pyarrow, or the library for a URL, is not installed, or a URL's scheme is unknown.
    """
    given = [files] if isinstance(files, str | Path) else list(files)
    found = data_files([str(one) for one in given])
    predicted = [targets] if isinstance(targets, str) else list(targets)
    wanted = None if inputs is None else [*inputs, *(name for name in predicted if name not in inputs)]
    rows = (_as_parts(columns, targets, found[0].url) for columns in read_rows(found, wanted, predicted))
    if cache is None:
        parts = list(rows)
        if not parts:
            raise BadData(f"{found[0].url}: has no rows")
        return map_leaves(lambda *arrays: np.concatenate(arrays), *parts)
    text = repr([(one.url, one.version) for one in found] + [wanted, targets])
    origin, place = hashlib.sha256(text.encode()).hexdigest(), Path(cache)
    written = read_cache(place, origin)
    if written is not None:
        return written
    with CacheWriter(place, origin) as writer:
        for part in rows:
            writer.write(part)
    return read_cache(place, origin)


def _stacked(examples: Iterable[Any], targets: Targets) -> Iterator[Tree]:
    """Yield examples as stacked arrays, up to `ROWS_AT_ONCE` at a time."""
    first = None
    read = 0
    numbered = _iterated(examples)
    while some := list(islice(numbered, ROWS_AT_ONCE)):
        items = []
        for index, item in enumerate(some, read):
            where = f"data: example {index}"
            items.append(example_of(item, where, targets))
            first = first or form_of(items[-1])
            check_form(form_of(items[-1]), first, where)
            if any(array.dtype.kind == "f" and not np.isfinite(array).all() for _, array in leaves(items[-1])):
                raise BadExample(f"{where} has a value that is not finite")
        read += len(some)
        yield map_leaves(lambda *arrays: np.stack(arrays), *items)


def _iterated(examples: Iterable[Any]) -> Iterator[Any]:
    """Yield a user's examples; an error becomes a BadExample with the index and the line of the user's code."""
    read = 0
    try:
        for item in examples:
            yield item
            read += 1
    except Exception as error:
        raise BadExample(f"data: example {read}: {named_with_line(error)}") from error


def _as_parts(columns: dict[str, Any], targets: Targets, where: str) -> tuple[Tree, Tree]:
    inputs, predicted = named_parts(columns, targets, where)
    given = inputs if isinstance(inputs, dict) else {"": inputs}
    if all(array.ndim == 1 for array in given.values()):
        if any(array.dtype.kind == "f" for array in given.values()):
            for name, array in given.items():
                check_digits(array, f"{where}: column {name!r}")
        inputs = np.stack(list(given.values()), axis=1)  # integer columns beside floats become floating-point here
        inputs = inputs.astype(np.float32) if inputs.dtype.kind == "f" else inputs
    return inputs, predicted
