"""Cores of a coordinator that break a rule, each the smallest change of the real one that forgets it.

Used by `broken_rules` alone; the product has no switches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from parashard.plan.intervals import IntervalSet
from parashard_coordinator.core.callback_progress import CallbackProgress
from parashard_coordinator.core.calls import CoreSettings, LeaseAnswer, LeaseCall
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.evaluations import Evaluations
from parashard_coordinator.core.job_record import JobRecord
from parashard_coordinator.core.leases import StepLeases
from parashard_coordinator.core.membership import Shards, WorkerRecord
from parashard_coordinator.core.policies import NO_LIMIT, LeasingPolicy
from parashard_coordinator.core.rounds import Rounds
from parashard_coordinator.core.saved import Saved
from parashard_coordinator.core.supervision import LocalLauncher
from parashard_coordinator.run.store import RunStore


class NewestRate(CallbackProgress):
    """P37 off: a step is leased at the learning rate of the moment."""

    def rate_of(self, step: int) -> float:
        return self.rates[-1].learning_rate if self.rates else 0.0


def record_with_callbacks(progress: type[CallbackProgress]) -> type[JobRecord]:
    """Return the record of a job that decides learning rates by another class."""

    class Variant(JobRecord):
        def __init__(
            self,
            options: CoreSettings,
            policy: LeasingPolicy,
            evaluations: Evaluations,
            launcher: LocalLauncher | None,
            rounds: Rounds,
        ) -> None:
            super().__init__(options, policy, evaluations, launcher, rounds)
            self.callback_progress = progress(
                options.steps_total,
                options.steps_per_epoch,
                self.figures,
                policy,
                evaluations,
                options.callbacks,
            )

    return Variant


def record_with(leases: type[StepLeases]) -> type[JobRecord]:
    """Return the record of a job that leases by another class."""

    class Variant(JobRecord):
        def __init__(
            self,
            options: CoreSettings,
            policy: LeasingPolicy,
            evaluations: Evaluations,
            launcher: LocalLauncher | None,
            rounds: Rounds,
        ) -> None:
            super().__init__(options, policy, evaluations, launcher, rounds)
            self.leases = leases(
                options.steps_total,
                options.shards,
                policy,
                speculate_after=options.speculate_after,
                max_attempts=options.max_attempts,
            )

    return Variant


class AnyIncarnation(Shards):
    """P3 off: acks count, whichever incarnation of the shard gave them."""

    def acknowledged(self, incarnations: list[int]) -> list[int]:
        return list(range(len(incarnations)))


class CreditingRecord(JobRecord):
    """P3 off, with `AnyLife`."""

    def __init__(
        self,
        options: CoreSettings,
        policy: LeasingPolicy,
        evaluations: Evaluations,
        launcher: LocalLauncher | None,
        rounds: Rounds,
    ) -> None:
        super().__init__(options, policy, evaluations, launcher, rounds)
        self.shards = AnyIncarnation(options.shards, first_view=options.incarnation - 1 << 32)


class MergingLeases(StepLeases):
    """P3 off: what a shard's new incarnation says is added to what was believed of the one before."""

    def shard_registered(self, shard: int, applied: IntervalSet) -> int:
        both = applied.copy()
        for start, stop in self._acknowledged[shard].intervals():
            both.add_range(start, stop)
        return super().shard_registered(shard, both)


class LosingLeases(StepLeases):
    """P5 off: a step whose worker ended is not leased again."""

    def end(self, worker: str) -> list[int]:
        steps = super().end(worker)
        for step in steps:
            self._returned.discard(step)
        return steps


class TrustingLeases(StepLeases):
    """P5 off: a lease that a worker gives up counts as done."""

    def renew(self, worker: str, held: Sequence[int], now_s: float) -> list[int]:
        for step in self.held_by(worker) - set(held):
            self.acknowledge(worker, step, range(len(self._acknowledged)), now_s)
        return super().renew(worker, held, now_s)


class PausingCore(Core):
    """P8 off: a drain leases nothing at all, not even lost steps."""

    def _lease_limit(self) -> int:
        return super()._lease_limit() if self.job.draining.target is None else 0


class HastyRecord(JobRecord):
    """P8 off, with a coordinator that does not compare the sets: a drain is over as soon as it is asked for."""

    @property
    def drained(self) -> bool:
        return self.draining.target is not None and self.shards.all_registered and not self.over


class LaglessRecord(JobRecord):
    """P39 off: a coordinator that is started again does not know which lag holds."""

    def resume(self, saved: Saved, gap_s: float = 0.0) -> None:
        super().resume(saved.replaced(lags=()), gap_s)


class CountingLeases(StepLeases):
    """P24 off, with `KeepingRounds`: any ack of a step that is given up counts."""

    def acknowledge(
        self, worker: str, step: int, shards: Iterable[int], now_s: float, *, skipped: bool = False
    ) -> bool:
        return super().acknowledge(worker, step, shards, now_s, skipped=True)

    def acknowledged_steps(self, applied: IntervalSet, held: IntervalSet, skipped: IntervalSet) -> IntervalSet:
        return held


class UncountedCore(Core):
    """P26 off: the death of a worker says nothing about the step that it computed."""

    def _died(self, worker: WorkerRecord, why: str, now_s: float) -> bool:
        return False


class UnboundedLeases(StepLeases):
    """P9 off: the step lag has no limit."""

    def limit(self) -> int:
        return min(self.target, NO_LIMIT)


class BlindRounds(Rounds):
    """P24 off, with `KeepingRounds`: no rollback when shards disagree about what is skipped."""

    def _contested(self) -> int | None:
        return None


class KeptEvaluations(Core):
    """P25 off: a result counts, whichever incarnations' weights it judged."""

    def lease(self, call: LeaseCall, now_s: float) -> LeaseAnswer:
        present = self.job.shards.incarnations()
        return super().lease(
            call._replace(evaluated=[result._replace(incarnations=present) for result in call.evaluated]), now_s
        )


class UncheckedRunStore(RunStore):
    """P23 off: a coordinator does not look for a successor's claim."""

    def check_newest(self) -> None:
        return


class NoRollback(Rounds):
    """P12 off: no rollback, wherever the shards stand."""

    def decide_rollback(self, held: Callable[[int], IntervalSet]) -> bool:
        return False
