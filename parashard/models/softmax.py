"""Softmax regression (multinomial logistic regression): one dense layer, a convex loss.

Knows no other model. Built by `parashard.models.building`.
"""

from __future__ import annotations

from parashard.data.base import DataSpec
from parashard.models.perceptron import Classifier, dense_layers, need_classes


class SoftmaxRegression(Classifier):
    """Logits x W + b over the flattened inputs.

    Variables: "dense_0.weight", shape (features, classes), and "dense_0.bias", shape (classes,).

    Raises
    ------
    ConfigurationError
        The data has fewer than 2 classes.
    """

    def __init__(self, spec: DataSpec) -> None:
        need_classes(spec, "softmax")
        super().__init__(dense_layers((), spec.classes, "relu", 0.0), spec, seed=0)
