"""OnCluster: a fit on shards and workers, which this process starts; a worker is the script run again, or a thread.

`parashard.launch.run` runs the job; `parashard.api.script` knows what this process is, `parashard.api.worker_threads`
what a thread is. Called by `parashard.api.trainer`.
"""

from __future__ import annotations

from typing import Any, NoReturn

from parashard.api.callback_follower import CallbackFollower
from parashard.api.code import code_of
from parashard.api.fits import FitCall
from parashard.api.jobs import check_same_call, check_same_job, check_same_model
from parashard.api.script import SCRIPT
from parashard.api.splitting import tried
from parashard.api.strategies import THREADS, ClusterStrategy
from parashard.api.worker_threads import worker_threads
from parashard.display.live import JobView
from parashard.errors import ConfigurationError, JobFailed
from parashard.launch.run import INTERRUPTED, run_job
from parashard.launch.runs import Run, job_credentials
from parashard.models.base import for_thread
from parashard.process.path_text import short_path
from parashard.process.run_files import LOGS
from parashard.process.shell import ExitCode


class OnCluster:
    """Trains a fit on shards and workers, as `parashard.api.fits.FitBackend`.

    Parameters
    ----------
    strategy : ClusterStrategy
        What its workers are, and what credentials its processes show.
    """

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
