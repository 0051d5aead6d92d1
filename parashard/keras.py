"""Keras 3 models: `parashard.keras.Model` makes a compiled model trainable by a `Trainer`, on Keras' JAX and PyTorch.

Training neither reads nor writes the model's own variables. `parashard.models.keras.functions` has the differentiated
functions; `on_jax` and `on_torch` beside it have the code of one backend each.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from parashard.data.base import Array, Batch
from parashard.errors import ConfigurationError, WrongModel
from parashard.metrics import Metric, Sums
from parashard.models.base import HeldTable, Initial, OptimizerState
from parashard.models.evaluation import MetricPart
from parashard.models.framework import (
    LOSS_SCALE,
    Computed,
    call_factory,
    class_outside,
    initial_of,
    kept_generators,
    moved_by,
    pushed_for,
    refuse_other_framework,
    rows,
    step_seed,
    unscaled,
    value_of,
)
from parashard.models.keras.embeddings import Embedding, KeysOf, look_ups_in
from parashard.models.keras.functions import Compiled, Functions, check_single, check_sums, classes_of
from parashard.models.keras.rows import NO_NARROW_IDS, NO_ROWS, KerasRows, NarrowIds, Recorded, use_rows
from parashard.models.keras.variables import (
    ModelVariables,
    check,
    copied,
    found_in,
    is_seed,
    keras,
    marks_of,
    means_losses,
    restore,
    seeded,
    state_of,
)
from parashard.plan.embedding import EmbeddingTable, Keys
from parashard.plan.optimizers import OptimizerSpec
from parashard.plan.state import COUNTER
from parashard.plan.variables import Float32s
from parashard.process.threads import holding_model_lock
from parashard.protocol.messages import NO_KEYS

__all__ = ["Embedding", "Model"]

_State = tuple[list[Any], list[Any]]
"""Trained and other tensors."""
_Data = tuple[Any, Any, Any]
"""Inputs, targets and weights."""


class Model:
    """A compiled Keras 3 model.

    Parameters
    ----------
    model : keras.Model, class or callable
        The compiled model, or a class or factory that takes no arguments. An instance starts from its current weights;
        a class or factory is called after `keras.utils.set_random_seed` with the trainer's seed.
    state : mapping of str to str
        Weights without a gradient that the model changes in training, by path or pattern such as "*/count", and how:
        "average:M" for a running average r' = r + M (b - r), "counter" for whole numbers, "sum" in `sync:N`. Weights of
        batch normalisation need not be named.
    keys : callable (inputs) -> mapping of str to array of whole numbers, optional
        For `Embedding` layers that do not look up an input of a functional model: returns the ids that a batch looks
        up, by table.

    Notes
    -----
    Loss, loss weights and metrics are those of `compile()`; training adds `add_loss` terms and regularisers. Example
    weights are Keras' `sample_weight`. The optimizer is the trainer's; if it was given none, parashard's equivalent of
    the compiled one. Variables are the weights, named by their paths, such as "sequential/dense/kernel"; weights of
    frozen layers are not trained. They are transferred as float32 whatever the model computes in, a scalar as one row.
    The shards average running statistics of batch normalisation: each step pushes those of its batch. Before each step
    Keras' seed generators are set from the job's seed and the step, so that dropout does not depend on which worker
    computes the step. If layers compute in float16, the loss is scaled as in `parashard.torch.Model`.
    """

    weighted = True

    def __init__(
        self,
        model: Any,
        *,
        state: Mapping[str, str] | None = None,
        keys: Callable[[Any], Mapping[str, Any]] | None = None,
    ) -> None:
        refuse_other_framework(model, "keras")
        if not callable(model):
            raise ConfigurationError(f"model is a keras.Model, its class or a factory, found {type(model).__name__}")
        if keys is not None and not callable(keys):
            raise ConfigurationError(f"keys is a function of the inputs, found {type(keys).__name__}")
        self._backend = _open_backend(keras.config.backend())
        self._given = model
        self.keys_function = keys
        self._policy = keras.config.dtype_policy()
        self._seed = 0
        self._model: Any = None
        self._patterns = dict(state or {})
        self._functions: Functions
        self._is_built = False
        self.added_metrics: Mapping[str, Metric] = {}
        self._compiled_metrics: list[Compiled] = []
        self._classes: list[int | None] = []  # of each target, in order
        self._step_metrics: dict[int, list[Any]] = {}  # metrics' variables after each thread's last step, until read
        self._scale = 1.0
        self._others: list[Any] = []  # values of state that is no variable, read once per fit: each may be on a GPU
        self._keys: KeysOf
        self._draws = itertools.count(1)  # numbers evaluated and predicted batches, each with its own random seed

    @property
    def tables(self) -> tuple[EmbeddingTable, ...]:
        """The tables whose rows the model looks up."""
        self._ready()
        return tuple(dict.fromkeys(layer.table for layer in self._keys.layers))

    def keys(self, batch: Batch) -> Mapping[str, Array]:
        """Return the ids that a batch looks up, by table, without padding ids."""
        self._ready()
        return self._keys.of(batch.inputs)

    def seed(self, seed: int) -> None:
        """Initialise the model from this seed; an instance keeps its weights."""
        is_instance = isinstance(self._given, keras.Model)
        if is_instance and self._model is not None:
            changed = marks_of(self._given) != self._marks  # frozen, unfrozen or compiled since
        else:
            changed = seed != self._seed
        if changed:
            self._model = None
        self._others = []
        self._seed = seed
        self._ready()

    def for_thread(self) -> Model:
        """Return itself: each step brings its weights, and threads compute in turn, since generators are shared."""
        return self

    def compiled_optimizer(self, seed: int) -> Any:
        """Return the compiled optimizer, or None, after initialising the model from this seed.

        Without Keras' loss-scaling wrapper: the loss is scaled here.
        """
        self.seed(seed)
        return self.own_optimizer(self._ready())

    def config_sha256(self) -> str:
        """Return the SHA-256 (hex) of the state that is not a variable, such as an integer table."""
        self._ready()
        digest = hashlib.sha256()
        for variable in self._found.others:
            if not is_seed(variable):
                value = np.ascontiguousarray(variable.numpy())
                digest.update(f"{variable.path}\0{value.dtype}\0{value.shape}\0".encode() + value.tobytes())
        return digest.hexdigest()

    def initial_variables(self) -> Mapping[str, Initial]:
        """Return the weights with their initial values, as float32."""
        self._ready()
        array, found = self._backend.array_of, self._found
        return {name: initial_of(name, array(v.value), found.kinds[name]) for name, v in found.variables.items()}

    tells_means = False
    """An evaluation's loss is the mean of its batches' losses, weighted by their examples, as in Keras."""

    @property
    def means_losses(self) -> bool:
        """Whether each compiled loss is a mean over all examples of a batch."""
        return means_losses(self._ready())

    def check(self, batch: Batch) -> None:
        """Raise WrongModel, or the model's own error, if a step or evaluation of such a batch cannot be computed."""
        first = {
            name: value[1] if isinstance(value, tuple) else value for name, value in self.initial_variables().items()
        }
        tables = {table.name: table for table in self.tables}
        zeros = {
            name: np.zeros((len(keys), tables[name].row_elements), np.float32) for name, keys in batch.keys.items()
        }
        state, (pulled, data) = self._state(first, batch), self._data(zeros, batch, np)
        with kept_generators(gpus=False):
            self._step.try_out(pulled, *state, *data)
            self._evaluate.try_out(pulled, *state, *data[:2], None)

    @holding_model_lock()
    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float | Array, Mapping[str, Array | None]]:
        """Return the loss of a batch and its gradients, as `parashard.models.base.Model` specifies."""
        state, (pulled, data) = self._state(variables, batch), self._data(variables, batch, xp)
        seed = step_seed("keras", self._seed, batch.step, batch.part) & 0xFFFFFFFF
        return unscaled(lambda scale: self._computed(state, pulled, data, seed, scale, xp), self._scale, xp)

    def _computed(self, state: _State, pulled: KerasRows, data: _Data, seed: int, scale: float, xp: Any) -> Computed:
        keras.utils.set_random_seed(seed)
        loss, (after, sums), found, of_rows = self._step(pulled, *state, *data, scale=scale)
        self._step_metrics[threading.get_ident()] = sums
        gradients: dict[str, Array | None] = {
            name: None if gradient is None else rows(self._backend.result(gradient, xp))
            for name, gradient in zip(self._found.names(trained=True), found, strict=True)
        }
        gradients |= of_rows
        array = self._backend.array_of
        for name, before in zip(self._found.names(trained=False), state[1], strict=False):
            if name in after:
                kind = self._found.kinds[name]
                if xp is np or kind == COUNTER:
                    gradients[name] = xp.asarray(pushed_for(kind, array(before), array(after[name])))
                else:  # without waiting for the GPU
                    first, last = (self._backend.result(tensor, xp) for tensor in (before, after[name]))
                    gradients[name] = moved_by(kind, first, last.reshape(first.shape))
        return self._backend.result(loss, xp), gradients

    @holding_model_lock()
    def evaluate(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> Mapping[str, MetricPart]:
        """Return the loss (the mean over the batch) and the states of the compiled metrics."""
        state, (pulled, data) = self._state(variables, batch), self._data(variables, batch, xp)
        loss, sums = self._evaluate(pulled, *state, *data)
        values = self._values_of(sums)
        return {"loss": float(loss), **{metric.name: Sums(metric, values) for metric in self._compiled_metrics}}

    def step_metrics(self) -> Mapping[str, MetricPart]:
        """Return the states of the compiled metrics of this thread's last step, once."""
        sums = self._step_metrics.pop(threading.get_ident(), [])
        if not sums:
            return {}
        values = self._values_of(sums)
        return {metric.name: Sums(*metric.own(values)) for metric in self._compiled_metrics}

    def _values_of(self, sums: list[Any]) -> Any:
        return np.concatenate([self._backend.array_of(value).ravel() for value in sums])

    @holding_model_lock()
    def predict(self, values: Mapping[str, Float32s], inputs: Any, keys: Mapping[str, Keys] = NO_KEYS) -> Any:
        """Return the outputs as NumPy arrays, structured as the model returns them.

        `values` includes the rows of `keys`.
        """
        state, (pulled, tensors) = self._state(values, None), self._looking_up(values, keys, inputs, np)
        outputs = self._outputs(pulled, *state, tensors)
        return keras.tree.map_structure(self._backend.array_of, outputs)

    @holding_model_lock()
    def to_user_object(self, values: Mapping[str, Float32s]) -> Any:
        """Return a separate Keras model with these weights, compiled as the given one."""
        own = self._apart(partial(copied, self._given) if isinstance(self._given, keras.Model) else self._made)
        ours = self._ready()
        if own is ours:
            raise ConfigurationError("the factory returns the same model each time: give the model itself")
        for theirs, mine in zip(own.variables, ours.variables, strict=True):
            name = mine.path
            kept = (
                value_of(values[name], self._found.kinds[name]).reshape(mine.shape)
                if name in self._found.kinds
                else np.array(mine.numpy())  # a copy: on JAX Keras donates its own arrays to compiled functions
            )
            theirs.assign(kept)
        return own

    def own_optimizer(self, own: Any) -> Any:
        """Return the optimizer of a Keras model without Keras' loss-scaling wrapper; None if it has none."""
        return getattr(own.optimizer, "inner_optimizer", own.optimizer)

    def restore_optimizer(self, own: Any, spec: OptimizerSpec, state: OptimizerState) -> None:
        """Load the shards' optimizer state into the optimizer of a model that `to_user_object` returned."""
        named = dict(zip(map(id, own.variables), (variable.path for variable in self._ready().variables), strict=True))
        trained = own.trainable_variables
        if own.optimizer is not self.own_optimizer(own) and not own.optimizer.built:
            own.optimizer.build(trained)
        names = [named[id(variable)] for variable in trained]
        restore(self.own_optimizer(own), names, trained, spec, state, self._backend.array_of)

    def optimizer_state(self, optimizer: Any, spec: OptimizerSpec) -> OptimizerState | None:
        """Return the state of a Keras optimizer, by the paths of its variables; None if it has taken no step."""
        state = state_of(optimizer, spec, self._backend.array_of)
        if state is None:
            return None
        self._ready()
        others = {name for of_slot in state.slots.values() for name in of_slot} - self._found.kinds.keys()
        if others:
            raise ConfigurationError(
                f"keras.optimizers.{type(optimizer).__name__} has taken steps with {min(others)!r}, which is no weight "
                "of the model: give a new one"
            )
        return state

    def hold(self, own: Any, tables: Mapping[str, HeldTable]) -> None:
        """Give a model that `to_user_object` returned the rows of all tables."""
        for layer in look_ups_in(own):
            layer.hold(tables[layer.table.name], self._seed)
        if not self._backend.IS_EAGER:
            own.run_eagerly = True
            own._compile_config.config["run_eagerly"] = True  # saved with the model

    # --- arrays to tensors ---

    def _state(self, variables: Mapping[str, Array], batch: Batch | None) -> _State:
        """Return trained and other tensors, in the order of `Functions`; without a batch, for a prediction."""
        step, part = (batch.step, batch.part) if batch is not None and batch.step >= 0 else (-next(self._draws), 0)
        self._ready()
        tensor = self._backend.tensor
        trained = [tensor(variables[name]) for name in self._found.names(trained=True)]
        fixed = [
            tensor(value_of(variables[name], self._found.kinds[name])) for name in self._found.names(trained=False)
        ]
        of_a_step = batch is not None and batch.step >= 0  # between other calls the user may have changed the values
        if not of_a_step or len(self._others) != len(self._found.others):
            self._others = [variable.numpy() for variable in self._found.others]
        for index, (variable, value) in enumerate(zip(self._found.others, self._others, strict=True)):
            seed = step_seed(f"keras {index}", self._seed, step, part)
            words = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
            fixed.append(tensor(words.view(value.dtype) if is_seed(variable) else value))
        return trained, fixed

    def _data(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> tuple[KerasRows, _Data]:
        """Return rows, and inputs, targets and weights as tensors; the first call builds the loss and the metrics."""
        seen = None if batch.on_host is None else batch.on_host.inputs
        pulled, inputs = self._looking_up(variables, batch.keys, batch.inputs, xp, seen)
        on_host = batch.on_host or batch
        targets = self._tensors(batch.targets, on_host.targets)
        if not self._is_built:
            self._build(inputs, targets)
        for given, classes in zip(keras.tree.flatten(on_host.targets), self._classes, strict=True):
            outside = None if classes is None else class_outside(given, classes)
            if outside is not None:
                raise WrongModel(
                    f"the targets have class {outside}; the outputs have classes 0 to {(classes or 0) - 1}: number the "
                    "classes from 0 on, or name one that does not count by ignore_class= of the loss"
                )
        return pulled, (inputs, targets, None if batch.weights is None else self._backend.tensor(batch.weights))

    def _looking_up(
        self, variables: Mapping[str, Array], keys: Mapping[str, Keys], inputs: Any, xp: Any, on_host: Any = None
    ) -> tuple[KerasRows, Any]:
        """Return the rows of a batch, and its inputs as tensors, in which ids may be renumbered to 32 bits."""
        layers = self._keys.layers
        if not layers:
            return NO_ROWS, self._tensors(inputs, on_host)
        narrow_ids = NO_NARROW_IDS
        if not self._backend.has_wide_numbers():
            narrow_ids = NarrowIds(inputs, [layer.padding_key for layer in layers if layer.padding_key is not None])
            inputs = narrow_ids.inputs
        return KerasRows(variables, keys, xp, narrow_ids), self._tensors(inputs)

    def _tensors(self, data: Any, on_host: Any = None) -> Any:
        return keras.tree.map_structure(self._backend.tensor, data, data if on_host is None else on_host)

    def _build(self, inputs: Any, targets: Any) -> None:
        """Build the compiled loss and metrics from the first data, as Keras does, but outside compiled functions."""
        model = self._ready()
        with self._backend.no_gradients(), use_rows(Recorded(keras.ops.zeros)):
            outputs = model(inputs, training=False)
            model.compute_loss(x=inputs, y=targets, y_pred=outputs, sample_weight=None, training=False)
            model.compute_metrics(inputs, targets, outputs, sample_weight=None)
            found = {name: value for name, value in model.get_metrics_result().items() if name != "loss"}
        model.reset_metrics()
        self._classes = classes_of(model, targets, outputs)
        for metric in model.metrics:
            check_sums(getattr(metric, "metrics", [metric]))
        check_single(found)
        self._compiled_metrics = [Compiled(model, name) for name in found]
        self.added_metrics = {metric.name: metric.own()[0] for metric in self._compiled_metrics}
        self._functions.tells_metrics = bool(found)
        self._is_built = True

    # --- the model ---

    @property
    def _found(self) -> ModelVariables:
        """The model's variables."""
        return self._functions.found

    def _ready(self) -> Any:
        if self._model is None:
            is_instance = isinstance(self._given, keras.Model)
            self._take(self._given if is_instance else self._apart(self._made))
        return self._model

    def _take(self, model: Any) -> None:
        """Check a model, find its variables, and discard functions compiled before."""
        check(model)
        self._marks = marks_of(model)
        self._functions = Functions(model, found_in(model, self._patterns))
        self._step = self._backend.Gradients(self._functions.loss)
        self._evaluate = self._backend.Outputs(self._functions.metrics)
        self._outputs = self._backend.Outputs(self._functions.output)
        self._keys = KeysOf(model, self.keys_function)
        half = any(layer.compute_dtype == "float16" for layer in model._flatten_layers())
        self._scale = LOSS_SCALE if half else 1.0
        self._model, self._is_built, self._others = model, False, []

    def _apart(self, make: Callable[[], Any]) -> Any:
        """Make a model in a new thread, where Keras' name counters start from zero.

        A model's names are then the same in every process, whatever was made there before.
        """

        def made() -> Any:
            keras.config.set_dtype_policy(self._policy)  # thread-local, like the name counters
            return make()

        with ThreadPoolExecutor(1, "keras") as thread:
            return thread.submit(made).result()

    def _made(self) -> Any:
        with seeded(self._seed):
            return call_factory(self._given, "model()")


def _open_backend(name: str) -> Any:
    """Import the module for Keras' backend, JAX or PyTorch; both have the same names."""
    if name not in ("jax", "torch"):
        raise ConfigurationError(
            f"ps.keras trains on Keras' JAX or PyTorch, and the backend is {name}: set KERAS_BACKEND=jax or "
            "KERAS_BACKEND=torch"
        )
    return importlib.import_module(f"parashard.models.keras.on_{name}")
