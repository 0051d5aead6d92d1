"""Keras on JAX: what a step or an evaluation computes is one compiled function.

A compiled function cannot look rows up. Where layers do, it is called twice: for the ids that they ask for, and with
the rows of these. Knows no Keras.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from parashard.data.base import Array
from parashard.errors import WrongModel
from parashard.models.jax_arrays import borrowed, check_width, jax, output_of, result_of
from parashard.models.keras_backends import Function, Gradients, KerasStep, Outputs
from parashard.models.keras_rows import Asking, Gathered, Given, KerasRows, lent


class Jax:
    """JAX."""

    def tensor(self, array: Any, on_host: Any = None) -> Any:
        """Return the array itself: compiled functions take it, and are done with it once their results are there."""
        check_width(array if on_host is None else on_host)
        return borrowed(array)

    def array(self, tensor: Any) -> Any:
        return output_of(tensor)

    def result(self, tensor: Any, xp: Any) -> Array:
        found = result_of(tensor)
        return found if xp is np else xp.from_dlpack(found)

    def gradients(self, function: Function) -> Gradients:
        return _JaxGradients(function)

    def outputs(self, function: Function) -> Outputs:
        return _JaxOutputs(function)

    def is_eager(self) -> bool:
        return False

    def has_wide_numbers(self) -> bool:
        return bool(jax.config.jax_enable_x64)

    def no_gradients(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def kept_generator(self) -> contextlib.AbstractContextManager[Any]:
        """Return one that does nothing: JAX has no generator."""
        return contextlib.nullcontext()


class _LookUps:
    """A function whose layers may look rows up."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._asked = jax.jit(self._ask)

    def _ask(self, *arguments: Any) -> Any:
        with lent(asking := Asking(jax.numpy.zeros)):
            self._function(*arguments)
        return asking.asked

    def _gathered(self, rows: KerasRows | None, *arguments: Any) -> Gathered | None:
        """Return the rows that the function's layers ask for; None: there are no tables."""
        if rows is None:
            return None
        try:
            return Gathered(rows, self._asked(*arguments))
        except jax.errors.UnexpectedTracerError as error:
            raise WrongModel(
                "ps.keras.Embedding is called within a loop, a map or a rematerialised part of JAX: call it before"
            ) from error

    def _answered(self, rows: list[Any], *arguments: Any) -> tuple[Any, Any]:
        """Return what the function does where layers are given these rows, and what they asked for."""
        with lent(given := Given(rows)):
            return self._function(*arguments), given.asked


class _JaxGradients(_LookUps):
    """What a function that is differentiated computes, compiled."""

    def __init__(self, function: Function) -> None:
        super().__init__(function)
        self._plain, self._scaled = (
            jax.jit(jax.value_and_grad(one, argnums=(0, 1), has_aux=True)) for one in (self._told, self._times)
        )

    def _told(self, trained: list[Any], rows: list[Any], *others: Any) -> Any:
        (value, more), asked = self._answered(rows, trained, *others)
        return value, (value, more, asked)

    def _times(self, trained: list[Any], rows: list[Any], scale: float, *others: Any) -> Any:
        value, found = self._told(trained, rows, *others)
        return value.astype("float32") * scale, found

    def __call__(self, rows: KerasRows | None, scale: float, trained: list[Any], *others: Any) -> KerasStep:
        gathered = self._gathered(rows, trained, *others)
        given = [] if gathered is None else gathered.rows
        if scale == 1:
            (_, (value, more, asked)), found = self._plain(trained, given, *others)
        else:
            (_, (value, more, asked)), found = self._scaled(trained, given, scale, *others)
            found = jax.tree_util.tree_map(lambda gradient: gradient / scale, found)
        gradients, by_rows = found
        if gathered is None:
            return KerasStep(value, more, gradients, {})
        gathered.check(asked)
        return KerasStep(value, more, gradients, gathered.gradients(by_rows))

    def try_out(self, rows: KerasRows | None, trained: list[Any], *others: Any) -> None:
        gathered = self._gathered(rows, trained, *others)
        jax.eval_shape(self._plain, trained, [] if gathered is None else gathered.rows, *others)


class _JaxOutputs(_LookUps):
    """What a function computes, compiled."""

    def __init__(self, function: Function) -> None:
        super().__init__(function)
        self._compiled = jax.jit(self._answered)

    def __call__(self, rows: KerasRows | None, *arguments: Any) -> Any:
        gathered = self._gathered(rows, *arguments)
        outputs, asked = self._compiled([] if gathered is None else gathered.rows, *arguments)
        if gathered is not None:
            gathered.check(asked)
        return outputs

    def try_out(self, rows: KerasRows | None, *arguments: Any) -> None:
        gathered = self._gathered(rows, *arguments)
        jax.eval_shape(self._compiled, [] if gathered is None else gathered.rows, *arguments)
