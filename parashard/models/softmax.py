"""Softmax regression (multinomial logistic regression): one dense layer, a convex loss.

Owns its options. Knows no other model. Built by `parashard.models.build_model`.
"""

from __future__ import annotations

from parashard.data.base import DataSpec
from parashard.models.classifier import need_classes
from parashard.models.dense import DenseClassifier


class SoftmaxRegression(DenseClassifier):
    """Logits x W + b over the flattened inputs.

    Variables: "dense_0.weight", shape (features, classes), and "dense_0.bias", shape (classes,).

    Raises
    ------
    ConfigurationError
        The data has fewer than 2 classes.
    """

    def __init__(self, spec: DataSpec) -> None:
        need_classes(spec, "softmax")
        super().__init__(spec, hidden=(), activation="relu", dropout=0.0, seed=0)
