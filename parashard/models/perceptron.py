"""The layers that the built-in models share, and the classifier that they make.

Knows no model's options. Called by the built-in models.
"""

from __future__ import annotations

from collections.abc import Sequence

from parashard.data.base import DataSpec
from parashard.errors import ConfigurationError
from parashard.layers.activations import ACTIVATIONS
from parashard.layers.base import Layer
from parashard.layers.dense import Dense, Flatten
from parashard.layers.dropout import Dropout
from parashard.layers.sequential import Sequential
from parashard.models.options import ActivationName


def hidden_start(activation: ActivationName) -> str:
    """Return the initializer that keeps the variance of a hidden layer's signals: He's, or Glorot's for tanh."""
    return "glorot_uniform" if activation == "tanh" else "he_normal"


def dense_layers(hidden: Sequence[int], outputs: int, activation: ActivationName, dropout: float) -> list[Layer]:
    """Return flattened inputs through hidden dense layers, each with activation and dropout, to outputs."""
    layers: list[Layer] = [Flatten()]
    for units in hidden:
        layers += [Dense(units, initializer=hidden_start(activation)), ACTIVATIONS[activation], Dropout(dropout)]
    return [*layers, Dense(outputs)]


class Classifier(Sequential):
    """Layers from inputs to the logits of a data set's classes, with the mean softmax cross-entropy as loss.

    Parameters
    ----------
    layers : sequence of Layer
    spec : DataSpec
    seed : int
        The job's; keys the dropout masks.
    """

    def __init__(self, layers: Sequence[Layer], spec: DataSpec, seed: int) -> None:
        super().__init__(layers, input_shape=spec.input_shape, loss="softmax_cross_entropy", metrics=["accuracy"])
        self.seed(seed)


def need_classes(spec: DataSpec, kind: str, instead: str = 'use model.kind = "mlp", which predicts values') -> None:
    """Raise ConfigurationError where the data has no classes for a model of this kind to distinguish."""
    if spec.classes == 0:
        raise ConfigurationError(
            f"model kind {kind!r} tells classes apart, and the data's targets are values (regression): {instead}, "
            'or say data.target = "class" if the labels are classes'
        )
    if spec.classes == 1:
        raise ConfigurationError(f"model kind {kind!r} needs data with at least 2 classes, found 1")
