"""The contract of a data source: a fixed number of examples, addressed by index, the same on every machine.

Sources know nothing of steps, epochs or workers; `parashard.plan.steps` decides which indices a step has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from parashard.display.figures import metric
from parashard.errors import BadData, Unavailable, may_pass

if TYPE_CHECKING:
    from parashard.data.preprocessing import Preprocessing

MAX_CLASSES = 1 << 16
CLASSES_SHOWN = 8

Array = Any
"""A NumPy or a CuPy array: models receive the array namespace `xp` that goes with it."""

Indices = npt.NDArray[np.int64]


def kind_of_failure(error: Exception) -> type[BadData | Unavailable]:
    """Return the error class of a failed read: data to be fixed, or a disk that fails at present."""
    return Unavailable if may_pass(error) else BadData


@dataclass(frozen=True)
class DataSpec:
    """Properties of a data source that a job needs before it reads an example.

    Parameters
    ----------
    examples, held_out : int
        Length of the training split and of the evaluation split (0: there is none).
    input_shape : tuple of int
        Shape of one example's input.
    classes : int
        Number of classes; 0 where targets are real numbers.
    fingerprint : str
        Hex digest of the content (or of what generates it): machines whose data differ must not share a job.
    preprocessing : Preprocessing, optional
        How an example of the data became inputs, and what outputs mean; None where examples are generated.
    warnings : tuple of str
        Likely mistakes in the data, for the user.
    """

    examples: int
    held_out: int
    input_shape: tuple[int, ...]
    classes: int
    fingerprint: str
    preprocessing: Preprocessing | None = None
    warnings: tuple[str, ...] = ()

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
            figures["numeric_columns"] = sum(column.kind == "number" for column in columns)
            figures["text_columns"] = len(columns) - figures["numeric_columns"]
        return figures

    def summary(self) -> str:
        """Return the data's sizes and the meaning of its targets, on one line."""
        figures = self.figures()
        what, shape = "examples", " x ".join(map(str, self.input_shape))
        inputs = f"{shape} input{'' if shape == '1' else 's'}" if shape else "inputs of one number"
        if "text_columns" in figures:
            what = "rows"
            numeric, text = figures["numeric_columns"], figures["text_columns"]
            inputs = f"{numeric:,} numeric and {text:,} text columns as {inputs}"
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
        Both in the namespace that the model computes in.
    """

    step: int
    epoch: int
    indices: Indices
    inputs: Array
    targets: Array


class DataSource(Protocol):
    """A training split and a held-out split, addressed by index."""

    @property
    def spec(self) -> DataSpec:
        """Sizes, shapes and the fingerprint."""

    def examples(self, indices: Indices) -> tuple[npt.NDArray[np.float32], npt.NDArray[Any]]:
        """Return (inputs, targets) of the training examples with these indices, as new NumPy arrays."""

    def held_out(self, start: int, stop: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[Any]]:
        """Return (inputs, targets) of the held-out examples [start, stop)."""
