"""connect: a program joins a job that runs, as one of its workers, and computes its steps in a loop of its own.

Owns what a user gives. The session itself is the worker's (`parashard_worker.program`), and is imported with the first
call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from parashard.errors import ConfigurationError
from parashard.launch.run_folders import place_of
from parashard.process.arguments import tls_folder

if TYPE_CHECKING:
    from parashard_worker.program import ProgramSession, Step


def connect(
    run: str | os.PathLike[str],
    *,
    name: str = "",
    data: bool = True,
    settings: Mapping[str, Any] | None = None,
    tls_dir: str | os.PathLike[str] | None = None,
    keys: Callable[[Step], Mapping[str, Any]] | None = None,
) -> ProgramSession:
    """Return a session in a job that runs; it joins where its `with` begins.

    Parameters
    ----------
    run : str or path
        A run directory, a name under `runs/`, or the coordinator's host:port.
    name : str
        Its name in the job; default: the next free one.
    data : bool
        Whether steps come with their examples, and held-out examples are judged by the job's model: where a job file
        names data and model. A script's are only in its own workers; False: no job's are opened.
    settings : mapping of str to object, optional
        What is elsewhere on this machine, such as {"data.path": "/mnt/mnist"}.
    tls_dir : path, optional
        Credentials, of a cluster that asks for them; default: `PARASHARD_TLS_DIR`.
    keys : callable (step) -> mapping of str to array of whole numbers, optional
        Of a job with embedding tables: the ids whose rows a step needs, by table, in any shape; default: those that the
        job file's model names. It is called before the step's rows are pulled.

    Raises
    ------
    ConfigurationError
        If `run` is none of these, or `keys` no function.
    """
    from parashard_worker.program import ProgramSession

    if not isinstance(run, str | os.PathLike) or not os.fspath(run):
        raise ConfigurationError(
            f"ps.connect takes a run directory, a name under runs/ or the coordinator's host:port, found {run!r}"
        )
    if keys is not None and not callable(keys):
        raise ConfigurationError(f"ps.connect: keys is a function of a step, found {type(keys).__name__}")
    return ProgramSession(
        place_of(os.fspath(run)),
        name=name,
        data=data,
        overrides=[(key, value, "settings") for key, value in (settings or {}).items()],
        tls_dir=tls_folder(tls_dir),
        keys=keys,
    )
