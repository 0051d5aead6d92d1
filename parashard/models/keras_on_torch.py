"""Keras on PyTorch, eager: gradients by autograd, and rows that are looked up as layers are called.

Knows no Keras.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from parashard.data.base import Array
from parashard.errors import WrongModel
from parashard.models.framework import (
    NOT_IN_PLACE,
)
from parashard.models.keras_backends import Function, Gradients, KerasStep, Outputs
from parashard.models.keras_rows import NO_ROWS, KerasRows, lent
from parashard.models.row_places import NO_KEYS, check_width
from parashard.models.torch_arrays import gradient_of, output_of, tensor_of, torch
from parashard.models.torch_embeddings import TorchRows, with_padding


class Torch:
    """PyTorch."""

    def tensor(self, array: Any, on_host: Any = None) -> Any:
        """Return a tensor that shares the array's memory if it may be written."""
        return tensor_of(array)

    def array(self, tensor: Any) -> Any:
        return output_of(tensor)

    def result(self, tensor: Any, xp: Any) -> Array:
        return gradient_of(tensor, xp)

    def gradients(self, function: Function) -> Gradients:
        """Return a function that differentiates by autograd, and refuses what writes into trained tensors."""
        return _TorchGradients(self, function)

    def outputs(self, function: Function) -> Outputs:
        return _TorchOutputs(self, function)

    def is_eager(self) -> bool:
        return True

    def has_wide_numbers(self) -> bool:
        return True

    def no_gradients(self) -> contextlib.AbstractContextManager[Any]:
        return torch.no_grad()  # type: ignore[no-any-return]

    def kept_generator(self) -> contextlib.AbstractContextManager[Any]:
        return torch.random.fork_rng(devices=[])  # type: ignore[no-any-return]


class _LookUps:
    """Look-ups among pulled rows, made as layers ask for them."""

    def __init__(self, rows: KerasRows | None, *, trained: bool = False) -> None:
        rows = rows or NO_ROWS
        self.pulled = TorchRows(rows.values, rows.keys, trained=trained)
        self._keys, self.xp = rows.keys, rows.xp

    def look_up(self, table: str, dimension: int, ids: Any, padding_key: int | None) -> Any:
        check_width(np.dtype(str(ids.dtype).removeprefix("torch.")), self._keys.get(table, NO_KEYS), table)

        def look_up(some: Any) -> Any:
            return self.pulled.look_up(table, some) if some.numel() else torch.zeros(0, dimension, device=some.device)

        return with_padding(look_up, ids, padding_key, dimension)


class _TorchGradients:
    """What a function that is differentiated computes."""

    def __init__(self, backend: Torch, function: Function) -> None:
        self._backend, self._function = backend, function

    def __call__(self, rows: KerasRows | None, scale: float, trained: list[Any], *others: Any) -> KerasStep:
        looked_up = _LookUps(rows, trained=True)
        leaves = [tensor.detach().requires_grad_() for tensor in trained]
        versions = [leaf._version for leaf in leaves]
        with lent(looked_up):
            value, more = self._function(leaves, *others)
        if versions != [leaf._version for leaf in leaves]:
            raise WrongModel(f"a weight is written in place while a step is computed: {NOT_IN_PLACE}")
        whole = value if scale == 1 else value.float() * scale
        found = torch.autograd.grad(whole, [*leaves, *looked_up.pulled.leaves], allow_unused=True)
        gradients, by_rows = list(found[: len(leaves)]), found[len(leaves) :]
        if scale != 1:
            gradients = [gradient if gradient is None else gradient / scale for gradient in gradients]
        return KerasStep(value.detach(), more, gradients, looked_up.pulled.gradients(by_rows, looked_up.xp, scale))

    def try_out(self, rows: KerasRows | None, *arguments: Any) -> None:
        with self._backend.kept_generator():
            self(rows, 1.0, *arguments)


class _TorchOutputs:
    """What a function computes."""

    def __init__(self, backend: Torch, function: Function) -> None:
        self._backend, self._function = backend, function

    def __call__(self, rows: KerasRows | None, *arguments: Any) -> Any:
        with torch.no_grad(), lent(_LookUps(rows)):
            return self._function(*arguments)

    def try_out(self, rows: KerasRows | None, *arguments: Any) -> None:
        with self._backend.kept_generator():
            self(rows, *arguments)
