"""Metrics of evaluations: a model's metrics by name, and their states over the batches of an evaluation.

The only place where batches are combined.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from parashard.data.base import Indices
from parashard.data.tree import leaves, map_leaves
from parashard.errors import ConfigurationError, WrongModel
from parashard.metrics import NAMED, Mean, Metric, Sums

Given = str | Metric | Callable[[Any, Any], Any]
"""A known name, a metric, a function of outputs and targets, or an object such as those of torchmetrics."""

_SNAKE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_TOLERANCE, _NOISE = 1e-4, 1e-2  # relative; noise is the difference between two orders of the examples


def metrics_by_name(metrics: Sequence[Given]) -> dict[str, Metric]:
    """Return metrics by their names."""
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        raise ConfigurationError(f"metrics is a list of names and functions, such as ['accuracy'], found {metrics!r}")
    found: dict[str, Metric] = {}
    for given in metrics:
        metric = _metric(given)
        name = metric.name
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"metric {given!r} has no name: give the class a text as its name")
        if name in found or name == "loss":
            raise ConfigurationError(
                f"two metrics are named {name!r}: give one of them an attribute `name`, or a function another __name__"
            )
        found[name] = metric
    return found


def _metric(given: Given) -> Metric:
    if isinstance(given, Metric):
        return given
    if isinstance(given, str) and given in NAMED:
        return NAMED[given](given)
    if isinstance(given, type) and issubclass(given, Metric):
        raise ConfigurationError(f"metric {given.__name__} is a class: give a metric, such as {given.__name__}()")
    if all(callable(getattr(given, method, None)) for method in ("update", "compute", "reset")):
        return Updated(given)
    if callable(getattr(given, "update_state", None)):
        raise ConfigurationError(
            f"metric {type(given).__name__} keeps a state between its calls, so its figure would depend on the size of "
            "the batches; allowed: ps.metrics, a function, or an object with update(outputs, targets), compute() and "
            "reset()"
        )
    if isinstance(given, str) or not callable(given):
        raise ConfigurationError(
            f"metric {given!r} is unknown; allowed: {', '.join(NAMED)}, one of ps.metrics, or a function"
        )
    return Mean(given, getattr(getattr(given, "func", given), "__name__", type(given).__name__))


class Updated(Metric):
    """A metric that keeps its own state, such as one of torchmetrics: an object with `update`, `compute`, `reset`.

    It is copied for each evaluation, updated by each batch of it, and computed once.
    """

    def __init__(self, given: Any) -> None:
        if isinstance(given, Mapping) or hasattr(given, "keys"):
            raise ConfigurationError(f"metric {type(given).__name__} has several figures: list its metrics one by one")
        named = getattr(given, "name", None)
        self.name = named if isinstance(named, str) else _SNAKE.sub("_", type(given).__name__).lower()
        self._given = given

    def begun(self, outputs: Any) -> Any:
        """Return a copy with its state reset, on the outputs' device."""
        state = copy.deepcopy(self._given)
        state.reset()
        device = getattr(next((leaf for _, leaf in leaves(outputs)), None), "device", None)
        return state.to(device) if device is not None and callable(getattr(state, "to", None)) else state

    def figure_of(self, state: Any) -> float:
        """Return the figure of a state."""
        found = state.compute()
        shape = tuple(getattr(found, "shape", ()))
        if not hasattr(found, "__float__") or any(size != 1 for size in shape):
            what = f"an array of shape {shape}" if shape else type(found).__name__
            raise WrongModel(f"metric {self.name!r}: compute() returned {what}; due is one number")
        return float(found)


class Update(NamedTuple):
    """A batch's update of a metric that keeps its own state."""

    metric: Updated
    outputs: Any
    targets: Any


MetricPart = float | Sums | Update
"""A metric of a batch: a mean over its examples, or an addition to a state."""


def metric_states(
    metrics: Mapping[str, Metric], outputs: Any, targets: Any, examples: int, host: Callable[[Any], Any]
) -> dict[str, Sums | Update]:
    """Return the states of metrics for a batch."""
    found: dict[str, Sums | Update] = {}
    on_host: tuple[Any, Any] | None = None
    for name, metric in metrics.items():
        if isinstance(metric, Mean):
            found[name] = Sums(metric, metric.sums_of(host(metric.function(outputs, targets)), examples))
            continue
        if isinstance(metric, Updated):
            found[name] = Update(metric, outputs, targets)
            continue
        if on_host is None:
            on_host = map_leaves(host, outputs), map_leaves(host, targets)
        found[name] = metric.of(*on_host)
    return found


def added_up(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return the metrics whose states are sums: only these can be added over steps of several processes."""
    return {name: metric for name, metric in metrics.items() if not isinstance(metric, Updated)}


class Totals:
    """Metrics accumulated over batches."""

    def __init__(self) -> None:
        self.sums: dict[str, Sums] = {}
        self._states: dict[str, tuple[Updated, Any]] = {}  # of metrics that keep their own state

    def add(self, metrics: Mapping[str, Any], examples: int) -> None:
        """Add a batch's metrics: states, and means over `examples` examples."""
        for name, value in metrics.items():
            if isinstance(value, Update):
                if name not in self._states:
                    self._states[name] = value.metric, value.metric.begun(value.outputs)
                self._states[name][1].update(value.outputs, value.targets)
                continue
            sums = value if isinstance(value, Sums) else Sums(Metric(name), [float(value) * examples, examples])
            self.sums[name] = self.sums[name] + sums if name in self.sums else sums

    def figures(self) -> dict[str, float]:
        """Return the figures of all batches by name."""
        found = {name: float(sums) for name, sums in self.sums.items()}
        return found | {name: metric.figure_of(state) for name, (metric, state) in self._states.items()}


def figures_not_means(
    evaluate: Callable[[Indices], Mapping[str, Any]], order: Indices
) -> dict[str, tuple[float, float]]:
    """Return the figures of a batch that are not means over its examples, each with the mean of its two halves."""
    # Only numbers and results of metric functions are checked. A figure that changes with the order of the examples,
    # such as by random numbers, is not judged. The less alike the halves of `order` are, the more is detected.
    examples, half = len(order), len(order) // 2
    parts = np.sort(order), np.sort(order)[::-1], order[:half], order[half:]
    whole, turned, first, second = ({name: _mean(value) for name, value in evaluate(part).items()} for part in parts)
    found = {}
    for name, value in whole.items():
        if value is None or not math.isfinite(value):
            continue
        of_halves = (first[name] * half + second[name] * (examples - half)) / examples
        noise = abs(value - turned[name])
        rounded = not np.float32(value).view(np.uint32) & 0x1FFF  # to 16 bits, perhaps
        tolerance = (_NOISE if rounded else _TOLERANCE) * abs(value) + 10 * noise
        if noise <= _NOISE * abs(value) and not abs(value - of_halves) <= tolerance:
            found[name] = value, of_halves
    return found


def _mean(value: Any) -> Any:
    """Return a figure that should be a mean over examples; None if it is computed from a state."""
    if isinstance(value, Update) or (isinstance(value, Sums) and not isinstance(value.metric, Mean)):
        return None
    return float(value)
