"""Which columns of a table become keys, and what is fitted of them: lengths of lists, vocabularies, and collisions.

Owns the meaning of `key_columns`, `list_columns` and `vocabularies`. Knows no file but vocabularies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from parashard.data.base import HashedTexts, kind_of_failure
from parashard.data.columns import NO_MARKS, Column, Lists, Words, shown_cell, texts_of
from parashard.data.input_columns import (
    AnyKeyColumn,
    KeyColumn,
    KeysColumn,
    KnownKeyColumn,
    KnownKeysColumn,
    hashed,
    longest,
)
from parashard.data.options import TableOptions
from parashard.data.texts import Marks, canonical
from parashard.errors import BadData

VOCABULARY_BYTES_MAX = 4 << 20
"""Most bytes of the vocabularies of a job, which is saved with them; columns of more texts have hashed keys."""


def read_vocabularies(paths: Mapping[str, Path], marks: Marks = NO_MARKS) -> dict[str, tuple[str, ...]]:
    """Return the texts of each column, in the order of their lines."""
    found, left = {}, VOCABULARY_BYTES_MAX
    for column, path in paths.items():
        where = f"{path}: the vocabulary of column {shown_cell(column)}"
        content = _read(path, where, left)
        left -= len(content)
        try:
            found[column] = tuple(_texts(content.decode("utf-8-sig"), where, marks))
        except UnicodeDecodeError as error:
            raise BadData(f"{where}: is not text in UTF-8: {error}") from None
    return found


def _read(path: Path, where: str, left: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(left + 1)
    except OSError as error:
        raise kind_of_failure(error)(f"{where}: cannot be read: {error.strerror or error}") from error
    if len(content) > left:
        raise BadData(
            f"{where}: makes the vocabularies of the job larger than {VOCABULARY_BYTES_MAX >> 20} MiB, which is most; "
            "without a vocabulary (data.vocabularies) a column's keys are hashed"
        )
    return content


def _texts(content: str, where: str, marks: Marks) -> Iterator[str]:
    lines: dict[str, int] = {}
    for number, line in enumerate(content.split("\n") if content.strip() else [], start=1):
        text = line.strip()
        if not text and number == content.count("\n") + 1:
            break  # behind the last line's end
        if marks.is_missing(text):
            raise BadData(f"{where}: line {number} has {shown_cell(text)}, which stands for a missing value")
        if lines.setdefault(text, number) != number:
            raise BadData(f"{where}: lines {lines[text]} and {number} are both {shown_cell(text)}")
        yield text
    if not lines:
        raise BadData(f"{where}: is empty; allowed: a text in each line")


_PAIRS_SHOWN = 3


def counted(texts: Mapping[str, Sequence[str]]) -> tuple[HashedTexts, list[str]]:
    """Return how many distinct texts and keys columns have, and a warning for each pair of texts that share a key."""
    keys = np.concatenate([np.empty(0, np.int64), *(hashed(found, column) for column, found in texts.items())])
    order = np.argsort(keys, kind="stable")
    same = np.flatnonzero(np.diff(keys[order]) == 0)
    ends = np.cumsum([len(found) for found in texts.values()])

    def named(at: int) -> str:
        column = int(np.searchsorted(ends, at, side="right"))
        name, found = list(texts.items())[column]
        return f"{shown_cell(found[at - (int(ends[column]) - len(found))])} of column {shown_cell(name)}"

    warnings = [
        f"{named(int(order[at]))} and {named(int(order[at + 1]))} have the same key, {keys[order[at]]}, and so share a "
        "row of each table; data.vocabularies gives each text of a column a key of its own"
        for at in same[:_PAIRS_SHOWN]
    ]
    more = len(same) - _PAIRS_SHOWN
    if more > 0:
        warnings.append(f"{more:,} more pair{'s of texts have' if more > 1 else ' of texts has'} the same key")
    return HashedTexts(len(keys), len(keys) - len(same)), warnings


EVERY_TEXT = "*"


def keyed_names(options: TableOptions) -> tuple[str, ...]:
    """Return the columns that the options name as keys."""
    named = () if options.key_columns == (EVERY_TEXT,) else options.key_columns
    return (*named, *options.list_columns, *options.vocabularies)


def fitted_keys(
    options: TableOptions, whole: Mapping[str, Column], evaluation: Mapping[str, Column]
) -> dict[str, AnyKeyColumn]:
    """Return the columns that become keys, as they are saved, in the table's order."""
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
    """Return how many distinct texts of some columns have hashed keys, how many keys, and a warning of collisions."""
    texts = {
        name: list(dict.fromkeys(canonical(text) for table in tables for text in _used(table[name])))
        for name, column in keyed.items()
        if isinstance(column, KeyColumn | KeysColumn)
    }
    return counted(texts) if texts else (None, [])


def _used(column: Column) -> list[str]:
    """Return the distinct texts that have a key; in a column of one value that of "" where a cell is missing."""
    texts = texts_of(column)
    found = [texts.vocabulary[code] for code in np.flatnonzero(texts.counts())]
    return found + ([""] if (texts.codes < 0).any() else [])
