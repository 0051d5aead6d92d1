"""MNIST with JAX under every strategy: needs the extra `jax`, and the four files of MNIST in a folder.

python examples/strategies.py --strategy mirrored --data FOLDER [--json]
"""

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("NPROC", "1")  # JAX' threads, read as it is imported: one a replica has the bits of a worker's
import jax
import jax.numpy as jnp
import numpy as np

import parashard as ps
from parashard.data.array_files import read_idx

STRATEGIES = {
    "one_device": ps.OneDeviceStrategy,
    "mirrored": lambda: ps.MirroredStrategy(devices=4),
    "central_storage": lambda: ps.CentralStorageStrategy(devices=4),
    "multi_worker_mirrored": lambda: ps.MultiWorkerMirroredStrategy(workers=4),
    "parameter_server": lambda: ps.ParameterServerStrategy(shards=2, workers=2),
    "tpu": lambda: ps.TPUStrategy(devices=4),
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--strategy", choices=STRATEGIES, default="one_device")
parser.add_argument("--data", type=Path, required=True)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--json", action="store_true", help="print nothing but one JSON object")
options = parser.parse_args()


def load(prefix):
    images, labels = (next(options.data.glob(f"{prefix}-{what}-ubyte*")) for what in ("images-idx3", "labels-idx1"))
    x = read_idx(images, dimensions=3).reshape(-1, 784).astype(np.float32) / 255
    return x, read_idx(labels, dimensions=1).astype(np.int64)


def init(key):
    sizes = (784, 256, 128, 10)
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"weight": jax.random.normal(key, (rows, columns)) * (2 / rows) ** 0.5, "bias": jnp.zeros(columns)}
        for key, rows, columns in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def apply(parameters, inputs):
    for layer in parameters[:-1]:
        inputs = jax.nn.relu(inputs @ layer["weight"] + layer["bias"])
    return inputs @ parameters[-1]["weight"] + parameters[-1]["bias"]


def loss(parameters, inputs, targets, key):
    return -jax.nn.log_softmax(apply(parameters, inputs))[jnp.arange(len(targets)), targets].mean()


training, held_out = load("train"), load("t10k")
strategy = STRATEGIES[options.strategy]()  # the one line that differs
model = ps.jax.Model(init, loss, apply=apply, metrics=["accuracy"])
trainer = ps.Trainer(model, ps.Adam(2e-3), strategy)
history = trainer.fit(
    training,
    epochs=options.epochs,
    batch_size=64,
    validation_data=held_out,
    callbacks=[ps.callbacks.LearningRateScheduler(lambda epoch, rate: 2e-3 * 0.6**epoch)],
    verbose=0 if options.json else 1,
)
accuracy = trainer.evaluate(held_out)["accuracy"]
print(
    json.dumps(
        {
            "strategy": options.strategy,
            "accuracy": accuracy,
            "examples_per_s": history.report["examples_per_s"],
            "weights_sha256": history.report["weights_sha256"],
        }
    )
)
