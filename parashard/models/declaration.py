"""DeclaredJob: the description of a job's data and model that a coordinator needs.

The process that has the data and the model declares them; the coordinator opens neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pydantic

from parashard.checkpoints.encoding import Record, decode, encode
from parashard.checkpoints.manifest import Count, Name, Sha256, StoredVariable
from parashard.data import open_source
from parashard.data.base import Batch, CellCounts, DataSpec, Field, HashedTexts, examples_of
from parashard.data.preprocessing import Preprocessing
from parashard.errors import BadData, ConfigurationError, DamagedCheckpoint, StoreFailed
from parashard.frozen_model import FrozenModel
from parashard.job.embeddings import tables_of
from parashard.job.schema import Job
from parashard.models.base import Audited, Model
from parashard.models.building import build_model, code_sha256
from parashard.models.looking_up import check_looks_up, unused_tables
from parashard.models.user_errors import named_with_line
from parashard.plan.embedding import KeyedRows, rows_sha256
from parashard.plan.variables import Float32s, Slots, Variable, flat_slots, in_name_order, slots_sha256, values_sha256
from parashard.process.durable import replace_durably, write_durably
from parashard.store.arrays import read_arrays, write_arrays

RECORD_FILE = "declaration.json"
VALUES_FILE = "declaration.safetensors"
ROWS_FILE = "declaration_rows.safetensors"
SLOTS_FILE = "declaration_slots.safetensors"
_SLOT = "slot:"
_TRIED = 8  # examples that are checked for unused tables


@dataclass(frozen=True)
class DeclaredJob:
    """The properties of a job's data and model that placement, leases and hashes depend on."""

    spec: DataSpec  # number of examples, shapes, fingerprint; with held-out examples there are evaluations
    variables: Mapping[str, Variable]  # by name, as the model declares them, before the job's settings apply
    # Initial values of the variables that are not drawn from the job's seed.
    arrays: Mapping[str, Float32s] = field(default_factory=dict)
    model_sha256: str = ""  # of the code of a model that is not built in; "": it is, or has no hash
    # The model, if it can audit final weights and is in this process; not in the files.
    auditor: Audited | None = None
    # By table: initial rows, such as those of an earlier run.
    rows: Mapping[str, KeyedRows] = field(default_factory=dict)
    # Initial optimizer state, by slot and variable; missing entries begin fresh.
    slots: Slots = field(default_factory=dict)


def declare(spec: DataSpec, model: Model | Mapping[str, Any], model_sha256: str = "") -> DeclaredJob:
    """Declare data and a model, or the variables of a program that computes its own steps."""
    declared: dict[str, Variable] = {}
    arrays: dict[str, Float32s] = {}
    for name, value in (model if isinstance(model, Mapping) else _initial_variables(model)).items():
        variable, array = parts_of(name, value)
        declared[name] = variable
        if array is not None:
            arrays[name] = array
    if not declared:
        raise ConfigurationError("the model has no variables")
    return DeclaredJob(spec, declared, arrays, model_sha256, model if isinstance(model, Audited) else None)


def parts_of(name: str, value: Any) -> tuple[Variable, Float32s | None]:
    """Split a model's initial value of one name into the variable and its values; None: they are drawn."""
    variable = None
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Variable):
        variable, value = value
    elif isinstance(value, Variable):
        variable, value = value, None
    if variable is not None and variable.name != name:
        raise ConfigurationError(f"the model declares variable {variable.name!r} under the name {name!r}")
    if variable is not None and value is None:
        return variable, None
    try:
        given = np.asarray(value)
        if given.dtype.kind not in "biuf" and given.dtype.name != "bfloat16":
            raise ConfigurationError(f"the model's initial value of {name!r} is {given.dtype}; due are real numbers")
        array = np.array(given, np.float32, order="C")
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"the model's initial value of {name!r} is not an array: {error}") from None
    if given.dtype.kind in "iu" and (array.astype(np.float64) != given).any():
        raise ConfigurationError(
            f"the model's initial value of {name!r} has whole numbers that float32 lacks; variables are float32, which "
            "has all up to 16,777,216"
        )
    if not np.isfinite(array).all():
        raise ConfigurationError(f"the model's initial values of {name!r} are not all finite")
    if variable is not None and array.shape != variable.shape:
        raise ConfigurationError(
            f"the model's initial value of {name!r} has shape {array.shape}; the variable has {variable.shape}"
        )
    return variable or Variable(name, array.shape), array


def declare_named(job: Job, model_folder: Path | None) -> DeclaredJob:
    """Open the data and build the model that a job file names, and declare them."""
    # A user's own model is looked up in `model_folder`. The model must look rows up if and only if the job has tables.
    source = open_source(job.data)
    tables = {table.name: table for table in tables_of(job)}
    model = build_model(job.model, source.spec, job.job.seed, model_folder, tuple(tables.values()))
    check_looks_up(model, tables)
    spec = source.spec
    if tables:
        indices = np.arange(min(_TRIED, spec.examples))
        unused = unused_tables(model, Batch(0, 0, indices, *examples_of(source, 0, indices)), tables)
        spec = replace(spec, warnings=(*spec.warnings, *unused))
    return declare(spec, model, code_sha256(job.model, model_folder))


def _initial_variables(model: Model) -> Mapping[str, Any]:
    """Return a model's initial variables; any error of a user's model becomes a ConfigurationError."""
    try:
        initial = model.initial_variables()
    except ConfigurationError:
        raise
    except BaseException as error:  # SystemExit too: the coordinator would end as if it were done
        raise ConfigurationError(f"the model's initial_variables() raised {named_with_line(error)}") from error
    if not isinstance(initial, Mapping):
        raise ConfigurationError(
            f"the model's initial_variables() returned {type(initial).__name__}; a model returns a mapping of names to "
            "variables or arrays"
        )
    return initial


# --- files ---


class _Variable(StoredVariable):
    encoding: Name


class _Field(FrozenModel):
    name: Name
    shape: tuple[Count, ...]
    dtype: Name


_OF_SPEC = tuple(one.name for one in fields(DataSpec) if one.name != "fields")
"""Fields of a `DataSpec` that a record has unchanged."""


class _Declaration(Record):
    """`values_sha256`, `rows_sha256` and `slots_sha256` are hashes by `parashard.plan` of the other files, if any."""

    kind = "declaration"

    examples: Annotated[int, pydantic.Field(ge=1, lt=2**63)]
    held_out: Count
    input_shape: tuple[Count, ...]
    classes: Count
    fingerprint: Name
    preprocessing: Preprocessing | None
    warnings: tuple[str, ...]
    fields: tuple[_Field, ...] = ()
    batched: bool = False
    hashed: HashedTexts | None = None
    cells: dict[str, CellCounts] = pydantic.Field(default_factory=dict)
    variables: Annotated[tuple[_Variable, ...], pydantic.Field(min_length=1)]
    values_sha256: Sha256 | None
    rows_sha256: Sha256 | None = None
    slots_sha256: Sha256 | None = None
    model_sha256: str


def write_declaration(folder: Path, declared: DeclaredJob) -> None:
    """Write a declaration's files; the record is written last, and makes it valid."""
    spec, arrays = declared.spec, dict(declared.arrays)
    record = _Declaration(
        **{
            **{name: getattr(spec, name) for name in _OF_SPEC},
            "input_shape": tuple(int(n) for n in spec.input_shape),  # a program's own data may have a list
            "cells": dict(spec.cells),
        },
        fields=tuple(_Field(name=name, shape=shape, dtype=dtype) for name, shape, dtype in spec.fields),
        variables=tuple(
            _Variable.of(variable, encoding=variable.encoding) for variable in in_name_order(declared.variables)
        ),
        values_sha256=values_sha256(arrays) if arrays else None,
        rows_sha256=rows_sha256(declared.rows) if declared.rows else None,
        slots_sha256=slots_sha256(declared.slots) if declared.slots else None,
        model_sha256=declared.model_sha256,
    )
    content = encode(record)
    try:
        if arrays:
            replace_durably(folder / VALUES_FILE, lambda temporary: write_arrays(temporary, arrays))
        if declared.rows:
            parts = {
                f"{name}/{part}": np.ascontiguousarray(array)
                for name, rows in declared.rows.items()
                for part, array in _parts_of_rows(rows).items()
            }
            replace_durably(folder / ROWS_FILE, lambda temporary: write_arrays(temporary, parts))
        if declared.slots:
            replace_durably(folder / SLOTS_FILE, lambda temporary: write_arrays(temporary, flat_slots(declared.slots)))
        write_durably(folder / RECORD_FILE, content)
    except OSError as error:
        raise StoreFailed(f"{folder}: cannot write what the job begins with: {error.strerror or error}") from error


def read_declaration(folder: Path, *, rows: bool = True) -> DeclaredJob:
    """Read a declaration, with `rows` also rows and slots; BadData: damaged, or files of different starts."""
    path, values = folder / RECORD_FILE, folder / VALUES_FILE
    try:
        record = decode(_Declaration, path.read_bytes(), str(path))
        variables = {variable.name: variable.to_variable(encoding=variable.encoding) for variable in record.variables}
    except OSError as error:
        raise BadData(f"{path}: cannot be read: {error.strerror}") from None
    except DamagedCheckpoint as error:
        raise BadData(error.message) from None
    except ConfigurationError as error:
        raise BadData(f"{path}: {error.message}") from None
    arrays: dict[str, Float32s] = {}
    if record.values_sha256 is not None:
        arrays = read_arrays(values)
        if values_sha256(arrays) != record.values_sha256:
            raise BadData(f"{values}: these are not the first values that {path.name} is of")
        for name, array in arrays.items():
            if name not in variables or array.shape != variables[name].shape or array.dtype != np.float32:
                raise BadData(f"{values}: {name!r} is {array.dtype} {array.shape}, which is no variable of {path.name}")
            if not np.isfinite(array).all():
                raise BadData(f"{values}: the values of variable {name!r} are not all finite")
    spec = DataSpec(
        **{name: getattr(record, name) for name in _OF_SPEC},
        fields=tuple(Field(field.name, field.shape, field.dtype) for field in record.fields),
    )
    sha256 = record.rows_sha256 if rows else None
    first_rows = {} if sha256 is None else _read_rows(folder / ROWS_FILE, sha256)
    slots: Slots = {}
    if rows and record.slots_sha256 is not None:
        slots = _read_slots(folder / SLOTS_FILE, record.slots_sha256)
    return DeclaredJob(spec, variables, arrays, record.model_sha256, rows=first_rows, slots=slots)


def _parts_of_rows(rows: KeyedRows) -> dict[str, Any]:
    parts: dict[str, Any] = {"keys": rows.keys, "values": rows.values}
    if rows.t is not None:
        parts["t"] = rows.t
    return parts | {f"{_SLOT}{slot}": values for slot, values in rows.slots.items()}


def _read_slots(path: Path, sha256: str) -> Slots:
    slots: dict[str, dict[str, Float32s]] = {}
    for name, values in read_arrays(path).items():
        slot, _, variable = name.partition("/")
        slots.setdefault(slot, {})[variable] = values
    if slots_sha256(slots) != sha256:
        raise BadData(f"{path}: this is not the optimizer's state that {RECORD_FILE} is of")
    return slots


def _read_rows(path: Path, sha256: str) -> dict[str, KeyedRows]:
    parts: dict[str, Any] = read_arrays(path)
    names = {name.rpartition("/")[0] for name in parts}
    try:
        rows = {name: _rows_of(name, parts) for name in names}
    except KeyError as error:
        raise BadData(f"{path}: {error} is missing") from None
    if rows_sha256(rows) != sha256:
        raise BadData(f"{path}: these are not the rows that {RECORD_FILE} is of")
    return rows


def _rows_of(name: str, parts: Mapping[str, Any]) -> KeyedRows:
    of_slots = f"{name}/{_SLOT}"
    slots = {part.removeprefix(of_slots): values for part, values in parts.items() if part.startswith(of_slots)}
    return KeyedRows(parts[f"{name}/keys"], parts[f"{name}/values"], parts.get(f"{name}/t"), slots)
