"""Keras' metrics as states that are added: their variables, where those are sums over examples.

Knows no step. Called by `parashard.keras`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from parashard.errors import ConfigurationError
from parashard.metrics import Metric, Values
from parashard.models.keras_variables import keras

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
"""Classes of Keras whose `update_state` only adds to the variables; that of a derived class may be theirs."""


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
    """Raise ConfigurationError where a metric has several figures."""
    for name, figure in figures.items():
        shape = tuple(getattr(figure, "shape", ()))
        if math.prod(shape) != 1:
            raise ConfigurationError(
                f"metric {name!r} has figures of shape {shape}; allowed: one, such as F1Score(average='macro')"
            )


def classes_of(model: Any, targets: Any, outputs: Any) -> list[int | None]:
    """Return how many classes each target of a built model is one of; None: it is none, or its loss leaves some out."""
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
    """Return metrics in the order of their variables, those within others in their place."""
    return [one for metric in metrics for one in (flat(metric.metrics) if hasattr(metric, "metrics") else [metric])]


class _MeanOf(Metric):
    """A mean, with what it adds up."""

    def __init__(self, name: str) -> None:
        self.name = name


class Compiled(Metric):
    """A figure of a compiled model; the state is the variables of all of its metrics, one after the other."""

    def __init__(self, model: Any, name: str) -> None:
        self._model, self.name = model, name
        self.length = sum(math.prod(variable.shape) for variable in model.metrics_variables)
        self._mean_at = self._place_of_mean()

    def own(self, values: Values | None = None) -> tuple[Metric, Values]:
        """Return a smaller metric that has this figure, if it is a mean, and its part of the state; else this one."""
        values = np.zeros(self.length) if values is None else values
        if self._mean_at is None:
            return self, values
        return _MeanOf(self.name), values[self._mean_at : self._mean_at + 2]

    def _place_of_mean(self) -> int | None:
        """Return where the state has a sum and a count whose quotient is the figure; None: the figure is no mean."""
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
        """Return what Keras makes of the variables."""
        mapping, start = [], 0
        for variable in self._model.metrics_variables:
            stop = start + math.prod(variable.shape)
            own = values[start:stop].reshape(tuple(variable.shape))
            mapping.append((variable, keras.ops.convert_to_tensor(own, dtype=variable.dtype)))
            start = stop
        with keras.StatelessScope(mapping):
            figure = self._model.get_metrics_result()[self.name]
            return float(keras.ops.reshape(figure, ()))  # F1Score has shape (1,) where there is one class
