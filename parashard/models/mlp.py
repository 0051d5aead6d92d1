"""Multilayer perceptron: dense layers with an activation and dropout between them.

Owns its options. Knows no other model. Built by `parashard.models.build_model`.
"""

from __future__ import annotations

from parashard.data.base import DataSpec
from parashard.models.base import Model
from parashard.models.classifier import need_classes
from parashard.models.dense import DenseClassifier, DenseNetwork
from parashard.models.options import MlpOptions
from parashard.models.regressor import Regressor, need_values


def multilayer_perceptron(options: MlpOptions, spec: DataSpec, seed: int) -> Model:
    """Return the perceptron with the loss that the options name, or else the one that the data's targets call for."""
    if options.loss == "squared" or (options.loss is None and spec.classes == 0):
        return RegressionPerceptron(options, spec, seed)
    return MultilayerPerceptron(options, spec, seed)


class MultilayerPerceptron(DenseClassifier):
    """Flattened inputs through the hidden layers of its options to logits; variables as in `DenseNetwork`.

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
        super().__init__(spec, options.hidden, options.activation, options.dropout, seed)


class RegressionPerceptron(DenseNetwork, Regressor):
    """Flattened inputs through the hidden layers of its options to one output, the prediction; see `Regressor`.

    Raises
    ------
    ConfigurationError
        The data has classes.
    """

    def __init__(self, options: MlpOptions, spec: DataSpec, seed: int) -> None:
        need_values(spec, options.kind)
        DenseNetwork.__init__(self, spec, 1, options.hidden, options.activation, options.dropout, seed)
        Regressor.__init__(self, spec)
