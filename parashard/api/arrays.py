"""The examples that a script gives to its trainer: arrays in memory, as a data source.

Owns what may be given, how it is split and its fingerprint. Knows no model and no process. Called by
`parashard.api.trainer`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parashard.data.arrays import AnyArray, Split, count_classes, fingerprint
from parashard.data.base import DataSpec, Indices
from parashard.errors import BadData
from parashard.plan.permutation import Permutation

_SPLIT = -1  # no epoch of a job


class ScriptArrays:
    """A `DataSource` over the arrays of a script, handed out as they are.

    Parameters
    ----------
    training, held_out : Split
        `held_out` may be empty.
    """

    def __init__(self, training: Split, held_out: Split) -> None:
        self._training, self._held_out = training, held_out
        targets = training.targets
        labels = targets.dtype == np.int64 and targets.ndim == 1 and int(targets.min()) >= 0
        self.spec = DataSpec(
            examples=len(targets),
            held_out=len(held_out.targets),
            input_shape=training.inputs.shape[1:],
            classes=count_classes(targets, held_out.targets) if labels else 0,
            fingerprint=fingerprint([*training, *held_out], "script"),
        )

    def examples(self, indices: Indices) -> tuple[AnyArray, AnyArray]:
        """Return (inputs, targets) of the training examples with these indices, as new arrays."""
        return self._training.inputs.take(indices, axis=0), self._training.targets.take(indices, axis=0)

    def held_out(self, start: int, stop: int) -> tuple[AnyArray, AnyArray]:
        """Return (inputs, targets) of the held-out examples [start, stop), as new arrays."""
        return self._held_out.inputs[start:stop].copy(), self._held_out.targets[start:stop].copy()


def source_of(data: Any, validation_data: Any, validation_split: float, seed: int) -> ScriptArrays:
    """Return the source of a script's `fit`.

    Raises
    ------
    BadData
        If what is given is no pair of arrays of numbers with equally many examples, or the splits do not go together.
    """
    training = pair_of(data, "data")
    if not len(training.targets):
        raise BadData("data has no examples")
    if validation_data is not None and validation_split:
        raise BadData("validation_data and validation_split: allowed is one of the two")
    if not 0.0 <= validation_split < 1.0:
        raise BadData(f"validation_split must be at least 0 and less than 1, found {validation_split!r}")
    if validation_data is not None:
        held_out = pair_of(validation_data, "validation_data")
        for what, one, other in zip(("inputs", "targets"), training, held_out, strict=True):
            if (one.shape[1:], one.dtype) != (other.shape[1:], other.dtype):
                raise BadData(f"validation_data: {what} are {_kind(other)} an example; those of data are {_kind(one)}")
        return ScriptArrays(training, held_out)
    count = min(int(validation_split * len(training.targets)), len(training.targets) - 1)
    if not count:
        return ScriptArrays(training, training.take(np.arange(0)))
    shuffled = Permutation(len(training.targets), seed, _SPLIT)(np.arange(len(training.targets), dtype=np.int64))
    return ScriptArrays(training.take(np.sort(shuffled[count:])), training.take(np.sort(shuffled[:count])))


def pair_of(data: Any, what: str) -> Split:
    """Return (inputs, targets) as arrays: floats as float32, whole numbers as int64 (inputs of uint8 stay)."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        found = f"{type(data).__name__} of {len(data)}" if isinstance(data, tuple | list) else type(data).__name__
        raise BadData(f"{what} must be a pair (inputs, targets) of arrays, found {found}")
    inputs, targets = array_of(data[0], f"{what}: inputs"), array_of(data[1], f"{what}: targets")
    if len(inputs) != len(targets):
        raise BadData(f"{what}: {len(inputs):,} inputs and {len(targets):,} targets")
    return Split(inputs, targets if targets.dtype != np.uint8 else targets.astype(np.int64))


def array_of(values: Any, what: str) -> AnyArray:
    """Return an array of numbers, one example after the other, that is not the caller's if it had to be converted."""
    if hasattr(values, "detach"):  # a tensor of PyTorch, wherever it is
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() else values).numpy()  # NumPy has no bfloat16
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise BadData(f"{what} are no array: {error}") from None
    if array.dtype.kind not in "biuf" or array.ndim < 1:
        raise BadData(f"{what} must be an array of numbers with one axis for the examples, found {_kind(array)}")
    if array.dtype.kind == "f":
        converted = np.ascontiguousarray(array, np.float32)
        if not np.isfinite(converted).all():
            raise BadData(f"{what}: example {_first_bad(converted)} has a value that is not finite")
        return converted
    return np.ascontiguousarray(array, np.uint8 if array.dtype == np.uint8 else np.int64)


def _first_bad(values: AnyArray) -> int:
    return int(np.argmin(np.isfinite(values).reshape(len(values), -1).all(axis=1)))


def _kind(array: AnyArray) -> str:
    return f"{array.dtype} of shape {array.shape[1:]}" if array.ndim else f"one {array.dtype}"
