"""A Keras model's loss, metrics and outputs, as functions of tensors that can be compiled.

The model's own variables are neither read nor written: each function computes in a `keras.StatelessScope` with the
tensors in their place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from parashard.errors import ConfigurationError, WrongModel
from parashard.metrics import Metric, Values
from parashard.models.framework import FROZEN
from parashard.models.keras.variables import ModelVariables, is_seed, keras, shared_seed

_SUMS = (
    "AUC",
    "FBetaScore",
    "IoU",
    "Precision",
    "R2Score",
    "Recall",
    "RootMeanSquaredError",
    "SensitivityAtSpecificity",
    "TruePositives",
)
"""Keras metrics whose `update_state` only adds to the variables; a derived class may inherit it."""


def check_sums(metrics: Iterable[Any]) -> None:
    """Raise ConfigurationError where a metric's variables are not known to be sums over examples."""
    adding = [getattr(keras.metrics, name).update_state for name in _SUMS]
    for metric in metrics:
        kind = type(metric)
        if kind.result is not keras.metrics.Mean.result and kind.update_state not in adding:
            raise ConfigurationError(
                f"metric {metric.name!r} is not known to be a sum over examples, and evaluations add those of their "
                "batches: evaluate it in Keras, trainer.model().evaluate(...)"
            )


def check_single(figures: Mapping[str, Any]) -> None:
    """Raise ConfigurationError if a metric is not a single number."""
    for name, figure in figures.items():
        shape = tuple(getattr(figure, "shape", ()))
        if math.prod(shape) != 1:
            raise ConfigurationError(
                f"metric {name!r} has figures of shape {shape}; allowed: one, such as F1Score(average='macro')"
            )


def classes_of(model: Any, targets: Any, outputs: Any) -> list[int | None]:
    """Return the number of classes of each target; None: it is not a class number, or its loss ignores a class."""
    losses = model._compile_loss._flat_losses or []
    theirs, ours = keras.tree.flatten(targets), keras.tree.flatten(outputs)
    if not len(losses) == len(theirs) == len(ours):
        return [None] * len(theirs)
    found: list[int | None] = []
    for one, output in zip(losses, ours, strict=True):
        settings = getattr(one.loss, "_fn_kwargs", {})
        numbered = getattr(one.loss, "fn", None) is keras.losses.sparse_categorical_crossentropy
        leaves_out = settings.get("ignore_class") is not None
        found.append(output.shape[settings.get("axis", -1)] if numbered and not leaves_out else None)
    return found


def flat(metrics: Iterable[Any]) -> list[Any]:
    """Return metrics in the order of their variables, with nested ones in place of their parent."""
    return [one for metric in metrics for one in (flat(metric.metrics) if hasattr(metric, "metrics") else [metric])]


class Compiled(Metric):
    """A metric of a compiled model; the state is the variables of all of the model's metrics, concatenated."""

    def __init__(self, model: Any, name: str) -> None:
        self._model, self.name = model, name
        self.length = sum(math.prod(variable.shape) for variable in model.metrics_variables)
        self._mean_at = self._place_of_mean()

    def own(self, values: Values | None = None) -> tuple[Metric, Values]:
        """Return a smaller equal metric and its part of the state if this is a mean, else this one and its state."""
        values = np.zeros(self.length) if values is None else values
        if self._mean_at is None:
            return self, values
        return Metric(self.name), values[self._mean_at : self._mean_at + 2]

    def _place_of_mean(self) -> int | None:
        """Return the index in the state of a sum and a count whose quotient is the figure; None: it is not a mean."""
        probe, start = np.zeros(self.length), 0
        for metric in flat(self._model.metrics):
            length = sum(math.prod(variable.shape) for variable in metric.variables)
            if type(metric).result is keras.metrics.Mean.result and length == 2:
                probe[:] = 0.0
                probe[start : start + 2] = 3.0, 2.0
                if self.figure(probe) == 1.5:
                    return start
            start += length
        return None

    def figure(self, values: Values) -> float:
        """Return the result of Keras for these variables."""
        mapping, start = [], 0
        for variable in self._model.metrics_variables:
            stop = start + math.prod(variable.shape)
            own = values[start:stop].reshape(tuple(variable.shape))
            mapping.append((variable, keras.ops.convert_to_tensor(own, dtype=variable.dtype)))
            start = stop
        with keras.StatelessScope(mapping):
            figure = self._model.get_metrics_result()[self.name]
            return float(keras.ops.reshape(figure, ()))  # F1Score has shape (1,) where there is one class


class Functions:
    """A model's loss, metrics and outputs as functions of its variables."""

    def __init__(self, model: Any, found: ModelVariables) -> None:
        self._model, self.found = model, found
        self.tells_metrics = False

    def loss(
        self, trained: list[Any], fixed: list[Any], inputs: Any, targets: Any, weights: Any
    ) -> tuple[Any, tuple[dict[str, Any], list[Any]]]:
        """Return the loss of a training step, the new values of state by name, and the metrics' variables."""
        model = self._model
        with keras.StatelessScope(self._mapping(trained, fixed), collect_losses=True) as scope:
            held = [variable for variable in self.found.in_order() if not is_seed(variable)]
            before = [scope.get_current_value(variable) for variable in held]
            outputs = model(inputs, training=True)
            loss = model.compute_loss(x=inputs, y=targets, y_pred=outputs, sample_weight=weights, training=True)
            after = {}
            for variable, value in zip(held, before, strict=True):
                kind, now = self.found.kinds.get(variable.path, FROZEN), scope.get_current_value(variable)
                if kind not in ("", FROZEN):
                    after[variable.path] = now
                elif now is not value and not kind:
                    raise WrongModel(
                        f"{variable.path!r} is trained, and a layer writes it while a step is computed: the shards "
                        "move it, and that write would be lost; leave the layer out, such as SpectralNormalization"
                    )
                elif now is not value:
                    raise WrongModel(
                        f"{variable.path!r} is written while a step is computed, and has no gradient to push; say how "
                        f"it changes: state={{{variable.path!r}: 'average:0.1'}} for a running average, 'counter' for "
                        "whole numbers, 'sum'"
                    )
            known = {id(variable) for variable in (*self.found.in_order(), *model.metrics_variables, *shared_seed())}
            if scope.state_mapping.keys() - known:
                raise WrongModel(
                    f"a variable that is no weight of {model.name!r}, such as the state of a stateful RNN, is written "
                    "while a step is computed, and that write would be lost: make it by add_weight of its layer, and "
                    "say by state= how it changes"
                )
            sums = []
            if self.tells_metrics:
                told = keras.tree.map_structure(keras.ops.stop_gradient, outputs)
                model.compute_metrics(inputs, targets, told, sample_weight=weights)
                sums = [variable.value for variable in model.metrics_variables]
        shape = getattr(loss, "shape", None)
        if shape is None or tuple(shape) != ():
            found = type(loss).__name__ if shape is None else f"shape {tuple(shape)}"
            raise WrongModel(f"the loss must be one number, the mean over a batch; found {found}")
        return loss, (after, sums)

    def metrics(
        self, trained: list[Any], fixed: list[Any], inputs: Any, targets: Any, weights: Any
    ) -> tuple[Any, list[Any]]:
        """Return the loss of a batch, and the metrics' variables after it: in the scope they begin at zero."""
        model = self._model
        with keras.StatelessScope(self._mapping(trained, fixed), collect_losses=True):
            outputs = model(inputs, training=False)
            loss = model.compute_loss(x=inputs, y=targets, y_pred=outputs, sample_weight=weights, training=False)
            model.compute_metrics(inputs, targets, outputs, sample_weight=weights)
            return loss, [variable.value for variable in model.metrics_variables]

    def output(self, trained: list[Any], fixed: list[Any], inputs: Any) -> Any:
        with keras.StatelessScope(self._mapping(trained, fixed)):
            return self._model(inputs, training=False)

    def _mapping(self, trained: list[Any], fixed: list[Any]) -> list[tuple[Any, Any]]:
        return [
            (variable, keras.ops.reshape(value, variable.shape))
            for variable, value in zip(self.found.in_order(), [*trained, *fixed], strict=True)
        ]
