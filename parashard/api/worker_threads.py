"""Workers that are threads of the process that calls `fit`, as in a notebook: each is the worker that a process is.

Owns what of the process such a run changes, and puts it back: compute threads, the logger. What is random is put back
by `parashard.api.fits`. The worker is `parashard_worker.__main__.serve`, imported when the first one starts. Called by
`parashard.api.backends`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import threadpoolctl

from parashard.api.fits import FitCall
from parashard.data.base import DataSource, DataSpec, Examples, Indices, any_thread, examples_of
from parashard.errors import ParashardError, shortened
from parashard.launch.local_cluster import StartThread
from parashard.launch.runs import Run
from parashard.launch.thread_child import ThreadChild
from parashard.models.base import for_thread
from parashard.models.user_errors import named_with_line
from parashard.process.allocator import EVERY_STEP, keep_freed_memory
from parashard.process.compute_threads import threads_for
from parashard.process.logs import as_logfmt, log, logged_to
from parashard.process.model_lock import holding_model_lock
from parashard.process.run_files import LOGS
from parashard.process.shell import ERROR_CHARACTERS_MAX, ExitCode, Stop, ended_by
from parashard.process.starts import WorkerStart

LOG_FILE = "workers.log"
"""Of all worker threads of a run."""


@contextmanager
def worker_threads(call: FitCall, run: Run) -> Iterator[StartThread]:
    """Return within what starts workers of a call; compute threads of the process are as before at the end."""
    cluster, policy = run.job.cluster, run.job.consistency.policy
    sync = policy.kind == "sync"
    threads = threads_for(cluster.worker_threads, cluster.workers, reproducible=sync, environ=os.environ)
    keep_freed_memory(EVERY_STEP)
    if not any_thread(call.source):
        call = call._replace(source=_InTurn(call.source))

    def start(name: str, words: Sequence[str]) -> ThreadChild:
        return ThreadChild(name, lambda stop, on_hung: _work(call, run, words, stop, on_hung))

    with (
        logged_to(run.folder / LOGS / LOG_FILE, as_logfmt),
        _threads_of_pytorch(threads),  # first: it reads a number that the other one changes
        threadpoolctl.threadpool_limits(threads),
    ):
        yield start


def _work(call: FitCall, run: Run, words: Sequence[str], stop: Stop, on_hung: Callable[[str], None]) -> tuple[int, str]:
    """Be a worker, and return what its process would have ended with, and why."""
    from parashard_worker.__main__ import serve
    from parashard_worker.loading import OwnTask

    def hung(reason: str) -> None:
        log.critical("hung", reason=reason)
        on_hung(reason)

    try:
        assert run.declared is not None
        own = OwnTask(for_thread(call.model), call.source, run.declared.model_sha256)
        code = serve(WorkerStart.read(words), stop, own, on_hung=hung)
    except ParashardError as error:
        return ended_by(error, stop), shortened(str(error), ERROR_CHARACTERS_MAX)
    except BaseException as error:  # a bug, or the user's code that builds a model
        log.critical("worker-ended", exc_info=error)
        return ExitCode.FAILED, shortened(named_with_line(error), ERROR_CHARACTERS_MAX)
    return int(code), ""


class _InTurn:
    """A data source that one thread reads at a time: a user's dataset need not be safe for more."""

    def __init__(self, source: DataSource) -> None:
        self._source = source

    @property
    def spec(self) -> DataSpec:
        return self._source.spec

    @holding_model_lock()
    def examples(self, indices: Indices) -> Examples:
        return self._source.examples(indices)

    @holding_model_lock()
    def examples_of(self, step: int, indices: Indices) -> Examples:
        return examples_of(self._source, step, indices)

    @holding_model_lock()
    def held_out(self, start: int, stop: int) -> Examples:
        return self._source.held_out(start, stop)


@contextmanager
def _threads_of_pytorch(number: int) -> Iterator[None]:
    """Have PyTorch compute with so many threads within: each new thread of the process begins with PyTorch's number."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
