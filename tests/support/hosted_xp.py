"""CuPy's names over NumPy for models of frameworks: what a step on a GPU does, in the host's memory, and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from parashard.data.base import Batch
from parashard.data.tree import map_leaves
from parashard.plan.flat import FlatArrays, FlatLayout
from parashard.plan.variables import Variable


class Watched(np.ndarray):
    """An array of a GPU: to look at a number of it is to wait for the GPU."""

    waits: ClassVar[Counter[str]] = Counter()

    def _looked(self, what: str) -> Any:
        self.waits[what] += 1
        return np.asarray(self)

    def min(self, *args: Any, **kwargs: Any) -> Any:
        return np.asarray(np.asarray(self).min(*args, **kwargs)).view(Watched)

    def max(self, *args: Any, **kwargs: Any) -> Any:
        return np.asarray(np.asarray(self).max(*args, **kwargs)).view(Watched)

    def get(self) -> np.ndarray:
        return np.array(self._looked("get"))

    def __float__(self) -> float:
        return float(self._looked("float"))

    def __int__(self) -> int:
        return int(self._looked("int"))

    def __bool__(self) -> bool:
        return bool(self._looked("bool"))


class HostedXp:
    """NumPy under another name, so that models take it for a GPU's."""

    def __init__(self) -> None:
        # By name: arrays that came from a framework, uploads, and questions whose answer is waited for.
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def from_dlpack(self, array: Any) -> np.ndarray:
        self.calls["from_dlpack"] += 1
        shared = np.from_dlpack(array)
        return (shared if shared.flags.writeable else shared.copy()).view(Watched)

    def asarray(self, values: Any) -> np.ndarray:
        self.calls["asarray"] += 1
        return np.asarray(values).view(Watched)

    def isfinite(self, array: np.ndarray) -> Any:
        self.calls["isfinite"] += 1
        return np.isfinite(np.asarray(array))


def flat_of(values: Mapping[str, np.ndarray]) -> FlatArrays:
    """Return values as a worker's GPU has them, in a run of their own; what lies between them is no zero."""
    layout = FlatLayout.of({name: Variable(name, array.shape) for name, array in values.items()})
    memory = np.full(layout.elements + 64, np.nan, np.float32)
    start = -memory.__array_interface__["data"][0] % 256 // 4  # as CUDA aligns it
    flat = layout.over(memory[start : start + layout.elements].view(Watched))
    for name, array in values.items():
        flat[name][...] = array
    return flat


def there(batch: Batch) -> Batch:
    """Return a batch as a worker's GPU has it."""
    inputs, targets, weights = map_leaves(
        lambda array: array.view(Watched),
        (batch.inputs, batch.targets, [] if batch.weights is None else [batch.weights]),
    )
    return replace(batch, inputs=inputs, targets=targets, weights=weights[0] if weights else None, on_host=batch)
