"""One run of an MLP, by a framework alone or on a cluster of ours: prints a JSON object. A script as a user writes it.

`python -m benchmarks.frameworks.cluster pytorch|jax|keras alone|ours [--hidden N N] [--steps N] [--data FOLDER]
[--workers N] [--shards N]`. Speeds are those after the first epoch, in which a framework compiles. Called by
`benchmarks.frameworks_cluster`.
"""

from __future__ import annotations

import os

os.environ.update(KERAS_BACKEND="jax", OMP_NUM_THREADS="1", NPROC="1")  # before a framework is imported

import argparse
import json
import time
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


def ours(model: Any, data: Any, epochs: int, workers: int, shards: int) -> dict[str, float]:
    """Return the speed from the first epoch's end to the last one's, and the last epoch's loss."""
    ends_s: list[float] = []
    told = ps.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ends_s.append(time.perf_counter()))
    strategy = ps.ParameterServerStrategy(shards=shards, workers=workers, consistency="async")
    trainer = ps.Trainer(model, ps.Adam(LEARNING_RATE), strategy)
    history = trainer.fit(data, epochs=epochs, batch_size=mlp.BATCH, verbose=0, callbacks=[told])
    examples = len(data[1]) * (epochs - 1)
    return {"examples_per_s": examples / (ends_s[-1] - ends_s[0]), "loss": history.history["loss"][-1]}


def keras_model(sizes: tuple[int, ...]) -> Any:
    """Return the MLP of a Keras user."""
    import keras

    def net() -> Any:
        layers = [keras.layers.Dense(units, activation="relu") for units in sizes[1:-1]]
        made = keras.Sequential([keras.Input((sizes[0],)), *layers, keras.layers.Dense(sizes[-1])])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made.compile(keras.optimizers.Adam(LEARNING_RATE), loss)
        return made

    return ps.keras.Model(net)


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=["pytorch", "jax", "keras"])
    parser.add_argument("what", choices=["alone", "ours"])
    parser.add_argument("--hidden", type=int, nargs=2, default=mlp.SIZES[1:-1], help="widths (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="(default: %(default)s)")
    parser.add_argument("--data", type=Path, help="folder of MNIST, which is taken instead of random numbers")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--shards", type=int, default=1)
    asked = parser.parse_args()
    sizes = (mlp.SIZES[0], *asked.hidden, mlp.SIZES[-1])
    if asked.framework == "keras":
        model, plain = keras_model(sizes), None
    else:
        model, plain = {"pytorch": mlp.pytorch, "jax": mlp.jax}[asked.framework](sizes)
    if asked.what == "alone":
        assert plain is not None, "Keras' own loop is not raced here"
        found = alone(plain, asked.steps)
    else:
        examples = min(asked.steps // EPOCHS * mlp.BATCH, len(mlp.Y))
        data = (mlp.X[:examples], mlp.Y[:examples]) if asked.data is None else read(asked.data, "train")
        epochs = max(2, round(asked.steps * mlp.BATCH / len(data[1])))
        found = ours(model, data, epochs, asked.workers, asked.shards)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
