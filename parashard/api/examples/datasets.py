"""Datasets: examples that a user's object computes by index, one at a time or in batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from parashard.api.examples.arrays import allowed, handed_out, numbers_of, spread, tree_of
from parashard.data.arrays import check_digits, fingerprint
from parashard.data.base import BadExample, Examples, Field, Indices
from parashard.data.tree import Tree, leaves, map_leaves
from parashard.errors import BadData, ConfigurationError, shown_names
from parashard.models.framework import generators_seeded
from parashard.models.user_errors import named_with_line

SAMPLED = 16
"""Examples of a dataset that its fingerprint covers; every process computes them at its start."""

Targets = str | Sequence[str] | None
"""Names of the target fields, if an example is a dict or a row of a table."""

Form = list[tuple[str, tuple[int, ...], Any]]


class DatasetExamples:
    """Examples of an object with a length whose items are examples, or whole batches (one index is then one step).

    `collate` makes a batch from items; without it examples are stacked, and must have the same shapes.
    """

    drop_last = False

    def __init__(
        self,
        dataset: Any,
        what: str,
        targets: Targets = None,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        inputs_only: bool = False,  # an item may be only inputs; targets are dropped
        batched: bool = False,
        batch_size: int | None = None,
    ) -> None:
        self._dataset, self._what, self._targets = dataset, what, targets
        self._collate, self._inputs_only = collate, inputs_only
        self.batched, self.varying = batched, batched or collate is not None
        self.batch_size = 1 if batched else batch_size
        self._item = "batch" if batched else "example"
        self._length = len(dataset)
        if not self._length:
            raise BadData(f"{what} has no {'batches' if batched else 'examples'}")
        with generators_seeded(0):
            self._first = self._batch([0]) if self.varying else self._example(0, self._got(0))
        self._form = form_of(self._first)

    def __len__(self) -> int:
        return self._length

    def take(self, indices: Indices, seed: int) -> Examples:
        """Return the examples with these indices; the process' random generators are seeded from `seed` meanwhile."""
        with generators_seeded(seed):
            return self._batch(indices.tolist()) if self.varying else self._stacked(indices.tolist())

    def fields(self) -> tuple[Field, ...]:
        """Return the arrays of an example, taken from the first one."""
        named = leaves(_by_name(self._first))
        cut = 1 if self.varying else 0
        return tuple(Field(name, array.shape[cut:], str(allowed(array.dtype))) for name, array in named)

    def fingerprint(self) -> str:
        """Return a digest of items sampled evenly; refuse examples that float32 would round."""
        rows = spread(len(self), SAMPLED)
        if self.batched:  # batches may differ in shape, so they cannot be concatenated
            content = [array for row in rows for _, array in leaves(self.take(np.array([row]), 0))]
            return fingerprint(content, f"batches {len(self)} {self.fields()}")
        if self._collate is None:  # a collated batch is checked as a whole
            self._check_digits(rows.tolist())
        content = [array for _, array in leaves(self.take(rows, 0))]
        return fingerprint(content, f"dataset {len(self)} {self.fields()}")

    def _check_digits(self, indices: list[int]) -> None:
        """Refuse columns of whole numbers that float32 would round, judged by these examples."""
        with generators_seeded(0):
            items = [self._trees(self._got(index), f"{self._what}: example {index}") for index in indices]
        for columns in zip(*(leaves(_by_name(item)) for item in items), strict=False):
            if len({array.shape for _, array in columns}) == 1:
                check_digits(np.stack([array for _, array in columns]), f"{self._what}: {columns[0][0]}")

    def _stacked(self, indices: list[int]) -> Examples:
        if hasattr(self._dataset, "__getitems__"):  # PyTorch's batched access
            try:
                got = list(self._dataset.__getitems__(indices))
            except Exception as error:
                named = ", ".join(map(str, indices[:SAMPLED]))
                raise BadExample(f"{self._what}: examples {named}: {named_with_line(error)}") from error
        else:
            got = [self._got(index) for index in indices]
        items = []
        for index, item in zip(indices, got, strict=True):
            items.append(self._example(index, item))
            check_form(form_of(items[-1]), self._form, f"{self._what}: example {index}")
        stacked: Examples = map_leaves(lambda *arrays: np.stack(arrays), *items)
        return stacked

    def _example(self, index: int, item: Any) -> Tree:
        return _converted(self._trees(item, f"{self._what}: example {index}"))

    def _trees(self, item: Any, where: str) -> tuple[Tree, ...]:
        return _trees(item, where, self._targets, inputs_only=self._inputs_only)

    def _batch(self, indices: list[int]) -> Examples:
        items = [self._got(index) for index in indices]
        if self._collate is None:
            named = zip((f"{self._what}: batch {index}" for index in indices), items, strict=True)
            batches = [_batch(self._trees(item, where), where) for where, item in named]
            joined: Examples = batches[0]
            if batches[1:]:
                joined = map_leaves(lambda *arrays: np.concatenate(arrays), *batches)
            return joined
        try:
            batch = self._collate(items)
        except Exception as error:
            shown = ", ".join(map(str, indices[:SAMPLED]))
            raise BadExample(f"{self._what}: collate_fn of examples {shown}: {named_with_line(error)}") from error
        where = f"{self._what}: what collate_fn returned"
        return _batch(self._trees(batch, where), where)

    def _got(self, index: int) -> Any:
        """Return an item; an error becomes a BadExample with the index and the line of the user's code."""
        try:
            return self._dataset[index]
        except Exception as error:
            raise BadExample(f"{self._what}: {self._item} {index}: {named_with_line(error)}") from error


def named_parts(fields: Any, targets: Targets, what: str) -> tuple[Any, Any]:
    """Split a dict or table into (inputs, targets); several fields stay a dict, or a table of the same kind."""
    known = list(fields.keys())
    if targets is None:
        raise BadData(
            f"{what} has the fields {shown_names(map(str, known))}: say targets= which of them are to predict"
        )
    if not isinstance(targets, str | Sequence):
        raise BadData(f"targets= is the name of a field, or a list of names, found {targets!r}")
    named = [targets] if isinstance(targets, str) else list(targets)
    absent = [name for name in named if name not in known]
    rest = [name for name in known if name not in named]
    if absent or not named or not rest:
        found = f"no field {absent[0]!r}" if absent else "nothing else" if named else "no targets"
        raise BadData(f"{what}: targets={targets!r} leaves {found}; its fields are {shown_names(map(str, known))}")
    if not isinstance(fields, dict) and hasattr(fields, "loc"):  # a table of pandas: inputs stay one array
        return fields[rest], fields[targets] if isinstance(targets, str) else fields[named]
    inputs = fields[rest[0]] if len(rest) == 1 else {name: fields[name] for name in rest}
    return inputs, fields[targets] if isinstance(targets, str) else {name: fields[name] for name in named}


def example_of(item: Any, where: str, targets: Targets) -> Tree:
    """Return an item as arrays, (inputs, targets) or (inputs, targets, weight); raise BadExample for others."""
    return _converted(_trees(item, where, targets))


def form_of(tree: Tree) -> Form:
    """Return the names, shapes and types of an example's arrays, which are the same in all examples."""
    return [(name, array.shape, array.dtype) for name, array in leaves(tree)]


def check_form(form: Form, due: Form, where: str) -> None:
    """Refuse an example whose form differs from the first one's."""
    if form != due:
        raise BadExample(
            f"{where} has {_shown(form)}, example 0 has {_shown(due)}: examples have the same shapes and types"
        )


def _parts(item: Any, where: str, targets: Targets, *, inputs_only: bool) -> list[tuple[str, Any]]:
    """Return the parts of an item by name: inputs, targets and optionally weights."""
    if inputs_only:
        return [("inputs", item[0] if isinstance(item, tuple) and len(item) in (2, 3) else item), ("targets", ())]
    if isinstance(item, Mapping):
        try:
            return list(zip(("inputs", "targets"), named_parts(item, targets, where), strict=True))
        except BadData as error:
            raise _named(error, where) from error
    if not isinstance(item, tuple | list) or len(item) not in (2, 3):
        found = f"{type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else type(item).__name__
        raise BadExample(f"{where} must be (inputs, targets) or (inputs, targets, weight), found {found}")
    return list(zip(("inputs", "targets", "weights"), item, strict=False))


def _batch(parts: tuple[Tree, ...], where: str) -> Examples:
    """Return the parts of a whole batch as arrays with equally many rows."""
    named = leaves(parts)
    rows = {array.shape[:1] for _, array in named}
    if len(rows) > 1 or () in rows:
        shapes = ", ".join(str(array.shape) for _, array in named)
        raise BadExample(f"{where}: its arrays have one row for each example, found the shapes {shapes}")
    converted: Examples = _converted(parts)
    return converted


def _trees(item: Any, where: str, targets: Targets, *, inputs_only: bool = False) -> tuple[Tree, ...]:
    """Return the arrays of an item's parts; omitted targets are `()`."""
    parts = _parts(item, where, targets, inputs_only=inputs_only)
    try:
        return tuple(
            ()
            if isinstance(part, tuple) and not part and name == "targets"
            else tree_of(part, f"{where}: {name}", numbers_of)
            for name, part in parts
        )
    except ConfigurationError as error:
        raise _named(error, where) from error


def _converted(parts: tuple[Tree, ...]) -> Any:
    """Return parts with numbers in the types that models receive."""
    inputs, targets, *weights = map_leaves(handed_out, parts)
    targets = map_leaves(lambda array: array.astype(np.int64) if array.dtype == np.uint8 else array, targets)
    return (inputs, targets, *(weight.astype(np.float32) for weight in weights))


def _by_name(parts: tuple[Tree, ...]) -> dict[str, Tree]:
    return dict(zip(("inputs", "targets", "weights"), parts, strict=False))


def _shown(form: Form) -> str:
    return ", ".join(f"{dtype} {shape}" for _, shape, dtype in form)


def _named(error: ConfigurationError, where: str) -> BadExample:
    """Convert a ConfigurationError to a BadExample at a place."""
    return BadExample(error.message if error.message.startswith(where) else f"{where}: {error.message}")
