"""Threads and memory of a process's libraries: as many threads as cores allow, and reuse of freed memory.

A library reads its number of threads from the environment when it is loaded: the launcher sets the variables
(`parashard.launch.run`), and a worker does so before it imports the user's model (`parashard_worker.loading`).
Libraries already loaded, such as NumPy's BLAS, are limited by `limit_threads`.

glibc returns blocks of 128 KiB and more to the kernel when they are freed, and the kernel fills the next ones with
zeros, page by page or 2 MiB at once. For arrays of the same size at every step that costs more than the work on them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import NamedTuple

import threadpoolctl

_NUMBERS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""The variables in which a user may set the number of threads, in order of precedence."""

THREAD_VARIABLES = (
    *_NUMBERS,  # PyTorch reads those of OpenMP and of MKL
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "NPROC",  # JAX: the threads of XLA on the CPU
)
"""Every variable that limits the threads of a library that a model may use."""


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def threads_for(asked: int, processes: int, *, reproducible: bool, environ: Mapping[str, str] | None = None) -> int:
    """Return how many compute threads one of `processes` equal processes should use."""
    # `asked` is the job file's number; 0: the environment's, else a share of the cores. `reproducible` (sync mode): one
    # thread for any number of processes, because the number of threads may change bits, and the number of workers must
    # not.
    wanted = asked or next((n for name in _NUMBERS if (n := _number((environ or {}).get(name, "")))), 0)
    return wanted or (1 if reproducible else max(1, cores() // max(1, processes)))


def thread_variables(threads: int, environ: Mapping[str, str], *, override: bool) -> dict[str, str]:
    """Return the variables to set so that every library uses this number of threads."""
    return {name: str(threads) for name in THREAD_VARIABLES if override or not environ.get(name)}


def limit_threads(threads: int) -> None:
    """Limit this process's BLAS and OpenMP to a number of threads (0: as many as it has cores)."""
    threadpoolctl.threadpool_limits(threads or cores())


def _number(text: str) -> int:
    """Return the first number of a list such as "4,2", which OpenMP allows; 0 if there is none."""
    first = text.partition(",")[0].strip()
    return int(first) if first.isascii() and first.isdecimal() else 0


M_TRIM_THRESHOLD = -1  # malloc.h
M_MMAP_THRESHOLD = -3
OWN_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


class KeptMemory(NamedTuple):
    """Bounds on freed memory that the allocator keeps: the largest block, and the bytes in each arena."""

    block_bytes: int
    bytes: int


EVERY_STEP = KeptMemory(1 << 30, (1 << 31) - 1)
"""For a worker: a step's arrays, of any size; it made a convolutional step 1.6 to 2.8 times faster."""
MESSAGES = KeptMemory(8 << 20, 64 << 20)
"""For a shard: gRPC's messages and the values decoded from them. A large shard's snapshots go back to the kernel."""


def keep_freed_memory(kept: KeptMemory) -> bool:
    """Make the process reuse freed blocks; call this before it has threads. Return whether it does."""
    # It does not with another C library than glibc, nor if the environment has its own settings.
    if any(name in os.environ for name in OWN_SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, kept.block_bytes) and mallopt(M_TRIM_THRESHOLD, kept.bytes))
