"""The jobs that the simulation runs, and what their final weights say: the oracles of the protocol.

Owns a job's model, data, optimizer and audit. Knows no process and no message. Everything is tiny: a run is to take
some tens of milliseconds.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from parashard.data.base import Batch
from parashard.data.generated import SyntheticOptions, SyntheticSource
from parashard.job.policy import Policy
from parashard.models.base import Audited, Model
from parashard.models.networks import MlpOptions, MultilayerPerceptron
from parashard.models.oracles import Ledger, Torn, TornOptions
from parashard.plan.embedding import EmbeddingTable, mixed
from parashard.plan.optimizers import SGD, Adam, OptimizerSpec
from parashard.plan.partition import Partition, Partitioner, Plan, fixed_shards, maximum_size, place, split, whole
from parashard.plan.row_rules import NO_RULES, RowRules
from parashard.plan.state import Int64s, counter_rows, counter_values
from parashard.plan.steps import StepPlan
from parashard.plan.variables import Float32s, Variable
from parashard_server.state.rows.embedding_tables import RowGradients, summed
from support.reference_rows import ReferenceRows

SEED = 5
EPOCHS = 3
EXAMPLES, BATCH = 20, 3  # 7 steps an epoch, the last one short; 21 steps: the last round of sync:4 has one step
SPLIT_BATCH = 8  # of `auto`: 3 batches an epoch; the last one has 4 examples, all in its first part

STEPS = 21  # the most that a job has
RULES = {
    "async": NO_RULES,
    "auto": NO_RULES,
    "sync": RowRules(admit_after=2, evict_unused_steps=3),
}  # rounds have one order


class SeededTorn(Torn):
    """The torn test with constants that the simulation draws: its own come from the system, and no seed names them."""

    def drawn(self, variables: Mapping[str, Any], rng: random.Random) -> dict[str, Float32s]:
        """Return one attempt's gradient."""
        constant = rng.choice((-1, 1)) * rng.randint(1, 1024) / 1024
        return {name: np.full_like(values, constant) for name, values in variables.items()}


class CountedLedger(Ledger):
    """The ledger, and whole numbers of 64 bits beside it: state without a gradient, which every step adds to."""

    def initial_variables(self) -> Mapping[str, Variable]:
        """Return the ledger and five counters."""
        return {**super().initial_variables(), "counts": Variable("counts", (5, 8), state="counter")}

    def loss_and_gradients(
        self, variables: Mapping[str, Any], batch: Batch, xp: Any
    ) -> tuple[float, Mapping[str, Any]]:
        """Return the ledger's entries, and what a step adds to the counters."""
        loss, entries = super().loss_and_gradients(variables, batch, xp)
        return loss, {**entries, "counts": counter_rows(added(batch.step))}


def added(step: int) -> Int64s:
    """Return what a step adds to the counters: numbers of either sign that need many of their bytes."""
    return np.array([1, step, -step, (-3) ** step, (step + 1) << 40], np.int64)


class NormalizedPerceptron(MultilayerPerceptron):
    """A perceptron beside whose weights a running average of the inputs is kept, as batch normalisation does."""

    def initial_variables(self) -> Mapping[str, Variable]:
        """Return the weights and the average."""
        return {**super().initial_variables(), "seen": Variable("seen", (4,), state="average:0.25")}

    def loss_and_gradients(
        self, variables: Mapping[str, Any], batch: Batch, xp: Any
    ) -> tuple[float | Any, Mapping[str, Any]]:
        """Return the gradients, and the batch's mean."""
        loss, gradients = super().loss_and_gradients(variables, batch, xp)
        return loss, {**gradients, "seen": batch.inputs.mean(axis=0)}


@dataclass(frozen=True)
class Job:
    """All that a run needs to know of the job itself."""

    oracle: str
    policy: Policy
    model: Model
    variables: Mapping[str, Variable]
    batches: tuple[Batch, ...]
    spec: OptimizerSpec
    mean: bool
    partitioner: Partitioner | None  # None: cut into as many pieces as there are shards
    tables: tuple[EmbeddingTable, ...] = ()

    @property
    def steps_total(self) -> int:
        """S."""
        return len(self.batches)

    @property
    def round_steps(self) -> int | None:
        """N in `sync:N`, else None."""
        return self.policy.bound if self.policy.kind == "sync" else None

    @property
    def together(self) -> int:
        """Steps that move the weights together."""
        return self.policy.steps_of_update

    def plan(self, shards: int) -> Plan:
        """Place the variables."""
        return place(self.variables, split(self.variables, self.partitioner or fixed_shards(shards)), shards)

    def rows(self, step: int) -> dict[str, RowGradients]:
        """Return what a step adds to rows: each example to one of its own and to one of three, the step to its own."""
        if not self.tables:
            return {}
        batch = self.batches[step]
        if not len(batch.indices):
            return {}
        ids = [batch.indices, EXAMPLES + batch.indices % 3, np.array([1000 + step])]
        used, counts = np.unique(np.concatenate(ids), return_counts=True)
        keys = mixed(used)
        order = np.argsort(keys)
        values = counts[order, None] * np.array([1, (batch.epoch + 1) ** 2], np.float32)
        return {"rows": RowGradients(keys[order], values.astype(np.float32))}

    def due_rows(self, steps: Collection[int], target: int, rate_of: Callable[[int], float]) -> ReferenceRows:
        """Return the rows after all steps below a target, of which only `steps` have rows; one after the other."""
        (table,) = self.tables
        reference, together = ReferenceRows(table, SEED), self.together
        for clock, first in enumerate(range(0, target, together), 1):
            pushed = [self.rows(step) for step in range(first, min(first + together, target)) if step in steps]
            pushed = [rows for rows in pushed if rows]
            if pushed:
                added = summed(pushed)["rows"]
                reference.push(added.keys, added.values, clock=clock, learning_rate=rate_of(first) or None)
        reference.pull(np.empty(0, np.uint64), -(-target // together))
        return reference

    def gradients(self, step: int, variables: Mapping[str, Float32s], rng: random.Random) -> dict[str, Float32s]:
        """Return one attempt's gradients, arrays of the caller's own; none of a step without examples."""
        if not len(self.batches[step].indices):
            return {}
        if isinstance(self.model, SeededTorn):
            return self.model.drawn(variables, rng)
        return dict(self.model.loss_and_gradients(variables, self.batches[step], np)[1])

    def audit(
        self,
        variables: Mapping[str, Float32s],
        steps: Collection[int],
        partitions: Sequence[Partition],
        rate_of: Callable[[int], float],
    ) -> list[str]:
        """Return what a shard's part of the final weights violates, by itself, if exactly these steps are in it.

        `rate_of` is the learning rate of a step; 0: the job's own.
        """
        steps = [step for step in steps if len(self.batches[step].indices)]
        if isinstance(self.model, Ledger):  # a sum of gradients that are the same for any weights
            entries = [self.model.loss_and_gradients(variables, self.batches[s], np)[1]["ledger"] for s in steps]
            rates = [rate_of(step) or self.spec.learning_rate for step in steps]
            due = np.sum([-rate * entry for rate, entry in zip(rates, entries, strict=True)], 0)  # exact: powers of two
            counted = np.sum([added(s) for s in steps], 0) if steps else np.zeros(5, np.int64)
            unequal = {
                "ledger": (variables["ledger"] != due).any(axis=1),
                "counts": counter_values(variables["counts"]) != counted,
            }
            wrong = sum(int(unequal[p.variable][p.row_start : p.row_stop].sum()) for p in partitions)
            return [f"{wrong} rows are not what the steps add up to"] if wrong else []
        if not isinstance(self.model, Audited):
            return []
        counts = self.model.audit(dict(variables), EPOCHS)
        return [f"{name} is {count}" for name, count in counts.items() if count]


@lru_cache
def job(oracle: str, policy: Policy) -> Job:
    """Return the job of an oracle: "ledger", "rows" (the ledger and a table), "torn" or "digest"."""
    source = SyntheticSource(SyntheticOptions(examples=EXAMPLES, features=4, classes=3))
    size = SPLIT_BATCH if policy.kind == "auto" else BATCH
    steps = StepPlan(EXAMPLES, size, EPOCHS, SEED, parts=policy.parts)
    batches = []
    for step in range(steps.total):
        indices = steps.indices(step)
        batches.append(Batch(step, steps.epoch_of(step), indices, *source.examples(indices)))
    model: Model
    spec: OptimizerSpec = SGD(learning_rate=-1.0)
    partitioner: Partitioner | None = None
    tables: tuple[EmbeddingTable, ...] = ()
    if oracle == "rows":
        tables = (EmbeddingTable("rows", 2, spec, rows_max=64, keys_per_step_max=16, rules=RULES[policy.kind]),)
    if oracle in {"ledger", "rows"}:
        model = CountedLedger(source.spec)
        partitioner = maximum_size(24)  # 3 rows: several partitions a shard
    elif oracle == "torn":
        model = SeededTorn(TornOptions(rows=2))
        partitioner = whole
    else:
        model = NormalizedPerceptron(MlpOptions(hidden=(3,), activation="tanh"), source.spec, SEED)
        spec = Adam(learning_rate=0.05)
    assert len(batches) <= STEPS
    declared = model.initial_variables()
    variables = {name: v for name, v in declared.items() if isinstance(v, Variable)}
    return Job(oracle, policy, model, variables, tuple(batches), spec, oracle == "digest", partitioner, tables)


def learning_rate_after(after_steps: int) -> float:
    """Return the learning rate that callbacks decide after so many steps: a power of two, so that sums are exact."""
    return 2.0 ** -(1 + after_steps % 4)


def planned_rates() -> dict[int, float]:
    """Return the learning rates that callbacks decide before the first step, by epoch."""
    return {epoch: learning_rate_after(epoch) for epoch in range(EPOCHS)}


def fingerprint(variables: Mapping[str, Float32s]) -> float:
    """Return a number that tells weights apart: the metric that the simulation's evaluations have."""
    return float(int(digest(variables)[:12], 16))


def digest(variables: Mapping[str, Float32s]) -> str:
    """Return the SHA-256 of all values, in name order."""
    content = b"".join(np.ascontiguousarray(variables[name], "<f4").tobytes() for name in sorted(variables))
    return hashlib.sha256(content).hexdigest()
