"""Input columns: encode a table's columns as model inputs or embedding keys, fitted on the training rows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from parashard.data.base import HashedTexts, kind_of_failure
from parashard.data.columns import (
    NO_MISSING_TEXTS,
    Column,
    Lists,
    MissingTexts,
    Numbers,
    Words,
    as_words,
    canonical,
    merged,
    shown_cell,
    texts_of,
)
from parashard.data.columns import canonical as compared
from parashard.data.hashing import keys_of_texts, seed_of
from parashard.data.options import TableOptions, UnknownTexts
from parashard.data.portable_math import mean_and_deviation, signed_log, standardise
from parashard.data.tree import NO_KEY, Int64s, Ragged, Tree, run_lengths
from parashard.errors import BadData
from parashard.frozen_model import FrozenModel
from parashard.plan.variables import Float32s

MAX_CATEGORIES = 4096
"""Maximum number of categories of a column; each becomes one input of every example."""
_INSTEAD_OF_NO_KEY = -2


class NumberColumn(FrozenModel):
    """One input, (x - mean) / deviation, 0 for a missing value; with `missing_input` a second: 1 if it is missing.

    With `boolean` the texts true and false are numbers, too.
    """

    kind: Literal["number"] = "number"
    name: str
    mean: float
    deviation: float
    missing_input: bool
    boolean: bool = False

    @property
    def width(self) -> int:
        """Number of inputs."""
        return 1 + self.missing_input

    def encode(self, column: Column, out: Float32s, origin: str) -> None:
        """Write the inputs of every row into `out`, shape (rows, width), which holds zeros."""
        assert isinstance(column, Numbers)
        standardise(column.values, self.mean, self.deviation, out[:, 0], origin)
        if self.missing_input:
            out[:, 1] = np.isnan(column.values)


class LogNumberColumn(FrozenModel):
    """One input, (f(x) - mean) / deviation, with f(x) = ln(1 + x), or x if negative; 0 for a missing value."""

    kind: Literal["log_number"] = "log_number"
    name: str
    mean: float
    deviation: float

    @property
    def width(self) -> int:
        """Number of inputs."""
        return 1

    def encode(self, column: Column, out: Float32s, origin: str) -> None:
        """Write the inputs of every row into `out`, shape (rows, 1)."""
        assert isinstance(column, Numbers)
        standardise(signed_log(column.values), self.mean, self.deviation, out[:, 0], origin)


class TextColumn(FrozenModel):
    """One-hot inputs, one per category; with `missing_input` one more, which is 1 for a missing value.

    A text that no training row has is 0 in every category. Texts are compared literally first, then in the form of
    `parashard.data.columns.canonical`.
    """

    kind: Literal["text"] = "text"
    name: str
    categories: tuple[str, ...]
    missing_input: bool

    @property
    def width(self) -> int:
        """Number of inputs."""
        return len(self.categories) + self.missing_input

    def encode(self, column: Column, out: Float32s, origin: str) -> None:
        """Write the inputs of every row into `out`, shape (rows, width), which holds zeros."""
        text = as_words(column)
        places = text.places(self.categories)
        known = np.flatnonzero(places >= 0)
        out[known, places[known]] = 1.0
        if self.missing_input:
            out[text.codes < 0, -1] = 1.0


class KeyColumn(FrozenModel):
    """An embedding key: XXH64 of the cell's text, seeded by the column's name; a missing cell counts as "".

    With `canonical` the text is first converted by `parashard.data.columns.canonical`.
    """

    kind: Literal["key"] = "key"
    name: str
    canonical: bool = False

    def keys_of(self, column: Column) -> Int64s:
        """Return the key of every row."""
        text = as_words(column)
        return hashed([*_compared(text.vocabulary, self.canonical), ""], self.name)[
            text.codes
        ]  # a missing cell's code -1 selects the last


class KeysColumn(FrozenModel):
    """One key per value of a cell, computed as in `KeyColumn`, but -2 in place of -1; missing values have none.

    `values_max` is the number of values of the longest list among the training and held-out rows, at least 1.
    """

    kind: Literal["keys"] = "keys"
    name: str
    delimiter: str
    values_max: int
    canonical: bool = False

    def lists_of(self, column: Column) -> Ragged:
        """Return the keys of every row."""
        assert isinstance(column, Lists)
        of_words = hashed(_compared(column.vocabulary, self.canonical), self.name)
        of_words[of_words == NO_KEY] = _INSTEAD_OF_NO_KEY
        return _ragged(of_words[column.codes], column, self.values_max)


class KnownKeyColumn(FrozenModel):
    """An embedding key: `first` + the text's index in `texts`.

    With n texts, the key of an unknown text is `first` + n (unless it is refused), of a missing cell `first` + n + 1.
    """

    kind: Literal["known_key"] = "known_key"
    name: str
    texts: tuple[str, ...]
    first: int
    unknown: UnknownTexts

    def keys_of(self, column: Column) -> Int64s:
        """Return the key of every row."""
        text = as_words(column)
        missing = self.first + len(self.texts) + 1
        return np.where(text.codes < 0, missing, known_keys(text, self.texts, self.first))


class KnownKeysColumn(FrozenModel):
    """One key per value of a cell, as in `KnownKeyColumn`; a missing one has none. `values_max` as in `KeysColumn`."""

    kind: Literal["known_keys"] = "known_keys"
    name: str
    delimiter: str
    values_max: int
    texts: tuple[str, ...]
    first: int
    unknown: UnknownTexts

    def lists_of(self, column: Column) -> Ragged:
        """Return the keys of every row."""
        assert isinstance(column, Lists)
        return _ragged(known_keys(texts_of(column), self.texts, self.first), column, self.values_max)


AnyKeyColumn = KeyColumn | KeysColumn | KnownKeyColumn | KnownKeysColumn
SINGLE_KEYS = (KeyColumn, KnownKeyColumn)
LISTS_OF_KEYS = (KeysColumn, KnownKeysColumn)
KNOWN_KEYS = (KnownKeyColumn, KnownKeysColumn)
ANY_KEYS = (*SINGLE_KEYS, *LISTS_OF_KEYS)
InputColumn = Annotated[
    NumberColumn | LogNumberColumn | TextColumn | KeyColumn | KeysColumn | KnownKeyColumn | KnownKeysColumn,
    Field(discriminator="kind"),
]


def hashed(texts: Sequence[str], column: str) -> Int64s:
    """Return the hashed keys of a column's texts, a new array."""
    return keys_of_texts(texts, seed_of(column)).view(np.int64)


def known_keys(texts: Words, vocabulary: Sequence[str], first: int) -> Int64s:
    """Return the keys of texts by their index in a vocabulary, compared as `Words.places` does."""
    places = texts.places(vocabulary)
    keys: Int64s = np.where(places < 0, first + len(vocabulary), first + places)
    return keys


def longest(*columns: Column) -> int:
    """Return the length of the longest list in some columns, at least 1."""
    return max([1, *(int(run_lengths(one.offsets).max(initial=0)) for one in columns if isinstance(one, Lists))])


def _ragged(keys: Int64s, column: Lists, values_max: int) -> Ragged:
    return Ragged(keys, column.offsets, max(values_max, longest(column)))


def _compared(texts: Sequence[str], canonical: bool) -> Sequence[str]:
    return [compared(text) for text in texts] if canonical else texts


def fitted_number(name: str, column: Numbers, origin: str) -> NumberColumn:
    """Return the standardisation of a numeric column, learned from these rows alone."""
    mean, deviation = mean_and_deviation(column.present(), origin)
    return NumberColumn(
        name=name,
        mean=mean,
        deviation=deviation,
        missing_input=bool(np.isnan(column.values).any()),
        boolean=column.boolean,
    )


def fitted_text(name: str, column: Words, origin: str) -> TextColumn:
    """Return the one-hot encoding of a text column, learned from these rows alone."""
    fitted = TextColumn(
        name=name, categories=tuple(merged(column).used()), missing_input=bool((column.codes < 0).any())
    )
    if fitted.width > MAX_CATEGORIES:
        raise BadData(
            f"{origin}: has {fitted.width:,} categories in {len(column.codes):,} training rows, more than the "
            f"{MAX_CATEGORIES:,} that can be one-hot encoded; group its values, or leave it out: "
            f"data.ignore = [{json.dumps(name)}]"
        )
    return fitted


def encoded(columns: Sequence[InputColumn], table: Mapping[str, Column], rows: int, origin: str) -> Tree:
    """Return a table's inputs: an array of shape (rows, sum of widths), or a dict of it, keys and ragged lists."""
    numbers = [column for column in columns if not isinstance(column, ANY_KEYS)]
    edges = list(itertools.accumulate((column.width for column in numbers), initial=0))
    inputs = np.zeros((rows, edges[-1]), np.float32)
    for column, start, stop in zip(numbers, edges, edges[1:], strict=False):
        column.encode(table[column.name], inputs[:, start:stop], f"{origin}: column {shown_cell(column.name)}")
    keys = [column.keys_of(table[column.name]) for column in columns if isinstance(column, SINGLE_KEYS)]
    lists = {
        column.name: column.lists_of(table[column.name]) for column in columns if isinstance(column, LISTS_OF_KEYS)
    }
    if not keys and not lists:
        return inputs
    of_rows = np.stack(keys, axis=1) if keys else np.empty((rows, 0), np.int64)
    return {"numbers": inputs, "keys": of_rows} | ({"lists": lists} if lists else {})


def unknown_at(texts: Words, known: Sequence[str]) -> Int64s:
    """Return the indices of the texts that are not among the known ones."""
    return np.flatnonzero((texts.codes >= 0) & (texts.places(known) < 0))


def check_known(column: InputColumn, cells: Column, cell: Callable[[int], str]) -> None:
    """Refuse a text that is not in its column's vocabulary, if the job refuses unknown texts."""
    if not isinstance(column, KNOWN_KEYS) or column.unknown == "key":
        return
    texts = texts_of(cells)
    unknown = unknown_at(texts, column.texts)
    if not len(unknown):
        return
    at = int(unknown[0])
    row = int(np.searchsorted(cells.offsets, at, side="right")) - 1 if isinstance(cells, Lists) else at
    raise BadData(
        f"{cell(row)}: found {shown_cell(texts.vocabulary[texts.codes[at]])}; allowed: the {len(column.texts):,} texts "
        'of the column\'s vocabulary (data.vocabularies), or data.unknown_texts = "key", which gives all others one key'
    )


VOCABULARY_BYTES_MAX = 4 << 20
"""Maximum total size of a job's vocabularies, which are saved with the job; larger columns need hashed keys."""


def read_vocabularies(paths: Mapping[str, Path], marks: MissingTexts = NO_MISSING_TEXTS) -> dict[str, tuple[str, ...]]:
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


def _texts(content: str, where: str, marks: MissingTexts) -> Iterator[str]:
    lines: dict[str, int] = {}
    for number, line in enumerate(content.split("\n") if content.strip() else [], start=1):
        text = line.strip()
        if not text and number == content.count("\n") + 1:
            break  # after the final line break
        if marks.is_missing(text):
            raise BadData(f"{where}: line {number} has {shown_cell(text)}, which stands for a missing value")
        if lines.setdefault(text, number) != number:
            raise BadData(f"{where}: lines {lines[text]} and {number} are both {shown_cell(text)}")
        yield text
    if not lines:
        raise BadData(f"{where}: is empty; allowed: a text in each line")


_PAIRS_SHOWN = 3


def count_keys(texts: Mapping[str, Sequence[str]]) -> tuple[HashedTexts, list[str]]:
    """Count the distinct texts and keys of columns, and warn of texts that share a key (the first pairs by name)."""
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
    """Return the fitted key columns by name, in the table's order."""
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
    """Count the distinct texts and keys of the hashed columns (None: there are none), and warn of collisions."""
    texts = {
        name: list(dict.fromkeys(canonical(text) for table in tables for text in _used(table[name])))
        for name, column in keyed.items()
        if isinstance(column, KeyColumn | KeysColumn)
    }
    return count_keys(texts) if texts else (None, [])


def _used(column: Column) -> list[str]:
    """Return the distinct texts that have a key; a missing cell of a single-value column counts as ""."""
    texts = texts_of(column)
    found = [texts.vocabulary[code] for code in np.flatnonzero(texts.counts())]
    return found + ([""] if (texts.codes < 0).any() else [])
