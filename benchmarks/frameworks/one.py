"""One run of one MLP, alone or by parashard: prints a JSON object. A script as a user writes it.

`python -m benchmarks.frameworks.one FRAMEWORK alone|ours|gradients --data FOLDER [--seed N]`
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from pathlib import Path

import numpy as np

import parashard as ps
from benchmarks.frameworks.mnist import BATCH_SIZE, EPOCHS, LEARNING_RATE, read
from parashard.data.base import Batch
from parashard.plan.variables import Variable, initial_rows

ROUND = 4


def trained(framework, training, held_out, seed):
    """Return the held-out accuracy after asynchronous training."""
    strategy = ps.ParameterServerStrategy(shards=2, workers=2, consistency="async")
    trainer = ps.Trainer(framework.model(), ps.Adam(LEARNING_RATE), strategy, seed=seed)
    trainer.fit(training, epochs=EPOCHS, batch_size=BATCH_SIZE, verbose=0)
    return trainer.evaluate(held_out)["accuracy"]


def drawn(given):
    """Return the first values of a variable."""
    return initial_rows(given, 0, 0, given.shape[0]) if isinstance(given, Variable) else given


def compared(framework, training):
    """Return how many gradients of a step are the framework's bits, and how far a round's mean is from one batch's."""
    model = framework.model()
    model.seed(0)
    values = {name: drawn(given) for name, given in model.initial_variables().items()}
    x, y = training

    def ours(start, count):
        some = slice(start, start + count)
        return model.loss_and_gradients(values, Batch(0, 0, np.arange(count), x[some], y[some]), np)[1]

    step, due = ours(0, BATCH_SIZE), framework.gradients(values, x[:BATCH_SIZE], y[:BATCH_SIZE])
    same = sum(np.asarray(step[name]).tobytes() == np.asarray(due[name]).tobytes() for name in due)
    folded = {name: np.zeros_like(value) for name, value in values.items()}
    for number in range(ROUND):
        for name, gradient in ours(number * BATCH_SIZE, BATCH_SIZE).items():
            folded[name] += gradient
    whole = framework.gradients(values, x[: ROUND * BATCH_SIZE], y[: ROUND * BATCH_SIZE])
    apart = sum(float(np.sum((folded[name] / ROUND - np.asarray(whole[name])) ** 2.0)) for name in whole)
    norm = sum(float(np.sum(np.asarray(whole[name], np.float64) ** 2)) for name in whole)
    return {"variables": len(due), "same_bits": same, "round_apart": (apart / norm) ** 0.5}


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework", choices=["torch", "jax", "keras", "layers"])
    parser.add_argument("what", choices=["alone", "ours", "gradients"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    framework = importlib.import_module(f"benchmarks.frameworks.{options.framework}_mlp")
    training, held_out = read(options.data, "train"), read(options.data, "t10k")
    begun = time.perf_counter()
    if options.what == "gradients":
        found = compared(framework, training)
    else:
        run = trained if options.what == "ours" else lambda module, *rest: module.alone(*rest)
        found = {"accuracy": float(run(framework, training, held_out, options.seed))}
    print(json.dumps({**found, "wall_s": time.perf_counter() - begun}))


if __name__ == "__main__":
    main()
