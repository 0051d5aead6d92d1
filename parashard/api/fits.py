"""A call of `Trainer.fit`: the run that it resumes, its folder and its recorded result.

A resumed script repeats its calls. Calls before the resumed run return their recorded results if they are the same
calls; different calls are refused.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from parashard.api.callback_follower import CallbackFollower
from parashard.api.code import CODE_FILE, Code, RunCode, note_code, resumed_code, write_code
from parashard.api.jobs import different_key
from parashard.api.script import SCRIPT, raise_again
from parashard.api.trained_model import TrainedModel
from parashard.api.trained_state import TrainedOptimizer, updates_after
from parashard.callbacks.base import Callback, Training
from parashard.callbacks.running import Callbacks
from parashard.data.base import DataSource
from parashard.display.live import JobView, console_for, open_view
from parashard.display.status_tables import not_learned
from parashard.errors import ConfigurationError, JobFailed
from parashard.job.load import LoadedJob, job_of_run
from parashard.launch.programs import answers_in, program_of, write_program
from parashard.launch.run_folders import (
    discard_unbegun,
    is_done,
    job_name_in,
    launcher_of,
    locked_run,
    new_run_dir,
    run_began_at,
    runs_here,
    runs_of,
    unchanged_if_refused,
)
from parashard.launch.runs import Run
from parashard.models.base import Model, TellsMetrics
from parashard.models.declaration import RECORD_FILE, ROWS_FILE, VALUES_FILE
from parashard.models.framework import kept_generators
from parashard.models.user_errors import warn
from parashard.process.run_files import CALLS_FILE, JOB_FILE, ORIGIN_FILE, PROGRAM_FILE, short_path
from parashard.store import open_store

RECORDS = (CODE_FILE, CALLS_FILE, ORIGIN_FILE, PROGRAM_FILE, RECORD_FILE, VALUES_FILE, ROWS_FILE)
"""Files that are written to a run's folder before its job is accepted."""
RESUMED_RUN = "goes_on"
"""Key in a recorded result that was returned again: the run that the script resumes."""


class FitCall(NamedTuple):
    """Arguments of a call, after validation."""

    loaded: LoadedJob
    trained_model: TrainedModel  # the trainer's model, with its weights
    model: Model  # computes steps
    source: DataSource
    code: Code  # the script's current code
    callbacks: list[Callback]  # as `parashard.callbacks.running.checked` returned them
    wait: bool | None  # whether to wait for callbacks after each epoch; None: if one of them requires it
    trainer: object  # `self.trainer` of callbacks
    pieces: int  # of a step (`gradient_accumulation`)
    optimizer: TrainedOptimizer  # with its current state


Train = Callable[[FitCall, Run, JobView, CallbackFollower], dict[str, Any]]
"""Trains to the end and returns the report; report and weights are in the run's folder. Ctrl-C saves first."""


def run_fit(train: Train, call: FitCall, begun: Path | None, *, accept: bool, quiet: bool) -> dict[str, Any]:
    """Train, and return the call's result; a refused job leaves no folder."""
    run_dir = begun or new_run_dir(None, call.loaded.job.job.name)
    try:
        with locked_run(run_dir), unchanged_if_refused(run_dir, RECORDS):
            result = _run(train, call, run_dir, resume=begun is not None, accept=accept, quiet=quiet)
    except (JobFailed, KeyboardInterrupt):
        raise  # keep the folder: its logs tell the reason
    except BaseException:
        if begun is None:
            discard_unbegun(run_dir, keep=False)
        raise
    finally:
        call.trained_model.training = None
    return {**result, "name": call.loaded.job.job.name, "data": call.source.spec.fingerprint}


def _run(train: Train, call: FitCall, run_dir: Path, *, resume: bool, accept: bool, quiet: bool) -> dict[str, Any]:
    """Train in a folder that this process owns."""
    code = RunCode(call.code.sha256, call.code, call.code)
    if resume:
        if is_done(run_dir):
            raise ConfigurationError(f"{short_path(run_dir)} is done: another process has gone on with it; start again")
        code = resumed_code(run_dir, call.code, accept_change=accept)
    declared = call.trained_model.declaration_to_run(call.source.spec, call.optimizer, code.identity)
    run = Run(call.loaded, run_dir, declared, resume=resume)
    view = JobView() if quiet else open_view(console_for(sys.stdout))
    try:
        if code.is_changed:
            view.say("going on with code that was changed since the run began (accept_code_change)")
        follower = _follower(call, run, view)
        write_code(run_dir, code, SCRIPT.sources.texts if call.code.name else {})
        write_program(run_dir, SCRIPT.program("fit"))
        SCRIPT.write_results(run_dir)
        with kept_generators():
            report = note_code(run_dir, train(call, run, view, follower))
    finally:
        view.close()
    variables = call.trained_model.save_state_dict(run_dir)
    weights, history = follower.end() or variables, follower.callbacks.history.history
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
        "learning_rate": follower.callbacks.training.learning_rate,
    }


def _follower(call: FitCall, run: Run, view: JobView) -> CallbackFollower:
    """Return the callbacks' follower; in callbacks the trainer has the weights that were evaluated."""
    job = run.job
    steps = job.steps(call.source.spec.examples)
    call.trained_model.training = training = Training(job.optimizer.learning_rate, run.folder)
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


# --- resuming a script ---


class Resumed(NamedTuple):
    """The run that a script resumes, and this call's recorded result; empty if the call itself made that run."""

    run_dir: Path
    result: Mapping[str, Any]


def unfinished(name: str, call: str) -> Path | None:
    """Return the newest run of this job name and call, if it is not done."""
    runs = [run_dir for run_dir in runs_of(name) if _call_of(run_dir) in (call, None)]
    return runs[-1] if runs and not is_done(runs[-1]) else None


def resumed(
    name: str, script: Path | None, results: Sequence[Mapping[str, Any]], asked: Path | None = None
) -> Resumed | None:
    """Return what a call of `fit` resumes, None if it begins a run; without a script calls are not numbered."""
    if script is None:
        run_dir = asked or unfinished(name, "fit")
        return None if run_dir is None else Resumed(run_dir, {})
    number = len(results)
    chosen = next((Path(result[RESUMED_RUN]) for result in reversed(results) if RESUMED_RUN in result), asked)
    if asked is not None and not _is_of(asked, script):
        raise ConfigurationError(f"{short_path(asked)} is a run of another script than {short_path(script)}")
    if chosen is None:
        chosen = _newest(name, script, results)
        if chosen is None or is_done(chosen):
            return None
        made_here = [
            Path(result["run_dir"]) for result in results if result.get("call") == "fit" and "run_dir" in result
        ]
        if made_here:
            # Another process of the script is training it, or began it after this process' first fit.
            if launcher_of(chosen) is not None or run_began_at(chosen) > run_began_at(made_here[0]):
                return None
            raise ConfigurationError(
                f"{short_path(chosen)} is not done, and a fit before this one was made anew: give each fit of the "
                "script resume=True, so that those before it return what they returned; or none, to begin anew"
            )
    before = answers_in(chosen)
    if number > len(before):
        return None
    if number < len(before):
        if before[number].get("call") != "fit":
            raise ConfigurationError(
                f"call {number + 1} of the script is fit, and was {before[number].get('call')} when "
                f"{short_path(chosen)} began: change the script back, or begin a new run (resume=False)"
            )
        return Resumed(chosen, before[number])
    return Resumed(chosen, {})


def recorded_result(earlier: Resumed, call: FitCall, *, accept_code_change: bool) -> dict[str, Any]:
    """Return this call's recorded result from before the resumed run; refuse another call."""
    result, later = dict(earlier.result), short_path(earlier.run_dir)
    if "error" in result:
        raise_again(result)
    result = _moved(result, earlier.run_dir.parent)
    run_dir = Path(result["run_dir"])
    if not (run_dir / JOB_FILE).is_file() or not Path(result["weights"]).is_file():
        raise ConfigurationError(
            f"{later} goes on from the weights of {short_path(run_dir)}, which are gone: bring that folder back, or "
            "begin a new run (resume=False)"
        )
    different = different_key(call.loaded, job_of_run(run_dir / JOB_FILE).job)
    if not different and result.get("data", call.source.spec.fingerprint) != call.source.spec.fingerprint:
        different = f"the data are others ({call.source.spec.summary()} here)"
    if different:
        raise ConfigurationError(
            f"{later} goes on after {short_path(run_dir)}, but this call is not the one that made that run: "
            f"{different}; change it back, or begin a new run (resume=False)"
        )
    resumed_code(run_dir, call.code, accept_change=accept_code_change)
    return {**result, RESUMED_RUN: str(earlier.run_dir)}


def _newest(name: str, script: Path, results: Sequence[Mapping[str, Any]]) -> Path | None:
    """Return the newest run of this call, or of a later call in a script that made this call."""
    made_here = {str(result.get("run_dir")) for result in results}
    for run_dir in reversed([path.absolute() for path in runs_here()]):
        if str(run_dir) in made_here or _call_of(run_dir) != "fit" or not _is_of(run_dir, script):
            continue
        before = answers_in(run_dir)
        if len(before) == len(results):
            if job_name_in(run_dir) == name:
                return run_dir
        elif len(before) > len(results):
            result = before[len(results)]
            named = result.get("name") or job_name_in(Path(str(result.get("run_dir", ""))))
            if named == name or "error" in result:
                return run_dir
    return None


def _call_of(run_dir: Path) -> str | None:
    program = program_of(run_dir)
    return program.call if program is not None else None


def _is_of(run_dir: Path, script: Path) -> bool:
    """Tell whether a run is this script's, whose folder may have been moved since."""
    program = program_of(run_dir)
    recorded = Path(program.script) if program is not None and program.script else None
    if recorded is None:
        return False
    return recorded == script or (recorded.name == script.name and (not recorded.exists() or recorded.samefile(script)))


def _moved(result: dict[str, Any], runs: Path) -> dict[str, Any]:
    """Return a recorded result with current paths, if the folder of runs was moved as a whole."""
    was = Path(result["run_dir"])
    weights = Path(result.get("weights", was / "weights.safetensors"))
    now = runs / was.name
    if was.exists() or not now.exists():
        return {**result, "weights": str(weights)}
    if weights.is_relative_to(was):
        weights = now / weights.relative_to(was)
    return {**result, "run_dir": str(now), "weights": str(weights)}


# --- the result of a call ---


class History:
    """Figures and report of a `fit`.

    Attributes
    ----------
    history : dict of str to list of float
        By name, one value per epoch: "loss", the mean over the epoch's examples; the model's metrics over its batches;
        "val_NAME", figures of the validation data at its end; and figures that callbacks added. NaN if the report has
        no finite figure. Except in `sync:N` also "val_steps": the number of batches in the evaluated weights, which is
        more than at the epoch's end if training did not wait.
    epoch : list of int
        Numbers of the epochs, from 0 or `initial_epoch` on.
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
        self.history: dict[str, list[float]] = {
            name: [math.nan if value is None else value for value in values] for name, values in figures.items()
        }  # JSON has None in place of values that are not finite
        self.epoch = [first_epoch + number for number in range(max(map(len, self.history.values()), default=0))]

    def __repr__(self) -> str:
        last = ", ".join(f"{name} {values[-1]:.4g}" for name, values in self.history.items())
        return f"History({last}; {self.run_dir})"


def _reported(report: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """Return the figures of a run from its report, if callbacks have recorded none."""
    figures = {"loss": [report["training_loss"]]}
    for evaluation in report["evaluations"]:
        for name, value in evaluation.items():
            if name not in ("steps", "judged_steps"):
                figures.setdefault(f"val_{name}", []).append(value)
    return figures


def say_end(history: History) -> None:
    """Print a final line, and a second one if the model did not learn."""
    found = [f"{name} {values[-1]:.4g}" for name, values in history.history.items()]
    words = f"done in {history.report['wall_s']:.1f} s: {', '.join(found)}; {short_path(history.run_dir)}"
    for line in filter(None, (words, not_learned(history.report))):
        console_for(sys.stdout).print(line, soft_wrap=True, markup=False, highlight=False)
