"""A tiny job for the step loop: a model that can misbehave, data, scripted leases and shards in this process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parashard._proto import coordinator_pb2 as pb
from parashard.data.base import Batch, DataSpec
from parashard.plan.embedding import EmbeddingTable
from parashard.plan.partition import fixed_shards
from parashard.plan.steps import StepPlan
from parashard.plan.variables import Initializer, Variable
from parashard_worker.computing import Task
from parashard_worker.device import Cpu
from parashard_worker.leased import Work
from parashard_worker.loop import StepLoop
from support.in_process import Cluster, plan_of, variables_of

VARIABLES = variables_of(
    Variable("bias", (2,)),
    Variable("still", (2, 2), Initializer("constant", 1.0), frozen=True),
    Variable("weight", (4, 3)),
)
EXAMPLES, HELD_OUT, BATCH_SIZE = 20, 7, 4


def evaluation(after_step: int, incarnations: Sequence[int] = (1, 1), **more: Any) -> pb.EvaluationGrant:
    """Return the lease of an evaluation of the weights that these incarnations of the shards have."""
    return pb.EvaluationGrant(evaluation=after_step, incarnations=incarnations, **more)


class Numbered:
    """A data source whose example i is the number i."""

    spec = DataSpec(EXAMPLES, HELD_OUT, (1,), 2, "00")

    def examples(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return indices.astype(np.float32)[:, None], indices % 2

    def held_out(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return self.examples(np.arange(start, stop))


class Counting:
    """A model whose gradient at step s is s + 1 everywhere; `before` may raise or look, `spoil` changes gradients."""

    def __init__(self) -> None:
        self.computed: list[int] = []
        self.before: Callable[[Batch], None] = lambda batch: None
        self.spoil: Callable[[Batch, dict[str, Any]], None] = lambda batch, gradients: None

    def initial_variables(self) -> Mapping[str, Variable]:
        return VARIABLES

    def loss_and_gradients(
        self, variables: Mapping[str, Any], batch: Batch, xp: Any
    ) -> tuple[float, Mapping[str, Any]]:
        self.before(batch)
        self.computed.append(batch.step)
        gradients = {name: xp.full(v.shape, batch.step + 1.0, xp.float64) for name, v in VARIABLES.items()}
        self.spoil(batch, gradients)
        return float(batch.inputs.mean()), gradients

    def evaluate(self, variables: Mapping[str, Any], batch: Batch, xp: Any) -> Mapping[str, float]:
        self.before(batch)
        self.computed.append(batch.step)
        return {"mean": float(batch.inputs.mean()), "weight": float(variables["weight"].mean())}


@dataclass
class ScriptedLeasing:
    """Gives out what the script says and keeps what is reported."""

    work: deque[Work] = field(default_factory=deque)
    completions: list[pb.CompletedStep] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    kinds: dict[int, pb.FailureKind] = field(default_factory=dict)
    announced: list[int] = field(default_factory=list)
    known: bool = True  # the coordinator answers announcements
    drops: list[int] = field(default_factory=list)
    dropped_evaluations: list[int] = field(default_factory=list)
    evaluations: dict[int, tuple[dict[str, float], str]] = field(default_factory=dict)
    judged_steps: dict[int, int] = field(default_factory=dict)
    evaluation_kinds: dict[int, pb.FailureKind] = field(default_factory=dict)
    phases: Callable[[], dict[str, float]] = dict
    watched: list[Work] = field(default_factory=list)  # what examples are read for, or the model is at
    drifts: list[pb.StepDrift] = field(default_factory=list)
    depth: int = 99
    view: int = 1

    @property
    def over(self) -> bool:
        return not self.work

    def expected(self, step: int) -> int | None:
        return None

    def take(self, timeout_s: float) -> Work | None:
        return self.work.popleft() if self.work else None

    @contextmanager
    def computing(self, work: Work) -> Iterator[None]:
        self.watched.append(work)
        try:
            yield
        finally:
            self.watched.pop()

    reading = computing

    def completed(self, step: pb.CompletedStep) -> None:
        self.completions.append(step)

    def failed(self, step: int, reason: str, kind: pb.FailureKind = pb.FAILURE_KIND_UNSPECIFIED) -> None:
        self.failures[step], self.kinds[step] = reason, kind

    def drifted(self, drift: pb.StepDrift) -> None:
        self.drifts.append(drift)

    def announce(self, step: int) -> bool:
        self.announced.append(step)
        return self.known

    def dropped(self, step: int, *, queue_too: bool = False) -> None:
        self.drops.append(step)

    def evaluation_dropped(self, number: int) -> None:
        self.dropped_evaluations.append(number)

    def evaluated(self, result: pb.EvaluationResult) -> None:
        self.evaluations[result.evaluation] = (dict(result.metrics), result.error)
        self.judged_steps[result.evaluation] = result.judged_steps
        self.evaluation_kinds[result.evaluation] = result.kind


class Job:
    """A worker over two shards, which have the rows of `tables`, too; `run` works through the script."""

    def __init__(
        self,
        *work: int | Work,
        depth: int = 0,
        clip_norm: float | None = None,
        retry_budget_s: float = 60.0,
        cancelled: threading.Event | None = None,
        source: Any = None,
        model: Counting | None = None,
        tables: Sequence[EmbeddingTable] = (),
        **of_shard: Any,
    ) -> None:
        plan = plan_of(VARIABLES, shards=2, partitioner=fixed_shards(2))
        self.cluster = Cluster(plan, tables=tables, **of_shard)
        self.model = model or Counting()
        self.steps = StepPlan(EXAMPLES, BATCH_SIZE, epochs=2, seed=1)
        self.leasing = ScriptedLeasing(deque(pb.Grant(step=w) if isinstance(w, int) else w for w in work))
        self.refreshed = 0
        self.task = Task(
            model=self.model,
            source=source or Numbered(),
            steps=self.steps,
            plan=plan,
            device=Cpu(),
            clip_norm=clip_norm,
            round_steps=of_shard.get("round_steps"),
            tables={table.name: table for table in tables},
        )
        self.loop = StepLoop(
            self.task,
            self.cluster.client(retry_budget_s=retry_budget_s, cancelled=cancelled, look=self.look),
            self.leasing,  # type: ignore[arg-type]
            depth=depth,
        )

    def run(self, stopping: Callable[[], bool] = lambda: False) -> Job:
        self.loop.run(stopping)
        return self

    def look(self) -> Any:
        self.refreshed += 1
        return self.cluster.view(self.leasing.view)

    @property
    def completed(self) -> list[int]:
        return [c.step for c in self.leasing.completions]

    @property
    def applied(self) -> list[list[tuple[int, int]]]:
        return [list(shard.updates.applied.intervals()) for shard in self.cluster.shards]

    def weights(self, round_: int | None = None) -> dict[str, np.ndarray]:
        return self.cluster.weights(round_)
