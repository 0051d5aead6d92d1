"""Trainable variables of a Keras model: their kinds, checks, seeds and copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from parashard.errors import ConfigurationError
from parashard.models.base import OptimizerState
from parashard.models.framework import FROZEN, checked_kind, kept_generators
from parashard.plan.optimizers import OptimizerSpec
from parashard.plan.state import AVERAGE
from parashard.plan.variables import Float32s
from parashard.process.extras import install

try:
    import keras
except ImportError as error:
    if error.name == "keras":
        raise ConfigurationError(f"ps.keras needs Keras 3: {install('keras')}") from None
    raise ConfigurationError(
        f"Keras cannot be imported ({error}): set KERAS_BACKEND=jax or KERAS_BACKEND=torch before the first import"
    ) from None

__all__ = ["keras"]  # other modules import it from here

NOT_CALLED = {
    "train_step": "compute a step in compute_loss or add_loss",
    "test_step": "give compile() the figures as metrics",
    "predict_step": "compute the outputs in call",
    "compute_metrics": "give compile() the figures as metrics",
    "make_train_function": "compute a step in compute_loss or add_loss",
    "make_test_function": "give compile() the figures as metrics",
    "make_predict_function": "compute the outputs in call",
    "fit": "call it of trainer.model()",
    "evaluate": "call it of trainer.model()",
    "predict": "call it of trainer.model()",
    "train_on_batch": "call it of trainer.model()",
    "test_on_batch": "call it of trainer.model()",
    "predict_on_batch": "call it of trainer.model()",
    "stateless_compute_loss": "override compute_loss",
}
"""Methods of `keras.Model` that are never called here, and the alternative to overriding each."""


_MEANS = ("sum_over_batch_size", "mean")
"""Reductions of a loss that weight each example equally, whatever its batch is."""


def kind_of(variable: Any, owner: Any, patterns: Mapping[str, str]) -> str | None:
    """Return the kind of a variable: "" if trained, "frozen", or a kind of state; None: not a variable of a job."""
    if is_seed(variable):
        return None
    is_floating = keras.backend.is_float_dtype(variable.dtype)
    declared = next((kind for pattern, kind in patterns.items() if fnmatchcase(variable.path, pattern)), None)
    if declared is not None:
        if variable.trainable:
            raise ConfigurationError(f"state: {variable.path!r} is trained; allowed: weights that are not trainable")
        return checked_kind(variable.path, declared, "float32" if is_floating else variable.dtype)
    if not is_floating:
        if variable.trainable:
            raise ConfigurationError(f"weight {variable.path!r} is {variable.dtype}; allowed: real floating point")
        return None
    if variable.trainable:
        if variable.constraint is not None:
            raise ConfigurationError(
                f"weight {variable.path!r} has the constraint {type(variable.constraint).__name__}, which Keras "
                "applies after each update, and the shards do not: leave it out; a regularizer is a part of the loss"
            )
        return ""
    if isinstance(owner, keras.layers.BatchNormalization) and owner.trainable and owner.momentum < 1:
        return f"{AVERAGE}:{round(1 - owner.momentum, 12)}"
    return FROZEN


class ModelVariables(NamedTuple):
    """The variables of a model: those of a job, and others."""

    kinds: dict[str, str]  # by path, as `kind_of` returns them; trained ones first
    variables: dict[str, Any]  # of the same paths
    others: list[Any]  # seed generators and constants of whole numbers: no variables of the job

    def in_order(self) -> list[Any]:
        """Return all variables: trained ones, untrained ones, and the others."""
        return [*self.variables.values(), *self.others]

    def names(self, *, trained: bool) -> list[str]:
        """Return the paths of the trained or of the untrained variables."""
        return [name for name, kind in self.kinds.items() if (not kind) == trained]


def found_in(model: Any, patterns: Mapping[str, str]) -> ModelVariables:
    """Return a model's variables by kind."""
    owners = {id(v): layer for layer in model._flatten_layers() for v in layer.variables}  # the innermost comes last
    found: dict[str, tuple[Any, str]] = {}
    others: list[Any] = []
    for variable in model.variables:
        kind = kind_of(variable, owners.get(id(variable)), patterns)
        if kind is None:
            others.append(variable)
        elif found.setdefault(variable.path, (variable, kind))[0] is not variable:
            raise ConfigurationError(f"two weights have the path {variable.path!r}: name their layers")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in found):
            raise ConfigurationError(f"state: {pattern!r} matches none of the weights: {', '.join(found)}")
    in_order = sorted(found, key=lambda name: found[name][1] != "")
    kinds = {name: found[name][1] for name in in_order}
    if "" not in kinds.values():
        raise ConfigurationError(f"{model.name} has no trainable weight")
    return ModelVariables(kinds, {name: found[name][0] for name in in_order}, others)


def is_seed(variable: Any) -> bool:
    """Tell whether a variable is the state of a `SeedGenerator`."""
    return bool(variable.name == "seed_generator_state")


def shared_seed() -> list[Any]:
    """Return the seed state that Keras draws from where a layer has no `SeedGenerator`, if it has been used."""
    generator = keras.src.backend.common.global_state.get_global_attribute("global_seed_generator")
    return [] if generator is None else [generator.state]


def check(model: Any) -> None:
    """Refuse a model that is not built or compiled, or that overrides a method of `NOT_CALLED`."""
    if not isinstance(model, keras.Model):
        raise ConfigurationError(f"model() returned {type(model).__name__}; due is a compiled keras.Model")
    if not model.built:
        raise ConfigurationError(
            f"{model.name} has no weights yet: begin it with keras.Input(shape), or call model.build(input_shape)"
        )
    if not model.compiled:
        raise ConfigurationError(f"{model.name} is not compiled: model.compile(loss=..., metrics=[...])")
    for method, instead in NOT_CALLED.items():
        owner = next(owner for owner in type(model).__mro__ if method in vars(owner))
        if method in vars(model) or not owner.__module__.startswith("keras."):
            raise ConfigurationError(f"{type(model).__name__} overrides {method}, which workers do not call: {instead}")


def marks_of(model: Any) -> tuple[Any, ...]:
    """Return a value that changes if the model is compiled again, or one of its weights frozen or unfrozen."""
    compiled = (getattr(model, "_compile_loss", None), getattr(model, "_compile_metrics", None), model.optimizer)
    return compiled, tuple(variable.trainable for variable in model.variables)


def copied(model: Any) -> Any:
    """Return a compiled copy of a model, with its own weights."""
    try:
        own = keras.models.clone_model(model)
        own.compile_from_config(model.get_compile_config())
    except (TypeError, ValueError, NotImplementedError) as error:
        says = next(iter(str(error).splitlines()), "")
        raise ConfigurationError(
            f"Keras cannot copy this model ({says}): give ps.keras.Model a function that makes and compiles it"
        ) from error
    return own


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all generators that Keras draws from, and restore the user's on exit."""
    with kept_generators(gpus=False):
        keras.utils.set_random_seed(seed & 0xFFFFFFFF)  # NumPy's global generator has 32 bits
        yield


def means_losses(model: Any) -> bool:
    """Tell whether each loss of a compiled model is a mean over all examples: no sum, and no ignored class."""
    losses = keras.tree.flatten(model.loss)
    return all(
        getattr(loss, "reduction", _MEANS[0]) in _MEANS and getattr(loss, "ignore_class", None) is None
        for loss in losses
    )


class _Kept(NamedTuple):
    """Where an optimizer of Keras keeps a slot: theirs = factor * ours + offset."""

    attribute: str
    factor: float = 1.0
    offset: float = 0.0


def restore(optimizer: Any, names: Sequence[str], trained: Sequence[Any], spec: OptimizerSpec, state: OptimizerState,
            array: Any) -> None:  # fmt: skip
    """Load the state of the shards' optimizer into one that has taken no step."""
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
    """Return where the Keras optimizer of a rule keeps each of its slots."""
    own = spec.plain()
    match spec.rule:
        case "momentum" | "nesterov":  # Keras keeps the step itself
            return {"velocity": _Kept("momentums", -1.0 if own["rate_in_velocity"] else -spec.learning_rate)}
        case "adam" | "adamw" | "lamb":
            return {"m": _Kept("_momentums"), "v": _Kept("_velocities")}
        case "adagrad":  # our sum includes the epsilon of Keras (`parashard.api.optimizer_table`)
            return {
                "accumulator": _Kept("_accumulators", offset=-optimizer.epsilon if own["epsilon"] <= 1e-30 else 0.0)
            }
        case "ftrl":
            return {"z": _Kept("_linears"), "n": _Kept("_accumulators")}
        case "rmsprop" | "rmsprop_momentum" | "rmsprop_centered":
            velocity = _Kept("_momentums", 1.0 if own["rate_in_velocity"] else spec.learning_rate)
            return {"mean_square": _Kept("_velocities"), "velocity": velocity, "mean": _Kept("_average_gradients")}
    return {}
