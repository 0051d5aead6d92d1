"""Which columns of a table become keys, and what is fitted of them: lengths of lists, vocabularies, and collisions.

Owns the meaning of `key_columns`, `list_columns` and `vocabularies`. Knows no file but vocabularies. Called by
`parashard.data.tabular`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from parashard.data.base import HashedTexts
from parashard.data.collisions import counted
from parashard.data.columns import Column, Lists, Words, as_words
from parashard.data.key_columns import (
    AnyKeyColumn,
    KeyColumn,
    KeysColumn,
    KnownKeyColumn,
    KnownKeysColumn,
    longest,
)
from parashard.data.options import TableOptions
from parashard.data.texts import canonical
from parashard.data.vocabularies import read_vocabularies

EVERY_TEXT = "*"


def keyed_names(options: TableOptions) -> tuple[str, ...]:
    """Return the columns that the options name as keys."""
    named = () if options.key_columns == (EVERY_TEXT,) else options.key_columns
    return (*named, *options.list_columns, *options.vocabularies)


def fitted_keys(
    options: TableOptions, whole: Mapping[str, Column], evaluation: Mapping[str, Column]
) -> dict[str, AnyKeyColumn]:
    """Return the columns that become keys, as they are saved, in the table's order.

    Parameters
    ----------
    options : TableOptions
    whole : mapping of str to Column
        Of the whole training table.
    evaluation : mapping of str to Column
        Of the held-out rows.

    Raises
    ------
    BadData, Unavailable
        As `read_vocabularies`.
    """
    vocabularies = read_vocabularies(options.vocabularies, options.marks)
    named, starred = set(keyed_names(options)), options.key_columns == (EVERY_TEXT,)
    found: dict[str, AnyKeyColumn] = {}
    first = 0
    for name, column in whole.items():
        texts = vocabularies.get(name)
        if name not in named and not (starred and (isinstance(column, Words | Lists) or name in options.categorical)):
            continue
        found[name] = _fitted(options, name, column, longest(column, evaluation[name]), texts, first)
        first += 0 if texts is None else len(texts) + 2
    return found


def _fitted(
    options: TableOptions, name: str, column: Column, values_max: int, texts: tuple[str, ...] | None, first: int
) -> AnyKeyColumn:
    if isinstance(column, Lists):
        delimiter = options.value_delimiter
        if texts is None:
            return KeysColumn(name=name, delimiter=delimiter, values_max=values_max, canonical=True)
        return KnownKeysColumn(
            name=name,
            delimiter=delimiter,
            values_max=values_max,
            texts=texts,
            first=first,
            unknown=options.unknown_texts,
        )
    if texts is None:
        return KeyColumn(name=name, canonical=True)
    return KnownKeyColumn(name=name, texts=texts, first=first, unknown=options.unknown_texts)


def hashed_texts(
    keyed: Mapping[str, AnyKeyColumn], tables: Sequence[Mapping[str, Column]]
) -> tuple[HashedTexts | None, list[str]]:
    """Return how many texts of some tables' columns have hashed keys, and how many keys, and a warning of collisions.

    Parameters
    ----------
    keyed : mapping of str to AnyKeyColumn
    tables : sequence of mapping of str to Column
    """
    texts = {
        name: list(dict.fromkeys(canonical(text) for table in tables for text in _used(table[name])))
        for name, column in keyed.items()
        if isinstance(column, KeyColumn | KeysColumn)
    }
    return counted(texts) if texts else (None, [])


def _used(column: Column) -> list[str]:
    """Return the distinct texts that have a key; in a column of one value that of "" where a cell is missing."""
    if isinstance(column, Lists):
        return _occurring(column.texts())
    cells = as_words(column)
    return _occurring(cells) + ([""] if (cells.codes < 0).any() else [])


def _occurring(texts: Words) -> list[str]:
    return [texts.vocabulary[code] for code in np.flatnonzero(texts.counts())]
