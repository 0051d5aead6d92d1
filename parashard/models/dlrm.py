"""DLRM (Naumov et al., 2019): embeddings and a vector made of the numbers meet in products of all pairs.

Built by `parashard.models.building`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from parashard.data.base import Array, Batch, DataSpec
from parashard.errors import ConfigurationError
from parashard.models.clicks import DEEP, ClickModel, Gradients, Logits, tower
from parashard.models.options import DlrmOptions
from parashard.plan.embedding import EmbeddingTable
from parashard.plan.variables import Variable


class Dlrm(ClickModel):
    """logit = top(bottom(numbers), all products of two of: bottom(numbers), the embeddings).

    Variables: "bottom.<name>" and "top.<name>", where a name is that of a variable of a multilayer perceptron.
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
        """Return the variables of both parts."""
        return {
            f"{part}.{name}": replace(variable, name=f"{part}.{name}")
            for part, layers in (("bottom", self._bottom), ("top", self._top))
            for name, variable in layers.initial_variables().items()
            if isinstance(variable, Variable)
        }

    def logits(self, variables: Mapping[str, Array], batch: Batch, step: int | None, xp: Any) -> Logits:
        """Return the logits and their pullback."""
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
