"""Models: the built-in ones, the test oracles, and users' own.

Owns the choice: the one place that builds a model of a job's options, whose file is imported then. Called by the
coordinator (variables, audits) and the workers (gradients).
"""

from __future__ import annotations

from pathlib import Path

from parashard.data.base import DataSpec
from parashard.errors import ConfigurationError
from parashard.models.base import Audited, Model, Seeded
from parashard.models.options import (
    CnnOptions,
    LedgerOptions,
    MlpOptions,
    ModelOptions,
    ScriptModelOptions,
    SoftmaxOptions,
    TornOptions,
    UserOptions,
)

__all__ = [
    "Audited",
    "CnnOptions",
    "LedgerOptions",
    "MlpOptions",
    "Model",
    "ModelOptions",
    "SoftmaxOptions",
    "TornOptions",
    "UserOptions",
    "build_model",
    "code_sha256",
]


def build_model(options: ModelOptions, spec: DataSpec, seed: int, folder: Path | None) -> Model:
    """Build the model that the options describe.

    Parameters
    ----------
    options : ModelOptions
    spec : DataSpec
        Of the job's data: sizes of the first and the last layer, and of the ledger.
    seed : int
        The job's; keys what is random in a step.
    folder : Path or None
        Where a user's own module is looked up first: the job file's folder.

    Raises
    ------
    ConfigurationError
        The model does not go with the data, or a user's model cannot be loaded.
    """
    match options:
        case SoftmaxOptions():
            from parashard.models.softmax import SoftmaxRegression

            return SoftmaxRegression(spec)
        case MlpOptions():
            from parashard.models.mlp import multilayer_perceptron

            return multilayer_perceptron(options, spec, seed)
        case CnnOptions():
            from parashard.models.cnn import ConvolutionalNetwork

            return ConvolutionalNetwork(options, spec, seed)
        case LedgerOptions():
            from parashard.models.ledger import Ledger

            return Ledger(spec)
        case TornOptions():
            from parashard.models.torn import Torn

            return Torn(options)
        case ScriptModelOptions():
            raise ConfigurationError('model.kind is "script": run the script, which has the model')
        case UserOptions():
            from parashard.models.user import load_user_model

            model = load_user_model(options, spec, folder)
            if isinstance(model, Seeded):
                model.seed(seed)
            return model


def code_sha256(options: ModelOptions, folder: Path | None) -> str:
    """Return SHA-256 (hex) of the code of a user's own model; "" for a built-in one."""
    if not isinstance(options, UserOptions):
        return ""
    from parashard.models.user import user_code_sha256

    return user_code_sha256(options, folder)
