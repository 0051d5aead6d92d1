"""The contract of a model: arithmetic only. A model holds no weights and knows no shard, step plan or device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from parashard.data.base import Array, Batch
from parashard.plan.variables import Float32s, Variable

Initial = Variable | Float32s | tuple[Variable, Float32s]
"""What a model starts from under one name."""


class Model(Protocol):
    """A loss with hand-written gradients.

    A user's own model is an object with these three methods, returned by the factory that the job file names as
    `module:factory`. The factory is called with the job's `DataSpec` and the other keys of the `[model]` table.
    """

    def initial_variables(self) -> Mapping[str, Initial]:
        """Return the model's variables by name: declared (drawn from the job's seed), arrays to start from, or both."""

    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float | Array, Mapping[str, Array]]:
        """Return the mean loss over a batch and its gradient by every variable.

        Parameters
        ----------
        variables : mapping of str to array of float32
            Current values, in the namespace `xp`; not to be changed or kept: the memory is reused for a later step.
            Gradients may be views of it.
        batch : Batch
            `batch.step` seeds what is random, so that a step computed twice gives the same gradient.
        xp : module
            `numpy` or `cupy`.

        Returns
        -------
        loss : float, or array of shape ()
            On a GPU an array is faster: it is copied to the host with the gradients; a float costs a synchronisation.
        gradients : mapping of str to array
            By variable, in its shape, of floating point: one for each variable that is not frozen. None is a gradient
            of zeros, which is not sent. State without a gradient (`Variable.state`) has what its kind says instead: the
            batch's value, or what is added. The caller owns them: they may still be pushed while the next step is
            computed, so a model must not write into them again.
        """

    def evaluate(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> Mapping[str, float]:
        """Return metrics that are means over the batch's examples, such as {"loss": 0.1, "accuracy": 0.97}."""


@runtime_checkable
class Audited(Protocol):
    """A model whose final weights show whether every step was applied exactly once (the oracles)."""

    def audit(self, variables: Mapping[str, Float32s], epochs: int) -> Mapping[str, int]:
        """Return counts of violations by name, such as {"ledger_wrong": 0}; they go into the job's report."""
