"""Training by any number of workers in virtual time: the product's cores and shard, real gradients, no waiting.

The coordinator's core leases, the worker's client and task pull, compute and push, the shard's core applies; between
them are function calls, and a queue of events is the clock. Deterministic given the trial, its seed and the schedule.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import random
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Never

import numpy as np
import threadpoolctl

import parashard as ps
from benchmarks.statistics.schedule import Method, Outcome, Schedule, Vector
from benchmarks.statistics.trial import Trial
from benchmarks.statistics.virtual_shard import VirtualShard
from benchmarks.statistics.virtual_worker import Leased, VirtualWorker
from parashard.api.backends import tried
from parashard.api.callback_follower import CallbackFollower
from parashard.api.fits import FitCall
from parashard.api.in_process.state import begin_or_resume
from parashard.data.base import Batch
from parashard.data.tree import rows_of
from parashard.display.live import JobView
from parashard.errors import NonFiniteGradient, StaleRequest
from parashard.job.schema import AUTO_DEPTH
from parashard.launch.runs import Run
from parashard.plan.variables import Float32s, values_sha256
from parashard.store import open_store
from parashard_coordinator.core.calls import CompletedStep, LeaseCall
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.leases import Grant
from parashard_coordinator.run.job_start import new_job_record
from parashard_worker.device import open_device
from parashard_worker.loading import task_of

STEP_S = 0.1
"""How long a batch takes at speed 1: short beside every limit of the coordinator on a silent or slow worker."""
JITTER = 0.1
ANNOUNCE_S = 1.0
EVENTS_MAX = 10_000_000


def simulate(
    trial: Trial,
    schedule: Schedule,
    seed: int,
    *,
    method: Method | None = None,
    points: int = 0,
    drift_every: int = 0,
) -> Outcome:
    """Train a trial by a schedule, and return the outcome.

    Parameters
    ----------
    trial : Trial
    schedule : Schedule
    seed : int
        Of the trainer, and of the workers' speeds.
    method : Method, optional
        Replaces the trial's optimizer, whose rate, schedule and clipping stay; for policies that apply each push.
    points : int
        Number of evaluations of the held-out examples during training.
    drift_every : int
        Steps between two measurements of drift; 0: never. For one worker.
    """
    optimizer = trial.optimizer
    if method is not None:
        kept = ("schedule", "clip_value", "clip_norm", "variable_clip_norm")
        optimizer = ps.SGD(optimizer.learning_rate, **{name: getattr(optimizer, name) for name in kept})
    strategy = ps.ParameterServerStrategy(shards=1, workers=schedule.workers, consistency=schedule.policy)
    trainer = ps.Trainer(trial.model, optimizer, strategy, seed=seed, name="statistics", settings=dict(trial.settings))
    backend = _Backend(
        lambda call, run: _Simulation(call, run, trial, schedule, seed, method, points, drift_every).run()
    )
    trainer._backend = backend
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.suppress(_Trained):
        trainer.fit(
            trial.train,
            validation_data=trial.held_out,
            epochs=trial.epochs,
            batch_size=trial.batch_size,
            verbose=0,
        )
    assert backend.outcome is not None
    return backend.outcome


class _Trained(Exception):
    """The simulation is over: nothing of the run is kept."""


class _Backend:
    """Trains a fit in virtual time, as `parashard.api.backends` do."""

    runs_script = False

    def __init__(self, simulated: Callable[[FitCall, Run], Outcome]) -> None:
        self._simulated = simulated
        self.outcome: Outcome | None = None

    def work(self, call: FitCall) -> Never:
        """There are no workers."""
        raise AssertionError

    def checked(self, call: FitCall) -> FitCall:
        """Choose the parts of a batch, as for a cluster."""
        return tried(call)

    def train(self, call: FitCall, run: Run, view: JobView, follower: CallbackFollower) -> Never:
        """Simulate."""
        with threadpoolctl.threadpool_limits(1), np.errstate(all="ignore"):
            self.outcome = self._simulated(call, run)
        raise _Trained


class _Simulation:
    """One training in progress."""

    def __init__(
        self,
        call: FitCall,
        run: Run,
        trial: Trial,
        schedule: Schedule,
        seed: int,
        method: Method | None,
        points: int,
        drift_every: int,
    ) -> None:
        assert run.declared is not None, "the run of a script"
        begun = begin_or_resume(run.job, run.declared, open_store(run.store_url), resume=False)
        resolved, job = begun.resolved, begun.resolved.job
        policy = job.consistency.policy
        self._trial, self._schedule, self._method = trial, schedule, method
        self._random = random.Random(seed)
        self._depth_max = AUTO_DEPTH if policy.kind == "auto" else schedule.depth
        device = open_device("cpu", "lab")
        self._task = task_of(job, resolved.steps, resolved.plan, call.model, call.source, device)
        variables = resolved.plan.variables.values()
        self._names = sorted(variable.name for variable in variables if not variable.state and not variable.frozen)
        self._shard = VirtualShard(begun)
        spec = replace(resolved.spec, held_out=0)  # the laboratory evaluates, not a worker
        record = new_job_record(resolved._replace(spec=spec), begun.run_id, begun.records.incarnation)
        record.report_data(resolved.summary(), ())
        self._core = Core(record)
        self._core.announced(0, self._shard.announcement(), 0.0)
        speeds = [1.0] * (schedule.workers - 1) + [schedule.slowest]
        self._workers = [
            VirtualWorker(index, speed, self._shard.client(f"worker-{index}"), self._task)
            for index, speed in enumerate(speeds)
        ]
        self._history: dict[int, dict[str, Float32s]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbered = 0
        self._now_s = 0.0
        self._outcome = Outcome()
        total = resolved.steps.total
        self._points = deque(total * point // points for point in range(1, points)) if points else deque()
        self._drift_every = drift_every

    def run(self) -> Outcome:
        """Train to the end."""
        job, schedule = self._core.job, self._schedule
        for worker in self._workers:
            self._join(worker)
        self._after(ANNOUNCE_S, self._announce)
        if schedule.kill_every_s:
            self._after(schedule.kill_every_s, self._kill_worker)
        if schedule.shard_kill_every_s and not self._task.tables:
            self._after(schedule.shard_kill_every_s / 2, self._cut)
        for _ in range(EVENTS_MAX):
            if job.over or job.complete:
                break
            self._now_s, _, event = heapq.heappop(self._events)
            try:
                event()
            except NonFiniteGradient:
                self._outcome.metrics = {self._trial.metric: 0.0 if self._trial.higher_is_better else math.inf}
                self._outcome.staleness = self._shard.staleness
                return self._outcome
        if job.over or not job.complete:
            raise RuntimeError(f"the simulated job ended as {job.state}: {job.reason}")
        due = job.due_checkpoint()
        assert due is not None, "the job is complete"
        self._shard.finish(due)
        outcome = self._outcome
        outcome.metrics = self._judged()
        outcome.curve.append((self._epochs(), outcome.metrics[self._trial.metric]))
        outcome.staleness = self._shard.staleness
        outcome.virtual_s = self._now_s
        outcome.lags = [] if job.controller is None else [lag.lag for lag in job.controller.lags]
        outcome.sha256 = values_sha256(self._values())
        return outcome

    # --- workers ---

    def _join(self, worker: VirtualWorker) -> None:
        device = self._task.device
        token = 1 + worker.index + len(self._workers) * worker.process
        known = self._core.register_worker(worker.name, device.fingerprint(), device.name, "", self._now_s, token)
        worker.call = LeaseCall(known.name, known.incarnation, 0)
        worker.idle_since_s = self._now_s
        self._go_on(worker)

    def _go_on(self, worker: VirtualWorker) -> None:
        """Pull as many steps as the pipeline has room for, and begin to compute the oldest."""
        if worker.computing is not None or (worker.pushing and not self._depth(worker)):
            return
        while len(worker.pulled) <= self._depth(worker):
            grant = self._leased(worker, want=1)
            if grant is None or not self._pull(worker, grant):
                break
        if not worker.pulled:
            return
        worker.computing = leased = worker.pulled.popleft()
        waits_s = max(0.0, leased.ready_s - self._now_s)
        share = leased.examples / self._trial.batch_size
        computes_s = STEP_S * share * (1 + JITTER * self._random.uniform(-1, 1)) / worker.speed
        if worker.idle_since_s is not None:
            worker.phases_s["lease"] += self._now_s - worker.idle_since_s
            worker.idle_since_s = None
        worker.phases_s["pull"] += waits_s
        worker.phases_s["compute"] += computes_s
        self._after(waits_s + computes_s, lambda: self._computed(worker, leased), worker)

    def _depth(self, worker: VirtualWorker) -> int:
        return min(self._depth_max, worker.depth)

    def _leased(self, worker: VirtualWorker, want: int) -> Grant | None:
        """Report completed steps, and return a leased one if there is one."""
        worker.call = worker.call._replace(
            sequence=worker.call.sequence + 1,
            held=worker.held,
            completed=worker.completed,
            want=want,
            drifts=worker.reports.drifts,
            phases_s=dict(worker.phases_s),
        )
        answer = self._core.lease(worker.call, self._now_s)
        worker.completed, worker.reports.drifts = [], []
        worker.depth = self._depth_max if answer.depth is None else answer.depth
        revoked = set(answer.revoked)
        worker.pulled = deque(leased for leased in worker.pulled if leased.grant.step not in revoked)
        return answer.granted[0] if answer.granted else None

    def _pull(self, worker: VirtualWorker, grant: Grant) -> bool:
        batch = self._task.batch_of(grant.step)
        try:
            pulled = worker.transfers.pull(grant, batch.keys)  # type: ignore[arg-type]  # has the same fields
        except StaleRequest:
            return False
        assert pulled is not None, "no step of the laboratory is skipped"
        values: dict[str, Float32s] = {**pulled.variables, **pulled.rows}
        if self._schedule.lag:
            values = self._lagging(grant.step, values)
        if self._method is not None:
            looked = self._method.look(worker.index, self._trained(values), self._shard.next_rate)
            values |= self._by_name(looked, values)
        transfer_s = STEP_S * self._schedule.transfer
        worker.phases_s["transfer"] += transfer_s
        worker.pulled.append(Leased(grant, batch, pulled, values, self._now_s + transfer_s, rows_of(batch.inputs)))
        return True

    def _lagging(self, step: int, values: dict[str, Float32s]) -> dict[str, Float32s]:
        """Return copies of the weights of `lag` rounds before, or of the first round if there are fewer."""
        assert self._task.round_steps is not None
        round_ = step // self._task.round_steps
        if round_ not in self._history:
            self._history[round_] = {name: value.copy() for name, value in values.items()}
            self._history.pop(round_ - self._schedule.lag - 1, None)
        return self._history[max(0, round_ - self._schedule.lag)]

    def _computed(self, worker: VirtualWorker, leased: Leased) -> None:
        """Compute the gradient at the weights that were pulled, and begin the push."""
        grant, batch, pulled = leased.grant, leased.batch, leased.pulled
        worker.probe.measure(grant, pulled)  # type: ignore[arg-type]  # a grant has the same fields
        loss, examples, gradients = self._task.gradients(batch, leased.values)
        worker.probe.keep(grant, batch, gradients, pulled)  # type: ignore[arg-type]
        worker.computing, worker.pushing = None, worker.pushing + 1
        worker.pushed_steps.append(grant.step)
        transfer_s = STEP_S * self._schedule.transfer
        worker.phases_s["transfer"] += transfer_s
        if transfer_s:
            worker.phases_s["push"] += 0.0 if self._depth(worker) else transfer_s
            self._after(transfer_s, lambda: self._pushed(worker, leased, loss, examples, gradients), worker)
            self._go_on(worker)
        else:
            self._pushed(worker, leased, loss, examples, gradients)

    def _pushed(
        self,
        worker: VirtualWorker,
        leased: Leased,
        loss: float | None,
        examples: int,
        gradients: dict[str, Float32s] | None,
    ) -> None:
        """Push, and report."""
        grant, batch, pulled = leased.grant, leased.batch, leased.pulled
        assert gradients is not None, "no model of the laboratory moves nothing"
        measured = bool(self._drift_every) and grant.step % self._drift_every == 0
        before = self._trained(gradients) if measured else None
        if self._method is not None:
            weights, before_it = self._trained(self._values()), self._trained(pulled.variables)
            computed, eta = self._trained(gradients), self._shard.next_rate
            direction = self._method.update(worker.index, computed, weights, before_it, eta)
            gradients = gradients | self._by_name(direction, gradients)
        worker.pushing -= 1
        worker.pushed_steps.remove(grant.step)
        try:
            incarnations = worker.transfers.push(grant, gradients, pulled)  # type: ignore[arg-type]
        except StaleRequest:
            pass
        else:
            worker.completed.append(CompletedStep(grant.step, list(incarnations), loss, examples))
            if loss is not None:
                self._outcome.losses.append(loss)
        pulled.release()
        worker.idle_since_s = self._now_s
        self._leased(worker, want=0)
        self._judge_on_the_way()
        if before is not None:
            self._outcome.drift.append(self._drift(batch, before))
        for other in self._waiting(worker):
            self._go_on(other)

    def _waiting(self, first: VirtualWorker) -> Iterator[VirtualWorker]:
        """Yield the workers that may have work now: the given one, then those that had found none."""
        yield first
        yield from (worker for worker in self._workers if worker is not first and worker.computing is None)

    # --- faults ---

    def _kill_worker(self) -> None:
        self._after(self._schedule.kill_every_s, self._kill_worker)
        worker = self._random.choice(self._workers)
        worker.process += 1
        worker.pulled.clear()
        worker.computing, worker.pushing = None, 0
        worker.pushed_steps, worker.completed = [], []
        self._outcome.kills += 1
        self._after(STEP_S, lambda: self._join(worker))

    def _cut(self) -> None:
        self._shard.cut()
        self._after(self._schedule.shard_kill_every_s / 2, self._kill_shard)

    def _kill_shard(self) -> None:
        self._shard.restore()
        for worker in self._workers:
            self._shard.use(worker.client)
        self._outcome.kills += 1
        self._core.announced(0, self._shard.announcement(), self._now_s)
        self._after(self._schedule.shard_kill_every_s / 2, self._cut)

    # --- measurements ---

    def _judge_on_the_way(self) -> None:
        complete = self._core.job.leases.lowest_incomplete
        if self._points and complete >= self._points[0]:
            while self._points and complete >= self._points[0]:
                self._points.popleft()
            self._outcome.curve.append((self._epochs(), self._judged()[self._trial.metric]))

    def _epochs(self) -> float:
        return self._core.job.leases.lowest_incomplete / self._task.steps.steps_per_epoch

    def _judged(self) -> dict[str, float]:
        keys = self._task.held_out_keys()
        return self._task.metrics(self._values(keys), contextlib.nullcontext, keys)

    def _values(self, keys: Mapping[str, Any] | None = None) -> Mapping[str, Float32s]:
        return self._shard.values(keys or {})

    def _drift(self, batch: Batch, before: Vector) -> float:
        """Return the relative change of a batch's gradient after one more update of the weights."""
        self._shard.commit()
        _, _, gradients = self._task.gradients(batch, {**self._values(batch.keys)})
        assert gradients is not None
        after = self._trained(gradients)
        return float(np.linalg.norm(after - before) / np.linalg.norm(before))

    def _trained(self, arrays: Mapping[str, Float32s]) -> Vector:
        """Return variables or gradients as one vector, without state and rows of tables."""
        return np.concatenate([arrays[name].ravel() for name in self._names]).astype(np.float64)

    def _by_name(self, vector: Vector, like: Mapping[str, Float32s]) -> dict[str, Float32s]:
        """Return the arrays of a vector, in the shapes of others."""
        parts = np.split(vector.astype(np.float32), np.cumsum([like[name].size for name in self._names])[:-1])
        return {name: part.reshape(like[name].shape) for name, part in zip(self._names, parts, strict=True)}

    # --- time ---

    def _after(self, seconds: float, event: Callable[[], None], worker: VirtualWorker | None = None) -> None:
        """Schedule an event, which is dropped if the worker's process has ended by then."""
        self._numbered += 1
        process = None if worker is None else worker.process

        def happens() -> None:
            if worker is None or worker.process == process:
                event()

        heapq.heappush(self._events, (self._now_s + seconds, self._numbered, happens))

    def _announce(self) -> None:
        self._core.announced(0, self._shard.announcement(), self._now_s)
        self._core.tick(self._now_s)
        self._after(ANNOUNCE_S, self._announce)
