"""Trainable tensors of a PyTorch module: their names, the kinds of parameters and buffers, and checks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from parashard.errors import ConfigurationError, WrongModel
from parashard.models.framework import FROZEN, NOT_IN_PLACE, checked_kind
from parashard.models.torch.arrays import array_of, torch
from parashard.plan.state import AVERAGE, COUNTER

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")
"""Wrappers that compute a module on several devices, which is the task of a strategy here."""


def check(module: Any) -> None:
    """Refuse a module that cannot be trained."""
    if not isinstance(module, torch.nn.Module):
        raise ConfigurationError(f"module() returned {type(module).__name__}; due is a torch.nn.Module")
    for path, within in module.named_modules():
        _check_module(within, plain_name(f"{path}." if path else ""))
    for name, tensor in named([*module.named_parameters(), *module.named_buffers()]).items():
        if torch.nn.parameter.is_lazy(tensor):
            raise ConfigurationError(
                f"{name!r} of a lazy layer has no shape yet: call the module once on an example before it is given"
            )
        if tensor.is_meta:
            raise ConfigurationError(f"{name!r} is on the meta device and has no values: make the module on a real one")
    for name, parameter in module.named_parameters():
        _check_parameter(name, parameter)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigurationError(f"{type(module).__name__} has no parameter that needs a gradient")


def _check_module(module: torch.nn.Module, prefix: str) -> None:
    if type(module).__name__ in WRAPPERS:
        raise ConfigurationError(
            f"{type(module).__name__} computes a module in several places, which a strategy does here: give the module "
            "in it"
        )
    for name, value in vars(module).items():
        if isinstance(value, torch.Generator):
            raise ConfigurationError(
                f"{prefix}{name} is a generator of the module's own, and a step that is computed again would draw "
                "other numbers: draw from PyTorch's default generator, which is seeded before each step"
            )


def _check_parameter(name: str, parameter: torch.nn.Parameter) -> None:
    if parameter.dtype not in FLOATING:
        raise ConfigurationError(f"parameter {name!r} is {parameter.dtype}; allowed: real floating point")
    if parameter.layout != torch.strided:
        raise ConfigurationError(f"parameter {name!r} is {parameter.layout}; allowed: dense, such as by to_dense()")
    if parameter._post_accumulate_grad_hooks:
        raise ConfigurationError(
            f"parameter {name!r} has a hook of register_post_accumulate_grad_hook, and the shards accumulate "
            "gradients: register_hook is called here, too"
        )


def kinds_of(module: torch.nn.Module, declared: Mapping[str, str]) -> dict[str, str]:
    """Return the kind of each parameter and buffer but constants: "" with a gradient, "frozen", or a kind of state."""
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
    """Return a name without the prefix that `torch.compile` adds."""
    return name.replace("_orig_mod.", "")


Place = tuple[dict[str, Any], str]
"""Location of a tensor in a module: one of its dicts, and the name there."""


def places_of(module: torch.nn.Module) -> dict[str, list[Place]]:
    """Return all places of each parameter and buffer, by the first of its plain names."""
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
def use_tensors(tensors: dict[str, torch.Tensor], places: Mapping[str, Sequence[Place]]) -> Iterator[None]:
    """Replace a module's tensors within the `with` block; on exit `tensors` has those that the module assigned.

    Like `torch.func.functional_call`, but that looks up every tensor by name in every step.
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


def copied(module: torch.nn.Module) -> torch.nn.Module:
    """Return a deep copy, also of a module with computed tensors, such as a pruned one.

    Hooks of parameters, which PyTorch does not copy, are registered on the copy.
    """
    computed = {
        id(value): value.detach().clone()
        for within in module.modules()
        for value in vars(within).values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    }
    made = copy.deepcopy(module, computed)
    for own, of_copy in zip(module.parameters(), made.parameters(), strict=True):
        for hook in (own._backward_hooks or {}).values():
            of_copy.register_hook(hook)
    return made


def compute_again(module: torch.nn.Module) -> None:
    """Recompute the tensors that PyTorch's own hooks derive from parameters: pruning and the old weight norm."""
    with torch.no_grad():
        for within in module.modules():
            for hook in within._forward_pre_hooks.values():
                if type(hook).__module__.startswith("torch.nn.utils."):
                    hook(within, ())


Tensors = Mapping[str, torch.Tensor]
Modules = Iterable[tuple[str, torch.nn.Module]]


class WriteDetector:
    """Detects writes of a step to a module's tensors and numbers.

    Writes to `trained` and `constants` are detected by version counters. `frozen` tensors, whose copies the module
    uses, are compared by value; on a GPU, where that would wait, only if the version counter of the copy, in `copies`,
    changed. `is_first` also detects writes through `.data` and numbers that `forward` counts, at the cost of copies.
    """

    def __init__(
        self,
        trained: Tensors,
        constants: Tensors,
        frozen: Tensors,
        modules: Modules,
        *,
        is_first: bool,
        copies: Tensors | None = None,
    ) -> None:
        self._trained, self._constants, self._frozen = trained, constants, frozen
        self._modules, self._copies = modules, copies
        self._versions = {name: tensor._version for name, tensor in {**trained, **constants, **(copies or {})}.items()}
        self._first = {name: tensor.detach().clone() for name, tensor in trained.items()} if is_first else {}
        self._counted = numbers_in(modules) if is_first else {}

    def check(self, tensors: Tensors) -> None:
        """Raise WrongModel for a forbidden write, and warn of counted numbers; `tensors` are those after the step."""
        written = [name for name, tensor in self._trained.items() if tensor._version != self._versions[name]]
        written += [name for name, before in self._first.items() if not torch.equal(self._trained[name], before)]
        if written:
            raise WrongModel(f"parameter {written[0]!r} is written in place while a step is computed: {NOT_IN_PLACE}")
        written = [
            name
            for name, before in self._constants.items()
            if tensors[name] is not before or before._version != self._versions[name]
        ]
        written += [
            name
            for name, before in self._frozen.items()
            if self._may_differ(name, tensors[name]) and not torch.equal(tensors[name], before)
        ]
        if written:
            all_before = {**self._constants, **self._frozen}
            said = {name: "average:0.1" if all_before[name].is_floating_point() else "counter" for name in written}
            raise WrongModel(
                f"{', '.join(map(repr, written))}: written while a step is computed, and without a gradient to push; "
                f"say how: state={said}, where 'average:M' is a running average ('average:1' keeps the newest), "
                "'counter' counts, and 'sum' is any other change"
            )
        if self._counted:
            warn_of_counting(self._counted, numbers_in(self._modules))
        turned = [name for name, tensor in self._trained.items() if not tensor.requires_grad]
        turned += [name for name in (*self._frozen, *self._constants) if tensors[name].requires_grad]
        if turned:
            raise WrongModel(
                f"requires_grad of {turned[0]!r} is changed while a step is computed: set it before fit, which reads "
                "it as it begins"
            )

    def _may_differ(self, name: str, after: torch.Tensor) -> bool:
        """Tell whether a frozen tensor may have been written; always True on the host, where comparing is cheap."""
        return self._copies is None or after is not self._copies[name] or after._version != self._versions[name]


def numbers_in(modules: Iterable[tuple[str, torch.nn.Module]]) -> dict[str, float]:
    """Return the Python numbers among modules' public attributes, by name."""
    return {
        f"{prefix}{name}": value
        for prefix, within in modules
        for name, value in vars(within).items()
        if type(value) in (int, float) and not name.startswith("_")
    }


def warn_of_counting(before: Mapping[str, float], after: Mapping[str, float]) -> None:
    """Warn of Python numbers that a step changed: they are not state of the model."""
    changed = [name for name, value in before.items() if after.get(name) != value]
    if changed:
        warnings.warn(
            f"forward changes {changed[0]!r} of the module, which is no buffer: each worker has a number of its own, "
            f"and none is saved; register_buffer and state={{{changed[0]!r}: 'counter'}} make one of them",
            stacklevel=2,
        )
