"""Flat: variables by name in one run of memory, so that one copy transfers them all.

A run has every variable whole, in the order of the plan; each begins at a multiple of `ALIGNMENT_BYTES`, and the gaps
are zero. Pure: knows neither the host's memory nor a device's, which a caller slices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import starmap
from typing import Any
from weakref import WeakKeyDictionary

from parashard.plan.variables import Variable

ALIGNMENT_BYTES = 256  # alignment of CUDA's own allocations; on a CPU XLA reads memory in place from 64 on
_ALIGNMENT = ALIGNMENT_BYTES // 4

Run = Any
"""A flat vector of float32 of the host or of a device: slices are views, and `reshape` copies nothing."""


@dataclass(frozen=True)
class FlatLayout:
    """Place of each variable in a run."""

    places: Mapping[str, tuple[slice, tuple[int, ...]]]  # by variable: its elements in the run, and its shape
    elements: int  # length of a run

    @classmethod
    def of(cls, variables: Mapping[str, Variable]) -> FlatLayout:
        """Return the layout of variables in their order."""
        places: dict[str, tuple[slice, tuple[int, ...]]] = {}
        begin = 0
        for name, variable in variables.items():
            stop = begin + math.prod(variable.shape)
            places[name] = slice(begin, stop), variable.shape
            begin = -(-stop // _ALIGNMENT) * _ALIGNMENT
        return cls(places, begin)

    def over(self, run: Run) -> FlatArrays:
        """Return the variables as views of a run."""
        return FlatArrays(self, run, {name: run[place].reshape(shape) for name, (place, shape) in self.places.items()})


class FlatArrays(dict[str, Any]):
    """Arrays by name: those of `layout` are views of `run`, others, such as rows, are not."""

    def __init__(self, layout: FlatLayout, run: Run, arrays: Mapping[str, Any]) -> None:
        super().__init__(arrays)
        self.layout = layout
        self.run = run
        # A model's objects that depend on this memory but not on its values, by an object of the model: freed with
        # either.
        self.kept: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def with_rows(self, rows: Mapping[str, Any]) -> FlatArrays:
        """Return the same variables, and rows of tables beside them."""
        both = FlatArrays(self.layout, self.run, {**self, **rows})
        both.kept = self.kept
        return both


class GradientRun(Mapping[str, Any]):
    """Gradients in one run of the variables' layout, zero where there is none; views are made on access."""

    def __init__(self, layout: FlatLayout, run: Run, found: Collection[str], due: Collection[str]) -> None:
        self.layout = layout
        self.run = run
        self.found = found  # the variables that have a gradient; those of `due` without one have None
        self._due = due

    def __getitem__(self, name: str) -> Any:
        if name not in self._due:
            raise KeyError(name)
        place, shape = self.layout.places[name]
        return self.run[place].reshape(shape) if name in self.found else None

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.layout.places if name in self._due)

    def __len__(self) -> int:
        return len(self._due)

    def is_of(self, variables: Mapping[str, Variable]) -> bool:
        """Tell whether these are the layout's variables: no frozen one has a gradient, and all state is there."""

        def fits(name: str, variable: Variable) -> bool:
            if variable.frozen or variable.state:
                return variable.frozen is not (name in self.found)
            return name in self._due

        return variables.keys() == self.layout.places.keys() and all(starmap(fits, variables.items()))

    def with_rows(self, rows: Mapping[str, Any]) -> FlatArrays:
        """Return the same gradients, and those of rows of tables beside them."""
        return FlatArrays(self.layout, self.run, {**self, **rows})
