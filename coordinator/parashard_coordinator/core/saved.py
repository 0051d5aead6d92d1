"""Saved: the state that a restarted coordinator cannot learn from the shards, the job file and the manifests.

Stored when a coordinator takes the run over, before a decision acts, and now and then for the counters. Pure;
`parashard_coordinator.run.store` has the disk, and the names that carry the claim.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field

from parashard.checkpoints.encoding import Record
from parashard.checkpoints.manifest import Steps


class Saved(Record):
    """Decisions, and figures for the report.

    Evaluations' results are by the steps before them; a metric that is not finite is None. Of the results before the
    newest ones there are no metrics: an evaluation that is due within `evaluated`, half-open intervals of steps, has
    its result (omitted if there are none). `plan_version` is of the plan that its coordinator went by, and `final` the
    drained checkpoint that the job ends with, once that is decided.
    """

    kind = "coordinator"
    later = (
        "evaluated",
        "evaluated_weights",
        "judged_steps",
        "learning_rates",
        "leased_to",
        "epoch_losses",
        "stopped_by",
        "workers",
        "not_finite_epochs",
        "epoch_metrics",
        "epoch_figures",
        "counted",
        "losses",
        "loss_curve",
        "speculative_leases",
        "stored_at",
        "rates_decided",
        "ends",
        "ends_metrics",
        "parts",
        "parts_metrics",
        "lags",
        "drifts",
    )

    target: int
    plan_version: int = 0  # 0: none yet
    final: str = ""
    early_stop: str = ""
    evaluations: dict[str, dict[str, float | None]] = Field(default_factory=dict)
    evaluated: Steps = ()
    evaluated_weights: dict[str, str] = Field(default_factory=dict)
    judged_steps: dict[str, int] = Field(default_factory=dict)  # of the results in `evaluations`, where not in rounds
    learning_rates: tuple[tuple[int, float, int], ...] = ()  # first step, rate, milestone
    leased_to: int = 0  # no step at or past it was ever leased, where callbacks may decide
    epoch_losses: dict[str, tuple[int, int]] = Field(default_factory=dict)  # sums of epochs that are not handled
    not_finite_epochs: tuple[int, ...] = ()  # of these
    epoch_metrics: dict[str, dict[str, tuple[float, ...]]] = Field(default_factory=dict)  # their sums, by kind and name
    epoch_figures: dict[str, dict[str, float | None]] = Field(
        default_factory=dict
    )  # of epochs that have no sums any more
    counted: Steps = ()  # steps whose figures are in `examples` and in the sums
    losses: tuple[float, ...] = ()  # of the training: smoothed, first and best
    loss_curve: tuple[tuple[float, ...], ...] = ()  # its first losses, and means of blocks of equally many steps
    stopped_by: int | None = None  # the milestone whose callbacks ended the training early
    rates_decided: int = 0  # number of callbacks' last decision about the learning rate
    ends: tuple[tuple[int, float | None], ...] = ()  # batches that callbacks have to hear of, with finite losses
    ends_metrics: dict[str, dict[str, float | None]] = Field(default_factory=dict)  # of these
    parts: tuple[tuple[int, float | None, int], ...] = ()  # steps of batches that are not whole: loss and examples
    parts_metrics: dict[str, dict[str, tuple[float, ...]]] = Field(default_factory=dict)  # their sums, by kind and name
    lags: tuple[tuple[int, int, str], ...] = ()  # of `auto`: first step, lag, reason
    drifts: tuple[tuple[int, float, int], ...] = ()  # step, drift, updates
    skips: tuple[int, ...] = ()
    worker_restarts: int = 0
    shard_restarts: int = 0
    workers: dict[str, tuple[int, int, int, int]] = Field(default_factory=dict)  # token, restarts, steps, state
    shard_incarnations: tuple[int, ...] = ()  # the last known incarnation of each shard, 0 where it was never heard of
    rollbacks: int = 0
    speculative_leases: int = 0
    resumes: int = 0  # how often its user has started the run again
    workers_wanted: int = 0
    scale_requests: int = 0  # how often a number of workers was requested; 0: the manifests' number
    examples: int = 0
    training_s: float = 0.0
    stored_at: float = 0.0  # seconds since 1970; 0: not known
    fingerprint: str = ""  # of the arithmetic that the job began with

    def returned_to(self, steps: int) -> Self:
        """Return what still holds once all shards start from the first `steps` steps: what came later is given up."""
        return self.replaced(
            early_stop=self.early_stop if self.target <= steps else "",
            evaluations={after: metrics for after, metrics in self.evaluations.items() if int(after) <= steps},
            evaluated=tuple((start, min(stop, steps + 1)) for start, stop in self.evaluated if start <= steps),
            evaluated_weights={after: name for after, name in self.evaluated_weights.items() if int(after) <= steps},
            judged_steps={after: found for after, found in self.judged_steps.items() if int(after) <= steps},
            learning_rates=tuple(rate for rate in self.learning_rates if rate[2] <= steps),
            lags=tuple(lag for lag in self.lags if lag[0] <= steps),
            drifts=tuple(drift for drift in self.drifts if drift[0] < steps),
            leased_to=0,
            epoch_losses={},
            not_finite_epochs=(),
            epoch_metrics={},
            epoch_figures={},
            counted=tuple((start, min(stop, steps)) for start, stop in self.counted if start < steps),
            stopped_by=self.stopped_by if self.target <= steps else None,
            ends=tuple(end for end in self.ends if end[0] < steps),
            ends_metrics={step: metrics for step, metrics in self.ends_metrics.items() if int(step) < steps},
            parts=tuple(part for part in self.parts if part[0] < steps),
            parts_metrics={step: sums for step, sums in self.parts_metrics.items() if int(step) < steps},
            skips=tuple(step for step in self.skips if step < steps),
            final="",
        )
