"""Common parts of all container platforms: jobs that our images can run, image names, the grace period.

Called by the renderers of the platforms.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from parashard.errors import ConfigurationError
from parashard.job.keys import dotted
from parashard.job.load import LoadedJob
from parashard.job.schema import Job

FAREWELL_S = 5
"""Time beyond `cluster.grace_s` in which a process closes files and connections."""

STORE_SCHEMES = ("az", "gs", "s3")
"""The object stores that containers share; our images have obstore (`deploy/docker/requirements.lock`)."""
SOURCES_MISSING = {"parquet": "pyarrow"}
"""Sources of data that our images cannot read, and the package that each would need."""

_WORD = r"[a-z0-9]+([._-]+[a-z0-9]+)*"
REFERENCE = re.compile(
    rf"(?P<name>({_WORD}(:\d+)?/)?{_WORD}(/{_WORD})*)(:(?P<tag>[\w][\w.-]{{0,127}}))?(@(?P<digest>sha256:[0-9a-f]{{64}}))?"
)
"""Colons are before a registry's port and before the tag, and nowhere else."""


def data_paths(job: Job) -> Iterator[tuple[str, Path]]:
    """Yield the dotted key and the path of all files and folders that a job's data are in."""
    for name in job.data.keys:
        value = getattr(job.data, name)
        found = value if isinstance(value, dict) else {}
        yield from ((dotted("data", name, column), path) for column, path in found.items() if isinstance(path, Path))
        if isinstance(value, Path):
            yield f"data.{name}", value


def check_runnable(loaded: LoadedJob, where: str, volume: str) -> None:
    """Refuse a job that containers of our images cannot run on any platform.

    Parameters
    ----------
    loaded : LoadedJob
        The job, from its file and flags.
    where : str
        The platform, as in "allowed in a compose file".
    volume : str
        The platform's default place for checkpoints.

    Raises
    ------
    ConfigurationError
        Names the key, its value, and the allowed values.
    """
    job = loaded.job
    why, url = _unfit_store(job.checkpoint.url), job.checkpoint.url
    if why:
        allowed = " or ".join(f"{scheme}://BUCKET/FOLDER" for scheme in STORE_SCHEMES)
        raise _refused(loaded, "checkpoint.url", f"{url}, {why}", where, f'"" ({volume}), or {allowed}')
    device, source = job.cluster.shard_device, job.data.source
    if device != "cpu":
        raise _refused(loaded, "cluster.shard_device", f"{device}, and shards have no GPU", where, "cpu")
    if source in SOURCES_MISSING:
        found = f"{source}, which needs {SOURCES_MISSING[source]}, and the images do not have it"
        raise _refused(loaded, "data.source", found, where, "another source, such as csv or npz")


def _unfit_store(url: str) -> str:
    """Return why containers cannot share a store; empty if they can."""
    scheme, separator, _ = url.partition("://")
    if not url or (separator and scheme in STORE_SCHEMES):
        return ""
    if not separator:
        return "a folder of this machine"
    return "which is no store" if scheme not in ("file", "memory") else "which each container has for itself"


def _refused(loaded: LoadedJob, key: str, found: str, where: str, allowed: str) -> ConfigurationError:
    return ConfigurationError(f"{loaded.origins[key]}: {key}: found {found}; allowed {where}: {allowed}")


def parsed_image(flag: str, reference: str) -> re.Match[str]:
    """Return a reference's parts: `name`, and `tag` and `digest` where it has them.

    Raises
    ------
    ConfigurationError
        If it is not a valid reference; the message names the flag.
    """
    found = REFERENCE.fullmatch(reference)
    if found is None:
        raise ConfigurationError(f"flag {flag}: found {reference!r}; allowed: NAME, NAME:TAG or NAME@sha256:DIGEST")
    return found


def checked_image(flag: str, reference: str) -> str:
    """Return a valid reference of an image; see `parsed_image`."""
    return parsed_image(flag, reference)[0]


def leave_s(job: Job) -> int:
    """Return the platform's grace period between SIGTERM and SIGKILL of a process, in seconds."""
    return math.ceil(job.cluster.grace_s) + FAREWELL_S
