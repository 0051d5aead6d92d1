"""Convert optimizers of PyTorch, Keras and optax to parashard's, with settings of single variables."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parashard.api.optimizer_table import keras_spec, number, optax_spec, torch_spec
from parashard.errors import ConfigurationError
from parashard.job.validation import validated_words
from parashard.plan.optimizers import SGD, OptimizerSpec
from parashard.plan.schedules import ConstantSchedule, Schedule, ScheduleOptions


@dataclass(frozen=True)
class Group:
    """Parameters of a PyTorch optimizer that share their settings."""

    parameters: tuple[Any, ...]
    names: tuple[str, ...]  # empty unless the optimizer was made of named parameters
    learning_rate_factor: float
    decay: bool

    def named(self, own: Mapping[int, str]) -> Sequence[str]:
        """Return the names of its parameters, looked up by `id` in the model's; "" for an unknown one."""
        return self.names or [own.get(id(parameter), "") for parameter in self.parameters]


@dataclass(frozen=True)
class Mapped:
    """An optimizer of parashard, and the parameter groups of the PyTorch optimizer that it replaces."""

    spec: OptimizerSpec
    groups: tuple[Group, ...] = ()


def optimizer_of(given: Any) -> Mapped:
    """Return parashard's optimizer that computes the same updates; refuse settings without an equivalent."""
    if given is None:
        return Mapped(SGD(0.01))
    if isinstance(given, OptimizerSpec):
        return Mapped(given)
    function = given.func if isinstance(given, functools.partial) else given
    named = function if inspect.isclass(function) or inspect.isfunction(function) else type(function)
    match named.__module__.partition(".")[0]:
        case "torch" if inspect.isclass(function):
            return Mapped(_of_torch(_made(given)).spec)
        case "torch" if hasattr(given, "param_groups"):
            return _of_torch(given)
        case "keras" if hasattr(function, "get_config"):
            return Mapped(_of_keras(given() if inspect.isclass(function) else given))
        case "optax" if isinstance(given, functools.partial):
            return Mapped(optax_spec(function.__name__, _arguments(given)))
        case "optax":
            raise ConfigurationError(
                "an optax transformation does not tell what it computes: give ps.Adam(1e-3), or the call without its "
                "parentheses, functools.partial(optax.adam, 1e-3)"
            )
    raise ConfigurationError(
        "the shards run the optimizer: it is one of parashard's, such as ps.Adam(1e-3), or one of PyTorch, Keras or "
        f"optax that equals one of them; found {named.__name__}"
    )


def with_arguments(mapped: Mapped, clip_norm: float | None, schedule: Any) -> Mapped:
    """Return an optimizer with the trainer's `clip_norm` and `schedule`; refuse one that has its own."""
    spec = mapped.spec
    if schedule is not None:
        if not isinstance(schedule, Mapping | Schedule):
            kind = schedule if inspect.isclass(schedule) else type(schedule)
            raise ConfigurationError(
                f"ps.Trainer: schedule is one of parashard's, whose lengths are in updates, such as "
                f'{{"kind": "cosine", "warmup_steps": 100}}; found {kind.__name__}'
                f"{_SCHEDULERS.get(kind.__name__, '')}"
            )
        if spec.schedule != ConstantSchedule():
            raise ConfigurationError("ps.Trainer: the optimizer has a schedule already; leave out schedule=")
        if isinstance(schedule, Mapping):
            schedule = validated_words(ScheduleOptions, schedule, "ps.Trainer: schedule.")
        spec = spec.replaced(schedule=schedule)
    if clip_norm is not None:
        if spec.clip_norm is not None:
            raise ConfigurationError("ps.Trainer: the optimizer has a clip_norm already; leave out clip_norm=")
        spec = spec.replaced(clip_norm=clip_norm)
    return Mapped(spec, mapped.groups)


_SCHEDULERS = {
    "StepLR": ': {"kind": "step", "every_steps": updates of step_size, "factor": gamma}',
    "MultiStepLR": ': {"kind": "piecewise", "changes": [[updates of a milestone, gamma], [of the next, gamma**2]]}',
    "ExponentialLR": ': {"kind": "step", "every_steps": updates of an epoch, "factor": gamma}',
    "CosineAnnealingLR": ': {"kind": "cosine", "decay_steps": updates of T_max, "final_fraction": eta_min / lr}',
    "CosineAnnealingWarmRestarts": ': {"kind": "cosine_restarts", "first_steps": updates of T_0}',
    "LinearLR": ': {"kind": "constant", "warmup_steps": updates of total_iters, "warmup_from": start_factor}',
    "PolynomialLR": ': {"kind": "polynomial", "decay_steps": updates of total_iters, "power": power}',
    "OneCycleLR": ": it has no equal; a cosine with warmup_steps and warmup_from is close",
}
"""Equivalents of PyTorch's learning-rate schedulers, for error messages."""


def has_taken_steps(given: Any) -> bool:
    """Tell whether an optimizer of PyTorch or Keras has state."""
    if isinstance(given, OptimizerSpec) or inspect.isclass(given):
        return False
    of_torch = any(getattr(given, "state", {}).values()) if hasattr(given, "param_groups") else False
    return of_torch or bool(getattr(given, "built", False) and int(given.iterations))


def variable_settings(
    groups: Sequence[Group], names: Mapping[int, str], trained: Sequence[str], frozen: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return a job's `[variables]` from groups; trained ones in no group are frozen, since PyTorch skips them."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        found |= dict.fromkeys(group.named(names), _settings(group))
    if not found.keys() <= {*trained, *frozen}:
        uniform = len(groups) == 1 and len(groups[0].parameters) == len(trained)
        if uniform:  # one group of another copy of the module: it holds for all
            return {}
        raise ConfigurationError(
            "the optimizer's parameters are not those of the model: give both the same module, as in "
            "ps.torch.Model(net, ...) and torch.optim.Adam(net.parameters()), or make it of net.named_parameters()"
        )
    return {name: found.get(name, {"frozen": True}) for name in trained if found.get(name, {"frozen": True})}


def _settings(group: Group) -> dict[str, Any]:
    factor = {} if group.learning_rate_factor == 1 else {"learning_rate_factor": group.learning_rate_factor}
    return factor | ({} if group.decay else {"decay": False})


def _made(given: Callable[..., Any]) -> Any:
    """Make an optimizer of a PyTorch class with a dummy parameter, to read its settings."""
    torch = sys.modules["torch"]
    try:
        return given([torch.nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError) as error:  # PyTorch refuses the settings
        raise ConfigurationError(f"the optimizer could not be made: {error}") from None


def _of_keras(optimizer: Any) -> OptimizerSpec:
    """Return the equivalent of a Keras optimizer; refuse excluded variables, which its configuration lacks."""
    name = type(optimizer).__name__
    excluded = "_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"
    if any(getattr(optimizer, kept, None) for kept in excluded):
        raise ConfigurationError(
            f"keras.optimizers.{name}: exclude_from_weight_decay is not taken over; allowed: "
            'settings={"variables.*bias": {"decay": False}} of the trainer'
        )
    return keras_spec(name, optimizer.get_config())


def _of_torch(optimizer: Any) -> Mapped:
    """Return the equivalent of a PyTorch optimizer; groups may differ only in rate and in whether they decay."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    name = type(optimizer).__name__
    if any("initial_lr" in group for group in groups):
        raise ConfigurationError(
            f"torch.optim.{name} has a learning-rate scheduler, which the shards do not run: leave it out, and give "
            'the trainer schedule={"kind": "cosine"} or another of parashard\'s schedules, whose lengths are in updates'
        )
    first = groups[0]
    for group in groups[1:]:
        for key in first.keys() - {"params", "param_names", "lr", "weight_decay"}:
            if group[key] != first[key]:
                raise ConfigurationError(
                    f"torch.optim.{name}: groups with different {key} have no equal here; they may differ in lr, and "
                    "in whether they have weight_decay"
                )
    rates = [number(group["lr"]) for group in groups]
    decays = [number(group.get("weight_decay", 0)) for group in groups]
    rate, decay = next(filter(None, rates), 0.0), max(decays)
    if not {*decays} <= {0.0, decay}:
        raise ConfigurationError(
            f"torch.optim.{name}: groups with weight_decay {', '.join(map(str, sorted({*decays})))} have no equal "
            "here; allowed is one value, and 0"
        )
    return Mapped(
        torch_spec(name, {**first, "lr": rate, "weight_decay": decay}),
        tuple(
            Group(
                tuple(group["params"]),
                tuple(group.get("param_names", ())),
                own_rate / rate if rate else 1.0,
                own_decay == decay,
            )
            for group, own_rate, own_decay in zip(groups, rates, decays, strict=True)
        ),
    )


def _arguments(call: functools.partial[Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, including defaults."""
    try:
        bound = inspect.signature(call.func).bind(*call.args, **call.keywords)
    except TypeError as error:
        raise ConfigurationError(f"optax.{call.func.__name__}: {error}") from None
    bound.apply_defaults()
    return dict(bound.arguments)
