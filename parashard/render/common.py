"""Common parts of all container platforms: jobs that our images can run, image names, the grace period."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
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
    for name, value in job.data:
        found = value if isinstance(value, dict) else {}
        yield from ((dotted("data", name, column), path) for column, path in found.items() if isinstance(path, Path))
        if isinstance(value, Path):
            yield f"data.{name}", value


def check_runnable(loaded: LoadedJob, where: str, volume: str) -> None:
    """Refuse a job that containers of our images cannot run on any platform."""
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
    """Return a reference's parts: `name`, and `tag` and `digest` where it has them."""
    found = REFERENCE.fullmatch(reference)
    if found is None:
        raise ConfigurationError(f"flag {flag}: found {reference!r}; allowed: NAME, NAME:TAG or NAME@sha256:DIGEST")
    return found


def leave_s(job: Job) -> int:
    """Return the platform's grace period between SIGTERM and SIGKILL of a process, in seconds."""
    return math.ceil(job.cluster.grace_s) + FAREWELL_S


_ROOT = files("parashard.render") / "templates"
_PLACE = re.compile(r"@\{([^}]*)\}?")


def template(path: str) -> str:
    """Return the text of a template, such as ``base/shards.yaml``."""
    return _ROOT.joinpath(*path.split("/")).read_text()


def templates(folder: str) -> list[str]:
    """Return the paths of all templates in a folder and below it, sorted."""
    return sorted(f"{folder}/{path}" for path in _below(_ROOT / folder))


def placeholders(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line, from 1, and the text of each placeholder, whole or not."""
    for number, line in enumerate(text.splitlines(), 1):
        yield from ((number, found[0]) for found in _PLACE.finditer(line))


def filled(text: str, values: Mapping[str, str]) -> str:
    """Substitute values for placeholders."""
    # A placeholder alone on its line takes whole lines, each indented like it; an empty value removes the line. Values
    # may have placeholders.
    lines: list[str] = []
    for line in text.splitlines():
        place = _PLACE.fullmatch(line.strip())
        if place is None:
            lines.append(_PLACE.sub(lambda found: values[found[1]], line))
            continue
        indent = line[: len(line) - len(line.lstrip())]
        inner = filled(values[place[1]], values).splitlines()
        lines += [f"{indent}{part}" if part else "" for part in inner]
    return "".join(f"{line}\n" for line in lines)


def _below(folder: Traversable) -> list[str]:
    found: list[str] = []
    for entry in folder.iterdir():
        found += [f"{entry.name}/{path}" for path in _below(entry)] if entry.is_dir() else [entry.name]
    return found
