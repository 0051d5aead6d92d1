"""A job that is declared and resolved in this process, as a coordinator of its own does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parashard.job.schema import Job
from parashard.models.declaration import declare_named
from parashard_coordinator.run.resolve import ResolvedJob, resolve


def resolved_here(job: Job, folder: Path | None = None, init_file: Path | None = None, **begun: Any) -> ResolvedJob:
    """Open the data, build the model that the job names, and resolve the job."""
    return resolve(job, declare_named(job, folder), init_file, **begun)
