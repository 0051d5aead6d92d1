"""What a step of a PyTorch module must leave as it is: writes that the shards would lose are refused by name.

Knows no step and no loss. Called by `parashard.torch`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import torch

from parashard.models.framework import NOT_IN_PLACE, WrongModel

Tensors = Mapping[str, torch.Tensor]
Modules = Iterable[tuple[str, torch.nn.Module]]


class Writes:
    """Tensors and numbers of a module before a step.

    Parameters
    ----------
    trained, constants, frozen : mapping of str to Tensor
        Parameters, buffers that are no variables, and variables that do not change.
    modules : iterable of (str, Module)
        The module and all within it, by the beginning of their tensors' names.
    is_first : bool
        Whether to look for writes through `.data` and for numbers that `forward` counts, too, which costs copies.
    """

    def __init__(
        self, trained: Tensors, constants: Tensors, frozen: Tensors, modules: Modules, *, is_first: bool
    ) -> None:
        self._trained, self._constants, self._frozen = trained, constants, frozen
        self._modules = modules
        self._versions = {name: tensor._version for name, tensor in {**trained, **constants}.items()}
        self._first = {name: tensor.detach().clone() for name, tensor in trained.items()} if is_first else {}
        self._counted = numbers_in(modules) if is_first else {}

    def check(self, tensors: Tensors, buffers: Tensors) -> None:
        """Compare with the variables and buffers after the step.

        Raises
        ------
        WrongModel
            If the step has written what it may not, or has changed `requires_grad`.
        """
        written = [name for name, tensor in self._trained.items() if tensor._version != self._versions[name]]
        written += [name for name, before in self._first.items() if not torch.equal(self._trained[name], before)]
        if written:
            raise WrongModel(f"parameter {written[0]!r} is written in place while a step is computed: {NOT_IN_PLACE}")
        written = [
            name
            for name, before in self._constants.items()
            if buffers[name] is not before or before._version != self._versions[name]
        ]
        written += [name for name, before in self._frozen.items() if not torch.equal(tensors[name], before)]
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
        turned += [name for name in self._frozen if tensors[name].requires_grad]
        if turned:
            raise WrongModel(
                f"requires_grad of {turned[0]!r} is changed while a step is computed: set it before fit, which reads "
                "it as it begins"
            )


def numbers_in(modules: Iterable[tuple[str, torch.nn.Module]]) -> dict[str, float]:
    """Return the numbers of Python that modules have as attributes, by name."""
    return {
        f"{prefix}{name}": value
        for prefix, within in modules
        for name, value in vars(within).items()
        if type(value) in (int, float) and not name.startswith("_")
    }


def warn_of_counting(before: Mapping[str, float], after: Mapping[str, float]) -> None:
    """Warn of numbers that a step has changed, which are no state of the model."""
    changed = [name for name, value in before.items() if after.get(name) != value]
    if changed:
        warnings.warn(
            f"forward changes {changed[0]!r} of the module, which is no buffer: each worker has a number of its own, "
            f"and none is saved; register_buffer and state={{{changed[0]!r}: 'counter'}} make one of them",
            stacklevel=2,
        )
