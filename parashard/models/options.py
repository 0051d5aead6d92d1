"""The `[model]` tables of a job file: for each kind of model its options.

Owns no arithmetic: that is each model's own file, imported when such a model is built, so that a process which only
reads the job loads none of them. Called by the job file's schema and the models.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, PositiveInt, Tag, field_validator

ActivationName = Literal["relu", "gelu", "tanh"]
DROPOUT_RATE_MAX = 0.99
PaddingName = Literal["same", "valid"]
_KIND = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_USER_TAG = "module:factory"  # shown in error messages that list the kinds


class SoftmaxOptions(BaseModel):
    """Options of softmax regression: none."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", strict=True)

    kind: Literal["softmax"] = Field("softmax", description="Softmax regression.")


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


class CnnOptions(BaseModel):
    """Options of a convolutional network."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", strict=True)

    kind: Literal["cnn"] = Field("cnn", description="Convolutional network.")
    channels: tuple[PositiveInt, ...] = Field(
        (16, 32),
        min_length=1,
        strict=False,  # a TOML array comes as a list
        description="Output channels of each convolution; each is followed by 2x2 max pooling.",
    )
    kernel: PositiveInt = Field(3, description="Height and width of the convolutions' windows, in pixels.")
    padding: PaddingName = Field("same", description="same: zeros around keep the image's size; valid: no padding.")
    hidden: tuple[PositiveInt, ...] = Field((128,), strict=False, description="Units of each dense hidden layer.")
    activation: ActivationName = Field("relu", description="Activation of convolutions and hidden layers.")
    dropout: float = Field(
        0.0, ge=0.0, le=DROPOUT_RATE_MAX, description="Probability of dropping a unit of a dense hidden layer."
    )


class LedgerOptions(BaseModel):
    """Options of the ledger: none."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", strict=True)
    for_tests: ClassVar[bool] = True  # errors do not offer it

    kind: Literal["ledger"] = Field("ledger", description="Oracle: counts every example of every epoch.")


class TornOptions(BaseModel):
    """Options of the torn test."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", strict=True)
    for_tests: ClassVar[bool] = True  # errors do not offer it

    kind: Literal["torn"] = Field("torn", description="Oracle: shows pushes that were mixed or applied in part.")
    rows: int = Field(
        1024,
        ge=1,
        description="Rows, of 64 bytes, of each of the eight variables. The partitioner must leave each in one piece.",
    )


class UserOptions(BaseModel):
    """A user's own model; keys other than `kind` are the factory's keyword arguments."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="allow", strict=True)

    kind: str = Field(
        description="module:factory, a Python module and a function in it. It is installed, beside the job "
        "file or in the working directory.",
    )

    @field_validator("kind")
    @classmethod
    def _names(cls, kind: str) -> str:
        if not _KIND.fullmatch(kind):
            raise ValueError("module:factory, such as line:build: a Python module, a colon and a function in it")
        return kind


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
