"""What of a PyTorch module can be trained here: its names, the kinds of its parameters and buffers, what is refused.

Knows no step. Called by `parashard.torch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from parashard.errors import ConfigurationError
from parashard.models.state import FROZEN, checked_kind
from parashard.models.torch_arrays import array_of, torch
from parashard.plan.state import AVERAGE, COUNTER

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def check(module: Any) -> None:
    """Refuse what cannot be trained."""
    if not isinstance(module, torch.nn.Module):
        raise ConfigurationError(f"module() returned {type(module).__name__}; due is a torch.nn.Module")
    for name, tensor in named([*module.named_parameters(), *module.named_buffers()]).items():
        if torch.nn.parameter.is_lazy(tensor):
            raise ConfigurationError(
                f"{name!r} of a lazy layer has no shape yet: call the module once on an example before it is given"
            )
    for name, parameter in module.named_parameters():
        if parameter.dtype not in FLOATING:
            raise ConfigurationError(f"parameter {name!r} is {parameter.dtype}; allowed: real floating point")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigurationError(f"{type(module).__name__} has no parameter that needs a gradient")


def kinds_of(module: torch.nn.Module, declared: Mapping[str, str]) -> dict[str, str]:
    """Return what each parameter and buffer is: "" with a gradient, "frozen", or a kind of state; without constants.

    Raises
    ------
    ConfigurationError
        If a buffer that is declared does not exist, or cannot be what it is declared; or if a running average has no
        fixed factor.
    """
    parameters, buffers = named(module.named_parameters()), named(module.named_buffers())
    kinds = {name: "" if parameter.requires_grad else FROZEN for name, parameter in parameters.items()}
    kinds |= {name: FROZEN for name, buffer in buffers.items() if buffer.is_floating_point()}
    for prefix, layer in module.named_modules():
        if isinstance(layer, torch.nn.modules.batchnorm._NormBase) and layer.running_mean is not None:
            within = plain_name(f"{prefix}." if prefix else "")
            if layer.momentum is None:
                raise ConfigurationError(
                    f"{within}momentum is None: an average over all batches, each with a weight of its own; allowed: a "
                    "number, such as 0.1"
                )
            average = f"{AVERAGE}:{layer.momentum}" if layer.momentum else FROZEN
            kinds |= {f"{within}running_mean": average, f"{within}running_var": average}
            kinds[f"{within}num_batches_tracked"] = COUNTER
    for name, kind in declared.items():
        if name not in buffers:
            raise ConfigurationError(f"state: {name!r} is none of the buffers: {', '.join(buffers) or 'none'}")
        kinds[name] = checked_kind(name, kind, array_of(buffers[name]).dtype)
    return kinds


def tensors_of(module: torch.nn.Module, kinds: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that have a kind, by name."""
    found = named([*module.named_parameters(), *module.named_buffers()])
    return {name: tensor for name, tensor in found.items() if name in kinds}


def named(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return named tensors by their plain names."""
    return {plain_name(name): tensor for name, tensor in tensors}


def plain_name(name: str) -> str:
    """Return a name without what `torch.compile` puts before it."""
    return name.replace("_orig_mod.", "")


Place = tuple[dict[str, Any], str]
"""Where a module has a tensor: one of its dicts, and the name there."""


def places_of(module: torch.nn.Module) -> dict[str, list[Place]]:
    """Return all places of each parameter and buffer, by the first of its names as `plain_name` has it."""
    names: dict[int, str] = {}
    places: dict[str, list[Place]] = {}
    for prefix, within in module.named_modules():
        for tensors in (within._parameters, within._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    name = names.setdefault(id(tensor), plain_name(f"{prefix}.{key}" if prefix else key))
                    places.setdefault(name, []).append((tensors, key))
    return places


@contextmanager
def lent(tensors: dict[str, torch.Tensor], places: Mapping[str, Sequence[Place]]) -> Iterator[None]:
    """Have a module's tensors replaced for a while; those that it sets anew are in `tensors` then.

    As `torch.func.functional_call` does it, which looks for every tensor by its name in every step.
    """
    own = [(holder, key, holder[key]) for name in tensors for holder, key in places[name]]
    try:
        for name, tensor in tensors.items():
            for holder, key in places[name]:
                holder[key] = tensor
        yield
        for name in tensors:
            holder, key = places[name][0]
            tensors[name] = holder[key]
    finally:
        for holder, key, tensor in own:
            holder[key] = tensor
