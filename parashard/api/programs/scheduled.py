"""A worker's side of a coordinator: step n calls the function that was scheduled as number n.

It is a model and a data source, so that a worker computes a call like any other step: leased, supervised, pushed once,
and retried if the worker dies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from parashard.api.programs.calls import Calls, Function, FunctionCall, PerWorker, found, numpy_of
from parashard.client.pulled import read_only
from parashard.data.base import Batch, DataSpec, Indices
from parashard.errors import ConfigurationError, ShapeMismatch
from parashard.models.base import StepSignal
from parashard.models.looking_up import NamedRows, named_rows
from parashard.models.user_errors import named_with_line
from parashard.plan.embedding import EmbeddingTable
from parashard.plan.variables import Float32s
from parashard.process.logs import log

NO_TABLES: Mapping[str, EmbeddingTable] = MappingProxyType({})
WRONG_KEYS_MAX = 1024
"""Most errors of `keys` that are kept until their calls run; more than any worker prefetches."""
ITERATORS_MAX = 1024
"""Most iterators over per-worker datasets that a worker keeps, the newest."""
STEPS_MAX = 1 << 32
"""Declared number of steps of a job of open length."""


class ScheduledSource:
    """The data source of a job whose functions have their own data."""

    spec = DataSpec(STEPS_MAX, 0, (), 0, "of the scheduled functions")

    def examples(self, indices: Indices) -> tuple[Float32s, Float32s]:
        """Return an empty row for each step."""
        nothing = np.zeros((len(indices), 0), np.float32)
        return nothing, nothing

    def held_out(self, start: int, stop: int) -> tuple[Float32s, Float32s]:
        """Return empty rows."""
        return self.examples(np.arange(start, stop))


class ScheduledFunctions:
    """The model of a job of scheduled functions."""

    def __init__(
        self, variables: Mapping[str, Any], calls: Calls, worker: str, tables: Mapping[str, EmbeddingTable] = NO_TABLES
    ) -> None:
        self._variables = {name: np.asarray(value, np.float32) for name, value in variables.items()}
        self._calls = calls
        self._worker = worker
        self.tables = tuple(tables.values())
        self._tables = dict(tables)
        self._wrong_keys: dict[int, Exception | SystemExit] = {}  # errors of `keys` by step, until its call runs
        self._datasets: dict[int, WorkerDataset] = {}
        self._iterators: dict[int, Iterator[Any]] = {}  # over datasets; only the newest are kept
        self._forgotten = -1  # the highest number of a dropped iterator

    def initial_variables(self) -> Mapping[str, Any]:
        """Return the initial values."""
        return self._variables

    def keys(self, batch: Batch) -> Mapping[str, Any]:
        """Return the ids whose rows a step's function needs; an error is kept, and raised when its call runs."""
        self._wrong_keys.pop(batch.step, None)
        try:
            call = self._calls.read(batch.step)
            keys = self._function(call).keys
            if keys is None:
                return {}
            if _has_iterators([*call.args, *call.kwargs.values()]):
                raise ConfigurationError(
                    "keys= is of the arguments, and one is an iterator of the worker, whose items it would take away: "
                    "schedule the ids, or what tells them"
                )
            named = keys(*call.args, **call.kwargs)
            named_rows(named, self._tables)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the user's function, or what it returned
            self._wrong_keys[batch.step] = error
            while len(self._wrong_keys) > WRONG_KEYS_MAX:  # drop steps that another worker has leased meanwhile
                del self._wrong_keys[min(self._wrong_keys)]
            return {}
        return named

    def loss_and_gradients(
        self, variables: Mapping[str, Any], batch: Batch, xp: Any
    ) -> tuple[float | StepSignal, Mapping[str, Any] | StepSignal]:
        """Call a step's function; store its result or error before the push. After an error, no weights change."""
        call = self._calls.read(batch.step)
        wrong_keys = self._wrong_keys.pop(batch.step, None)
        try:
            if wrong_keys is not None:
                raise wrong_keys
            result, gradients = self._called(call, variables, NamedRows(dict(batch.keys), dict(batch.places)))
            loss = _loss_of(result)
            self._calls.write_result(batch.step, result)
        except (Exception, SystemExit) as error:  # the user's function, or what it returned
            wrong = isinstance(error, ConfigurationError)
            says = f"{_short(call.function)}: {error}" if wrong else named_with_line(error)
            log.warning("function-failed", call=batch.step, function=_short(call.function), exc_info=error)
            self._calls.write_error(batch.step, f"{self._worker or 'a worker'}: {says}", type(error).__name__)
            return StepSignal.NO_LOSS, StepSignal.NO_PUSH
        return loss, gradients

    def evaluate(self, variables: Mapping[str, Any], batch: Batch, xp: Any) -> Mapping[str, float]:
        """Return no metrics: the job has no held-out examples."""
        return {}

    def _function(self, call: FunctionCall) -> Function:
        function = found(call.function)
        if not isinstance(function, Function):
            raise ConfigurationError("this worker's script has no such function")
        return function

    def _called(
        self, call: FunctionCall, variables: Mapping[str, Any], rows: NamedRows
    ) -> tuple[Any, Mapping[str, Any] | StepSignal]:
        function = self._function(call)
        weights = {**read_only({name: variables[name] for name in self._variables}), **rows.by_id(variables)}
        args = [self._resolved(value) for value in call.args]
        kwargs = {name: self._resolved(value) for name, value in call.kwargs.items()}
        returned = function(weights, *args, **kwargs)
        if not function.pushes:
            return returned, StepSignal.NO_PUSH
        if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[1], Mapping):
            raise ConfigurationError(
                "a function with @ps.function returns (result, gradients), gradients by variable; one that pushes "
                "nothing has @ps.function(pushes=0)"
            )
        return returned[0], self._checked(returned[1], rows)

    def _checked(self, gradients: Mapping[str, Any], rows: NamedRows) -> dict[str, Any]:
        arrays = {name: numpy_of(gradient) for name, gradient in gradients.items()}
        found: dict[str, Any] = dict.fromkeys([*self._variables, *rows.keys])
        for name, array in arrays.items():
            if name in self._tables:
                try:
                    found[name] = rows.gradient(name, array, self._tables)
                except ShapeMismatch as error:
                    raise ConfigurationError(f"it returned {error.message}") from None
                if not np.isfinite(found[name]).all():
                    raise ConfigurationError(f"it returned a gradient for table {name!r} that is not finite")
                continue
            if name not in self._variables:
                known = ", ".join(sorted(self._variables))
                raise ConfigurationError(f"it returned a gradient for {name!r}, which is none of {known}")
            if array.dtype.kind != "f" or array.shape != self._variables[name].shape:
                raise ConfigurationError(
                    f"it returned a gradient for {name!r} that is {array.dtype} {array.shape}; due is float32 "
                    f"{self._variables[name].shape}"
                )
            if not np.isfinite(array).all():
                raise ConfigurationError(f"it returned a gradient for {name!r} that is not finite")
            found[name] = array.astype(np.float32)
        return found

    def _resolved(self, value: Any) -> Any:
        """Return an argument with `PerWorker` replaced by this worker's datasets and iterators."""
        if isinstance(value, PerWorker):
            return self._dataset_of(value)
        if isinstance(value, list):
            return [self._resolved(item) for item in value]
        if isinstance(value, tuple):
            return tuple(self._resolved(item) for item in value)
        if isinstance(value, dict):
            return {name: self._resolved(item) for name, item in value.items()}
        return value

    def _dataset_of(self, argument: PerWorker) -> WorkerDataset | Iterator[Any]:
        """Return the dataset or iterator that an argument stands for."""
        if argument.number not in self._datasets:
            self._datasets[argument.number] = WorkerDataset(found(argument.function))
        dataset, number = self._datasets[argument.number], argument.iterator
        if number is None:
            return dataset
        if number not in self._iterators:
            if number <= self._forgotten:
                raise ConfigurationError(
                    f"an iterator of a per-worker dataset is used after {ITERATORS_MAX:,} newer ones: make a new one"
                )
            self._iterators[number] = iter(dataset)
            if len(self._iterators) > ITERATORS_MAX:
                self._forgotten = min(self._iterators)
                del self._iterators[self._forgotten]
        return self._iterators[number]


class WorkerDataset:
    """A worker's dataset: `for` starts from the beginning, and `next` continues across this worker's calls."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made = make()
        self._is_fresh = True
        self._running: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(self._made)
        if iterator is self._made and not self._is_fresh:
            self._made = self._make()
            iterator = iter(self._made)
        self._is_fresh = False
        return iterator

    def __next__(self) -> Any:
        if self._running is None:
            self._running = iter(self)
        return next(self._running)


def _has_iterators(value: Any) -> bool:
    """Tell whether an argument contains a `PerWorker`."""
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, PerWorker) or (isinstance(value, list | tuple) and any(map(_has_iterators, value)))


def _loss_of(result: Any) -> float | StepSignal:
    """Return a result as the loss of its step if it is a finite number, else `NO_LOSS`."""
    if not isinstance(result, float | int | np.floating):
        return StepSignal.NO_LOSS
    try:
        return float(result) if math.isfinite(result) else StepSignal.NO_LOSS
    except OverflowError:
        raise ConfigurationError(
            "it returned a whole number that is too large for a float64; allowed are numbers below 1.8e308, or its text"
        ) from None


def _short(name: str) -> str:
    return name.rpartition(":")[2]
