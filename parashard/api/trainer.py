"""Trainer: a model, an optimizer and a strategy; `fit` trains it from a script, on a local cluster or in this process.

`parashard.api.fits` runs a call of `fit`; `parashard.api.script` tells whether this process is a worker.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Never

import numpy as np

from parashard.api.backends import backend_of
from parashard.api.code import Code
from parashard.api.examples.indexed import as_bad_data, check_all, check_none, indexed, indexed_inputs, one_data
from parashard.api.examples.source import source_of
from parashard.api.fits import FitCall, History, Resumed, recorded_result, resumed, run_fit
from parashard.api.jobs import (
    checked_strategy,
    epochs_of_a_job,
    examples_of_a_step,
    job_of,
    order_of_a_job,
    plain_tables,
    tables_of,
    validation_examples,
    write_job_file,
)
from parashard.api.script import SCRIPT
from parashard.api.strategies import Strategy
from parashard.api.trained_model import TrainedModel
from parashard.api.trained_state import check_callbacks, trained_optimizer
from parashard.callbacks.base import Callback
from parashard.callbacks.files import BackupAndRestore
from parashard.callbacks.running import checked, listed
from parashard.data.base import DataSource
from parashard.data.tree import Tree
from parashard.errors import ConfigurationError
from parashard.job.sections import job_name_from
from parashard.launch.run_folders import as_begun
from parashard.models.base import Model
from parashard.models.user_errors import trim_traceback
from parashard.plan.optimizers import OptimizerSpec
from parashard.plan.schedules import Schedule
from parashard.process.run_files import WEIGHTS_FILE

EXAMPLES_AT_ONCE = 1000
SEED_MAX = 2**63 - 1
INTERACTIVE = "interactive"
"""The name of a job without a script, such as a notebook's."""


class Trainer:
    """Trains a model.

    Parameters
    ----------
    model : Model
        For example a `parashard.torch.Model`, or an object with hand-written gradients (`parashard.models.base.Model`).
    optimizer : OptimizerSpec or an optimizer of PyTorch, Keras or optax, optional
        For example `parashard.Adam(1e-3)`; the shards run it, or parashard's equivalent of a framework's optimizer.
        Default: the compiled optimizer of a Keras model, else SGD with a rate of 0.01.
    strategy : Strategy, optional
        The processes and devices to train on; default: two shards and two workers, which share each batch.
    clip_norm : float, optional
        Maximum global norm of a step's gradient; not together with a bound of the optimizer's own.
    schedule : mapping, optional
        Multiplies the learning rate, such as {"kind": "cosine", "warmup_steps": 100}: a schedule of a job file, with
        lengths in updates.
    seed : int
        Determines initial values, the order of examples and randomness within steps.
    name : str, optional
        Name of the job; default: the script's.
    settings : mapping of str to object, optional
        Further keys of a job file, such as {"checkpoint.every_s": 5}.
    """

    def __init__(
        self,
        model: Model,
        optimizer: OptimizerSpec | Any = None,
        strategy: Strategy | None = None,
        *,
        clip_norm: float | None = None,
        schedule: Mapping[str, Any] | Schedule | None = None,
        seed: int = 0,
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
        **others: Never,
    ) -> None:
        check_none(Trainer, others, Trainer.fit)
        if not isinstance(settings, Mapping | None):
            raise ConfigurationError(f'settings is a dict such as {{"checkpoint.every_s": 5}}, found {settings!r}')
        seed = _checked_seed(seed)
        self._present = TrainedModel(model, seed)
        self._optimizer = trained_optimizer(optimizer, model, seed, clip_norm, schedule)
        self._strategy = checked_strategy(strategy)
        self._backend: Any = backend_of(self._strategy)
        self._seed = seed
        self._name = name
        self._settings = dict(settings or {})

    @trim_traceback
    def fit(
        self,
        data: Any = None,
        y: Any = None,
        *apart: Never,
        epochs: int = 1,
        initial_epoch: int = 0,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        gradient_accumulation: int = 1,
        steps_per_epoch: int | None = None,
        drop_last: bool | None = None,
        shuffle: bool = True,
        validation_data: Any = None,
        validation_split: float = 0.0,
        validation_steps: int | None = None,
        targets: str | Sequence[str] | None = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        transform: Callable[..., Any] | None = None,
        fingerprint: str | None = None,
        callbacks: Sequence[Callback] | Callback | None = (),
        wait_for_callbacks: bool | None = None,
        resume: bool = False,
        accept_code_change: bool = False,
        verbose: int = 1,
        **others: Never,
    ) -> History:
        """Train the model; a second call continues from the current weights, rows and optimizer state.

        Parameters
        ----------
        data : (inputs, targets) or (inputs, targets, weights), or a dataset
            Arrays, tensors, pandas tables, or dicts, tuples and lists of them, whose first axis is the examples; a
            dataset with a length whose items are such examples; a PyTorch `DataLoader`; a Keras `PyDataset`, each of
            whose items is one step; a `DataSource`.
        y : array, or dicts, tuples and lists of them, optional
            The targets, if `data` is only the inputs.
        epochs : int
            Epochs in all, including those before `initial_epoch`.
        initial_epoch : int
            Number of the first epoch to train; the number of an epoch determines the order of its examples.
        batch_size : int, optional
            Examples per update, or per piece with `gradient_accumulation`; default: 32, or the DataLoader's. In sync:N
            an update has N times as many.
        global_batch_size : int, optional
            Examples per update, in place of `batch_size`; in sync:N those of a whole round.
        gradient_accumulation : int
            Number of pieces of `batch_size` examples in a step, computed one after the other; the step's gradient is
            their mean.
        steps_per_epoch : int, optional
            Steps per epoch; default: as many as use every example once. The next epoch continues with the examples
            after them.
        drop_last : bool, optional
            True: drop the last step of a pass over the examples if it is shorter than the others. Default: the
            DataLoader's setting, else False.
        shuffle : bool
            False: use the examples in their given order.
        validation_data : as data, optional
            Evaluated after every epoch.
        validation_split : float
            Fraction of `data` to hold out for validation instead.
        validation_steps : int, optional
            Evaluate only this many batches of the validation data, the first ones.
        callbacks : sequence of parashard.callbacks.Callback
            Called in this process on steps, epochs and evaluations. If one raises, the run ends, its state is saved,
            and the error is raised here.
        wait_for_callbacks : bool, optional
            True: after each epoch, wait for its evaluation and the callbacks before the next step. False: train on
            meanwhile; decisions take effect up to an epoch later. None: wait if a callback may decide (`EarlyStopping`,
            `ReduceLROnPlateau`, your own unless it has `decides = False`) or keeps the best weights
            (`ModelCheckpoint`).
        targets : str or sequence of str, optional
            Names of the target fields of a dict of arrays, a table or a dataset of dicts; other fields are inputs.
        sample_weight : array, shape (examples,), optional
            Weight of each example of a pair of arrays: a step's loss is sum(weight * loss) / examples.
        class_weight : mapping of int to float, optional
            Weight of each example by its label; 1 for labels that are not listed. Not applied to validation data.
        transform : callable (example, rng) or (batch, rng), optional
            Applied to (inputs, targets) before training on them; `rng` is a `numpy.random.Generator` seeded from the
            seed and the step.
        fingerprint : str, optional
            Identifies the content of the data, in place of a digest that takes long or covers only some examples.
        resume : bool
            True: resume this script's newest run if it is not done; else begin a new one.
        accept_code_change : bool
            True: resume even if the script was edited; data, optimizer and the model's variables must be the same.
        verbose : int
            0: show nothing.

        Returns
        -------
        History

        Raises
        ------
        ConfigurationError
            If an argument cannot be used.
        JobFailed
            If the job failed; the run folder has the logs.
        KeyboardInterrupt
            After Ctrl-C, once the state is saved; `resume=True` continues from it.
        """
        data = one_data("fit", data, y, apart, others)
        check_none(Trainer.fit, others)
        if resume not in (True, False):
            raise ConfigurationError(f"ps.Trainer.fit: resume is True or False, found {resume!r}")
        if wait_for_callbacks not in (True, False, None):
            raise ConfigurationError(
                f"ps.Trainer.fit: wait_for_callbacks is True, False or None, found {wait_for_callbacks!r}"
            )
        callbacks = listed(callbacks)
        resume = resume or SCRIPT.is_resumed or any(isinstance(callback, BackupAndRestore) for callback in callbacks)
        if accept_code_change and not resume:
            raise ConfigurationError("accept_code_change is of a run that is resumed: resume=True, too")
        with SCRIPT.call("fit") as result:
            if not result:
                source = source_of(
                    data,
                    validation_data,
                    validation_split,
                    self._seed,
                    held_out_max=validation_examples(validation_steps, batch_size),
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
                order = order_of_a_job(steps_per_epoch, drop_last, shuffle, source)
                sizes = {**epochs_of_a_job(epochs, initial_epoch), "batch_size": examples, **order}
                if self._optimizer.passes and not initial_epoch:
                    sizes["passes_before"] = self._optimizer.passes
                fit = self._call(source, sizes, gradient_accumulation, callbacks, wait_for_callbacks)
                earlier = self._resumed() if resume else None
                if earlier is not None and earlier.result:
                    result.update(recorded_result(earlier, fit, accept_code_change=accept_code_change))
                else:
                    begun = earlier.run_dir if earlier is not None else None
                    if SCRIPT.is_worker:
                        self._backend.work(fit)
                    if begun is not None:
                        fit = fit._replace(loaded=as_begun(fit.loaded, begun))
                    fit = self._backend.checked(fit)
                    quiet = not verbose
                    result.update(run_fit(self._backend.train, fit, begun, accept=accept_code_change, quiet=quiet))
        run_dir = Path(result["run_dir"])
        self._present.continue_from(run_dir, Path(result.get("weights", run_dir / WEIGHTS_FILE)))
        self._optimizer.continue_from(run_dir, result)
        return History(result["report"], run_dir, result.get("history"), first_epoch=initial_epoch)

    @trim_traceback
    def evaluate(
        self,
        data: Any = None,
        y: Any = None,
        *apart: Never,
        batch_size: int = EXAMPLES_AT_ONCE,
        targets: str | Sequence[str] | None = None,
        sample_weight: Any = None,
        verbose: int = 0,
        **others: Never,
    ) -> dict[str, float]:
        """Evaluate the current weights on some data in this process; return the loss and the metrics by name.

        Parameters
        ----------
        data, y, targets, sample_weight
            As in `fit`.
        batch_size : int
            Examples per batch.
        verbose : int
            Accepted as in Keras, and ignored.
        """
        data = one_data("evaluate", data, y, apart, others)
        check_none(Trainer.evaluate, others)
        with SCRIPT.call("evaluate") as result:
            if not result:
                with as_bad_data():
                    examples = indexed(data, "data", targets=targets, sample_weight=sample_weight)
                    check_all(examples, "data")
                    result["metrics"] = self._present.evaluate(examples, batch_size)
        return dict(result["metrics"])

    @trim_traceback
    def predict(self, inputs: Any, *, batch_size: int = EXAMPLES_AT_ONCE, verbose: int = 0, **others: Never) -> Tree:
        """Compute the model's outputs in this process; return them in the order of the inputs.

        Parameters
        ----------
        inputs
            As the inputs of `fit`; targets and weights of a dataset are ignored.
        batch_size : int
            Examples per batch.
        verbose : int
            Accepted as in Keras, and ignored.

        Returns
        -------
        ndarray, or a dict, tuple or list of them as the model returns it
            One row for each example.
        """
        check_none(Trainer.predict, others)
        with as_bad_data():
            return self._present.predict(indexed_inputs(inputs, "inputs"), batch_size)

    def model(self) -> Any:
        """Return the user's own object (module, pytree, Keras model) with the current weights.

        The optimizer of a Keras model has the steps, rate and moments of the last `fit`, if it has the same rule as the
        trainer's; in a callback it is as compiled.
        """
        own = self._present.to_user_object()
        if self._present.training is None:
            self._optimizer.restore(self._present.given, own)
        return own

    @trim_traceback
    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state for `load_state_dict` of the equivalent PyTorch optimizer.

        Parameter groups are those of the PyTorch optimizer that the trainer was given, if any; else one group of all
        parameters, in the order of `trainer.model().parameters()`. Learning rates do not include a schedule.

        Raises
        ------
        ConfigurationError
            If the model is not a PyTorch model, PyTorch has no equivalent optimizer, or no fit has ended.
        """
        given, state = self._present.given, self._optimizer.state
        made = getattr(given, "optimizer_state_dict", None)
        if made is None:
            raise ConfigurationError(
                "optimizer_state_dict is of a PyTorch model; trainer.model().optimizer of a Keras model has its state"
            )
        if state is None or self._present.training is not None:
            raise ConfigurationError("optimizer_state_dict: the optimizer has taken no steps, or a fit is running")
        groups = self._present.named_groups(self._optimizer.mapped)
        return dict(made(self._present.to_user_object(), groups, self._optimizer.spec, state))

    @trim_traceback
    def table(self, name: str) -> tuple[np.ndarray[Any, np.dtype[np.uint64]], np.ndarray[Any, np.dtype[np.float32]]]:
        """Return all rows of an embedding table after the last `fit`.

        Parameters
        ----------
        name : str
            One of the model's tables.

        Returns
        -------
        keys : ndarray of uint64, shape (rows,)
            The model's ids, ascending; `keys.view(numpy.int64)` has negative ids, which are stored as unsigned numbers
            of the same bits.
        rows : ndarray of float32, shape (rows, dimension)

        Raises
        ------
        ConfigurationError
            If the model has no such table, or a fit is running.
        """
        rows = self._present.rows()
        if rows is None:
            raise ConfigurationError(f"table {name!r}: the model has no embedding tables")
        return rows.whole(name)

    def to_job_file(
        self, path: str | Path, *, model: str | Mapping[str, Any], data: Mapping[str, Any], epochs: int, batch_size: int
    ) -> None:
        """Write this trainer's job as a job file, for `parashard run` and other machines.

        Parameters
        ----------
        path : str or Path
            The file; the model's module must be beside it or installed.
        model : str or mapping
            "module:factory", a function that takes the data's spec and returns the same model, or a `[model]` table.
        data : mapping
            A `[data]` table, such as {"source": "csv", "path": "data.csv", "label": "price"}.
        epochs, batch_size : int
            As in `fit`.

        Raises
        ------
        ConfigurationError
            If `model` or `data` is invalid, or the named model has other variables; nothing is written.

        Notes
        -----
        The job starts from the model's initial values, not from those of an earlier `fit`.
        """
        if not SCRIPT.is_worker:  # in a worker, the parent has written it
            self._present.begin()
            name = self._name or job_name_from(Path(path).stem, "job")
            job = {"name": name, "seed": self._seed, "epochs": epochs, "batch_size": batch_size}
            table = tables_of(self._strategy, self._optimizer.mapped.spec, job, self._settings, **self._tables())
            write_job_file(Path(path), table, model, data, self._present.given.initial_variables())

    def _call(
        self,
        source: DataSource,
        sizes: Mapping[str, int],
        gradient_accumulation: int,
        callbacks: Sequence[Callback],
        wait_for_callbacks: bool | None = None,
    ) -> FitCall:
        """Return a call of `fit` with its job, validated like a job file."""
        present = self._present
        model = present.step_model(source, gradient_accumulation)
        called = checked(callbacks, has_evaluations=source.spec.held_out > 0)
        present.begin()
        self._optimizer.begin()
        check_callbacks(called, present.tables())
        program = SCRIPT.path if self._has_script else Path(INTERACTIVE)
        job = {"name": self._job_name, "seed": self._seed, "updates_before": self._optimizer.updates, **sizes}
        tables = self._tables(self._optimizer.rate_factor)
        loaded = job_of(program, self._strategy, self._optimizer.spec, job, self._settings, **tables)
        constants = present.config_sha256()
        code = SCRIPT.sources.code(constants) if self._has_script else Code(constants=constants)
        return FitCall(
            loaded,
            present,
            model,
            source,
            code,
            called,
            wait_for_callbacks,
            self,
            gradient_accumulation,
            self._optimizer,
        )

    def _tables(self, rate_factor: float = 1.0) -> dict[str, Mapping[str, Any]]:
        """Return the tables of a job that depend on the model."""
        variables = self._present.variable_settings(self._optimizer.mapped)
        return {"variables": variables, "tables": plain_tables(self._present.tables(), rate_factor)}

    @property
    def _has_script(self) -> bool:
        """Whether there is a script to name and hash; if workers run it, there must be one."""
        return self._backend.runs_script or SCRIPT.has_file

    @property
    def _job_name(self) -> str:
        return self._name or (SCRIPT.job_name if self._has_script else INTERACTIVE)

    def _resumed(self) -> Resumed | None:
        """Return the run that this call resumes; None if it begins one, or this is a worker."""
        if SCRIPT.is_worker:
            return None
        return resumed(self._job_name, SCRIPT.path if self._has_script else None, SCRIPT.results, SCRIPT.asked_run)


def _checked_seed(seed: Any) -> int:
    """Return a seed as Python's int."""
    try:
        number = -1 if isinstance(seed, bool) else operator.index(seed)
    except TypeError:
        number = -1
    if not 0 <= number <= SEED_MAX:
        raise ConfigurationError(
            f"ps.Trainer: seed is a whole number from 0 to {SEED_MAX}, by which what is random comes again in each "
            f"process; found {seed!r}"
        )
    return number
