"""Columns that become keys of embedding tables: of hashed texts or of a vocabulary, one in each row or several.

Owns what of such a column is saved for prediction, and the keys of its texts. Knows neither files nor models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from parashard.data.columns import Column, Lists, Words, as_words
from parashard.data.hashing import keys_of_texts, seed_of
from parashard.data.options import UnknownTexts
from parashard.data.ragged import NO_KEY, Int64s, Ragged, run_lengths
from parashard.data.texts import canonical as compared
from parashard.frozen_model import FrozenModel

_INSTEAD_OF_NO_KEY = -2


class KeyColumn(FrozenModel):
    """A key of embedding tables: XXH64 of the cell's text, with a seed of the column's own; a missing cell is "".

    With `canonical` it is that of the form in which texts are compared, `parashard.data.texts.canonical`.
    """

    kind: Literal["key"] = "key"
    name: str
    canonical: bool = False

    def keys_of(self, column: Column) -> Int64s:
        """Return the key of every row."""
        text = as_words(column)
        return hashed([*_compared(text.vocabulary, self.canonical), ""], self.name)[
            text.codes
        ]  # code -1, of a missing cell: the last


class KeysColumn(FrozenModel):
    """A key for each value of a cell, as of `KeyColumn`, but -2 where that is -1; a missing value has none.

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
    """A key of embedding tables: `first` + the text's place among `texts`.

    With n texts an unknown one has the key `first` + n, unless it is refused, and a missing cell `first` + n + 1.
    """

    kind: Literal["known_key"] = "known_key"
    name: str
    texts: tuple[str, ...]
    first: int
    unknown: UnknownTexts

    @property
    def known(self) -> tuple[str, ...]:
        """The texts that are not unknown."""
        return self.texts

    def keys_of(self, column: Column) -> Int64s:
        """Return the key of every row."""
        text = as_words(column)
        missing = self.first + len(self.texts) + 1
        return np.where(text.codes < 0, missing, known_keys(text, self.texts, self.first))


class KnownKeysColumn(FrozenModel):
    """A key for each value of a cell, as of `KnownKeyColumn`; a missing value has none. `values_max` as above."""

    kind: Literal["known_keys"] = "known_keys"
    name: str
    delimiter: str
    values_max: int
    texts: tuple[str, ...]
    first: int
    unknown: UnknownTexts

    @property
    def known(self) -> tuple[str, ...]:
        """The texts that are not unknown."""
        return self.texts

    def lists_of(self, column: Column) -> Ragged:
        """Return the keys of every row."""
        assert isinstance(column, Lists)
        return _ragged(known_keys(column.texts(), self.texts, self.first), column, self.values_max)


AnyKeyColumn = KeyColumn | KeysColumn | KnownKeyColumn | KnownKeysColumn
SINGLE_KEYS = (KeyColumn, KnownKeyColumn)
LISTS_OF_KEYS = (KeysColumn, KnownKeysColumn)
KNOWN_KEYS = (KnownKeyColumn, KnownKeysColumn)


def hashed(texts: Sequence[str], column: str) -> Int64s:
    """Return the keys of a column's texts, new."""
    return keys_of_texts(texts, seed_of(column)).view(np.int64)


def known_keys(texts: Words, vocabulary: Sequence[str], first: int) -> Int64s:
    """Return the keys of texts by their place in a vocabulary, in the form in which texts are compared."""
    places = texts.places(vocabulary)
    keys: Int64s = np.where(places < 0, first + len(vocabulary), first + places)
    return keys


def unknown_text(column: KnownKeyColumn | KnownKeysColumn, texts: Column) -> tuple[int, str] | None:
    """Return the first row with a text that the vocabulary lacks, and the text; None: there is none."""
    words = _texts_in(texts)
    unknown = np.flatnonzero(_is_unknown(column, words))
    if not len(unknown):
        return None
    at = int(unknown[0])
    row = int(np.searchsorted(texts.offsets, at, side="right")) - 1 if isinstance(texts, Lists) else at
    return row, words.vocabulary[words.codes[at]]


def unknown_values(column: AnyKeyColumn, texts: Column) -> tuple[int, int]:
    """Return how many values of a column its vocabulary lacks, and how many there are; (0, 0) without a vocabulary."""
    if not isinstance(column, KNOWN_KEYS):
        return 0, 0
    words = _texts_in(texts)
    return int(_is_unknown(column, words).sum()), int((words.codes >= 0).sum())


def _texts_in(column: Column) -> Words:
    return column.texts() if isinstance(column, Lists) else as_words(column)


def _is_unknown(column: KnownKeyColumn | KnownKeysColumn, texts: Words) -> npt.NDArray[np.bool_]:
    unknown: npt.NDArray[np.bool_] = (texts.codes >= 0) & (texts.places(column.texts) < 0)
    return unknown


def longest(*columns: Column) -> int:
    """Return the number of values of the longest list of some columns, at least 1."""
    return max([1, *(int(run_lengths(one.offsets).max(initial=0)) for one in columns if isinstance(one, Lists))])


def _ragged(keys: Int64s, column: Lists, values_max: int) -> Ragged:
    return Ragged(keys, column.offsets, max(values_max, longest(column)))


def _compared(texts: Sequence[str], canonical: bool) -> Sequence[str]:
    return [compared(text) for text in texts] if canonical else texts
