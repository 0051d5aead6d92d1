"""Saved: the state that a restarted coordinator cannot learn from the shards, the job file and the manifests.

Stored when a coordinator takes over the run, before a decision takes effect, and periodically for the counters. Pure;
`parashard_coordinator.run.store` writes it, under names that contain the claimed incarnation.
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
"""Figures by name; None: not finite."""
Sums = dict[str, tuple[float, ...]]
"""Sums of metrics by "kind:name"."""

_Value = TypeVar("_Value")
_Entry = TypeVar("_Entry", bound=tuple[Any, ...])


class _FirstVersion(Record):
    """Fields that every version stores, even if empty.

    `plan_version` is the version of its coordinator's plan; `final` the id of the job's last drained checkpoint, once
    that is decided.
    """

    kind = "coordinator"

    target: int
    plan_version: int = 0  # 0: none yet
    final: str = ""
    early_stop: str = ""
    evaluations: dict[int, Figures] = Field(default_factory=dict)  # the newest results, by `after_step`
    skips: tuple[int, ...] = ()
    worker_restarts: int = 0
    shard_restarts: int = 0
    shard_incarnations: tuple[int, ...] = ()  # the last known incarnation of each shard; 0: unknown
    rollbacks: int = 0
    resumes: int = 0  # how often the user resumed the run
    workers_wanted: int = 0
    scale_requests: int = 0  # how often a number of workers was requested; 0: the manifests' number holds
    examples: int = 0
    training_s: float = 0.0
    fingerprint: str = ""  # of the first worker's arithmetic


class Saved(_FirstVersion):
    """Decisions, and figures for the report.

    Old results have no metrics here: each evaluation whose `after_step` is within `evaluated`, half-open intervals, has
    its result.
    """

    evaluated: Steps = ()
    evaluated_weights: dict[int, str] = Field(default_factory=dict)
    judged_steps: dict[int, int] = Field(default_factory=dict)  # steps in the weights of `evaluations`, without rounds
    learning_rates: tuple[DecidedRate, ...] = ()
    leased_to: int = 0  # if callbacks may decide: no step at or past it was ever leased
    epoch_losses: dict[int, tuple[int, int]] = Field(default_factory=dict)  # loss sum and examples of epochs with sums
    not_finite_epochs: tuple[int, ...] = ()  # of these
    epoch_metrics: dict[int, Sums] = Field(default_factory=dict)  # of these
    epoch_figures: dict[int, Figures] = Field(default_factory=dict)  # of epochs whose sums were dropped
    counted: Steps = ()  # steps whose figures are in `examples` and in the sums
    losses: tuple[float, ...] = ()  # of the training: smoothed, first and best
    loss_curve: tuple[tuple[float, ...], ...] = ()  # as `Curve.saved` returns it
    stopped_by: int | None = None  # the milestone whose callbacks ended the training early
    rates_decided: int = 0  # number of callbacks' last decision about the learning rate
    ends: tuple[tuple[int, float | None], ...] = ()  # (first step, loss) of batches not sent to callbacks
    ends_metrics: dict[int, Figures] = Field(default_factory=dict)  # of these
    parts: tuple[tuple[int, float | None, int], ...] = ()  # steps of incomplete batches: (step, loss, examples)
    parts_metrics: dict[int, Sums] = Field(default_factory=dict)  # of these
    lags: tuple[Lag, ...] = ()  # in `auto`
    drifts: tuple[Drift, ...] = ()
    workers: dict[str, EarlierWorker] = Field(default_factory=dict)
    speculative_leases: int = 0
    stored_at: float = 0.0  # seconds since 1970; 0: not known

    later = tuple(__annotations__)

    def returned_to(self, steps: int) -> Self:
        """Return the state without everything after the first `steps` steps, from which all shards start again."""
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
    """Return the entries, which begin with their step, of the first `steps` steps."""
    return tuple(entry for entry in entries if entry[0] < steps)
