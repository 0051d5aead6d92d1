"""Cluster: shards and a coordinator, started by a program, for a job whose steps are computed by sessions.

::

    with ps.Cluster({"w": np.zeros(3)}, ps.SGD(0.1), examples=1000, batch_size=10) as cluster:
        with ps.connect(cluster.run_dir) as session:
            for step in session.steps():
                session.push(step, {"w": ...})
        weights = cluster.weights()
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from parashard.api.fits import unfinished
from parashard.api.jobs import checked_optimizer, checked_servers, job_of, plain_tables
from parashard.api.programs.background import BackgroundRun, checked_variables, within
from parashard.api.script import SCRIPT
from parashard.api.strategies import ParameterServerStrategy
from parashard.data.base import DataSpec
from parashard.errors import ConfigurationError
from parashard.job.embeddings import Table, checked_tables
from parashard.job.sections import job_name_from
from parashard.launch.run_control import RunControl
from parashard.launch.run_folders import as_begun, new_run_dir, place_of
from parashard.launch.runs import Run, job_credentials
from parashard.models.declaration import declare
from parashard.plan.optimizers import OptimizerSpec
from parashard.plan.steps import parts_of_batch
from parashard.plan.variables import Float32s
from parashard.process.arguments import checked_whole
from parashard.security.given_credentials import tls_folder

if TYPE_CHECKING:
    from parashard_worker.program import ProgramSession, Step

FINISH_S = 600.0


class Cluster:
    """A job of numbered steps over examples that only its sessions have.

    Parameters
    ----------
    variables : mapping of str to array
        Initial values; float32.
    optimizer : OptimizerSpec, optional
        Run by the shards; default: SGD with a rate of 0.01.
    strategy : ParameterServerStrategy, optional
        Sets shards and consistency; its `workers` are ignored: the sessions are the workers.
    tables : sequence of Table
        Embedding tables; sessions request rows by `ps.connect(..., keys=...)`.
    examples, epochs, batch_size : int
        A step has `batch_size` of the `examples`, shuffled in each epoch.
    seed : int
    name : str, optional
        Name of the job; default: the program's.
    settings : mapping of str to object, optional
        Further keys of a job file.
    resume : bool
        True: resume the newest run of this name if it is not done; else begin a new one.

    Attributes
    ----------
    run_dir : Path
        The run's folder, to which sessions of any program on this machine connect.
    """

    def __init__(
        self,
        variables: Mapping[str, Any],
        optimizer: OptimizerSpec | None = None,
        strategy: ParameterServerStrategy | None = None,
        *,
        examples: int,
        tables: Sequence[Table] = (),
        epochs: int = 1,
        batch_size: int = 1,
        seed: int = 0,
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
        resume: bool = False,
    ) -> None:
        if SCRIPT.is_worker:
            raise ConfigurationError("ps.Cluster has no workers of its own: ps.connect(cluster.run_dir) joins it")
        examples = checked_whole("ps.Cluster: examples", examples)
        file = Path(sys.argv[0] or "session.py")
        chosen = checked_servers(strategy)
        consistency = chosen.consistency
        if consistency == "auto" and parts_of_batch(0, batch_size) == 1:
            consistency = "async"  # a batch of one example cannot be split between sessions
        sessions = chosen.changed(consistency, workers=0)
        self._tables = checked_tables(tables)
        name = name or (SCRIPT.job_name if SCRIPT.has_file else job_name_from(file.stem, "session"))
        job = {"name": name, "seed": seed, "epochs": epochs, "batch_size": batch_size}
        loaded = job_of(file, sessions, checked_optimizer(optimizer), job, settings, tables=plain_tables(self._tables))
        declared = declare(DataSpec(examples, 0, (), 0, "of the sessions"), checked_variables(variables))
        begun = SCRIPT.asked_run
        if begun is None and (resume or SCRIPT.is_resumed):
            begun = unfinished(name, "ps.Cluster")
        credentials = job_credentials(chosen.tls_dir)
        self.run_dir = (begun or new_run_dir(None, name)).absolute()
        run = Run(loaded, self.run_dir, declared, credentials, ray=chosen.ray)
        if begun is not None:
            run = run._replace(
                loaded=as_begun(loaded, begun), resume=True, from_checkpoint=SCRIPT.resume_flags.from_checkpoint
            )
        self._run = BackgroundRun(run, RunControl(), SCRIPT.program("ps.Cluster"))

    def __enter__(self) -> Self:
        self._run.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        within(self._run, self.finish, error)

    def weights(self) -> dict[str, Float32s]:
        """Return the shards' current weights, or the final ones; the caller owns the arrays."""
        return self._run.weights()

    def table(self, name: str) -> tuple[np.ndarray[Any, np.dtype[np.uint64]], Float32s]:
        """Return all rows of a table, as `Trainer.table` does; raise ConfigurationError while the job runs."""
        return self._run.table(name, self._tables)

    def finish(self, timeout_s: float = FINISH_S) -> dict[str, Any]:
        """Wait until all steps are applied, and return the run's report; the end of the `with` block waits too.

        Raises
        ------
        JobFailed
            If the job ended before it was done.
        TimeoutError
            If it takes longer than `timeout_s`; the job keeps running, and `finish` may be called again.
        """
        return self._run.finish(
            timeout_s,
            f"sessions compute them, which ps.connect({str(self.run_dir)!r}) opens; cluster.stop() ends it here",
        )

    def stop(self) -> None:
        """Stop the job: shards save their state, and `resume=True` continues from it."""
        self._run.stop()


def connect(
    run: str | os.PathLike[str],
    *,
    name: str = "",
    data: bool = True,
    settings: Mapping[str, Any] | None = None,
    tls_dir: str | os.PathLike[str] | None = None,
    keys: Callable[[Step], Mapping[str, Any]] | None = None,
) -> ProgramSession:
    """Return a session of a running job; it joins when its `with` block begins.

    Parameters
    ----------
    run : str or path
        A run directory, a name under `runs/`, or the coordinator's host:port.
    name : str
        The session's name in the job; default: the next free one.
    data : bool
        True: if the job file names data and model, open them, so that steps have their examples and held-out examples
        are evaluated by the model; data and model of a script are only available in its own workers. False: open none.
    settings : mapping of str to object, optional
        Keys that differ on this machine, such as {"data.path": "/mnt/mnist"}.
    tls_dir : path, optional
        Credentials, if the cluster requires them; default: `PARASHARD_TLS_DIR`.
    keys : callable (step) -> mapping of str to array of whole numbers, optional
        For a job with embedding tables: returns the ids whose rows a step needs, by table, in any shape; default: those
        of the job file's model. It is called before the step's rows are pulled.

    Raises
    ------
    ConfigurationError
        If `run` is none of these, or `keys` is not callable.
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
