"""BatchEnds: the completed batches that callbacks have not heard of, in the order of their completion.

Pure. A batch is one step, or in `auto` the steps that are its parts: then it ends with the last of them, and its
figures are over the examples of all. Invariant: each batch is told once, whatever is computed again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

from parashard.plan.intervals import IntervalSet
from parashard_coordinator.core.training_figures import MetricSums, figures_together, known_figures

ENDS_AT_ONCE = 4096
_NO_METRICS: Mapping[str, float] = MappingProxyType({})


class BatchEnd(NamedTuple):
    """A completed batch by its first step, its mean loss (NaN: it was skipped), and the figures of its metrics."""

    step: int
    loss: float
    metrics: Mapping[str, float] = _NO_METRICS


class StepResult(NamedTuple):
    """A completed step: its mean loss over its examples (None: skipped), their number, and the sums of its metrics."""

    step: int
    loss: float | None
    examples: int = 0
    metrics: Sequence[MetricSums] = ()


class BatchEnds:
    """The queue of completed batches."""

    def __init__(self, parts: int = 1) -> None:
        self._parts = parts
        self._ended = IntervalSet()  # steps
        self._open: dict[int, list[StepResult]] = {}  # by batch: those that are complete, while others are not
        self._queue: deque[BatchEnd] = deque()
        self._heard = 0
        self._wanted = True

    def __len__(self) -> int:
        return len(self._queue)

    def step_completed(self, part: StepResult) -> None:
        """Take note of a step that every shard has now; once, whatever is computed again."""
        if not self._ended.add(part.step) or not self._wanted:
            return
        batch = part.step // self._parts
        parts = self._open.setdefault(batch, [])
        parts.append(part)
        if len(parts) == self._parts:
            self._queue.append(_end_of(batch * self._parts, self._open.pop(batch)))

    def since(self, heard: int) -> tuple[list[BatchEnd], int]:
        """Return batches after the first `heard`, which are forgotten, and how many that makes in all."""
        while self._queue and self._heard < heard:
            self._queue.popleft()
            self._heard += 1
        some = list(islice(self._queue, ENDS_AT_ONCE))
        return some, self._heard + len(some)

    def want(self, wanted: bool) -> None:
        """Keep completed batches for callbacks, or none."""
        self._wanted = wanted
        if not wanted:
            self._queue.clear()
            self._open.clear()

    # --- what a later coordinator goes on from ---

    def unheard(self) -> Sequence[BatchEnd]:
        """Return the batches that are not told yet."""
        return tuple(self._queue)

    def open_parts(self) -> list[StepResult]:
        """Return the completed steps of batches that are not complete."""
        return [part for parts in self._open.values() for part in parts]

    def resume(self, unheard: Iterable[BatchEnd], open_parts: Iterable[StepResult]) -> None:
        """Go on from what an earlier coordinator had."""
        for end in unheard:
            self._ended.add_range(end.step, end.step + self._parts)
            self._queue.append(end)
        for part in open_parts:
            self.step_completed(part)


def _end_of(first: int, parts: Sequence[StepResult]) -> BatchEnd:
    """Return the end of a batch whose parts are all complete."""
    some = [part for part in parts if part.loss is not None and (part.examples or len(parts) == 1)]
    if len(some) < 2:
        only = some[0] if some else StepResult(first, None)
        return BatchEnd(first, math.nan if only.loss is None else only.loss, known_figures(only.metrics))
    figures = figures_together([(part.examples, part.loss or 0.0, part.metrics) for part in some])
    return BatchEnd(first, figures.pop("loss"), figures)
