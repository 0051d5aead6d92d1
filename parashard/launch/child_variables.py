"""Environment variables of the processes that run a user's code: threads, hashes of texts, a cache for JAX.

Whatever the user has set stays, but for numbers of threads that the job file names. Called by `parashard.launch.run`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from parashard.job.schema import Job
from parashard.launch.local_cluster import MODULES
from parashard.process.compute_threads import thread_variables, threads_for

HASH_SEED = "PYTHONHASHSEED"
JAX_CACHE = "JAX_COMPILATION_CACHE_DIR"


def child_variables(job: Job, environ: Mapping[str, str], *, jax: bool) -> dict[str, dict[str, str]]:
    """Return the variables by module: they must be set when a process starts. `jax`: the program has imported JAX."""
    options, sync = job.cluster, job.consistency.policy.kind == "sync"
    threads = threads_for(options.worker_threads, options.workers, reproducible=sync, environ=environ)
    hashes = hash_variables(job.job.seed, environ)
    return {
        MODULES["worker"]: {
            **thread_variables(threads, environ, override=options.worker_threads > 0),
            **hashes,
            **(jax_variables(environ) if jax else {}),
        },
        MODULES["coordinator"]: {**thread_variables(1, environ, override=False), **hashes},
    }


def hash_variables(seed: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return one seed for the hashes of texts, so that sets have the same order in each process.

    It is the job's, which the run keeps: a resumed run has the same.
    """
    return {} if environ.get(HASH_SEED, "random") != "random" else {HASH_SEED: str(seed % 2**32)}


def jax_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return where JAX keeps what it has compiled: a folder of the user's cache for this kind of processor.

    Nothing where it cannot be made: JAX warns of each program that it cannot keep.
    """
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


def _processor() -> str:
    """Return a digest of what Linux says of the first processor: a home folder may be that of several machines."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        first = ""
    lasting = [line for line in first.splitlines() if line.startswith(("vendor_id", "model name", "flags", "Features"))]
    return hashlib.sha256("\n".join(lasting).encode()).hexdigest()[:12]
