"""Run: the inputs of a run: its job, its folder, its processes' credentials, and the kind of its workers.

Sets the environment of its processes, too: threads, Python's hash seed, a cache for JAX and its share of a GPU.
Variables that the user has set stay, except numbers of threads that the job file names.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from parashard.errors import ConfigurationError
from parashard.job.load import LoadedJob
from parashard.job.schema import Job
from parashard.launch.local_cluster import MODULES, ScriptCommand, StartThread
from parashard.launch.ray_settings import Ray
from parashard.models.declaration import DeclaredJob
from parashard.process.resources import thread_variables
from parashard.process.run_files import CHECKPOINTS
from parashard.security.credentials import Credentials
from parashard.security.identity import OF_A_JOB, in_words

if TYPE_CHECKING:
    from parashard.security.signing import Signer


class Run(NamedTuple):
    """A run of a job that is about to begin, or to be resumed; a frozen value."""

    loaded: LoadedJob  # the job and the path of its file, beside which a user's model is looked up
    folder: Path  # gets the resolved job file, logs, history, checkpoints, report and weights; empty unless `resume`
    declared: DeclaredJob | None = None  # data and model of a script; None: the job file names them
    credentials: Credentials | None = None  # of all processes, with the four roles of a job (`job_credentials`)
    resume: bool = False  # go on with the run in `folder` from its checkpoints
    from_checkpoint: str = ""  # the drained checkpoint that another placement starts from; empty: the newest
    init: Path | None = None  # weights to start from
    output: Path | None = None  # where a copy of the final weights goes
    trace: bool = False  # all processes send spans
    script: ScriptCommand | None = None  # workers are this script, run again
    start_thread: StartThread | None = None  # starts workers as threads of this process
    ray: Ray | None = None  # a program's settings of its Ray cluster

    @property
    def job(self) -> Job:
        """The job alone."""
        return self.loaded.job

    @property
    def store_url(self) -> str:
        """Where its checkpoints are."""
        return self.job.checkpoint.url or str(self.folder.absolute() / CHECKPOINTS)


def job_credentials(tls_dir: Path | None) -> Credentials | None:
    """Return a local cluster's one certificate; ConfigurationError if it is unreadable or lacks a role of the job."""
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


def signer_of(run: Run) -> Signer | None:
    """Return the authority that signs for other machines (`cluster.authority`); None: there is none."""
    folder = run.job.cluster.authority
    if folder is None:
        return None
    if run.credentials is None:
        raise ConfigurationError(
            f"cluster.authority {folder}: it signs certificates of processes inside TLS, and there is no --tls-dir "
            "(tls_dir= of a script's strategy)"
        )
    from parashard.security.signing import Signer  # here: slow to import, and rarely needed

    return Signer(folder, run.credentials)


HASH_SEED = "PYTHONHASHSEED"
JAX_CACHE = "JAX_COMPILATION_CACHE_DIR"
JAX_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # the latter is the older name
JAX_OF_A_GPU = 0.75
"""Share of a GPU's memory for all its workers, JAX's own default: the rest is for contexts, CuPy and shards."""


def child_variables(job: Job, environ: Mapping[str, str], *, jax: bool) -> dict[str, dict[str, str]]:
    """Return environment variables by module, to set when a process starts. `jax`: the program has imported JAX."""
    options, threads = job.cluster, job.compute_threads(environ)
    hashes = hash_variables(job.job.seed, environ)
    return {
        MODULES["worker"]: {
            **thread_variables(threads, environ, override=options.worker_threads > 0),
            **hashes,
            **(jax_variables(environ) if jax else {}),
            **jax_share(job, environ, gpus(environ)),
        },
        MODULES["coordinator"]: {**thread_variables(1, environ, override=False), **hashes},
    }


def hash_variables(seed: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return Python's hash seed, from the job's: sets have one order in all processes, and after a resume."""
    return {} if environ.get(HASH_SEED, "random") != "random" else {HASH_SEED: str(seed % 2**32)}


def jax_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return JAX's compilation cache, a folder for this kind of processor; empty if the folder cannot be made."""
    home = environ.get("XDG_CACHE_HOME") or environ.get("HOME")
    if JAX_CACHE in environ or not home:
        return {}
    cache = Path(home) if environ.get("XDG_CACHE_HOME") else Path(home) / ".cache"
    folder = cache / "parashard" / f"jax-{_processor()}"
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
    except OSError:
        return {}
    return {JAX_CACHE: str(folder)} if os.access(folder, os.W_OK | os.X_OK) else {}


def jax_share(job: Job, environ: Mapping[str, str], gpus: int) -> dict[str, str]:
    """Return the share of a GPU's memory for a worker's JAX if workers share one; else nothing, for JAX's default."""
    options = job.cluster
    spread = options.device in ("auto", "cuda")
    sharing = -(-options.workers // max(1, gpus)) if spread else options.workers
    if not gpus or sharing < 2 or any(name in environ for name in JAX_FRACTIONS):  # JAX refuses both together
        return {}
    return {JAX_FRACTIONS[0]: f"{JAX_OF_A_GPU / sharing:.4f}"}


def gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Return how many GPUs a process with this environment may use, without a library, which would open them."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    there = sum(device.name.removeprefix("nvidia").isdecimal() for device in devices.glob("nvidia*"))
    if visible is None:
        return there
    named = [name for name in visible.split(",") if name.strip()]
    until = next((place for place, name in enumerate(named) if name.strip().startswith("-")), len(named))
    return min(there, until)  # those behind an invalid one are hidden


def _processor() -> str:
    """Return a digest of the first processor's description: several machines may share a home folder."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        first = ""
    lasting = [line for line in first.splitlines() if line.startswith(("vendor_id", "model name", "flags", "Features"))]
    return hashlib.sha256("\n".join(lasting).encode()).hexdigest()[:12]
