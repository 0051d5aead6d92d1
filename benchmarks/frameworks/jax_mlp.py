"""The MLP in JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import parashard as ps
from benchmarks.frameworks.mnist import CLASSES, EPOCHS, HIDDEN, LEARNING_RATE, PIXELS, batches


def init(key):
    """Return the parameters: weights as Glorot and Bengio draw them, biases of zero."""
    glorot = jax.nn.initializers.glorot_uniform()
    first, second = jax.random.split(key)
    return {
        "hidden": {"weight": glorot(first, (PIXELS, HIDDEN)), "bias": jnp.zeros(HIDDEN)},
        "output": {"weight": glorot(second, (HIDDEN, CLASSES)), "bias": jnp.zeros(CLASSES)},
    }


def apply(parameters, inputs):
    """Return a logit for each class."""
    hidden = jax.nn.relu(inputs @ parameters["hidden"]["weight"] + parameters["hidden"]["bias"])
    return hidden @ parameters["output"]["weight"] + parameters["output"]["bias"]


def loss(parameters, inputs, targets, key):
    """Return the mean cross entropy."""
    return -jax.nn.log_softmax(apply(parameters, inputs))[jnp.arange(len(targets)), targets].mean()


def model():
    """Return the model for a trainer."""
    return ps.jax.Model(init, loss, apply=apply, metrics=["accuracy"])


def gradients(values, x, y):
    """Return the gradients of a batch, as JAX alone computes them."""
    tree = {layer: {kind: values[f"{layer}/{kind}"] for kind in ("weight", "bias")} for layer in ("hidden", "output")}
    found = jax.jit(jax.grad(loss))(tree, x, y, jax.random.key(0))
    return {f"{layer}/{kind}": leaf for layer, leaves in found.items() for kind, leaf in leaves.items()}


@jax.jit
def _step(parameters, mean, square, t, x, y):
    """Return parameters and moments after a step of Adam (Kingma and Ba, ICLR 2015)."""
    gradient = jax.grad(loss)(parameters, x, y, None)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
    square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, square, gradient)
    rate = LEARNING_RATE * jnp.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    parameters = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), parameters, mean, square)
    return parameters, mean, square


def alone(training, held_out, seed):
    """Return the held-out accuracy of a plain loop."""
    parameters = init(jax.random.key(seed))
    mean = square = jax.tree.map(jnp.zeros_like, parameters)
    x, y = training
    t = 0
    for epoch in range(EPOCHS):
        for some in batches(len(y), seed, epoch):
            t += 1
            parameters, mean, square = _step(parameters, mean, square, t, x[some], y[some])
    return (apply(parameters, held_out[0]).argmax(1) == held_out[1]).mean()
