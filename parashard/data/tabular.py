"""Tabular data: the data source over a table of columns, for every tabular format."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from parashard.data.arrays import ArraySource, Split
from parashard.data.base import CellCounts, Indices
from parashard.data.columns import (
    Cells,
    Column,
    ColumnTable,
    Float64s,
    Lists,
    MissingTexts,
    Numbers,
    Words,
    as_lists,
    as_words,
    canonical,
    check_lengths,
    has_leading_zero,
    number_of,
    number_text,
    shown_cell,
    texts_of,
    typed,
    typed_like,
    without_missing,
)
from parashard.data.input_columns import (
    EVERY_TEXT,
    KNOWN_KEYS,
    AnyKeyColumn,
    InputColumn,
    KeyColumn,
    KeysColumn,
    TextColumn,
    check_known,
    encoded,
    fitted_keys,
    fitted_number,
    fitted_text,
    hashed_texts,
    keyed_names,
    unknown_at,
)
from parashard.data.labels import class_names, class_targets, kind_of_labels, value_targets
from parashard.data.options import TableOptions
from parashard.data.preprocessing import ClassTarget, ValueTarget, fitted_value
from parashard.errors import BadData, shown_names
from parashard.plan.variables import Float32s

_ROUNDED = re.compile(r"[0-9]\.[0-9]{15,}[eE]\+?[0-9]{2}")
_UNKNOWN_WARNED_SHARE = 0.5
_UNKNOWN_WARNED_MIN = 2


def column_warnings(
    columns: Sequence[InputColumn],
    read: Mapping[str, Column],
    training: Mapping[str, Column],
    held_out: Mapping[str, Column],
    marks: MissingTexts,
) -> tuple[dict[str, CellCounts], list[str]]:
    """Return the nonzero cell counts by column, and warnings about columns."""
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
    """Return the number of unknown texts in a column, the number of all its texts, and the first unknown one."""
    # For hashed keys, the texts of the training rows are known, if `training` is given.
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
    """Return groups of distinct texts that are read as one; differences in surrounding spaces do not count."""
    if isinstance(cells, Numbers) or not isinstance(column, (TextColumn, KeyColumn, KeysColumn)):
        return []
    return _grouped({text.strip() for text in cells.vocabulary}, canonical)


def prediction_warnings(columns: Iterable[InputColumn], table: Mapping[str, Column]) -> Iterator[str]:
    """Yield one line for each column of prediction rows that has unknown or missing cells."""
    for column in columns:
        unknown, values, example = unknown_cells(column, table[column.name])
        missing = missing_cells(table[column.name])
        texts = f"{unknown:,} of {values:,} texts are unknown, such as {shown_cell(example)}" if unknown else ""
        cells = f"{missing:,} cells are missing" if missing != 1 else "1 cell is missing"
        said = " and ".join(part for part in (texts, cells if missing else "") if part)
        if said:
            yield f"column {shown_cell(column.name)}: {said}"


def _text_warnings(read: Column, used: Column, merged: Sequence[Sequence[str]], marks: MissingTexts) -> Iterator[str]:
    """Yield warnings about a column's texts, as they were read and as they are used."""
    if isinstance(read, Numbers) or isinstance(used, Numbers) or not (used.codes >= 0).any():
        return
    texts = texts_of(used).used()
    yield from _marked(read, marks)
    if merged:
        more = f", as are {len(merged) - 1:,} more groups of texts" if len(merged) > 1 else ""
        yield f": {_joined(merged[0])} are one text{more}"
    padded = next(filter(has_leading_zero, texts), None)
    if padded is not None and all(number_of(text) is not None for text in texts):
        yield f" is read as text, for its whole numbers have leading zeros, such as {padded!r}"
    rounded = next(filter(_ROUNDED.fullmatch, texts), None)
    if rounded is not None:
        yield f" has names such as {rounded!r}, numbers that have lost their last digits; write them as whole numbers"
    cased = _grouped(set(map(canonical, texts)), str.casefold)
    if cased:
        more = f", and so do {len(cased) - 1:,} more groups of texts" if len(cased) > 1 else ""
        yield f": {_joined(cased[0])} differ in case alone{more}; each is a text of its own"


def _marked(read: Words | Lists, marks: MissingTexts) -> Iterator[str]:
    counts = texts_of(read).counts()
    found: Counter[str] = Counter()
    for text, count in zip(read.vocabulary, counts.tolist(), strict=True):
        if marks.is_missing(text) and text.strip() and text.strip() not in marks.also:
            found[text.strip()] += count
    if found:
        cells = " and ".join(f"{count:,} cells {text!r}" for text, count in sorted(found.items()))
        yield f": {cells} are read as missing; data.not_missing = {json.dumps(sorted(found))} reads them as names"


def _grouped(texts: Iterable[str], by: Callable[[str], str]) -> list[list[str]]:
    """Return the sorted groups of two or more texts for which `by` gives the same result."""
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(by(text), []).append(text)
    return sorted(sorted(group) for group in groups.values() if len(group) > 1)


def _joined(texts: Sequence[str]) -> str:
    return " and ".join(map(shown_cell, texts[:3]))


LIST_NAME_MAX = 180  # characters; with its prefix, a field's name has at most 200
WARNED_ROWS_MIN = 20  # in fewer rows all values may differ by chance
WARNED_DISTINCT_SHARE = 0.9
WARNED_IDS_MIN = 100  # rows; from here on, distinct whole numbers are warned about even if they may differ by chance
WARNED_FIRST = 1000
CHANCE = 10  # n numbers drawn out of n^2 / 10 all differ with a probability of e^-5
WARNED_RARE_MIN = 50  # distinct texts
WARNED_ROWS_EACH = 5  # rows for each text; fewer teach little
WARNED_NUMERALS_MIN = 10  # fewer distinct texts may be names, such as 1st and 2nd
_NUMERAL = re.compile(r"[\W_]*\d[\d\W_]*[^\W\d_]{0,3}[\d\W_]*Z?")  # letters: a unit, a currency, a month

_MONTH = r"\b(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\b"
_DATE = re.compile(
    rf"(?i)(?:\d{{1,4}}\W+|[a-z]{{2,9}}\W+)?{_MONTH}\W+\d[\d\W]*|[a-z]{{2,9}}\W+\d+\W+{_MONTH}\W+\d[\d\W]*"
)


def table_source(options: TableOptions, table: ColumnTable, held_out: ColumnTable | None) -> ArraySource:
    """Return the data source of a table, or of a training table and a held-out one."""
    # Means, deviations and vocabularies are fitted on the training rows alone; only the classes come from the whole
    # training table, so that a rare class is known even if all of its rows are held out.
    whole = _typed(options, table)
    labels = whole.pop(options.label)
    assert not isinstance(labels, Lists), "refused before"
    origin = f"{table.path}: label column {shown_cell(options.label)}"
    kind = options.target or kind_of_labels(labels, origin)
    classes = class_names(labels, origin) if kind == "class" else ()
    targets = _targets(labels, classes, options.label, table)
    if held_out is None:
        rows, held_out_rows = options.rows(len(targets))
        train, train_targets = _taken(whole, rows), targets[rows]
        evaluation, evaluation_targets = _taken(whole, held_out_rows), targets[held_out_rows]
    else:
        train, train_targets = whole, targets
        absent = sorted({options.label, *whole} - set(held_out.columns))
        if absent:
            raise BadData(f"{held_out.path}: lacks the columns {shown_names(absent)}")
        evaluation = {name: _like(options, column, held_out, name) for name, column in whole.items()}
        judged = typed_like(labels, held_out, options.label, marks=options.marks)
        evaluation_targets = _targets(judged, classes, options.label, held_out)
    keyed = fitted_keys(options, whole, evaluation)
    for name, fitted in keyed.items():
        check_known(fitted, whole[name], functools.partial(table.cell, name))
        if held_out is not None:
            check_known(fitted, evaluation[name], functools.partial(held_out.cell, name))
    hashed, collisions = hashed_texts(keyed, [whole] if held_out is None else [whole, evaluation])
    columns = tuple(
        keyed[name]
        if name in keyed
        else _fitted(name, column, name in options.categorical, f"{table.path}: column {shown_cell(name)}")
        for name, column in train.items()
    )
    cells, told = column_warnings(columns, table.columns, train, evaluation, options.marks)
    return ArraySource(
        Split(encoded(columns, train, len(train_targets), str(table.path)), train_targets),
        Split(encoded(columns, evaluation, len(evaluation_targets), str((held_out or table).path)), evaluation_targets),
        classes=len(classes),
        columns=columns,
        target=_described(options.label, classes, train_targets, origin),
        marks=options.marks,
        warnings=(
            *(f"{one.path}: {said}" for one in (table, held_out) if one is not None for said in one.warnings),
            *_of_index(options, table),
            *_warnings(whole, keyed, options.categorical),
            *collisions,
            *_vocabulary_warnings(whole, keyed),
            *told,
        ),
        hashed=hashed,
        cells=cells,
    )


def _typed(options: TableOptions, table: ColumnTable) -> dict[str, Column]:
    """Return the label and the inputs as numbers, text or lists, in the table's order."""
    named = keyed_names(options)
    of_keys = {
        "list_columns": options.list_columns,
        "vocabularies": tuple(options.vocabularies),
        "key_columns": () if options.key_columns == (EVERY_TEXT,) else options.key_columns,
    }
    told = {"label": (options.label,), "categorical": options.categorical, **of_keys, "ignore": options.ignore}
    for key, names in told.items():
        for name in names:
            if name not in table.columns:
                raise BadData(
                    f"{table.path}: has no column {shown_cell(name)}, which data.{key} names; its columns: "
                    f"{shown_names(table.columns)}"
                )
    for key, names in {"ignore": options.ignore, **of_keys}.items():
        if options.label in names:
            raise BadData(f"{table.path}: data.{key} names the label {shown_cell(options.label)}")
        both = [name for name in names if name in options.ignore and key != "ignore"]
        if both:
            raise BadData(f"{table.path}: data.{key} names {shown_cell(both[0])}, which data.ignore leaves out")
    used = [name for name in table.columns if not options.leaves_out(name)]
    if len(used) < 2:
        raise BadData(f"{table.path}: has no column but the label {shown_cell(options.label)} to learn from")
    texts = {*options.categorical, *table.categories, *named}
    return {name: _column(options, table, name, as_text=name in texts) for name in used}


def _column(options: TableOptions, table: ColumnTable, name: str, *, as_text: bool) -> Column:
    column = table.columns[name]
    if isinstance(column, Lists):
        return _listed(options, column, table, name)
    cells = typed(
        table,
        name,
        marks=options.marks,
        as_text=as_text,
        zeros_are_text=name != options.label or options.target != "value",
        mixed=name == options.label and options.target == "class",  # the name of a class may be a number or a text
        is_label=name == options.label,
        may_be_class=options.target is None,
    )
    return _listed(options, cells, table, name) if name in options.list_columns else cells


def _listed(options: TableOptions, column: Column, table: ColumnTable, name: str) -> Lists:
    """Return a column as lists of texts, which become keys."""
    if name == options.label or not (options.key_columns == (EVERY_TEXT,) or name in keyed_names(options)):
        said = json.dumps(name)
        advice = (
            "a label is one value in each row"
            if name == options.label
            else f"data.list_columns = [{said}] makes keys of them, data.ignore = [{said}] leaves them out"
        )
        raise BadData(f"{table.path}: column {shown_cell(name)}: has lists; {advice}")
    if len(name) > LIST_NAME_MAX:
        raise BadData(f"{table.path}: column {shown_cell(name)}: a name of at most {LIST_NAME_MAX} characters is due")
    lists = as_lists(column, options.value_delimiter, options.marks)
    check_lengths(lists, functools.partial(table.cell, name))
    return lists


def _like(options: TableOptions, training: Column, table: ColumnTable, name: str) -> Column:
    """Return a held-out column as the kind that it has in the training table."""
    if not isinstance(training, Lists):
        return typed_like(training, table, name, marks=options.marks)
    column = table.columns[name]
    if isinstance(column, Words):
        column = without_missing(column, options.marks)
    return _listed(options, column, table, name)


def _targets(
    labels: Cells, classes: tuple[str, ...], label: str, table: ColumnTable
) -> npt.NDArray[np.int64] | Float32s:
    cell = functools.partial(table.cell, label)
    return class_targets(labels, classes, cell) if classes else value_targets(labels, cell)


def _taken(columns: Mapping[str, Column], rows: Indices) -> dict[str, Column]:
    return {name: column.take(rows) for name, column in columns.items()}


def _fitted(name: str, column: Column, categorical: bool, origin: str) -> InputColumn:
    if isinstance(column, Numbers) and not categorical:
        return fitted_number(name, column, origin)
    return fitted_text(name, as_words(column), origin)


def _described(
    label: str, classes: tuple[str, ...], targets: npt.NDArray[np.int64] | Float32s, origin: str
) -> ClassTarget | ValueTarget:
    if classes:
        return ClassTarget(name=label, classes=classes)
    if targets.min() == targets.max():
        raise BadData(f"{origin}: is {targets[0]:g} in every training row: there is nothing to learn")
    return fitted_value(label, targets.astype(np.float64), origin)


def _of_index(options: TableOptions, table: ColumnTable) -> Iterator[str]:
    """Yield a warning for each column that was a pandas index: its order may reveal the label."""
    for name in table.columns:
        if name in options.ignore or name == options.label:
            continue
        what, said = f"column {shown_cell(name)} is an index of pandas", json.dumps(name)
        if options.leaves_out(name):
            yield f"{what}, and is left out, as by data.ignore = [{said}]; data.categorical = [{said}] uses it"
        elif name in table.pandas_index:
            yield f"{what}, and is learned from: its order may tell the label; data.ignore = [{said}] leaves it out"


def _warnings(columns: Mapping[str, Column], keyed: Collection[str], categorical: Collection[str]) -> Iterator[str]:
    """Yield warnings about likely mistakes in non-key columns; `categorical` is the job file's list of columns."""
    for name, column in columns.items():
        if name in keyed or isinstance(column, Lists):
            continue
        what, left_out = f"column {shown_cell(name)}", f"data.ignore = [{json.dumps(name)}] leaves it out"
        found = notation(column) if isinstance(column, Words) and name not in categorical else ""
        if found:
            yield (
                f"{what} {found}, and each becomes an input of its own; write them as plain numbers, such as 1234.5; "
                f"or say data.categorical = [{json.dumps(name)}] if they are names; {left_out}"
            )
            continue
        found = useless(column)
        if found:
            yield f"{what} {found}, from which nothing can be learned for other rows; {left_out}"
        elif isinstance(column, Words) and rare(column):
            yield f"{what} {rare(column)}, and each becomes an input; {left_out}"
        elif isinstance(column, Numbers) and len(column.values) >= WARNED_IDS_MIN and _are_distinct(column.present()):
            yield f"{what} has a different whole number in each row: if it is an id, {left_out}"


def _vocabulary_warnings(columns: Mapping[str, Column], keyed: Mapping[str, AnyKeyColumn]) -> Iterator[str]:
    """Yield a warning for each column whose vocabulary lacks most of its values: it may be another column's."""
    for name, fitted in keyed.items():
        unknown, values, _ = unknown_cells(fitted, columns[name])
        if 2 * unknown > values:
            yield (
                f"column {shown_cell(name)}: {unknown:,} of its {values:,} values are not in its vocabulary, and have "
                "one key; is the file of data.vocabularies that of the column?"
            )


def useless(column: Cells) -> str:
    """Return why nothing can be learned from a column, such as an index; "" where it can."""
    found = _constant_of(column)
    if found:
        return found
    return _index_of(column.present()) if isinstance(column, Numbers) else _id_of(column.counts())


def rare(column: Words) -> str:
    """Return why too little can be learned from the texts of a column, such as notes; "" where they repeat."""
    counts = column.counts()
    rows, distinct = int(counts.sum()), int(np.count_nonzero(counts))
    if distinct < WARNED_RARE_MIN or rows >= WARNED_ROWS_EACH * distinct:
        return ""
    return f"has {distinct:,} distinct texts in {rows:,} rows, few rows of each"


def notation(column: Words) -> str:
    """Return why a text column looks like numbers that are written in another way; "" where it does not."""
    texts = column.used()
    numerals = [
        text for text in texts if (_NUMERAL.fullmatch(text) or _DATE.fullmatch(text)) and number_of(text) is None
    ]
    if len(texts) < WARNED_NUMERALS_MIN or 2 * len(numerals) <= len(texts):
        return ""
    return f"has {len(texts):,} distinct texts that look like numbers or dates, such as {shown_cell(numerals[0])}"


def _constant_of(column: Cells) -> str:
    """Return "is VALUE in every row" for a constant column; "" if rows differ or are few."""
    if isinstance(column, Numbers):
        values = column.values
        same = len(values) >= WARNED_ROWS_MIN and bool((values == values[0]).all())  # False if one is missing (NaN)
        return f"is {number_text(float(values[0]), column.boolean)} in every row" if same else ""
    code = column.codes[0]
    same = len(column.codes) >= WARNED_ROWS_MIN and code >= 0 and bool((column.codes == code).all())
    return f"is {shown_cell(column.vocabulary[code])} in every row" if same else ""


def _index_of(present: Float64s) -> str:
    """Return why a numeric column with these values looks like an index; "" where it does not."""
    if not len(present):
        return "has no value in any row"
    low, high, rows = present.min(), present.max(), len(present)
    if rows**2 < CHANCE * (high - low + 1) or not _are_distinct(present):  # this many may differ by chance
        return ""
    if high - low + 1 == rows:
        return f"counts the rows from {low:.0f} to {high:.0f}: it looks like an index"
    return (
        f"has a different whole number in each of {rows:,} rows, from {low:.0f} to {high:.0f}: it looks like an index"
    )


def _are_distinct(numbers: Float64s) -> bool:
    """Tell whether numbers are whole and all differ."""
    first = numbers[:WARNED_FIRST]  # nearly every column fails here
    if len(numbers) < WARNED_ROWS_MIN or (first != np.floor(first)).any() or len(np.unique(first)) < len(first):
        return False
    return bool((numbers == np.floor(numbers)).all()) and len(np.unique(numbers)) == len(numbers)


def _id_of(counts: npt.NDArray[np.int64]) -> str:
    """Return why a text column with these numbers of rows per text looks like an id; "" if it does not."""
    rows, distinct = int(counts.sum()), int(np.count_nonzero(counts))
    if not rows:
        return "has no value in any row"
    if rows < WARNED_ROWS_MIN or distinct < WARNED_DISTINCT_SHARE * rows:
        return ""
    return f"has {distinct:,} distinct texts in {rows:,} rows: it looks like an id"
