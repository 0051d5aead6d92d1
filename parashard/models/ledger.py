"""The ledger: a model whose final weights count how often every example was applied. The first exactly-once oracle.

The "gradient" of example i in epoch e is row i = (1, (e + 1)^2), zero elsewhere, summed over the batch. With SGD at
learning rate -1, and sums instead of means where gradients are folded, every row must end as (epochs, sum of
(e + 1)^2): the first column shows a step that was lost or counted twice, the second one such errors that cancel each
other across epochs. Knows no shard. Built by `parashard.models.building`; audited by the job's report.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from parashard.data.base import Array, Batch, DataSpec
from parashard.errors import ConfigurationError
from parashard.plan.variables import Float32s, Variable

LEDGER_EPOCHS_MAX = 368
"""Most epochs whose sum of squares is at most 2^24, up to where float32 counts exactly."""


class Ledger:
    """One variable, "ledger": shape (examples, 2), zeros at the start.

    Parameters
    ----------
    spec : DataSpec
        Only `examples` is used: the ledger reads no inputs and no targets.
    """

    adds_losses = True

    def __init__(self, spec: DataSpec) -> None:
        self._examples = spec.examples

    def initial_variables(self) -> Mapping[str, Variable]:
        """Return the ledger."""
        return {"ledger": Variable("ledger", (self._examples, 2), decay=False)}

    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float, Mapping[str, Array]]:
        """Return 0.0, for there is nothing to minimise, and the batch's entries: a new array.

        Raises
        ------
        ConfigurationError
            The epoch lies past the last one that float32 counts exactly.
        """
        squares_total(batch.epoch + 1)
        entries = np.zeros((self._examples, 2), variables["ledger"].dtype)
        np.add.at(entries, batch.indices, np.array((1, (batch.epoch + 1) ** 2), entries.dtype))
        return 0.0, {"ledger": xp.asarray(entries)}

    def evaluate(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> Mapping[str, float]:
        """Return no metric."""
        return {}

    def audit(self, variables: Mapping[str, Float32s], epochs: int) -> Mapping[str, int]:
        """Return {"ledger_wrong": rows that are not exactly (epochs, sum of (e + 1)^2 for e < epochs)}.

        Raises
        ------
        ConfigurationError
            That sum is over 2^24, so float32 could not have counted it.
        """
        expected = np.array((epochs, squares_total(epochs)), np.float32)
        return {"ledger_wrong": int((variables["ledger"] != expected).any(axis=1).sum())}


def squares_total(epochs: int) -> int:
    """Return the sum of (e + 1)^2 for e < epochs; raise ConfigurationError where float32 could not hold it exactly."""
    if epochs > LEDGER_EPOCHS_MAX:
        raise ConfigurationError(
            f"model kind 'ledger' counts exactly for at most {LEDGER_EPOCHS_MAX} epochs (a sum of squares of 2^24), "
            f"found {epochs}"
        )
    return epochs * (epochs + 1) * (2 * epochs + 1) // 6
