"""Keras on JAX: a step or an evaluation is one compiled function.

A compiled function cannot look rows up. If layers do, it is called twice: to collect their ids, then with the rows.
`on_torch` has the same interface.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext as no_gradients
from typing import Any

import numpy as np

from parashard.data.base import Array
from parashard.errors import WrongModel
from parashard.models.jax.arrays import borrowed, check_width, jax, result_of
from parashard.models.jax.arrays import output_of as array_of
from parashard.models.keras.rows import NO_ROWS, Gathered, KerasRows, KerasStep, Recorded, use_rows

__all__ = ["IS_EAGER", "Gradients", "Outputs", "array_of", "has_wide_numbers", "no_gradients", "result", "tensor"]

IS_EAGER = False
"""Whether models compute eagerly, also when Keras itself calls them."""


def has_wide_numbers() -> bool:
    """Tell whether tensors have whole numbers of 64 bits."""
    return bool(jax.config.jax_enable_x64)


def tensor(array: Any, on_host: Any = None) -> Any:
    """Return the array itself: compiled functions take it, and no longer read it once their results are ready."""
    check_width(array if on_host is None else on_host)
    return borrowed(array)


def result(found: Any, xp: Any) -> Array:
    """Return a loss or a gradient as an array of `xp`, or one that NumPy reads once it is computed."""
    found = result_of(found)
    return found if xp is np else xp.from_dlpack(found)


class Outputs:
    """A compiled function of lists of tensors, whose layers may look rows up."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._asked = jax.jit(self._ask)
        self._compiled = jax.jit(self._answered)

    def __call__(self, rows: KerasRows, *arguments: Any) -> Any:
        gathered = self._gathered(rows, *arguments)
        outputs, asked = self._compiled(gathered.rows, *arguments)
        gathered.check(asked)
        return outputs

    def try_out(self, rows: KerasRows, *arguments: Any) -> None:
        """Trace the function for such arguments, to raise its errors, without computing it."""
        jax.eval_shape(self._compiled, self._gathered(rows, *arguments).rows, *arguments)

    def _ask(self, *arguments: Any) -> Any:
        with use_rows(asking := Recorded(jax.numpy.zeros)):
            self._function(*arguments)
        return asking.asked

    def _gathered(self, rows: KerasRows, *arguments: Any) -> Gathered:
        """Return the rows that the function's layers ask for."""
        try:
            return Gathered(rows, [] if rows is NO_ROWS else self._asked(*arguments))
        except jax.errors.UnexpectedTracerError as error:
            raise WrongModel(
                "ps.keras.Embedding is called within a loop, a map or a rematerialised part of JAX: call it before"
            ) from error

    def _answered(self, rows: list[Any], *arguments: Any) -> tuple[Any, Any]:
        """Return the function's result with these rows for its layers, and the ids that they asked for."""
        with use_rows(given := Recorded(jax.numpy.zeros, rows)):
            return self._function(*arguments), given.asked


class Gradients(Outputs):
    """A function that returns a number and more, with the number's gradients by its first argument and by rows."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._compiled, self._scaled = (
            jax.jit(jax.value_and_grad(one, argnums=(1, 0), has_aux=True))
            for one in (self._value_and_results, self._times)
        )

    def _value_and_results(self, rows: list[Any], *arguments: Any) -> Any:
        (value, more), asked = self._answered(rows, *arguments)
        return value, (value, more, asked)

    def _times(self, rows: list[Any], trained: list[Any], scale: float, *others: Any) -> Any:
        value, found = self._value_and_results(rows, trained, *others)
        return value.astype("float32") * scale, found

    def __call__(  # type: ignore[override]
        self, rows: KerasRows, trained: list[Any], *others: Any, scale: float = 1.0
    ) -> KerasStep:
        gathered = self._gathered(rows, trained, *others)
        if scale == 1:
            (_, (value, more, asked)), found = self._compiled(gathered.rows, trained, *others)
        else:
            (_, (value, more, asked)), found = self._scaled(gathered.rows, trained, scale, *others)
            found = jax.tree_util.tree_map(lambda gradient: gradient / scale, found)
        gathered.check(asked)
        return KerasStep(value, more, found[0], gathered.gradients(found[1]))
