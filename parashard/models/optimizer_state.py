"""OptimizerState: what an optimizer has done, as models of frameworks take it and give it."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

from parashard.plan.optimizers import OptimizerSpec
from parashard.plan.slots import Slots


class OptimizerState(NamedTuple):
    """How many updates were done, and the slots that they have left, of whole variables."""

    updates: int
    slots: Slots


@runtime_checkable
class KeepsOptimizer(Protocol):
    """A model whose framework's own object has an optimizer, such as a compiled Keras model."""

    def own_optimizer(self, own: Any) -> Any:
        """Return the optimizer of an object that `own` returned; None: it has none."""

    def restore_optimizer(self, own: Any, spec: OptimizerSpec, state: OptimizerState) -> None:
        """Give it the state of the shards' optimizer, which is of the same rule."""


@runtime_checkable
class ReadsOptimizer(Protocol):
    """A model that reads the state of its framework's optimizers."""

    def optimizer_state(self, optimizer: Any, spec: OptimizerSpec) -> OptimizerState | None:
        """Return the state of one that computes the same updates as `spec`; None: it is new."""
