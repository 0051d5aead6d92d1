"""Passes measurements to the controller of an `auto` job, and applies its decisions.

Pure: `now_s` is an argument. No effect in jobs of other policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parashard_coordinator.core.controller import SLOW_MIN_S, Controller, Drift, LagDecision
from parashard_coordinator.core.job_record import JobRecord
from parashard_coordinator.core.learning import NOT_FINITE
from parashard_coordinator.core.leases import Grant, NextBatches
from parashard_coordinator.core.membership import WorkerRecord


def steer(job: JobRecord, worker: WorkerRecord, drifts: Sequence[Drift], now_s: float) -> None:
    """Process a worker's measurements, and make the decisions that are due."""
    controller = job.controller
    if controller is None:
        return
    for drift in drifts:
        if drift.step < job.options.steps_total:
            controller.record_drift(drift)
    controller.keep_pace(job.leases.lowest_incomplete // controller.parts, now_s)
    _judge(job, controller, worker, now_s)
    batch = job.leases.lowest_incomplete // controller.parts
    diverges = bool(job.not_learned) or NOT_FINITE in job.problems
    if not controller.is_due(batch, diverges=diverges):
        return  # the usual case; the rest visits every worker
    members = [job.workers.live[name] for name in controller.taking_part(job.workers.live, now_s)]
    spent_s: dict[object, dict[str, float]] = {(member.name, member.incarnation): member.phases_s for member in members}
    decision = controller.decide_lag(batch, spent_s, now_s, diverges=diverges)
    if decision is not None:
        set_lag(job, decision)


def set_lag(job: JobRecord, decision: LagDecision) -> None:
    """Set the lag from the first unleased batch on; a change is stored before it takes effect."""
    controller, first_step = job.controller, job.leases.leased_so_far()
    assert controller is not None
    if controller.apply_decision(decision, first_step):
        job.decisions += 1
        batch = first_step // controller.parts
        job.add_event(f"from batch {batch:,} on the lag is {decision.lag}: {decision.reason}")


def at_most(job: JobRecord, worker: WorkerRecord, want: int, now_s: float) -> tuple[int, str, bool]:
    """Return how many of `want` steps a worker may get, the reason if none, and whether it is slow."""
    # In `auto` an even share of a batch, less the steps that the worker holds: the slowest part ends a batch.
    controller = job.controller
    if controller is None:
        return want, "", False
    slow = controller.paused_reason(worker.name, job.workers.live, now_s)
    if slow:
        return 0, slow, True
    share = max(1, controller.parts // sharing(job, now_s))
    room = share * (1 + controller.ahead) + depth_of(controller, worker) - job.leases.holds(worker.name)
    return max(0, min(want, room)), "it has its share of the batch", False


def next_batches(job: JobRecord) -> NextBatches | None:
    """Return which batches may be leased ahead: twice `ahead`, since reports arrive late."""
    controller = job.controller
    return NextBatches(2 * controller.ahead, controller.parts) if controller is not None and controller.ahead else None


def sharing(job: JobRecord, now_s: float) -> int:
    """Return the number of live workers that get steps."""
    live = job.workers.live
    return len(live) - (0 if job.controller is None else len(job.controller.slow_ones(live, now_s)))


def steered(job: JobRecord, grants: Sequence[Grant]) -> list[Grant]:
    """Add the minimum version of the weights to grants, and whether the drift is measured."""
    controller = job.controller
    if controller is None:
        return list(grants)
    return [
        grant._replace(
            probe=not grant.skip and controller.measures_drift(grant.step),
            least_version=controller.least_version(grant.step),
        )
        for grant in grants
    ]


def refill(job: JobRecord, worker: WorkerRecord) -> int | None:
    """Return the queue length at which a worker asks for more steps; None: the job's value."""
    controller = job.controller
    return None if controller is None else max(depth_of(controller, worker), controller.ahead // 2)


def depth(job: JobRecord, worker: WorkerRecord) -> int | None:
    """Return how many transfers a worker overlaps with computing; None: the job's value."""
    return None if job.controller is None else depth_of(job.controller, worker)


def depth_of(controller: Controller, worker: WorkerRecord) -> int:
    """Return 1 if a worker transfers while it computes, else 0."""
    return int(controller.overlaps(worker.phases_s))


def in_words(job: JobRecord, now_s: float) -> str:
    """Describe the lag and the workers that get no parts, with reasons; "" for other policies."""
    controller = job.controller
    if controller is None:
        return ""
    found = controller.slow_ones(job.workers.live, now_s)
    slow = [f"{name} gets no parts ({why})" for name, why in found.items()]
    return "; ".join([f"lag {controller.lag} ({controller.reason})", *slow])


def figures(job: JobRecord) -> dict[str, Any]:
    """Return the changes of the lag and the measured drifts, for the report; empty for other policies."""
    controller = job.controller
    if controller is None:
        return {}
    return {
        "lags": [
            {"first_batch": first_step // controller.parts, "lag": lag, "reason": reason}
            for first_step, lag, reason in controller.lags
        ],
        "drifts": [
            {"batch": step // controller.parts, "drift": drift, "updates": updates}
            for step, drift, updates in controller.drifts
        ],
    }


def _judge(job: JobRecord, controller: Controller, worker: WorkerRecord, now_s: float) -> None:
    times = job.leases.times
    own = times.of(worker.name)
    others_s = times.of_others(worker.name) if own and own[-1] > SLOW_MIN_S else None
    slow = controller.judge_worker(worker.name, own, others_s, now_s)
    if slow:
        job.add_event(slow)
    if slow or controller.paused_reason(worker.name, job.workers.live, now_s):
        times.forget(worker.name)  # it is judged by new parts after the pause
