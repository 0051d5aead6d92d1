"""One run of an MLP, by a framework alone, on a cluster of ours or in one process of ours: prints a JSON object.

`python -m benchmarks.frameworks.cluster pytorch|jax|keras alone|ours|one_device [--hidden N N] [--steps N]
[--data FOLDER] [--workers N] [--shards N]`, a script as a user writes it. Speeds are those after the first epoch, in
which a framework compiles. Called by `benchmarks.frameworks_cluster` and `benchmarks.frameworks_one_device`.
"""

from __future__ import annotations

import os

os.environ.update(KERAS_BACKEND="jax", OMP_NUM_THREADS="1", NPROC="1")  # before a framework is imported

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import parashard as ps
from benchmarks import frameworks_one_device as mlp
from benchmarks.frameworks.mnist import LEARNING_RATE, read

EPOCHS = 6  # of random data: the first is not measured


def alone(plain: mlp.Plain, steps: int) -> dict[str, float]:
    """Return the speed of a framework's own loop after the first epoch's steps, and its last loss."""
    first = steps // EPOCHS
    for _ in range(first):
        loss = plain()
    float(loss)  # waits for it
    began_s = time.perf_counter()
    for _ in range(steps - first):
        loss = plain()
    last = float(loss)
    return {"examples_per_s": (steps - first) * mlp.BATCH / (time.perf_counter() - began_s), "loss": last}


def ours(model: Any, data: Any, epochs: int, strategy: Any) -> dict[str, float]:
    """Return the speed from the first epoch's end to the last one's, and the last epoch's loss."""
    ends_s: list[float] = []
    told = ps.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ends_s.append(time.perf_counter()))
    trainer = ps.Trainer(model, ps.Adam(LEARNING_RATE), strategy)
    history = trainer.fit(data, epochs=epochs, batch_size=mlp.BATCH, verbose=0, callbacks=[told])
    examples = len(data[1]) * (epochs - 1)
    return {"examples_per_s": examples / (ends_s[-1] - ends_s[0]), "loss": history.history["loss"][-1]}


def keras_alone(net: Any, data: Any, epochs: int) -> dict[str, float]:
    """Return the same of Keras' own `fit`."""
    import keras

    ends_s: list[float] = []
    told = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ends_s.append(time.perf_counter()))
    history = net().fit(*data, batch_size=mlp.BATCH, epochs=epochs, verbose=0, callbacks=[told])
    examples = len(data[1]) * (epochs - 1)
    return {"examples_per_s": examples / (ends_s[-1] - ends_s[0]), "loss": history.history["loss"][-1]}


def keras_net(sizes: tuple[int, ...]) -> Any:
    """Return a function that makes the MLP as a Keras user does."""
    import keras

    def net() -> Any:
        layers = [keras.layers.Dense(units, activation="relu") for units in sizes[1:-1]]
        made = keras.Sequential([keras.Input((sizes[0],)), *layers, keras.layers.Dense(sizes[-1])])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made.compile(keras.optimizers.Adam(LEARNING_RATE), loss)
        return made

    return net


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=["pytorch", "jax", "keras"])
    parser.add_argument("what", choices=["alone", "ours", "one_device"])
    parser.add_argument(
        "--hidden", type=int, nargs=2, default=mlp.HIDDEN, help="widths of the hidden layers (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=1000, help="steps of a run (default: %(default)s)")
    parser.add_argument("--data", type=Path, help="folder of MNIST, used instead of random numbers")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--shards", type=int, default=1)
    asked = parser.parse_args()
    sizes = mlp.sizes_of(asked.hidden)
    examples = min(asked.steps // EPOCHS * mlp.BATCH, len(mlp.Y))
    data = (mlp.X[:examples], mlp.Y[:examples]) if asked.data is None else read(asked.data, "train")
    epochs = max(2, round(asked.steps * mlp.BATCH / len(data[1])))
    if asked.framework == "keras":
        net = keras_net(sizes)
        model, by_itself = ps.keras.Model(net), partial(keras_alone, net, data, epochs)
    else:
        model, plain = {"pytorch": mlp.pytorch, "jax": mlp.jax}[asked.framework](sizes, len(data[1]) // mlp.BATCH)
        by_itself = partial(alone, plain, asked.steps)
    cluster = ps.ParameterServerStrategy(shards=asked.shards, workers=asked.workers, consistency="async")
    strategy = cluster if asked.what == "ours" else ps.OneDeviceStrategy(threads=1)
    print(json.dumps(by_itself() if asked.what == "alone" else ours(model, data, epochs, strategy)))


if __name__ == "__main__":
    main()
