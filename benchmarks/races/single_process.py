"""The training race without any server: the job of `mnist.toml` in one process, with the product's own parts.

The same data, batches, model and optimizer kernels as workers and shards use, one after the other in a loop: what
distribution costs is measured against this. A contestant, started by `benchmarks.races.training`. Answers requests as
`seam.training_answers` says.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from benchmarks.peers import seam
from parashard.data import open_source
from parashard.data.base import Batch
from parashard.job.layers import parse_set
from parashard.job.load import load_job
from parashard.job.schema import Job
from parashard.models.building import build_model
from parashard.plan.steps import StepPlan
from parashard.plan.variables import Variable, initial_rows
from parashard.process.resources import EVERY_STEP, cores, keep_freed_memory, limit_threads
from parashard_server.state.kernels import fused
from parashard_server.state.optimizer import Optimizer

JOB = Path(__file__).parent / "mnist.toml"


class SingleProcess(seam.Training):
    """Model, data and optimizer, and nothing between them.

    Parameters
    ----------
    job : Job
        The job to train.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.batch = job.job.batch_size
        self._source = open_source(job.data)
        self._optimizer = Optimizer(job.optimizer)
        self._optimizer.warm_up()

    def begin(self, seed: int, epochs: int) -> int:
        """Draw new weights as a shard does, begin the optimizer anew, and return how many steps an epoch has."""
        self._model = build_model(self._job.model, self._source.spec, seed, None)
        declared = self._model.initial_variables()
        self._declared = {name: v for name, v in declared.items() if isinstance(v, Variable)}
        self._weights = {name: initial_rows(v, seed, 0, v.rows).reshape(v.shape) for name, v in self._declared.items()}
        self._slots = {
            name: {slot: np.full(w.size, value, np.float32) for slot, value in self._optimizer.initial_values.items()}
            for name, w in self._weights.items()
        }
        self._plan = StepPlan(self._source.spec.examples, self.batch, epochs, seed)
        return self._plan.steps_per_epoch

    def train(self, start: int, stop: int) -> float:
        """Take steps, and return the seconds that they took."""
        began_s = time.perf_counter()
        for step in range(start, stop):
            indices = self._plan.indices(step)
            batch = Batch(step, self._plan.epoch_of(step), indices, *self._source.examples(indices))
            _, gradients = self._model.loss_and_gradients(self._weights, batch, np)
            for name, gradient in gradients.items():
                weights, slots = self._weights[name].reshape(-1), self._slots[name]
                self._optimizer.update(
                    weights,
                    gradient.reshape(-1),
                    slots,
                    t=step + 1,
                    scale=1.0,
                    variable=self._declared[name],
                )
        return time.perf_counter() - began_s

    def accuracy(self) -> float:
        """Return the share of test examples that are classified right."""
        held_out = self._source.spec.held_out
        batch = Batch(-1, -1, np.arange(held_out), *self._source.held_out(0, held_out))
        return float(self._model.evaluate(self._weights, batch, np)["accuracy"])


def main() -> None:
    """Answer rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the job")
    parser.add_argument("--threads", type=int, default=0, help="threads of products and kernels; 0: one for each core")
    arguments = parser.parse_args()
    keep_freed_memory(EVERY_STEP)  # as a worker does
    job = load_job(JOB, [parse_set(setting) for setting in arguments.set], {}).job
    limit_threads(arguments.threads)
    fused.use_threads(arguments.threads or cores())
    training = SingleProcess(job)
    limit_threads(arguments.threads)  # again: reading the data may have loaded another BLAS
    seam.serve(seam.training_answers(training), ["numpy", "numba"])


if __name__ == "__main__":
    main()
