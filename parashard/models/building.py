"""Builds the model that a job's options describe: a built-in one, a test oracle, or a user's own.

Called by the coordinator (variables, audits) and the workers (gradients).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parashard.data.base import DataSpec
from parashard.errors import ConfigurationError
from parashard.models.base import Model, Seeded
from parashard.models.cnn import ConvolutionalNetwork
from parashard.models.dlrm import Dlrm
from parashard.models.fm import FactorizationMachine
from parashard.models.ledger import Ledger
from parashard.models.mlp import multilayer_perceptron
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
from parashard.models.row_ledger import RowLedger
from parashard.models.softmax import SoftmaxRegression
from parashard.models.torn import Torn
from parashard.models.user import load_user_model, user_code_sha256
from parashard.models.wide_deep import WideDeep
from parashard.plan.embedding import EmbeddingTable


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
        The job's; determines the random numbers of a step.
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
            return SoftmaxRegression(spec)
        case MlpOptions():
            return multilayer_perceptron(options, spec, seed)
        case CnnOptions():
            return ConvolutionalNetwork(options, spec, seed)
        case WideDeepOptions() | FmOptions() | DeepFmOptions() | DlrmOptions():
            return _click_model(options, spec, seed, tables)
        case LedgerOptions() | RowLedgerOptions() | TornOptions():
            return _oracle(options, spec)
        case ScriptModelOptions():
            raise ConfigurationError('model.kind is "script": run the script, which has the model')
        case UserOptions():
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
            return WideDeep(options, spec, seed, tables)
        case DlrmOptions():
            return Dlrm(options, spec, seed, tables)
        case _:
            return FactorizationMachine(options, spec, seed, tables)


def _oracle(options: LedgerOptions | RowLedgerOptions | TornOptions, spec: DataSpec) -> Model:
    match options:
        case LedgerOptions():
            return Ledger(spec)
        case RowLedgerOptions():
            return RowLedger(spec, options)
        case _:
            return Torn(options)


def code_sha256(options: ModelOptions, folder: Path | None) -> str:
    """Return SHA-256 (hex) of the code of a user's own model; "" for a built-in one."""
    return user_code_sha256(options, folder) if isinstance(options, UserOptions) else ""
