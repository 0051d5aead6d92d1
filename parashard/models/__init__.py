"""Models: the built-in ones, the test oracles, and users' own.

Owns the choice: the one place that builds a model of a job's options, whose file is imported then. Called by the
coordinator (variables, audits) and the workers (gradients).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parashard.data.base import DataSpec
from parashard.errors import ConfigurationError
from parashard.models.base import Audited, Model, Seeded
from parashard.models.options import (
    CnnOptions,
    DeepFmOptions,
    DlrmOptions,
    FmOptions,
    LedgerOptions,
    MlpOptions,
    ModelOptions,
    RowLedgerOptions,
    ScriptModelOptions,
    SoftmaxOptions,
    TornOptions,
    UserOptions,
    WideDeepOptions,
)
from parashard.plan.embedding import EmbeddingTable

__all__ = [
    "Audited",
    "CnnOptions",
    "LedgerOptions",
    "MlpOptions",
    "Model",
    "ModelOptions",
    "RowLedgerOptions",
    "SoftmaxOptions",
    "TornOptions",
    "UserOptions",
    "build_model",
    "code_sha256",
]


def build_model(
    options: ModelOptions,
    spec: DataSpec,
    seed: int,
    folder: Path | None,
    tables: Sequence[EmbeddingTable] = (),
) -> Model:
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
    tables : sequence of EmbeddingTable
        The job's.

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
        case WideDeepOptions() | FmOptions() | DeepFmOptions() | DlrmOptions():
            return _click_model(options, spec, seed, tables)
        case LedgerOptions() | RowLedgerOptions() | TornOptions():
            return _oracle(options, spec)
        case ScriptModelOptions():
            raise ConfigurationError('model.kind is "script": run the script, which has the model')
        case UserOptions():
            from parashard.models.user import load_user_model

            model = load_user_model(options, spec, folder, tables)
            if isinstance(model, Seeded):
                model.seed(seed)
            return model


def _click_model(
    options: WideDeepOptions | FmOptions | DeepFmOptions | DlrmOptions,
    spec: DataSpec,
    seed: int,
    tables: Sequence[EmbeddingTable],
) -> Model:
    match options:
        case WideDeepOptions():
            from parashard.models.wide_deep import WideDeep

            return WideDeep(options, spec, seed, tables)
        case DlrmOptions():
            from parashard.models.dlrm import Dlrm

            return Dlrm(options, spec, seed, tables)
        case _:
            from parashard.models.fm import FactorizationMachine

            return FactorizationMachine(options, spec, seed, tables)


def _oracle(options: LedgerOptions | RowLedgerOptions | TornOptions, spec: DataSpec) -> Model:
    match options:
        case LedgerOptions():
            from parashard.models.ledger import Ledger

            return Ledger(spec)
        case RowLedgerOptions():
            from parashard.models.row_ledger import RowLedger

            return RowLedger(spec, options)
        case _:
            from parashard.models.torn import Torn

            return Torn(options)


def code_sha256(options: ModelOptions, folder: Path | None) -> str:
    """Return SHA-256 (hex) of the code of a user's own model; "" for a built-in one."""
    if not isinstance(options, UserOptions):
        return ""
    from parashard.models.user import user_code_sha256

    return user_code_sha256(options, folder)
