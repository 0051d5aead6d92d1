"""The judge: what a run that has ended violates. The oracles of the protocol, and what it promises of checkpoints.

Reads final weights, the store and the shards that live. Knows nothing of what happened on the way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from sim_coordinator import CoordinatorProcess, Ending
from sim_jobs import EPOCHS, STEPS, Job, digest, fingerprint, job, planned_rates
from sim_parts import REAL, Builder
from sim_settings import Setting
from sim_shard import ShardProcess

from parashard.checkpoints.catalogue import Catalogue
from parashard.checkpoints.row_files import iterate_rows
from parashard.checkpoints.state import whole_model
from parashard.errors import DamagedCheckpoint, StoreFailed
from parashard.job.policy import Policy
from parashard.job.sections import CheckpointOptions
from parashard.plan.embedding import BUCKET_BITS, bucket_ranges
from parashard.plan.intervals import IntervalSet
from parashard.plan.partition import Partition, Plan
from parashard.plan.variables import Float32s
from parashard.store.claims import newest_claim
from parashard_coordinator.core.callback_progress import DecidedRate
from parashard_coordinator.core.calls import JobState
from support.store_fakes import MemoryStore


@lru_cache
def faultless_digest(
    oracle: str,
    policy: Policy,
    steps: int = STEPS,
    skipped: tuple[int, ...] = (),
    rates: tuple[tuple[int, float], ...] = (),
) -> str:
    """Return the digest of the weights after so many steps, one after the other, computed without any process.

    `rates` are the learning rates, each with the first step that it governs.
    """
    job_ = job(oracle, policy)
    plan, round_steps = job_.plan(1), job_.round_steps
    shard = Builder(job_, plan, 0, 1 << 20, REAL, CheckpointOptions()).build(1, None)
    for step in range(steps):
        rate = next((rate for first, rate in reversed(rates) if first <= step), None)
        shard.updates.admit(step, rate)
        pulled = joined(plan, [shard.storage.weights])
        gradients = job_.gradients(step, pulled, random.Random(0))
        vector = np.zeros_like(shard.storage.weights)
        for placed in plan.layouts[0] if gradients else ():
            vector[placed.offset : placed.stop] = rows_of(gradients, placed.partition)
        shard.updates.take(step, vector if gradients and step not in skipped else None, rate)
    if round_steps is not None:
        shard.updates.reach(-(-steps // round_steps))
    return digest(joined(plan, [shard.storage.weights]))


def violations(
    setting: Setting,
    job_: Job,
    coordinator: CoordinatorProcess,
    shards: Sequence[ShardProcess],
    store: MemoryStore,
    ending: Ending,
    plan: Plan,
) -> list[str]:
    """Return what is wrong with a run whose job is over; each line begins with the oracle's name."""
    core, final = coordinator.core, coordinator.final
    if core.job.state is not JobState.DONE:
        return [f"progress: the job is {core.job.state.name}: {core.job.reason}"]
    if final is None:
        return ["checkpoint: the job is done without one"]
    target = core.job.leases.target
    # A stop that was told may only move up, to what some shard has applied already.
    forgotten = [s for s in ending.stops if not s <= target or not core.job.early_stop]
    found = [f"stop: workers were told of a stop at step {s}, and it was at {target}" for s in forgotten]
    reported = coordinator.metrics["weights"] if coordinator.metrics is not None else None
    if setting.evaluate_every_epochs and reported != fingerprint(final):
        found.append("report: its metrics are not those of the final weights")
    skipped = _skipped(store)
    found += _skips(setting, coordinator, skipped)
    found += _rates(setting, coordinator, ending, target)
    found += _audits(setting, job_, final, range(target), plan, skipped, core.job.callback_progress.rate_of)
    found += _rows(job_, store, target, skipped, setting, core.job.callback_progress.rate_of)
    found += _checkpoints(store, target)
    for process in shards:
        shard = process.shard
        incarnations = {newest_claim(store, process.name), coordinator.registrations[shard.identity.shard].incarnation}
        if not process.alive or incarnations != {shard.identity.incarnation}:
            continue  # it is dead, superseded, or began after the end was decided
        applied = list(shard.updates.applied.intervals())
        if core.job.early_stop:  # an earlier coordinator's lease may still reach past the stop
            if next(shard.updates.applied.missing(0, target), None) is not None:
                found.append(f"exactly once: {process.name} applied the steps {applied}, and the stop is at {target}")
        elif applied != [(0, target)]:
            found.append(f"exactly once: {process.name} applied the steps {applied}")
        elif any(
            (shard.storage.weights[p.offset : p.stop] != rows_of(final, p.partition)).any()
            for p in shard.storage.layout
        ):
            found.append(f"exactly once: the weights of {process.name} moved after the job was done")
    found += _pace(setting, coordinator, shards)
    if setting.oracle == "digest":
        everywhere = tuple(step for step in range(target) if step in skipped[0])
        rates = tuple((rate.first_step, rate.learning_rate) for rate in core.job.callback_progress.rates)
        expected = faultless_digest("digest", setting.policy, target, everywhere, rates)
        if digest(final) != expected:
            found.append(f"digest: {digest(final)[:12]} is not the faultless {expected[:12]}")
    return found


def _pace(setting: Setting, coordinator: CoordinatorProcess, shards: Sequence[ShardProcess]) -> list[str]:
    """Check bounds of staleness where no shard was restored (P9, P39), and that rounds return for a loss only (P10)."""
    found = []
    lag = max(process.shard.record.step_lag_max for process in shards)
    if (
        setting.policy.kind == "ssp"
        and not any(p.shard.identity.incarnation > 1 for p in shards)
        and lag > setting.policy.bound
    ):
        found.append(f"ssp: a shard saw a step lag of {lag}")
    controller = coordinator.core.job.controller
    if controller is not None:
        lags, stale = [0, *(change.lag for change in controller.lags)], 0
        for process in shards:
            stale = max(stale, *process.shard.record.staleness, 0)
        if stale > max(lags):
            found.append(f"lag: a gradient was {stale} updates old, with the lags {lags}")
        if coordinator.core.job.leases.target % controller.parts:
            found.append(f"batch: the job ended within a batch, at step {coordinator.core.job.leases.target}")
    lost = coordinator.incarnation > 1 or any(process.lifecycle.first_incarnation > 1 for process in shards)
    if coordinator.core.job.rounds.rollbacks and not lost:
        found.append("rollback: shards returned to an earlier round, and none had lost anything")
    return found


def _rates(setting: Setting, coordinator: CoordinatorProcess, ending: Ending, target: int) -> list[str]:
    """Check that what callbacks were told of learning rates holds; where leasing waits, from the milestone on (P37)."""
    rates = coordinator.core.job.callback_progress.rates
    found = [f"rate: {rate} was told, and does not hold" for rate in sorted(ending.told_rates - set(rates))]
    if setting.waits or setting.plans:
        due = [DecidedRate(after, rate, after) for after, rate in sorted(ending.decided.items()) if after < target]
        if setting.decides and setting.plans:
            job_ = coordinator.core.job
            begin = [job_.policy.boundary(epoch * job_.options.steps_per_epoch) for epoch in range(EPOCHS)]
            due = [DecidedRate(step, planned_rates()[epoch], 0) for epoch, step in enumerate(begin) if step < target]
        found += (
            [f"rate: {rates}, and callbacks decided {due}"]
            if [r for r in rates if r.first_step < target] != due
            else []
        )
    return found


def _skipped(store: MemoryStore) -> list[IntervalSet]:
    """Return which steps each shard says were skipped, in its part of the last drained checkpoint."""
    catalogue = Catalogue(store)
    last = catalogue.newest_job_manifest()
    assert last is not None
    return [catalogue.part_manifest(last, shard).skipped_steps for shard in range(len(last.parts))]


def _audits(
    setting: Setting,
    job_: Job,
    final: Mapping[str, Float32s],
    steps: Sequence[int],
    plan: Plan,
    skipped: Sequence[IntervalSet],
    rate_of: Callable[[int], float],
) -> list[str]:
    """Check each shard's part of the final weights for the steps that it has not skipped."""
    never = setting.bad_step if setting.bad_step_fails == 1.0 else None  # P6: no attempt at it reaches any shard
    found = []
    for shard, partitions in enumerate(plan.shards):
        due = [step for step in steps if step not in skipped[shard] and step != never]
        found += [f"{setting.oracle}: {text}" for text in job_.audit(final, due, partitions, rate_of)]
    return found


def _rows(
    job_: Job,
    store: MemoryStore,
    target: int,
    skipped: Sequence[IntervalSet],
    setting: Setting,
    rate_of: Callable[[int], float],
) -> list[str]:
    """Check every row of the last drained checkpoint; where there are rounds also how often it was pushed, and when."""
    if not job_.tables:
        return []
    catalogue, found = Catalogue(store), []
    last = catalogue.newest_job_manifest()
    assert last is not None
    never = setting.bad_step if setting.bad_step_fails == 1.0 else None
    for shard, (begin, end) in enumerate(bucket_ranges(len(last.parts))):
        steps = {step for step in range(target) if step not in skipped[shard] and step != never}
        reference = job_.due_rows(steps, target, rate_of)
        own = {key for key in (*reference.rows, *reference.counted) if begin <= key >> (64 - BUCKET_BITS) < end}
        due = {key: (row.values.tobytes(), row.t, row.last_use) for key, row in reference.rows.items() if key in own}
        due |= {key: (b"", *counted) for key, counted in reference.counted.items() if key in own}
        seen: dict[int, tuple[bytes, int, int]] = {}
        try:
            stored = list(iterate_rows(store, catalogue.part_manifest(last, shard)))
        except DamagedCheckpoint as error:
            found.append(f"rows: {error}")
            continue
        for _, rows in stored:
            times = zip(rows.t.tolist(), rows.last_use.tolist(), strict=True)
            values = (row.tobytes() for row in rows.values)
            seen |= {key: (row, *use) for key, row, use in zip(rows.keys.tolist(), values, times, strict=True)}
        if not job_.round_steps:  # when a row was pushed last depends on the order of steps
            due, seen = ({key: (*row[:2], 0) for key, row in each.items()} for each in (due, seen))
        wrong = [key for key in due.keys() | seen.keys() if due.get(key) != seen.get(key)]
        found += [f"rows: {len(wrong)} of {len(due)} on shard {shard}"] if wrong else []
    return found


def _skips(setting: Setting, coordinator: CoordinatorProcess, skipped: Sequence[IntervalSet]) -> list[str]:
    """Check that skips are the same everywhere in rounds, and that the coordinator knows of all of them (P24)."""
    core, found = coordinator.core, []
    each = [set(_members(one)) for one in skipped]
    everywhere, anywhere = set.intersection(*each), set.union(*each)
    if setting.policy.kind == "sync" and everywhere != anywhere:
        found.append(f"skip: shards have skipped {each}")
    if not anywhere <= core.job.leases.skips:
        found.append(f"skip: not decided by the coordinator: {sorted(anywhere - core.job.leases.skips)}")
    if setting.bad_step is None and anywhere:
        found.append(f"skip: {sorted(anywhere)} were skipped, and none of them was bad")
    told = (len(core.job.skipped.everywhere()), len(core.job.skipped.partly()))
    if told != (len(everywhere), len(anywhere - everywhere)):
        found.append(f"report: {told} steps were skipped everywhere and partly, of {each}")
    return found


def _members(steps: IntervalSet) -> list[int]:
    return [step for start, stop in steps.intervals() for step in range(start, stop)]


def rows_of(variables: Mapping[str, Float32s], p: Partition) -> Float32s:
    """Return a partition's values, flat."""
    return variables[p.variable][p.row_start : p.row_stop].reshape(-1)


def _checkpoints(store: MemoryStore, target: int) -> list[str]:
    """Check that each drained checkpoint has the same steps on every shard, and the last one the job's (P7, P8)."""
    catalogue, found = Catalogue(store), []
    for number in catalogue.job_checkpoints():
        try:
            manifest = catalogue.job_manifest(number)
            for shard in range(len(manifest.parts)):
                catalogue.part_manifest(manifest, shard)
            whole_model(store, manifest)
        except StoreFailed as error:
            found.append(f"checkpoint: {error}")
    newest = catalogue.newest_job_manifest()
    if newest is not None and newest.final and newest.steps != target:
        found.append(f"report: the job ended with {newest.steps} steps, and says {target}")
    return found


def joined(plan: Plan, vectors: Sequence[Float32s]) -> dict[str, Float32s]:
    """Return variables by name, copied out of the shards' flat vectors."""
    variables = {name: np.empty(declared.shape, np.float32) for name, declared in plan.variables.items()}
    for vector, layout in zip(vectors, plan.layouts, strict=True):
        for placed in layout:
            rows_of(variables, placed.partition)[:] = vector[placed.offset : placed.stop]
    return variables
