"""Keras on PyTorch, eager: gradients by autograd, and rows that are looked up as layers are called.

`on_jax` has the same interface.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from parashard.errors import WrongModel
from parashard.models.framework import NOT_IN_PLACE
from parashard.models.keras.rows import KerasRows, KerasStep, use_rows
from parashard.models.row_places import NO_KEYS, check_width
from parashard.models.torch.arrays import gradient_of as result
from parashard.models.torch.arrays import output_of as array_of
from parashard.models.torch.arrays import tensor_of, torch
from parashard.models.torch.embeddings import TorchRows, with_padding

__all__ = ["IS_EAGER", "Gradients", "Outputs", "array_of", "has_wide_numbers", "no_gradients", "result", "tensor"]

IS_EAGER = True
no_gradients = torch.no_grad


def has_wide_numbers() -> bool:
    return True


def tensor(array: Any, on_host: Any = None) -> Any:
    """Return a tensor that shares the array's memory if it may be written."""
    return tensor_of(array)


class _LookUps:
    """Look-ups among pulled rows, made as layers ask for them."""

    def __init__(self, rows: KerasRows, *, trained: bool = False) -> None:
        self.pulled = TorchRows(rows.values, rows.keys, trained=trained)
        self._keys = rows.keys

    def look_up(self, table: str, dimension: int, ids: Any, padding_key: int | None) -> Any:
        check_width(np.dtype(str(ids.dtype).removeprefix("torch.")), self._keys.get(table, NO_KEYS), table)

        def look_up(some: Any) -> Any:
            return self.pulled.look_up(table, some) if some.numel() else torch.zeros(0, dimension, device=some.device)

        return with_padding(look_up, ids, padding_key, dimension)


class Outputs:
    """A function of lists of tensors."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, rows: KerasRows, *arguments: Any) -> Any:
        with torch.no_grad(), use_rows(_LookUps(rows)):
            return self._function(*arguments)

    try_out = __call__


class Gradients:
    """A function that returns a number and more, with its gradients; one that writes trained tensors is refused."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, rows: KerasRows, trained: list[Any], *others: Any, scale: float = 1.0) -> KerasStep:
        looked_up = _LookUps(rows, trained=True)
        leaves = [tensor.detach().requires_grad_() for tensor in trained]
        versions = [leaf._version for leaf in leaves]
        with use_rows(looked_up):
            value, more = self._function(leaves, *others)
        if versions != [leaf._version for leaf in leaves]:
            raise WrongModel(f"a weight is written in place while a step is computed: {NOT_IN_PLACE}")
        whole = value if scale == 1 else value.float() * scale
        found = torch.autograd.grad(whole, [*leaves, *looked_up.pulled.leaves], allow_unused=True)
        gradients, by_rows = list(found[: len(leaves)]), found[len(leaves) :]
        if scale != 1:
            gradients = [gradient if gradient is None else gradient / scale for gradient in gradients]
        return KerasStep(value.detach(), more, gradients, looked_up.pulled.gradients(by_rows, rows.xp, scale))

    try_out = __call__
