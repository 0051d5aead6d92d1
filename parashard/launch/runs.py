"""Run: what a run is begun with: its job, its folder, and where its processes get credentials and work from.

A frozen value, which `parashard run`, `fit` and tests hold alike. Called by `parashard.launch.run`, which runs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from parashard.errors import ConfigurationError
from parashard.job.load import LoadedJob
from parashard.job.schema import Job
from parashard.launch.local_cluster import ScriptCommand, StartThread
from parashard.models.declaration import DeclaredJob
from parashard.process.run_files import CHECKPOINTS
from parashard.security.credentials import Credentials
from parashard.security.identity import OF_A_JOB, in_words


class Run(NamedTuple):
    """A run of a job that is about to begin, or to go on.

    Attributes
    ----------
    loaded : LoadedJob
        The job and the path of its file (a user's model is looked up beside it).
    folder : Path
        Gets the resolved job file, logs, history, checkpoints, report and weights; empty unless `resume`.
    declared : DeclaredJob, optional
        Data and model of a script; None: the job file names them.
    credentials : Credentials, optional
        Of all processes, with the four roles of a job (`job_credentials`).
    resume : bool
        True: go on with the run in `folder` from its checkpoints.
    from_checkpoint : str
        The drained checkpoint that another placement starts from; empty: the newest.
    init, output : Path, optional
        Weights to start from; destination of a copy of the final weights.
    trace : bool
        True: all processes send spans.
    script : ScriptCommand, optional
        Workers are this script, run again.
    start_thread : callable, optional
        Workers are threads of this process, which this starts.
    """

    loaded: LoadedJob
    folder: Path
    declared: DeclaredJob | None = None
    credentials: Credentials | None = None
    resume: bool = False
    from_checkpoint: str = ""
    init: Path | None = None
    output: Path | None = None
    trace: bool = False
    script: ScriptCommand | None = None
    start_thread: StartThread | None = None

    @property
    def job(self) -> Job:
        """The job alone."""
        return self.loaded.job

    @property
    def store_url(self) -> str:
        """Where its checkpoints are."""
        return self.job.checkpoint.url or str(self.folder.absolute() / CHECKPOINTS)


def job_credentials(tls_dir: Path | None) -> Credentials | None:
    """Return the credentials of a local cluster, whose processes belong to one user and share a certificate.

    Raises ConfigurationError if they cannot be read, or lack one of a job's roles.
    """
    if tls_dir is None:
        return None
    credentials = Credentials(tls_dir)
    missing = set(OF_A_JOB) - {identity.role for identity in credentials.identities}
    if missing:
        raise ConfigurationError(
            f"TLS folder {tls_dir}: the certificate's roles are {in_words(credentials.identities)}; a local cluster "
            f"also needs {', '.join(sorted(missing))}"
        )
    return credentials
