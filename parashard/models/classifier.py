"""The base of all classifiers: from logits to loss, gradients and metrics.

Owns the `Model` methods of classifiers; subclasses own the network from inputs to logits and its pullback. Knows no
layer and no option.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from parashard.data.base import Array, Batch, DataSpec
from parashard.errors import ConfigurationError
from parashard.models.layers import softmax_cross_entropy
from parashard.plan.variables import Variable

Pullback = Callable[[Array], dict[str, Array]]
"""From the gradient by the logits (which it may overwrite) to the gradient by every variable, in new arrays."""


class Classifier(ABC):
    """A model whose targets are class labels and whose loss is the mean softmax cross-entropy."""

    @abstractmethod
    def initial_variables(self) -> Mapping[str, Variable]:
        """Return the declared variables by name."""

    @abstractmethod
    def forward(
        self, variables: Mapping[str, Array], inputs: Array, step: int | None, xp: Any
    ) -> tuple[Array, Pullback]:
        """Return the logits, shape (n, classes) in the variables' dtype, and the pullback of their gradient.

        Parameters
        ----------
        step : int or None
            Keys dropout; None: an evaluation, nothing is dropped.
        """

    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float | Array, Mapping[str, Array]]:
        """Return the mean cross-entropy over the batch and its gradient by every variable, in new arrays."""
        logits, pull_back = self.forward(variables, batch.inputs, batch.step, xp)
        loss, gradient = softmax_cross_entropy(logits, batch.targets, xp)
        return loss, pull_back(gradient)  # not float(loss), which would synchronise a GPU

    def evaluate(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> Mapping[str, float]:
        """Return {"loss": mean cross-entropy, "accuracy": share of examples whose largest logit is the target's}."""
        logits, _ = self.forward(variables, batch.inputs, None, xp)
        loss, _ = softmax_cross_entropy(logits, batch.targets, xp)
        accuracy = (logits.argmax(axis=1) == batch.targets).mean()
        both = xp.stack((loss, accuracy)).tolist()  # one synchronisation
        return {"loss": both[0], "accuracy": both[1]}


def need_classes(spec: DataSpec, kind: str, instead: str = 'use model.kind = "mlp", which predicts values') -> None:
    """Raise ConfigurationError where the data has no classes for a model of this kind to distinguish."""
    if spec.classes == 0:
        raise ConfigurationError(
            f"model kind {kind!r} tells classes apart, and the data's targets are values (regression): {instead}, "
            'or say data.target = "class" if the labels are classes'
        )
    if spec.classes == 1:
        raise ConfigurationError(f"model kind {kind!r} needs data with at least 2 classes, found 1")
