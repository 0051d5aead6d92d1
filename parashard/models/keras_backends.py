"""What differs between JAX and PyTorch beneath a Keras model: tensors, gradients, compilation, the generator.

Knows no Keras and no model: a backend is handed functions of lists of tensors, and the rows of tables that the layers
within look up. `parashard.models.keras_on_jax` and `keras_on_torch` are the two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from parashard.data.base import Array
from parashard.models.keras_rows import KerasRows

Function = Callable[..., Any]
"""Of what is trained (a list of tensors, float32), what is not (a list), and data."""


class KerasStep(NamedTuple):
    """A number with its gradients."""

    value: Any
    more: Any  # what else the function returns
    gradients: list[Any]  # by what is trained; None is a gradient of zeros
    of_rows: Mapping[str, Array | None]  # by the rows of each table


class Gradients(Protocol):
    """A function that returns a number and more, with its gradients."""

    def __call__(self, rows: KerasRows | None, scale: float, *arguments: Any) -> KerasStep:
        """Return the number, and gradients of the number times the scale, divided by it; rows: what layers look up."""

    def try_out(self, rows: KerasRows | None, *arguments: Any) -> None:
        """Find whether it can be computed of such arguments, as cheaply as that can be."""


class Outputs(Protocol):
    """A function without gradients."""

    def __call__(self, rows: KerasRows | None, *arguments: Any) -> Any:
        """Return what the function does."""

    def try_out(self, rows: KerasRows | None, *arguments: Any) -> None:
        """Find whether it can be computed of such arguments, as cheaply as that can be."""


class Backend(Protocol):
    """What computes."""

    def tensor(self, array: Any, on_host: Any = None) -> Any:
        """Return a tensor of an array's values; it may share the array's memory, and is not written.

        `on_host`: the same values in the host's memory, where there are such.
        """

    def array(self, tensor: Any) -> Any:
        """Return a NumPy array of a tensor's values in its type, bfloat16 as float32; it shares nothing."""

    def result(self, tensor: Any, xp: Any) -> Array:
        """Return a loss or a gradient as an array of `xp`, or one that NumPy reads once it is computed."""

    def gradients(self, function: Function) -> Gradients:
        """Return a function that returns a number and more, with its gradients."""

    def outputs(self, function: Function) -> Outputs:
        """Return a function that computes the same as fast as the backend can, without gradients."""

    def is_eager(self) -> bool:
        """Tell whether models compute as they are called, where Keras itself calls them, too."""

    def has_wide_numbers(self) -> bool:
        """Tell whether tensors have whole numbers of 64 bits."""

    def no_gradients(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which nothing is kept for gradients."""

    def kept_generator(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context after which the process's generator is as it was."""
