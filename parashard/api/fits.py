"""A call of `Trainer.fit` from its folder to its answer, and the interface of the backends that train it.

Knows neither backend: `parashard.api.fit_on_cluster` and `parashard.api.fit_here`. Called by `parashard.api.trainer`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

from parashard.api.callback_follower import CallbackFollower
from parashard.api.code import CODE_FILE, Code, RunCode, note_code, resumed_code, write_code
from parashard.api.generators import kept_generators
from parashard.api.history import History, say_end
from parashard.api.script import SCRIPT
from parashard.api.tracebacks import warn
from parashard.api.trained_model import TrainedModel
from parashard.api.trained_optimizer import TrainedOptimizer, updates_after
from parashard.callbacks.base import Callback, Training
from parashard.callbacks.running import Callbacks
from parashard.data.base import DataSource
from parashard.display.live import JobView, NoView, console_for, open_view
from parashard.display.summary import not_learned
from parashard.errors import ConfigurationError, JobFailed
from parashard.job.load import LoadedJob, job_of_run
from parashard.launch.programs import write_program
from parashard.launch.run_folders import discard_unbegun, is_done, new_run_dir, owned, unchanged_if_refused
from parashard.launch.runs import Run
from parashard.models.base import Model, TellsMetrics
from parashard.models.declaration import RECORD_FILE, ROWS_FILE, VALUES_FILE, declare
from parashard.process.path_text import short_path
from parashard.process.run_files import CALLS_FILE, JOB_FILE, ORIGIN_FILE, PROGRAM_FILE
from parashard.store import open_store

RECORDS = (CODE_FILE, CALLS_FILE, ORIGIN_FILE, PROGRAM_FILE, RECORD_FILE, VALUES_FILE, ROWS_FILE)
"""Files in a run's folder that a start writes before its job is accepted."""


class FitCall(NamedTuple):
    """What a call says.

    Attributes
    ----------
    loaded : LoadedJob
        The job.
    present : TrainedModel
        The trainer's model, with its weights.
    model, source : Model, DataSource
        What computes the job's steps, of which examples.
    code : Code
        What computes, as it is now.
    texts : mapping of str to bytes
        Its texts, by path.
    callbacks : list of Callback
        As `parashard.callbacks.running.checked` returned them.
    wait : bool, optional
        Whether training waits for them at the end of each epoch; None: if one of them says so.
    trainer : object
        What they see as `self.trainer`.
    pieces : int
        Of a step (`gradient_accumulation`).
    optimizer : TrainedOptimizer
        The trainer's, with the state that it goes on from.
    """

    loaded: LoadedJob
    present: TrainedModel
    model: Model
    source: DataSource
    code: Code
    texts: Mapping[str, bytes]
    callbacks: list[Callback]
    wait: bool | None
    trainer: object
    pieces: int
    optimizer: TrainedOptimizer


class FitBackend(Protocol):
    """Trains a fit: on a cluster, or in this process."""

    @property
    def runs_script(self) -> bool:
        """Whether it runs the script again, which must be in a file then."""

    def work(self, call: FitCall) -> NoReturn:
        """Run the worker that this process is for, if the call is that of the process that started it, and end."""

    def checked(self, call: FitCall) -> FitCall:
        """Refuse what cannot be trained there, before there is a run.

        The call that is returned has what depends on the backend: the parts of a batch.
        """

    def train(self, call: FitCall, run: Run, view: JobView, follower: CallbackFollower) -> dict[str, Any]:
        """Train to the end, and return the report; it lies in the run's folder, with the weights.

        Parameters
        ----------
        call : FitCall
            What computes the steps, of which examples.
        run : Run
            The run that begins or resumes; it has a declaration.
        view : JobView
            Shows the progress.
        follower : CallbackFollower
            Runs the callbacks.

        Raises
        ------
        ConfigurationError
            If job, data and model do not fit; no run has begun then.
        JobFailed
            If the job failed; the run's folder says why.
        KeyboardInterrupt
            After Ctrl-C or SIGTERM, once the state is saved.
        """


def as_begun(call: FitCall, begun: Path | None) -> FitCall:
    """Return a call with what the run that it goes on with has chosen where the call leaves it open."""
    if begun is None:
        return call
    return call._replace(loaded=call.loaded.as_begun(job_of_run(begun / JOB_FILE).job))


def run_fit(
    backend: FitBackend, call: FitCall, begun: Path | None, *, accept_code_change: bool, quiet: bool
) -> dict[str, Any]:
    """Train, and return what the call answers: "report", "run_dir", "weights" and "history".

    Parameters
    ----------
    backend : FitBackend
        Where.
    call : FitCall
        What.
    begun : Path, optional
        The folder of the run to go on with.
    accept_code_change : bool
        True: go on with it also where the code was changed.
    quiet : bool
        True: show nothing.

    Raises
    ------
    ConfigurationError
        If the job is refused; nothing of it is left.
    JobFailed, KeyboardInterrupt
        As `FitBackend.train`.
    """
    run_dir = begun or new_run_dir(None, call.loaded.job.job.name)
    try:
        with owned(run_dir), unchanged_if_refused(run_dir, RECORDS):
            answer = _run(backend, call, run_dir, resume=begun is not None, accept=accept_code_change, quiet=quiet)
    except (JobFailed, KeyboardInterrupt):
        raise  # the folder says why
    except BaseException:
        if begun is None:
            discard_unbegun(run_dir, keep=False)
        raise
    finally:
        call.present.training = None
    return {**answer, "name": call.loaded.job.job.name, "data": call.source.spec.fingerprint}


def _run(
    backend: FitBackend, call: FitCall, run_dir: Path, *, resume: bool, accept: bool, quiet: bool
) -> dict[str, Any]:
    """Train in a folder that no other process writes into."""
    code = RunCode(call.code.sha256, call.code, call.code)
    if resume:
        if is_done(run_dir):
            raise ConfigurationError(f"{short_path(run_dir)} is done: another process has gone on with it; start again")
        code = resumed_code(run_dir, call.code, accept_change=accept)
    declared = declare(call.source.spec, call.present.declared(call.optimizer), code.identity)
    run = Run(call.loaded, run_dir, declared, resume=resume)
    view = NoView() if quiet else open_view(console_for(sys.stdout))
    try:
        if code.is_changed:
            view.say("going on with code that was changed since the run began (accept_code_change)")
        follower = _follower(call, run, view)
        write_code(run_dir, code, call.texts)
        write_program(run_dir, SCRIPT.program("fit"))
        SCRIPT.write_answers(run_dir)
        with kept_generators():
            report = note_code(run_dir, backend.train(call, run, view, follower))
    finally:
        view.close()
    variables = call.present.save_state_dict(run_dir)
    weights, history = follower.end() or variables, follower.history
    if not quiet:
        say_end(History(report, run_dir, history))
    elif not_learned(report):
        warn(not_learned(report))
    return {
        "report": report,
        "run_dir": str(run_dir),
        "weights": str(weights),
        "history": history,
        "updates": updates_after(call.loaded.job, report["steps_total"]),
        "passes": call.loaded.job.steps(call.source.spec.examples).passes_after,
        "learning_rate": follower.learning_rate,
    }


def _follower(call: FitCall, run: Run, view: JobView) -> CallbackFollower:
    """Return what runs the callbacks, which see the weights that were evaluated as the trainer's own."""
    job = run.job
    steps = job.steps(call.source.spec.examples)
    call.present.training = training = Training(job.optimizer.learning_rate, run.folder)
    callbacks = Callbacks(
        call.callbacks,
        training,
        call.trainer,
        steps_per_epoch=steps.steps_per_epoch // steps.parts,
        epochs=steps.epochs,
        first_epoch=steps.first_epoch,
        wait=call.wait,
    )
    store = partial(open_store, run.store_url)
    model = call.model if isinstance(call.model, TellsMetrics) else None
    return CallbackFollower(callbacks, run.folder, store, view.say, resume=run.resume, model=model, parts=steps.parts)
