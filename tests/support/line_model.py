"""A line through points, with gradients by hand: trained by `parashard.Trainer` in the test's own process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from parashard.plan.variables import Variable

X = np.random.default_rng(0).normal(size=(90, 3)).astype(np.float32)
Y = (X @ np.array([3, -1, 2]) + 0.5).astype(np.float32)


class Line:
    """Noise of the step's own makes it sensitive to which step is computed; `before` is called first."""

    def __init__(self) -> None:
        self.before: Callable[[Any], None] = lambda batch: None

    def initial_variables(self) -> Mapping[str, Any]:
        """Return one array, and one variable that the seed draws."""
        return {"w": np.array([[1.0], [2.0], [0.0]], np.float32), "b": Variable("b", (1,))}

    def loss_and_gradients(self, variables: Any, batch: Any, xp: Any) -> Any:
        """Return the mean squared error and its gradients."""
        self.before(batch)
        noise = np.random.default_rng(batch.step).normal(scale=0.01, size=len(batch.targets)).astype(np.float32)
        error = batch.inputs @ variables["w"][:, 0] + variables["b"][0] - batch.targets + noise
        slope = 2 * batch.inputs.T @ error / np.float32(len(error))
        return float((error**2).mean()), {"w": slope[:, None], "b": np.array([2 * error.mean()], np.float32)}

    def evaluate(self, variables: Any, batch: Any, xp: Any) -> Mapping[str, float]:
        """Return the mean squared error."""
        error = batch.inputs @ variables["w"][:, 0] + variables["b"][0] - batch.targets
        return {"loss": float((error**2).mean())}
