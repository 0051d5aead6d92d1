"""TrainingFigures: what the steps of each epoch add up to, each step once.

Pure. A step is computed again where a shard has lost it, and reported again where a coordinator is new. The first
report counts. Invariant: a step is counted exactly if its examples and its loss are in the sums.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from parashard.metrics import FIGURES, figure, mean
from parashard.plan.intervals import IntervalSet

if TYPE_CHECKING:
    from parashard_coordinator.core.saved import Saved

EPOCHS_KEPT = 100
"""Epochs whose figures are kept, the newest."""
_FIXED_BITS = 60  # of a loss's fraction: whole numbers add up to the same in any order


class MetricSums(NamedTuple):
    """The sums of a metric over some examples, and the name of what makes its figure of them; "": only the metric."""

    name: str
    kind: str
    values: Sequence[float]


def known_figures(metrics: Iterable[MetricSums]) -> dict[str, float]:
    """Return the figures of metrics that are known here, by name; the loss is none of them."""
    figures = {one.name: figure(one.kind, one.values) for one in metrics if one.name != "loss"}
    return {name: value for name, value in sorted(figures.items()) if value is not None}


@dataclass
class _Epoch:
    """What the counted steps of an epoch add up to."""

    steps: int = 0
    loss: int = 0  # each step's as often as its batch has examples, in units of 2**-60
    examples: int = 0  # of the steps that have a loss
    finite: bool = True
    metrics: dict[str, MetricSums] = field(default_factory=dict)

    def add(self, examples: int, loss: float, metrics: Sequence[MetricSums]) -> None:
        weighed = loss * examples
        self.finite &= math.isfinite(weighed)
        if math.isfinite(weighed) and not any(sums.name == "loss" for sums in metrics):
            self.examples += examples
            self.loss += int(math.ldexp(weighed, _FIXED_BITS))
        for sums in metrics:
            before = self.metrics.get(sums.name)
            self.metrics[sums.name] = sums if before is None else _added(before, sums)

    def figures(self) -> dict[str, float]:
        """Return the figures that are known here, by name."""
        return {"loss": self._mean_loss()} | known_figures(self.metrics.values())

    def _mean_loss(self) -> float:
        """Return the mean loss; where a step's is no mean over its examples, the figure of its sums."""
        own = self.metrics.get("loss")
        if not self.finite or (own is None and not self.examples):
            return math.nan
        if own is None:
            return math.ldexp(self.loss / self.examples, -_FIXED_BITS)
        if own.kind == "mean" and own.values:
            return mean([own.values[0] + math.ldexp(self.loss, -_FIXED_BITS), own.values[1] + self.examples])
        found = figure(own.kind, own.values)
        return math.nan if found is None else found


def figures_together(steps: Iterable[tuple[int, float, Sequence[MetricSums]]]) -> dict[str, float]:
    """Return the loss and the known metrics of several steps, each of so many examples, with its loss and its sums."""
    sums = _Epoch()
    for examples, loss, metrics in steps:
        sums.add(examples, loss, metrics)
    return sums.figures()


def finite(value: float | None) -> float | None:
    """Return a figure as JSON holds it: None for one that is not finite."""
    return value if value is not None and math.isfinite(value) else None


def nullable(figures: Mapping[str, float]) -> dict[str, float | None]:
    """Return figures as JSON holds them."""
    return {name: finite(value) for name, value in figures.items()}


def numbers(figures: Mapping[str, float | None]) -> dict[str, float]:
    """Return the figures that `nullable` made these of; NaN for None."""
    return {name: math.nan if value is None else value for name, value in figures.items()}


def plain_sums(metrics: Iterable[MetricSums]) -> dict[str, tuple[float, ...]]:
    """Return sums by kind and name, as they are stored; none of those that are not finite."""
    return {
        f"{one.kind}:{one.name}": tuple(one.values) if all(map(math.isfinite, one.values)) else () for one in metrics
    }


def sums_of_plain(plain: Mapping[str, Sequence[float]]) -> list[MetricSums]:
    """Return the sums that `plain_sums` made these of."""
    split = ((*text.partition(":"), values) for text, values in plain.items())
    return [MetricSums(name, kind, values) for kind, _, name, values in split]


class TrainingFigures:
    """The figures of a job's epochs.

    A job without epochs has 0 `steps_per_epoch`. Without `keeps_sums` those of an epoch whose steps are all counted are
    dropped, as nobody will `forget` them.
    """

    def __init__(self, steps_total: int, steps_per_epoch: int, *, keeps_sums: bool = True) -> None:
        self.examples = 0
        self._steps_total = steps_total
        self._steps_per_epoch = steps_per_epoch
        self._counted = IntervalSet()
        self._epochs: dict[int, _Epoch] = {}
        self._keeps_sums = keeps_sums
        self.ended: list[int] = []
        """Epochs whose last step was counted since somebody looked."""
        self._past: dict[int, dict[str, float]] = {}  # figures of epochs whose sums are dropped, the newest ones

    def count(self, step: int, examples: int, loss: float | None, metrics: Sequence[MetricSums] = ()) -> bool:
        """Count a step, unless it is counted; return whether it was not. Without a loss it is a skipped one."""
        if not self._counted.add(step):
            return False
        self.examples += examples
        if self._steps_per_epoch:
            number = step // self._steps_per_epoch
            epoch = self._epochs.setdefault(number, _Epoch())
            epoch.steps += 1
            if loss is not None:
                epoch.add(examples, loss, metrics)
            if epoch.steps == self._steps_of(number):
                self.ended.append(number)
                if not self._keeps_sums:
                    self.forget([number])
        return True

    def figures_of(self, epoch: int) -> dict[str, float]:
        """Return an epoch's loss and metrics as far as its steps are counted; NaN: it is not known."""
        sums = self._epochs.get(epoch)
        return dict(self._past.get(epoch, _NO_FIGURES)) if sums is None else sums.figures()

    def loss_of(self, epoch: int) -> float:
        """Return the mean loss over the examples of an epoch's counted steps; NaN: it is not known."""
        return self.figures_of(epoch)["loss"]

    def metrics_of(self, epoch: int) -> dict[str, float]:
        """Return the metrics of an epoch's counted steps."""
        return {name: value for name, value in self.figures_of(epoch).items() if name != "loss"}

    def sums_of(self, epoch: int) -> list[MetricSums]:
        """Return the sums of an epoch's metrics whose figures only the metrics have."""
        sums = self._epochs.get(epoch)
        return (
            []
            if sums is None
            else [one for one in sums.metrics.values() if one.kind not in FIGURES and one.name != "loss"]
        )

    def newest(self) -> dict[str, float]:
        """Return the metrics of the latest epoch that has begun, as far as its steps are counted."""
        known = self._epochs.keys() | self._past.keys()
        return self.metrics_of(max(known)) if known else {}

    def history(self) -> dict[int, dict[str, float]]:
        """Return the figures of the newest epochs."""
        newest = sorted(self._epochs.keys() | self._past.keys())[-EPOCHS_KEPT:]
        return {epoch: self.figures_of(epoch) for epoch in newest}

    def _steps_of(self, epoch: int) -> int:
        return min(self._steps_total - epoch * self._steps_per_epoch, self._steps_per_epoch)

    def missing(self, first: int, stop: int) -> int:
        """Return how many steps from `first` to before `stop` are not counted."""
        return stop - first - len(self._counted.intersection(IntervalSet([(first, stop)])))

    def missing_in(self, epochs: Sequence[int]) -> int:
        """Return how many steps of consecutive epochs are not counted."""
        if not epochs:
            return 0
        stop = min(self._steps_total, (epochs[-1] + 1) * self._steps_per_epoch)
        return self.missing(epochs[0] * self._steps_per_epoch, stop)

    def forget(self, epochs: Sequence[int]) -> None:
        """Drop the sums of epochs; their steps stay counted, and the newest ones' figures are kept."""
        for epoch in epochs:
            if epoch in self._epochs:
                self._past[epoch] = self._epochs.pop(epoch).figures()
        for epoch in sorted(self._past)[:-EPOCHS_KEPT]:
            del self._past[epoch]

    def epochs(self) -> list[int]:
        """Return the epochs that have sums, ascending."""
        return sorted(self._epochs)

    # --- what a later coordinator goes on from ---

    def saved(self) -> dict[str, Any]:
        """Return the fields of `Saved` that these figures are in."""
        return {
            "examples": self.examples,
            "counted": tuple(self._counted.intervals()),
            "epoch_losses": {number: (epoch.loss, epoch.examples) for number, epoch in self._epochs.items()},
            "not_finite_epochs": tuple(number for number in self.epochs() if not self._epochs[number].finite),
            "epoch_metrics": {
                n: plain_sums(epoch.metrics.values()) for n, epoch in self._epochs.items() if epoch.metrics
            },
            "epoch_figures": {number: nullable(figures) for number, figures in self._past.items()},
        }

    def resume(self, saved: Saved) -> None:
        """Go on from what an earlier coordinator has counted."""
        self.examples = saved.examples
        self._counted = IntervalSet(saved.counted)
        self._past = {number: numbers(figures) for number, figures in saved.epoch_figures.items()}
        for number, (loss, of_examples) in saved.epoch_losses.items():
            steps = self._steps_of(number) - self.missing_in([number])
            epoch = self._epochs[number] = _Epoch(steps, loss, of_examples, number not in saved.not_finite_epochs)
            epoch.metrics.update({one.name: one for one in sums_of_plain(saved.epoch_metrics.get(number, {}))})


def _added(one: MetricSums, other: MetricSums) -> MetricSums:
    """Return the sums of both; of two that are not alike none, which makes no figure."""
    if (one.kind, len(one.values)) != (other.kind, len(other.values)):
        return one._replace(values=())
    return one._replace(values=list(map(operator.add, one.values, other.values)))


_NO_FIGURES: Mapping[str, float] = MappingProxyType({"loss": math.nan})
