"""Handwritten digits with `ps.layers`: needs the extra `examples`, no framework and no download.

    python examples/digits_layers.py [--epochs 20]

It leaves open where it runs: on this machine with two workers, or in containers, whose environment says the rest
(`deploy/script/`).
"""

import argparse
import json

import numpy as np
from sklearn.datasets import load_digits

import parashard as ps
from parashard.layers import Dense, Dropout, ReLU

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--consistency", default="auto")
parser.add_argument("--epochs", type=int, default=20)
options = parser.parse_args()

digits = load_digits()
x, y = (digits.data / 16).astype(np.float32), digits.target.astype(np.int64)
order = np.random.default_rng(0).permutation(len(y))
training, held_out = (x[order[:1437]], y[order[:1437]]), (x[order[1437:]], y[order[1437:]])

layers = [Dense(64, initializer="he_normal"), ReLU(), Dropout(0.1), Dense(10)]
model = ps.Sequential(layers, input_shape=(64,), loss="softmax_cross_entropy", metrics=["accuracy"])
trainer = ps.Trainer(model, ps.Adam(2e-3), ps.ParameterServerStrategy(consistency=options.consistency))
# resume: a container that was killed is started again, and goes on.
history = trainer.fit(training, epochs=options.epochs, batch_size=32, validation_data=held_out, resume=True)
print(json.dumps({**trainer.evaluate(held_out), "weights_sha256": history.report["weights_sha256"]}))
