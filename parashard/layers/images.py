"""Layers of images: convolution and pooling. An image is (height, width, channels), or (height, width) of one channel.

Owns the layers; the arithmetic is in `parashard.layers.convolution`. Called by users and by the built-in models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from parashard.data.base import Array
from parashard.errors import ConfigurationError
from parashard.layers.base import Layer, Pass, Pullback, Shape, Start, need_count, need_start, start_of
from parashard.layers.convolution import Window, columns, columns_pull_back, max_pool, max_pool_pull_back, window
from parashard.models.options import PaddingName
from parashard.plan.variables import Variable


@dataclass(frozen=True)
class Conv2D(Layer):
    """Convolution (cross-correlation, as is usual in networks) by a square window that slides by one pixel.

    Variables: "weight", shape (kernel * kernel * channels in, channels), rows ordered (y, x, channel in), and "bias",
    shape (channels,), which does not decay.

    Parameters
    ----------
    channels : int
        Of the output.
    kernel : int
        Height and width of the window.
    padding : {"same", "valid"}
        "same": zeros around keep the image's size; "valid": none.
    bias, initializer
        As in `Dense`.
    """

    name: ClassVar[str] = "conv"

    channels: int
    kernel: int = 3
    padding: PaddingName = "same"
    bias: bool = True
    initializer: Start = "glorot_uniform"

    def __post_init__(self) -> None:
        need_count("Conv2D", "channels", self.channels)
        need_count("Conv2D", "kernel", self.kernel)
        need_start("Conv2D", self.initializer)
        if self.padding not in ("same", "valid"):
            raise ConfigurationError(f"Conv2D: padding is 'same' or 'valid', found {self.padding!r}")

    @property
    def _window(self) -> Window:
        return window(self.kernel, self.padding)

    def output_shape(self, shape: Shape) -> Shape:
        """Return the shape of the convolution."""
        height, width, _ = _image(shape)
        height, width = self._window.output_length(height), self._window.output_length(width)
        if height < 1 or width < 1:
            raise ConfigurationError(f"a window of {self.kernel} pixels does not fit into an image of shape {shape}")
        return height, width, self.channels

    def variables(self, shape: Shape) -> dict[str, Variable]:
        """Return the declared weight and bias."""
        pixels, before = self.kernel**2, _image(shape)[2]
        start = start_of(self.initializer, pixels * before, pixels * self.channels)
        declared = {"weight": Variable("weight", (pixels * before, self.channels), start)}
        return declared | ({"bias": Variable("bias", (self.channels,), decay=False)} if self.bias else {})

    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
        """Return the convolution, shape (n, height', width', channels), and the pullback."""
        xp, weight, over = at.xp, weights["weight"], self._window
        images = x.reshape(len(x), *_image(x.shape[1:]))
        unrolled = columns(images, over, xp)
        output = xp.matmul(unrolled, weight)
        if self.bias:
            output += weights["bias"]

        def pull_back(gradient: Array, to_input: bool) -> tuple[Array | None, dict[str, Array]]:
            gradient = gradient.reshape(len(unrolled), -1)
            gradients = {"weight": xp.matmul(unrolled.T, gradient)}
            if self.bias:
                gradients["bias"] = gradient.sum(axis=0)
            if not to_input:
                return None, gradients
            return columns_pull_back(gradient, weight, images.shape, over, xp).reshape(x.shape), gradients

        return output.reshape(len(x), *self.output_shape(x.shape[1:])), pull_back


@dataclass(frozen=True)
class MaxPool2D(Layer):
    """The maximum of every 2x2 block; an odd last row or column is left out.

    Of equal maxima the first one gets the gradient.
    """

    name: ClassVar[str] = "pool"

    def output_shape(self, shape: Shape) -> Shape:
        """Return the shape with half the height and width."""
        height, width, channels = _image(shape)
        if height < 2 or width < 2:
            raise ConfigurationError(f"an image of shape {shape} has no block of 2x2 pixels")
        return height // 2, width // 2, channels

    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
        """Return the maxima, and the pullback."""
        xp = at.xp
        pooled, saved = max_pool(x.reshape(len(x), *_image(x.shape[1:])), xp)
        return pooled, lambda gradient, to_input: (max_pool_pull_back(gradient, saved, xp).reshape(x.shape), {})


def _image(shape: Shape) -> tuple[int, int, int]:
    if len(shape) not in (2, 3):
        raise ConfigurationError(f"an image has the shape (height, width) or (height, width, channels), found {shape}")
    return shape[0], shape[1], (*shape, 1)[2]
