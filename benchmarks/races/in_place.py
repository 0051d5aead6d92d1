"""The contestant without a server: a push is the product's SGD kernel on every core, a pull a copy, in one process."""

from __future__ import annotations

import numpy as np

from benchmarks.peers import seam
from parashard.plan.optimizers import SGD
from parashard.plan.variables import Variable
from parashard.process.resources import cores
from parashard_server.state.kernels import fused
from parashard_server.state.optimizer import Optimizer


class InPlace(seam.PushPull):
    """Weights, gradient and the worker's own copy of the weights, side by side.

    Attributes
    ----------
    weights : ndarray of float32, shape (elements,)
        The weights after all pushes.
    """

    def __init__(self) -> None:
        fused.use_threads(cores())
        self._optimizer = Optimizer(SGD(learning_rate=seam.LEARNING_RATE))

    def open(self, gradient: seam.Floats) -> None:
        """Begin with zeros."""
        self._gradient = gradient
        self._variable = Variable("w", gradient.shape)
        self.weights, self._pulled = np.zeros((2, gradient.size), np.float32)

    def push(self) -> None:
        """Apply the gradient."""
        self._optimizer.update(self.weights, self._gradient, {}, t=1, scale=1.0, variable=self._variable)

    def pull(self) -> seam.Floats:
        """Copy the weights."""
        np.copyto(self._pulled, self.weights)
        return self._pulled


if __name__ == "__main__":
    seam.serve(seam.push_pull_answers(InPlace()), ["numpy", "numba"])
