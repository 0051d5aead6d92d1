"""Sequential: a model for a trainer, made of a list of layers and a loss."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from parashard.data.base import Array, Batch
from parashard.data.tree import rows_of
from parashard.errors import ConfigurationError, WrongModel
from parashard.layers.base import Layer, LooksUpLayer, Pass, Pullback, Shape, Shapes
from parashard.layers.losses import mean_squared_error, sigmoid_cross_entropy, softmax_cross_entropy
from parashard.models.base import HeldTable
from parashard.models.evaluation import Given, MetricPart, added_up, metric_states, metrics_by_name
from parashard.models.framework import PARAMETER, Pairing, host_array, takes_weights
from parashard.models.looking_up import placed
from parashard.models.row_places import check_fit_begins, rows_held
from parashard.plan.embedding import EmbeddingTable, Keys
from parashard.plan.variables import Float32s, Variable
from parashard.protocol.messages import NO_KEYS

NO_PLACES: Mapping[str, Array] = MappingProxyType({})

Loss = Callable[..., tuple[Array, Array]]
"""Maps outputs, targets and `xp` to the mean over the batch and its gradient by the outputs, a new array."""

LOSSES: Mapping[str, Loss] = {
    "softmax_cross_entropy": softmax_cross_entropy,
    "sigmoid_cross_entropy": sigmoid_cross_entropy,
    "mean_squared_error": mean_squared_error,
}


class Sequential:
    """Layers, one after the other, and a loss.

    Parameters
    ----------
    layers : sequence of Layer
        Such as `parashard.layers.Dense(10)`.
    input_shape : tuple of int, or mapping of str to tuple of int
        Shape of one example's input; shapes by name if inputs are a dict, which a first `TableEmbedding` takes.
    loss : str or callable (outputs, targets, xp) -> (loss, gradient by the outputs)
        "softmax_cross_entropy", "sigmoid_cross_entropy", "mean_squared_error", or a function: the mean over a batch. A
        function with a parameter `sample_weight` gets the weights of examples, if they have any.
    metrics : sequence of str, Metric or callable (outputs, targets) -> numbers
        Metrics of evaluations besides the loss: names such as "accuracy", metrics of `parashard.metrics`, or functions
        that return one number per example, or the mean over a batch.

    Attributes
    ----------
    output_shape : tuple of int
        Shape of one example's output.
    weighted : bool
        Whether the loss takes weights of examples.
    tables : tuple of Table
        Tables that the first layer looks up rows in.

    Notes
    -----
    A variable is named NAME_NUMBER.PART, such as "dense_0.weight": the layer's name, its number among the layers of
    that name, and its own name there.

    Raises
    ------
    ConfigurationError
        If a layer does not fit the one before it.

    Examples
    --------
    >>> from parashard.layers import Dense, ReLU
    >>> model = Sequential([Dense(4), ReLU(), Dense(3)], input_shape=(2,), loss="softmax_cross_entropy")
    >>> {name: variable.shape for name, variable in model.initial_variables().items()}
    {'dense_0.weight': (2, 4), 'dense_0.bias': (4,), 'dense_1.weight': (4, 3), 'dense_1.bias': (3,)}
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        input_shape: Sequence[int] | Mapping[str, Sequence[int]],
        loss: str | Loss,
        metrics: Sequence[Given] = (),
    ) -> None:
        if not isinstance(layers, Sequence):
            raise ConfigurationError(f"layers is a list, such as [ps.layers.Dense(64)], found {type(layers).__name__}")
        self._layers = tuple(layers)
        self._input_shape = _shapes(input_shape)
        self._loss = _loss(loss)
        self._pairing = Pairing()
        self.weighted = takes_weights(self._loss)
        self._metrics = metrics_by_name(metrics)
        self.added_metrics = added_up(self._metrics)
        self._step_outputs: tuple[Array, Batch] | None = None  # of the last step, until `step_metrics`
        self._seed = 0
        self._values: Mapping[str, Float32s] | None = None
        self._held: Mapping[str, HeldTable] = {}
        self._looks_up: LooksUpLayer | None = None
        self.tables: tuple[EmbeddingTable, ...] = ()
        self._declared: dict[str, Variable] = {}
        self._parts: list[tuple[int, dict[str, str]]] = []  # by layer: its number, and its variables' names by part
        self.output_shape = self._named()

    def __repr__(self) -> str:
        return f"Sequential([{', '.join(map(repr, self._layers))}], input_shape={self._input_shape})"

    def __call__(self, inputs: Array) -> Array:
        """Return the outputs for inputs; only models that `Trainer.model` returned have the weights for that."""
        if self._values is None:
            raise ConfigurationError("this model has no weights: call what trainer.model() returns")
        found, places = {}, {}
        for name, ids in ({} if self._looks_up is None else self._looks_up.keys(inputs)).items():
            different, places[name] = np.unique(ids, return_inverse=True)
            found[name] = rows_held(self._held[name], different)
        return self.forward({**self._values, **found}, inputs, None, np, places)[0]

    def keys(self, batch: Batch) -> Mapping[str, Array]:
        """Return the ids that a batch looks up, by table."""
        assert self._looks_up is not None, "only a model with tables is asked"
        self._check_inputs(batch.inputs)
        return self._looks_up.keys(batch.inputs)

    def seed(self, seed: int) -> None:
        """Set the seed of random operations."""
        self._seed = seed

    def config_sha256(self) -> str:
        """Return the digest of the layers and the loss, which are in no variable."""
        return hashlib.sha256(f"{self!r} {_text(self._loss)}".encode()).hexdigest()

    def frozen(self) -> list[str]:
        """Return the names of the variables that a layer declares as frozen."""
        return [name for name, variable in self._declared.items() if variable.frozen]

    def initial_variables(self) -> Mapping[str, Variable | Float32s]:
        """Return the declared variables by name, or the weights if `Trainer.model` returned this model."""
        check_fit_begins(bool(self._held))
        return self._values or self._declared

    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float | Array, Mapping[str, Array]]:
        """Return the loss of a batch and its gradients, as `parashard.models.base.Model` says."""
        outputs, pull_back = self.forward(variables, batch.inputs, batch.step, xp, batch.places)
        loss, gradient = self._loss(outputs, batch.targets, xp, **_weights(batch))
        if self._pairing.is_doubtful(outputs, batch.targets) and batch.weights is None:
            self._pairing.check(
                host_array(outputs),
                host_array(batch.targets),
                float(loss),
                lambda: float(self._loss(outputs, batch.targets[::-1], xp)[0]),
            )
        if self.added_metrics:
            self._step_outputs = outputs, batch
        return loss, pull_back(gradient)  # not float(loss), which would synchronise a GPU

    def step_metrics(self) -> Mapping[str, MetricPart]:
        """Return the metrics' states of the last step's batch, and forget it."""
        (outputs, batch), self._step_outputs = self._step_outputs or (None, None), None
        if batch is None:
            return {}
        return metric_states(self.added_metrics, outputs, batch.targets, rows_of(batch.inputs), host_array)

    def evaluate(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> Mapping[str, MetricPart]:
        """Return the loss, the mean over the batch, and the metrics' states."""
        outputs, _ = self.forward(variables, batch.inputs, None, xp, batch.places)
        loss = float(self._loss(outputs, batch.targets, xp, **_weights(batch))[0])
        return {"loss": loss, **metric_states(self._metrics, outputs, batch.targets, rows_of(batch.inputs), host_array)}

    def predict(self, values: Mapping[str, Float32s], inputs: Any, keys: Mapping[str, Keys] = NO_KEYS) -> Array:
        """Return the outputs for inputs, shape (examples, *output_shape), as a NumPy array.

        `values` also has the rows of `keys`.
        """
        batch = Batch(-1, -1, np.arange(rows_of(inputs)), inputs, None)
        places = placed(self, batch, keys, keys).places if keys else {}
        return self.forward(values, inputs, None, np, places)[0]

    def to_user_object(self, values: Mapping[str, Float32s]) -> Self:
        """Return a copy of the model that has these weights: it can be called, and trained further."""
        model = type(self).__new__(type(self))
        model.__dict__.update(self.__dict__, _values={name: array.copy() for name, array in values.items()})
        return model

    def hold(self, own: Self, tables: Mapping[str, HeldTable]) -> None:
        """Give a copy that `to_user_object` returned the rows of all tables."""
        own._held = dict(tables)

    def forward(
        self,
        variables: Mapping[str, Array],
        inputs: Any,
        step: int | None,
        xp: Any,
        places: Mapping[str, Array] = NO_PLACES,
    ) -> tuple[Array, Callable[[Array], dict[str, Array]]]:
        """Return the outputs, shape (n, *output_shape), and the pullback of their gradient to all variables."""
        # step: seeds random operations; None: an evaluation, without any. places: by table, the index of each id's row
        # in `variables`.
        outputs, back = self.as_layer(variables, inputs, step, xp, places)
        return outputs, lambda gradient: back(gradient, False)[1]

    def as_layer(
        self,
        variables: Mapping[str, Array],
        inputs: Any,
        step: int | None,
        xp: Any,
        places: Mapping[str, Array] = NO_PLACES,
    ) -> tuple[Array, Pullback]:
        """Return the same with a layer's pullback, which also reaches the inputs: for models that contain this one."""
        self._check_inputs(inputs)
        x = inputs if self._looks_up is None else self._looks_up.placed(inputs, places)
        if not self._layers[0].of_indices:
            x = x.astype(variables[next(iter(self._declared))].dtype, copy=False)
        pulls: list[Pullback] = []
        for layer, (number, names) in zip(self._layers, self._parts, strict=True):
            key = None if step is None else (self._seed, step, number)
            x, pull = layer.apply({part: variables[name] for part, name in names.items()}, x, Pass(xp, key))
            pulls.append(pull)

        def pull_back(gradient: Array, to_input: bool) -> tuple[Array | None, dict[str, Array]]:
            found: dict[str, Array] = {}
            last = 0 if to_input else self._first
            by_output: Array | None = gradient
            for at in reversed(range(last, len(pulls))):
                assert by_output is not None, "every layer but the last one here was asked for it"
                by_output, own = pulls[at](by_output, to_input or at > last)
                found |= {name: own[part] for part, name in self._parts[at][1].items()}
            return by_output, found

        return x, pull_back

    def _check_inputs(self, inputs: Any) -> None:
        found = {name: a.shape[1:] for name, a in inputs.items()} if isinstance(inputs, dict) else inputs.shape[1:]
        if found != self._input_shape:
            raise WrongModel(f"an example's inputs have shape {found}; the model's input_shape is {self._input_shape}")

    def _named(self) -> Shape:
        """Name every layer's variables and return the shape of an output."""
        if not self._layers:
            raise ConfigurationError("Sequential: there is no layer")
        if isinstance(self._input_shape, dict) and not isinstance(self._layers[0], LooksUpLayer):
            raise ConfigurationError(
                "Sequential: input_shape is a dict, which a first layer takes that looks rows up: TableEmbedding"
            )
        shape: Any = self._input_shape
        seen, first = Counter[str](), None
        for at, layer in enumerate(self._layers):
            if not isinstance(layer, Layer):
                raise ConfigurationError(
                    f"Sequential: layer {at} is a layer, such as ps.layers.Dense(10); found {layer!r}"
                )
            if layer.of_indices and at:
                raise ConfigurationError(
                    f"Sequential: layer {at}, {layer!r}, takes whole numbers: it must be the first"
                )
            try:
                after, declared = layer.output_shape(shape), layer.variables(shape)
            except ConfigurationError as error:
                raise ConfigurationError(f"Sequential: layer {at}, {layer!r}: {error.message}") from None
            number = seen[layer.name]
            seen[layer.name] += 1
            names = {part: f"{layer.name}_{number}.{part}" for part in declared}
            if isinstance(layer, LooksUpLayer):
                self._looks_up, self.tables = layer, layer.own_tables()
                names |= {table.name: table.name for table in self.tables}
            self._declared |= {names[part]: replace(variable, name=names[part]) for part, variable in declared.items()}
            self._parts.append((number, names))
            if names and first is None:
                first = at
            shape = after
        if first is None or not self._declared:
            raise ConfigurationError("Sequential: no layer has variables, so that there is nothing to train")
        self._first = first
        return tuple(shape)


def _shapes(given: Any) -> Shapes:
    if isinstance(given, Mapping):
        return {name: _shape(of_input, least=0) for name, of_input in given.items()}  # data may have no numeric columns
    return _shape(given)


def _shape(given: Any, least: int = 1) -> Shape:
    if not isinstance(given, tuple | list) or not all(isinstance(n, int | np.integer) and n >= least for n in given):
        raise ConfigurationError(
            f"input_shape is a tuple of whole numbers of at least {least}, such as (28, 28), found {given!r}"
        )
    return tuple(int(n) for n in given)


def _loss(given: str | Loss) -> Loss:
    found = LOSSES.get(given) if isinstance(given, str) else given
    if not callable(found):
        raise ConfigurationError(f"loss {given!r} is unknown; allowed: {', '.join(LOSSES)}, or a function")
    return found


def _weights(batch: Batch) -> dict[str, Array]:
    return {} if batch.weights is None else {PARAMETER: batch.weights}


def _text(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
