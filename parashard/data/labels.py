"""Labels: whether a label names a class or is a number to predict, and the targets of each.

Owns the default if the job file does not set it: one rule for every format; ambiguous labels are an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from parashard.data.base import MAX_CLASSES
from parashard.data.columns import MISSING, Cells, Numbers, as_words, merged, number_text
from parashard.data.options import TargetKind
from parashard.errors import BadData, shortened
from parashard.plan.variables import Float32s

INFERRED_CLASSES_MAX = 20
"""With more distinct whole numbers than this, the labels may be amounts: the job file must say which."""

_ROUNDED = 1000
"""Rounding to float32 is accepted if the standard deviation is at least this many times the largest rounding error."""

Cell = Callable[[int], str]
"""Return the location of a row's label, for messages."""


def kind_of_labels(labels: Cells, origin: str) -> TargetKind:
    """Return the default meaning of a label column."""
    # Numbers of which one has a fraction are values. Classes are booleans, one or two whole numbers, up to
    # `INFERRED_CLASSES_MAX` whole numbers with two rows each on average, and texts that are as few or as frequent.
    if isinstance(labels, Numbers):
        present = labels.present()
        if (present != np.floor(present)).any():
            return "value"
        distinct, rows, what = len(np.unique(present)), len(present), "whole numbers"
        safe = labels.boolean or distinct <= 2 or (distinct <= INFERRED_CLASSES_MAX and 2 * distinct <= rows)
        otherwise = f'"value" to predict the number, or "class" to tell {distinct:,} classes apart'
    else:
        counts, what = merged(labels).counts(), "texts"
        rows, distinct = int(counts.sum()), int(np.count_nonzero(counts))
        safe = distinct <= INFERRED_CLASSES_MAX or 2 * distinct <= rows
        otherwise = f'"class" to tell {distinct:,} classes apart, or name another column in data.label'
    if safe:
        return "class"
    raise BadData(f"{origin}: has {distinct:,} distinct {what} in {rows:,} rows; say data.target = {otherwise}")


def kind_of_dtype(labels: npt.NDArray[Any]) -> TargetKind:
    """Return the meaning of an array's dtype: integers and booleans number classes from 0 on, floats are values."""
    return "class" if labels.dtype.kind in "biu" else "value"


def kind_of_array(labels: npt.NDArray[Any], origin: str) -> TargetKind:
    """Return the default meaning of an array of finite labels: that of its dtype; BadData if that is doubtful."""
    kind, distinct, examples = kind_of_dtype(labels), len(np.unique(labels)), len(labels)
    if kind == "class":
        classes = int(labels.max(initial=0)) + 1
        if classes <= 2 or labels.min() < 0:  # the caller refuses negative classes
            return kind
        safe = 2 * distinct <= examples and (2 * distinct > classes or classes <= INFERRED_CLASSES_MAX)
        what = f"integers up to {classes - 1:,}"
    else:
        whole = bool((labels == np.floor(labels)).all())
        safe = not whole or distinct > INFERRED_CLASSES_MAX or 2 * distinct > examples
        what = "floats, all of them whole,"
    if safe:
        return kind
    raise BadData(
        f"{origin}: has {distinct:,} distinct {what} in {examples:,} examples; say data.target = "
        '"value" to predict the number, or "class" if they number classes from 0 on'
    )


def whole_numbers(labels: npt.NDArray[Any], origin: str) -> npt.NDArray[Any]:
    """Return finite labels that number classes as integers; BadData for a float that is not whole."""
    if labels.dtype.kind != "f":
        return labels
    wrong = np.flatnonzero(labels != np.floor(labels))
    if len(wrong):
        raise BadData(
            f'{origin}: index {int(wrong[0])} is {labels[wrong[0]]:g}, and with data.target = "class" labels are '
            "whole numbers from 0 on"
        )
    return np.asarray(np.clip(labels, -1, MAX_CLASSES).astype(np.int64))


def class_names(labels: Cells, origin: str) -> tuple[str, ...]:
    """Return the labels' texts: numeric labels sorted by value, others as text; BadData for too few or too many."""
    if isinstance(labels, Numbers):
        names = tuple(number_text(value, labels.boolean) for value in np.unique(labels.present()).tolist())
    else:
        names = tuple(merged(labels).used())
    if not 1 < len(names) <= MAX_CLASSES:
        raise BadData(f"{origin}: must have 2 to {MAX_CLASSES} distinct values, found {len(names)}")
    return names


def class_targets(labels: Cells, classes: Sequence[str], cell: Cell) -> npt.NDArray[np.int64]:
    """Return every row's index in `classes`."""
    text = as_words(labels)
    targets = text.places(classes)
    wrong = np.flatnonzero(targets < 0)
    if len(wrong):
        code = int(text.codes[wrong[0]])
        found = "missing" if code < 0 else f"{_shown(text.vocabulary[code])}, which the training table does not have"
        names = [name for name in text.vocabulary if name.strip().lower() in MISSING[1:]] if code < 0 else []
        hint = f"; data.not_missing = [{_shown(names[0].strip())}] reads it as a name" if names else ""
        raise BadData(f"{cell(int(wrong[0]))}: the label is {found}{_such(wrong)}{hint}")
    return targets


def value_targets(labels: Cells, cell: Cell) -> Float32s:
    """Return every row's label as a float32."""
    if not isinstance(labels, Numbers):
        present = np.flatnonzero(labels.codes >= 0)
        row = int(present[0]) if len(present) else 0
        found = _shown(labels.vocabulary[labels.codes[row]]) if len(present) else "missing"
        raise BadData(f'{cell(row)}: the label is {found}, and data.target = "value" needs numbers')
    missing = np.flatnonzero(np.isnan(labels.values))
    if len(missing):
        raise BadData(f"{cell(int(missing[0]))}: the label is missing{_such(missing)}")
    with np.errstate(over="ignore"):
        targets = labels.values.astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(targets))
    if len(wrong):
        raise BadData(f"{cell(int(wrong[0]))}: the label {labels.values[wrong[0]]:g} is not finite in float32")
    check_rounding(labels.values, "the labels")
    return targets


def check_rounding(values: npt.NDArray[Any], what: str) -> None:
    """Refuse finite values to predict that float32 rounds by more than a thousandth of their deviation."""
    # Such as Unix times in seconds, of which float32 has one in 128.
    if values.dtype != np.float64 or len(values) < 2:
        return
    columns = values.reshape(len(values), -1)
    with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite are refused elsewhere
        lost, deviations = np.abs(columns.astype(np.float32) - columns).max(axis=0), columns.std(axis=0)
    wrong = np.flatnonzero((deviations > 0) & (lost > deviations / _ROUNDED))
    if len(wrong):
        place = wrong[0]
        raise BadData(
            f"{what}: float32 rounds values by up to {lost[place]:g}, and their standard deviation is "
            f"{deviations[place]:.3g}: subtract a constant from all, such as {columns[0, place]:.17g}"
        )


def _shown(label: str) -> str:
    return json.dumps(shortened(label))


def _such(rows: npt.NDArray[np.int64]) -> str:
    more = f" (in {len(rows):,} rows)" if len(rows) > 1 else ""
    return f"{more}; a row without a known label can be neither trained on nor judged: leave it out of the file"
