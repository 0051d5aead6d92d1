"""TrainingFigures: the sums of losses and metrics over the steps of each epoch, each step once.

Pure. A step is recomputed if a shard has lost it, and reported again to a new coordinator; the first report counts.
Invariant: a step is counted exactly if its examples and its loss are in the sums.
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
"""Number of epochs whose figures are kept, the newest."""
_FIXED_BITS = 60  # losses are summed in fixed point with this many fraction bits: any order gives the same sum


class MetricSums(NamedTuple):
    """The sums of a metric over some examples; `kind` names their reduction to a figure, "": only user code has it."""

    name: str
    kind: str
    values: Sequence[float]


def known_figures(metrics: Iterable[MetricSums]) -> dict[str, float]:
    """Return the figures, by name, of metrics whose kind is known here; without the loss."""
    figures = {one.name: figure(one.kind, one.values) for one in metrics if one.name != "loss"}
    return {name: value for name, value in sorted(figures.items()) if value is not None}


@dataclass
class _Epoch:
    """Sums over the counted steps of an epoch."""

    steps: int = 0
    loss: int = 0  # sum of loss x examples, in units of 2**-60
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
        """Return the loss and the known metrics, by name."""
        return {"loss": self._mean_loss()} | known_figures(self.metrics.values())

    def _mean_loss(self) -> float:
        """Return the mean loss per example; if the loss is not such a mean, the figure of its own sums."""
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
    """Return the loss and the known metrics over several steps, given as (examples, loss, metric sums)."""
    sums = _Epoch()
    for examples, loss, metrics in steps:
        sums.add(examples, loss, metrics)
    return sums.figures()


def finite(value: float | None) -> float | None:
    """Return a figure for JSON: None if it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def nullable(figures: Mapping[str, float]) -> dict[str, float | None]:
    """Return figures for JSON: None for those that are not finite."""
    return {name: finite(value) for name, value in figures.items()}


def numbers(figures: Mapping[str, float | None]) -> dict[str, float]:
    """Invert `nullable`, with NaN for None."""
    return {name: math.nan if value is None else value for name, value in figures.items()}


def plain_sums(metrics: Iterable[MetricSums]) -> dict[str, tuple[float, ...]]:
    """Return sums by "kind:name" for storage; sums that are not finite become empty."""
    return {
        f"{one.kind}:{one.name}": tuple(one.values) if all(map(math.isfinite, one.values)) else () for one in metrics
    }


def sums_of_plain(plain: Mapping[str, Sequence[float]]) -> list[MetricSums]:
    """Invert `plain_sums`."""
    split = ((*text.partition(":"), values) for text, values in plain.items())
    return [MetricSums(name, kind, values) for kind, _, name, values in split]


class TrainingFigures:
    """The figures of a job's epochs.

    `steps_per_epoch` = 0: no epochs. Without `keeps_sums` the sums of an epoch are dropped when all its steps are
    counted, because no callbacks will `forget` them.
    """

    def __init__(self, steps_total: int, steps_per_epoch: int, *, keeps_sums: bool = True) -> None:
        self.examples = 0
        self._steps_total = steps_total
        self._steps_per_epoch = steps_per_epoch
        self._counted = IntervalSet()
        self._epochs: dict[int, _Epoch] = {}
        self._keeps_sums = keeps_sums
        self.ended: list[int] = []
        """Epochs completed since the reader last cleared this list."""
        self._past: dict[int, dict[str, float]] = {}  # figures of the newest epochs whose sums are dropped

    def count(self, step: int, examples: int, loss: float | None, metrics: Sequence[MetricSums] = ()) -> bool:
        """Count a step (loss None: skipped); return False if it was counted before."""
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
        """Return an epoch's loss and metrics over its steps counted so far; NaN: not known."""
        sums = self._epochs.get(epoch)
        return dict(self._past.get(epoch, _NO_FIGURES)) if sums is None else sums.figures()

    def loss_of(self, epoch: int) -> float:
        """Return the mean loss over the examples of an epoch's counted steps; NaN: not known."""
        return self.figures_of(epoch)["loss"]

    def metrics_of(self, epoch: int) -> dict[str, float]:
        """Return the metrics of an epoch's counted steps."""
        return {name: value for name, value in self.figures_of(epoch).items() if name != "loss"}

    def sums_of(self, epoch: int) -> list[MetricSums]:
        """Return the sums of an epoch's metrics whose figures only user code can compute."""
        sums = self._epochs.get(epoch)
        return (
            []
            if sums is None
            else [one for one in sums.metrics.values() if one.kind not in FIGURES and one.name != "loss"]
        )

    def newest(self) -> dict[str, float]:
        """Return the metrics of the latest epoch that has begun, over its steps counted so far."""
        known = self._epochs.keys() | self._past.keys()
        return self.metrics_of(max(known)) if known else {}

    def history(self) -> dict[int, dict[str, float]]:
        """Return the figures of the newest epochs."""
        newest = sorted(self._epochs.keys() | self._past.keys())[-EPOCHS_KEPT:]
        return {epoch: self.figures_of(epoch) for epoch in newest}

    def _steps_of(self, epoch: int) -> int:
        return min(self._steps_total - epoch * self._steps_per_epoch, self._steps_per_epoch)

    def missing(self, first: int, stop: int) -> int:
        """Return how many steps in [first, stop) are not counted."""
        return stop - first - len(self._counted.intersection(IntervalSet([(first, stop)])))

    def missing_in(self, epochs: Sequence[int]) -> int:
        """Return how many steps of consecutive epochs are not counted."""
        if not epochs:
            return 0
        stop = min(self._steps_total, (epochs[-1] + 1) * self._steps_per_epoch)
        return self.missing(epochs[0] * self._steps_per_epoch, stop)

    def forget(self, epochs: Sequence[int]) -> None:
        """Drop the sums of epochs; their steps stay counted, and the figures of the newest epochs are kept."""
        for epoch in epochs:
            if epoch in self._epochs:
                self._past[epoch] = self._epochs.pop(epoch).figures()
        for epoch in sorted(self._past)[:-EPOCHS_KEPT]:
            del self._past[epoch]

    def epochs(self) -> list[int]:
        """Return the epochs that have sums, ascending."""
        return sorted(self._epochs)

    # --- state for a successor ---

    def saved(self) -> dict[str, Any]:
        """Return these figures as fields of `Saved`."""
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
        """Restore the counts of an earlier coordinator."""
        self.examples = saved.examples
        self._counted = IntervalSet(saved.counted)
        self._past = {number: numbers(figures) for number, figures in saved.epoch_figures.items()}
        for number, (loss, of_examples) in saved.epoch_losses.items():
            steps = self._steps_of(number) - self.missing_in([number])
            epoch = self._epochs[number] = _Epoch(steps, loss, of_examples, number not in saved.not_finite_epochs)
            epoch.metrics.update({one.name: one for one in sums_of_plain(saved.epoch_metrics.get(number, {}))})


def _added(one: MetricSums, other: MetricSums) -> MetricSums:
    """Add two sums; if they differ in kind or length, return empty sums, which give no figure."""
    if (one.kind, len(one.values)) != (other.kind, len(other.values)):
        return one._replace(values=())
    return one._replace(values=list(map(operator.add, one.values, other.values)))


_NO_FIGURES: Mapping[str, float] = MappingProxyType({"loss": math.nan})
