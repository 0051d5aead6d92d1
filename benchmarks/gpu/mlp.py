"""An MLP of our layers on CuPy or NumPy, for `benchmarks.gpu.speed`, and its training without a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import parashard as ps
from parashard.data.base import Batch
from parashard.layers import Dense, ReLU
from parashard.models.base import Model
from parashard.plan.optimizers import OptimizerSpec
from parashard.plan.variables import Variable, initial_rows
from parashard_server.state.optimizer import Optimizer

INPUTS, CLASSES = 64, 10


def model(width: int) -> Model:
    """Return the MLP with two hidden layers of a width."""
    layers = [Dense(width, initializer="he_normal"), ReLU(), Dense(width, initializer="he_normal"), ReLU()]
    return ps.Sequential([*layers, Dense(CLASSES)], input_shape=(INPUTS,), loss="softmax_cross_entropy")


def data(examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and the classes that a linear function of them gives."""
    inputs = np.random.default_rng(0).standard_normal((examples, INPUTS), np.float32)
    return inputs, inputs[:, :CLASSES].argmax(1)


class NoServer:
    """A plain training loop: variables and slots on the device; each step's loss is read, as for display.

    Parameters
    ----------
    trained : Model
        The model to train.
    spec : OptimizerSpec
        The update rule.
    xp, kernels : module
        NumPy or CuPy, and the update rules for its arrays.
    """

    def __init__(self, trained: Model, spec: OptimizerSpec, xp: Any, kernels: Any) -> None:
        self._model, self._xp = trained, xp
        self._optimizer = Optimizer(spec, kernels)
        declared = trained.initial_variables()
        self._declared = {name: v for name, v in declared.items() if isinstance(v, Variable)}
        first = {name: initial_rows(v, 0, 0, v.rows).reshape(v.shape) for name, v in self._declared.items()}
        self.variables = {name: xp.array(values) for name, values in first.items()}
        self._slots = {
            name: {slot: xp.full(v.size, x, np.float32) for slot, x in self._optimizer.initial_values.items()}
            for name, v in self.variables.items()
        }
        self._steps = 0

    def step(self, inputs: np.ndarray, targets: np.ndarray) -> float:
        """Take a step and return its loss, which waits for all of it."""
        xp, number = self._xp, self._steps
        batch = Batch(number, 0, np.arange(len(targets)), xp.asarray(inputs), xp.asarray(targets))
        loss, gradients = self._model.loss_and_gradients(self.variables, batch, xp)
        assert isinstance(gradients, Mapping)
        self._steps += 1
        for name, gradient in gradients.items():
            self._optimizer.update(
                self.variables[name].reshape(-1),
                gradient.reshape(-1),
                self._slots[name],
                t=self._steps,
                scale=1.0,
                variable=self._declared[name],
            )
        return float(loss)
