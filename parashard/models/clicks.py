"""Click models: two classes from numbers and from keys, whose rows are looked up in embedding tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from parashard.data.base import Array, Batch, DataSpec
from parashard.data.tree import LISTS
from parashard.errors import ConfigurationError
from parashard.job.keys import dotted
from parashard.job.model_options import DeepFmOptions, DlrmOptions, FmOptions, WideDeepOptions
from parashard.layers.dense import Dense
from parashard.layers.losses import sigmoid_cross_entropy
from parashard.layers.row_sums import sum_by_place
from parashard.metrics import AUC, BinaryAccuracy, Metric, NormalizedEntropy
from parashard.models.evaluation import MetricPart, metric_states
from parashard.models.framework import host_array
from parashard.models.networks import dense_layers
from parashard.models.row_places import PullBack, bags_of, combined, keys_of_lists
from parashard.models.sequential import Sequential
from parashard.plan.embedding import EmbeddingTable
from parashard.plan.variables import Variable

WIDE, DEEP = "wide", "deep"
THRESHOLDS = 16_001

Gradients = dict[str, Array]
Logits = tuple[Array, Callable[[Array], Gradients]]
"""Logits, shape (examples, 1), and their pullback: from their gradient to that by variables and rows."""


class ClickModel(ABC):
    """Two classes from an example's numbers and keys.

    Every key has a row of each table that the model uses: "wide", of one number, and "deep". The table's
    combiner reduces the rows of a list of keys to one vector, so that each column has one.
    """

    uses: ClassVar[Sequence[str]] = (WIDE, DEEP)

    def __init__(self, kind: str, spec: DataSpec, tables: Sequence[EmbeddingTable]) -> None:
        shapes = {field.name: field.shape for field in spec.fields}
        if not {"inputs/numbers", "inputs/keys"} <= shapes.keys():
            raise ConfigurationError(
                f'model kind {kind!r} needs keys, and the data has none: say data.key_columns = ["*"] for text columns'
            )
        if spec.classes != 2:
            found = f"{spec.classes:,} classes" if spec.classes else "targets that are values"
            raise ConfigurationError(f"model kind {kind!r} tells two classes apart, and the data has {found}")
        (self.numbers,), (self._single,) = shapes["inputs/numbers"], shapes["inputs/keys"]
        self._lists = [name.removeprefix(LISTS) for name in shapes if name.startswith(LISTS)]
        self.columns = self._single + len(self._lists)
        dimensions = {table.name: table.row_elements for table in tables}
        for name in self.uses:
            if name not in dimensions:
                raise ConfigurationError(f"model kind {kind!r} uses the table {name!r}: say [tables.{name}] dimension")
        for table in tables:
            self._check(kind, table)
        self._combiners = {table.name: table.combiner or "mean" for table in tables}
        if WIDE in self.uses and dimensions[WIDE] != 1:
            raise ConfigurationError(f"tables.wide.dimension: found {dimensions[WIDE]}; allowed with {kind!r}: 1")
        self.dimension = dimensions.get(DEEP, 0)
        metrics: list[Metric] = [
            AUC(THRESHOLDS, from_logits=True, spacing="both"),
            BinaryAccuracy(name="accuracy"),
            NormalizedEntropy(from_logits=True),
        ]
        self._metrics = {metric.name: metric for metric in metrics}

    @abstractmethod
    def initial_variables(self) -> Mapping[str, Variable]:
        """Return the declared variables by name."""

    @abstractmethod
    def logits(self, variables: Mapping[str, Array], batch: Batch, step: int | None, xp: Any) -> Logits:
        """Return the logits of a batch and their pullback; with step None nothing is random."""

    def keys(self, batch: Batch) -> Mapping[str, Array]:
        """Return the keys by table: in the batch's shape, or flat (`keys_of_lists`) if there are columns of lists."""
        keys = batch.inputs["keys"]
        return dict.fromkeys(self.uses, keys_of_lists(keys, self._lists_of(batch)) if self._lists else keys)

    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float | Array, Mapping[str, Array]]:
        """Return the mean cross-entropy of a batch and its gradients, as `parashard.models.base.Model` says."""
        logits, pull_back = self.logits(variables, batch, batch.step, xp)
        loss, gradient = sigmoid_cross_entropy(logits, batch.targets, xp)
        return loss, pull_back(gradient)

    def evaluate(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> Mapping[str, MetricPart]:
        """Return the loss, "auc", "accuracy" and "normalized_entropy"."""
        logits, _ = self.logits(variables, batch, None, xp)
        loss = float(sigmoid_cross_entropy(logits, batch.targets, xp)[0])
        return {"loss": loss, **metric_states(self._metrics, logits, batch.targets, len(batch.targets), host_array)}

    def predict(self, variables: Mapping[str, Array], batch: Batch) -> Array:
        """Return the logits of both classes, shape (examples, 2); those of the first are 0."""
        logits = self.logits(variables, batch, None, np)[0]
        return np.concatenate([np.zeros_like(logits), logits], axis=1)

    def look_up(self, variables: Mapping[str, Array], batch: Batch, table: str, xp: Any) -> tuple[Array, PullBack]:
        """Return one vector per example and column, and the pullback from their gradient to that of the rows."""
        # Shape (examples, columns, dimension); columns of lists come after those of one key.
        rows, places = variables[table], batch.places[table]
        if not self._lists:

            def by_rows(gradient: Array) -> Array:
                return sum_by_place(gradient.reshape(-1, rows.shape[1]), places.reshape(-1), len(rows), xp)

            return rows.take(places, axis=0), by_rows
        examples, dimension = len(batch.inputs["keys"]), rows.shape[1]
        single = examples * self._single  # look-ups
        bags = bags_of(self._lists_of(batch), xp)
        of_lists, lists_back = combined(rows.take(places[single:], axis=0), bags, self._combiners[table], xp)
        of_single = rows.take(places[:single], axis=0).reshape(examples, self._single, dimension)

        def pull_back(gradient: Array) -> Array:
            by_single = gradient[:, : self._single].reshape(single, dimension)
            by_lists = lists_back(gradient[:, self._single :].reshape(-1, dimension))
            return sum_by_place(xp.concatenate([by_single, by_lists]), places, len(rows), xp)

        return xp.concatenate([of_single, of_lists.reshape(examples, -1, dimension)], axis=1), pull_back

    def wide(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> Logits:
        """Return the sum of each example's weights in the table "wide"."""
        weights, by_rows = self.look_up(variables, batch, WIDE, xp)

        def pull_back(gradient: Array) -> Gradients:
            return {WIDE: by_rows(xp.broadcast_to(gradient[:, None], weights.shape))}

        return weights.sum(axis=1), pull_back

    def _lists_of(self, batch: Batch) -> list[Array]:
        return [batch.inputs["lists"][name] for name in self._lists]

    def _check(self, kind: str, table: EmbeddingTable) -> None:
        """Refuse a table, or a setting of one, that has no effect."""
        if table.name not in (WIDE, DEEP):  # `unused_tables` warns of WIDE or DEEP if this kind does not use it
            raise ConfigurationError(
                f"{dotted('tables', table.name)}: model kind {kind!r} does not use it; allowed: "
                f"{' and '.join(f'tables.{name}' for name in self.uses)}"
            )
        if table.combiner is not None and not self._lists:
            raise ConfigurationError(
                f"tables.{table.name}.combiner: found {table.combiner!r}, and no column has several keys in a cell; "
                "allowed: unset, or data.list_columns"
            )


def tower(inputs: int, hidden: Sequence[int], outputs: int, dropout: float, seed: int) -> Sequential:
    """Return dense layers with ReLU between them."""
    layers = dense_layers(hidden, outputs, "relu", dropout)
    made = Sequential(layers, input_shape=(inputs,), loss="sigmoid_cross_entropy")
    made.seed(seed)
    return made


class WideModel(ClickModel):
    """logit = the sum of the wide weights + a dense part + with `fm` and `deepfm` the sum of v_i . v_j over all pairs.

    The dense part is a multilayer perceptron over the numbers and all embeddings, concatenated; with `fm` it is linear
    in the numbers. Its variables are the model's.
    """

    def __init__(
        self,
        options: WideDeepOptions | FmOptions | DeepFmOptions,
        spec: DataSpec,
        seed: int,
        tables: Sequence[EmbeddingTable] = (),
    ) -> None:
        super().__init__(options.kind, spec, tables)
        self._has_pairs = not isinstance(options, WideDeepOptions)
        self._is_deep = not isinstance(options, FmOptions)
        if isinstance(options, FmOptions):
            self._dense = Sequential([Dense(1)], input_shape=(max(1, self.numbers),), loss="sigmoid_cross_entropy")
        else:
            inputs = self.numbers + self.columns * self.dimension
            self._dense = tower(inputs, options.hidden, 1, options.dropout, seed)

    def initial_variables(self) -> Mapping[str, Variable]:
        return self._dense.initial_variables()  # type: ignore[return-value]  # it holds no values

    def logits(self, variables: Mapping[str, Array], batch: Batch, step: int | None, xp: Any) -> Logits:
        embedded, by_rows = self.look_up(variables, batch, DEEP, xp)
        logits, wide_back = self.wide(variables, batch, xp)
        total = embedded.sum(axis=1) if self._has_pairs else None
        if total is not None:
            logits = logits + 0.5 * (total**2 - (embedded**2).sum(axis=1)).sum(axis=1, keepdims=True)
        dense, dense_back = self._dense.as_layer(variables, self._inputs(batch, embedded, xp), step, xp)

        def pull_back(gradient: Array) -> Gradients:
            of_wide = wide_back(gradient)
            by_embedded = gradient[:, None] * (total[:, None] - embedded) if total is not None else 0
            by_inputs, of_dense = dense_back(gradient, self._is_deep)
            if by_inputs is not None and self._is_deep:
                by_embedded = by_embedded + by_inputs[:, self.numbers :].reshape(embedded.shape)
            return {**of_dense, **of_wide, DEEP: by_rows(by_embedded)}

        return logits + dense, pull_back

    def _inputs(self, batch: Batch, embedded: Array, xp: Any) -> Array:
        numbers = batch.inputs["numbers"].astype(embedded.dtype, copy=False)
        if self._is_deep:
            return xp.concatenate([numbers, embedded.reshape(len(embedded), -1)], axis=1)
        return numbers if self.numbers else xp.zeros((len(embedded), 1), embedded.dtype)


class Dlrm(ClickModel):
    """logit = top(bottom(numbers), dot products of all pairs of bottom(numbers) and the embeddings).

    Variables: "bottom.<name>" and "top.<name>", with the variable names of a multilayer perceptron.
    """

    uses = (DEEP,)

    def __init__(self, options: DlrmOptions, spec: DataSpec, seed: int, tables: Sequence[EmbeddingTable] = ()) -> None:
        super().__init__(options.kind, spec, tables)
        if not self.numbers:
            raise ConfigurationError(f"model kind {options.kind!r} needs a column of numbers, and the data has none")
        self._bottom = tower(self.numbers, options.bottom, self.dimension, 0.0, seed)
        self._pairs = np.triu_indices(self.columns + 1, 1)
        inputs = self.dimension + len(self._pairs[0])
        self._top = tower(inputs, options.hidden, 1, options.dropout, seed)

    def initial_variables(self) -> Mapping[str, Variable]:
        return {
            f"{part}.{name}": replace(variable, name=f"{part}.{name}")
            for part, layers in (("bottom", self._bottom), ("top", self._top))
            for name, variable in layers.initial_variables().items()
            if isinstance(variable, Variable)
        }

    def logits(self, variables: Mapping[str, Array], batch: Batch, step: int | None, xp: Any) -> Logits:
        embedded, by_rows = self.look_up(variables, batch, DEEP, xp)
        numbers = batch.inputs["numbers"].astype(embedded.dtype, copy=False)
        vector, bottom_back = self._bottom.as_layer(_of(variables, "bottom"), numbers, step, xp)
        all_vectors = xp.concatenate([vector[:, None], embedded], axis=1)
        products = xp.matmul(all_vectors, all_vectors.transpose(0, 2, 1))
        first, second = (xp.asarray(places) for places in self._pairs)
        inputs = xp.concatenate([vector, products[:, first, second]], axis=1)
        logits, top_back = self._top.as_layer(_of(variables, "top"), inputs, step, xp)

        def pull_back(gradient: Array) -> Gradients:
            by_inputs, of_top = top_back(gradient, True)
            assert by_inputs is not None
            by_products = xp.zeros_like(products)
            by_products[:, first, second] = by_inputs[:, self.dimension :]
            by_products += by_products.transpose(0, 2, 1)
            by_vectors = xp.matmul(by_products, all_vectors)
            _, of_bottom = bottom_back(by_inputs[:, : self.dimension] + by_vectors[:, 0], False)
            own = {f"bottom.{name}": found for name, found in of_bottom.items()}
            own |= {f"top.{name}": found for name, found in of_top.items()}
            return {**own, DEEP: by_rows(by_vectors[:, 1:])}

        return logits, pull_back


def _of(variables: Mapping[str, Array], part: str) -> dict[str, Array]:
    """Return the variables of a part by their names within it."""
    return {name.removeprefix(f"{part}."): values for name, values in variables.items() if name.startswith(f"{part}.")}
