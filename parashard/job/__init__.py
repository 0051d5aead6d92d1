"""The job file: its schema, its loading with the origin of each value, and the digest that identifies a job."""

from parashard.job.digest import changed_keys, identity_digest, job_identity
from parashard.job.layers import Override, parse_set
from parashard.job.load import LoadedJob, as_toml, describe, load_job
from parashard.job.policy import Policy
from parashard.job.schema import Job
from parashard.job.settings import VariableSettings, apply_settings

__all__ = [
    "Job",
    "LoadedJob",
    "Override",
    "Policy",
    "VariableSettings",
    "apply_settings",
    "as_toml",
    "changed_keys",
    "describe",
    "identity_digest",
    "job_identity",
    "load_job",
    "parse_set",
]
