"""The `[model]` tables of a job file: for each kind of model its options."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag

from parashard.frozen_model import FrozenModel

ActivationName = Literal["relu", "gelu", "tanh"]
DROPOUT_RATE_MAX = 0.99
PaddingName = Literal["same", "valid"]
_KIND = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")

PositiveInt = Annotated[int, Field(gt=0)]


class SoftmaxOptions(FrozenModel):
    """Options of softmax regression: none."""

    kind: Literal["softmax"] = Field(default="softmax", description="Softmax regression.")


class MlpOptions(FrozenModel):
    """Options of a multilayer perceptron."""

    kind: Literal["mlp"] = Field(default="mlp", description="Multilayer perceptron.")
    hidden: tuple[PositiveInt, ...] = Field(
        default=(256, 128),
        description="Units of each hidden layer.",
    )
    activation: ActivationName = Field(default="relu", description="Activation of the hidden layers.")
    dropout: float = Field(
        default=0.0, ge=0.0, le=DROPOUT_RATE_MAX, description="Probability of dropping a hidden unit."
    )
    loss: Literal["cross_entropy", "squared"] | None = Field(
        default=None,
        description='"cross_entropy" for classes, "squared" for values; unset: by the data\'s targets.',
    )


class CnnOptions(FrozenModel):
    """Options of a convolutional network."""

    kind: Literal["cnn"] = Field(default="cnn", description="Convolutional network.")
    channels: tuple[PositiveInt, ...] = Field(
        default=(16, 32),
        min_length=1,
        description="Output channels of each convolution, each followed by 2x2 max pooling.",
    )
    kernel: PositiveInt = Field(default=3, description="Height and width of the convolutions, in pixels.")
    padding: PaddingName = Field(
        default="same", description='"same": zeros keep the image\'s size; "valid": no padding.'
    )
    hidden: tuple[PositiveInt, ...] = Field(default=(128,), description="Units of each dense hidden layer.")
    activation: ActivationName = Field(default="relu", description="Activation of convolutions and hidden layers.")
    dropout: float = Field(
        default=0.0, ge=0.0, le=DROPOUT_RATE_MAX, description="Probability of dropping a unit of a dense hidden layer."
    )


class _ClickOptions(FrozenModel):
    """Common options of two-class models over keys and numbers."""

    hidden: tuple[PositiveInt, ...] = Field(
        default=(64, 32), description="Units of each hidden layer of the deep part."
    )
    dropout: float = Field(
        default=0.0, ge=0.0, le=DROPOUT_RATE_MAX, description="Probability of dropping a hidden unit."
    )


class WideDeepOptions(_ClickOptions):
    """Options of a wide and deep model; it uses the tables `wide` (dimension 1) and `deep`."""

    kind: Literal["wide_deep"] = Field(
        default="wide_deep", description="Wide and deep: a weight for each key, and embeddings through dense layers."
    )


class DeepFmOptions(_ClickOptions):
    """Options of a factorization machine with a deep part; it uses the tables `wide` (dimension 1) and `deep`."""

    kind: Literal["deepfm"] = Field(
        default="deepfm", description="DeepFM: a weight for each key, products of embeddings, and dense layers."
    )


class FmOptions(FrozenModel):
    """Options of a factorization machine: none; it uses the tables `wide` (dimension 1) and `deep`."""

    kind: Literal["fm"] = Field(
        default="fm", description="Factorization machine: a weight for each key, and products of embeddings."
    )


class DlrmOptions(_ClickOptions):
    """Options of DLRM; it uses the table `deep`."""

    kind: Literal["dlrm"] = Field(
        default="dlrm", description="DLRM: products of embeddings and of what dense layers make of the numbers."
    )
    bottom: tuple[PositiveInt, ...] = Field(
        default=(64,),
        description="Units of each hidden layer between the numbers and a vector of the table's dimension.",
    )


class LedgerOptions(FrozenModel):
    """Options of the ledger: none."""

    for_tests: ClassVar[bool] = True  # errors do not offer it

    kind: Literal["ledger"] = Field(default="ledger", description="Oracle: counts every example of every epoch.")


class RowLedgerOptions(FrozenModel):
    """Options of the ledger of rows."""

    for_tests: ClassVar[bool] = True  # errors do not offer it

    kind: Literal["row_ledger"] = Field(
        default="row_ledger", description="Oracle: counts every use of every key in the rows of the table `ledger`."
    )
    shared: int = Field(default=7, ge=1, description="Keys that all examples share.")


class TornOptions(FrozenModel):
    """Options of the torn test."""

    for_tests: ClassVar[bool] = True  # errors do not offer it

    kind: Literal["torn"] = Field(
        default="torn", description="Oracle: shows pushes that were mixed or applied in part."
    )
    rows: int = Field(
        default=1024,
        ge=1,
        description="Rows, of 64 bytes, of each of the eight variables, which must stay in one piece.",
    )


def _names_a_factory(kind: str) -> str:
    if not _KIND.fullmatch(kind):
        raise ValueError("module:factory, such as line:build: a Python module, a colon and a function in it")
    return kind


class UserOptions(FrozenModel):
    """A user's own model; keys other than `kind` are the factory's keyword arguments."""

    model_config = ConfigDict(extra="allow")

    kind: Annotated[str, AfterValidator(_names_a_factory)] = Field(
        description="module:factory, a Python module and a function in it. It is installed, beside the job "
        "file or in the working directory.",
    )


class ScriptModelOptions(FrozenModel):
    """What a script gives to its trainer; only that script has it."""

    of_scripts: ClassVar[bool] = True  # errors do not offer it

    kind: Literal["script"] = Field(default="script", description="The model of a Python script's `Trainer`.")


_BuiltIn = Annotated[
    SoftmaxOptions
    | MlpOptions
    | CnnOptions
    | WideDeepOptions
    | FmOptions
    | DeepFmOptions
    | DlrmOptions
    | LedgerOptions
    | RowLedgerOptions
    | TornOptions
    | ScriptModelOptions,
    Field(discriminator="kind"),
]


def _whose(options: Any) -> str:
    kind = options.get("kind") if isinstance(options, dict) else getattr(options, "kind", None)
    return "user" if ":" in str(kind) else "built in"


ModelOptions = Annotated[
    Annotated[_BuiltIn, Tag("built in")] | Annotated[UserOptions, Tag("user")], Discriminator(_whose)
]
"""The `[model]` table of a job file; `kind` chooses the options' class."""
