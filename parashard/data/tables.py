"""Tables: the data source over a table of columns, for every tabular format.

Owns the options that the tabular formats share, the order of the checks, and the warnings. Knows nothing of files:
`csv` and `parquet` read them and call `table_source`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from parashard.data.arrays import ArraySource, Split
from parashard.data.base import Indices
from parashard.data.columns import (
    Column,
    Float64s,
    Numbers,
    Table,
    Words,
    as_words,
    number_text,
    shown_cell,
    typed,
    typed_like,
)
from parashard.data.labels import class_names, class_targets, kind_of_labels, value_targets
from parashard.data.options import TableOptions
from parashard.data.preprocessing import (
    ClassTarget,
    InputColumn,
    KeyColumn,
    ValueTarget,
    encoded,
    fitted_number,
    fitted_text,
    fitted_value,
)
from parashard.errors import BadData, shown_names
from parashard.plan.variables import Float32s

EVERY_TEXT = "*"
WARNED_ROWS_MIN = 20  # in fewer rows all values may differ by chance
WARNED_DISTINCT_SHARE = 0.9
WARNED_NUMERALS_MIN = 10  # fewer distinct texts may be names, such as 1st and 2nd
_NUMERAL = re.compile(r"[\W_]*\d[\d\W_]*[^\W\d_]{0,3}[\d\W_]*Z?")  # letters: a unit, a currency, a month


def table_source(options: TableOptions, table: Table, held_out: Table | None) -> ArraySource:
    """Return the data source of a table, or of a training table and a held-out one.

    Means, deviations and vocabularies are fitted on the training rows alone; only the classes come from the whole
    training table, so that a rare class that was held out is still one.

    Raises
    ------
    BadData
        A column is missing or has an invalid value, a label is missing or unknown, or there is nothing to encode.
    """
    whole = _typed(options, table)
    labels = whole.pop(options.label)
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
        evaluation = {
            name: typed_like(column, held_out, name, also_missing=options.missing) for name, column in whole.items()
        }
        judged = typed_like(labels, held_out, options.label, also_missing=options.missing)
        evaluation_targets = _targets(judged, classes, options.label, held_out)
    keyed = _keyed(options, train)
    columns = tuple(
        KeyColumn(name=name)
        if name in keyed
        else _fitted(name, column, name in options.categorical, f"{table.path}: column {shown_cell(name)}")
        for name, column in train.items()
    )
    return ArraySource(
        Split(encoded(columns, train, len(train_targets), str(table.path)), train_targets),
        Split(encoded(columns, evaluation, len(evaluation_targets), str((held_out or table).path)), evaluation_targets),
        classes=len(classes),
        columns=columns,
        target=_described(options.label, classes, train_targets, origin),
        missing=options.missing,
        warnings=tuple(_warnings({name: c for name, c in whole.items() if name not in keyed}, options.categorical)),
    )


def _typed(options: TableOptions, table: Table) -> dict[str, Column]:
    """Return the label and the inputs as numbers or text, in the table's order."""
    named = () if options.key_columns == (EVERY_TEXT,) else options.key_columns
    for key, names in (
        ("label", [options.label]),
        ("categorical", options.categorical),
        ("key_columns", named),
        ("ignore", options.ignore),
    ):
        for name in names:
            if name not in table.columns:
                raise BadData(
                    f"{table.path}: has no column {shown_cell(name)}, which data.{key} names; its columns: "
                    f"{shown_names(table.columns)}"
                )
    for key, names in (("ignore", options.ignore), ("key_columns", named)):
        if options.label in names:
            raise BadData(f"{table.path}: data.{key} names the label {shown_cell(options.label)}")
    used = [name for name in table.columns if name not in options.ignore]
    if len(used) < 2:
        raise BadData(f"{table.path}: has no column but the label {shown_cell(options.label)} to learn from")
    columns = {}
    for name in used:
        mixed = name == options.label and options.target == "class"  # the name of a class may be a number or a text
        columns[name] = typed(
            table,
            name,
            also_missing=options.missing,
            as_text=name in options.categorical or name in named,
            mixed=mixed,
            is_label=name == options.label,
            may_be_class=options.target is None,
        )
    return columns


def _keyed(options: TableOptions, columns: Mapping[str, Column]) -> Collection[str]:
    """Return the names of the input columns that become keys."""
    if options.key_columns != (EVERY_TEXT,):
        return options.key_columns
    return [name for name, column in columns.items() if isinstance(column, Words) or name in options.categorical]


def _targets(labels: Column, classes: tuple[str, ...], label: str, table: Table) -> npt.NDArray[np.int64] | Float32s:
    def cell(row: int) -> str:
        return table.cell(label, row)

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


def _warnings(columns: Mapping[str, Column], categorical: Collection[str]) -> Iterator[str]:
    """Yield likely mistakes in the input columns; `categorical` are those that the job file declares so."""
    for name, column in columns.items():
        what, left_out = f"column {shown_cell(name)}", f"data.ignore = [{json.dumps(name)}] leaves it out"
        found = _notation_of(column) if isinstance(column, Words) and name not in categorical else ""
        if found:
            yield (
                f"{what} {found}, and each becomes an input of its own; write them as plain numbers, such as 1234.5; "
                f"or say data.categorical = [{json.dumps(name)}] if they are names; {left_out}"
            )
            continue
        found = useless(column)
        if found:
            yield f"{what} {found}, from which nothing can be learned for other rows; {left_out}"


def useless(column: Column) -> str:
    """Return why nothing can be learned from a column, such as an index; "" where it can."""
    found = _constant_of(column)
    if found:
        return found
    return _index_of(column.present()) if isinstance(column, Numbers) else _id_of(column.counts())


def _notation_of(column: Words) -> str:
    """Return why a text column looks like numbers that are written in another way; "" where it does not."""
    texts = column.used()
    numerals = [text for text in texts if _NUMERAL.fullmatch(text)]
    if len(texts) < WARNED_NUMERALS_MIN or 2 * len(numerals) <= len(texts):
        return ""
    return f"has {len(texts):,} distinct texts that look like numbers or dates, such as {shown_cell(numerals[0])}"


def _constant_of(column: Column) -> str:
    """Return what a column is in every row; "" where rows differ, or are few."""
    if isinstance(column, Numbers):
        values = column.values
        same = len(values) >= WARNED_ROWS_MIN and bool((values == values[0]).all())  # not so where one is missing
        return f"is {number_text(float(values[0]), column.boolean)} in every row" if same else ""
    code = column.codes[0]
    same = len(column.codes) >= WARNED_ROWS_MIN and code >= 0 and bool((column.codes == code).all())
    return f"is {shown_cell(column.vocabulary[code])} in every row" if same else ""


def _index_of(present: Float64s) -> str:
    """Return why a numeric column with these values looks like an index; "" where it does not."""
    if not len(present):
        return "has no value in any row"
    low, high, rows = present.min(), present.max(), len(present)
    # In order of cost: nearly every column fails the first test, and few are sorted.
    if rows < WARNED_ROWS_MIN or high - low + 1 != rows or len(np.unique(np.floor(present))) < rows:
        return ""
    return f"counts the rows from {low:.0f} to {high:.0f}: it looks like an index"


def _id_of(counts: npt.NDArray[np.int64]) -> str:
    """Return why a text column, with so many rows for each text, looks like an id; "" where it does not."""
    rows, distinct = int(counts.sum()), int(np.count_nonzero(counts))
    if not rows:
        return "has no value in any row"
    if rows < WARNED_ROWS_MIN or distinct < WARNED_DISTINCT_SHARE * rows:
        return ""
    return f"has {distinct:,} distinct texts in {rows:,} rows: it looks like an id"
