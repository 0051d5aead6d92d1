"""What differs between JAX and PyTorch beneath a Keras model: tensors, gradients, compilation, the generator.

Knows no Keras and no model: it is handed functions of lists of tensors. Called by `parashard.keras`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from parashard.data.base import Array
from parashard.errors import ConfigurationError
from parashard.models.framework import NOT_IN_PLACE, WrongModel

Function = Callable[..., Any]
"""Of what is trained (a list of tensors, float32), what is not (a list), and data."""


class Backend(Protocol):
    """What computes."""

    def tensor(self, array: Any) -> Any:
        """Return a tensor of an array's values; it may share the array's memory, and is not written."""

    def array(self, tensor: Any) -> Any:
        """Return a NumPy array of a tensor's values, floating ones as float32; it shares nothing."""

    def result(self, tensor: Any, xp: Any) -> Array:
        """Return a loss or a gradient as an array of `xp`, or one that NumPy reads once it is computed."""

    def value_and_gradients(self, function: Function) -> Function:
        """Return a function of a scale, and of what `function` takes, which returns a number and more.

        It returns the number, more, and the gradients: computed of the number times the scale, and divided by it.
        None is a gradient of zeros.
        """

    def compiled(self, function: Function) -> Function:
        """Return a function that computes the same, without gradients."""

    def try_out(self, function: Function, *arguments: Any) -> None:
        """Find whether such a function can be computed of such arguments, as cheaply as that can be."""

    def no_gradients(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which nothing is kept for gradients."""

    def kept_generator(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context after which the process's generator is as it was."""


def open_backend(name: str) -> Backend:
    """Return the backend that Keras has.

    Raises
    ------
    ConfigurationError
        If models of that backend cannot be trained here.
    """
    if name == "jax":
        return Jax()
    if name == "torch":
        return Torch()
    raise ConfigurationError(
        f"ps.keras trains on Keras' JAX or PyTorch, and the backend is {name}: set KERAS_BACKEND=jax or "
        "KERAS_BACKEND=torch"
    )


class Jax:
    """JAX: a step is one compiled function."""

    def __init__(self) -> None:
        import jax

        from parashard.models import jax_arrays as ours

        self._jax, self._ours = jax, ours

    def tensor(self, array: Any) -> Any:
        """Return the array itself: compiled functions take it, and are done with it once their results are there."""
        return self._ours.borrowed(array)

    def array(self, tensor: Any) -> Any:
        """Return a copy."""
        return self._ours.array_of(tensor)

    def result(self, tensor: Any, xp: Any) -> Array:
        """Return it, perhaps before it is computed."""
        return self._ours.result_of(tensor, xp)

    def value_and_gradients(self, function: Function) -> Function:
        """Return a compiled function."""

        def times(trained: list[Any], scale: float, *others: Any) -> Any:
            value, more = function(trained, *others)
            return value.astype("float32") * scale, (value, more)

        plain, scaled = (self._jax.jit(self._jax.value_and_grad(one, has_aux=True)) for one in (function, times))

        def computed(scale: float, trained: list[Any], *others: Any) -> Any:
            if scale == 1:
                (value, more), gradients = plain(trained, *others)
            else:
                (_, (value, more)), gradients = scaled(trained, scale, *others)
                gradients = [gradient / scale for gradient in gradients]
            return value, more, gradients

        return computed

    def compiled(self, function: Function) -> Function:
        """Return it compiled."""
        return self._jax.jit(function)  # type: ignore[no-any-return]

    def try_out(self, function: Function, *arguments: Any) -> None:
        """Trace it without computing."""
        self._jax.eval_shape(function, *arguments)

    def no_gradients(self) -> contextlib.AbstractContextManager[Any]:
        """Return one that does nothing."""
        return contextlib.nullcontext()

    def kept_generator(self) -> contextlib.AbstractContextManager[Any]:
        """Return one that does nothing: JAX has no generator."""
        return contextlib.nullcontext()


class Torch:
    """PyTorch, eager."""

    def __init__(self) -> None:
        import torch

        from parashard.models import torch_arrays as ours

        self._torch, self._ours = torch, ours

    def tensor(self, array: Any) -> Any:
        """Return a tensor that shares the array's memory if it may be written."""
        return self._ours.tensor_of(array)

    def array(self, tensor: Any) -> Any:
        """Return a copy."""
        return self._ours.array_of(tensor)

    def result(self, tensor: Any, xp: Any) -> Array:
        """Return it."""
        return self._ours.gradient_of(tensor, xp)

    def value_and_gradients(self, function: Function) -> Function:
        """Return a function that differentiates by autograd, and refuses what writes into trained tensors."""

        def computed(scale: float, trained: list[Any], *others: Any) -> Any:
            leaves = [tensor.detach().requires_grad_() for tensor in trained]
            versions = [leaf._version for leaf in leaves]
            value, more = function(leaves, *others)
            if versions != [leaf._version for leaf in leaves]:
                raise WrongModel(f"a weight is written in place while a step is computed: {NOT_IN_PLACE}")
            whole = value if scale == 1 else value.float() * scale
            gradients = self._torch.autograd.grad(whole, leaves, allow_unused=True)
            if scale != 1:
                gradients = [gradient if gradient is None else gradient / scale for gradient in gradients]
            return value.detach(), more, gradients

        return computed

    def compiled(self, function: Function) -> Function:
        """Return it without gradients."""
        return self._torch.no_grad()(function)  # type: ignore[no-any-return]

    def try_out(self, function: Function, *arguments: Any) -> None:
        """Compute it, and leave PyTorch's generator as it was."""
        with self.kept_generator():
            function(*arguments)

    def no_gradients(self) -> contextlib.AbstractContextManager[Any]:
        """Return PyTorch's."""
        return self._torch.no_grad()  # type: ignore[no-any-return]

    def kept_generator(self) -> contextlib.AbstractContextManager[Any]:
        """Return PyTorch's."""
        return self._torch.random.fork_rng(devices=[])  # type: ignore[no-any-return]
