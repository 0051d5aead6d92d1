"""Job: the whole of a job file, checked key by key and then as a whole.

Owns the list of tables. Each package owns its own table: data sources, models and optimizers theirs, this folder the
others. Knows nothing of files, flags or the environment (`load`), and does not look at the data (the resolving of a
job against its data and model comes later, in the processes).
"""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from parashard.data.options import DataOptions
from parashard.job.relations import Contradictions, contradictions
from parashard.job.settings import VariableSettings
from parashard.job.tables import CheckpointOptions, ClusterOptions, ConsistencyOptions, EvaluationOptions, JobOptions
from parashard.models.options import ModelOptions
from parashard.plan.optimizers import OptimizerOptions


class Job(BaseModel):
    """A job as its file, environment and flags describe it: one attribute per table, one per key in those.

    Frozen and complete: every key has its value or its default. Paths are absolute once `load_job` has read it.
    """

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    job: JobOptions = Field(description="What is trained for how long.")
    data: DataOptions = Field(description="Where the examples come from.")
    model: ModelOptions = Field(description="What computes the loss and its gradients.")
    optimizer: OptimizerOptions = Field(description="How a gradient changes the variables.")
    variables: dict[str, VariableSettings] = Field(
        default_factory=dict, description="Settings of the variables whose names match a pattern."
    )
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
    def _as_a_whole(self) -> Self:
        found = list(contradictions(self))
        if found:
            raise Contradictions(found)
        return self
