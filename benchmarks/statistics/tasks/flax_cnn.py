"""The CNN of Flax's MNIST example in JAX with a quarter of its channels: momentum 0.9 at a rate of 0.1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import parashard as ps
from benchmarks.statistics.tasks._digits import digits
from benchmarks.statistics.trial import Trial

TRAIN, HELD_OUT = 6400, 4000
SHAPES = {"first": (3, 3, 1, 8), "second": (3, 3, 8, 16), "dense": (7 * 7 * 16, 64), "out": (64, 10)}


def init(key: Any) -> Any:
    """Return weights as LeCun draws them, and biases of zero."""
    draw = jax.nn.initializers.lecun_normal()
    return {
        name: {"kernel": draw(jax.random.fold_in(key, number), shape), "bias": jnp.zeros(shape[-1])}
        for number, (name, shape) in enumerate(SHAPES.items())
    }


def apply(parameters: Any, images: Any) -> Any:
    """Return the logits: two convolutions, each with a mean over squares, and two dense layers."""
    values = images
    for name in ("first", "second"):
        kernel, bias = parameters[name]["kernel"], parameters[name]["bias"]
        values = jax.lax.conv_general_dilated(
            values, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        values = jax.nn.relu(values + bias)
        examples, height, width, channels = values.shape
        values = values.reshape(examples, height // 2, 2, width // 2, 2, channels).mean((2, 4))
    values = values.reshape(len(values), -1)
    values = jax.nn.relu(values @ parameters["dense"]["kernel"] + parameters["dense"]["bias"])
    return values @ parameters["out"]["kernel"] + parameters["out"]["bias"]


def loss(parameters: Any, images: Any, digits: Any, key: Any) -> Any:
    """Return the mean cross entropy."""
    return -jax.nn.log_softmax(apply(parameters, images))[jnp.arange(len(digits)), digits].mean()


def make(seed: int, data: Path | None) -> Trial:
    """Return the trial of a seed."""
    images, labels = digits(data, "train", slice(TRAIN))
    held_images, held_labels = digits(data, "t10k", slice(HELD_OUT))
    return Trial(
        model=ps.jax.Model(init, loss, apply=apply, metrics=["accuracy"]),
        optimizer=ps.Momentum(0.1, momentum=0.9),
        train=(images.reshape(-1, 28, 28, 1), labels),
        held_out=(held_images.reshape(-1, 28, 28, 1), held_labels),
        epochs=3,
        batch_size=64,
        metric="accuracy",
        higher_is_better=True,
        tolerance=0.005,
    )
