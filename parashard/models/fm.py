"""Factorization machines (Rendle, ICDM 2010), and with dense layers over the same embeddings DeepFM (Guo et al., 2017).

Built by `parashard.models.building`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parashard.data.base import Array, Batch, DataSpec
from parashard.layers.dense import Dense
from parashard.layers.sequential import Sequential
from parashard.models.clicks import DEEP, ClickModel, Gradients, Logits, tower
from parashard.models.options import DeepFmOptions, FmOptions
from parashard.plan.embedding import EmbeddingTable
from parashard.plan.variables import Variable


class FactorizationMachine(ClickModel):
    """logit = the sum of the wide weights + the sum of v_i . v_j over all pairs of keys + a dense part.

    The dense part is linear in the numbers; of DeepFM it has layers over numbers and all embeddings.
    """

    def __init__(
        self, options: FmOptions | DeepFmOptions, spec: DataSpec, seed: int, tables: Sequence[EmbeddingTable] = ()
    ) -> None:
        super().__init__(options.kind, spec, tables)
        self._is_deep = isinstance(options, DeepFmOptions)
        if isinstance(options, DeepFmOptions):
            inputs = self.numbers + self.columns * self.dimension
            self._dense = tower(inputs, options.hidden, 1, options.dropout, seed)
        else:
            self._dense = Sequential([Dense(1)], input_shape=(max(1, self.numbers),), loss="sigmoid_cross_entropy")

    def initial_variables(self) -> Mapping[str, Variable]:
        """Return the variables of the dense part."""
        return self._dense.initial_variables()  # type: ignore[return-value]  # it holds no values

    def logits(self, variables: Mapping[str, Array], batch: Batch, step: int | None, xp: Any) -> Logits:
        """Return the logits and their pullback."""
        embedded, by_rows = self.look_up(variables, batch, DEEP, xp)
        total = embedded.sum(axis=1)
        pairs = 0.5 * (total**2 - (embedded**2).sum(axis=1)).sum(axis=1, keepdims=True)
        wide, wide_back = self.wide(variables, batch, xp)
        dense, dense_back = self._dense.as_layer(variables, self._inputs(batch, embedded, xp), step, xp)

        def pull_back(gradient: Array) -> Gradients:
            by_embedded = gradient[:, None] * (total[:, None] - embedded)
            of_wide = wide_back(gradient)
            by_inputs, of_dense = dense_back(gradient, self._is_deep)
            if by_inputs is not None and self._is_deep:
                by_embedded += by_inputs[:, self.numbers :].reshape(embedded.shape)
            return {**of_dense, **of_wide, DEEP: by_rows(by_embedded)}

        return wide + pairs + dense, pull_back

    def _inputs(self, batch: Batch, embedded: Array, xp: Any) -> Array:
        numbers = batch.inputs["numbers"].astype(embedded.dtype, copy=False)
        if self._is_deep:
            return xp.concatenate([numbers, embedded.reshape(len(embedded), -1)], axis=1)
        return numbers if self.numbers else xp.zeros((len(embedded), 1), embedded.dtype)
