"""Models of clicks and the like: two classes from numbers and keys, whose rows of embedding tables are looked up.

Owns what they share: the keys, the loss and the metrics. Each gives the logit. Called by the models of this folder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from parashard.data.base import Array, Batch, DataSpec
from parashard.errors import ConfigurationError
from parashard.layers.losses import sigmoid_cross_entropy
from parashard.layers.row_sums import sum_by_place
from parashard.layers.sequential import Sequential
from parashard.metrics import AUC, BinaryAccuracy, Metric, NormalizedEntropy, Sums
from parashard.models.judging import judged
from parashard.models.perceptron import dense_layers
from parashard.plan.embedding import EmbeddingTable
from parashard.plan.variables import Variable

WIDE, DEEP = "wide", "deep"
THRESHOLDS = 16_001

Gradients = dict[str, Array]
Logits = tuple[Array, Callable[[Array], Gradients]]
"""One for each example, shape (examples, 1), and from the gradient by them, that by variables and rows."""


class ClickModel(ABC):
    """Two classes from an example's numbers and keys.

    Every key has a row of each table that the model uses: "wide", of one number, and "deep".

    Parameters
    ----------
    kind : str
        What the job calls it.
    spec : DataSpec
        Of data whose inputs are "numbers" and "keys".
    tables : sequence of EmbeddingTable
        The job's.

    Raises
    ------
    ConfigurationError
        If the data has no keys or other than two classes, or the job lacks a table.
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
        (self.numbers,), (self.columns,) = shapes["inputs/numbers"], shapes["inputs/keys"]
        dimensions = {table.name: table.row_elements for table in tables}
        for name in self.uses:
            if name not in dimensions:
                raise ConfigurationError(f"model kind {kind!r} uses the table {name!r}: say [tables.{name}] dimension")
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
        """Return the logits of a batch and their pullback; a step of None: nothing is random."""

    def keys(self, batch: Batch) -> Mapping[str, Array]:
        """Return the keys of each example, for each table."""
        return dict.fromkeys(self.uses, batch.inputs["keys"])

    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float | Array, Mapping[str, Array]]:
        """Return the mean cross-entropy of a batch and its gradients, as `parashard.models.base.Model` says."""
        logits, pull_back = self.logits(variables, batch, batch.step, xp)
        loss, gradient = sigmoid_cross_entropy(logits, batch.targets, xp)
        return loss, pull_back(gradient)

    def evaluate(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> Mapping[str, float | Sums]:
        """Return the loss, "auc", "accuracy" and "normalized_entropy"."""
        logits, _ = self.logits(variables, batch, None, xp)
        loss = float(sigmoid_cross_entropy(logits, batch.targets, xp)[0])
        return {"loss": loss, **judged(self._metrics, logits, batch.targets, len(batch.targets), _on_host)}

    def predict(self, variables: Mapping[str, Array], batch: Batch) -> Array:
        """Return the logits of both classes, shape (examples, 2): of the first it is 0."""
        logits = self.logits(variables, batch, None, np)[0]
        return np.concatenate([np.zeros_like(logits), logits], axis=1)

    def rows(self, variables: Mapping[str, Array], batch: Batch, table: str) -> Array:
        """Return each key's row, shape (examples, columns, dimension)."""
        return variables[table][batch.places[table]]

    def by_rows(self, variables: Mapping[str, Array], batch: Batch, table: str, gradient: Array, xp: Any) -> Array:
        """Return the gradient of a table's rows from that by each key's row, of the shape of `rows`."""
        rows = variables[table]
        return sum_by_place(gradient.reshape(-1, rows.shape[1]), batch.places[table].reshape(-1), len(rows), xp)

    def wide(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> Logits:
        """Return the sum of each example's weights in the table "wide"."""

        def pull_back(gradient: Array) -> Gradients:
            each = xp.broadcast_to(gradient[:, None], (len(gradient), self.columns, 1))
            return {WIDE: self.by_rows(variables, batch, WIDE, each, xp)}

        return self.rows(variables, batch, WIDE).sum(axis=1), pull_back


def tower(inputs: int, hidden: Sequence[int], outputs: int, dropout: float, seed: int) -> Sequential:
    """Return dense layers with ReLU between them."""
    layers = dense_layers(hidden, outputs, "relu", dropout)
    made = Sequential(layers, input_shape=(inputs,), loss="sigmoid_cross_entropy")
    made.seed(seed)
    return made


def _on_host(value: Any) -> Any:
    return value if isinstance(value, np.ndarray) else value.get()
