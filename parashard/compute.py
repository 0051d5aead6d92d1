"""Threads of BLAS and Numba per process, set so that the processes of one machine do not fight for its cores."""

from __future__ import annotations

import os

import threadpoolctl


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def threads_for(asked: int, processes: int, *, reproducible: bool) -> int:
    """Return how many compute threads one of `processes` equal processes should use.

    Parameters
    ----------
    asked : int
        What the job file says; 0 leaves the choice to us.
    processes : int
        How many such processes share this machine.
    reproducible : bool
        True (sync mode): one thread, however many processes there are, because the number of threads may change bits
        (P13) and the number of workers must not.
    """
    if asked:
        return asked
    return 1 if reproducible else max(1, cores() // max(1, processes))


def limit_threads(threads: int) -> None:
    """Limit this process's BLAS and OpenMP to so many threads (0: as many as it has cores)."""
    threadpoolctl.threadpool_limits(threads or cores())
