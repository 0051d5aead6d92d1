"""ArraySource: a data source over arrays in memory, which most formats are read into."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parashard.data.base import MAX_CLASSES, CellCounts, DataSpec, Field, HashedTexts, Indices
from parashard.data.columns import NO_MISSING_TEXTS, MissingTexts
from parashard.data.input_columns import InputColumn
from parashard.data.preprocessing import ClassTarget, Preprocessing, ValueTarget, fitted_value
from parashard.data.tree import Ragged, Tree, leaves, map_leaves
from parashard.errors import BadData

AnyArray = npt.NDArray[Any]
_INT64_MAX = 2**63 - 1


class Split(NamedTuple):
    """Examples in memory."""

    inputs: Tree  # shape (examples, *input_shape): float32, or uint8 to save memory; leaves of a tree may be ragged
    targets: AnyArray  # shape (examples,): int64 class labels or float32 values

    def take(self, rows: Indices) -> Split:
        """Return a copy of these rows."""
        return Split(map_leaves(lambda values: values[rows], self.inputs), self.targets[rows])


class ArraySource:
    """A `DataSource` over a training split and a held-out split of the same shape and types, which it owns.

    It divides inputs by `input_scale`, in float32, as it hands them out: 255 for bytes that mean [0, 1].
    """

    def __init__(
        self,
        training: Split,
        held_out: Split,
        classes: int,
        input_scale: float = 1.0,
        *,
        columns: tuple[InputColumn, ...] | None = None,
        marks: MissingTexts = NO_MISSING_TEXTS,
        target: ClassTarget | ValueTarget | None = None,
        warnings: Sequence[str] = (),
        hashed: HashedTexts | None = None,
        cells: Mapping[str, CellCounts] = MappingProxyType({}),
    ) -> None:
        self._training, self._held_out = training, held_out
        self._scale = np.float32(input_scale)
        several = isinstance(training.inputs, dict)
        shape = () if several else training.inputs.shape[1:]
        arrays = [
            array
            for split in (training, held_out)
            for _, values in leaves(tuple(split))
            for array in ((values.values, values.offsets) if isinstance(values, Ragged) else (values,))
        ]
        self.spec = DataSpec(
            examples=len(training.targets),
            held_out=len(held_out.targets),
            input_shape=shape,
            classes=classes,
            fingerprint=fingerprint(arrays, f"{classes} {input_scale!r}"),
            preprocessing=Preprocessing(
                input_shape=shape,
                divide_by=input_scale,
                columns=columns,
                missing=marks.also[0] if len(marks.also) == 1 else marks.also or "",
                not_missing=marks.never,
                target=target or _numbered(classes) or fitted_value("", training.targets.astype(np.float64), "targets"),
            ),
            warnings=tuple(warnings),
            fields=_fields(training) if several else (),
            hashed=hashed,
            cells=dict(cells),
        )

    def examples(self, indices: Indices) -> tuple[Tree, AnyArray]:
        """Return (inputs, targets) of the training examples with these indices, as new arrays."""
        inputs, targets = self._training
        taken = map_leaves(lambda values: values.take(indices, axis=0), inputs)  # faster than values[indices]
        return self._handed_out(taken), targets.take(indices, axis=0)

    def held_out(self, start: int, stop: int) -> tuple[Tree, AnyArray]:
        """Return (inputs, targets) of the held-out examples [start, stop), as new arrays."""
        taken = map_leaves(lambda values: values[start:stop].copy(), self._held_out.inputs)
        return self._handed_out(taken), self._held_out.targets[start:stop].copy()

    def _handed_out(self, inputs: Tree) -> Tree:
        if isinstance(inputs, dict):
            return inputs
        values = inputs.astype(np.float32, copy=False)
        if self._scale != 1.0:
            values /= self._scale
        return values


def _fields(split: Split) -> tuple[Field, ...]:
    arrays = [*leaves(split.inputs, "inputs"), ("targets", split.targets)]
    return tuple(Field(name, values.shape[1:], str(values.dtype)) for name, values in arrays)


def class_labels(labels: AnyArray, origin: str) -> npt.NDArray[np.int64]:
    """Return integer labels as int64; BadData if one is negative or too large to be a class."""
    if labels.size:
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= MAX_CLASSES:
            raise BadData(
                f"{origin}: class labels must lie in [0, {MAX_CLASSES}), found {low if low < 0 else high}; "
                'data.target = "value" makes numbers to predict of them'
            )
    return labels.astype(np.int64)


def check_int64(array: AnyArray, what: str) -> None:
    """Refuse whole numbers that overflow int64."""
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and array.size and (most := array.max()) > _INT64_MAX:
        raise BadData(f"{what}: found the value {most}; a whole number is at most {_INT64_MAX}")


OWN_ARRAY = (
    "give whole numbers as an integer array of their own (inputs may be a dict of arrays), or round them by "
    'astype("float32")'
)


def check_digits(array: AnyArray, what: str, advice: str = OWN_ARRAY) -> None:
    """Refuse a column (or array of one axis) of whole numbers that float32 would round, such as ids or Unix times."""
    if not array.size or array.dtype.kind not in "iuf" or array.dtype.itemsize < 4 or array.dtype == np.float32:
        return
    if not (array.max() > 1 << 24 or array.min() < -(1 << 24)):
        return
    columns = array.reshape(-1, array.shape[-1] if array.ndim > 1 else 1)
    large = (columns.max(axis=0) > 1 << 24) | (columns.min(axis=0) < -(1 << 24))
    for place in np.flatnonzero(large).tolist():
        column = columns[:, place]
        changed = is_rounded(column, np.float32)
        if changed.any() and (column.dtype.kind != "f" or (column == np.floor(column)).all()):
            where = f"{what}: column {place}" if columns.shape[1] > 1 else what
            raise BadData(
                f"{where}: the whole number {column[int(np.argmax(changed))]:.0f} would lose its last digits as "
                f"float32; {advice}"
            )


def is_rounded(values: AnyArray, kind: type[np.floating[Any]]) -> npt.NDArray[np.bool_]:
    """Tell for each number whether it is whole and would be rounded by a floating-point type."""
    if values.dtype.kind == "f":
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray((values == np.floor(values)) & (values.astype(kind) != values))
    lowest_bit = np.maximum(values & -values, 1)
    return np.asarray(np.abs(values // lowest_bit) >> (np.finfo(kind).nmant + 1) != 0)


def count_classes(*labels: npt.NDArray[np.int64]) -> int:
    """Return the highest label of all these arrays plus one."""
    return 1 + max(int(array.max()) for array in labels if array.size)


def _numbered(classes: int) -> ClassTarget | None:
    return ClassTarget(classes=tuple(map(str, range(classes)))) if classes else None


def fingerprint(arrays: list[AnyArray], parameters: str) -> str:
    """Return SHA-256 (hex) of the content of arrays and of the parameters that affect the examples."""
    digest = hashlib.sha256(parameters.encode())
    for array in arrays:
        content = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        digest.update(f"\0{content.dtype.str} {content.shape}\0".encode())
        digest.update(content.data)
    return digest.hexdigest()
