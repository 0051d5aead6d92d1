"""Wide and deep (Cheng et al., DLRS 2016): a weight for each key, and embeddings and numbers through dense layers.

Built by `parashard.models.building`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parashard.data.base import Array, Batch, DataSpec
from parashard.models.clicks import DEEP, ClickModel, Gradients, Logits, tower
from parashard.models.options import WideDeepOptions
from parashard.plan.embedding import EmbeddingTable
from parashard.plan.variables import Variable


class WideDeep(ClickModel):
    """logit = the sum of the wide weights + dense layers over numbers and all embeddings, end to end.

    Variables: those of the dense layers, as in a multilayer perceptron; the last bias is the model's.
    """

    def __init__(
        self, options: WideDeepOptions, spec: DataSpec, seed: int, tables: Sequence[EmbeddingTable] = ()
    ) -> None:
        super().__init__(options.kind, spec, tables)
        inputs = self.numbers + self.columns * self.dimension
        self._tower = tower(inputs, options.hidden, 1, options.dropout, seed)

    def initial_variables(self) -> Mapping[str, Variable]:
        """Return the variables of the dense layers."""
        return self._tower.initial_variables()  # type: ignore[return-value]  # it holds no values

    def logits(self, variables: Mapping[str, Array], batch: Batch, step: int | None, xp: Any) -> Logits:
        """Return the logits and their pullback."""
        embedded, by_rows = self.look_up(variables, batch, DEEP, xp)
        numbers = batch.inputs["numbers"].astype(embedded.dtype, copy=False)
        inputs = xp.concatenate([numbers, embedded.reshape(len(embedded), -1)], axis=1)
        wide, wide_back = self.wide(variables, batch, xp)
        deep, deep_back = self._tower.as_layer(variables, inputs, step, xp)

        def pull_back(gradient: Array) -> Gradients:
            of_wide = wide_back(gradient)
            by_inputs, of_tower = deep_back(gradient, True)
            assert by_inputs is not None
            by_embedded = by_inputs[:, self.numbers :].reshape(embedded.shape)
            return {**of_tower, **of_wide, DEEP: by_rows(by_embedded)}

        return wide + deep, pull_back
