"""TrainedModel: a trainer's model with its current weights, to start jobs from, evaluate, predict and return."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from parashard.api.examples.indexed import Indexed, as_bad_data, joined
from parashard.api.optimizers import Mapped, variable_settings
from parashard.api.splitting import (
    EXAMPLES_TRIED,
    Accumulated,
    Splitting,
    check_means,
    computes_at_once,
    needs_means,
    piece_sizes,
    shares_batches,
)
from parashard.api.trained_state import TrainedOptimizer, TrainedRows, tables_of_model
from parashard.callbacks.base import Training
from parashard.data.base import Batch, DataSource, DataSpec, Examples, Field, Indices, examples_of
from parashard.data.tree import Tree, leaves, rows_of
from parashard.errors import BadData, ConfigurationError, ParashardError, WrongModel
from parashard.figures import counted
from parashard.job.schema import Job
from parashard.models.base import Checked, FrameworkModel, Model, Seeded
from parashard.models.building import METHODS
from parashard.models.declaration import DeclaredJob, declare, parts_of
from parashard.models.evaluation import Totals
from parashard.models.framework import kept_generators
from parashard.models.looking_up import looked_up, placed
from parashard.models.user_errors import named_with_line
from parashard.plan.embedding import EmbeddingTable, Keys
from parashard.plan.variables import Float32s, as_imported, initial_rows
from parashard.process.arguments import checked_whole
from parashard.process.durable import replace_durably
from parashard.process.run_files import VARIABLES_FILE, WEIGHTS_FILE
from parashard.protocol.messages import NO_KEYS
from parashard.store.arrays import read_arrays, write_arrays


class TrainedModel:
    """A model and its weights between the calls of a trainer."""

    def __init__(self, model: Model, seed: int) -> None:
        lacking = [name for name in METHODS if not callable(getattr(model, name, None))]
        if lacking or isinstance(model, type):
            raise ConfigurationError(
                "a trainer's model is ps.torch.Model(Net, loss=...), ps.jax.Model, ps.keras.Model, ps.Sequential or an "
                f"object with the methods {', '.join(METHODS)}; found "
                f"{model.__name__ if isinstance(model, type) else type(model).__name__}"
            )
        self.given = model
        self.training: Training | None = None
        self._seed = seed
        self._inputs: dict[str, Field] = {}  # input fields of an example in the last fit
        self._run_dir: Path | None = None  # of the last fit
        self._weights: Path | None = None  # weights file of the last fit
        self._values: dict[str, Float32s] | None = None
        self._first: dict[str, tuple[Any, ...]] = {}  # shapes and digests of initial values, at the last fit

    def begin(self) -> None:
        """Seed the model; refuse initial values changed since the last fit, whose weights would override them."""
        if isinstance(self.given, Seeded):
            self.given.seed(self._seed)
        if self._weights is not None and isinstance(self.given, FrameworkModel):
            now = self._first_values()
            changed = sorted(name for name in self._first | now if self._first.get(name) != now.get(name))
            if changed:
                raise ConfigurationError(
                    f"{changed[0]!r} of the model was changed after a fit, and the trainer goes on from the weights of "
                    "that fit: change what trainer.model() returns, and give it to a new trainer"
                )

    def continue_from(self, run_dir: Path, weights: Path) -> None:
        """Make a file's weights and a run's rows the current ones."""
        self._run_dir, self._weights, self._values = run_dir, weights, None
        if isinstance(self.given, FrameworkModel):
            self.given.seed(self._seed)
            self._first = self._first_values()

    def tables(self) -> dict[str, EmbeddingTable]:
        """Return the embedding tables whose rows the model looks up, by name."""
        return tables_of_model(self.given)

    def rows(self) -> TrainedRows | None:
        """Return the current rows of the model's tables, None if it has none; raise while a `fit` runs."""
        if self._run_dir is None:
            self.begin()
        tables = self.tables()
        if not tables:
            return None
        if self.training is not None:
            raise ConfigurationError(
                f"rows of tables ({', '.join(tables)}) are not at hand while fit runs: evaluate, predict, model and "
                "table are for after it"
            )
        return TrainedRows(tables, self._seed, self._run_dir)

    def weights(self) -> dict[str, Float32s]:
        """Return the current weights: those of the last `fit`, else the model's initial ones."""
        if self.training is not None:
            return self.training.weights()
        if self._values is None and self._weights is not None:
            self._values = as_imported(read_arrays(self._weights))
        if self._values is None:
            self.begin()
            initial = {name: parts_of(name, value) for name, value in self.given.initial_variables().items()}
            self._values = {
                name: initial_rows(variable, self._seed, 0, variable.rows) if array is None else array
                for name, (variable, array) in initial.items()
            }
        return self._values

    def declared(self, spec: DataSpec) -> DeclaredJob:
        """Return the declaration of data and model, with the current weights as initial values."""
        declared = declare(spec, self.given)
        if self._weights is None and self._values is None:
            return declared
        return replace(declared, arrays={name: self.weights()[name] for name in declared.variables}, auditor=None)

    def declaration_to_run(self, spec: DataSpec, optimizer: TrainedOptimizer, model_sha256: str) -> DeclaredJob:
        """Return the declaration with the current rows, and optimizer state of variables whose shape is unchanged."""
        declared = self.declared(spec)
        rows = self.rows() if self._run_dir is not None else None
        trained = {n: v.shape for n, v in declared.variables.items() if not v.frozen and not v.state}
        kept = {
            slot: {name: values for name, values in of_slot.items() if trained.get(name) == values.shape}
            for slot, of_slot in optimizer.slots().items()
        }
        return replace(
            declared,
            model_sha256=model_sha256,
            rows={} if rows is None else rows.initial(),
            slots={slot: of_slot for slot, of_slot in kept.items() if of_slot},
        )

    def config_sha256(self) -> str:
        """Return the digest of the model's constants, which are in no variable; "" for none."""
        return self.given.config_sha256() if isinstance(self.given, FrameworkModel) else ""

    def variable_settings(self, optimizer: Mapped) -> dict[str, dict[str, Any]]:
        """Return settings of trained variables from the groups of a PyTorch optimizer."""
        if not optimizer.groups:
            return {}
        names: Mapping[int, str] = getattr(self.given, "parameter_names", dict)()
        initial = self.given.initial_variables()
        variables = [parts_of(name, value)[0] for name, value in initial.items()]
        trained = [variable.name for variable in variables if not variable.frozen and not variable.state]
        others = [variable.name for variable in variables if variable.frozen or variable.state]
        return variable_settings(optimizer.groups, names, trained, others)

    def named_groups(self, optimizer: Mapped) -> list[tuple[Sequence[str], float, bool]]:
        """Return a PyTorch optimizer's groups by names of parameters; empty if it has none, or names are unknown."""
        names: Mapping[int, str] = getattr(self.given, "parameter_names", dict)()
        found = [(group.named(names), group.learning_rate_factor, group.decay) for group in optimizer.groups]
        return [] if any("" in named for named, _, _ in found) else found

    def step_model(self, source: DataSource, gradient_accumulation: int) -> Model:
        """Return the model that a worker computes steps of these data with."""
        if getattr(source, "weighted", False):
            self._check_weighted()
        self._inputs = _inputs_of(source.spec.fields)
        return Accumulated(self.given, gradient_accumulation) if gradient_accumulation != 1 else self.given

    def try_step(self, source: DataSource, job: Job, pieces: int) -> bool:
        """Try the model on pieces of a step; return whether a batch's loss seems to be the mean of parts' losses."""
        values = self._values
        try:
            return self._tried_step(source, job, pieces)
        finally:
            if not isinstance(self.given, FrameworkModel):
                self._values = values  # keep None: the run draws initial values from its seed, without a file

    def _tried_step(self, source: DataSource, job: Job, pieces: int) -> bool:
        tables = self.tables()
        policy = job.consistency.policy
        of_round = policy.bound if policy.kind == "sync" and job.consistency.reduce == "mean" else 1
        parts = Splitting(source.spec.held_out > 0, pieces, of_round, policy.parts)
        asked = needs_means(self.given, parts)
        normalises = getattr(self.given, "normalises_batches", False)
        shared = policy.parts > 1
        if not isinstance(self.given, Checked) and not tables and not asked and not normalises and not shared:
            return True
        steps = job.steps(source.spec.examples, batched=source.spec.batched)
        size, *others = piece_sizes(steps, pieces)
        try:
            batch = self._tried(source, size, tables)
        except (ConfigurationError, WrongModel) as error:
            raise ConfigurationError(str(error)) from None
        except Exception as error:
            raise ConfigurationError(f"the model cannot compute a step: {named_with_line(error)}") from error
        for other in others:
            try:
                alone = self._tried(source, other, tables)
                if (other == 1 and normalises) or (shared and computes_at_once(self.given)):
                    with kept_generators():
                        self.given.loss_and_gradients(self._values_for([alone])[0], alone, np)
            except Exception as error:
                what = "the last step of a pass" if steps.short and pieces == 1 else "a piece of a step"
                raise ConfigurationError(
                    f"{what} has {counted(other, 'example')}, where others have {size}, and the model cannot compute "
                    f"it: {named_with_line(error)}; allowed: drop_last=True, which leaves a shorter last step out, or "
                    "another batch_size"
                ) from error
        if shared and not self._shares(batch):
            return False
        return not asked or check_means(self.given, *self._values_for([batch]), batch, parts)

    def _shares(self, part: Batch) -> bool:
        """Try a part of a batch; return whether a batch's loss is the mean of its parts' losses, as far as known."""
        try:
            with kept_generators():
                return shares_batches(self.given, *self._values_for([part]), part)
        except Exception as error:
            rows = counted(rows_of(part.inputs), "example")
            raise ConfigurationError(f"the model cannot compute {rows}: {named_with_line(error)}") from error

    def _values_for(self, batches: Iterable[Batch]) -> tuple[Mapping[str, Float32s], Mapping[str, Keys]]:
        """Return the current weights and the rows that batches need, and the keys of these rows."""
        rows = self.rows()
        if rows is None:
            return self.weights(), NO_KEYS
        keys, of_keys = rows.of(self.given, batches)
        return {**self.weights(), **of_keys}, keys

    def _tried(self, source: DataSource, size: int, tables: Mapping[str, EmbeddingTable]) -> Batch:
        """Return a batch of this size, after the model's own check if it has one."""
        indices = np.arange(size)
        with as_bad_data():
            examples = examples_of(source, 0, indices)
        batch = Batch(0, 0, indices, *examples)
        if tables:
            batch = looked_up(self.given, batch, tables)
        if isinstance(self.given, Checked):
            self.given.check(batch)
        return batch

    def evaluate(self, data: Indexed, batch_size: int) -> dict[str, float]:
        """Return the metrics of the current weights over all examples."""
        if any(field.name == "weights" for field in data.fields()):
            self._check_weighted()
        self.rows()  # errors raised here are not caused by the examples
        self.weights()
        with _computing("evaluate", data):
            values, keys = self._values_for(_batches(data, batch_size))
            return figures_over(data, batch_size, self.given, values, keys)

    def predict(self, inputs: Indexed, batch_size: int) -> Tree:
        """Return the outputs of the current weights, in the order of the inputs."""
        model, tables, _ = self._framework("predict"), self.rows() is not None, self.weights()
        for name, found in _inputs_of(inputs.fields()).items():
            due = self._inputs.get(name)
            if due is not None and len(found.shape) < len(due.shape):
                raise BadData(
                    f"predict: each example has {found}, and {due} in fit; the first axis is that of the examples: "
                    "x[None] is one"
                )
        parts = []
        with _computing("predict", inputs):
            values, keys = self._values_for(_batches(inputs, batch_size))
        for _, some in _in_order(inputs, batch_size):
            with _computing("predict", inputs):
                parts.append(model.predict(values, some[0], *([keys] if tables else [])))
            _check_rows(parts[-1], rows_of(some[0]))
        if not parts:
            raise BadData("inputs has no examples")
        return joined(parts)

    def save_state_dict(self, run_dir: Path) -> Path:
        """Write a run's weights in the framework's format; return the file that has the variables."""
        weights, variables = run_dir / WEIGHTS_FILE, run_dir / VARIABLES_FILE
        if not hasattr(self.given, "state_dict"):
            return weights
        arrays = read_arrays(weights)
        own = self.given.state_dict(as_imported(arrays))
        if _forms(own) == _forms(arrays):
            return weights
        try:
            replace_durably(variables, lambda path: write_arrays(path, arrays))
            replace_durably(weights, lambda path: write_arrays(path, own))
        except OSError:
            return weights
        return variables

    def to_user_object(self) -> Any:
        """Return the user's own object with the current weights."""
        model, rows = self._framework("to_user_object"), self.rows()
        own = model.to_user_object(self.weights())
        if rows is not None and hasattr(model, "hold"):
            model.hold(own, {name: rows.held(name) for name in self.tables()})
        return own

    def _first_values(self) -> dict[str, tuple[Any, ...]]:
        """Return shapes and digests of the model's initial values, by variable."""
        found = {}
        for name, value in self.given.initial_variables().items():
            variable, array = parts_of(name, value)
            digest = "" if array is None else hashlib.sha256(array.tobytes()).hexdigest()
            if not variable.state:  # state changes when the user calls the module
                found[name] = (variable.shape, digest)
        return found

    def _check_weighted(self) -> None:
        if not getattr(self.given, "weighted", False):
            raise ConfigurationError(
                "examples have weights, and the model's loss takes none: give the loss of a PyTorch or JAX model or of "
                "ps.Sequential a parameter sample_weight, or take one of PyTorch's with reduction or one that "
                "ps.Sequential has by name; a model of your own reads batch.weights and has weighted = True"
            )

    def _framework(self, what: str) -> FrameworkModel:
        if not isinstance(self.given, FrameworkModel):
            raise ConfigurationError(f"{type(self.given).__name__} has no method {what!r}: only its weights are known")
        return self.given


def figures_over(
    data: Indexed,
    batch_size: int,
    model: Model,
    values: Mapping[str, Float32s],
    keys: Mapping[str, Keys] = NO_KEYS,
) -> dict[str, float]:
    """Return a model's figures over all examples, `batch_size` at once; `values` includes the rows of `keys`."""
    totals = Totals()
    evaluated = 0
    parts = Splitting(several_batches=len(data) > (1 if data.batched else batch_size))
    if needs_means(model, parts):
        check_means(model, values, keys, next(_batches(data, EXAMPLES_TRIED)), parts)
    for batch in _batches(data, batch_size):
        rows = rows_of(batch.inputs)
        evaluated += rows
        there = placed(model, batch, keys, keys) if keys else batch
        totals.add(model.evaluate(values, there, np), rows)
    if not evaluated:
        raise BadData("data has no examples")
    return totals.figures()


def _forms(arrays: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {name: (array.shape, array.dtype) for name, array in arrays.items()}


def _inputs_of(fields: Iterable[Field]) -> dict[str, Field]:
    return {field.name: field for field in fields if field.name.partition("/")[0] == "inputs"}


def _check_rows(outputs: Tree, rows: int) -> None:
    """Refuse outputs without one row per example, as for inputs that are a single example."""
    for name, array in leaves(outputs, "outputs"):
        if getattr(array, "ndim", 0) and len(array) != rows:
            raise ConfigurationError(
                f"predict: {name} has {len(array):,} rows of {rows:,} examples; the first axis of inputs and outputs "
                "is that of the examples: x[None] is one"
            )


@contextmanager
def _computing(what: str, data: Indexed) -> Iterator[None]:
    """Convert a model's error to a ConfigurationError with the shapes of the examples, which are often the cause."""
    try:
        yield
    except ParashardError:
        raise
    except Exception as error:
        fields = data.fields()
        given = ", ".join(map(str, fields))
        if what == "predict" and len(fields) == 2 and not fields[1].shape:  # inputs and a label
            given += " (predict takes inputs alone)"
        raise ConfigurationError(
            f"{what}: the model cannot compute these {'batches' if data.batched else 'examples'}, each of which has "
            f"{given}: {named_with_line(error)}"
        ) from error


def _in_order(data: Indexed, batch_size: int) -> Iterator[tuple[Indices, Examples]]:
    """Yield all examples in order, `batch_size` at once; one item at once if items are batches."""
    at_once = 1 if data.batched else checked_whole("batch_size", batch_size)
    for start in range(0, len(data), at_once):
        indices = np.arange(start, min(len(data), start + at_once))
        yield indices, data.take(indices, 0)


def _batches(data: Indexed, batch_size: int) -> Iterator[Batch]:
    """Yield all examples as batches; targets are None if the data are only inputs."""
    for indices, examples in _in_order(data, batch_size):
        inputs, targets, weights = (*examples, None)[:3]
        yield Batch(-1, -1, indices, inputs, targets, weights)
