"""Losses of PyTorch that are not means over examples, and how they combine over batches.

`reduction="sum"` adds up; cross entropy and the negative log likelihood divide by the number of targets that are not
`ignore_index`, each weighted by its class. Invariant: loss(all) = sum(share * loss(piece)) over the pieces of a
batch. A user's own function is not inspected.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from parashard.errors import WrongModel
from parashard.metrics import Added, Metric, Sums
from parashard.models.user_errors import line_of, named_with_line

_DIVIDING: tuple[Any, ...] = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)
_DIVIDING_FUNCTIONS = (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss)
IGNORED = -100
LossSums = Callable[[float], Sums]
"""PyTorch's default of `ignore_index`."""


class LossKind:
    """How a loss that is not a mean over examples combines over batches."""

    def __init__(self, *, adds: bool, weight: torch.Tensor | None = None, ignore_index: int = IGNORED) -> None:
        self.adds = adds
        self._weight, self._ignore_index = weight, ignore_index

    def share(self, piece: torch.Tensor, whole: torch.Tensor) -> float:
        """Return the factor of a piece's loss in that of the whole batch, from the targets of both."""
        if self.adds:
            return 1.0
        return self._counted(piece) / (self._counted(whole) or math.nan)

    def counts_rows(self, targets: torch.Tensor) -> bool:
        """Tell whether each example counts the same, judged by a part of a batch.

        Single targets of -100, PyTorch's default of `ignore_index`, are rare: only a part with one needs the batch.
        """
        if targets.is_floating_point():
            return True
        if self._weight is not None or targets.dim() > 1 or self._ignore_index != IGNORED:
            return False
        return not bool((targets == IGNORED).any())

    def sums(self, loss: float, targets: torch.Tensor) -> Sums:
        """Return a batch's state, which adds up with those of others."""
        counted = 1.0 if self.adds else self._counted(targets)
        return Sums((Added if self.adds else Metric)("loss"), [loss * counted if counted else 0.0, counted])

    def sums_unless_mean(self, targets: torch.Tensor) -> LossSums | None:
        """Return a function of a batch's loss to its state, or None if the loss is the mean over these targets."""
        differs = self.adds or targets.ndim > 1 or self.differs(targets)
        return functools.partial(self.sums, targets=targets) if differs else None

    def differs(self, targets: torch.Tensor) -> str:
        """Return the divisor of the loss if it is not the number of targets; "" if it is, or if there is none."""
        if self.adds or targets.is_floating_point():
            return ""
        if self._weight is not None:
            return "the weights of the classes"
        return "the targets that are not ignored" if bool((targets == self._ignore_index).any()) else ""

    def _counted(self, targets: torch.Tensor) -> float:
        if targets.is_floating_point():  # probabilities of classes: each example counts, whatever its weight
            return float(len(targets))
        counting = targets[targets != self._ignore_index]
        return float(len(counting) if self._weight is None else self._weight.to(targets.device)[counting].sum())


def loss_kind(loss: Any) -> LossKind | None:
    """Return the kind of a PyTorch loss; None: it is a mean over examples, or not PyTorch's."""
    if isinstance(loss, torch.nn.modules.loss._Loss):
        if type(loss).forward.__module__ != torch.nn.modules.loss.__name__:
            return None
        given: dict[str, Any] = {name: getattr(loss, name, None) for name in ("reduction", "weight", "ignore_index")}
        divides = isinstance(loss, _DIVIDING)
    else:
        function = loss.func if isinstance(loss, functools.partial) else loss
        if getattr(function, "__module__", None) != torch.nn.functional.__name__:
            return None
        parameters = inspect.signature(function).parameters
        given = {name: parameter.default for name, parameter in parameters.items()}
        given |= loss.keywords if isinstance(loss, functools.partial) else {}
        divides = function in _DIVIDING_FUNCTIONS
    if given.get("reduction") == "sum":
        return LossKind(adds=True)
    if divides and given.get("reduction") == "mean":
        return LossKind(adds=False, weight=given.get("weight"), ignore_index=given["ignore_index"])
    return None


def called(loss: Any, outputs: Any, targets: Any, *weights: Any) -> Any:
    """Return a loss; an error in PyTorch's own code, which names no line of the user's, gets the shapes."""
    try:
        return loss(outputs, targets, *weights)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if line_of(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        shapes = f"outputs {_shape_of(outputs)} and targets {_shape_of(targets)}"
        raise WrongModel(f"the loss of {shapes} raised {named_with_line(error)}") from error


def _shape_of(value: Any) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"({type(value).__name__})"
