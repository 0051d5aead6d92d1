"""What evaluations tell: a model's metrics by their names, and their states over the batches of an evaluation.

The one place where batches are put together. Knows no framework. Called by the models, by
`parashard_worker.computing` and by `parashard.api.models`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parashard.data.tree import map_leaves
from parashard.errors import ConfigurationError
from parashard.metrics import NAMED, Mean, Metric, Sums

Given = str | Metric | Callable[[Any, Any], Any]
"""A known name, a metric, or a function of outputs and targets."""


def metrics_by_name(metrics: Sequence[Given]) -> dict[str, Metric]:
    """Return metrics by their names.

    Raises
    ------
    ConfigurationError
        If a name is unknown, or two have the same.
    """
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        raise ConfigurationError(f"metrics is a list of names and functions, such as ['accuracy'], found {metrics!r}")
    found: dict[str, Metric] = {}
    for given in metrics:
        metric = _metric(given)
        name = metric.name
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"metric {given!r} has no name: give the class a text as its name")
        if name in found or name == "loss":
            raise ConfigurationError(f"two metrics are named {name!r}")
        found[name] = metric
    return found


def _metric(given: Given) -> Metric:
    if isinstance(given, Metric):
        return given
    if isinstance(given, str) and given in NAMED:
        return NAMED[given](given)
    if isinstance(given, type) and issubclass(given, Metric):
        raise ConfigurationError(f"metric {given.__name__} is a class: give a metric, such as {given.__name__}()")
    if isinstance(given, str) or not callable(given):
        raise ConfigurationError(
            f"metric {given!r} is unknown; allowed: {', '.join(NAMED)}, one of ps.metrics, or a function"
        )
    return Mean(given, getattr(given, "__name__", "metric"))


def judged(
    metrics: Mapping[str, Metric], outputs: Any, targets: Any, examples: int, host: Callable[[Any], Any]
) -> dict[str, Sums]:
    """Return the states of metrics for a batch.

    Parameters
    ----------
    metrics : mapping of str to Metric
    outputs, targets
        The framework's arrays: functions get them as they are.
    examples : int
        How many there are.
    host : callable
        From such an array to NumPy's; other values pass.
    """
    found: dict[str, Sums] = {}
    on_host: tuple[Any, Any] | None = None
    for name, metric in metrics.items():
        if isinstance(metric, Mean):
            found[name] = Sums(metric, metric.sums_of(host(metric.function(outputs, targets)), examples))
            continue
        if on_host is None:
            on_host = map_leaves(host, outputs), map_leaves(host, targets)
        found[name] = metric.of(*on_host)
    return found


class Totals:
    """The figures of examples that come in batches."""

    def __init__(self) -> None:
        self._sums: dict[str, Sums] = {}

    def add(self, metrics: Mapping[str, Any], examples: int) -> None:
        """Add what a model tells of a batch: states, and numbers that are means over so many examples."""
        for name, value in metrics.items():
            sums = (
                value
                if isinstance(value, Sums)
                else Sums(Mean(_no_function, name), [float(value) * examples, examples])
            )
            self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    def figures(self) -> dict[str, float]:
        """Return the figures of all batches by name."""
        return {name: float(sums) for name, sums in self._sums.items()}


def _no_function(outputs: Any, targets: Any) -> Any:
    raise AssertionError("a number is a mean already")
