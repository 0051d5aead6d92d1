"""OnCluster: a fit on shards and workers, which this process starts; a worker is the script run again, or a thread.

`parashard.launch.run` runs the job; `parashard.api.script` knows what this process is, `parashard.api.worker_threads`
what a thread is. Called by `parashard.api.trainer`.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from parashard.api.code import code_of
from parashard.api.fits import Fit, FitCall
from parashard.api.jobs import check_same_call, check_same_job, check_same_model
from parashard.api.script import SCRIPT
from parashard.api.splitting import tried
from parashard.api.strategies import THREADS, ClusterStrategy
from parashard.api.worker_threads import worker_threads
from parashard.display.paths import short_path
from parashard.errors import ConfigurationError, JobFailed
from parashard.job.declaration import write_declaration
from parashard.launch.run import INTERRUPTED, run_job
from parashard.launch.run_files import LOGS
from parashard.models.threaded import for_thread
from parashard.process.shell import ExitCode


class OnCluster:
    """The place of a fit with shards and workers, as `parashard.api.fits.Place`.

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

    def enter(self, call: FitCall) -> FitCall:
        """Be the worker that this process is for, and end; else try the model, and choose the parts of a batch."""
        if SCRIPT.is_worker:
            loaded, spec, code = call.loaded, call.source.spec, call.code

            def check(run_dir: Path) -> None:
                check_same_call(loaded, spec.fingerprint, spec.summary(), code, run_dir)
                accepted = code_of(run_dir)
                if accepted is None or not accepted.is_changed:
                    check_same_model(call.present.declared(), run_dir)

            known = code_of(SCRIPT.run_dir) if SCRIPT.run_dir is not None else None
            SCRIPT.work(
                call.model,
                call.source,
                known.identity if known is not None else code.sha256,
                check,
                lambda theirs: check_same_job(loaded, theirs),
            )
        call = tried(call)
        if not self.runs_script:
            SCRIPT.check_thread()
            for_thread(call.model)  # what no thread could have is said before there is a run
        return call

    def train(self, fit: Fit) -> dict[str, Any]:
        """Run the job to its end."""
        write_declaration(fit.run_dir, fit.declared)
        with nullcontext() if self.runs_script else worker_threads(fit) as start_thread:
            outcome = run_job(
                fit.loaded,
                fit.run_dir,
                fit.view,
                init=None,
                output=None,
                resume=fit.resumed,
                from_checkpoint=SCRIPT.resume_flags.from_checkpoint if fit.resumed else "",
                tls_dir=self._strategy.tls_dir,
                script=SCRIPT.command if start_thread is None else None,
                start_thread=start_thread,
                follower=fit.follower,
                owned=True,
            )
        if outcome.raised is not None:
            raise outcome.raised
        if outcome.exit_code == INTERRUPTED:
            raise KeyboardInterrupt(outcome.reason)
        if outcome.exit_code != ExitCode.DONE:
            if outcome.is_refused:
                raise ConfigurationError(outcome.reason)
            raise JobFailed(f"{outcome.reason} (logs: {short_path(outcome.run_dir / LOGS)})")
        return outcome.report
