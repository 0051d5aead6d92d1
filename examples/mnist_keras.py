"""MNIST with a Keras 3 model: needs the extra `keras`, JAX or PyTorch, and MNIST's four IDX files in a folder.

KERAS_BACKEND=jax python examples/mnist_keras.py --data FOLDER [--workers 4]
"""

import argparse
import gzip
import json
import os
from pathlib import Path

import numpy as np

os.environ.setdefault("KERAS_BACKEND", "jax")
import keras

import parashard as ps

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", type=Path, required=True, help="folder with MNIST's four IDX files")
parser.add_argument("--shards", type=int, default=2)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--consistency", default="auto")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()


def read(split):
    images = gzip.decompress((options.data / f"{split}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((options.data / f"{split}-labels-idx1-ubyte.gz").read_bytes())
    shape = np.frombuffer(images, ">u4", count=3, offset=4)
    pixels = np.frombuffer(images, np.uint8, offset=16).reshape(shape)
    return pixels.astype(np.float32) / 255, np.frombuffer(labels, np.uint8, offset=8)


training, held_out = read("train"), read("t10k")


def network():
    layers = [keras.layers.Flatten(), keras.layers.Dense(128, activation="relu"), keras.layers.Dropout(0.1)]
    network = keras.Sequential([keras.Input(training[0].shape[1:]), *layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(loss=loss, metrics=["accuracy"])
    return network


strategy = ps.ParameterServerStrategy(options.shards, options.workers, options.consistency)
trainer = ps.Trainer(ps.keras.Model(network), ps.Adam(1e-3), strategy)
history = trainer.fit(training, epochs=options.epochs, batch_size=128, validation_data=held_out, resume=options.resume)

own = trainer.model()  # the compiled Keras model, with the weights in it
metrics = trainer.evaluate(held_out)
if not ps.is_worker():
    own.save(history.run_dir / "model.keras")
    right = own.evaluate(*held_out, verbose=0, return_dict=True)["accuracy"]
    print(json.dumps({**metrics, "own": right, "weights_sha256": history.report["weights_sha256"]}))
