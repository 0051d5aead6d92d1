"""Models: the built-in ones, the oracles, and users' own.

Owns the choice: the options of every kind as one type, and the one place that builds a model of them. Called by the job
file's schema (options), the coordinator (variables, audits) and the workers (gradients).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, Tag

from parashard.data.base import DataSpec
from parashard.models.base import Audited, Model
from parashard.models.cnn import CnnOptions, ConvolutionalNetwork
from parashard.models.ledger import Ledger, LedgerOptions
from parashard.models.mlp import MlpOptions, multilayer_perceptron
from parashard.models.softmax import SoftmaxOptions, SoftmaxRegression
from parashard.models.torn import Torn, TornOptions
from parashard.models.user import UserOptions, load_user_model, user_code_sha256

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

_USER_TAG = "module:factory"  # shown in error messages that list the kinds


def model_kind(options: Any) -> str:
    """Return the discriminator of the options: the name of a built-in kind, or "module:factory" for a user's model."""
    kind = options.get("kind", "") if isinstance(options, dict) else getattr(options, "kind", "")
    return _USER_TAG if ":" in str(kind) else str(kind)


ModelOptions = Annotated[
    Annotated[SoftmaxOptions, Tag("softmax")]
    | Annotated[MlpOptions, Tag("mlp")]
    | Annotated[CnnOptions, Tag("cnn")]
    | Annotated[LedgerOptions, Tag("ledger")]
    | Annotated[TornOptions, Tag("torn")]
    | Annotated[UserOptions, Tag(_USER_TAG)],
    Discriminator(model_kind),
]
"""The `[model]` table of a job file; `kind` chooses the options' class."""


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
            return SoftmaxRegression(spec)
        case MlpOptions():
            return multilayer_perceptron(options, spec, seed)
        case CnnOptions():
            return ConvolutionalNetwork(options, spec, seed)
        case LedgerOptions():
            return Ledger(spec)
        case TornOptions():
            return Torn(options)
        case UserOptions():
            return load_user_model(options, spec, folder)


def code_sha256(options: ModelOptions, folder: Path | None) -> str:
    """Return SHA-256 (hex) of the code of a user's own model; "" for a built-in one."""
    return user_code_sha256(options, folder) if isinstance(options, UserOptions) else ""
