"""The built-in models of layers: softmax regression, the multilayer perceptron and the convolutional network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from parashard.data.base import Array, Batch, DataSpec
from parashard.errors import ConfigurationError
from parashard.job.model_options import ActivationName, CnnOptions, MlpOptions
from parashard.layers.base import Layer, Pass, Pullback, Shape
from parashard.layers.dense import ACTIVATIONS, Dense, Dropout, Flatten
from parashard.layers.images import Conv2D, MaxPool2D
from parashard.metrics import Sums
from parashard.models.base import Model
from parashard.models.evaluation import MetricPart
from parashard.models.sequential import Sequential
from parashard.plan.embedding import Keys
from parashard.plan.variables import Float32s
from parashard.protocol.messages import NO_KEYS


def hidden_start(activation: ActivationName) -> str:
    """Return the initializer that keeps the variance of a hidden layer's signals: He's, or Glorot's for tanh."""
    return "glorot_uniform" if activation == "tanh" else "he_normal"


def dense_layers(hidden: Sequence[int], outputs: int, activation: ActivationName, dropout: float) -> list[Layer]:
    """Return layers: flattening, hidden dense layers, each with activation and dropout, and a dense output layer."""
    layers: list[Layer] = [Flatten()]
    for units in hidden:
        layers += [Dense(units, initializer=hidden_start(activation)), ACTIVATIONS[activation], Dropout(dropout)]
    return [*layers, Dense(outputs)]


class Classifier(Sequential):
    """Layers from inputs to the logits of a data set's classes, with the mean softmax cross-entropy as loss."""

    def __init__(self, layers: Sequence[Layer], spec: DataSpec, seed: int) -> None:
        super().__init__(layers, input_shape=spec.input_shape, loss="softmax_cross_entropy", metrics=["accuracy"])
        self.seed(seed)


def need_classes(spec: DataSpec, kind: str, instead: str = 'use model.kind = "mlp", which predicts values') -> None:
    """Raise ConfigurationError where the data has no classes for a model of this kind to distinguish."""
    if spec.classes == 0:
        raise ConfigurationError(
            f"model kind {kind!r} tells classes apart, and the data's targets are values (regression): {instead}, "
            'or say data.target = "class" if the labels are classes'
        )
    if spec.classes == 1:
        raise ConfigurationError(f"model kind {kind!r} needs data with at least 2 classes, found 1")


class SoftmaxRegression(Classifier):
    """Logits x W + b over the flattened inputs.

    Variables: "dense_0.weight", shape (features, classes), and "dense_0.bias", shape (classes,).
    """

    def __init__(self, spec: DataSpec) -> None:
        need_classes(spec, "softmax")
        super().__init__(dense_layers((), spec.classes, "relu", 0.0), spec, seed=0)


class Regressor(Sequential):
    """A model that predicts a number: y = mean + deviation * z, with output z and the scale of the training targets.

    The loss is the mean of (z - (y - mean) / deviation)^2: the mean squared error as a share of the targets' variance,
    so that a learning rate does not depend on the targets' unit. A model that always predicts the mean has loss 1 on
    the training examples; 1 - loss is R^2 there.
    """

    def __init__(self, layers: Sequence[Layer], spec: DataSpec, seed: int) -> None:
        super().__init__(
            layers, input_shape=spec.input_shape, loss="mean_squared_error", metrics=["mean_absolute_error"]
        )
        self.seed(seed)
        target = spec.preprocessing.target if spec.preprocessing is not None else None
        self._mean, self._deviation = 0.0, 1.0
        if target is not None and target.kind == "value":
            self._mean, self._deviation = target.mean, target.deviation

    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float | Array, Mapping[str, Array]]:
        """Return the mean squared error of the standardised targets, and its gradient by every variable."""
        return super().loss_and_gradients(variables, self._standardised(variables, batch), xp)

    def evaluate(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> Mapping[str, MetricPart]:
        """Return the loss, and in the targets' own unit "mean_squared_error" and "mean_absolute_error"."""
        found = cast(
            "Mapping[str, float | Sums]", super().evaluate(variables, self._standardised(variables, batch), xp)
        )
        loss, error = float(found["loss"]), float(found["mean_absolute_error"])
        return {
            "loss": loss,
            "mean_squared_error": loss * self._deviation**2,
            "mean_absolute_error": error * self._deviation,
        }

    def predict(self, values: Mapping[str, Float32s], inputs: Any, keys: Mapping[str, Keys] = NO_KEYS) -> Array:
        """Return the predictions in the targets' own unit, shape (examples, 1)."""
        return self._mean + self._deviation * super().predict(values, inputs, keys)

    def _standardised(self, variables: Mapping[str, Array], batch: Batch) -> Batch:
        """Return the batch with its targets in units of their deviation, in the variables' dtype."""
        dtype = next(iter(variables.values())).dtype
        return replace(batch, targets=(batch.targets.astype(dtype) - self._mean) / self._deviation)


def multilayer_perceptron(options: MlpOptions, spec: DataSpec, seed: int) -> Model:
    """Return the perceptron with the loss that the options name, or else the one that the data's targets call for."""
    if options.loss == "cross_entropy" or (options.loss is None and spec.classes):
        return MultilayerPerceptron(options, spec, seed)
    if spec.classes:
        raise ConfigurationError(
            f'model kind {options.kind!r} with loss "squared" predicts values, and the data has {spec.classes:,} '
            'classes; leave loss out to tell them apart, or say data.target = "value" if the labels are numbers to '
            "predict"
        )
    return Regressor(dense_layers(options.hidden, 1, options.activation, options.dropout), spec, seed)


class MultilayerPerceptron(Classifier):
    """Flattened inputs through the hidden layers of its options to logits.

    Variables: "dense_<i>.weight", shape (inputs, outputs), and "dense_<i>.bias", shape (outputs,), for the hidden
    layers and, last, the outputs.
    """

    def __init__(self, options: MlpOptions, spec: DataSpec, seed: int) -> None:
        need_classes(spec, f"{options.kind} with loss cross_entropy", "leave model.loss out to predict them")
        super().__init__(dense_layers(options.hidden, spec.classes, options.activation, options.dropout), spec, seed)


_POOL = MaxPool2D()


@dataclass(frozen=True)
class PooledConv2D(Conv2D):
    """A convolution and 2x2 max pooling, with the bias after the pooling.

    The maximum of sums with one bias is the sum of the maximum: the same function with a quarter of the work.
    """

    def output_shape(self, shape: Shape) -> Shape:
        return _POOL.output_shape(super().output_shape(shape))

    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
        convolution = Conv2D(self.channels, self.kernel, self.padding, bias=False)
        images, pull_images = convolution.apply(weights, x, at)
        output, pull_pooled = _POOL.apply({}, images, at)
        output += weights["bias"]

        def pull_back(gradient: Array, to_input: bool) -> tuple[Array | None, dict[str, Array]]:
            bias = gradient.sum(axis=(0, 1, 2))
            spread, _ = pull_pooled(gradient, True)
            assert spread is not None
            found, gradients = pull_images(spread, to_input)
            return found, gradients | {"bias": bias}

        return output, pull_back


class ConvolutionalNetwork(Classifier):
    """Images through stages of convolution, pooling, bias and activation, then dense layers, to logits.

    Pooling goes before bias and activation, which is the same function for the monotone ReLU and tanh with a quarter
    of the work (and another, equally good network for GELU).

    Variables: "conv_<i>.weight", shape (kernel * kernel * channels in, channels out), rows ordered (y, x, channel),
    "conv_<i>.bias", shape (channels out,), and "dense_<i>.weight" and "dense_<i>.bias" of the dense layers.
    """

    def __init__(self, options: CnnOptions, spec: DataSpec, seed: int) -> None:
        need_classes(spec, options.kind)
        if len(spec.input_shape) not in (2, 3):
            raise ConfigurationError(
                f"model kind 'cnn' needs inputs of shape (height, width) or (height, width, channels), "
                f"found {spec.input_shape}"
            )
        layers: list[Layer] = []
        shape = spec.input_shape
        for stage, channels in enumerate(options.channels):
            start = hidden_start(options.activation)
            convolution = PooledConv2D(channels, options.kernel, options.padding, initializer=start)
            try:
                shape = convolution.output_shape(shape)
            except ConfigurationError:
                raise ConfigurationError(
                    f"model kind 'cnn': stage {stage} of {len(options.channels)} has no pixel left of inputs of shape "
                    f"{spec.input_shape} with kernel = {options.kernel} and padding = {options.padding!r}; use fewer "
                    "channels entries, a smaller kernel or padding 'same'"
                ) from None
            layers += [convolution, ACTIVATIONS[options.activation]]
        layers += dense_layers(options.hidden, spec.classes, options.activation, options.dropout)
        super().__init__(layers, spec, seed)
