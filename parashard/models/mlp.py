"""Multilayer perceptron: dense layers with an activation and dropout between them.

Owns its options. Knows no other model. Built by `parashard.models.build_model`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from parashard.data.base import DataSpec
from parashard.models.classifier import need_classes
from parashard.models.dense import DenseClassifier
from parashard.models.layers import DROPOUT_RATE_MAX, ActivationName


class MlpOptions(BaseModel):
    """Options of a multilayer perceptron."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["mlp"] = Field("mlp", description="Multilayer perceptron.")
    hidden: tuple[PositiveInt, ...] = Field(
        (256, 128),
        strict=False,  # a TOML array comes as a list
        description="Units of each hidden layer, from the input on.",
    )
    activation: ActivationName = Field("relu", description="Activation of the hidden layers.")
    dropout: float = Field(0.0, ge=0.0, le=DROPOUT_RATE_MAX, description="Probability of dropping a hidden unit.")


class MultilayerPerceptron(DenseClassifier):
    """Flattened inputs through the hidden layers of its options to logits; variables as in `DenseClassifier`.

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
        need_classes(spec, options.kind)
        super().__init__(spec, options.hidden, options.activation, options.dropout, seed)
