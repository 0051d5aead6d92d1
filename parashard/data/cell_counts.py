"""How many cells of each column are missing, unknown or of a merged text, and what of that a user must know.

Owns the counts of the report and of a prediction, and the warnings that follow from texts. Knows no file.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from parashard.data.base import CellCounts
from parashard.data.columns import Column, Lists, Numbers, Words, shown_cell, texts_of
from parashard.data.input_columns import KNOWN_KEYS, InputColumn, KeyColumn, KeysColumn, TextColumn, unknown_at
from parashard.data.texts import Marks, canonical, has_leading_zero, number_of

_ROUNDED = re.compile(r"[0-9]\.[0-9]{15,}[eE]\+?[0-9]{2}")
_UNKNOWN_WARNED_SHARE = 0.5
_UNKNOWN_WARNED_MIN = 2


def told_of_columns(
    columns: Sequence[InputColumn],
    read: Mapping[str, Column],
    training: Mapping[str, Column],
    held_out: Mapping[str, Column],
    marks: Marks,
) -> tuple[dict[str, CellCounts], list[str]]:
    """Return the counts of the columns that have any, and warnings."""
    counts, warnings = {}, []
    for column in columns:
        of_training, of_held_out = training[column.name], held_out[column.name]
        merged = merged_texts(column, read[column.name])
        unknown, values, example = unknown_cells(column, of_held_out, of_training)
        found = CellCounts(
            missing_cells(of_training) + missing_cells(of_held_out),
            unknown_cells(column, of_training)[0] + unknown,
            sum(len(texts) - 1 for texts in merged),
        )
        if any(found):
            counts[column.name] = found
        what = f"column {shown_cell(column.name)}"
        warnings += [f"{what}{said}" for said in _text_warnings(read[column.name], of_training, merged, marks)]
        if unknown >= max(_UNKNOWN_WARNED_MIN, _UNKNOWN_WARNED_SHARE * values):
            warnings.append(
                f"{what}: {unknown:,} of its {values:,} held-out texts, such as {shown_cell(example)}, are unknown: "
                "nothing was learned of them"
            )
    return counts, warnings


def missing_cells(column: Column) -> int:
    """Return how many cells of a column have no value."""
    if isinstance(column, Numbers):
        return int(np.isnan(column.values).sum())
    if isinstance(column, Lists):
        return int((np.diff(column.offsets) == 0).sum())
    return int((column.codes < 0).sum())


def unknown_cells(column: InputColumn, cells: Column, training: Column | None = None) -> tuple[int, int, str]:
    """Return how many texts are none of a column's, how many there are, and the first that is unknown."""
    # Of hashed keys those of the training rows are known, if these are given.
    if isinstance(column, TextColumn):
        known = column.categories
    elif isinstance(column, KNOWN_KEYS):
        known = column.texts
    elif training is not None and isinstance(column, (KeyColumn, KeysColumn)):
        known = tuple(texts_of(training).used())
    else:
        return 0, 0, ""
    texts = texts_of(cells)
    unknown = unknown_at(texts, known)
    example = texts.vocabulary[texts.codes[unknown[0]]] if len(unknown) else ""
    return len(unknown), int((texts.codes >= 0).sum()), example


def merged_texts(column: InputColumn, cells: Column) -> list[list[str]]:
    """Return the distinct texts of a column that are read as one, where that is not for spaces around them alone."""
    if isinstance(cells, Numbers) or not isinstance(column, (TextColumn, KeyColumn, KeysColumn)):
        return []
    return _grouped({text.strip() for text in cells.vocabulary}, canonical)


def told_of_cells(columns: Iterable[InputColumn], table: Mapping[str, Column]) -> Iterator[str]:
    """Yield a line for each column of rows to predict for that has unknown or missing cells."""
    for column in columns:
        unknown, values, example = unknown_cells(column, table[column.name])
        missing = missing_cells(table[column.name])
        texts = f"{unknown:,} of {values:,} texts are unknown, such as {shown_cell(example)}" if unknown else ""
        cells = f"{missing:,} cells are missing" if missing != 1 else "1 cell is missing"
        said = " and ".join(part for part in (texts, cells if missing else "") if part)
        if said:
            yield f"column {shown_cell(column.name)}: {said}"


def _text_warnings(read: Column, used: Column, merged: Sequence[Sequence[str]], marks: Marks) -> Iterator[str]:
    """Yield what a user must know of a column's texts, as it was read and as it is used."""
    if isinstance(read, Numbers) or isinstance(used, Numbers) or not (used.codes >= 0).any():
        return
    texts = texts_of(used).used()
    yield from _marked(read, marks)
    if merged:
        more = f", as are {len(merged) - 1:,} more groups of texts" if len(merged) > 1 else ""
        yield f": {_listed(merged[0])} are one text{more}"
    padded = next(filter(has_leading_zero, texts), None)
    if padded is not None and all(number_of(text) is not None for text in texts):
        yield f" is read as text, for its whole numbers have leading zeros, such as {padded!r}"
    rounded = next(filter(_ROUNDED.fullmatch, texts), None)
    if rounded is not None:
        yield f" has names such as {rounded!r}, numbers that have lost their last digits; write them as whole numbers"
    cased = _grouped(set(map(canonical, texts)), str.casefold)
    if cased:
        more = f", and so do {len(cased) - 1:,} more groups of texts" if len(cased) > 1 else ""
        yield f": {_listed(cased[0])} differ in case alone{more}; each is a text of its own"


def _marked(read: Words | Lists, marks: Marks) -> Iterator[str]:
    counts = texts_of(read).counts()
    found: Counter[str] = Counter()
    for text, count in zip(read.vocabulary, counts.tolist(), strict=True):
        if marks.is_missing(text) and text.strip() and text.strip() not in marks.also:
            found[text.strip()] += count
    if found:
        cells = " and ".join(f"{count:,} cells {text!r}" for text, count in sorted(found.items()))
        yield f": {cells} are read as missing; data.not_missing = {json.dumps(sorted(found))} reads them as names"


def _grouped(texts: Iterable[str], by: Callable[[str], str]) -> list[list[str]]:
    """Return the groups of more than one text that are the same by a function, all in order."""
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(by(text), []).append(text)
    return sorted(sorted(group) for group in groups.values() if len(group) > 1)


def _listed(texts: Sequence[str]) -> str:
    return " and ".join(map(shown_cell, texts[:3]))
