"""The data source of a script's `fit`: training and held-out examples, their weights and transforms."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple, cast

import numpy as np

from parashard.api.examples.arrays import ArrayExamples, handed_out, numbers_of, tree_of
from parashard.api.examples.datasets import Targets
from parashard.api.examples.indexed import Indexed, as_bad_data, check_all, indexed
from parashard.data import open_source
from parashard.data.arrays import AnyArray, count_classes
from parashard.data.base import BadExample, DataSource, DataSpec, Examples, Field, Indices
from parashard.data.options import DataOptions
from parashard.data.tree import Tree, leaves, map_leaves, rows_of
from parashard.errors import BadData
from parashard.figures import counted
from parashard.job.validation import validated_words
from parashard.models.framework import step_seed
from parashard.models.user_errors import named_with_line
from parashard.plan.seeding import Permutation

Transform = Callable[[Examples, int, int, Indices], Examples]
"""Transforms a step's examples, with the job's seed, the step and the indices."""
_SPLIT = -1  # seeds the split of held-out examples; no epoch has this number
_LABELS = "targets of one whole number an example, the label of its class, or of one number a class, which add up to 1"


class Subset(NamedTuple):
    """A subset of the examples of a script's data; all if `rows` is None."""

    examples: Indexed
    rows: Indices | None = None

    def __len__(self) -> int:
        return len(self.examples) if self.rows is None else len(self.rows)

    def take(self, indices: Indices, seed: int) -> Examples:
        """Return the examples with these indices."""
        return self.examples.take(indices if self.rows is None else self.rows[indices], seed)

    def first(self, count: int) -> Subset:
        """Return the first `count` examples, or all if there are fewer."""
        if count >= len(self):
            return self
        return Subset(self.examples, (np.arange(len(self)) if self.rows is None else self.rows)[:count])


class ScriptSource:
    """A `DataSource` over a script's data."""

    def __init__(
        self,
        training: Subset,
        held_out: Subset | None,
        seed: int,
        *,
        class_weight: Mapping[int, float] | None = None,
        transform: Transform | None = None,
        fingerprint: str | None = None,
    ) -> None:
        self._training, self._held_out, self._seed = training, held_out, seed
        self._class_weight, self._transform = class_weight, transform
        fields = training.examples.fields()
        inputs = [field for field in fields if field.name.partition("/")[0] == "inputs"]
        if class_weight is not None:
            fields = (*fields, Field("weights", (), "float32"))
        parts = [part for part in (training, held_out) if part is not None]
        self.batch_size = training.examples.batch_size
        self.drop_last = training.examples.drop_last
        # Items and transforms may draw from the process's generators, which a model seeds and draws from.
        self.any_thread = transform is None and all(isinstance(part.examples, ArrayExamples) for part in parts)
        # Data in memory is read faster than another thread can be woken.
        self.reads_ahead = self.any_thread and getattr(training.examples, "are_mapped", False)
        self.weighted = any(field.name == "weights" for part in parts for field in part.examples.fields())
        self.weighted |= class_weight is not None
        self.spec = DataSpec(
            examples=len(training),
            held_out=len(held_out) if held_out is not None else 0,
            input_shape=inputs[0].shape if len(inputs) == 1 else (),
            classes=_classes(parts),
            fingerprint=_digest(parts, fingerprint, seed, class_weight),
            fields=fields,
            batched=training.examples.batched,
        )

    def examples(self, indices: Indices) -> Examples:
        """Return the training examples with these indices, before any transform, as new arrays."""
        return self._weighted(self._training.take(indices, step_seed("data", self._seed, 0)))

    def examples_of(self, step: int, indices: Indices) -> Examples:
        """Return the training examples of a step; randomness in them is seeded from the seed and the step."""
        examples = self._weighted(self._training.take(indices, step_seed("data", self._seed, step)))
        if self._transform is None:
            return examples
        return self._transform(examples, self._seed, step, indices)

    def held_out(self, start: int, stop: int) -> Examples:
        """Return the held-out examples [start, stop), as new arrays."""
        assert self._held_out is not None
        return self._held_out.take(np.arange(start, stop), step_seed("data", self._seed, 0))

    def _weighted(self, examples: Examples) -> Examples:
        if self._class_weight is None:
            return examples
        inputs, targets = examples[:2]
        return inputs, targets, _class_weights(targets, self._class_weight)


def source_of(
    data: Any,
    validation_data: Any = None,
    validation_split: float = 0.0,
    seed: int = 0,
    *,
    held_out_max: Callable[[Indexed], int] | None = None,
    targets: Targets = None,
    sample_weight: Any = None,
    class_weight: Mapping[int, float] | None = None,
    transform: Callable[..., Any] | None = None,
    fingerprint: str | None = None,
) -> DataSource:
    """Return the source of a script's `fit`, with at most `held_out_max` held-out examples, the first ones."""
    if not isinstance(data, type) and all(hasattr(data, name) for name in ("spec", "examples", "held_out")):
        others = validation_data, held_out_max, targets, sample_weight, class_weight, transform, fingerprint
        if validation_split or any(other is not None for other in others):
            raise BadData("a data source has its own targets, weights, transforms and held-out examples")
        return cast("DataSource", data)
    if validation_data is not None and validation_split:
        raise BadData("validation_data and validation_split: allowed is one of the two")
    if not isinstance(validation_split, Real) or not 0.0 <= validation_split < 1.0:
        raise BadData(f"validation_split must be at least 0 and less than 1, found {validation_split!r}")
    if fingerprint is not None and (not isinstance(fingerprint, str) or not fingerprint):
        raise BadData(f"fingerprint is a text that changes with the data, found {fingerprint!r}")
    with as_bad_data():
        training = indexed(data, "data", targets=targets, sample_weight=sample_weight)
        if not len(training):
            raise BadData("data has no examples")
        trained, held_out = _split(training, validation_data, validation_split, seed, targets)
        if held_out_max is not None:
            if held_out is None:
                raise BadData("validation_steps needs validation_data or validation_split")
            held_out = held_out.first(held_out_max(held_out.examples))
        made = ScriptSource(
            trained,
            held_out,
            seed,
            class_weight=_checked_weights(class_weight, training),
            transform=transform_of(transform, training.batched),
            fingerprint=fingerprint,
        )
        made.examples_of(0, np.arange(1))  # fail early if the transform raises
    return made


def _split(
    training: Indexed, validation_data: Any, validation_split: float, seed: int, targets: Targets
) -> tuple[Subset, Subset | None]:
    if validation_data is not None:
        held_out = indexed(validation_data, "validation_data", targets=targets)
        check_all(held_out, "validation_data")
        if not len(held_out):
            raise BadData("validation_data has no examples")
        _check_same_kind(training, held_out)
        return Subset(training), Subset(held_out)
    if not validation_split:
        return Subset(training), None
    count = min(int(validation_split * len(training)), len(training) - 1)
    if not count:
        raise BadData(
            f"validation_split={validation_split:g} of {counted(len(training), 'example')} holds out none; allowed: a "
            "share of at least one of at least two, or 0"
        )
    shuffled = Permutation(len(training), seed, _SPLIT)(np.arange(len(training), dtype=np.int64))
    return Subset(training, np.sort(shuffled[count:])), Subset(training, np.sort(shuffled[:count]))


def _check_same_kind(training: Indexed, held_out: Indexed) -> None:
    """Refuse validation data whose arrays differ from the training data's; only one of them may have weights."""
    if training.batched != held_out.batched:
        kinds = "batches" if held_out.batched else "examples", "batches" if training.batched else "examples"
        raise BadData(f"validation_data: an item is one of {kinds[0]}; of data it is one of {kinds[1]}")
    given, due = (
        {field.name: field for field in one.fields() if field.name != "weights"} for one in (held_out, training)
    )
    if given.keys() != due.keys():
        raise BadData(f"validation_data has the arrays {', '.join(given)}; data has {', '.join(due)}")
    for name, field in given.items():
        shapes = not (training.varying or held_out.varying) and field.shape != due[name].shape
        if shapes or field.dtype != due[name].dtype:
            verb, those = ("are", "those") if name in ("inputs", "targets") else ("is", "that")
            raise BadData(
                f"validation_data: {name} {verb} {field.dtype} of shape {field.shape} an example; {those} of data "
                f"{verb} {due[name].dtype} of shape {due[name].shape}"
            )


def _checked_weights(given: Any, training: Indexed) -> dict[int, float] | None:
    if given is None:
        return None
    fields = {field.name: field for field in training.fields()}
    if "weights" in fields:
        raise BadData("class_weight and weights of examples: allowed is one of the two")
    labels = fields.get("targets")
    if labels is None or len(labels.shape) > 1:
        raise BadData(f"class_weight needs {_LABELS}")
    if not isinstance(given, Mapping) or not given:
        raise BadData(f"class_weight is a dict of labels and weights, such as {{0: 1.0, 1: 5.0}}, found {given!r}")
    for label, weight in given.items():
        whole = isinstance(label, int | np.integer)
        if not whole or not isinstance(weight, int | float | np.number) or not math.isfinite(weight) or weight < 0:
            raise BadData(f"class_weight: found {label!r}: {weight!r}; allowed are labels and weights of at least 0")
    return {int(label): float(weight) for label, weight in given.items()}


def _class_weights(labels: AnyArray, class_weight: Mapping[int, float]) -> AnyArray:
    weights = np.ones(len(labels), np.float32)
    flat = _labels(labels)
    for label, weight in class_weight.items():
        weights[flat == label] = weight
    return weights


def _labels(targets: AnyArray) -> AnyArray:
    """Return the labels in targets: one whole number per example, of any type, or one number per class (one-hot)."""
    if targets.ndim > 1 and targets.shape[1] > 1:
        shares = targets.astype(np.float64)
        if (shares < 0).any() or not np.allclose(shares.sum(axis=1), 1, atol=1e-3):
            raise BadExample(f"class_weight needs {_LABELS}; found {targets[0].tolist()}")
        return np.asarray(shares.argmax(axis=1))
    labels = targets.reshape(len(targets))
    whole = labels.dtype.kind != "f" or labels == np.rint(labels)
    if not np.all(whole):
        raise BadExample(f"class_weight needs {_LABELS}; found {labels[~whole][0]:.7g}")
    return labels


def transform_of(function: Any, batched: bool) -> Transform | None:
    """Return a user's function of (example, rng) or (batch, rng) as a transform; None for None."""
    if function is None:
        return None
    names = _parameters(function)
    if len(names) != 2:
        raise BadData(f"transform is a function of (example, rng) or (batch, rng), found one of ({', '.join(names)})")
    if names[0] == "batch":
        return lambda examples, seed, step, indices: _of_batch(function, examples, seed, step)
    if batched:
        raise BadData("transform: an index of these data is a batch, so its first parameter is named batch")
    return lambda examples, seed, step, indices: _of_each(function, examples, seed, step, indices)


def _parameters(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _of_each(function: Any, examples: Examples, seed: int, step: int, indices: Indices) -> Examples:
    made = []
    for row, index in enumerate(indices.tolist()):
        where = f"transform of example {index}"
        example = map_leaves(lambda array, row=row: array[row], examples[:2])
        made.append(_pair(function, example, np.random.default_rng((seed, step, index)), where))
        first, this = ([(name, array.shape) for name, array in leaves(one)] for one in (made[0], made[-1]))
        if first != this:
            raise BadExample(
                f"{where}: returned the shapes {[shape for _, shape in this]}, and {[shape for _, shape in first]} of "
                f"example {indices[0]}: those of a step are the same"
            )
    stacked = map_leaves(lambda *arrays: handed_out(np.stack(arrays)), *made)
    return (*stacked, *examples[2:])


def _of_batch(function: Any, examples: Examples, seed: int, step: int) -> Examples:
    where = f"transform of step {step}"
    made = map_leaves(handed_out, _pair(function, examples[:2], np.random.default_rng((seed, step)), where))
    rows = rows_of(examples[0])
    if any(array.shape[:1] != (rows,) for _, array in leaves(made)):
        raise BadExample(f"{where}: arrays have one row for each of {rows} examples")
    return (*made, *examples[2:])


def _pair(function: Any, given: Tree, rng: np.random.Generator, where: str) -> tuple[Tree, Tree]:
    try:
        made = function(given, rng)
    except Exception as error:
        raise BadExample(f"{where}: {named_with_line(error)}") from error
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise BadExample(f"{where}: returned {type(made).__name__}; due is (inputs, targets)")
    try:
        return tree_of(made[0], f"{where}: inputs", numbers_of), tree_of(made[1], f"{where}: targets", numbers_of)
    except BadData as error:
        raise BadExample(error.message) from error


def _classes(parts: list[Subset]) -> int:
    """Return the number of classes if targets are arrays of labels; 0 if they are not, or it is unknown."""
    found = []
    for part in parts:
        targets = part.examples.targets if isinstance(part.examples, ArrayExamples) else None
        if not isinstance(targets, np.ndarray) or targets.dtype.kind not in "iub" or targets.ndim != 1:
            return 0
        found.append(targets)
    return count_classes(*found) if int(found[0].min()) >= 0 else 0


def _digest(parts: list[Subset], given: str | None, seed: int, class_weight: Mapping[int, float] | None) -> str:
    """Return the SHA-256 (hex) of the content, the split and the class weights."""
    digest = hashlib.sha256(b"script")
    for part in parts:
        content = part.examples.fingerprint() if given is None else f"{given} {len(part.examples)}"
        rows = "" if part.rows is None else f"{seed} {len(part.rows)}"
        digest.update(f"\0{content}\0{rows}".encode())
    if class_weight is not None:
        digest.update(f"\0{sorted(class_weight.items())}".encode())
    return digest.hexdigest()


def open_data(source: str, **options: Any) -> DataSource:
    """Open a data source for `fit` with the keys of a job file's `[data]` table.

    Parameters
    ----------
    source : str
        clicks, criteo, csv, digits, idx, npz, parquet or synthetic.
    **options
        The other keys of the table, such as path="titanic.csv", label="survived".

    Raises
    ------
    ConfigurationError
        If the options are invalid, or a library is not installed.
    BadData, Unavailable
        If the data cannot be read.
    """
    return open_source(validated_words(DataOptions, {"source": source, **options}, "open_data: "))
