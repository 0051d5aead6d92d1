"""The MLP in Keras 3, on the backend that KERAS_BACKEND names."""

from __future__ import annotations

import keras

import parashard as ps
from benchmarks.frameworks.mnist import BATCH_SIZE, CLASSES, EPOCHS, HIDDEN, LEARNING_RATE, PIXELS


def net():
    """Return the compiled model."""
    layers = [keras.layers.Dense(HIDDEN, activation="relu"), keras.layers.Dense(CLASSES)]
    made = keras.Sequential([keras.Input((PIXELS,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(keras.optimizers.Adam(LEARNING_RATE), loss, metrics=["accuracy"])
    return made


def model():
    """Return the model for a trainer."""
    return ps.keras.Model(net)


def gradients(values, x, y):
    """Return the gradients of a batch, as Keras' own training step computes them."""
    made = net()
    for variable, value in zip(made.trainable_variables, values.values(), strict=True):
        variable.assign(value)
    made.evaluate(x[:2], y[:2], verbose=0)  # builds the loss
    if keras.config.backend() == "torch":
        import torch

        inputs, targets = torch.from_numpy(x), torch.from_numpy(y)
        made.compute_loss(x=inputs, y=targets, y_pred=made(inputs, training=True)).backward()
        found = [variable.value.grad.numpy() for variable in made.trainable_variables]
    else:
        import jax

        made.optimizer = None  # it would only scale the loss, by one

        def loss(trained):
            fixed = [variable.value for variable in made.non_trainable_variables]
            return made.compute_loss_and_updates(trained, fixed, [], x, y, None, training=True)[0]

        found = jax.jit(jax.grad(loss))([variable.value for variable in made.trainable_variables])
    return dict(zip(values, found, strict=True))


def alone(training, held_out, seed):
    """Return the held-out accuracy after Keras' own fit."""
    keras.utils.set_random_seed(seed)
    made = net()
    made.fit(*training, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=0)
    return made.evaluate(*held_out, verbose=0, return_dict=True)["accuracy"]
