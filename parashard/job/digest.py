"""The identity of a job: exactly what determines its steps and their arithmetic.

Owns the canonical form and its digest. Knows nothing of runs or resuming: those compare digests, and name the keys that
changed. Called by the coordinator and by every process that joins a run. Implements rule P2 of docs/protocol.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from parashard.data.base import DataSpec
from parashard.frozen_model import FrozenModel
from parashard.job.embeddings import identity_of
from parashard.job.keys import dotted, leaves, plain
from parashard.job.schema import Job
from parashard.plan.variables import Variable, in_name_order


def job_identity(
    job: Job,
    spec: DataSpec,
    variables: Mapping[str, Variable],
    *,
    initial_sha256: str = "",
    model_sha256: str = "",
) -> dict[str, Any]:
    """Return the canonical mapping that `identity_digest` hashes, made of the types of JSON.

    It leaves out the job's name, every path, the evaluation and the cluster: none of them changes a step or its push.
    The data enters by its content, the variables after the job's settings are applied.

    Parameters
    ----------
    job : Job
    spec : DataSpec
        Of the job's data, with the fingerprint of its content.
    variables : mapping of str to Variable
        After `apply_settings`.
    initial_sha256 : str
        Of the initial values, where they are not drawn from the seed (`parashard.plan.variables.values_sha256`).
    model_sha256 : str
        Of the code of a user's own model (`parashard.models.code_sha256`).
    """
    identity: dict[str, Any] = {
        "job": {name: getattr(job.job, name) for name in ("seed", "epochs", "batch_size", "on_bad_step")},
        "data": _data(spec),
        "model": _model(job.model),
        "optimizer": job.optimizer.identity(),
        "consistency": {"policy": str(job.consistency.policy), "reduce": job.consistency.reduce},
        "variables": {variable.name: _variable(variable) for variable in in_name_order(variables)},
    }
    if job.job.first_epoch:  # left out otherwise: earlier jobs keep their digest
        identity["job"]["first_epoch"] = job.job.first_epoch
    for name in ("updates_before", "passes_before", "steps_per_epoch"):  # the same
        if getattr(job.job, name):
            identity["job"][name] = getattr(job.job, name)
    if job.job.drop_last:  # the same
        identity["job"]["drop_last"] = True
    if job.job.shuffle is False:  # the same
        identity["job"]["shuffle"] = False
    if job.tables:  # the same
        identity["tables"] = identity_of(job.tables)
    if initial_sha256:
        identity["initial"] = {"sha256": initial_sha256}
    if model_sha256:
        identity["code"] = {"sha256": model_sha256}
    canonical: dict[str, Any] = plain(identity)
    return canonical


def identity_digest(identity: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a job's identity, 64 hex digits: equal on every machine that computes the same job."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def changed_keys(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys, sorted, whose values differ between two identities or that only one of them has."""
    before, after = dict(leaves(a)), dict(leaves(b))
    # Compared as JSON: 1 and 1.0 are equal in Python, not in the digest.
    changed = [k for k in before.keys() | after.keys() if _text(before, k) != _text(after, k)]
    return sorted(dotted(*parts) for parts in changed)


def _text(flat: Mapping[tuple[str, ...], Any], key: tuple[str, ...]) -> str | None:
    return json.dumps(flat[key], sort_keys=True) if key in flat else None


def _model(options: FrozenModel) -> dict[str, Any]:
    identity = options.plain()
    if identity.get("loss", "") is None:  # left out where the data's targets say it: earlier jobs keep their digest
        del identity["loss"]
    return identity


def _data(spec: DataSpec) -> dict[str, Any]:
    identity: dict[str, Any] = {
        "fingerprint": spec.fingerprint,
        "examples": int(spec.examples),
        "held_out": int(spec.held_out),
        "input_shape": [int(n) for n in spec.input_shape],
        "classes": int(spec.classes),
    }
    if spec.fields:  # left out otherwise: jobs of job files keep their digest
        identity["fields"] = "; ".join(map(str, spec.fields))
    return identity


def _variable(variable: Variable) -> dict[str, Any]:
    identity = {
        "shape": [int(n) for n in variable.shape],
        "initializer": {"kind": variable.initializer.kind, "scale": float(variable.initializer.scale)},
        "frozen": variable.frozen,
        "decay": variable.decay,
        "learning_rate_factor": float(variable.learning_rate_factor),
    }
    if variable.encoding != "float32":  # left out otherwise: jobs from before there were encodings keep their digest
        identity["encoding"] = variable.encoding
    if variable.state:  # the same
        identity["state"] = variable.state
    return identity
