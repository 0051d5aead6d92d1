"""Predict rows or arrays by the model and the final weights of a run that is done."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from parashard.data import open_source
from parashard.data.arrays import AnyArray, check_digits
from parashard.data.base import Batch, DataSpec
from parashard.data.columns import Column, ColumnTable, Lists, Numbers
from parashard.data.options import CsvOptions
from parashard.data.preprocessing import ClassTarget, Preprocessing, read_preprocessing
from parashard.data.table_files import is_parquet, read_csv, read_parquet
from parashard.data.tabular import prediction_warnings
from parashard.data.tree import Tree, map_leaves, rows_of
from parashard.errors import BadData, ConfigurationError
from parashard.job.embeddings import tables_of
from parashard.job.load import LoadedJob
from parashard.job.model_options import ScriptModelOptions
from parashard.launch.run_folders import resumed_job
from parashard.launch.stored_rows import with_rows
from parashard.models.base import FrameworkModel, Model
from parashard.models.building import build_model
from parashard.plan.variables import Float32s, as_imported
from parashard.process.run_files import PREPROCESSING_FILE, WEIGHTS_FILE
from parashard.store.arrays import read_arrays

EXAMPLES_AT_ONCE = 1000

Predict = Callable[[dict[str, Float32s], Any], AnyArray]


class Predictions(NamedTuple):
    """A model's predictions for examples."""

    outputs: AnyArray  # the model's own, (examples, ...): logits of classes, or values in the targets' unit
    rows: list[list[str]]  # a header, and a row for each example
    notes: Sequence[str] = ()  # for the user: the file's cells that are missing or unknown to the model


def predict_file(run_dir: Path, file: Path) -> Predictions:
    """Return a run's predictions for a file: a table with the run's columns, or a .npy file if it trained on arrays."""
    # Raises ConfigurationError if the run has no weights yet, or a model that cannot predict here; BadData if the file
    # does not match the run's data.
    weights = run_dir / WEIGHTS_FILE
    if not weights.is_file():
        raise ConfigurationError(f"{run_dir}: has no {WEIGHTS_FILE}, which the end of a run writes")
    loaded = resumed_job(run_dir, [])
    if isinstance(loaded.job.model, ScriptModelOptions):
        raise ConfigurationError(
            f"{run_dir}: its model is in the script {loaded.path}, where trainer.predict(inputs) has its weights"
        )
    spec = _spec(run_dir, loaded)
    model, predict = _predict(loaded, spec)
    inputs, notes = _inputs(file, spec, loaded)
    if not isinstance(inputs, dict) and inputs.shape[1:] != spec.input_shape:
        raise BadData(f"{file}: an example has shape {inputs.shape[1:]}; the model's inputs have {spec.input_shape}")
    values = as_imported(read_arrays(weights))
    if loaded.job.tables:
        values, examples = with_rows(run_dir, loaded.job, model, values, _batches(inputs))
        predict = _with_keys(model) if isinstance(model, FrameworkModel) else predict
    else:
        examples = [batch.inputs for batch in _batches(inputs)]
    parts = [predict(values, some) for some in examples]
    outputs = np.concatenate(parts)
    return Predictions(outputs, _rows(outputs, spec), notes)


def _with_keys(model: FrameworkModel) -> Predict:
    """Return a framework model's `predict` for batches, which finds rows by their keys, not by places."""
    given: Callable[..., AnyArray] = model.predict
    return lambda values, batch: given(values, batch.inputs, batch.keys)


def _batches(inputs: Tree) -> Iterator[Batch]:
    examples = rows_of(inputs)
    for start in range(0, examples, EXAMPLES_AT_ONCE):
        some = slice(start, min(start + EXAMPLES_AT_ONCE, examples))
        taken = map_leaves(lambda array, rows=some: array[rows], inputs)
        yield Batch(-1, -1, np.arange(some.start, some.stop), taken, None)


def _spec(run_dir: Path, loaded: LoadedJob) -> DataSpec:
    """Return the data's spec: from the file beside the weights, or from data that the job alone defines."""
    file = run_dir / PREPROCESSING_FILE
    if not file.is_file():
        return open_source(loaded.job.data).spec
    fitted = read_preprocessing(file)
    classes = len(fitted.target.classes) if isinstance(fitted.target, ClassTarget) else 0
    return DataSpec(0, 0, fitted.input_shape, classes, "", fitted, fields=fitted.fields())


def _predict(loaded: LoadedJob, spec: DataSpec) -> tuple[Model, Predict]:
    job = loaded.job
    model = build_model(job.model, spec, job.job.seed, loaded.path.parent, tables_of(job))
    predict = getattr(model, "predict", None)
    if not callable(predict):
        raise ConfigurationError(
            f"model kind {job.model.kind!r}: it has no method predict(variables, inputs), which returns outputs; "
            "softmax, mlp, cnn and a factory that returns a ps.Sequential have one"
        )
    return model, predict


def _inputs(file: Path, spec: DataSpec, loaded: LoadedJob) -> tuple[Tree, Sequence[str]]:
    fitted = spec.preprocessing
    if fitted is not None and fitted.columns is not None:
        if file.suffix == ".npy":
            raise BadData(f"{file}: the run was trained on a table; due is a CSV or Parquet file with its columns")
        return _of_table(file, fitted, loaded)
    if file.suffix != ".npy":
        raise BadData(
            f"{file}: the run was trained on arrays; due is a .npy file, shape (examples, *{spec.input_shape})"
        )
    try:
        array = np.load(file, allow_pickle=False)
    except OSError as error:
        raise BadData(f"{file}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise BadData(f"{file}: is no array: {error}") from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf" or not array.ndim or not len(array):
        raise BadData(f"{file}: is no array of numbers with an axis of examples")
    check_digits(array, str(file), "due are numbers as in training")
    return (array / (fitted.divide_by if fitted is not None else 1.0)).astype(np.float32), ()


def _of_table(file: Path, fitted: Preprocessing, loaded: LoadedJob) -> tuple[Tree, Sequence[str]]:
    table = _table(file, fitted, loaded)
    values = {name: _values(column) for name, column in table.columns.items()}
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    try:
        columns = fitted.table(rows)
        inputs = fitted.encoded(columns, len(rows))
    except BadData as error:
        raise BadData(f"{file}: {error.message}") from None
    return inputs, (*table.warnings, *prediction_warnings(fitted.columns or (), columns))


def _table(file: Path, fitted: Preprocessing, loaded: LoadedJob) -> ColumnTable:
    """Read a Parquet table, or a text table with the options of the run's own."""
    columns = fitted.columns or ()
    if is_parquet(file):
        names = {column.name for column in columns}
        texts = {column.name for column in columns if column.kind not in ("number", "log_number")}
        return read_parquet(file, names.__contains__, texts)
    data = loaded.job.data
    if not isinstance(data, CsvOptions):  # trained on Parquet
        data = CsvOptions(path=file, label="")
    return read_csv(file, data.replaced(strip_label=""))


def _values(column: Column) -> list[Any]:
    """Return a column's cells, None where one is missing."""
    if isinstance(column, Lists):
        texts = [column.vocabulary[code] for code in column.codes]
        return [texts[start:stop] for start, stop in pairwise(column.offsets.tolist())]
    if isinstance(column, Numbers):
        return [
            None if math.isnan(value) else bool(value) if column.boolean else value for value in column.values.tolist()
        ]
    return [None if code < 0 else column.vocabulary[code] for code in column.codes]


def _rows(outputs: AnyArray, spec: DataSpec) -> list[list[str]]:
    """Return the predictions as text: a class with its probability, or numbers."""
    if spec.classes and outputs.ndim == 2 and outputs.shape[1] == spec.classes:
        target = spec.preprocessing.target if spec.preprocessing is not None else None
        names = target.classes if isinstance(target, ClassTarget) else tuple(map(str, range(spec.classes)))
        shares = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        best = outputs.argmax(axis=1)
        found = [[names[at], f"{share[at]:.4f}"] for at, share in zip(best, shares, strict=True)]
        return [["prediction", "probability"], *found]
    flat = outputs.reshape(len(outputs), -1)
    header = ["prediction"] if flat.shape[1] == 1 else [f"output_{place}" for place in range(flat.shape[1])]
    return [header, *([f"{value:.7g}" for value in row] for row in flat)]


def write_predictions(predictions: Predictions, output: Path) -> None:
    """Write the outputs as a .npy file, or the predictions as a CSV file."""
    try:
        if output.suffix == ".npy":
            np.save(output, predictions.outputs, allow_pickle=False)
            return
        with output.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(predictions.rows)
    except OSError as error:
        raise ConfigurationError(f"{output}: cannot be written: {error.strerror}") from None


def print_predictions(predictions: Predictions, stream: TextIO | None) -> None:
    """Write the predictions to standard output as CSV: all of them, or ConfigurationError."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(predictions.rows)
    if stream is None:
        raise ConfigurationError("standard output is closed; --output FILE has the predictions")
    try:
        text.getvalue().encode(stream.encoding or "utf-8")
        stream.write(text.getvalue())
        stream.flush()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"standard output is in {stream.encoding}, which lacks {error.object[error.start]!a}; --output FILE writes "
            "UTF-8, and so does PYTHONIOENCODING=utf-8"
        ) from None
    except OSError as error:
        raise ConfigurationError(
            f"standard output cannot be written: {error.strerror}; some predictions are missing"
        ) from None
