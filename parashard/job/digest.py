"""The identity of a job: all values that determine its steps and their arithmetic; its digest, and differences of two.

Implements rule P2 of docs/protocol.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from parashard.data.base import DataSpec
from parashard.frozen_model import FrozenModel
from parashard.job.embeddings import identity_of
from parashard.job.keys import dotted, key_parts, leaves, plain, shown
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
    """Return the canonical mapping that `identity_digest` hashes, made of the types of JSON."""
    # It leaves out the job's name, every path, the evaluation and the cluster: none of them changes a step or its push.
    # The data enters by its content, the variables after `apply_settings`; initial values that the seed does not draw
    # by their digest, and a user's own model by that of its code.
    identity: dict[str, Any] = {
        "job": {name: getattr(job.job, name) for name in ("seed", "epochs", "batch_size", "on_bad_step")},
        "data": _data(spec),
        "model": _model(job.model),
        "optimizer": job.optimizer.identity(),
        "consistency": {"policy": str(job.consistency.policy), "reduce": job.consistency.reduce},
        "variables": {variable.name: _variable(variable) for variable in in_name_order(variables)},
    }
    for name in ("first_epoch", "updates_before", "passes_before", "steps_per_epoch", "drop_last"):
        if getattr(job.job, name):  # left out otherwise: earlier jobs keep their digest
            identity["job"][name] = getattr(job.job, name)
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


NAMED_MAX = 8  # in one error

_CONTENT = {
    "code.sha256": "the code of the model",
    "data.fingerprint": "the content of the data",
    "initial.sha256": "the initial values",
}
"""Keys whose values are digests, with the name of the content."""

_PROPERTIES = {
    "data.classes": "number of classes",
    "data.examples": "number of training examples",
    "data.fields": "arrays of an example",
    "data.held_out": "number of held-out examples",
    "data.input_shape": "shape of an input",
}
"""Keys of the identity that no job file has: properties of the data."""


def differences(theirs: Mapping[str, Any], mine: Mapping[str, Any], there: str, here: str) -> list[str]:
    """Return one phrase for each difference between two identities, the keys of a job file first."""
    # `there` and `here` say which job has which value, such as "in the run" and "now".
    changed = changed_keys(theirs, mine)
    if any(key.startswith(("model.", "data.")) for key in changed):  # the variables follow from these
        changed = [key for key in changed if not key.startswith("variables.")]
    if any(key in _PROPERTIES for key in changed):
        changed = [key for key in changed if key != "data.fingerprint"]
    values = [{dotted(*parts): value for parts, value in leaves(identity)} for identity in (theirs, mine)]
    return [_phrase(key, values[0].get(key), values[1].get(key), there, here) for key in sorted(changed, key=_order)]


def in_words(phrases: list[str]) -> str:
    """Return the first NAMED_MAX phrases as one text, and how many more there are; "" for none."""
    more = len(phrases) - NAMED_MAX
    return "; ".join(phrases[:NAMED_MAX]) + (f"; and {more} more" if more > 0 else "")


def _order(key: str) -> tuple[bool, str]:
    return key in _CONTENT or key in _PROPERTIES or key_parts(key)[0] == "variables", key


def _phrase(key: str, theirs: Any, mine: Any, there: str, here: str) -> str:
    if key in _CONTENT:
        return f"{_CONTENT[key]} differs"
    name = _PROPERTIES.get(key, key)
    return f"{name} is {_value(theirs)} {there}, {_value(mine)} {here}"


def _value(value: Any) -> str:
    return "unset" if value is None else shown(value)
