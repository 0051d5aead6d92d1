"""MNIST with `ps.layers`: no framework. The four files of MNIST, compressed or not, lie in a folder.

python examples/mnist_layers.py --data FOLDER [--workers 4]
"""

import argparse
import gzip
import json
from pathlib import Path

import numpy as np

import parashard as ps
from parashard.layers import Dense, Dropout, Flatten, ReLU

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", type=Path, required=True)
parser.add_argument("--shards", type=int, default=2)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()


def idx(name: str, header: int) -> np.ndarray:
    path = next(options.data.glob(f"{name}*"))
    read = gzip.open if path.suffix == ".gz" else open
    with read(path, "rb") as file:
        return np.frombuffer(file.read(), np.uint8, offset=header)


def split(name: str) -> tuple[np.ndarray, np.ndarray]:
    images = idx(f"{name}-images", 16).reshape(-1, 28, 28).astype(np.float32) / 255
    return images, idx(f"{name}-labels", 8).astype(np.int64)


training, held_out = split("train"), split("t10k")
model = ps.Sequential(
    [Flatten(), Dense(256, initializer="he_normal"), ReLU(), Dropout(0.2), Dense(10)],
    input_shape=(28, 28),
    loss="softmax_cross_entropy",
    metrics=["accuracy"],
)
strategy = ps.ParameterServerStrategy(options.shards, options.workers)
trainer = ps.Trainer(model, ps.Adam(1e-3), strategy, seed=options.seed)
history = trainer.fit(training, epochs=options.epochs, batch_size=128, validation_data=held_out, resume=options.resume)
net = trainer.model()  # it has the weights: net(images) are the logits
right = float((net(held_out[0]).argmax(1) == held_out[1]).mean())
metrics = trainer.evaluate(held_out)
print(json.dumps({**metrics, "own": right, "weights_sha256": history.report["weights_sha256"]}))
