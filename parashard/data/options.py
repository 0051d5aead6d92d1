"""The `[data]` tables of a job file: the options of each source, with their limits and meanings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import AfterValidator, Field, model_validator

from parashard.data.base import MAX_CLASSES, Indices
from parashard.data.columns import MISSING, MissingTexts, missing_texts_of
from parashard.frozen_model import FrozenModel
from parashard.plan.seeding import MAX_LENGTH, Permutation

_NO_EPOCH = -1  # not an epoch of any job, so that a split is unrelated to every training order
_MAX_CENTRE_ELEMENTS = 1 << 24  # 128 MiB of float64
_MAX_KEY = 1 << 62

TargetKind = Literal["class", "value"]
UnknownTexts = Literal["key", "refused"]

TARGET_MEANING = (
    '"class": labels are classes; "value": numbers to predict. Unset: inferred if that is safe, else refused.'
)


class SplitOptions(FrozenModel):
    """How many examples are held out, and which."""

    held_out: float = Field(
        default=0.2,
        ge=0.0,
        lt=1.0,
        description="Fraction of the examples to hold out; unused if the data has its own split.",
    )
    split_seed: int = Field(
        default=0, ge=0, description="Chooses the held-out examples; independent of the job's seed."
    )

    def rows(self, examples: int) -> tuple[Indices, Indices]:
        """Return the (training, held-out) rows of `examples` >= 1 rows, ascending; at least one is for training."""
        shuffled = Permutation(examples, self.split_seed, _NO_EPOCH)(np.arange(examples, dtype=np.int64))
        count = self.held_out_rows(examples)
        return np.sort(shuffled[count:]), np.sort(shuffled[:count])

    def held_out_rows(self, examples: int) -> int:
        """Return how many of `examples` >= 1 rows are held out."""
        return min(int(self.held_out * examples), examples - 1)


_INDEX = re.compile(r"|Unnamed: \d+|__index_level_\d+__")


def is_index(name: str) -> bool:
    """Tell whether a column has the name that pandas gives to an unnamed index."""
    return _INDEX.fullmatch(name) is not None


class TableOptions(SplitOptions):
    """What the tabular sources share; inputs of shape (encoded columns,), targets from the label column."""

    path: Path = Field(description="The training table.")
    label: str = Field(description="Name of the column to predict.")
    target: TargetKind | None = Field(default=None, description=TARGET_MEANING)
    held_out_path: Path | None = Field(
        default=None,
        description="A held-out table with the same columns; unset: a fraction of `path`.",
    )
    categorical: tuple[str, ...] = Field(
        default=(), description="Numeric columns to one-hot encode, as text columns always are."
    )
    key_columns: tuple[str, ...] = Field(
        default=(),
        description='Columns that become keys of embedding tables instead of inputs. ["*"]: all columns of text or '
        "lists, and those of `categorical`.",
    )
    list_columns: tuple[str, ...] = Field(
        default=(),
        description="Key columns with several values in a cell: text with `value_delimiter` between them, or a list "
        "of Parquet.",
    )
    value_delimiter: str = Field(
        default="|",
        min_length=1,
        description="Separates the values of a cell of `list_columns`; spaces around a value do not count.",
    )
    vocabularies: dict[str, Path] = Field(
        default_factory=dict,
        description="Key columns with known texts, each with a file of one text a line. A text's key is its line, "
        "behind the keys of earlier columns.",
    )
    unknown_texts: UnknownTexts = Field(
        default="key",
        description='A text that its vocabulary lacks: "key", all share one key; "refused", an error that names the '
        "cell.",
    )
    ignore: tuple[str, ...] = Field(
        default=(),
        description='Columns that are no inputs, such as ids. An unnamed pandas index ("", "Unnamed: 0", '
        '"__index_level_0__") is none unless another key names it.',
    )
    missing: str | tuple[str, ...] = Field(
        default="",
        description='Texts of missing values besides an empty cell, NA, N/A, NaN and null, such as "?" or ["?", "-"].',
    )
    not_missing: tuple[str, ...] = Field(
        default=(),
        description='Which of NA, N/A, NaN and null, as written here, are names in text columns, such as ["NA"] for '
        "Namibia.",
    )

    @property
    def marks(self) -> MissingTexts:
        """The texts of missing values."""
        return missing_texts_of(self.missing, self.not_missing)

    def leaves_out(self, name: str) -> bool:
        """Tell whether a column is not used: it is in `ignore`, or an unnamed pandas index that no other key names."""
        named = (self.label, *self.categorical, *self.key_columns, *self.list_columns, *self.vocabularies)
        return name in self.ignore or (is_index(name) and name not in named)

    @model_validator(mode="after")
    def _check_marks(self) -> Self:
        """Refuse `unknown_texts` without vocabularies, and `not_missing` texts that do not mean a missing value."""
        if self.unknown_texts != "key" and not self.vocabularies:
            raise ValueError("unknown_texts is of columns in vocabularies, and no column is")
        strange = [text for text in self.not_missing if text.strip().lower() not in MISSING[1:]]
        if strange:
            raise ValueError(f"not_missing has texts that mean a missing value (NA, N/A, NaN, null), found {strange}")
        return self


def _separator(separator: str) -> str:
    if not separator or any(sign in separator for sign in '"\r\n'):
        raise ValueError(f"must be one character or more, and no quote or line end, found {separator!r}")
    return separator


def _encoding(encoding: str) -> str:
    try:
        "a".encode(encoding)
    except (LookupError, ValueError, TypeError):
        raise ValueError(f'must be an encoding of text, such as "utf-8" or "latin-1", found {encoding!r}') from None
    return encoding


def _distinct(columns: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(columns)) < len(columns):
        raise ValueError(f"names must differ, found {columns}")
    return columns


class ClicksOptions(FrozenModel):
    """A click log, in which ids come and go; inputs "numbers", shape (numbers,), and "keys", shape (columns,)."""

    source: Literal["clicks"] = Field(default="clicks", description="A click log, generated when needed.")
    examples: int = Field(default=100_000, ge=1, le=MAX_LENGTH, description="Number of training examples.")
    held_out: int = Field(
        default=0, ge=0, le=MAX_LENGTH, description="Number of held-out examples, after those of training."
    )
    numbers: int = Field(default=13, ge=0, le=1024, description="Numbers of an example.")
    columns: int = Field(default=26, ge=1, le=1024, description="Keys of an example, one a column.")
    vocabulary: int = Field(default=100_000, ge=1, le=1 << 31, description="Ids that a column has at one time.")
    zipf: float = Field(
        default=1.2,
        ge=0.0,
        le=4.0,
        description="Frequency of the id of rank r: about r ** -zipf; 0: all alike.",
    )
    drift: float = Field(
        default=0.0,
        ge=0.0,
        le=1000.0,
        description="Ids replaced over the training examples, as a multiple of `vocabulary`.",
    )
    seed: int = Field(default=0, ge=0, description="Draws the examples; independent of the job's seed.")

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        """Refuse keys of more than 62 bits."""
        moved = self.drift * self.vocabulary * (1 + self.held_out / self.examples)
        if (self.vocabulary + moved) * self.columns > _MAX_KEY:
            raise ValueError(
                "drift * vocabulary * (examples + held_out) / examples * columns must be at most 2^62, found "
                f"{self.drift:g} * {self.vocabulary} * {self.examples + self.held_out} / {self.examples} * "
                f"{self.columns}"
            )
        return self


class CriteoOptions(SplitOptions):
    """Criteo's click log, a label, 13 numbers and 26 texts a row; inputs "numbers", shape (13,), and "keys", (26,)."""

    source: Literal["criteo"] = Field(
        default="criteo", description="The files of Criteo's Display Advertising Challenge; needs pyarrow."
    )
    path: Path = Field(description="The log: rows of 40 fields with tabs between them, gzipped or not.")
    held_out_path: Path | None = Field(
        default=None,
        description="A held-out log with labels; unset: a fraction of `path`.",
    )
    split: Literal["last", "random"] = Field(
        default="last", description="Which rows to hold out: the log's last ones, or rows by `split_seed`."
    )


class CsvOptions(TableOptions):
    """One text table, or one for training and one held out."""

    source: Literal["csv"] = Field(default="csv", description="Separated text, compressed with gzip or not.")
    columns: Annotated[tuple[str, ...], Field(min_length=2), AfterValidator(_distinct)] | None = Field(
        default=None, description="Column names of files without a header row."
    )
    file: str = Field(
        default="", description="The training table's name in the folder `path`; empty: `path` is the table."
    )
    held_out_file: str = Field(default="", description="The held-out table's name in that folder.")
    separator: Annotated[str, AfterValidator(_separator)] = Field(
        default=",",
        description='One character, and spaces if they follow it in the files; or several, such as "::", without '
        "quoted cells.",
    )
    quote: Annotated[str, Field(max_length=1)] = Field(
        default='"',
        description='Begins and ends a cell with separators or line ends in it, and is doubled inside; "": no '
        "quoted cells.",
    )
    encoding: Annotated[str, AfterValidator(_encoding)] = Field(
        default="utf-8", description='Encoding of the files, such as "latin-1"; a byte order mark of UTF-8 is skipped.'
    )
    comment: str = Field(
        default="",
        description="Lines that begin with this are skipped, but not in a quoted cell; empty: none.",
    )
    strip_label: str = Field(
        default="", description='Removed from the end of a label, such as the "." of UCI Adult\'s test file.'
    )

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        """Refuse a held-out table that is named twice or in no folder, and an ambiguous quote."""
        if self.held_out_file and (self.held_out_path is not None or not self.file):
            raise ValueError("held_out_file is in the folder of file, in place of held_out_path")
        if self.quote in ("\r", "\n", " ", self.separator[0]) and not self.has_long_separator:
            raise ValueError(f"quote must not be the separator, a space or a line end, found {self.quote!r}")
        return self

    @property
    def has_long_separator(self) -> bool:
        """Whether the separator is more than one character and spaces."""
        return bool(self.separator[1:].strip(" "))

    @property
    def table(self) -> Path:
        """The training table."""
        return self.path / self.file if self.file else self.path

    @property
    def held_out_table(self) -> Path | None:
        """The held-out table, where there is one."""
        return self.path / self.held_out_file if self.held_out_file else self.held_out_path


class DigitsOptions(SplitOptions):
    """The bundled digits; inputs of shape (64,) in [0, 1], 10 classes."""

    source: Literal["digits"] = Field(default="digits", description="scikit-learn's bundled handwritten digits.")


class IdxOptions(FrozenModel):
    """A folder with the four files of MNIST; inputs of shape (rows, columns) in [0, 1]."""

    source: Literal["idx"] = Field(default="idx", description="MNIST's own file format.")
    path: Path = Field(
        description="Folder with train-images-idx3-ubyte, train-labels-idx1-ubyte and the same of t10k, with or "
        "without .gz."
    )


class NpzOptions(SplitOptions):
    """One .npz archive; inputs as they are, integer and boolean targets as class labels, float targets as values."""

    source: Literal["npz"] = Field(default="npz", description="NumPy's .npz archive.")
    path: Path = Field(description="The archive.")
    inputs: str = Field(default="inputs", description="Array of inputs, one example a row.")
    targets: str = Field(default="targets", description="Array of targets: integers or floats, one axis.")
    held_out_inputs: str = Field(
        default="held_out_inputs", description="Array of held-out inputs; without it a fraction is held out."
    )
    held_out_targets: str = Field(default="held_out_targets", description="Array of held-out targets.")
    target: TargetKind | None = Field(default=None, description=TARGET_MEANING)


class ParquetOptions(TableOptions):
    """One Parquet file, or one for training and one held out."""

    source: Literal["parquet"] = Field(default="parquet", description="Apache Parquet; needs pyarrow.")


class SyntheticOptions(FrozenModel):
    """Gaussian clusters; inputs of shape (features,)."""

    source: Literal["synthetic"] = Field(default="synthetic", description="Gaussian clusters, generated when needed.")
    examples: int = Field(default=10_000, ge=1, le=MAX_LENGTH, description="Number of training examples.")
    held_out: int = Field(default=0, ge=0, le=MAX_LENGTH, description="Number of held-out examples.")
    features: int = Field(default=16, ge=1, le=1 << 20, description="Length of an input.")
    classes: int = Field(default=2, ge=2, le=MAX_CLASSES, description="Number of clusters, one a class.")
    noise: float = Field(
        default=1.0,
        ge=0.0,
        description="Standard deviation of an input around its cluster's centre; that of centres is 1.",
    )
    seed: int = Field(default=0, ge=0, description="Draws the examples; independent of the job's seed.")

    @model_validator(mode="after")
    def _check_centres(self) -> Self:
        """Refuse centres that need too much memory."""
        if self.classes * self.features > _MAX_CENTRE_ELEMENTS:
            raise ValueError(
                f"classes * features must be at most {_MAX_CENTRE_ELEMENTS}, found {self.classes} * {self.features}"
            )
        return self


class ScriptDataOptions(FrozenModel):
    """What a script gives to its trainer; only that script has it."""

    of_scripts: ClassVar[bool] = True  # errors do not offer it

    source: Literal["script"] = Field(default="script", description="What a Python script gives to `Trainer.fit`.")


DataOptions = Annotated[
    ClicksOptions
    | CriteoOptions
    | CsvOptions
    | DigitsOptions
    | IdxOptions
    | NpzOptions
    | ParquetOptions
    | SyntheticOptions
    | ScriptDataOptions,
    Field(discriminator="source"),
]
"""The `[data]` table of a job file; its key `source` says which."""
