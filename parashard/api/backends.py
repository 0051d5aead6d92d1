"""The backends of `fit`: on a cluster or in this process, as a strategy says; both are a `FitBackend`.

`parashard.launch.run` runs the job of a cluster. Called by `parashard.api.trainer`.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from parashard.api.callback_follower import CallbackFollower
from parashard.api.code import code_of
from parashard.api.fits import FitBackend, FitCall
from parashard.api.jobs import check_same_call, check_same_job, check_same_model
from parashard.api.script import SCRIPT
from parashard.api.strategies import THREADS, ClusterStrategy, InProcessStrategy, Strategy
from parashard.api.user_calls import warn
from parashard.api.worker_threads import worker_threads
from parashard.data.base import examples_of
from parashard.data.tree import rows_of
from parashard.display.live import JobView
from parashard.errors import ConfigurationError, JobFailed
from parashard.job.policy import Policy
from parashard.launch.run import INTERRUPTED, run_job
from parashard.launch.runs import Run, job_credentials
from parashard.models.base import for_thread
from parashard.plan.steps import parts_of_batch
from parashard.process.run_files import LOGS, short_path
from parashard.process.shell import ExitCode


def backend_of(strategy: Strategy) -> FitBackend:
    """Return what trains by a strategy."""
    if isinstance(strategy, InProcessStrategy):
        return Here(strategy)
    assert isinstance(strategy, ClusterStrategy), "there is no other kind"
    return OnCluster(strategy)


class Here:
    """Trains a fit in this process, by `parashard.api.in_process`, which is imported when it trains."""

    runs_script = False

    def __init__(self, strategy: InProcessStrategy) -> None:
        self._strategy = strategy

    def work(self, call: FitCall) -> NoReturn:
        """Refuse a worker: this call has none."""
        raise ConfigurationError(
            f"this call trains in its own process, by {type(self._strategy).__name__}, in this worker, and by "
            "worker processes in the one that started it: a script makes the same calls wherever it runs"
        )

    def checked(self, call: FitCall) -> FitCall:
        """Try the model."""
        call.present.try_step(call.source, call.loaded.job, call.pieces)
        return call

    def train(self, call: FitCall, run: Run, view: JobView, follower: CallbackFollower) -> dict[str, Any]:
        """Train by this process's own shard and replicas."""
        from parashard.api.in_process.training import train

        return train(call, run, view, follower, self._strategy)


class OnCluster:
    """Trains a fit on shards and workers, which this process starts; a worker is the script run again, or a thread."""

    def __init__(self, strategy: ClusterStrategy) -> None:
        self._strategy = strategy

    @property
    def runs_script(self) -> bool:
        """Whether workers are the script, run again."""
        return self._strategy.workers_as != THREADS and not (
            self._strategy.workers_as is None and SCRIPT.is_interactive
        )

    def work(self, call: FitCall) -> NoReturn:
        """Run the worker that this process is for, unless its call is another one than its parent's."""
        run_dir = SCRIPT.run_dir
        if run_dir is None:  # only the coordinator knows what differs
            SCRIPT.work(call.model, call.source, call.code.sha256, lambda theirs: check_same_job(call.loaded, theirs))
        check_same_call(call.loaded, call.source.spec, call.code, run_dir)
        accepted = code_of(run_dir)
        if accepted is None or not accepted.is_changed:
            check_same_model(call.present.declared(), run_dir)
        SCRIPT.work(call.model, call.source, call.code.sha256 if accepted is None else accepted.identity)

    def checked(self, call: FitCall) -> FitCall:
        """Try the model, and choose the parts of a batch."""
        call = tried(call)
        if not self.runs_script:
            SCRIPT.check_thread()
            for_thread(call.model)  # what no thread could have is said before there is a run
        return call

    def train(self, call: FitCall, run: Run, view: JobView, follower: CallbackFollower) -> dict[str, Any]:
        """Run the job to its end."""
        run = run._replace(credentials=job_credentials(self._strategy.tls_dir))
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
    """Try the model on a step, and return the call with the parts of its batches.

    The sum of the parts' gradients is the gradient of the batch. Where that cannot be, or a part cannot be computed, a
    batch has one part.

    Raises ConfigurationError if the model cannot compute whole batches either, or the call names a number of parts that
    cannot be.
    """
    loaded, source = call.loaded, call.source
    policy = loaded.job.consistency.policy
    if loaded.is_open and source.spec.batched:
        rows = rows_of(examples_of(source, 0, np.zeros(1, np.int64))[0])
        policy = Policy("auto", parts_of_batch(loaded.job.cluster.workers, rows))
        loaded = loaded.with_policy(policy)
    if policy.parts > 1:
        why = _why_whole(call, policy)
        if not why:
            return call._replace(loaded=loaded)
        if not loaded.is_open:
            raise ConfigurationError(
                f"consistency is {policy}: {why}; name no number of parts, and each batch is computed by one worker"
            )
        loaded = loaded.with_policy(Policy("auto", 1))
        call.present.try_step(source, loaded.job, call.pieces)
        warn(f"each batch is computed by one worker, and the others wait for it: {why}")
        return call._replace(loaded=loaded)
    call.present.try_step(source, loaded.job, call.pieces)
    return call._replace(loaded=loaded)


def _why_whole(call: FitCall, policy: Policy) -> str:
    """Return why batches cannot be split; "": they can."""
    try:
        is_mean = call.present.try_step(call.source, call.loaded.with_policy(policy).job, call.pieces)
    except ConfigurationError as error:
        return f"a part of a batch cannot be computed by itself ({error})"
    return "" if is_mean else "the loss of a batch is not the mean over its examples"
