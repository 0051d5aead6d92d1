"""TensorFlow's ParameterServerStrategy at the MNIST MLP (784-256-128-10, ReLU, Adam, batch 128), asynchronously.

Two workers, `--servers` parameter servers. Each step is one scheduled tf.function: the next batch of the worker's own
shuffled data set, the gradients, and Adam's update, which runs where variables and slots lie (ResourceApplyAdam).
Keras 3 does not train with parameter servers, so layers and optimizer are written out.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.peers import mnist, seam
from benchmarks.peers.tensorflow_cluster import start_cluster

WIDTHS = (784, 256, 128, 10)
BATCH = 128
ADAM = {"lr": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
WARM_UPS = 20


class Network:
    """Variables and slots on the parameter servers; a variable that was cut has several parts."""

    def __init__(self, strategy: tf.distribute.ParameterServerStrategy) -> None:
        with strategy.scope():
            self._layers = [
                (_parts(tf.Variable(tf.zeros((a, b)))), _parts(tf.Variable(tf.zeros(b))))
                for a, b in itertools.pairwise(WIDTHS)
            ]
            self._variables = [part for weight, bias in self._layers for part in (*weight, *bias)]
            self._slots = [[_beside(strategy, variable) for variable in self._variables] for _ in ("m", "v")]
            self._t = tf.Variable(0.0)

    def begin(self, seed: int) -> None:
        """Draw new weights by He's method, and begin Adam anew."""
        rng = np.random.default_rng(seed)
        for variable in (self._t, *self._variables, *itertools.chain(*self._slots)):
            variable.assign(tf.zeros_like(variable))
        for (weight, _), fan_in in zip(self._layers, WIDTHS, strict=False):
            for part in weight:
                part.assign(rng.normal(0.0, math.sqrt(2.0 / fan_in), part.shape))

    def train(self, images: tf.Tensor, labels: tf.Tensor) -> None:
        """Take one step."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, self.logits(images)))
        gradients = tape.gradient(loss, self._variables)
        t = self._t.assign_add(1.0)
        powers = {f"{beta}_power": tf.pow(ADAM[beta], t) for beta in ("beta1", "beta2")}
        for variable, m, v, gradient in zip(self._variables, *self._slots, gradients, strict=True):
            tf.raw_ops.ResourceApplyAdam(var=variable.handle, m=m.handle, v=v.handle, grad=gradient, **powers, **ADAM)

    def logits(self, x: tf.Tensor) -> tf.Tensor:
        """Return the network's output, shape (n, 10), for inputs of shape (n, 784)."""
        for weight, bias in self._layers[:-1]:
            x = tf.nn.relu(x @ tf.concat(weight, 0) + tf.concat(bias, 0))
        weight, bias = self._layers[-1]
        return x @ tf.concat(weight, 0) + tf.concat(bias, 0)


def scaled(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return inputs in [0, 1] and labels as TensorFlow wants them."""
    return tf.cast(images, tf.float32) / 255.0, tf.cast(labels, tf.int64)


def _beside(strategy: tf.distribute.ParameterServerStrategy, variable: tf.Variable) -> tf.Variable:
    """Return zeros on the same server."""
    with strategy.extended.colocate_vars_with(variable):
        return tf.Variable(tf.zeros_like(variable))


def _parts(variable: Any) -> list[tf.Variable]:
    return list(variable.variables) if hasattr(variable, "variables") else [variable]


class TensorFlowTraining(seam.Training):
    """The chief's view: every step is scheduled on whichever worker is free.

    Parameters
    ----------
    data : Path
        Folder with MNIST's four files.
    servers : int
        Parameter servers.
    """

    batch = BATCH

    def __init__(self, data: Path, servers: int) -> None:
        self._coordinator = start_cluster(workers=2, servers=servers)
        self._network = network = Network(self._coordinator.strategy)
        images, labels = mnist.load(data, "train")
        test = mnist.load(data, "t10k")
        self._examples = len(images)

        def batches() -> tf.data.Dataset:
            examples = tf.data.Dataset.from_tensor_slices((images, labels))
            return examples.shuffle(len(images)).repeat().batch(BATCH).map(scaled).prefetch(2)

        @tf.function
        def step(batches_of_worker: Any) -> None:
            network.train(*next(batches_of_worker))

        @tf.function
        def correct() -> tf.Tensor:
            x, wanted = scaled(*test)
            return tf.reduce_mean(tf.cast(tf.argmax(network.logits(x), 1) == wanted, tf.float32))

        self._batches = iter(self._coordinator.create_per_worker_dataset(batches))
        self._step, self._correct = step, correct

    def begin(self, seed: int, epochs: int) -> int:
        """Have both workers trace the step, and draw new weights."""
        self.train(0, WARM_UPS)
        self._network.begin(seed)
        return math.ceil(self._examples / BATCH)

    def train(self, start: int, stop: int) -> float:
        """Schedule steps and wait for them."""
        began_s = time.perf_counter()
        for _ in range(start, stop):
            self._coordinator.schedule(self._step, args=(self._batches,))
        self._coordinator.join()
        return time.perf_counter() - began_s

    def accuracy(self) -> float:
        """Let the chief evaluate."""
        return float(self._correct())


def main() -> None:
    """Start the cluster and answer rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST's four files")
    parser.add_argument("--servers", type=int, required=True)
    arguments = parser.parse_args()
    training = TensorFlowTraining(arguments.data, arguments.servers)
    seam.serve(seam.training_answers(training), ["tensorflow", "numpy"])


if __name__ == "__main__":
    main()
