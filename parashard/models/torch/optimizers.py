"""Conversion of the shards' slots to the state of a PyTorch optimizer, and the reverse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from parashard.errors import ConfigurationError
from parashard.models.base import OptimizerState
from parashard.plan.optimizers import OptimizerSpec
from parashard.plan.variables import Float32s

_KEPT: Mapping[str, Mapping[str, str]] = {
    "sgd": {},
    "momentum": {"velocity": "momentum_buffer"},
    "nesterov": {"velocity": "momentum_buffer"},
    "adagrad": {"accumulator": "sum"},
    "adam": {"m": "exp_avg", "v": "exp_avg_sq"},
    "adamw": {"m": "exp_avg", "v": "exp_avg_sq"},
    "rmsprop": {"mean_square": "square_avg"},
    "rmsprop_momentum": {"mean_square": "square_avg", "velocity": "momentum_buffer"},
    "rmsprop_centered": {"mean_square": "square_avg", "velocity": "momentum_buffer", "mean": "grad_avg"},
}
"""By rule and slot: PyTorch's name in a parameter's state."""


def state_dict(
    module: torch.nn.Module, names: Mapping[str, str], groups: Sequence[tuple[Sequence[str], float, bool]],
    spec: OptimizerSpec, state: OptimizerState,
) -> dict[str, Any]:  # fmt: skip
    """Return the state for `load_state_dict` of the PyTorch optimizer of this rule; no groups: a single one."""
    parameters = {names[name]: parameter for name, parameter in module.named_parameters()}
    made = _made(spec, [
        {"params": [parameters[name] for name in of_group], "lr": spec.learning_rate * factor}
        | ({} if decay else {"weight_decay": 0.0})
        for of_group, factor, decay in groups or [(list(parameters), 1.0, True)]
    ])  # fmt: skip
    for name, parameter in parameters.items():
        entry = {
            theirs: torch.tensor(state.slots[slot][name]).reshape(parameter.shape).to(parameter.dtype)
            for slot, theirs in _KEPT[spec.rule].items()
            if name in state.slots.get(slot, {})
        }
        if not spec.plain().get("momentum"):
            entry.pop("momentum_buffer", None)
        if entry and spec.rule not in ("momentum", "nesterov"):
            entry["step"] = torch.tensor(float(state.updates))
        if entry and parameter.requires_grad:
            made.state[parameter] = entry
    return made.state_dict()  # type: ignore[no-any-return]


def state_of(optimizer: Any, names: Mapping[int, str], spec: OptimizerSpec) -> OptimizerState | None:
    """Return the state of an optimizer, by the names of its parameters; None: it has taken no step."""
    entries = {parameter: entry for parameter, entry in optimizer.state.items() if entry}
    if not entries:
        return None
    named = dict(names)
    for group in optimizer.param_groups:
        named |= {id(parameter): name for parameter, name in zip(group["params"], group.get("param_names", ()))}  # noqa: B905
    kind = f"torch.optim.{type(optimizer).__name__}"
    if any(id(parameter) not in named for parameter in entries):
        raise ConfigurationError(
            f"{kind} has taken steps with parameters that are not those of the model: give both the same module, or a "
            "new optimizer"
        )
    steps = {int(entry["step"]) for entry in entries.values() if "step" in entry}
    if len(steps) > 1:
        raise ConfigurationError(
            f"{kind}: its parameters have taken {', '.join(map(str, sorted(steps)))} steps; an optimizer that goes on "
            "here has taken as many with each: give a new one"
        )
    slots: dict[str, dict[str, Float32s]] = {}
    for slot, theirs in _KEPT[spec.rule].items():
        slots[slot] = {
            named[id(parameter)]: np.atleast_1d(entry[theirs].detach().cpu().float().numpy().copy())
            for parameter, entry in entries.items()
            if entry.get(theirs) is not None
        }
    return OptimizerState(next(iter(steps), 0), slots)


def _made(spec: OptimizerSpec, groups: list[dict[str, Any]]) -> Any:
    own, optim = spec.plain(), torch.optim
    common = {"lr": spec.learning_rate, "weight_decay": spec.weight_decay}
    other = [name for name in ("decoupled_weight_decay", "rate_in_velocity", "epsilon_in_root") if own.get(name)]
    if spec.rule not in _KEPT or other:
        setting = f" with {other[0]}" if other else ""
        raise ConfigurationError(
            f"PyTorch has no optimizer that computes ps.{type(spec).__name__}{setting}: its state has no equal there"
        )
    match spec.kind:
        case "sgd":
            return optim.SGD(groups, **common)
        case "momentum" | "nesterov":
            return optim.SGD(groups, momentum=own["momentum"], nesterov=spec.kind == "nesterov", **common)
        case "adagrad":
            first, epsilon = own["initial_accumulator"], own["epsilon"]
            return optim.Adagrad(groups, initial_accumulator_value=first, eps=epsilon, **common)
        case "rmsprop":
            more = {"momentum": own["momentum"], "centered": own["centered"]}
            return optim.RMSprop(groups, alpha=own["rho"], eps=own["epsilon"], **more, **common)
    kind = optim.Adam if spec.kind == "adam" else optim.AdamW
    return kind(groups, betas=(own["beta1"], own["beta2"]), eps=own["epsilon"], **common)
