"""Trainer: a model, an optimizer and a strategy; `fit` trains it on a local cluster, from a script.

Owns how a call of a script becomes a job, and what the calls return. `parashard.api.script` knows what process this is;
`parashard.launch.run` runs the job.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, SupportsIndex, runtime_checkable

import numpy as np

from parashard.api.batching import Accumulated, checked_size, epochs_of_a_job, examples_of_a_step
from parashard.api.examples import Indexed, indexed, indexed_inputs, joined, of_the_data
from parashard.api.following import CallbackFollower
from parashard.api.job_file import write_job_file
from parashard.api.jobs import Parts, check_same_call, check_same_job, checked_strategy, job_of, tables_of
from parashard.api.optimizers import optimizer_of, variable_settings
from parashard.api.script import SCRIPT, answers_in
from parashard.api.source import source_of
from parashard.api.strategies import InProcessStrategy, Strategy
from parashard.callbacks.base import Callback, Training
from parashard.callbacks.files import BackupAndRestore
from parashard.callbacks.running import Callbacks, checked, listed
from parashard.data.base import Batch, DataSource, Examples, Indices, examples_of
from parashard.data.tree import Tree, rows_of
from parashard.display.live import JobView, NoView, console_for, open_view
from parashard.display.paths import short_path
from parashard.errors import BadData, ConfigurationError, JobFailed
from parashard.job.declaration import declare, parts_of, write_declaration
from parashard.job.load import LoadedJob
from parashard.launch.run import INTERRUPTED, Outcome, run_job
from parashard.launch.run_files import CHECKPOINTS, LOGS, WEIGHTS_FILE
from parashard.launch.run_folders import discard_unbegun, is_done, new_run_dir, resumed_run_dir
from parashard.models.base import Initial, Model
from parashard.models.blame import named_with_line
from parashard.models.framework import WrongModel
from parashard.plan.optimizers import OptimizerSpec
from parashard.plan.steps import StepPlan
from parashard.plan.variables import Float32s, as_imported, initial_rows
from parashard.process.shell import ExitCode
from parashard.store import open_store
from parashard.store.arrays import read_arrays

EXAMPLES_AT_ONCE = 1000
INTERACTIVE = "interactive"
"""The name of a job that no script has, such as a notebook's."""
METHODS = ("initial_variables", "loss_and_gradients", "evaluate")


@runtime_checkable
class FrameworkModel(Model, Protocol):
    """A model that a trainer can also seed, predict with and give back, such as `parashard.torch.Model`.

    Any object with the three methods of `parashard.models.base.Model` can be trained and evaluated; what lacks these
    has nothing to seed, and neither predicts nor is given back.
    """

    def seed(self, seed: int) -> None:
        """Begin with what this seed makes of all that is random."""

    def fixed_sha256(self) -> str:
        """Return SHA-256 (hex) of what of the model is in no variable and decides its gradients; "" for nothing."""

    def predict(self, values: Mapping[str, Float32s], inputs: Tree) -> Tree:
        """Return the outputs for inputs, in their order: an array, or a dict, tuple or list of them."""

    def own(self, values: Mapping[str, Float32s]) -> Any:
        """Return the user's own object with these weights."""


@runtime_checkable
class CheckedModel(Protocol):
    """A model that can tell before a job begins that its steps cannot be computed."""

    def check(self, batch: Batch) -> None:
        """Raise what a step or an evaluation of such a batch would raise."""


class History:
    """What a `fit` did.

    Attributes
    ----------
    history : dict of str to list of float
        By epoch: "loss", the mean over its examples, what the validation data gave at its end as "val_NAME", and what
        callbacks added.
    report : dict
        The run's report (`report.json`).
    run_dir : Path
        The run's folder: weights, checkpoints, logs.
    """

    def __init__(self, report: dict[str, Any], run_dir: Path, history: Mapping[str, list[float]] | None = None) -> None:
        self.report = report
        self.run_dir = run_dir
        self.history: dict[str, list[float]] = dict(history or {"loss": [report["training_loss"]]})
        if history:
            return
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
    optimizer : OptimizerSpec or an optimizer of PyTorch, Keras or optax, optional
        Such as `parashard.Adam(1e-3)`; the shards run it, or their own that computes the same updates. Default: SGD
        with a rate of 0.01.
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
        optimizer: OptimizerSpec | Any = None,
        strategy: Strategy | None = None,
        *,
        seed: int = 0,
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        lacking = [name for name in METHODS if not callable(getattr(model, name, None))]
        if lacking or isinstance(model, type):
            raise ConfigurationError(
                "a trainer's model is ps.torch.Model(Net, loss=...), ps.jax.Model, ps.keras.Model, ps.Sequential or an "
                f"object with the methods {', '.join(METHODS)}; found "
                f"{model.__name__ if isinstance(model, type) else type(model).__name__}"
            )
        if isinstance(seed, bool) or not isinstance(seed, SupportsIndex):
            raise ConfigurationError(
                f"seed is a whole number: what is random comes again in each process; found {seed!r}"
            )
        self._model = model
        self._optimizer = optimizer_of(optimizer)
        self._strategy = checked_strategy(strategy)
        self._seed = seed
        self._name = name
        self._settings = dict(settings or {})
        self._values: dict[str, Float32s] | None = None
        self._weights: Path | None = None
        self._callbacks: list[Callback] = []
        self._training: Training | None = None  # while `fit` runs

    def fit(
        self,
        data: Any,
        *,
        epochs: int = 1,
        initial_epoch: int = 0,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        gradient_accumulation: int = 1,
        validation_data: Any = None,
        validation_split: float = 0.0,
        targets: str | Sequence[str] | None = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        transform: Callable[..., Any] | None = None,
        fingerprint: str | None = None,
        callbacks: Sequence[Callback] | Callback | None = (),
        resume: bool = False,
        verbose: int = 1,
    ) -> History:
        """Train, and return how it went; a second call goes on from the weights, with the optimizer's state new.

        Parameters
        ----------
        data : (inputs, targets) or (inputs, targets, weights), or a dataset
            Arrays, tensors, tables of pandas, or dicts, tuples and lists of them, with one example after the other; an
            object with a length whose items are such examples; a `DataLoader` of PyTorch; a `PyDataset` of Keras, of
            which each item is a step; a `DataSource`.
        epochs : int
            How often every example is used, with the epochs before `initial_epoch`.
        initial_epoch : int
            Number of the first epoch: each has an order of the examples of its own.
        batch_size : int, optional
            Examples of a step; default: 32, or the DataLoader's. A round of sync:N has N steps.
        global_batch_size : int, optional
            Examples of a round, instead; a round of async and ssp:K is one step.
        gradient_accumulation : int
            A step has so many pieces of `batch_size` examples, one after the other; its gradient is the mean.
        validation_data : as data, optional
            Judged after every epoch.
        validation_split : float
            Fraction of `data` to keep for that instead.
        callbacks : sequence of parashard.callbacks.Callback
            Called in this process on steps, epochs and evaluations; one that raises ends the run, saved, and its error
            is raised here.
        targets : str or sequence of str, optional
            Which fields are targets, of a dict of arrays, of a table, or of a dataset of dicts; the others are inputs.
        sample_weight : array, shape (examples,), optional
            How much each example of a pair of arrays counts: a step's loss is sum(weight * loss) / examples.
        class_weight : mapping of int to float, optional
            The same by the label that is the target; labels that are not in it have 1. Not of validation data.
        transform : callable (example, rng) or (batch, rng), optional
            Makes of (inputs, targets) what is trained on; `rng` is a `numpy.random.Generator` of the seed and the step.
        fingerprint : str, optional
            Stands for the content of the data where their digest takes long, or is only of some examples.
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
        callbacks = listed(callbacks)
        resume = resume or any(isinstance(callback, BackupAndRestore) for callback in callbacks)
        with SCRIPT.call("fit") as call:
            if resume and not call.answer and not SCRIPT.is_worker:
                call.answer = _answered(self._job_name(), self._calls_before())
            if not call.answer:
                source = source_of(
                    data,
                    validation_data,
                    validation_split,
                    self._seed,
                    targets=targets,
                    sample_weight=sample_weight,
                    class_weight=class_weight,
                    transform=transform,
                    fingerprint=fingerprint,
                )
                examples = examples_of_a_step(
                    self._strategy.consistency,
                    batch_size,
                    global_batch_size,
                    gradient_accumulation,
                    getattr(source, "batch_size", None),
                    batched=source.spec.batched,
                )
                sizes = {**epochs_of_a_job(epochs, initial_epoch), "batch_size": examples}
                model = self._model_for(source, gradient_accumulation)
                self._callbacks = checked(callbacks, has_evaluations=source.spec.held_out > 0)
                call.answer = self._fitted(source, model, sizes, resume=resume, verbose=verbose)
        run_dir = Path(call.answer["run_dir"])
        self._weights, self._values = Path(call.answer.get("weights", run_dir / WEIGHTS_FILE)), None
        return History(call.answer["report"], run_dir, call.answer.get("history"))

    def evaluate(
        self, data: Any, *, batch_size: int = EXAMPLES_AT_ONCE, targets: str | Sequence[str] | None = None
    ) -> dict[str, float]:
        """Return the loss and the metrics of the weights on some data; computed in this process.

        Parameters
        ----------
        data, targets
            As in `fit`.
        batch_size : int
            Examples that are judged at once.
        """
        with SCRIPT.call("evaluate") as call:
            if not call.answer:
                with of_the_data():
                    examples = indexed(data, "data", targets=targets)
                    call.answer = {"metrics": self._evaluated(examples, batch_size)}
        return dict(call.answer["metrics"])

    def predict(self, inputs: Any, *, batch_size: int = EXAMPLES_AT_ONCE) -> Tree:
        """Return the model's outputs, in the order of the inputs; computed in this process.

        Parameters
        ----------
        inputs
            As those of the data in `fit`; of a dataset, targets and weights are left out.
        batch_size : int
            Examples that are computed at once.

        Returns
        -------
        ndarray, or a dict, tuple or list of them as the model returns it
            One row for each example.
        """
        model = self._framework("predict")
        values = self._current()
        with of_the_data():
            examples = indexed_inputs(inputs, "inputs")
            parts = [model.predict(values, some[0]) for _, some in _in_order(examples, batch_size)]
        if not parts:
            raise BadData("inputs has no examples")
        return joined(parts)

    def model(self) -> Any:
        """Return the user's own object with the present weights."""
        return self._framework("own").own(self._current())

    def to_job_file(
        self, path: str | Path, *, model: str | Mapping[str, Any], data: Mapping[str, Any], epochs: int, batch_size: int
    ) -> None:
        """Write this trainer's job as a job file, for `parashard run` and other machines.

        Parameters
        ----------
        path : str or Path
            The file; a module of the model lies beside it or is installed.
        model : str or mapping
            "module:factory", a function of the data's spec that returns the same model, or a `[model]` table.
        data : mapping
            A `[data]` table, such as {"source": "csv", "path": "data.csv", "label": "price"}.
        epochs, batch_size : int
            As in `fit`.

        Raises
        ------
        ConfigurationError
            If the names are none, or name a model with other variables; nothing is written.

        Notes
        -----
        The job begins with the model's first values, not with those of an earlier `fit`.
        """
        if not SCRIPT.is_worker:  # the parent has written it
            self._begin()
            table = tables_of(self._parts(Path(path).stem), {"epochs": epochs, "batch_size": batch_size})
            write_job_file(Path(path), table, model, data, self._model.initial_variables())

    def _fitted(
        self, source: DataSource, model: Model, sizes: Mapping[str, int], *, resume: bool, verbose: int
    ) -> dict[str, Any]:
        """Run the job of a call and return its report and folder; in a worker be one, and end."""
        self._begin()
        loaded = self._job(sizes)
        if isinstance(self._strategy, InProcessStrategy):
            self._check(source)
            return self._fitted_here(self._strategy, loaded, source, model, resume=resume, verbose=verbose)
        if SCRIPT.is_worker:
            code = self._code_sha256()
            SCRIPT.work(
                model,
                source,
                code,
                lambda run_dir: check_same_call(loaded, source.spec.fingerprint, source.spec.summary(), code, run_dir),
                lambda theirs: check_same_job(loaded, theirs),
            )
        self._check(source)
        outcome, follower = self._run(loaded, source, resume=resume, verbose=verbose)
        if outcome.raised is not None:
            raise outcome.raised
        if outcome.exit_code == INTERRUPTED:
            raise KeyboardInterrupt(outcome.reason)
        if outcome.exit_code != ExitCode.DONE:
            if outcome.is_refused:
                raise ConfigurationError(outcome.reason)
            raise JobFailed(f"{outcome.reason} (logs: {short_path(outcome.run_dir / LOGS)})")
        weights = follower.end() or outcome.run_dir / WEIGHTS_FILE
        history = follower.history
        if verbose:
            _say_end(History(outcome.report, outcome.run_dir, history))
        return {
            "report": outcome.report,
            "run_dir": str(outcome.run_dir),
            "weights": str(weights),
            "history": history,
        }

    def _fitted_here(
        self,
        strategy: InProcessStrategy,
        loaded: LoadedJob,
        source: DataSource,
        model: Model,
        *,
        resume: bool,
        verbose: int,
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
        follower = self._follower(loaded, source, run_dir, view.say, resume=begun is not None)
        try:
            SCRIPT.write_answers(run_dir)
            report = train(
                loaded, run_dir, view, strategy, model, source, declared, resume=begun is not None, follower=follower
            )
        finally:
            self._training = None
            view.close()
            if begun is None:
                discard_unbegun(run_dir, keep=False)
        weights, history = follower.end() or run_dir / WEIGHTS_FILE, follower.history
        if verbose:
            _say_end(History(report, run_dir, history))
        return {"report": report, "run_dir": str(run_dir), "weights": str(weights), "history": history}

    def _check(self, source: DataSource) -> None:
        """Try the model on two examples, if it can: what no worker could compute is said before any is started."""
        if isinstance(self._model, CheckedModel):
            indices = np.arange(min(1 if source.spec.batched else 2, source.spec.examples))
            with of_the_data():
                examples = examples_of(source, 0, indices)
            try:
                self._model.check(Batch(0, 0, indices, *examples))
            except (ConfigurationError, WrongModel) as error:
                raise ConfigurationError(str(error)) from None
            except Exception as error:
                raise ConfigurationError(f"the model cannot compute a step: {named_with_line(error)}") from error

    def _evaluated(self, data: Indexed, batch_size: int) -> dict[str, float]:
        if any(field.name == "weights" for field in data.fields()):
            self._check_weighted()
        totals: dict[str, float] = {}
        judged = 0
        for indices, examples in _in_order(data, batch_size):
            rows = rows_of(examples[0])
            judged += rows
            batch = Batch(-1, -1, indices, *examples)
            for name, value in self._model.evaluate(self._current(), batch, np).items():
                totals[name] = totals.get(name, 0.0) + float(value) * rows
        if not judged:
            raise BadData("data has no examples")
        return {name: total / judged for name, total in totals.items()}

    def _model_for(self, source: DataSource, gradient_accumulation: int) -> Model:
        """Return the model as workers compute with it."""
        if getattr(source, "weighted", False):
            self._check_weighted()
        return Accumulated(self._model, gradient_accumulation) if gradient_accumulation != 1 else self._model

    def _check_weighted(self) -> None:
        if not getattr(self._model, "weighted", False):
            raise ConfigurationError(
                "examples have weights, and the model's loss takes none: give the loss of a PyTorch or JAX model a "
                "parameter sample_weight, or take one of PyTorch's with reduction; ps.keras.Model takes no weights; a "
                "model of your own reads batch.weights and has weighted = True"
            )

    def _current(self) -> dict[str, Float32s]:
        """Return the weights: those of the last `fit`, else those that the model begins with.

        In a callback they are those that were evaluated.
        """
        if self._training is not None:
            return self._training.weights()
        if self._values is None and self._weights is not None:
            self._values = as_imported(read_arrays(self._weights))
        if self._values is None:
            self._begin()
            initial = {name: parts_of(name, value) for name, value in self._model.initial_variables().items()}
            self._values = {
                name: initial_rows(variable, self._seed, 0, variable.rows) if array is None else array
                for name, (variable, array) in initial.items()
            }
        return self._values

    def _begin(self) -> None:
        if isinstance(self._model, FrameworkModel):
            self._model.seed(self._seed)

    def _code_sha256(self) -> str:
        """Return the digest of the script's text, and of what of the model is in no variable."""
        fixed = self._model.fixed_sha256() if isinstance(self._model, FrameworkModel) else ""
        text = SCRIPT.sha256 if self._has_script else ""
        return hashlib.sha256(f"{text}{fixed}".encode()).hexdigest()

    def _variable_settings(self) -> dict[str, dict[str, Any]]:
        """Return what the groups of an optimizer of PyTorch say about the variables that are trained."""
        if not self._optimizer.groups:
            return {}
        names: Mapping[int, str] = getattr(self._model, "parameter_names", dict)()
        initial = self._model.initial_variables()
        variables = [parts_of(name, value)[0] for name, value in initial.items()]
        trained = [variable.name for variable in variables if not variable.frozen and not variable.state]
        others = [variable.name for variable in variables if variable.frozen or variable.state]
        return variable_settings(self._optimizer.groups, names, trained, others)

    def _framework(self, what: str) -> FrameworkModel:
        if not isinstance(self._model, FrameworkModel):
            raise ConfigurationError(f"{type(self._model).__name__} has no method {what!r}: only its weights are known")
        return self._model

    def _job(self, sizes: Mapping[str, int]) -> LoadedJob:
        """Return the job of a call, checked as a job file is."""
        program = SCRIPT.path if self._has_script else Path(INTERACTIVE)
        return job_of(self._parts(program.stem), program, sizes)

    def _parts(self, name: str) -> Parts:
        settings = self._variable_settings()
        return Parts(self._name or name, self._optimizer.spec, self._strategy, self._seed, self._settings, settings)

    @property
    def _has_script(self) -> bool:
        """Whether there is a script to name and to hash, which only training in this process can do without."""
        return not isinstance(self._strategy, InProcessStrategy) or SCRIPT.has_file

    def _job_name(self) -> str:
        return self._name or (SCRIPT.path.stem if self._has_script else INTERACTIVE)

    def _calls_before(self) -> int | None:
        """Return how many calls came before the present one; None: without a script nobody has counted them."""
        return SCRIPT.calls_made if self._has_script else None

    def _run(
        self, loaded: LoadedJob, source: DataSource, *, resume: bool, verbose: int
    ) -> tuple[Outcome, CallbackFollower]:
        name, command = loaded.job.job.name, SCRIPT.command
        declared = declare(source.spec, self._declared(), self._code_sha256())
        begun = _unfinished(name, SCRIPT.calls_made) if resume else None
        run_dir = begun or new_run_dir(None, name)
        outcome, view = None, _view(verbose)
        try:
            follower = self._follower(loaded, source, run_dir, view.say, resume=begun is not None)
            write_declaration(run_dir, declared)
            SCRIPT.write_answers(run_dir)
            outcome = run_job(
                loaded,
                run_dir,
                view,
                init=None,
                output=None,
                resume=begun is not None,
                script=command,
                follower=follower,
            )
        finally:
            self._training = None
            view.close()
            if begun is None and (outcome is None or outcome.is_refused):
                discard_unbegun(run_dir, keep=False)
        return outcome, follower

    def _follower(
        self, loaded: LoadedJob, source: DataSource, run_dir: Path, say: Callable[[str], None], *, resume: bool
    ) -> CallbackFollower:
        """Return what runs the callbacks of a fit."""
        job = loaded.job
        steps = StepPlan(
            source.spec.examples, job.job.batch_size, job.job.epochs, job.job.seed, job.job.first_epoch or 0
        )
        self._training = Training(job.optimizer.learning_rate, run_dir)
        callbacks = Callbacks(
            self._callbacks,
            self._training,
            self,
            steps_per_epoch=steps.steps_per_epoch,
            epochs=steps.epochs,
            first_epoch=steps.first_epoch,
        )
        store = partial(open_store, job.checkpoint.url or str(run_dir / CHECKPOINTS))
        return CallbackFollower(callbacks, run_dir, store, say, resume=resume)

    def _declared(self) -> Model:
        """Return the model with the present weights as its first ones."""
        if self._weights is None and self._values is None:
            return self._model
        return _Begun(self._model, self._current())


class _Begun:
    """A model that goes on from given weights."""

    def __init__(self, model: Model, values: Mapping[str, Float32s]) -> None:
        self._variables = {name: parts_of(name, value)[0] for name, value in model.initial_variables().items()}
        self._values = values
        self.loss_and_gradients = model.loss_and_gradients
        self.evaluate = model.evaluate

    def initial_variables(self) -> Mapping[str, Initial]:
        return {name: (variable, self._values[name]) for name, variable in self._variables.items()}


def _in_order(data: Indexed, batch_size: int) -> Iterator[tuple[Indices, Examples]]:
    """Yield all examples in their order, so many at once; of batches one."""
    at_once = 1 if data.batched else checked_size("batch_size", batch_size)
    for start in range(0, len(data), at_once):
        indices = np.arange(start, min(len(data), start + at_once))
        yield indices, data.take(indices, 0)


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


def _view(verbose: int) -> JobView:
    return open_view(console_for(sys.stdout)) if verbose else NoView()
