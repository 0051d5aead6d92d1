"""Multilayer perceptron: dense layers with an activation and dropout between them.

Owns its options. Knows no other model. Built by `parashard.models.building`.
"""

from __future__ import annotations

from parashard.data.base import DataSpec
from parashard.models.base import Model
from parashard.models.options import MlpOptions
from parashard.models.perceptron import Classifier, dense_layers, need_classes
from parashard.models.regressor import Regressor, need_values


def multilayer_perceptron(options: MlpOptions, spec: DataSpec, seed: int) -> Model:
    """Return the perceptron with the loss that the options name, or else the one that the data's targets call for."""
    if options.loss == "squared" or (options.loss is None and spec.classes == 0):
        return RegressionPerceptron(options, spec, seed)
    return MultilayerPerceptron(options, spec, seed)


class MultilayerPerceptron(Classifier):
    """Flattened inputs through the hidden layers of its options to logits.

    Variables: "dense_<i>.weight", shape (inputs, outputs), and "dense_<i>.bias", shape (outputs,), for the hidden
    layers and, last, the outputs.

    Parameters
    ----------
    options : MlpOptions
    spec : DataSpec
    seed : int
        The job's; keys the dropout masks.

    Raises
    ------
    ConfigurationError
        The data has fewer than 2 classes.
    """

    def __init__(self, options: MlpOptions, spec: DataSpec, seed: int) -> None:
        need_classes(spec, f"{options.kind} with loss cross_entropy", "leave model.loss out to predict them")
        super().__init__(dense_layers(options.hidden, spec.classes, options.activation, options.dropout), spec, seed)


class RegressionPerceptron(Regressor):
    """Flattened inputs through the hidden layers of its options to one output, the prediction; see `Regressor`.

    Raises
    ------
    ConfigurationError
        The data has classes.
    """

    def __init__(self, options: MlpOptions, spec: DataSpec, seed: int) -> None:
        need_values(spec, options.kind)
        super().__init__(dense_layers(options.hidden, 1, options.activation, options.dropout), spec, seed)
