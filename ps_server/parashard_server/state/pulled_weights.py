"""PulledWeights: the weights pulled for steps in progress, for `optimizer.gap_aware`. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from parashard.plan.variables import Float32s


@dataclass
class _Copy:
    """The weights of a pull, and the version of each run by its first element; runs arrive in any order."""

    values: Float32s
    runs: dict[int, tuple[int, int]] = field(default_factory=dict)  # first element -> (length, version)

    def is_of(self, version: int | None) -> bool:
        """Return whether every run is here and their lowest version is this one, which the pull's push names."""
        whole = sum(length for length, _ in self.runs.values()) == len(self.values)
        return whole and min(version for _, version in self.runs.values()) == version


class PulledWeights:
    """A copy of the weights for each step that was pulled and not yet pushed.

    Keeps at most `steps_max` copies, dropping the oldest. If two workers pull a step the later copy is kept; the push
    of the other names another version and finds none. Such pushes are applied as they are.

    Parameters
    ----------
    elements : int
        Length of the shard's flat vector.
    steps_max : int
        Copies to keep, each of the size of the weights.
    """

    def __init__(self, elements: int, steps_max: int) -> None:
        self._elements = elements
        self._steps_max = steps_max
        self._copies: OrderedDict[int, _Copy] = OrderedDict()

    def keep(self, step: int, version: int, first: int, values: Float32s) -> None:
        """Copy a run of the flat vector, from element `first` on, as pulled for a step at a version."""
        copy = self._copies.get(step)
        if copy is None:
            copy = self._copies[step] = _Copy(np.empty(self._elements, np.float32))
            if len(self._copies) > self._steps_max:
                self._copies.popitem(last=False)
        copy.runs[first] = (len(values), version)
        copy.values[first : first + len(values)] = values

    def of(self, step: int, version: int | None) -> Float32s | None:
        """Return the weights pulled for a step, if the push names their version; else None."""
        copy = self._copies.get(step)
        return copy.values if copy is not None and copy.is_of(version) else None

    def forget(self, step: int) -> None:
        """Drop the copy of an applied step."""
        self._copies.pop(step, None)
