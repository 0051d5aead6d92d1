"""Handwritten digits with JAX: needs the extras `jax` and `examples`, and no download.

python examples/digits_jax.py [--workers 4]
"""

import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import parashard as ps

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--shards", type=int, default=2)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--consistency", default="auto")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()

digits = load_digits()
x, y = (digits.data / 16).astype(np.float32), digits.target
order = np.random.default_rng(0).permutation(len(y))
training, held_out = order[:1437], (x[order[1437:]], y[order[1437:]])


def init(key):
    first, second = jax.random.split(key)
    return {
        "hidden": {"weight": jax.random.normal(first, (64, 64)) / 8, "bias": jnp.zeros(64)},
        "output": {"weight": jax.random.normal(second, (64, 10)) / 8, "bias": jnp.zeros(10)},
    }


def apply(parameters, inputs):
    hidden = jax.nn.relu(inputs @ parameters["hidden"]["weight"] + parameters["hidden"]["bias"])
    return hidden @ parameters["output"]["weight"] + parameters["output"]["bias"]


def loss(parameters, inputs, targets, key):
    return -jax.nn.log_softmax(apply(parameters, inputs))[jnp.arange(len(targets)), targets].mean()


model = ps.jax.Model(init, loss, apply=apply, metrics=["accuracy"])
strategy = ps.ParameterServerStrategy(options.shards, options.workers, options.consistency)
trainer = ps.Trainer(model, ps.Adam(2e-3), strategy)
history = trainer.fit(
    (x[training], y[training]),
    epochs=options.epochs,
    batch_size=32,
    validation_data=held_out,
    resume=options.resume,
)

parameters = trainer.model()  # the pytree that init made, with the weights in it
right = float((apply(parameters, held_out[0]).argmax(1) == held_out[1]).mean())
metrics = trainer.evaluate(held_out)
print(json.dumps({**metrics, "own": right, "weights_sha256": history.report["weights_sha256"]}))
