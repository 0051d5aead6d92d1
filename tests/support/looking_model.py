"""A model with gradients by hand that looks rows up: a number for each of an example's keys, and a bias.

It is trained by `parashard.Trainer` in a test's own process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import parashard as ps
from parashard.layers.row_sums import sum_by_place

_RNG = np.random.default_rng(1)
KEYS = _RNG.integers(-(10**12), 10**12, 30)[_RNG.integers(0, 30, (90, 2))]
TARGETS = _RNG.normal(size=90).astype(np.float32)
TABLE = ps.Table("weight", 1, optimizer=ps.Momentum(0.02), scale=0.5)


class Looking:
    """The sum of its keys' numbers and the bias is to be the target."""

    tables = (TABLE,)

    def initial_variables(self) -> Mapping[str, Any]:
        """Return the bias."""
        return {"bias": np.zeros(1, np.float32)}

    def keys(self, batch: Any) -> Mapping[str, Any]:
        """Return both keys of each example."""
        return {"weight": batch.inputs}

    def loss_and_gradients(self, variables: Any, batch: Any, xp: Any) -> Any:
        """Return the mean squared error and its gradients."""
        error = self._outputs(variables, batch) - batch.targets
        each = np.repeat(2 * error / np.float32(len(error)), 2)[:, None].astype(np.float32)
        rows = sum_by_place(each, batch.places["weight"].reshape(-1), len(variables["weight"]), xp)
        return float((error**2).mean()), {"bias": np.array([2 * error.mean()], np.float32), "weight": rows}

    def evaluate(self, variables: Any, batch: Any, xp: Any) -> Mapping[str, float]:
        """Return the mean squared error."""
        return {"loss": float(((self._outputs(variables, batch) - batch.targets) ** 2).mean())}

    def _outputs(self, variables: Any, batch: Any) -> Any:
        return variables["weight"][batch.places["weight"]][:, :, 0].sum(1) + variables["bias"][0]
