"""Multilayer perceptron: dense layers with an activation and dropout between them.

Owns its options. Knows no other model. Built by `parashard.models.build_model`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from parashard.data.base import DataSpec
from parashard.models.base import Model
from parashard.models.classifier import need_classes
from parashard.models.dense import DenseClassifier, DenseNetwork
from parashard.models.layers import DROPOUT_RATE_MAX, ActivationName
from parashard.models.regressor import Regressor, need_values


class MlpOptions(BaseModel):
    """Options of a multilayer perceptron."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", strict=True)

    kind: Literal["mlp"] = Field("mlp", description="Multilayer perceptron.")
    hidden: tuple[PositiveInt, ...] = Field(
        (256, 128),
        strict=False,  # a TOML array comes as a list
        description="Units of each hidden layer, from the input on.",
    )
    activation: ActivationName = Field("relu", description="Activation of the hidden layers.")
    dropout: float = Field(0.0, ge=0.0, le=DROPOUT_RATE_MAX, description="Probability of dropping a hidden unit.")
    loss: Literal["cross_entropy", "squared"] | None = Field(
        None,
        description='"cross_entropy" tells classes apart, "squared" predicts a number; unset: what the data\'s targets '
        "are.",
    )


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
