"""A stack of dense layers with activations and dropout, and the network that consists of one.

Owns the variables `dense_<i>.weight` (inputs, outputs) and `dense_<i>.bias` (outputs,). Knows no loss and no option.
Called by the models: softmax regression and the MLP are `DenseNetwork`s, a CNN puts a stack behind its convolutions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parashard.data.base import Array, DataSpec
from parashard.models.classifier import Classifier, Pullback
from parashard.models.layers import ACTIVATIONS, dropout_mask
from parashard.models.options import ActivationName
from parashard.plan.variables import Initializer, Variable, glorot_uniform, he_normal


@dataclass(frozen=True)
class _Hidden:
    """What the pullback needs of one hidden layer."""

    saved: Any
    mask: Array | None


@dataclass(frozen=True)
class Tape:
    """What a forward pass leaves for its pullback: the input of every layer, and the hidden layers' state."""

    inputs: list[Array]
    hidden: list[_Hidden]


class DenseStack:
    """Dense layers x W + b; every layer but the last is followed by the activation and inverted dropout.

    Parameters
    ----------
    widths : sequence of int
        Features of the input, of each hidden layer and of the output: at least two numbers.
    activation : {"relu", "gelu", "tanh"}
    dropout : float
        Probability of dropping a hidden unit, in [0, 0.99].
    seed : int
        The job's; with the step and the layer it keys a dropout mask.
    """

    def __init__(self, widths: Sequence[int], activation: ActivationName, dropout: float, seed: int) -> None:
        self._widths = tuple(widths)
        self._layers = len(self._widths) - 1
        self._activation_name: ActivationName = activation
        self._activation = ACTIVATIONS[activation]
        self._dropout = dropout
        self._seed = seed

    def variables(self) -> dict[str, Variable]:
        """Return the declared variables by name: rows of a weight are input features, biases do not decay."""
        declared = {}
        for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(self._widths)):
            last = layer == self._layers - 1
            start = glorot_uniform(fan_in, fan_out) if last else hidden_start(self._activation_name, fan_in, fan_out)
            declared[f"dense_{layer}.weight"] = Variable(f"dense_{layer}.weight", (fan_in, fan_out), start)
            declared[f"dense_{layer}.bias"] = Variable(f"dense_{layer}.bias", (fan_out,), decay=False)
        return declared

    def forward(self, variables: Mapping[str, Array], x: Array, step: int | None, xp: Any) -> tuple[Array, Tape]:
        """Return the last layer's output, shape (n, widths[-1]), and the tape; `step` None drops nothing.

        `x` has shape (n, widths[0]) and the variables' dtype; it is kept on the tape and not changed.
        """
        tape = Tape([], [])
        for layer in range(self._layers):
            tape.inputs.append(x)
            z = xp.matmul(x, variables[f"dense_{layer}.weight"])
            z += variables[f"dense_{layer}.bias"]
            if layer == self._layers - 1:
                return z, tape
            x, saved = self._activation.apply(z, xp)
            mask = None
            if self._dropout > 0 and step is not None:
                mask = dropout_mask(x.shape, self._dropout, (self._seed, step, layer), x.dtype, xp)
                x = x * mask  # a new array: `saved` may be the old one
            tape.hidden.append(_Hidden(saved, mask))
        raise AssertionError("a stack has at least one layer")

    def pull_back(
        self, variables: Mapping[str, Array], tape: Tape, gradient: Array, xp: Any, *, to_input: bool
    ) -> tuple[dict[str, Array], Array | None]:
        """Return the gradient by every variable, and by the stack's input where `to_input` asks for it.

        `gradient`, by the stack's output, may be overwritten.
        """
        gradients: dict[str, Array] = {}
        for layer in reversed(range(self._layers)):
            if layer < self._layers - 1:
                hidden = tape.hidden[layer]
                if hidden.mask is not None:
                    gradient *= hidden.mask
                gradient = self._activation.derive(gradient, hidden.saved, xp)
            gradients[f"dense_{layer}.weight"] = xp.matmul(tape.inputs[layer].T, gradient)
            gradients[f"dense_{layer}.bias"] = gradient.sum(axis=0)
            if layer > 0 or to_input:
                gradient = xp.matmul(gradient, variables[f"dense_{layer}.weight"].T)
        return gradients, gradient if to_input else None


def hidden_start(activation: ActivationName, fan_in: int, fan_out: int) -> Initializer:
    """Return the initializer that keeps the variance of a hidden layer's signals: He's, or Glorot's for tanh."""
    return glorot_uniform(fan_in, fan_out) if activation == "tanh" else he_normal(fan_in)


class DenseNetwork:
    """Flattened inputs through hidden dense layers to outputs: the network of a `Classifier` or a `Regressor`.

    Variables: "dense_<i>.weight", shape (inputs, outputs), and "dense_<i>.bias", shape (outputs,), for the hidden
    layers and, last, the outputs.

    Parameters
    ----------
    spec : DataSpec
    outputs : int
        How many there are for each example.
    hidden : sequence of int
        Units of each hidden layer; none: one dense layer.
    activation, dropout, seed
        As in `DenseStack`.
    """

    def __init__(
        self, spec: DataSpec, outputs: int, hidden: Sequence[int], activation: ActivationName, dropout: float, seed: int
    ) -> None:
        self._features = math.prod(spec.input_shape)
        self._stack = DenseStack((self._features, *hidden, outputs), activation, dropout, seed)

    def initial_variables(self) -> Mapping[str, Variable]:
        """Return the declared variables by name."""
        return self._stack.variables()

    def forward(
        self, variables: Mapping[str, Array], inputs: Array, step: int | None, xp: Any
    ) -> tuple[Array, Pullback]:
        """Return the outputs, shape (n, outputs) in the variables' dtype, and the pullback of their gradient."""
        x = inputs.reshape(len(inputs), self._features).astype(variables["dense_0.weight"].dtype, copy=False)
        outputs, tape = self._stack.forward(variables, x, step, xp)
        return outputs, lambda gradient: self._stack.pull_back(variables, tape, gradient, xp, to_input=False)[0]


class DenseClassifier(DenseNetwork, Classifier):
    """A dense network whose outputs are logits; `spec.classes` must be at least 2. Parameters as in `DenseNetwork`."""

    def __init__(
        self, spec: DataSpec, hidden: Sequence[int], activation: ActivationName, dropout: float, seed: int
    ) -> None:
        super().__init__(spec, spec.classes, hidden, activation, dropout, seed)
