"""A script's job as a job file: its data and model by name, in place of those that only the script has.

Owns what the names must be, and that they are the same model. Called by `parashard.api.trainer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parashard.data import open_source
from parashard.errors import ConfigurationError
from parashard.job.embeddings import tables_of
from parashard.job.load import as_toml, job_from_table
from parashard.models.base import Initial
from parashard.models.building import build_model
from parashard.models.declaration import parts_of
from parashard.models.looking_up import check_looks_up


def write_job_file(
    path: Path, table: Mapping[str, Any], model: Any, data: Any, variables: Mapping[str, Initial]
) -> None:
    """Write a job file with every value of a job.

    Parameters
    ----------
    path : Path
        Modules of the job are looked up in its folder.
    table : mapping
        The job's other tables.
    model : str or mapping
        "module:factory", or the `[model]` table.
    data : mapping
        The `[data]` table.
    variables : mapping of str to Variable or ndarray, or both
        Of the script's model; the named one must have the same.

    Raises
    ------
    ConfigurationError
        If the names are none, or name another model; nothing is written.
    """
    named = {"kind": model} if isinstance(model, str) else model
    if not isinstance(named, Mapping) or not isinstance(data, Mapping):
        raise ConfigurationError(
            'a job file names its model and its data, which this script has in memory: give model="module:factory", a '
            'function that returns the model, and data={"source": "csv", "path": "data.csv", "label": "price"}, say'
        )
    loaded = job_from_table({**table, "model": dict(named), "data": dict(data)}, path)
    job = loaded.job
    source = open_source(job.data)
    built = build_model(job.model, source.spec, job.job.seed, path.absolute().parent, tables_of(job))
    check_looks_up(built, {one.name: one for one in tables_of(job)})
    found = built.initial_variables()
    theirs, own = _shapes(found), _shapes(variables)
    for name in sorted(own.keys() | theirs.keys()):
        if own.get(name) != theirs.get(name):
            raise ConfigurationError(
                f"{job.model.kind!r} is another model than this trainer's: variable {name!r} has the shape "
                f"{theirs.get(name, 'of none')} there, and {own.get(name, 'of none')} here"
            )
    try:
        path.write_text(as_toml(job), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written: {error.strerror}") from None


def _shapes(variables: Mapping[str, Initial]) -> dict[str, tuple[int, ...]]:
    return {name: parts_of(name, value)[0].shape for name, value in variables.items()}
