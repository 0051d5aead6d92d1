"""Convolution and pooling of images of shape (height, width, channels), or (height, width) for one channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from parashard.data.base import Array
from parashard.errors import ConfigurationError
from parashard.job.model_options import PaddingName
from parashard.layers.base import Layer, Pass, Pullback, Shape, Start, need_start, start_of
from parashard.plan.variables import Variable
from parashard.process.arguments import checked_whole


@dataclass(frozen=True)
class Window:
    """A square window with stride 1 over an image that is zero-padded on both axes."""

    kernel: int
    before: int
    after: int

    def output_length(self, length: int) -> int:
        """Return the number of window positions along an axis of `length` pixels; < 1 if it does not fit."""
        return length + self.before + self.after - self.kernel + 1


def window(kernel: int, padding: PaddingName) -> Window:
    """Return the window; "same" keeps the image's size (an even kernel pads one more pixel after than before)."""
    if padding == "valid":
        return Window(kernel, 0, 0)
    before = (kernel - 1) // 2
    return Window(kernel, before, kernel - 1 - before)


def columns(images: Array, over: Window, xp: Any) -> Array:
    """Return one row per window position ("im2col", Chellapilla et al., 2006), in a new array."""
    # Images of shape (n, height, width, channels) become (n * height' * width', kernel * kernel * channels); a row is a
    # window in row-major order. Multiplication by a weight of shape (kernel * kernel * channels, outputs) gives the
    # convolution (cross-correlation, as is usual in networks).
    n, height, width, channels = images.shape
    padded = images
    if over.before or over.after:
        padded = xp.zeros(_padded_shape(images.shape, over), images.dtype)
        padded[:, over.before : over.before + height, over.before : over.before + width] = images
    rows, cols, k = over.output_length(height), over.output_length(width), over.kernel
    unrolled = xp.empty((n, rows, cols, k, k, channels), images.dtype)
    for i in range(k):
        for j in range(k):
            unrolled[:, :, :, i, j] = padded[:, i : i + rows, j : j + cols]
    return unrolled.reshape(n * rows * cols, k * k * channels)


def columns_pull_back(gradient: Array, weight: Array, shape: tuple[int, int, int, int], over: Window, xp: Any) -> Array:
    """Return the gradient by images of `shape` from that by the convolution's output; overlapping windows add up."""
    # One product per pixel of the window avoids a second matrix of the columns' size.
    n, height, width, channels = shape
    rows, cols, k = over.output_length(height), over.output_length(width), over.kernel
    taps = weight.reshape(k, k, channels, -1)
    part = xp.empty((n * rows * cols, channels), gradient.dtype)
    padded = xp.zeros(_padded_shape(shape, over), gradient.dtype)
    for i in range(k):
        for j in range(k):
            xp.matmul(gradient, taps[i, j].T, out=part)
            padded[:, i : i + rows, j : j + cols] += part.reshape(n, rows, cols, channels)
    return padded[:, over.before : over.before + height, over.before : over.before + width]


def _padded_shape(shape: tuple[int, int, int, int], over: Window) -> tuple[int, int, int, int]:
    n, height, width, channels = shape
    return n, height + over.before + over.after, width + over.before + over.after, channels


def max_pool(images: Array, xp: Any) -> tuple[Array, tuple[Array, Array]]:
    """Return the maximum of every 2x2 block, and values for its pullback; an odd last row or column is dropped."""
    # The images, of at least 2 x 2 pixels, are kept for the pullback and must not change before it.
    row_pairs = xp.maximum(*_pairs(images, 1))
    return xp.maximum(*_pairs(row_pairs, 2)), (images, row_pairs)


def max_pool_pull_back(gradient: Array, saved: tuple[Array, Array], xp: Any) -> Array:
    """Return the gradient by the images: each block's goes to its maximum, the first if several are equal."""
    # Only to one, since equal maxima are common (a dark background) and would count the block several times.
    images, row_pairs = saved
    return _pairs_pull_back(_pairs_pull_back(gradient, row_pairs, 2, xp), images, 1, xp)


def _pairs(x: Array, axis: int) -> tuple[Array, Array]:
    """Return views of the even and the odd positions along an axis, of equal length."""
    stop = x.shape[axis] // 2 * 2
    before = (slice(None),) * axis
    return x[(*before, slice(0, stop, 2))], x[(*before, slice(1, stop, 2))]


def _pairs_pull_back(gradient: Array, x: Array, axis: int, xp: Any) -> Array:
    even, odd = _pairs(x, axis)
    spread = xp.zeros(x.shape, gradient.dtype)
    to_even, to_odd = _pairs(spread, axis)
    xp.multiply(gradient, even >= odd, out=to_even)
    xp.subtract(gradient, to_even, out=to_odd)  # exact: one of the two is the gradient, the other zero
    return spread


@dataclass(frozen=True)
class Conv2D(Layer):
    """Convolution (cross-correlation, as is usual in networks) with a square kernel and stride 1.

    Variables: "weight", shape (kernel * kernel * channels in, channels), rows ordered (y, x, channel in), and "bias",
    shape (channels,), which does not decay.

    Parameters
    ----------
    channels : int
        Number of output channels.
    kernel : int
        Height and width of the kernel.
    padding : {"same", "valid"}
        "same": zero padding keeps the image's size; "valid": no padding.
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
        object.__setattr__(self, "channels", checked_whole("Conv2D: channels", self.channels))
        object.__setattr__(self, "kernel", checked_whole("Conv2D: kernel", self.kernel))
        need_start("Conv2D", self.initializer)
        if self.padding not in ("same", "valid"):
            raise ConfigurationError(f"Conv2D: padding is 'same' or 'valid', found {self.padding!r}")

    @property
    def _window(self) -> Window:
        return window(self.kernel, self.padding)

    def output_shape(self, shape: Shape) -> Shape:
        height, width, _ = _image(shape)
        height, width = self._window.output_length(height), self._window.output_length(width)
        if height < 1 or width < 1:
            raise ConfigurationError(f"a window of {self.kernel} pixels does not fit into an image of shape {shape}")
        return height, width, self.channels

    def variables(self, shape: Shape) -> dict[str, Variable]:
        pixels, before = self.kernel**2, _image(shape)[2]
        start = start_of(self.initializer, pixels * before, pixels * self.channels)
        declared = {"weight": Variable("weight", (pixels * before, self.channels), start)}
        return declared | ({"bias": Variable("bias", (self.channels,), decay=False)} if self.bias else {})

    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
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
    """The maximum of every 2x2 block; an odd last row or column is dropped.

    If maxima are equal, the first one gets the gradient.
    """

    name: ClassVar[str] = "pool"

    def output_shape(self, shape: Shape) -> Shape:
        height, width, channels = _image(shape)
        if height < 2 or width < 2:
            raise ConfigurationError(f"an image of shape {shape} has no block of 2x2 pixels")
        return height // 2, width // 2, channels

    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
        xp = at.xp
        pooled, saved = max_pool(x.reshape(len(x), *_image(x.shape[1:])), xp)
        return pooled, lambda gradient, to_input: (max_pool_pull_back(gradient, saved, xp).reshape(x.shape), {})


def _image(shape: Shape) -> tuple[int, int, int]:
    if len(shape) not in (2, 3):
        raise ConfigurationError(f"an image has the shape (height, width) or (height, width, channels), found {shape}")
    return shape[0], shape[1], (*shape, 1)[2]
