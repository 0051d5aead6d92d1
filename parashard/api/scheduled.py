"""A worker's side of a coordinator: step n calls the function that was scheduled as number n.

It is a model and a data source, so that a worker computes a call as any other step: leased, watched, pushed once, tried
again where it died. Owns what a function gets and what of its answer is a gradient. Called by
`parashard.api.coordinator`, in the script that was run again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from parashard.api.calls import Call, Calls, PerWorker, numpy_of
from parashard.api.functions import Function, found
from parashard.client.pull_buffers import read_only
from parashard.data.base import Batch, DataSpec, Indices
from parashard.errors import ConfigurationError
from parashard.models.base import Nothing
from parashard.models.blame import named_with_line
from parashard.plan.variables import Float32s

STEPS_MAX = 1 << 32
"""Of a job of open length: the length that it is declared with."""


class ScheduledSource:
    """The data source of a job whose functions have their own data."""

    spec = DataSpec(STEPS_MAX, 0, (), 0, "of the scheduled functions")

    def examples(self, indices: Indices) -> tuple[Float32s, Float32s]:
        """Return nothing for each step."""
        nothing = np.zeros((len(indices), 0), np.float32)
        return nothing, nothing

    def held_out(self, start: int, stop: int) -> tuple[Float32s, Float32s]:
        """Return nothing."""
        return self.examples(np.arange(start, stop))


class ScheduledFunctions:
    """The model of such a job.

    Parameters
    ----------
    variables : mapping of str to array
        First values, and with them names and shapes.
    calls : Calls
        Where arguments are, and where results go.
    worker : str
        The name of this worker.
    """

    def __init__(self, variables: Mapping[str, Any], calls: Calls, worker: str) -> None:
        self._variables = {name: np.asarray(value, np.float32) for name, value in variables.items()}
        self._calls = calls
        self._worker = worker
        self._iterators: dict[int, Iterator[Any]] = {}

    def initial_variables(self) -> Mapping[str, Any]:
        """Return the first values."""
        return self._variables

    def loss_and_gradients(
        self, variables: Mapping[str, Any], batch: Batch, xp: Any
    ) -> tuple[float | Nothing, Mapping[str, Any] | Nothing]:
        """Call the function of a step; its result is stored before its gradients are pushed.

        What it raises is stored, too, and then the step moves nothing: that is its answer.
        """
        call = self._calls.read(batch.step)
        try:
            result, gradients = self._called(call, read_only(variables))
            loss = _loss_of(result)
            self._calls.write_result(batch.step, result)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the user's function, or what it returned
            wrong = isinstance(error, ConfigurationError)
            says = f"{_short(call.function)}: {error}" if wrong else named_with_line(error)
            self._calls.write_error(batch.step, f"{self._worker or 'a worker'}: {says}")
            return Nothing.NO_LOSS, Nothing.NO_PUSH
        return loss, gradients

    def evaluate(self, variables: Mapping[str, Any], batch: Batch, xp: Any) -> Mapping[str, float]:
        """Return no metrics: such a job has no held-out examples."""
        return {}

    def _called(self, call: Call, weights: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any] | Nothing]:
        function = found(call.function)
        if not isinstance(function, Function):
            raise ConfigurationError("this worker's script has no such function")
        args = [self._resolved(value) for value in call.args]
        kwargs = {name: self._resolved(value) for name, value in call.kwargs.items()}
        returned = function(weights, *args, **kwargs)
        if not function.pushes:
            return returned, Nothing.NO_PUSH
        if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[1], Mapping):
            raise ConfigurationError(
                "a function with @ps.function returns (result, gradients), gradients by variable; one that pushes "
                "nothing has @ps.function(pushes=0)"
            )
        return returned[0], self._checked(returned[1])

    def _checked(self, gradients: Mapping[str, Any]) -> dict[str, Any]:
        arrays = {name: numpy_of(gradient) for name, gradient in gradients.items()}
        for name, array in arrays.items():
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
        return {name: arrays[name].astype(np.float32) if name in arrays else None for name in self._variables}

    def _resolved(self, value: Any) -> Any:
        """Return an argument, with this worker's own iterators in it."""
        if isinstance(value, PerWorker):
            if value.number not in self._iterators:
                self._iterators[value.number] = iter(found(value.function)())
            return self._iterators[value.number]
        if isinstance(value, list):
            return [self._resolved(item) for item in value]
        if isinstance(value, tuple):
            return tuple(self._resolved(item) for item in value)
        if isinstance(value, dict):
            return {name: self._resolved(item) for name, item in value.items()}
        return value


def _loss_of(result: Any) -> float | Nothing:
    """Return a result as the loss of its step, if it is a finite number."""
    if not isinstance(result, float | int | np.floating):
        return Nothing.NO_LOSS
    try:
        return float(result) if math.isfinite(result) else Nothing.NO_LOSS
    except OverflowError:
        raise ConfigurationError(
            "it returned a whole number that is too large for a float64; allowed are numbers below 1.8e308, or its text"
        ) from None


def _short(name: str) -> str:
    return name.rpartition(":")[2]
