"""Convolutional network: stages of convolution, 2x2 max pooling and activation, then dense layers.

Owns its options and the variables `conv_<i>.weight` and `conv_<i>.bias`. Built by `parashard.models.build_model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parashard.data.base import Array, DataSpec
from parashard.errors import ConfigurationError
from parashard.models.classifier import Classifier, Pullback, need_classes
from parashard.models.convolution import columns, columns_pull_back, max_pool, max_pool_pull_back, window
from parashard.models.dense import DenseStack, hidden_start
from parashard.models.layers import ACTIVATIONS
from parashard.models.options import ActivationName, CnnOptions
from parashard.plan.variables import Variable


@dataclass(frozen=True)
class _Saved:
    """What the pullback needs of one stage."""

    input_shape: tuple[int, int, int, int]
    columns: Array
    pooling: tuple[Array, Array]
    activation: Any


class ConvolutionalNetwork(Classifier):
    """Images through stages of convolution, pooling, bias and activation, then a dense stack, to logits.

    Pooling goes before bias and activation, which is the same function for the monotone ReLU and tanh with a quarter
    of the work (and another, equally good network for GELU).

    Variables: "conv_<i>.weight", shape (kernel * kernel * channels in, channels out), rows ordered (y, x, channel),
    "conv_<i>.bias", shape (channels out,), and those of the dense stack.

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
        height, width, channels = (*spec.input_shape, 1)[:3]
        self._image = (height, width, channels)
        self._channels = options.channels
        self._window = window(options.kernel, options.padding)
        for stage in range(len(options.channels)):
            height = self._window.output_length(height) // 2
            width = self._window.output_length(width) // 2
            if height < 1 or width < 1:
                raise ConfigurationError(
                    f"model kind 'cnn': stage {stage} of {len(options.channels)} has no pixel left of inputs of shape "
                    f"{spec.input_shape} with kernel = {options.kernel} and padding = {options.padding!r}; use fewer "
                    "channels entries, a smaller kernel or padding 'same'"
                )
        self._activation_name: ActivationName = options.activation
        self._activation = ACTIVATIONS[options.activation]
        widths = (height * width * options.channels[-1], *options.hidden, spec.classes)
        self._stack = DenseStack(widths, options.activation, options.dropout, seed)

    def initial_variables(self) -> Mapping[str, Variable]:
        """Return the declared variables by name."""
        declared = {}
        before = self._image[2]
        for stage, after in enumerate(self._channels):
            window_pixels = self._window.kernel**2
            start = hidden_start(self._activation_name, window_pixels * before, window_pixels * after)
            shape = (window_pixels * before, after)
            declared[f"conv_{stage}.weight"] = Variable(f"conv_{stage}.weight", shape, start)
            declared[f"conv_{stage}.bias"] = Variable(f"conv_{stage}.bias", (after,), decay=False)
            before = after
        return declared | self._stack.variables()

    def forward(
        self, variables: Mapping[str, Array], inputs: Array, step: int | None, xp: Any
    ) -> tuple[Array, Pullback]:
        """Return the logits and the pullback of their gradient."""
        x = inputs.reshape(len(inputs), *self._image).astype(variables["conv_0.weight"].dtype, copy=False)
        stages: list[_Saved] = []
        for stage, channels in enumerate(self._channels):
            n, height, width, _ = shape = x.shape
            unrolled = columns(x, self._window, xp)
            z = xp.matmul(unrolled, variables[f"conv_{stage}.weight"])
            z = z.reshape(n, self._window.output_length(height), self._window.output_length(width), channels)
            z, pooling = max_pool(z, xp)
            z += variables[f"conv_{stage}.bias"]
            x, activation = self._activation.apply(z, xp)
            stages.append(_Saved(shape, unrolled, pooling, activation))
        pooled_shape = x.shape
        logits, tape = self._stack.forward(variables, x.reshape(len(x), -1), step, xp)

        def pull_back(gradient: Array) -> dict[str, Array]:
            gradients, flat = self._stack.pull_back(variables, tape, gradient, xp, to_input=True)
            assert flat is not None
            return gradients | self._pull_back_stages(variables, stages, flat.reshape(pooled_shape), xp)

        return logits, pull_back

    def _pull_back_stages(
        self, variables: Mapping[str, Array], stages: list[_Saved], gradient: Array, xp: Any
    ) -> dict[str, Array]:
        gradients = {}
        for stage in reversed(range(len(stages))):
            saved = stages[stage]
            gradient = self._activation.derive(gradient, saved.activation, xp)
            gradients[f"conv_{stage}.bias"] = gradient.sum(axis=(0, 1, 2))
            spread = max_pool_pull_back(gradient, saved.pooling, xp).reshape(len(saved.columns), -1)
            gradients[f"conv_{stage}.weight"] = xp.matmul(saved.columns.T, spread)
            if stage > 0:
                weight = variables[f"conv_{stage}.weight"]
                gradient = columns_pull_back(spread, weight, saved.input_shape, self._window, xp)
        return gradients
