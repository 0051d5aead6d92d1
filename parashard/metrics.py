"""Metrics with additive state: `import parashard as ps`, then `ps.metrics`.

A metric's state is an array of fixed length, a sum over examples; the state of two sets of examples is the sum of both
arrays, in any order and grouping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from parashard.errors import ConfigurationError, WrongModel
from parashard.process.arguments import checked_whole

VALUES_MAX = 4096
"""Most numbers in the states of a step's metrics together; metrics with longer states are for evaluations only."""
METRICS_MAX = 64


def mean(values: Sequence[float]) -> float:
    """Return a sum divided by its count; NaN if the count is 0."""
    return values[0] / values[1] if values[1] else math.nan


def _total(values: Sequence[float]) -> float:
    """Return a sum."""
    return values[0]


def _area(values: Sequence[float]) -> float:
    """Return the area under the ROC curve, from the histogram of 1s followed by that of 0s."""
    bins = len(values) // 2
    ones, zeros = values[:bins], values[bins:]
    pairs = sum(ones) * sum(zeros)
    if not pairs:
        return math.nan
    ordered = (one * (up_to - zero / 2) for one, zero, up_to in zip(ones, zeros, accumulate(zeros), strict=True) if one)
    return sum(ordered) / pairs


def _entropy_ratio(values: Sequence[float]) -> float:
    """Return the normalised entropy, from the sum of cross-entropies and the counts of 1s and of examples."""
    entropies, ones, examples = values
    if not 0 < ones < examples:
        return math.nan
    share = ones / examples
    return entropies / examples / -(share * math.log(share) + (1 - share) * math.log1p(-share))


FIGURES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": mean,
    "sum": _total,
    "auc": _area,
    "normalized_entropy": _entropy_ratio,
}


def figure(kind: str, values: Sequence[float]) -> float | None:
    """Return a state's figure; NaN if a number is not finite, None if only the metric itself can compute it."""
    make = FIGURES.get(kind)
    if make is None:
        return None
    try:
        return make(values) if values and all(map(math.isfinite, values)) else math.nan
    except (ValueError, IndexError, OverflowError):
        return math.nan


Values = npt.NDArray[np.float64]

THRESHOLDS = 200  # Keras' default
THRESHOLDS_MAX = 100_000
LOGIT_MAX = 16.0  # range of thresholds that are equally spaced in the logit


class Metric:
    """A figure computed from sums over examples. Derive your own metrics from it.

    Attributes
    ----------
    name : str
        Name of the figure.
    length : int
        Numbers in the state.

    Examples
    --------
    >>> class Recall(Metric):
    ...     name, length = "recall", 2
    ...
    ...     def sums(self, outputs, targets):
    ...         return [((outputs > 0) & (targets == 1)).sum(), (targets == 1).sum()]
    ...
    ...     def figure(self, values):
    ...         return values[0] / values[1] if values[1] else float("nan")
    >>> first = Recall().of(np.array([1.0, -1.0]), np.array([1, 1]))
    >>> float(first), float(first + Recall().of(np.array([2.0]), np.array([1])))
    (0.5, 0.6666666666666666)
    """

    name = ""
    length = 2
    _kind: ClassVar[str] = "mean"  # key in FIGURES

    def __init__(self, name: str | None = None) -> None:
        if name is not None:
            self.name = name

    def sums(self, outputs: Any, targets: Any) -> Any:
        """Return the state of some examples: `length` numbers, sums over these examples.

        Parameters
        ----------
        outputs, targets : ndarray
            One row for each example; several outputs come in the structure that the model returns.
        """
        raise WrongModel(f"metric {self.name!r}: {type(self).__name__} has no method sums")

    def figure(self, values: Values) -> float:
        """Return the figure of a state: by default its first number divided by its second, a mean (NaN for 0 / 0)."""
        return FIGURES[self._kind](values.tolist())

    def of(self, outputs: Any, targets: Any) -> Sums:
        """Return the state of some examples.

        Raises
        ------
        WrongModel
            If the metric is not defined for such outputs or targets.
        """
        return Sums(self, self.sums(outputs, targets))


@dataclass(frozen=True, init=False, eq=False)
class Sums:
    """State of a metric over some examples; `a + b` combines two states, and `float(a)` is the figure.

    Counts are exact up to 2^53. A value that is not finite makes the figure NaN or infinite, as in a mean.

    Attributes
    ----------
    metric : Metric
    values : ndarray of float64, shape (metric.length,)

    Raises
    ------
    WrongModel
        If the values are not `metric.length` real numbers, or states of different metrics are added.
    """

    metric: Metric
    values: Values

    def __init__(self, metric: Metric, values: Any) -> None:
        due = f"metric {metric.name!r}: the state is {metric.length} real numbers"
        try:
            array = np.asarray(values)
        except ValueError:
            raise WrongModel(f"{due}, found a {type(values).__name__} of unequal parts") from None
        if array.shape != (metric.length,) or array.dtype.kind not in "fiub":
            raise WrongModel(f"{due}, found {array.dtype} of shape {array.shape}")
        object.__setattr__(self, "metric", metric)
        object.__setattr__(self, "values", array.astype(np.float64))

    def __add__(self, other: Sums) -> Sums:
        if type(other.metric) is not type(self.metric) or other.metric.length != self.metric.length:
            raise WrongModel(
                f"metric {self.metric.name!r}: states of {type(self.metric).__name__} with {self.metric.length} numbers"
                f" and of {type(other.metric).__name__} with {other.metric.length} cannot be added"
            )
        return Sums(self.metric, self.values + other.values)

    def __float__(self) -> float:
        return float(self.metric.figure(self.values))


class Mean(Metric):
    """The mean of one number per example; wraps a function `f(outputs, targets)` among a model's metrics.

    Parameters
    ----------
    function : callable (outputs, targets) -> numbers
        Returns one number per example, or one number, the mean over these examples.
    name : str
    """

    def __init__(self, function: Callable[[Any, Any], Any], name: str) -> None:
        self.function, self.name = function, name

    def sums(self, outputs: Any, targets: Any) -> Any:
        """Return the sum of the numbers, and the number of examples."""
        return self.sums_of(self.function(outputs, targets), len(targets))

    def sums_of(self, result: Any, examples: int) -> list[float]:
        """Return the state for the function's result, a NumPy array or number, on this many examples."""
        due = f"metric {self.name!r} returns one number, the mean over the examples, or one an example"
        try:
            array = np.asarray(result)
        except ValueError:
            raise WrongModel(f"{due}; found a {type(result).__name__}") from None
        if array.dtype.kind not in "fiub":
            raise WrongModel(f"{due}; found {'a ' + type(result).__name__ if array.ndim == 0 else array.dtype}")
        if array.size == 1:
            return [float(array.reshape(())) * examples, examples]
        if array.shape not in ((examples,), (examples, 1)):
            raise WrongModel(f"{due}; found shape {array.shape} for {examples} examples")
        return [float(array.sum(dtype=np.float64)), examples]


class Added(Metric):
    """The sum of one number per example, such as a loss with `reduction="sum"`."""

    _kind = "sum"


class Accuracy(Metric):
    """The fraction of targets whose class has the greatest output; the last axis has one output per class.

    Targets are class numbers, or one number per class, of which the greatest marks the class.
    """

    name = "accuracy"

    def sums(self, outputs: Any, targets: Any) -> Any:
        """Return the number of correct targets, and of all."""
        scores, classes = _of_classes(self.name, outputs, targets)
        if scores.shape[-1] == 1:
            raise WrongModel(f"metric {self.name!r} is of one output a class, found one: take 'binary_accuracy'")
        return [(scores.argmax(-1) == classes).sum(), classes.size]


class TopK(Metric):
    """The fraction of targets whose class is among the k greatest outputs; the last axis has one output per class.

    Classes that tie with the k-th count, as in Keras; an example with a NaN output never does.

    Parameters
    ----------
    k : int
        At most the number of classes.
    name : str
    """

    def __init__(self, k: int = 5, *, name: str = "top_k_categorical_accuracy") -> None:
        self.k, self.name = checked_whole("TopK: k", k), name

    def sums(self, outputs: Any, targets: Any) -> Any:
        """Return the number of targets among the k, and of all."""
        scores, classes = _of_classes(self.name, outputs, targets)
        known = scores.shape[-1]
        if self.k > known:
            raise WrongModel(f"metric {self.name!r}: k is {self.k}, and the model has {known} classes")
        numbers = classes.astype(np.int64)
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < known):
            raise WrongModel(f"metric {self.name!r}: targets are classes from 0 to {known - 1}")
        own = np.take_along_axis(scores, numbers[..., None], -1)
        among = ((scores > own).sum(-1) < self.k) & ~np.isnan(scores).any(-1)
        return [among.sum(), classes.size]


class BinaryAccuracy(Metric):
    """The fraction of correctly predicted targets, 0 or 1; the prediction is 1 if the output exceeds the threshold.

    Parameters
    ----------
    threshold : float
        0 for logits, 0.5 for probabilities.
    name : str
    """

    def __init__(self, threshold: float = 0.0, *, name: str = "binary_accuracy") -> None:
        self.threshold, self.name = threshold, name

    def sums(self, outputs: Any, targets: Any) -> Any:
        """Return the number of correct targets, and of all."""
        scores, wanted = _alike(self.name, outputs, targets)
        return [((scores > self.threshold) == (wanted > 0.5)).sum(), wanted.size]


class MeanAbsoluteError(Metric):
    """The mean of abs(output - target) over all numbers of all examples."""

    name = "mean_absolute_error"

    def sums(self, outputs: Any, targets: Any) -> Any:
        """Return the sum in float64, and the number of targets."""
        found, wanted = _alike(self.name, outputs, targets)
        return [np.abs(np.subtract(found, wanted, dtype=np.float64)).sum(), wanted.size]


class MeanSquaredError(Metric):
    """The mean of (output - target)^2 over all numbers of all examples."""

    name = "mean_squared_error"

    def sums(self, outputs: Any, targets: Any) -> Any:
        """Return the sum in float64, and the number of targets."""
        found, wanted = _alike(self.name, outputs, targets)
        return [np.square(np.subtract(found, wanted, dtype=np.float64)).sum(), wanted.size]


class AUC(Metric):
    """The area under the ROC curve of two classes: the probability that a 1 has a greater output than a 0.

    With n thresholds, by default 0, 1/(n - 1), ..., 1, the state is two histograms of n - 1 bins, of outputs of 1s and
    of 0s between neighbouring thresholds. Pairs in one bin count as half (the trapezoidal rule, as in Keras), so the
    error is at most half the fraction of pairs in one bin. NaN if either class has no example.

    Parameters
    ----------
    num_thresholds : int
        n; more thresholds reduce the error if many outputs lie close together.
    from_logits : bool
        True: outputs are logits, and their sigmoid is taken; False: they are probabilities.
    name : str
    spacing : {"probability", "both"}
        "probability": thresholds are equally spaced in the probability, as in Keras. "both": every second one is
        equally spaced in the logit instead, from -16 to 16, so that the error does not grow if 1s, or 0s, are rare.
    """

    _kind = "auc"

    def __init__(
        self,
        num_thresholds: int = THRESHOLDS,
        *,
        from_logits: bool = False,
        name: str = "auc",
        spacing: Literal["probability", "both"] = "probability",
    ) -> None:
        self.bins = checked_whole("AUC: num_thresholds", num_thresholds, 2, THRESHOLDS_MAX) - 1
        if spacing not in ("probability", "both"):
            raise ConfigurationError(f'AUC(spacing={spacing!r}): allowed are "probability" and "both"')
        self.length = 2 * self.bins
        self.from_logits, self.name = from_logits, name
        self._inner = np.arange(1, self.bins) / self.bins
        if spacing == "both":
            self._inner[::2] = _sigmoid(LOGIT_MAX * (2 * self._inner[::2] - 1))
            self._inner.sort()

    def sums(self, outputs: Any, targets: Any) -> Any:
        """Return the histogram of the 1s, then that of the 0s."""
        scores, wanted = (_array(self.name, array) for array in (outputs, targets))
        if not len(scores) == scores.size == wanted.size:
            raise WrongModel(
                f"metric {self.name!r} is of one output an example for two classes, found outputs of shape "
                f"{scores.shape} for targets of shape {wanted.shape}"
            )
        scores, wanted = scores.ravel().astype(np.float64), wanted.ravel()
        if not ((wanted == 0) | (wanted == 1)).all():
            raise WrongModel(f"metric {self.name!r}: targets are 0 or 1")
        if self.from_logits:
            scores = _sigmoid(scores)
        if not ((scores >= 0) & (scores <= 1)).all():
            outside = scores[~((scores >= 0) & (scores <= 1))][0]
            raise WrongModel(
                f"metric {self.name!r}: an output is {outside:.4g}; due are probabilities from 0 to 1, or logits with "
                f"ps.metrics.AUC(from_logits=True)"
            )
        bins = np.searchsorted(self._inner, scores, side="left")
        return np.concatenate([np.bincount(bins[wanted == one], minlength=self.bins) for one in (1, 0)])


def _sigmoid(logits: Values) -> Values:
    return 0.5 + 0.5 * np.tanh(0.5 * logits)


class NormalizedEntropy(Metric):
    """The mean cross-entropy of outputs for two classes, divided by that of the base rate (He et al., ADKDD 2014).

    1 for a model that always predicts the fraction of 1s; lower is better. NaN if a class has no example.

    Parameters
    ----------
    from_logits : bool
        True: outputs are logits; False: they are probabilities.
    name : str
    """

    length = 3
    _kind = "normalized_entropy"

    def __init__(self, *, from_logits: bool = False, name: str = "normalized_entropy") -> None:
        self.from_logits, self.name = from_logits, name

    def sums(self, outputs: Any, targets: Any) -> Any:
        """Return the sum of cross-entropies, the number of 1s, and the number of targets."""
        scores, wanted = (array.astype(np.float64) for array in _alike(self.name, outputs, targets))
        if not self.from_logits:
            inside = np.clip(scores, 1e-15, 1 - 1e-15)
            scores = np.log(inside) - np.log1p(-inside)
        each = np.maximum(scores, 0) - scores * wanted + np.log1p(np.exp(-np.abs(scores)))
        return [each.sum(), wanted.sum(), wanted.size]


def kind_of(metric: Metric) -> str:
    """Return the key in `FIGURES` of a metric's figure; "" if only the metric itself can compute it."""
    return metric._kind if type(metric).figure is Metric.figure else ""


NAMED: Mapping[str, Callable[[str], Metric]] = {
    "accuracy": Accuracy,
    "binary_accuracy": lambda name: BinaryAccuracy(name=name),
    "top_k_categorical_accuracy": lambda name: TopK(name=name),
    "auc": lambda name: AUC(name=name),
    "normalized_entropy": lambda name: NormalizedEntropy(name=name),
    "mae": MeanAbsoluteError,
    "mean_absolute_error": MeanAbsoluteError,
    "mse": MeanSquaredError,
    "mean_squared_error": MeanSquaredError,
}
"""Makes a metric of each known name; its figure has that name."""


def _array(name: str, given: Any) -> np.ndarray[Any, Any]:
    if not isinstance(given, np.ndarray):
        raise WrongModel(
            f"metric {name!r} is of one array of outputs and one of targets, found a {type(given).__name__}: give a "
            "function of the model's outputs and targets"
        )
    return given if given.dtype.kind in "fiub" else given.astype(np.float32)  # such as bfloat16


def _of_classes(name: str, outputs: Any, targets: Any) -> tuple[Any, Any]:
    """Return outputs with one per class on the last axis, and class numbers."""
    scores, wanted = _array(name, outputs), _array(name, targets)
    if scores.ndim > 1 and scores.shape[-1] > 1 and wanted.shape == scores.shape:
        return scores, wanted.argmax(-1)
    if scores.ndim and wanted.shape in (scores.shape[:-1], (*scores.shape[:-1], 1)):
        return scores, wanted.reshape(scores.shape[:-1])
    raise WrongModel(
        f"metric {name!r} is of one output a class on the last axis, found outputs of shape {scores.shape} for targets "
        f"of shape {wanted.shape}"
    )


def _alike(name: str, outputs: Any, targets: Any) -> tuple[Any, Any]:
    """Return outputs and targets in one shape; a last axis of length 1 is dropped."""
    found, wanted = _array(name, outputs), _array(name, targets)
    shapes = [array.shape[:-1] if array.ndim > 1 and array.shape[-1] == 1 else array.shape for array in (found, wanted)]
    if shapes[0] != shapes[1]:
        raise WrongModel(
            f"metric {name!r} is of one output a target, found outputs of shape {found.shape} for targets of shape "
            f"{wanted.shape}"
        )
    return found.reshape(shapes[0]), wanted.reshape(shapes[0])
