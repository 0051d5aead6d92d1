"""Job: the whole of a job file, checked key by key and then as a whole.

Owns the list of tables. Each package owns its own table: data sources, models and optimizers theirs, this folder the
others. Knows nothing of files, flags or the environment (`load`), and does not look at the data (the resolving of a
job against its data and model comes later, in the processes).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from parashard.data.options import DataOptions
from parashard.encodings.encoding import Encoding
from parashard.errors import ConfigurationError
from parashard.frozen_model import FrozenModel
from parashard.job.embeddings import TableSettings
from parashard.job.keys import dotted
from parashard.job.model_options import ModelOptions
from parashard.job.policy import Policy
from parashard.job.relations import broken_relations
from parashard.job.sections import CheckpointOptions, ClusterOptions, ConsistencyOptions, EvaluationOptions, JobOptions
from parashard.job.validation import check_relations
from parashard.plan.optimizers import OptimizerOptions
from parashard.plan.steps import StepPlan, parts_of_batch
from parashard.plan.variables import Variable


def _checked_encoding(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return str(Encoding.parse(value))
        except ConfigurationError as error:
            raise ValueError(error.message.partition("allowed: ")[2]) from None
    return value


class VariableSettings(FrozenModel):
    """What a job changes about the variables that one pattern matches; an unset key changes nothing."""

    frozen: bool | None = Field(default=None, description="True: the variable is never pushed and never changes.")
    decay: bool | None = Field(default=None, description="False: weight decay leaves the variable alone.")
    learning_rate_factor: float | None = Field(
        default=None, ge=0, le=1e15, description="Multiplies the learning rate for the variable, from 0 to 1e15."
    )
    encoding: Annotated[str, BeforeValidator(_checked_encoding)] | None = Field(
        default=None, description="How gradients travel; int8 and topk keep what they leave out for a later push."
    )


def apply_settings(variables: Mapping[str, Variable], settings: Mapping[str, VariableSettings]) -> dict[str, Variable]:
    """Return the variables as the settings change them.

    Patterns are those of the shell (`*`, `?`, `[abc]`), case matters, and a pattern must match the whole name. Where
    several patterns match one variable, the later one in the job file wins, key by key. State without a gradient takes
    `frozen` only: the other keys are of gradients.
    """
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
    """A job as its file, environment and flags describe it: one attribute per table, one per key in those.

    Frozen and complete: every key has its value or its default. Paths are absolute once `load_job` has read it.
    """

    model_config = ConfigDict(defer_build=False)  # built by the import: once for all that a fork server starts

    job: JobOptions = Field(description="What is trained for how long.")
    data: DataOptions = Field(description="Where the examples come from.")
    model: ModelOptions = Field(description="What computes the loss and its gradients.")
    optimizer: OptimizerOptions = Field(description="How a gradient changes the variables.")
    variables: dict[str, VariableSettings] = Field(
        default_factory=dict, description="Settings of the variables whose names match a pattern."
    )
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
        default_factory=ClusterOptions, description="Which processes there are and how they share the work."
    )

    @model_validator(mode="after")
    def _check_relations(self) -> Self:
        """Refuse values that exclude each other."""
        check_relations(self, broken_relations(self))
        return self

    @property
    def batch_clip_norm(self) -> float | None:
        """The norm that shards clip the gradient of a batch of several parts to."""
        return self.optimizer.clip_norm if self.consistency.policy.parts > 1 else None

    @property
    def step_clip_norm(self) -> float | None:
        """The norm that workers clip the gradient of a step to."""
        return None if self.batch_clip_norm is not None else self.optimizer.clip_norm

    def complete(self) -> Job:
        """Return the job with the parts of a batch chosen, where it leaves them open."""
        policy = self.consistency.policy
        if policy.kind != "auto" or policy.bound:
            return self
        parts = parts_of_batch(self.cluster.workers, self.job.batch_size)
        return self.replaced(consistency=self.consistency.replaced(policy=Policy("auto", parts)))

    @property
    def consistency_in_words(self) -> str:
        """How gradients move the weights, for screens."""
        policy = self.consistency.policy
        if policy.kind != "auto":
            return str(policy)
        parts = "1 part" if policy.parts == 1 else f"{policy.parts} parts"
        return f"auto: batches of {self.job.batch_size} in {parts}"

    def steps(self, examples: int, *, batched: bool = False) -> StepPlan:
        """Return the job's steps over so many training examples, or batches that the data are made of."""
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
