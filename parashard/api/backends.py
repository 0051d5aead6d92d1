"""The backends of `fit`: in this process, or on a cluster, whose workers are processes or threads of this one.

Worker threads change the process' number of compute threads and its logger; both are restored at the end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import threadpoolctl

from parashard.api.callback_follower import CallbackFollower
from parashard.api.code import code_of
from parashard.api.fits import FitCall
from parashard.api.jobs import check_same_call, check_same_job, check_same_model
from parashard.api.script import SCRIPT
from parashard.api.strategies import THREADS, ClusterStrategy, InProcessStrategy, Strategy
from parashard.data.base import DataSource, DataSpec, Examples, Indices, any_thread, examples_of
from parashard.data.tree import rows_of
from parashard.display.live import JobView
from parashard.errors import ConfigurationError, JobFailed, ParashardError, shortened
from parashard.job.policy import Policy
from parashard.launch.local_cluster import StartThread
from parashard.launch.run import INTERRUPTED, run_job
from parashard.launch.runs import Run, job_credentials
from parashard.models.base import FrameworkModel, for_thread
from parashard.models.user_errors import named_with_line, warn
from parashard.plan.steps import parts_of_batch
from parashard.process.logs import as_logfmt, log, logged_to
from parashard.process.resources import EVERY_STEP, keep_freed_memory
from parashard.process.run_files import LOGS, short_path
from parashard.process.shell import ERROR_CHARACTERS_MAX, ExitCode, Stop, ended_by
from parashard.process.starts import WorkerStart
from parashard.process.threads import ThreadChild, holding_model_lock

LOG_FILE = "workers.log"
"""Log of all worker threads of a run."""


def backend_of(strategy: Strategy) -> Here | OnCluster:
    """Return the backend of a strategy."""
    if isinstance(strategy, InProcessStrategy):
        return Here(strategy)
    assert isinstance(strategy, ClusterStrategy), "there is no other kind"
    return OnCluster(strategy)


class Here:
    """Trains in this process, by `parashard.api.in_process`, which is imported when training starts."""

    runs_script = False  # True: workers run the script again, which must be a file

    def __init__(self, strategy: InProcessStrategy) -> None:
        self._strategy = strategy

    def work(self, call: FitCall) -> NoReturn:
        """Refuse to run a worker: this call has none."""
        raise ConfigurationError(
            f"this call trains in its own process, by {type(self._strategy).__name__}, in this worker, and by "
            "worker processes in the one that started it: a script makes the same calls wherever it runs"
        )

    def checked(self, call: FitCall) -> FitCall:
        """Try the model on a step."""
        call.trained_model.try_step(call.source, call.loaded.job, call.pieces)
        return call

    def train(self, call: FitCall, run: Run, view: JobView, follower: CallbackFollower) -> dict[str, Any]:
        """Train with this process's own shard and replicas."""
        from parashard.api.in_process.training import train

        return train(call, run, view, follower, self._strategy)


class OnCluster:
    """Trains on shards and workers that this process starts; a worker is the script run again, or a thread."""

    def __init__(self, strategy: ClusterStrategy) -> None:
        self._strategy = strategy

    @property
    def runs_script(self) -> bool:
        """Whether workers run the script again."""
        return self._strategy.workers_as != THREADS and not (
            self._strategy.workers_as is None and SCRIPT.is_interactive
        )

    def work(self, call: FitCall) -> NoReturn:
        """Run this process's worker, then exit; refuse a call that differs from the parent's."""
        run_dir = SCRIPT.run_dir
        if run_dir is None:  # only the coordinator can compare jobs
            SCRIPT.work(call.model, call.source, call.code.sha256, lambda theirs: check_same_job(call.loaded, theirs))
        check_same_call(call.loaded, call.source.spec, call.code, run_dir)
        accepted = code_of(run_dir)
        if accepted is None or not accepted.is_changed:
            is_seeded = isinstance(call.trained_model.given, FrameworkModel)  # from the job's seed
            check_same_model(call.trained_model.declared(call.source.spec), run_dir, values=not is_seeded)
        SCRIPT.work(call.model, call.source, call.code.sha256 if accepted is None else accepted.identity)

    def checked(self, call: FitCall) -> FitCall:
        """Try the model, and choose the number of parts per batch."""
        call = tried(call)
        if not self.runs_script:
            SCRIPT.check_thread()
            for_thread(call.model)  # fail before the run begins if the model cannot be copied for each thread
        return call

    def train(self, call: FitCall, run: Run, view: JobView, follower: CallbackFollower) -> dict[str, Any]:
        """Run the job to its end."""
        run = run._replace(credentials=job_credentials(self._strategy.tls_dir), ray=self._strategy.ray)
        if run.resume:
            run = run._replace(from_checkpoint=SCRIPT.resume_flags.from_checkpoint)
        if self.runs_script:
            outcome = run_job(run._replace(script=SCRIPT.command), view, follower=follower)
        else:
            with worker_threads(call, run) as start_thread:
                outcome = run_job(run._replace(start_thread=start_thread), view, follower=follower)
        if outcome.raised is not None:
            raise outcome.raised
        if outcome.exit_code == INTERRUPTED:
            raise KeyboardInterrupt(outcome.reason)
        if outcome.exit_code != ExitCode.DONE:
            if outcome.is_refused:
                raise ConfigurationError(outcome.reason)
            raise JobFailed(f"{outcome.reason} (logs: {short_path(outcome.run_dir / LOGS)})")
        return outcome.report


def tried(call: FitCall) -> FitCall:
    """Try the model on a step; return the call with its number of parts per batch, 1 if the model cannot be split."""
    loaded, source = call.loaded, call.source
    policy = loaded.job.consistency.policy
    if loaded.is_open and source.spec.batched:
        rows = rows_of(examples_of(source, 0, np.zeros(1, np.int64))[0])
        policy = Policy("auto", parts_of_batch(loaded.job.cluster.workers, rows))
        loaded = loaded.with_policy(policy)
    why = _why_whole(call, policy) if policy.parts > 1 else ""
    if why:
        if not loaded.is_open:
            raise ConfigurationError(
                f"consistency is {policy}: {why}; name no number of parts, and each batch is computed by one worker"
            )
        loaded = loaded.with_policy(Policy("auto", 1))
    if why or policy.parts == 1:
        call.trained_model.try_step(source, loaded.job, call.pieces)
    if why:
        warn(f"each batch is computed by one worker, and the others wait for it: {why}")
    return call._replace(loaded=loaded)


def _why_whole(call: FitCall, policy: Policy) -> str:
    """Return why batches cannot be split; "" if they can."""
    try:
        is_mean = call.trained_model.try_step(call.source, call.loaded.with_policy(policy).job, call.pieces)
    except ConfigurationError as error:
        return f"a part of a batch cannot be computed by itself ({error})"
    return "" if is_mean else "the loss of a batch is not the mean over its examples"


# --- workers that are threads ---


@contextmanager
def worker_threads(call: FitCall, run: Run) -> Iterator[StartThread]:
    """Yield a function that starts a call's worker threads; restore the process' compute threads at the end."""
    threads = run.job.compute_threads(os.environ)
    keep_freed_memory(EVERY_STEP)
    if not any_thread(call.source):
        call = call._replace(source=_InTurn(call.source))

    def start(name: str, words: Sequence[str]) -> ThreadChild:
        return ThreadChild(name, lambda stop, on_hung: _work(call, run, words, stop, on_hung))

    with (
        logged_to(run.folder / LOGS / LOG_FILE, as_logfmt),
        _threads_of_pytorch(threads),  # first: it reads the number that `threadpool_limits` changes
        threadpoolctl.threadpool_limits(threads),
    ):
        yield start


def _work(call: FitCall, run: Run, words: Sequence[str], stop: Stop, on_hung: Callable[[str], None]) -> tuple[int, str]:
    """Run a worker in this thread; return the exit code that its process would have, and the reason."""
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
    """A data source that one thread reads at a time, since a user's dataset need not be thread-safe."""

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
    """Set PyTorch's number of compute threads in this context; threads started inside inherit it."""
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
