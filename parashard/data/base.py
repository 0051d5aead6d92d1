"""The contract of a data source: a fixed number of examples, addressed by index, the same on every machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from parashard.data.tree import Tree, map_leaves, rows_of
from parashard.errors import BadData, ParashardError, Unavailable, is_transient
from parashard.figures import metric

if TYPE_CHECKING:
    from parashard.data.preprocessing import Preprocessing

MAX_CLASSES = 1 << 16
CLASSES_SHOWN = 8

Array = Any
"""A NumPy or a CuPy array: models receive the array namespace `xp` that goes with it."""

Indices = npt.NDArray[np.int64]

Examples = tuple[Tree, Tree] | tuple[Tree, Tree, npt.NDArray[np.float32]]
"""Inputs and targets, each an array or a tree of arrays, and optionally a weight for each example."""


class BadExample(ParashardError):
    """An example is unusable or temporarily unavailable: a fault of the data, not of the model."""


class Field(NamedTuple):
    """An array of an example: its path, such as "inputs/ids" or "targets", and its shape and type in one example."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(map(str, self.shape))}) {self.dtype}"


def kind_of_failure(error: Exception) -> type[BadData | Unavailable]:
    """Return the error class of a failed read: Unavailable if it may pass, else BadData."""
    return Unavailable if is_transient(error) else BadData


class HashedTexts(NamedTuple):
    """Numbers of distinct texts that were hashed and of their distinct keys; fewer keys mean collisions."""

    texts: int
    keys: int

    @property
    def chance(self) -> float:
        """Upper bound on the probability of a collision by chance: texts^2 / 2^65 (birthday bound)."""
        return min(1.0, self.texts**2 / 2.0**65)


class CellCounts(NamedTuple):
    """Counts of a column's missing, unknown and merged values, in training and held-out rows together.

    Parameters
    ----------
    missing : int
        Cells without a value.
    unknown : int
        Texts that are not in the training rows, or not in the column's vocabulary if it has one.
    merged : int
        Distinct texts that are read as another one, such as "1.0" as "1".
    """

    missing: int
    unknown: int
    merged: int


@dataclass(frozen=True)
class DataSpec:
    """Properties of a data source that a job needs before it reads an example.

    Parameters
    ----------
    examples, held_out : int
        Length of the training split and of the evaluation split (0: there is none).
    input_shape : tuple of int
        Shape of one example's input; () where inputs are several arrays.
    classes : int
        Number of classes; 0 where targets are real numbers.
    fingerprint : str
        Hex digest of the content (or of the generator's options): machines whose data differ must not share a job.
    preprocessing : Preprocessing, optional
        How examples became inputs, and the meaning of outputs; None if examples are generated.
    warnings : tuple of str
        Likely mistakes in the data, for the user.
    fields : tuple of Field
        The arrays of an example; empty: one of inputs and one of targets.
    batched : bool
        Each index names a whole batch, as in a `PyDataset` of Keras; then `examples` and `held_out` count batches.
    hashed : HashedTexts, optional
        Counts of hashed texts in training and held-out rows together; None: no texts are hashed.
    cells : mapping of str to CellCounts
        By column of a table; columns whose counts are all 0 are left out.
    """

    examples: int
    held_out: int
    input_shape: tuple[int, ...]
    classes: int
    fingerprint: str
    preprocessing: Preprocessing | None = None
    warnings: tuple[str, ...] = ()
    fields: tuple[Field, ...] = ()
    batched: bool = False
    hashed: HashedTexts | None = None
    cells: Mapping[str, CellCounts] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """Return the data's sizes by name, for the report."""
        columns = self.preprocessing.columns if self.preprocessing is not None else None
        figures: dict[str, Any] = {
            "examples": self.examples,
            "held_out": self.held_out,
            "input_shape": list(self.input_shape),
            "classes": self.classes,
            "warnings": list(self.warnings),
        }
        if columns is not None:
            figures["numeric_columns"] = sum(column.kind in ("number", "log_number") for column in columns)
            figures["text_columns"] = len(columns) - figures["numeric_columns"]
        if self.cells:
            figures["cells"] = {name: counts._asdict() for name, counts in self.cells.items()}
        if self.hashed is not None:
            figures["hashed_texts"], figures["hashed_keys"] = self.hashed
            figures["collision_chance"] = self.hashed.chance
        return figures

    def summary(self) -> str:
        """Return the data's sizes and the meaning of its targets, on one line."""
        figures = self.figures()
        what, shape = "batches" if self.batched else "examples", " x ".join(map(str, self.input_shape))
        inputs = f"{shape} input{'' if shape == '1' else 's'}" if shape else "inputs of one number"
        several = [str(field).removeprefix("inputs/") for field in self.fields if field.name.startswith("inputs/")]
        if several:
            inputs = f"inputs {', '.join(several)}"
        if "text_columns" in figures:
            what = "rows"
            numeric, text = figures["numeric_columns"], figures["text_columns"]
            inputs = f"{numeric:,} numeric and {text:,} text columns as {inputs}"
        if self.hashed is not None:
            texts, keys = self.hashed
            inputs += f"; {texts:,} texts hashed to {keys:,} keys (chance of a collision {self.hashed.chance:.0e})"
        for kind in CellCounts._fields if self.cells else ():
            count = sum(getattr(counts, kind) for counts in self.cells.values())
            inputs += f"; {kind} {'cells' if kind == 'missing' else 'texts'} {count:,}" if count else ""
        held_out = f"{self.held_out:,} held out"
        return f"{self.examples:,} training {what}, {held_out}; {inputs}; {self._targets()}"

    def _targets(self) -> str:
        target = self.preprocessing.target if self.preprocessing is not None else None
        name = f" of {target.name}" if target is not None and target.name else ""
        if target is not None and target.kind == "value":
            return f"values{name} (mean {metric(target.mean)}, standard deviation {metric(target.deviation)})"
        if target is None and not self.classes:
            return "values"
        names = target.classes if target is not None else ()
        shown = ", ".join(names[:CLASSES_SHOWN]) + (", ..." if len(names) > CLASSES_SHOWN else "")
        return f"{self.classes:,} classes{name}" + (f" ({shown})" if target is not None and target.name else "")


@dataclass(frozen=True)
class Batch:
    """The examples of one step (or of one piece of an evaluation).

    Parameters
    ----------
    step : int
        The step's number, for seeding dropout and the like; -1 in an evaluation.
    epoch : int
        The epoch that the step lies in; -1 in an evaluation.
    indices : ndarray of int64, shape (examples,)
        Which examples these are. Always a NumPy array.
    inputs : array, shape (examples, *input_shape), float32
    targets : array, shape (examples,), int64 class labels or float32 values
        Both in the namespace that the model computes in. Data of a script has the shapes and types of
        `DataSpec.fields`; several arrays are in dicts, tuples or lists, as the script gave them.
    weights : array, shape (examples,), float32, optional
        How much each example counts: the loss is sum(weight * loss) / examples. None: all the same.
    part : int
        Index of the piece, if a step's gradient is computed in pieces; with `step`, it seeds random operations.
    share : float
        Factor of its gradient in the gradient of the whole batch.
    keys : mapping of str to ndarray of uint64
        By embedding table, the distinct mixed keys (`parashard.plan.embedding`) of the rows that the model is given.
        Set by the worker.
    places : mapping of str to array of int64
        By table, in the shape of the model's array of keys (`parashard.models.base.LooksUp`): the index of each in
        `keys`.
    on_host : Batch, optional
        For arrays on a GPU: the batch with the host arrays that they were copied from, if known. Reading its values
        does not wait for the GPU.
    """

    step: int
    epoch: int
    indices: Indices
    inputs: Tree
    targets: Tree
    weights: Array | None = None
    part: int = 0
    share: float = 1.0
    keys: Mapping[str, npt.NDArray[np.uint64]] = field(default_factory=dict)
    places: Mapping[str, Array] = field(default_factory=dict)
    on_host: Batch | None = None

    def cut(self, rows: slice | Indices) -> Batch:
        """Return the batch with the examples at `rows` alone, and all else unchanged."""
        inputs, targets = map_leaves(lambda array: array[rows], (self.inputs, self.targets))
        weights = None if self.weights is None else self.weights[rows]
        indices = self.indices[rows] if len(self.indices) == rows_of(self.inputs) else self.indices
        return replace(self, indices=indices, inputs=inputs, targets=targets, weights=weights)


class DataSource(Protocol):
    """A training split and a held-out split, addressed by index.

    A source sets `reads_ahead = True` if another thread may read training examples while a model computes, and
    `any_thread = True` if several threads may read it at once.
    """

    @property
    def spec(self) -> DataSpec:
        """Sizes, shapes and the fingerprint."""

    def examples(self, indices: Indices) -> Examples:
        """Return (inputs, targets), or these and weights, of the training examples with these indices: new arrays."""

    def held_out(self, start: int, stop: int) -> Examples:
        """Return the same of the held-out examples [start, stop)."""


def examples_of(source: DataSource, step: int, indices: Indices) -> Examples:
    """Return the examples of a step, the same whenever and wherever it is computed.

    A source whose examples depend on the step, such as those that are transformed at random, has a method
    `examples_of(step, indices)`.
    """
    of_step = getattr(source, "examples_of", None)
    if of_step is None:
        return source.examples(indices)
    examples: Examples = of_step(step, indices)
    return examples


def reads_ahead(source: DataSource) -> bool:
    """Tell whether a step's examples may be read while a model computes another's."""
    return bool(getattr(source, "reads_ahead", False))


def any_thread(source: DataSource) -> bool:
    """Tell whether several threads may read the examples at once."""
    return bool(getattr(source, "any_thread", False))
