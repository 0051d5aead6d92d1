"""What a framework's model keeps besides trained parameters, as variables: frozen arrays, and state without a gradient.

Owns the way between what a framework has (an array before and after a step) and what `parashard.plan.state` says that
a push carries. Knows no framework; NumPy only: a model copies its few elements of state to the host. Called by
`parashard.torch`, `parashard.jax` and `parashard.keras`.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from parashard.errors import ConfigurationError, shortened
from parashard.models.base import Initial
from parashard.plan.state import ALLOWED, AVERAGE, COUNTER, average_factor, check_state, counter_rows, counter_values
from parashard.plan.variables import Float32s, Variable

FROZEN: Final = "frozen"


def checked_kind(name: str, kind: object, dtype: Any) -> str:
    """Return the kind of an array that has no gradient.

    Raises
    ------
    ConfigurationError
        If there is no such kind, or it is not one of whole numbers, or of others.
    """
    if kind != FROZEN and (not kind or check_state(kind) is not None):
        raise ConfigurationError(
            f"state: {name!r} is {shortened(repr(kind))}; allowed: {ALLOWED}, or {FROZEN} for what never changes"
        )
    whole = np.dtype(dtype).kind in "iu"
    if whole != (kind == COUNTER):
        raise ConfigurationError(
            f"state: {name!r} of {np.dtype(dtype)} is {kind!r}; allowed: counter for whole numbers, else the others"
        )
    return str(kind)


def initial_of(name: str, array: npt.NDArray[Any], kind: str) -> Initial:
    """Return what a model starts from for an array: of a kind, or "" for one with a gradient."""
    if kind == COUNTER:
        counted = counter_rows(array)
        return Variable(name, counted.shape, state=kind), counted
    content: Float32s = np.atleast_1d(np.asarray(array, np.float32))
    if not kind:
        return content
    return Variable(name, content.shape, frozen=kind == FROZEN, state="" if kind == FROZEN else kind), content


def host_array(array: Any) -> npt.NDArray[Any]:
    """Return an array on the host: NumPy's as it is, a copy of CuPy's."""
    return array if isinstance(array, np.ndarray) else np.asarray(array.get())


def value_of(pulled: Any, kind: str) -> Any:
    """Return what a framework has in place of a variable: whole numbers for a counter, else what was pulled."""
    return counter_values(host_array(pulled)) if kind == COUNTER else pulled


def pushed_for(kind: str, before: npt.NDArray[Any], after: npt.NDArray[Any]) -> Float32s:
    """Return what a step pushes for state that it changed.

    A running average changed by r' = r + M (b - r): the batch's own value is b = r + (r' - r) / M, and the shard moves
    its r, which may be newer, towards it.
    """
    if kind == COUNTER:
        return counter_rows(np.asarray(after, np.int64) - np.asarray(before, np.int64))
    before = np.atleast_1d(np.asarray(before, np.float32))
    change: Float32s = np.atleast_1d(np.asarray(after, np.float32)) - before
    if kind.startswith(AVERAGE):
        change = before + change / np.float32(average_factor(kind))
    return change
