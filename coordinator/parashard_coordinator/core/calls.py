"""Calls: requests to the coordinator's core and its answers, as values, and the core's settings. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from parashard.plan.intervals import IntervalSet
from parashard_coordinator.core.callback_progress import BatchEnd, CallbackOptions, DecidedRate, ReachedMilestone
from parashard_coordinator.core.controller import Drift
from parashard_coordinator.core.evaluations import Evaluation
from parashard_coordinator.core.learning import Advice
from parashard_coordinator.core.leases import RETRY_PAUSE_S, Grant
from parashard_coordinator.core.membership import GpuMemory, ShardRegistration
from parashard_coordinator.core.training_figures import MetricSums


class JobState(enum.Enum):
    """State of a job; the values are the wire's."""

    STARTING = 1
    RUNNING = 2
    DRAINING = 3
    DONE = 4
    FAILED = 5


class CoreSettings(NamedTuple):
    """The core's settings, from the job file and the run."""

    run_id: str
    job_digest: str
    steps_total: int
    shards: int
    workers: int
    lease_batch: int = 16
    lease_ttl_s: float = 10.0
    silence_s: float = 30.0
    start_s: float = 600.0  # maximum duration of a process's start, which reads and hashes the data first
    speculate_after: float = 4.0
    max_attempts: int = 5
    skip_bad_steps: bool = False
    target_accuracy: float | None = None
    target_loss: float | None = None
    target_mean_squared_error: float | None = None
    same_arithmetic: bool = False
    incarnation: int = 1  # of the coordinator
    open: bool = False  # steps are leased once they are scheduled, and the final number is not known
    retry_pause_s: float = RETRY_PAUSE_S
    steps_per_epoch: int = 0  # 0: it has no epochs
    first_epoch: int = 0  # number of the first epoch, for people
    callbacks: CallbackOptions = CallbackOptions(followed=True)
    examples_of: Callable[[int], str] = lambda step: ""  # a step's examples, for people
    advice: Advice = Advice()
    learning_rate_at: Callable[[int, float], float | None] = lambda step, decided: None  # decided 0: the job's own rate
    classes: int = 0  # number of classes of the model's task; 0: it is no classification
    continued: bool = False  # its weights were trained before
    fresh_alone: bool = True  # gradients of one worker alone are computed on the newest weights

    def targets(self) -> list[tuple[str, float, bool]]:
        """Return the metrics whose value ends the job: name, bound, and whether the bound is a minimum."""
        bounds = (
            ("accuracy", self.target_accuracy, True),
            ("loss", self.target_loss, False),
            ("mean_squared_error", self.target_mean_squared_error, False),
        )
        return [(name, bound, largest) for name, bound, largest in bounds if bound is not None]


class CompletedStep(NamedTuple):
    """A step that every shard acknowledged, with the incarnations of these shards."""

    step: int
    incarnations: list[int]
    loss: float | None
    examples: int
    skipped: bool = False
    metrics: Sequence[MetricSums] = ()


class FailureKind(enum.Enum):
    """Cause of a failed attempt; the values are the wire's, except DEATH, which is not sent."""

    OTHER = 0
    MODEL = 1
    WRONG_RESULT = 2
    NOT_FINITE = 3
    DEATH = 4  # its worker ended while it computed the step


class FailedStep(NamedTuple):
    """An attempt at a step that failed."""

    step: int
    reason: str
    kind: FailureKind = FailureKind.OTHER


class EvaluationResult(NamedTuple):
    """Result of an evaluation, or its error, on the weights of these incarnations (by shard)."""

    after_step: int
    incarnations: Sequence[int]
    metrics: Mapping[str, float] = MappingProxyType({})
    error: str = ""
    weights: str = ""
    judged_steps: int = 0  # steps in the weights, without rounds
    kind: FailureKind = FailureKind.OTHER  # of an error


class LeaseCall(NamedTuple):
    """A worker's report, renewal and request."""

    worker: str
    incarnation: int
    sequence: int
    held: Sequence[int] = ()
    held_evaluations: Sequence[int] = ()
    completed: Sequence[CompletedStep] = ()
    failed: Sequence[FailedStep | tuple[int, str]] = ()
    evaluated: Sequence[EvaluationResult] = ()
    want: int = 0
    leaving: bool = False
    computing: Sequence[int] = ()
    phases_s: Mapping[str, float] = MappingProxyType({})
    steps_only: bool = False
    warnings: Sequence[str] = ()
    drifts: Sequence[Drift] = ()
    gpu_memory: GpuMemory | None = None


class LeaseAnswer(NamedTuple):
    """The answer to a worker's lease call."""

    granted: Sequence[Grant]
    evaluations: Sequence[Evaluation]
    revoked: Sequence[int]
    state: JobState
    view: int
    reason: str
    retry_after_s: float = 0.02
    may_wait: bool = True  # the call may be held until something can be granted; else the worker asks again
    stored: int = 0  # the last call of this worker whose report is stored for a later coordinator
    stores_evaluated: bool = False
    ahead: int | None = None  # the worker asks for more steps when at most this many are queued; None: the job's value
    depth: int | None = None  # steps whose transfers overlap with computing; None: the job's value


class FollowCall(NamedTuple):
    """The callbacks' progress and decisions."""

    handled: int = 0
    stop_reason: str = ""
    learning_rate: float | None = None  # None: unchanged
    decision: int = 0  # number of the last decision about it
    between: bool = False  # the decision was made between `handled` and the next milestone
    planned: Sequence[tuple[int, float]] = ()  # known later changes: (epoch, learning rate)
    wants_steps: bool = False
    steps_seen: int = 0
    coordinator: int = 0  # incarnation of the coordinator that counted `steps_seen`


class FollowAnswer(NamedTuple):
    """The answer to callbacks."""

    coordinator: int
    state: JobState
    milestone: ReachedMilestone | None
    steps: Sequence[BatchEnd]  # in `auto` batches, named by their first steps
    steps_seen: int
    steps_total: int
    rate: DecidedRate | None
    stopped_by: int | None


class Announcement(NamedTuple):
    """Announcement of a shard's present incarnation: at its start, and once a second."""

    registration: ShardRegistration
    applied: IntervalSet
    held: IntervalSet  # steps that it has acknowledged, applied or buffered
    skipped: IntervalSet  # held steps whose push was empty
    returnable: frozenset[int] = frozenset({0})  # rounds that it can roll back to: checkpoints, and its plan's first
    restored: str = ""
    first_incarnation: int = 0  # of its process; 0: this incarnation's
    chains: frozenset[int] = frozenset()  # first round of each chain of checkpoints that share row files

    @property
    def incarnation(self) -> int:
        """The shard's incarnation."""
        return self.registration.incarnation

    def precedes(self, later: Announcement) -> bool:
        """Tell whether `later`, of the same incarnation, was sent after this announcement."""
        mine = (len(self.applied), len(self.held), len(self.skipped))
        return mine < (len(later.applied), len(later.held), len(later.skipped))
