"""Trainer: a model, an optimizer and a strategy; `fit` trains it on a local cluster, from a script.

Owns how a call of a script becomes a job, and what the calls return. `parashard.api.script` knows what process this is;
`parashard.launch.run` runs the job.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from parashard.api.arrays import ScriptArrays, array_of, pair_of, source_of
from parashard.api.script import SCRIPT, answers_in
from parashard.api.strategies import InProcessStrategy, ParameterServerStrategy, Strategy
from parashard.data.arrays import AnyArray, Split
from parashard.data.base import Batch, DataSpec
from parashard.display.live import JobView, NoView, console_for, open_view
from parashard.display.paths import short_path
from parashard.errors import BadData, ConfigurationError, JobFailed
from parashard.job.declaration import declare, read_declaration, write_declaration
from parashard.job.keys import leaves, shown
from parashard.job.load import LoadedJob, job_from_table, load_job
from parashard.launch.run import INTERRUPTED, Outcome, run_job
from parashard.launch.run_files import JOB_FILE, NEW_JOB_FILE, WEIGHTS_FILE
from parashard.launch.run_folders import discard_unbegun, is_done, new_run_dir, resumed_run_dir
from parashard.models.base import Model
from parashard.plan.optimizers import SGD, OptimizerSpec
from parashard.plan.variables import Float32s, Variable, initial_rows
from parashard.process.shell import ExitCode
from parashard.store.arrays import read_arrays

DEFINING = ("job", "data", "model", "optimizer", "consistency", "variables")
"""The tables of a job that decide what its steps compute."""
EXAMPLES_AT_ONCE = 1000
INTERACTIVE = "interactive"
"""The name of a job that no script has, such as a notebook's."""
_ARGUMENTS = ("job.seed", "job.name", "job.epochs", "job.batch_size", "consistency.policy")
METHODS = ("initial_variables", "loss_and_gradients", "evaluate")


@runtime_checkable
class FrameworkModel(Model, Protocol):
    """A model that a trainer can also seed, predict with and give back, such as `parashard.torch.Model`.

    Any object with the three methods of `parashard.models.base.Model` can be trained and evaluated; what lacks these
    has nothing to seed and nothing frozen, and neither predicts nor is given back.
    """

    def seed(self, seed: int) -> None:
        """Begin with what this seed makes of all that is random."""

    def fixed_sha256(self) -> str:
        """Return SHA-256 (hex) of what of the model is in no variable and decides its gradients; "" for nothing."""

    def frozen(self) -> Sequence[str]:
        """Return the names of the variables that are not trained."""

    def predict(self, values: Mapping[str, Float32s], inputs: AnyArray) -> AnyArray:
        """Return the outputs for inputs, in their order."""

    def own(self, values: Mapping[str, Float32s]) -> Any:
        """Return the user's own object with these weights."""


class History:
    """What a `fit` did.

    Attributes
    ----------
    history : dict of str to list of float
        "loss", and what the validation data gave at the end of each epoch as "val_NAME".
    report : dict
        The run's report (`report.json`).
    run_dir : Path
        The run's folder: weights, checkpoints, logs.
    """

    def __init__(self, report: dict[str, Any], run_dir: Path) -> None:
        self.report = report
        self.run_dir = run_dir
        self.history: dict[str, list[float]] = {"loss": [report["training_loss"]]}
        for evaluation in report["evaluations"]:
            for name, value in evaluation.items():
                if name != "steps":
                    self.history.setdefault(f"val_{name}", []).append(value)

    def __repr__(self) -> str:
        last = ", ".join(f"{name} {values[-1]:.4g}" for name, values in self.history.items() if values[-1] is not None)
        return f"History({last}; {self.run_dir})"


class Trainer:
    """Trains a model.

    Parameters
    ----------
    model : Model
        Such as `parashard.torch.Model`, or an object with hand-written gradients (`parashard.models.base.Model`).
    optimizer : OptimizerSpec, optional
        Such as `parashard.Adam(1e-3)`; the shards run it. Default: SGD with a rate of 0.01.
    strategy : Strategy, optional
        On which processes and devices; default: two shards, two workers, asynchronous.
    seed : int
        Of first values, the order of examples and all that is random in a step.
    name : str, optional
        Of the job; default: the script's.
    settings : mapping of str to object, optional
        Further keys of a job file, such as {"checkpoint.every_s": 5}.
    """

    def __init__(
        self,
        model: Model,
        optimizer: OptimizerSpec | None = None,
        strategy: Strategy | None = None,
        *,
        seed: int = 0,
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        lacking = [name for name in METHODS if not callable(getattr(model, name, None))]
        if lacking or isinstance(model, type):
            raise ConfigurationError(
                f"a trainer's model is ps.torch.Model(Net, loss=...) or an object with the methods "
                f"{', '.join(METHODS)}; found {model.__name__ if isinstance(model, type) else type(model).__name__}"
            )
        if optimizer is not None and not isinstance(optimizer, OptimizerSpec):
            raise ConfigurationError(
                f"the shards run the optimizer: it is one of parashard's, such as ps.Adam(1e-3), found "
                f"{type(optimizer).__name__}"
            )
        if strategy is not None and not isinstance(strategy, Strategy):
            found = strategy.__name__ if isinstance(strategy, type) else type(strategy).__name__
            raise ConfigurationError(f"strategy is one of parashard's, such as ps.OneDeviceStrategy(), found {found}")
        self._model = model
        self._optimizer = optimizer or SGD(0.01)
        self._strategy = strategy or ParameterServerStrategy()
        self._seed = seed
        self._name = name
        self._settings = dict(settings or {})
        self._values: dict[str, Float32s] | None = None
        self._weights: Path | None = None

    def fit(
        self,
        data: Any,
        *,
        epochs: int = 1,
        batch_size: int = 32,
        validation_data: Any = None,
        validation_split: float = 0.0,
        resume: bool = False,
        verbose: int = 1,
    ) -> History:
        """Train, and return how it went; a second call goes on from the weights, with the optimizer's state new.

        Parameters
        ----------
        data : (inputs, targets)
            Arrays or tensors with one example after the other.
        epochs : int
            How often every example is used.
        batch_size : int
            Examples of a step. A round of sync:N has N steps.
        validation_data : (inputs, targets), optional
            Judged after every epoch.
        validation_split : float
            Fraction of `data` to keep for that instead.
        resume : bool
            True: go on with this script's newest run, if it is not done; else begin one.
        verbose : int
            0: show nothing.

        Raises
        ------
        ConfigurationError
            If something that was given cannot be used.
        JobFailed
            If the job failed; the run folder has the logs.
        KeyboardInterrupt
            After Ctrl-C, once the state is saved: `resume=True` goes on with it.
        """
        with SCRIPT.call("fit") as call:
            if resume and not call.answer and not SCRIPT.is_worker:
                call.answer = _answered(self._job_name(), self._calls_before())
            if not call.answer:
                source = source_of(data, validation_data, validation_split, self._seed)
                call.answer = self._fitted(source, epochs, batch_size, resume=resume, verbose=verbose)
        run_dir = Path(call.answer["run_dir"])
        self._weights, self._values = run_dir / WEIGHTS_FILE, None
        return History(call.answer["report"], run_dir)

    def evaluate(self, data: Any, *, batch_size: int = EXAMPLES_AT_ONCE) -> dict[str, float]:
        """Return the loss and the metrics of the weights on some data; computed in this process.

        Parameters
        ----------
        data : (inputs, targets)
        batch_size : int
            Examples that are judged at once.
        """
        with SCRIPT.call("evaluate") as call:
            if not call.answer:
                call.answer = {"metrics": self._evaluated(pair_of(data, "data"), batch_size)}
        return dict(call.answer["metrics"])

    def predict(self, inputs: Any, *, batch_size: int = EXAMPLES_AT_ONCE) -> AnyArray:
        """Return the model's outputs, in the order of the inputs; computed in this process."""
        model = self._framework("predict")
        values, examples = self._current(), array_of(inputs, "inputs")
        if not len(examples):
            raise BadData("inputs has no examples")
        parts = [
            model.predict(values, examples[start : start + batch_size]) for start in range(0, len(examples), batch_size)
        ]
        return np.concatenate(parts)

    def model(self) -> Any:
        """Return the user's own object with the present weights."""
        return self._framework("own").own(self._current())

    def _fitted(
        self, source: ScriptArrays, epochs: int, batch_size: int, *, resume: bool, verbose: int
    ) -> dict[str, Any]:
        """Run the job of a call and return its report and folder; in a worker be one, and end."""
        self._begin()
        loaded = self._job(epochs, batch_size, source)
        if isinstance(self._strategy, InProcessStrategy):
            return self._fitted_here(self._strategy, loaded, source, resume=resume, verbose=verbose)
        if SCRIPT.is_worker:
            code = self._code_sha256()
            SCRIPT.work(self._model, source, code, lambda run_dir: _check_same(loaded, source.spec, code, run_dir))
        outcome = self._run(loaded, source, resume=resume, verbose=verbose)
        if outcome.exit_code == INTERRUPTED:
            raise KeyboardInterrupt(outcome.reason)
        if outcome.exit_code != ExitCode.DONE:
            raise (ConfigurationError if outcome.is_refused else JobFailed)(outcome.reason)
        if verbose:
            _say_end(History(outcome.report, outcome.run_dir))
        return {"report": outcome.report, "run_dir": str(outcome.run_dir)}

    def _fitted_here(
        self, strategy: InProcessStrategy, loaded: LoadedJob, source: ScriptArrays, *, resume: bool, verbose: int
    ) -> dict[str, Any]:
        """Train in this process, and return the report and the run's folder."""
        if SCRIPT.is_worker:
            raise ConfigurationError(
                f"this call trains in its own process, by {type(strategy).__name__}, in this worker, and by worker "
                "processes in the one that started it: a script makes the same calls wherever it runs"
            )
        from parashard.api.in_process.training import train

        declared = declare(source.spec, self._declared(), self._code_sha256())
        begun = _unfinished(loaded.job.job.name, self._calls_before()) if resume else None
        run_dir = begun or new_run_dir(None, loaded.job.job.name)
        view = _view(verbose)
        try:
            SCRIPT.write_answers(run_dir)
            report = train(loaded, run_dir, view, strategy, self._model, source, declared, resume=begun is not None)
        finally:
            view.close()
            if begun is None:
                discard_unbegun(run_dir, keep=False)
        if verbose:
            _say_end(History(report, run_dir))
        return {"report": report, "run_dir": str(run_dir)}

    def _evaluated(self, data: Split, batch_size: int) -> dict[str, float]:
        inputs, targets = data
        if not len(targets):
            raise BadData("data has no examples")
        totals: dict[str, float] = {}
        for start in range(0, len(targets), batch_size):
            some = slice(start, start + batch_size)
            batch = Batch(-1, -1, np.arange(len(targets))[some], inputs[some], targets[some])
            for name, value in self._model.evaluate(self._current(), batch, np).items():
                totals[name] = totals.get(name, 0.0) + float(value) * len(targets[some])
        return {name: total / len(targets) for name, total in totals.items()}

    def _current(self) -> dict[str, Float32s]:
        """Return the weights: those of the last `fit`, else those that the model begins with."""
        if self._values is None and self._weights is not None:
            self._values = read_arrays(self._weights)
        if self._values is None:
            self._begin()
            self._values = {name: self._first(value) for name, value in self._model.initial_variables().items()}
        return self._values

    def _first(self, value: Variable | Float32s) -> Float32s:
        return initial_rows(value, self._seed, 0, value.rows) if isinstance(value, Variable) else value

    def _begin(self) -> None:
        if isinstance(self._model, FrameworkModel):
            self._model.seed(self._seed)

    def _code_sha256(self) -> str:
        """Return the digest of the script's text, and of what of the model is in no variable."""
        fixed = self._model.fixed_sha256() if isinstance(self._model, FrameworkModel) else ""
        text = SCRIPT.sha256 if self._has_script else ""
        return hashlib.sha256(f"{text}{fixed}".encode()).hexdigest()

    def _frozen(self) -> Sequence[str]:
        return self._model.frozen() if isinstance(self._model, FrameworkModel) else ()

    def _framework(self, what: str) -> FrameworkModel:
        if not isinstance(self._model, FrameworkModel):
            raise ConfigurationError(f"{type(self._model).__name__} has no method {what!r}: only its weights are known")
        return self._model

    def _job(self, epochs: int, batch_size: int, source: ScriptArrays) -> LoadedJob:
        """Return the job of a call, checked as a job file is."""
        here = isinstance(self._strategy, InProcessStrategy)
        script = SCRIPT.path if self._has_script else Path(INTERACTIVE)
        table: dict[str, Any] = {
            "job": {"name": self._job_name(), "seed": self._seed, "epochs": epochs, "batch_size": batch_size},
            "data": {"source": "script"},
            "model": {"kind": "script"},
            "optimizer": {name: value for name, value in self._optimizer.plain().items() if value is not None},
            "variables": {name: {"frozen": True} for name in self._frozen()},
            "consistency": {"policy": self._strategy.consistency},
            "cluster": dict(self._strategy.cluster),
        }
        for key, value in self._settings.items():
            above, _, name = key.rpartition(".")
            if not above or "." in above:
                raise ConfigurationError(f"settings: {key!r}; allowed: TABLE.KEY of a job file")
            if above in ("data", "model", "optimizer") or key in _ARGUMENTS:
                raise ConfigurationError(f"settings: {key!r} is an argument of the trainer, of fit or of the strategy")
            if here and above == "cluster":
                raise ConfigurationError(
                    f"settings: {key!r} is of a cluster; {type(self._strategy).__name__} trains in this process and "
                    "has none"
                )
            table.setdefault(above, {})[name] = value
        if here:
            table["job"].setdefault("max_attempts", 1)  # another one would go no better: there is no other process
        return job_from_table(table, script)

    @property
    def _has_script(self) -> bool:
        """Whether there is a script to name and to hash, which only training in this process can do without."""
        return not isinstance(self._strategy, InProcessStrategy) or SCRIPT.has_file

    def _job_name(self) -> str:
        return self._name or (SCRIPT.path.stem if self._has_script else INTERACTIVE)

    def _calls_before(self) -> int | None:
        """Return how many calls came before the present one; None: without a script nobody has counted them."""
        return SCRIPT.calls_made if self._has_script else None

    def _run(self, loaded: LoadedJob, source: ScriptArrays, *, resume: bool, verbose: int) -> Outcome:
        name, command = loaded.job.job.name, SCRIPT.command
        declared = declare(source.spec, self._declared(), self._code_sha256())
        begun = _unfinished(name, SCRIPT.calls_made) if resume else None
        run_dir = begun or new_run_dir(None, name)
        outcome, view = None, _view(verbose)
        try:
            write_declaration(run_dir, declared)
            SCRIPT.write_answers(run_dir)
            outcome = run_job(loaded, run_dir, view, init=None, output=None, resume=begun is not None, script=command)
        finally:
            view.close()
            if begun is None and (outcome is None or outcome.is_refused):
                discard_unbegun(run_dir, keep=False)
        return outcome

    def _declared(self) -> Model:
        """Return the model with the present weights as its first ones."""
        if self._weights is None and self._values is None:
            return self._model
        return _Begun(self._model, self._current())


class _Begun:
    """A model that goes on from given weights."""

    def __init__(self, model: Model, values: Mapping[str, Float32s]) -> None:
        self._values = values
        self.loss_and_gradients = model.loss_and_gradients
        self.evaluate = model.evaluate

    def initial_variables(self) -> Mapping[str, Float32s]:
        return self._values


def _say_end(history: History) -> None:
    """Print the line that stays on the screen."""
    found = [f"{name} {values[-1]:.4g}" for name, values in history.history.items() if values[-1] is not None]
    words = f"done in {history.report['wall_s']:.1f} s: {', '.join(found)}; {short_path(history.run_dir)}"
    console_for(sys.stdout).print(words, soft_wrap=True, markup=False, highlight=False)


def _unfinished(name: str, calls_before: int | None) -> Path | None:
    """Return the newest run of a script, if it is not done and of the call with so many before it; None: any."""
    run_dir = _newest(name)
    return run_dir if run_dir is not None and calls_before in (None, len(answers_in(run_dir))) else None


def _answered(name: str, calls_before: int | None) -> dict[str, Any]:
    """Return what a call returned before the newest run of its script, which is not done; empty: nothing is known."""
    run_dir = _newest(name)
    if calls_before is None:
        return {}
    answers = answers_in(run_dir) if run_dir is not None else []
    answer = answers[calls_before] if calls_before < len(answers) else {}
    return answer if answer.get("call") == "fit" and "error" not in answer else {}


def _newest(name: str) -> Path | None:
    """Return the newest run of a script; None: there is none, or it is done."""
    try:
        run_dir = resumed_run_dir(None, name)
    except ConfigurationError:
        return None
    return None if is_done(run_dir) else run_dir


def _check_same(mine: LoadedJob, spec: DataSpec, code_sha256: str, run_dir: Path) -> None:
    """Refuse, in a worker, a call that is not the parent's: no attempt would go better."""
    whole = read_declaration(run_dir)
    declared = whole.spec
    if spec.fingerprint != declared.fingerprint:
        raise ConfigurationError(
            f"the data of this call are others in this worker ({spec.summary()}) than in the process that started it "
            f"({declared.summary()}); a script loads the same data wherever it runs"
        )
    if code_sha256 != whole.model_sha256:
        raise ConfigurationError(
            "the model is another one in this worker than in the process that started it: the script was edited, or a "
            "buffer of the module is drawn without a seed"
        )
    file = next(path for path in (run_dir / NEW_JOB_FILE, run_dir / JOB_FILE) if path.exists())
    theirs = dict(leaves(load_job(file, environ={}).job.plain()))
    own = dict(leaves(mine.job.plain()))
    for key in sorted(theirs.keys() | own.keys()):
        if key[0] in DEFINING and theirs.get(key) != own.get(key):
            raise ConfigurationError(
                f"this call is another one in this worker: {'.'.join(key)} is {shown(own.get(key))} here and "
                f"{shown(theirs.get(key))} in the process that started it"
            )


def _view(verbose: int) -> JobView:
    return open_view(console_for(sys.stdout)) if verbose else NoView()
