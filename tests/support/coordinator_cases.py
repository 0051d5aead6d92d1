"""A core in virtual time and a worker that talks to it: what the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from parashard.checkpoints.encoding import decode, encode
from parashard.plan.intervals import IntervalSet
from parashard_coordinator.core.calls import (
    Announcement,
    CompletedStep,
    CoreSettings,
    EvaluationResult,
    FailureKind,
    LeaseAnswer,
    LeaseCall,
)
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.evaluations import Evaluations
from parashard_coordinator.core.job_record import JobRecord
from parashard_coordinator.core.membership import ShardRegistration, WorkerRecord
from parashard_coordinator.core.policies import Async, LeasingPolicy, Sync
from parashard_coordinator.core.rounds import Rounds
from parashard_coordinator.core.saved import Saved
from parashard_coordinator.core.supervision import LocalLauncher

RUN, DIGEST = "run-1", "d" * 64
OPTIONS = CoreSettings(run_id=RUN, job_digest=DIGEST, steps_total=40, shards=2, workers=2, retry_pause_s=0.0)


def registration(shard: int, incarnation: int = 1) -> ShardRegistration:
    return ShardRegistration(incarnation, f"shard-{shard}:1", f"shard-{shard}:2")


def core_of(
    policy: LeasingPolicy | None = None,
    evaluate_after: Sequence[int] = (),
    launcher: LocalLauncher | None = None,
    registered: bool = True,
    **options: Any,
) -> Core:
    """Return a core whose shards, with `registered`, have all announced an empty first incarnation."""
    policy = policy or Async()
    chosen = OPTIONS._replace(**options)
    evaluations = Evaluations(list(evaluate_after), policy, chosen.steps_total)
    rounds = Rounds()
    if isinstance(policy, Sync):
        rounds = Rounds(chosen.shards, policy.size, chosen.steps_total, every_s=0.0)
    core = Core(JobRecord(chosen, policy, evaluations, launcher, rounds))
    if registered:
        for shard in range(chosen.shards):
            announce(core, shard)
    return core


def announce(
    core: Core,
    shard: int,
    incarnation: int = 1,
    applied: Iterable[tuple[int, int]] = (),
    *,
    held: Iterable[tuple[int, int]] = (),
    returnable: Iterable[int] = (0,),
    restored: str = "",
    process: int = 0,
    now_s: float = 0.0,
    skipped: Iterable[int] = (),
) -> None:
    """Announce an incarnation of a shard that has applied these intervals of steps and holds those beside them.

    `process` is the first incarnation of its process.
    """
    in_weights = IntervalSet(applied)
    both = in_weights.copy()
    for start, stop in held:
        both.add_range(start, stop)
    empty = IntervalSet((step, step + 1) for step in skipped)
    says = Announcement(
        registration(shard, incarnation), in_weights, both, empty, frozenset(returnable), restored, process
    )
    core.announced(shard, says, now_s)


def core_after(earlier: Core, policy: LeasingPolicy | None = None, **options: Any) -> Core:
    """Return the next coordinator's core: with the saved state, before its first call."""
    saved = decode(Saved, encode(earlier.job.saved()), "saved")
    core = core_of(policy, registered=False, incarnation=earlier.job.options.incarnation + 1, **options)
    core.job.resume(saved)
    return core


def announce_all(core: Core, *applied: Sequence[tuple[int, int]], incarnation: int = 1) -> None:
    for shard, steps in enumerate(applied):
        announce(core, shard, incarnation, steps)


def done(*steps: int, incarnations: Sequence[int] = (1, 1), loss: float = 0.5, skipped: bool = False) -> Any:
    """Return the acks of steps that these incarnations of the shards acknowledged."""
    return [CompletedStep(step, list(incarnations), loss, 8, skipped) for step in steps]


def judged(
    after_step: int,
    incarnations: Sequence[int] = (1, 1),
    error: str = "",
    judged_steps: int = 0,
    kind: FailureKind = FailureKind.OTHER,
    **metrics: float,
) -> Any:
    """Return the result of an evaluation of the weights that these incarnations of the shards had."""
    return [EvaluationResult(after_step, incarnations, metrics, error, judged_steps=judged_steps, kind=kind)]


class Caller:
    """One incarnation of a worker: numbers its calls and remembers what it holds."""

    def __init__(self, core: Core, name: str = "", now_s: float = 0.0, token: int = 0) -> None:
        self.token = token
        self.join(core, name, now_s)
        self.held: list[int] = []
        self.evaluating: list[int] = []
        self.sequence = 0

    def join(self, core: Core, name: str, now_s: float = 0.0) -> None:
        """Join a coordinator, perhaps another one than before; what is held stays."""
        self.core = core
        self.worker: WorkerRecord = core.register_worker(name, "arithmetic", "cpu", "host:9", now_s, self.token)
        self.name = self.worker.name

    def call(self, now_s: float = 0.0, *, lost: bool = False, **report: Any) -> LeaseAnswer:
        """Report, renew what is held and ask; with `lost` the reply never arrives."""
        ended = {c.step for c in report.get("completed", ())} | {failed[0] for failed in report.get("failed", ())}
        self.held = [step for step in self.held if step not in ended]
        told = {result.after_step for result in report.get("evaluated", ())}
        self.evaluating = [after_step for after_step in self.evaluating if after_step not in told]
        self.sequence += 1
        asked = {"held": self.held, "held_evaluations": self.evaluating, **report}
        answer = self.core.lease(LeaseCall(self.name, self.worker.incarnation, self.sequence, **asked), now_s)
        if not lost:
            self.held = [step for step in self.held if step not in answer.revoked]
            self.held += [grant.step for grant in answer.granted]
            self.evaluating += [evaluation.after_step for evaluation in answer.evaluations]
        return answer

    def lease(self, want: int, now_s: float = 0.0, **report: Any) -> list[int]:
        """Return the steps that a call grants."""
        return [grant.step for grant in self.call(now_s, want=want, **report).granted]

    def complete_all(self, want: int = 0, now_s: float = 0.0) -> list[int]:
        """Report all that is held as complete; return what is granted."""
        return self.lease(want, now_s, completed=done(*self.held))
