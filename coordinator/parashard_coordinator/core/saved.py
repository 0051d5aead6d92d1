"""Saved: the state that a restarted coordinator cannot learn from the shards, the job file and the manifests.

Stored when a coordinator takes the run over, before a decision acts, and now and then for the counters. Pure;
`parashard_coordinator.run.store` has the disk, and the names that carry the claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self, TypeVar

from pydantic import Field

from parashard.checkpoints.encoding import Record
from parashard.checkpoints.manifest import Steps
from parashard_coordinator.core.callback_progress import DecidedRate
from parashard_coordinator.core.controller import Drift, Lag
from parashard_coordinator.core.membership import EarlierWorker

Figures = dict[str, float | None]
"""By name; None: it is not finite."""
Sums = dict[str, tuple[float, ...]]
"""Of metrics, by kind and name."""

_Value = TypeVar("_Value")
_Entry = TypeVar("_Entry", bound=tuple[Any, ...])


class _FirstVersion(Record):
    """What every version has stored, also where it is empty.

    `plan_version` is of the plan that its coordinator went by, and `final` the drained checkpoint that the job ends
    with, once that is decided.
    """

    kind = "coordinator"

    target: int
    plan_version: int = 0  # 0: none yet
    final: str = ""
    early_stop: str = ""
    evaluations: dict[int, Figures] = Field(default_factory=dict)  # the newest results, by the steps before them
    skips: tuple[int, ...] = ()
    worker_restarts: int = 0
    shard_restarts: int = 0
    shard_incarnations: tuple[int, ...] = ()  # the last known incarnation of each shard, 0 where it was never heard of
    rollbacks: int = 0
    resumes: int = 0  # how often its user has started the run again
    workers_wanted: int = 0
    scale_requests: int = 0  # how often a number of workers was requested; 0: the manifests' number
    examples: int = 0
    training_s: float = 0.0
    fingerprint: str = ""  # of the arithmetic that the job began with


class Saved(_FirstVersion):
    """Decisions, and figures for the report.

    Of the results before the newest ones there are no metrics: an evaluation that is due within `evaluated`, half-open
    intervals of steps, has its result (omitted if there are none).
    """

    evaluated: Steps = ()
    evaluated_weights: dict[int, str] = Field(default_factory=dict)
    judged_steps: dict[int, int] = Field(default_factory=dict)  # of the results in `evaluations`, where not in rounds
    learning_rates: tuple[DecidedRate, ...] = ()
    leased_to: int = 0  # no step at or past it was ever leased, where callbacks may decide
    epoch_losses: dict[int, tuple[int, int]] = Field(default_factory=dict)  # sums of epochs that are not handled
    not_finite_epochs: tuple[int, ...] = ()  # of these
    epoch_metrics: dict[int, Sums] = Field(default_factory=dict)  # of these
    epoch_figures: dict[int, Figures] = Field(default_factory=dict)  # of epochs that have no sums any more
    counted: Steps = ()  # steps whose figures are in `examples` and in the sums
    losses: tuple[float, ...] = ()  # of the training: smoothed, first and best
    loss_curve: tuple[tuple[float, ...], ...] = ()  # its first losses, and means of blocks of equally many steps
    stopped_by: int | None = None  # the milestone whose callbacks ended the training early
    rates_decided: int = 0  # number of callbacks' last decision about the learning rate
    ends: tuple[tuple[int, float | None], ...] = ()  # batches that callbacks have to hear of, with finite losses
    ends_metrics: dict[int, Figures] = Field(default_factory=dict)  # of these
    parts: tuple[tuple[int, float | None, int], ...] = ()  # steps of batches that are not whole: loss and examples
    parts_metrics: dict[int, Sums] = Field(default_factory=dict)  # of these
    lags: tuple[Lag, ...] = ()  # of `auto`
    drifts: tuple[Drift, ...] = ()
    workers: dict[str, EarlierWorker] = Field(default_factory=dict)
    speculative_leases: int = 0
    stored_at: float = 0.0  # seconds since 1970; 0: not known

    later = tuple(__annotations__)

    def returned_to(self, steps: int) -> Self:
        """Return what still holds once all shards start from the first `steps` steps: what came later is given up."""
        stop_holds = self.target <= steps
        return self.replaced(
            early_stop=self.early_stop if stop_holds else "",
            evaluations=_judged(self.evaluations, steps),
            evaluated=tuple((start, min(stop, steps + 1)) for start, stop in self.evaluated if start <= steps),
            evaluated_weights=_judged(self.evaluated_weights, steps),
            judged_steps=_judged(self.judged_steps, steps),
            learning_rates=tuple(rate for rate in self.learning_rates if rate.after_steps <= steps),
            lags=tuple(lag for lag in self.lags if lag.first_step <= steps),
            drifts=_applied(self.drifts, steps),
            leased_to=0,
            epoch_losses={},
            not_finite_epochs=(),
            epoch_metrics={},
            epoch_figures={},
            counted=tuple((start, min(stop, steps)) for start, stop in self.counted if start < steps),
            stopped_by=self.stopped_by if stop_holds else None,
            ends=_applied(self.ends, steps),
            ends_metrics={step: metrics for step, metrics in self.ends_metrics.items() if step < steps},
            parts=_applied(self.parts, steps),
            parts_metrics={step: sums for step, sums in self.parts_metrics.items() if step < steps},
            skips=tuple(step for step in self.skips if step < steps),
            final="",
        )


def _judged(by_steps: Mapping[int, _Value], steps: int) -> dict[int, _Value]:
    """Return the entries of evaluations that follow `steps` steps or fewer."""
    return {after: value for after, value in by_steps.items() if after <= steps}


def _applied(entries: Iterable[_Entry], steps: int) -> tuple[_Entry, ...]:
    """Return the entries, each behind its step, of the first `steps` steps."""
    return tuple(entry for entry in entries if entry[0] < steps)
