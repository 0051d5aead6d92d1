"""The torn-write oracle: a model whose final weights show a push that was applied in part or mixed from two attempts.

Every attempt at a step pushes one random constant to every row of every variable. A shard that applies pushes
atomically keeps the values of a variable equal; chunks of two attempts mixed, or half a push, make them differ. Unlike
all other randomness this is not seeded: attempts that pushed the same constant could be mixed undetected. Two shards
may hold two attempts of a step, so only values of one shard are compared: there are several variables, each small
enough for the partitioner to leave whole on one shard.

Knows no shard. Built by `parashard.models.building`; audited by the job's report.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from parashard.data.base import Array, Batch
from parashard.models.options import TornOptions
from parashard.plan.variables import Float32s, Variable

TORN_VARIABLES = tuple(f"torn_{piece:02}" for piece in range(8))

_COLUMNS = 16
_CONSTANT_BITS = 10


class Torn:
    """Eight variables, "torn_00" to "torn_07": shape (rows, 16), zeros at the start.

    Examples
    --------
    A push that reached only one row of a variable:

    >>> import numpy as np
    >>> final = {name: np.zeros((2, 16), np.float32) for name in TORN_VARIABLES}
    >>> final["torn_03"][1] = 0.5
    >>> Torn(TornOptions(rows=2)).audit(final, epochs=1)
    {'torn': 16}
    """

    def __init__(self, options: TornOptions) -> None:
        self._shape = (options.rows, _COLUMNS)

    def initial_variables(self) -> Mapping[str, Variable]:
        """Return the eight variables."""
        return {name: Variable(name, self._shape, decay=False) for name in TORN_VARIABLES}

    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float, Mapping[str, Array]]:
        """Return 0.0 and, for every variable, a new array full of this attempt's constant."""
        constant = _constant()
        return 0.0, {name: xp.full(self._shape, constant, variables[name].dtype) for name in TORN_VARIABLES}

    def evaluate(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> Mapping[str, float]:
        """Return no metric."""
        return {}

    def audit(self, variables: Mapping[str, Float32s], epochs: int) -> Mapping[str, int]:
        """Return {"torn": values that differ from the first value of their variable}."""
        return {"torn": sum(int((variables[name] != variables[name][0, 0]).sum()) for name in TORN_VARIABLES)}


def _constant() -> float:
    """Return k / 1024, k random in +-[1, 1024].

    Never zero, which would hide half a push. Sums of multiples of 1/1024 are exact in float32 in any order while they
    stay below 2^14: always for 16,384 steps, and with random signs almost surely for millions.
    """
    bits = int.from_bytes(os.urandom(2), "little")
    magnitude = 1 + (bits & ((1 << _CONSTANT_BITS) - 1))
    return (magnitude if bits >> 15 else -magnitude) / (1 << _CONSTANT_BITS)
