"""Loading a job: file, environment and flags in; one checked, frozen `Job` and the origin of each value out."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import tomli_w

from parashard.errors import ConfigurationError
from parashard.frozen_model import FrozenModel
from parashard.job.keys import at, check_path, dotted, leaves, shown, without_none
from parashard.job.layers import Layers, Override, layered, unread_variables
from parashard.job.policy import Policy
from parashard.job.schema import Job
from parashard.job.validation import drop_keys_of_earlier_kinds, validated_layers
from parashard.plan.optimizers import REMOVED_SETTINGS, WHY_REMOVED

PLACING = ("cluster", "checkpoint")
"""Tables that say where a job runs and is kept, not what it computes: the environment may set them for a script."""

_DURABILITY, _LOG_FSYNC = ("checkpoint", "durability"), ("checkpoint", "log_fsync")
_URL, _LAUNCHER = ("checkpoint", "url"), ("cluster", "launcher")
_NO_LOG = "the log of pushes was removed; leave the key out, and set a shorter checkpoint.every_s to compute less again"

_Options = TypeVar("_Options", bound=FrozenModel)


class LoadedJob(NamedTuple):
    """A job and where each of its values came from."""

    job: Job  # its paths are absolute
    # By dotted key, one for every key of the job: "file NAME", "environment NAME", "flag NAME" or "default".
    origins: Mapping[str, str]
    path: Path  # the job file, absolute; models of the user's own are found beside it
    warnings: tuple[str, ...] = ()  # environment variables with our prefix that were ignored
    is_open: bool = False  # the file, environment and flags name no number of parts: `job` has one that was chosen

    def with_policy(self, policy: Policy) -> LoadedJob:
        """Return the job with another consistency policy."""
        return self._replace(job=self.job.replaced(consistency=self.job.consistency.replaced(policy=policy)))

    def as_begun(self, begun: Job) -> LoadedJob:
        """Return the job with the policy that it began with, if it leaves the policy open now."""
        return self.with_policy(begun.consistency.policy)._replace(is_open=False) if self.is_open else self


def load_job(
    path: str | os.PathLike[str],
    overrides: Sequence[Override] = (),
    environ: Mapping[str, str] | None = None,
    *,
    begun: bool = False,
) -> LoadedJob:
    """Read a job file, override it by the environment and both by the flags, and validate the result.

    A value of the environment is named `PARASHARD_<TABLE>__<KEY>`, in any case, and is read as TOML, else as text. A
    relative path is relative to the job file's folder if it stands there, else to the working directory. A
    ConfigurationError names all invalid keys at once; relations between keys are checked once each key is valid.
    """
    # Overrides are in rising order of precedence; without `environ` the process's own counts. A job that has `begun`
    # may name settings that no new job may.
    file = Path(path)
    environ = os.environ if environ is None else environ
    layers = layered(file, _read(file), overrides, environ)
    return _loaded(file, layers, unread_variables(environ, Job), begun=begun)


def job_of_run(path: str | os.PathLike[str], overrides: Sequence[Override] = ()) -> LoadedJob:
    """Return the job of a run from the file in its folder; the environment was applied when it began."""
    return load_job(path, overrides, {}, begun=True)


def job_from_table(
    table: Mapping[str, Any],
    file: Path,
    environ: Mapping[str, str] | None = None,
    overrides: Sequence[Override] = (),
    *,
    words: Mapping[str, str] = MappingProxyType({}),
) -> LoadedJob:
    """Return the job of a table that a program, whose file is `file`, has built in the form of a job file."""
    # `environ` sets those keys of `PLACING`, the tables that change no step, that the program leaves open; `words`
    # has the user's words for keys, by their dotted names, for errors.
    layers, environ = layered(file, table, overrides, {}, words), environ or {}
    layers.fill_in(environ, PLACING)
    return _loaded(file, layers, unread_variables(environ, Job))


def _loaded(file: Path, layers: Layers, warnings: tuple[str, ...], *, begun: bool = False) -> LoadedJob:
    check_path(file.absolute(), f"file {shown(file.name)}")
    job = _validated(layers, file.absolute().parent, begun=begun)
    origins = {dotted(*parts): layers.origin(parts) for parts, _ in leaves(job.plain())}
    return LoadedJob(job.complete(), origins, file.absolute(), warnings, job.consistency.policy == Policy("auto"))


def job_from_toml(text: str, overrides: Sequence[Override] = ()) -> Job:
    """Return a run's job from the text of its job file, whose paths are absolute, with overrides applied."""
    file = Path("of the coordinator")
    try:
        table = tomllib.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"the coordinator's job is not TOML: {error}") from None
    return _validated(layered(file, table, overrides, {}), Path.cwd(), begun=True).complete()


def as_toml(job: Job) -> str:
    """Return the job as the text of a job file; loading it gives an equal job. Keys without a value are left out."""
    whole = without_none(job.plain())
    if not job.tables:  # left out: files of jobs without tables stay as they were
        del whole["tables"]
    return tomli_w.dumps(whole)


def describe(loaded: LoadedJob) -> list[tuple[str, Any, str]]:
    """Return (dotted key, value, origin) of every key, in the schema's order; an unset key has the value None."""
    return [(dotted(*parts), value, loaded.origins[dotted(*parts)]) for parts, value in leaves(loaded.job.plain())]


def _validated(layers: Layers, folder: Path, *, begun: bool) -> Job:
    _check_text(layers)
    _drop_removed_keys(layers, begun=begun)
    drop_keys_of_earlier_kinds(layers, Job)
    job: Job = validated_layers(Job, layers)
    job = _with_absolute_paths(job, (), layers, folder)
    url, launcher = job.checkpoint.url, job.cluster.launcher
    check_path(Path(url), f"{layers.origin(_URL)}: {dotted(*_URL)}")
    if url and "://" not in url:  # a URL is absolute as it is
        url = str(_absolute(Path(url), _URL, layers, folder))
    if launcher.startswith("ssh:"):
        launcher = f"ssh:{_absolute(Path(launcher.removeprefix('ssh:')), _LAUNCHER, layers, folder)}"
    return job.replaced(checkpoint=job.checkpoint.replaced(url=url), cluster=job.cluster.replaced(launcher=launcher))


def _drop_removed_keys(layers: Layers, *, begun: bool) -> None:
    """Remove settings that no longer exist, which earlier job files name; refuse a value that had an effect."""
    if _DURABILITY in layers.origins:
        found = at(layers.table, _DURABILITY)
        if found != "checkpoint" and not (begun and found == "log"):
            raise ConfigurationError(f"{layers.named(_DURABILITY)}: found {shown(found)}; {_NO_LOG}")
    for removed in (_DURABILITY, _LOG_FSYNC):
        if removed in layers.origins:
            layers.drop(removed)
    for parts in list(layers.origins):
        if "optimizer" in parts[:-1] and parts[-1] in REMOVED_SETTINGS:
            found = at(layers.table, parts)
            if found != REMOVED_SETTINGS[parts[-1]]:
                raise ConfigurationError(f"{layers.named(parts)}: found {shown(found)}; {WHY_REMOVED}")
            layers.drop(parts)


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_bytes().decode())
    except FileNotFoundError:
        raise ConfigurationError(f"job file {file}: there is no such file") from None
    except IsADirectoryError:
        raise ConfigurationError(f"job file {file}: this is a folder; a job is one TOML file") from None
    except OSError as error:
        raise ConfigurationError(f"job file {file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"job file {file}: found the byte 0x{error.object[error.start]:02x} at offset {error.start}; "
            "allowed: text in UTF-8"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"job file {file}: not TOML: {error}") from None


def _check_text(layers: Layers) -> None:
    """Refuse bytes that are not UTF-8, which flags and the environment may hold and a job file cannot."""
    for parts, origin in layers.origins.items():
        try:
            json.dumps([parts, at(layers.table, parts)], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ConfigurationError(f"{origin}: {'.'.join(parts)!a}: not text in UTF-8") from None


def _with_absolute_paths(options: _Options, above: tuple[str, ...], layers: Layers, folder: Path) -> _Options:
    changed: dict[str, Any] = {}
    for name, field in type(options).model_fields.items():
        value, parts = getattr(options, name), (*above, field.alias or name)
        if isinstance(value, Path):
            changed[name] = _absolute(value, parts, layers, folder)
        elif isinstance(value, dict) and all(isinstance(below, Path) for below in value.values()):
            changed[name] = {one: _absolute(path, (*parts, one), layers, folder) for one, path in value.items()}
        elif isinstance(value, FrozenModel):
            changed[name] = _with_absolute_paths(value, parts, layers, folder)
    return options.replaced(**changed)


def _absolute(path: Path, parts: tuple[str, ...], layers: Layers, folder: Path) -> Path:
    """Return an absolute path: one of the job file starts at its folder, any other at the working directory."""
    folder = folder if layers.origin(parts) == layers.file else Path.cwd()
    try:
        absolute = Path(os.path.normpath(folder / path.expanduser()))
    except RuntimeError:
        raise ConfigurationError(
            f"{layers.origin(parts)}: {dotted(*parts)}: found {shown(path)}; allowed: a path whose ~ names a user "
            "with a home folder"
        ) from None
    check_path(absolute, f"{layers.origin(parts)}: {dotted(*parts)}")
    return absolute
