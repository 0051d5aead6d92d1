"""Job: the whole of a job file, checked key by key and then as a whole.

Each package owns its own table: data sources, models and optimizers theirs, this folder the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from parashard.data.options import DataOptions
from parashard.encodings.encoding import Encoding
from parashard.errors import ConfigurationError
from parashard.frozen_model import FrozenModel
from parashard.job.embeddings import TableSettings, embedding_of
from parashard.job.keys import dotted
from parashard.job.model_options import ModelOptions
from parashard.job.policy import Policy
from parashard.job.sections import CheckpointOptions, ClusterOptions, ConsistencyOptions, EvaluationOptions, JobOptions
from parashard.job.validation import Relation, check_relations
from parashard.plan.optimizers import OptimizerOptions
from parashard.plan.steps import StepPlan, parts_of_batch
from parashard.plan.variables import Variable
from parashard.process.addresses import PORT_MAX
from parashard.process.resources import threads_for

AUTO_DEPTH = 1  # most steps beside the present one of a worker in `auto`


def _checked_encoding(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return str(Encoding.parse(value))
        except ConfigurationError as error:
            raise ValueError(error.message.partition("allowed: ")[2]) from None
    return value


class VariableSettings(FrozenModel):
    """Settings of the variables that one pattern matches; an unset key changes nothing."""

    frozen: bool | None = Field(default=None, description="True: the variable never changes.")
    decay: bool | None = Field(default=None, description="False: no weight decay.")
    learning_rate_factor: float | None = Field(default=None, ge=0, le=1e15, description="Multiplies the learning rate.")
    encoding: Annotated[str, BeforeValidator(_checked_encoding)] | None = Field(
        default=None, description="How gradients travel; int8 and topk push later what they leave out."
    )


def apply_settings(variables: Mapping[str, Variable], settings: Mapping[str, VariableSettings]) -> dict[str, Variable]:
    """Return the variables with the settings applied."""
    # Patterns are those of the shell (`*`, `?`, `[abc]`), case matters, and a pattern must match the whole name. Where
    # several patterns match one variable, the later one in the job file wins, key by key. State without a gradient
    # takes `frozen` only: the other keys concern gradients.
    changed = dict(variables)
    for pattern, setting in settings.items():
        names = [name for name in changed if fnmatchcase(name, pattern)]
        if not names:
            raise ConfigurationError(
                f"{dotted('variables', pattern)}: the pattern matches no variable; the model has: "
                f"{', '.join(sorted(variables)) or 'none'}"
            )
        given = {key: value for key, value in setting.plain().items() if value is not None}
        for name in names:
            of_state = {key: value for key, value in given.items() if key == "frozen"}
            changed[name] = dataclasses.replace(changed[name], **(of_state if changed[name].state else given))
    return changed


class Job(FrozenModel):
    """A job as its file, environment and flags describe it, frozen and complete; `load_job` made paths absolute."""

    model_config = ConfigDict(defer_build=False)  # built at import: once for all children of a fork server

    job: JobOptions = Field(description="What is trained for how long.")
    data: DataOptions = Field(description="Where the examples come from.")
    model: ModelOptions = Field(description="What computes the loss and its gradients.")
    optimizer: OptimizerOptions = Field(description="How a gradient changes the variables.")
    variables: dict[str, VariableSettings] = Field(default_factory=dict, description="Settings of variables by name.")
    tables: dict[str, TableSettings] = Field(default_factory=dict, description="Embedding tables, by name.")
    consistency: ConsistencyOptions = Field(
        default_factory=ConsistencyOptions, description="When steps may run ahead of each other."
    )
    evaluation: EvaluationOptions = Field(
        default_factory=EvaluationOptions, description="When the held-out split is measured."
    )
    checkpoint: CheckpointOptions = Field(
        default_factory=CheckpointOptions, description="Where and how often the shards' state is saved."
    )
    cluster: ClusterOptions = Field(
        default_factory=ClusterOptions, description="The processes, and how they share the work."
    )

    @model_validator(mode="after")
    def _check_relations(self) -> Self:
        """Refuse values that exclude each other."""
        check_relations(self, _broken_relations(self))
        return self

    @property
    def batch_clip_norm(self) -> float | None:
        """The norm that shards clip the gradient of a batch of several parts to."""
        return self.optimizer.clip_norm if self.consistency.policy.parts > 1 else None

    @property
    def step_clip_norm(self) -> float | None:
        """The norm that workers clip the gradient of a step to."""
        return None if self.batch_clip_norm is not None else self.optimizer.clip_norm

    @property
    def depth_max(self) -> int:
        """The most steps that a worker has in flight besides one; in `auto` the coordinator chooses how many."""
        return AUTO_DEPTH if self.consistency.policy.kind == "auto" else self.cluster.pipeline_depth

    def complete(self) -> Job:
        """Return the job with the parts of a batch chosen, if it leaves them open."""
        policy = self.consistency.policy
        if policy.kind != "auto" or policy.bound:
            return self
        parts = parts_of_batch(self.cluster.workers, self.job.batch_size)
        return self.replaced(consistency=self.consistency.replaced(policy=Policy("auto", parts)))

    def compute_threads(self, environ: Mapping[str, str]) -> int:
        """Return the compute threads of one worker; in `sync:N` one, unless the job or the environment says more."""
        sync = self.consistency.policy.kind == "sync"
        return threads_for(self.cluster.worker_threads, self.cluster.workers, reproducible=sync, environ=environ)

    @property
    def consistency_in_words(self) -> str:
        """How gradients move the weights, for screens."""
        policy = self.consistency.policy
        if policy.kind != "auto":
            return str(policy)
        parts = "1 part" if policy.parts == 1 else f"{policy.parts} parts"
        return f"auto: batches of {self.job.batch_size} in {parts}"

    def steps(self, examples: int, *, batched: bool = False) -> StepPlan:
        """Return the job's steps over a number of training examples, or of batches if the data are `batched`."""
        job = self.job
        return StepPlan(
            examples,
            job.batch_size,
            job.epochs,
            job.seed,
            job.first_epoch or 0,
            job.steps_per_epoch,
            bool(job.drop_last),
            job.shuffle is not False,
            job.passes_before or 0,
            self.consistency.policy.parts,
            batched,
        )


# --- relations between keys ---


def _broken_relations(job: Job) -> Iterator[Relation]:
    """Yield every relation that the job breaks."""
    yield from _consistency(job)
    yield from _encodings(job)
    yield from _optimizer(job)
    yield from _tables(job)
    yield from _ports(job)


def _consistency(job: Job) -> Iterator[Relation]:
    policy = job.consistency.policy
    if policy.kind == "ssp" and job.cluster.pipeline_depth > policy.bound:
        yield (
            "cluster.pipeline_depth",
            "consistency.policy",
            f"<= {policy.bound}, the policy's bound: a worker cannot hold more steps than it may run ahead",
        )
    if policy.kind == "auto" and job.cluster.pipeline_depth:
        yield "cluster.pipeline_depth", "consistency.policy", "0 in auto, which overlaps transfers by itself"


def _encodings(job: Job) -> Iterator[Relation]:
    for pattern, setting in job.variables.items():
        has_residue = setting.encoding is not None and Encoding.parse(setting.encoding).has_residue
        if has_residue and job.consistency.policy.kind == "sync":
            yield (
                dotted("variables", pattern, "encoding"),
                "consistency.policy",
                '"float32", "bfloat16" or "float16" in sync: what int8 and topk leave out depends on which worker '
                "computed which steps",
            )


def _optimizer(job: Job) -> Iterator[Relation]:
    if job.optimizer.requires_unsplit_variables and job.cluster.partitioner.kind != "whole":
        yield (
            "cluster.partitioner.kind",
            "optimizer.kind",
            f'"whole" with {job.optimizer.kind}, which needs the norm of whole variables: [cluster.partitioner] kind = '
            '"whole", or in a script settings={"cluster.partitioner": {"kind": "whole"}} of the trainer',
        )
    rates = {"optimizer.learning_rate": job.optimizer.learning_rate}
    rates |= {
        dotted("tables", name, "optimizer", "learning_rate"): table.optimizer.learning_rate
        for name, table in job.tables.items()
    }
    for key, rate in rates.items():
        if rate < 0 and job.model.kind not in ("ledger", "row_ledger"):
            yield key, "model.kind", "> 0"


def _tables(job: Job) -> Iterator[Relation]:
    if not job.tables:
        return
    if job.cluster.shard_device != "cpu":
        yield "cluster.shard_device", "tables", '"cpu" with tables: rows lie in the host\'s memory'
    policy = job.consistency.policy
    for name, table in sorted(job.tables.items()):
        embedding_of(name, table)  # refuses a name
        together = policy.steps_of_update
        most = table.evict_above_rows
        if together > 1 and most is not None and most + together * table.keys_per_step_max > table.rows_max:
            yield (
                dotted("tables", name, "rows_max"),
                "consistency.policy",
                f">= {most + together * table.keys_per_step_max:,} (evict_above_rows and keys_per_step_max of each of "
                f"{together} steps of a round)",
            )
        if job.model.kind == "row_ledger":
            yield from _ledger_of(name, table, in_rounds=together > 1)


def _ledger_of(name: str, table: TableSettings, *, in_rounds: bool) -> Iterator[Relation]:
    """Refuse a table that the ledger of rows could not count in."""
    if table.dtype != "float32":
        yield dotted("tables", name, "dtype"), "model.kind", '"float32": the ledger counts exactly'
    if table.combiner is not None:
        yield dotted("tables", name, "combiner"), "model.kind", "unset: the ledger has no columns of lists"
    if table.encoding != "float32":
        yield dotted("tables", name, "encoding"), "model.kind", '"float32": the ledger counts exactly'
    if table.initializer not in (None, "zeros"):
        yield dotted("tables", name, "initializer"), "model.kind", '"zeros": the ledger counts from 0'
    if in_rounds and table.evict_above_rows is not None:
        why = "unset in sync: which rows this rule drops depends on where rows lie, and the ledger does not know"
        yield dotted("tables", name, "evict_above_rows"), "model.kind", why


def _ports(job: Job) -> Iterator[Relation]:
    cluster, ports = job.cluster, job.cluster.ports
    if isinstance(ports, int):
        last = ports + 1 + 2 * cluster.shards
        if ports and last > PORT_MAX:
            yield "cluster.port", "cluster.shards", f"<= {ports - (last - PORT_MAX)}, for two ports a shard"
    elif cluster.launcher == "local":
        needed = 2 + 3 * cluster.shards + cluster.workers
        if ports.last - ports.first + 1 < needed:
            allowed = f"at least {needed} ports: two of the coordinator, three a shard, one a worker"
            yield "cluster.port", "cluster.shards", allowed
    if cluster.interface and cluster.host != ClusterOptions.model_fields["host"].default:
        yield "cluster.interface", "cluster.host", "one of the two"
