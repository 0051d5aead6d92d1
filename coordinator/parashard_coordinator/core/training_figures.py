"""TrainingFigures: what the steps of each epoch add up to, each step once.

Pure. A step is computed again where a shard has lost it, and reported again where a coordinator is new. The first
report counts. Invariant: a step is counted exactly if its examples and its loss are in the sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from parashard.plan.intervals import IntervalSet

_FIXED_BITS = 60  # of a loss's fraction: whole numbers add up to the same in any order


class _Sums(NamedTuple):
    """Sum of an epoch's losses, each as often as its batch has examples, in units of 2**-60; and those examples."""

    loss: int = 0
    examples: int = 0
    finite: bool = True


class TrainingFigures:
    """The figures of a job's epochs.

    Parameters
    ----------
    steps_total : int
    steps_per_epoch : int
        0: the job has no epochs.

    Attributes
    ----------
    examples : int
        Of all steps that are counted.
    """

    def __init__(self, steps_total: int, steps_per_epoch: int) -> None:
        self.examples = 0
        self._steps_total = steps_total
        self._steps_per_epoch = steps_per_epoch
        self._counted = IntervalSet()
        self._epochs: dict[int, _Sums] = {}

    def count(self, step: int, examples: int, loss: float | None) -> bool:
        """Count a step, unless it is counted; return whether it was not. Without a loss it is a skipped one."""
        if not self._counted.add(step):
            return False
        self.examples += examples
        if loss is None or not self._steps_per_epoch:
            return True
        epoch = step // self._steps_per_epoch
        sums, weighed = self._epochs.get(epoch, _Sums()), loss * examples
        if math.isfinite(weighed):
            total = sums.loss + int(math.ldexp(weighed, _FIXED_BITS))
            self._epochs[epoch] = _Sums(total, sums.examples + examples, sums.finite)
        else:
            self._epochs[epoch] = sums._replace(finite=False)
        return True

    def loss_of(self, epoch: int) -> float:
        """Return the mean loss over the examples of an epoch's counted steps; NaN: it is not known."""
        sums = self._epochs.get(epoch)
        if sums is None or not sums.examples or not sums.finite:
            return math.nan
        return math.ldexp(sums.loss / sums.examples, -_FIXED_BITS)

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
        """Drop the sums of epochs; their steps stay counted."""
        for epoch in epochs:
            self._epochs.pop(epoch, None)

    def epochs(self) -> list[int]:
        """Return the epochs that have sums, ascending."""
        return sorted(self._epochs)

    # --- what a later coordinator goes on from ---

    def counted(self) -> tuple[tuple[int, int], ...]:
        """Return the counted steps, as half-open intervals."""
        return tuple(self._counted.intervals())

    def losses(self) -> dict[int, tuple[int, int]]:
        """Return the sums of the losses, and of how many examples they are."""
        return {epoch: (sums.loss, sums.examples) for epoch, sums in self._epochs.items()}

    def not_finite(self) -> tuple[int, ...]:
        """Return the epochs that had a loss that is not finite."""
        return tuple(epoch for epoch in self.epochs() if not self._epochs[epoch].finite)

    def resume(
        self,
        examples: int,
        counted: Sequence[tuple[int, int]],
        losses: Mapping[int, tuple[int, int]],
        not_finite: Sequence[int],
    ) -> None:
        """Go on from what an earlier coordinator has counted."""
        self.examples = examples
        self._counted = IntervalSet(counted)
        self._epochs = {epoch: _Sums(*sums, epoch not in not_finite) for epoch, sums in losses.items()}
