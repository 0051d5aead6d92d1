"""Unknown PARASHARD_* environment variables: refuse a misspelt job key, warn about the others.

Owns the list of the known ones. Called by `load`, with the environment that overrides the job file.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from parashard.errors import ConfigurationError
from parashard.job.forms import Form, fields_by_key, forms_at
from parashard.job.keys import NAMED
from parashard.job.layers import PREFIX, SEPARATOR, names_a_key

OWN_VARIABLES = (
    "PARASHARD_RUNS",
    "PARASHARD_RESUME",
    "PARASHARD_TLS_DIR",
    "PARASHARD_TRACE",
    "PARASHARD_FAILPOINTS",
    "PARASHARD_FAILPOINTS_DIR",
    "PARASHARD_FAILPOINTS_SEED",
)
"""Read by processes and commands."""

COMPOSE_VARIABLES = (
    "PARASHARD_BASE_IMAGE",
    "PARASHARD_COORDINATOR_MEMORY",
    "PARASHARD_CUDA_IMAGE",
    "PARASHARD_GIVE_UP_S",
    "PARASHARD_IMAGE",
    "PARASHARD_JOB",
    "PARASHARD_JOB_FOLDER",
    "PARASHARD_SCRIPT",
    "PARASHARD_SCRIPT_FOLDER",
    "PARASHARD_SHARD_MEMORY",
    "PARASHARD_STATUS_PORT",
    "PARASHARD_TRAIN_MEMORY",
    "PARASHARD_WORKERS",
    "PARASHARD_WORKER_MEMORY",
)
"""Read by compose files; exported in a shell, other commands see them too."""

_OTHERS = ("PARASHARD_CONTAINERS", "PARASHARD_CONTAINER_CACHE", "PARASHARD_LARGE")  # the project's own tests
_SERVICE_LINK = re.compile(r"_SERVICE_HOST|_SERVICE_PORT(_\w+)?|_PORT(_[0-9]+_(TCP|UDP|SCTP)(_\w+)?)?")
"""Suffixes of the variables that Kubernetes sets in each pod of a namespace with a service named parashard-..."""

_DEPTH_MAX = 3  # of keys, as in optimizer.schedule.kind


def unread_variables(environ: Mapping[str, str], schema: Form) -> tuple[str, ...]:
    """Return a warning for each variable with our prefix that nothing reads.

    Raises
    ------
    ConfigurationError
        If one is a key of the job apart from the two underscores.
    """
    unread = [given for given in sorted(environ) if _is_unread(given)]
    keys = {name.replace(SEPARATOR, "_"): name for name in (_variables_of(schema) if unread else ())}
    for given in unread:
        if given.upper() in keys:
            raise ConfigurationError(f"environment {given}: not a key; did you mean {keys[given.upper()]}?")
    return tuple(filter(None, (_warning(given, given.upper(), list(keys.values())) for given in unread)))


def _is_unread(given: str) -> bool:
    name = given.upper()
    return name.startswith(PREFIX) and not names_a_key(given) and name not in OWN_VARIABLES + _OTHERS


def _warning(given: str, name: str, keys: list[str]) -> str:
    last = [key for key in keys if key.rpartition(SEPARATOR)[2] == name.removeprefix(PREFIX)]
    meant = last if len(last) == 1 else []
    if name in COMPOSE_VARIABLES:
        why = "only compose files read it" if meant else ""
    else:
        why = "no such variable" if not re.search(rf"({_SERVICE_LINK.pattern})\Z", name) else ""
        meant = meant or difflib.get_close_matches(name, [*OWN_VARIABLES, *keys], n=1, cutoff=0.9)
    hint = f"; did you mean {meant[0]}?" if meant else ""
    return f"environment {given}: ignored, {why}{hint}" if why else ""


@functools.cache
def _variables_of(schema: Form) -> tuple[str, ...]:
    """Return the environment variable of every key of every kind; `[variables]` and `[tables]` have none."""
    return tuple(PREFIX + SEPARATOR.join(parts).upper() for parts in _keys(schema, ()) if parts[0] not in NAMED)


def _keys(schema: Form, above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    nowhere: dict[str, Any] = {}
    for form in dict.fromkeys(forms_at(schema, above, nowhere)):
        for name in fields_by_key(form):
            parts = (*above, name)
            yield parts
            if len(parts) < _DEPTH_MAX:
                yield from _keys(schema, parts)
