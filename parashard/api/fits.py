"""A call of `Trainer.fit` from its folder to its answer, and the interface of the backends that train it.

Knows no backend (`parashard.api.backends`). Called by `parashard.api.trainer`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

from parashard.api.callback_follower import CallbackFollower
from parashard.api.code import CODE_FILE, Code, RunCode, note_code, resumed_code, write_code
from parashard.api.script import SCRIPT
from parashard.api.trained_model import TrainedModel
from parashard.api.trained_optimizer import TrainedOptimizer, updates_after
from parashard.api.transforms import kept_generators
from parashard.api.user_calls import warn
from parashard.callbacks.base import Callback, Training
from parashard.callbacks.running import Callbacks
from parashard.data.base import DataSource
from parashard.display.live import JobView, NoView, console_for, open_view
from parashard.display.status_tables import not_learned
from parashard.errors import ConfigurationError, JobFailed
from parashard.job.load import LoadedJob
from parashard.launch.programs import write_program
from parashard.launch.run_folders import discard_unbegun, is_done, new_run_dir, owned, unchanged_if_refused
from parashard.launch.runs import Run
from parashard.models.base import Model, TellsMetrics
from parashard.models.declaration import RECORD_FILE, ROWS_FILE, VALUES_FILE, declare
from parashard.process.run_files import CALLS_FILE, ORIGIN_FILE, PROGRAM_FILE, short_path
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

        Raises ConfigurationError if job, data and model do not fit (no run has begun), JobFailed if the job failed, and
        KeyboardInterrupt after Ctrl-C or SIGTERM, once the state is saved.

        Parameters
        ----------
        run : Run
            The run that begins or resumes; it has a declaration.
        """


def run_fit(
    backend: FitBackend, call: FitCall, begun: Path | None, *, accept_code_change: bool, quiet: bool
) -> dict[str, Any]:
    """Train, and return what the call answers: "report", "run_dir", "weights" and "history".

    Raises ConfigurationError if the job is refused (nothing of it is left), and what `FitBackend.train` raises.
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
        write_code(run_dir, code, SCRIPT.sources.texts() if call.code.name else {})
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


class History:
    """What a `fit` did.

    Attributes
    ----------
    history : dict of str to list of float
        By epoch: "loss", the mean over its examples, the model's metrics over its batches by their names, what the
        validation data gave at its end as "val_NAME", and what callbacks added; NaN where the report has no finite
        figure. But in `sync:N` "val_steps": how many batches were in the weights that were evaluated; more
        than at the epoch's end where training did not wait.
    epoch : list of int
        Their numbers, from 0 on, or from `initial_epoch`.
    report : dict
        The run's report (`report.json`).
    run_dir : Path
        The run's folder: weights, checkpoints, logs.
    """

    def __init__(
        self,
        report: dict[str, Any],
        run_dir: Path,
        history: Mapping[str, list[float]] | None = None,
        *,
        first_epoch: int = 0,
    ) -> None:
        self.report = report
        self.run_dir = run_dir
        figures = history or _reported(report)
        self.history: dict[str, list[float]] = {name: [_number(value) for value in figures[name]] for name in figures}

        self.epoch = [first_epoch + number for number in range(max(map(len, self.history.values()), default=0))]

    def __repr__(self) -> str:
        last = ", ".join(f"{name} {values[-1]:.4g}" for name, values in self.history.items())
        return f"History({last}; {self.run_dir})"


def _reported(report: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """Return the figures of a run whose callbacks have kept none."""
    figures = {"loss": [report["training_loss"]]}
    for evaluation in report["evaluations"]:
        for name, value in evaluation.items():
            if name not in ("steps", "judged_steps"):
                figures.setdefault(f"val_{name}", []).append(value)
    return figures


def _number(value: float | None) -> float:
    """Return a figure as a float; JSON has None for one that is not finite."""
    return math.nan if value is None else value


def say_end(history: History) -> None:
    """Print what stays on the screen: a line, and one more if the model did not learn."""
    found = [f"{name} {values[-1]:.4g}" for name, values in history.history.items()]
    words = f"done in {history.report['wall_s']:.1f} s: {', '.join(found)}; {short_path(history.run_dir)}"
    for line in filter(None, (words, not_learned(history.report))):
        console_for(sys.stdout).print(line, soft_wrap=True, markup=False, highlight=False)
