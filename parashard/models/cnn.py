"""Convolutional network: stages of convolution, 2x2 max pooling and activation, then dense layers.

Owns its options and the variables `conv_<i>.weight` and `conv_<i>.bias`. Built by `parashard.models.building`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parashard.data.base import Array, DataSpec
from parashard.errors import ConfigurationError
from parashard.layers.activations import ACTIVATIONS
from parashard.layers.base import Layer, Pass, Pullback, Shape
from parashard.layers.images import Conv2D, MaxPool2D
from parashard.models.options import CnnOptions
from parashard.models.perceptron import Classifier, dense_layers, hidden_start, need_classes

_POOL = MaxPool2D()


@dataclass(frozen=True)
class PooledConv2D(Conv2D):
    """A convolution and 2x2 max pooling, with the bias after the pooling.

    The maximum of sums with one bias is the sum of the maximum: the same function with a quarter of the work.
    """

    def output_shape(self, shape: Shape) -> Shape:
        """Return the shape of the pooled convolution."""
        return _POOL.output_shape(super().output_shape(shape))

    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
        """Return the pooled convolution with its bias, and the pullback."""
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

    Parameters
    ----------
    options : CnnOptions
    spec : DataSpec
        `input_shape` is (height, width) or (height, width, channels).
    seed : int
        The job's; keys the dropout masks.

    Raises
    ------
    ConfigurationError
        The data has fewer than 2 classes, is no image, or is too small for the stages.
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
