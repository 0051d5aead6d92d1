"""An optimizer of Keras with the state that the shards have computed, and the reverse.

Owns which of Keras' variables each of our slots is. Knows no model: names of variables are given. Imports no Keras, but
calls the methods of its optimizers. Called by `parashard.keras`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from parashard.models.optimizer_state import OptimizerState
from parashard.plan.optimizers import OptimizerSpec
from parashard.plan.variables import Float32s


class _Kept(NamedTuple):
    """Where an optimizer of Keras keeps a slot: theirs = factor * ours + offset."""

    attribute: str
    factor: float = 1.0
    offset: float = 0.0


def restore(optimizer: Any, names: Sequence[str], trained: Sequence[Any], spec: OptimizerSpec, state: OptimizerState,
            array: Any) -> None:  # fmt: skip
    """Give an optimizer that has taken no step the state of the shards'.

    Parameters
    ----------
    optimizer : keras.optimizers.Optimizer
        Of the same rule as `spec`.
    names : sequence of str
        Ours, of the variables that the model trains.
    trained : sequence of keras.Variable
        These.
    spec : OptimizerSpec
        The shards', with its present rate.
    state : OptimizerState
    array : callable
        From a variable's value to an array.
    """
    if not optimizer.built:
        optimizer.build(trained)
    optimizer.iterations.assign(state.updates)
    if hasattr(optimizer._learning_rate, "assign"):  # else a schedule, which follows from the iterations
        optimizer.learning_rate = spec.learning_rate
    for slot, (attribute, factor, offset) in _kept(optimizer, spec).items():
        theirs = getattr(optimizer, attribute, None) or []
        for name, variable in zip(names, trained, strict=True):
            values = state.slots.get(slot, {}).get(name)
            if values is not None and theirs:
                own = theirs[optimizer._get_variable_index(variable)]
                own.assign((np.float32(factor) * values + np.float32(offset)).reshape(array(own.value).shape))


def state_of(optimizer: Any, spec: OptimizerSpec, array: Any) -> OptimizerState | None:
    """Return the state of an optimizer by the paths of its variables; None: it has taken no step."""
    if not optimizer.built or not int(array(optimizer.iterations.value)):
        return None
    slots: dict[str, Mapping[str, Float32s]] = {}
    for slot, (attribute, factor, offset) in _kept(optimizer, spec).items():
        theirs = getattr(optimizer, attribute, None) or []
        of_slot = {}
        for variable in optimizer._trainable_variables if theirs else []:
            values = np.array(array(theirs[optimizer._get_variable_index(variable)].value), np.float32)
            of_slot[variable.path] = np.atleast_1d((values - np.float32(offset)) / np.float32(factor))
        slots[slot] = of_slot
    return OptimizerState(int(array(optimizer.iterations.value)), slots)


def _kept(optimizer: Any, spec: OptimizerSpec) -> dict[str, _Kept]:
    """Return where each slot of a rule is kept by the optimizer of Keras that has this rule."""
    own = spec.plain()
    match spec.rule:
        case "momentum" | "nesterov":  # of which Keras keeps the step itself
            return {"velocity": _Kept("momentums", -1.0 if own["rate_in_velocity"] else -spec.learning_rate)}
        case "adam" | "adamw" | "lamb":
            return {"m": _Kept("_momentums"), "v": _Kept("_velocities")}
        case "adagrad":  # ours has an epsilon of Keras' in the sum (`parashard.api.optimizer_table`)
            return {
                "accumulator": _Kept("_accumulators", offset=-optimizer.epsilon if own["epsilon"] <= 1e-30 else 0.0)
            }
        case "ftrl":
            return {"z": _Kept("_linears"), "n": _Kept("_accumulators")}
        case "rmsprop" | "rmsprop_momentum" | "rmsprop_centered":
            velocity = _Kept("_momentums", 1.0 if own["rate_in_velocity"] else spec.learning_rate)
            return {"mean_square": _Kept("_velocities"), "velocity": velocity, "mean": _Kept("_average_gradients")}
    return {}
