"""TensorFlow's ParameterServerStrategy: look-ups and updates of rows of one table on one parameter server.

The ids are unique already, as `tf.nn.embedding_lookup` with `tf.unique` would make them; that is not timed. "pull"
brings their rows to the worker, "push" is SGD by `scatter_sub`, "adagrad" the op of `tf.keras.optimizers.Adagrad` for
sparse gradients. A time is that of a call with LOOPS turns, divided by LOOPS.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from benchmarks.peers import click_ids, seam
from benchmarks.peers.tensorflow_cluster import start_cluster

LOOPS = 5
WORKER = "/job:worker/replica:0/task:0/device:CPU:0"


class TensorFlowRows:
    """The chief's view: each function runs on the worker."""

    def __init__(self) -> None:
        self._coordinator = start_cluster(workers=1, servers=1)
        shape = (click_ids.ROWS, click_ids.DIMENSION)
        with self._coordinator.strategy.scope():
            table = tf.Variable(tf.random.uniform(shape, -0.05, 0.05), name="table")
            accumulator = tf.Variable(tf.fill(shape, 0.1), name="accumulator")
        table, accumulator = (getattr(one, "variables", [one])[0] for one in (table, accumulator))
        self._functions: list[dict[str, Any]] = []
        for batch in click_ids.batches():
            ids = tf.unique(batch.reshape(-1))[0].numpy()
            gradients = click_ids.gradients(len(ids))
            with tf.device(WORKER):
                on_worker = tf.Variable(ids, trainable=False), tf.Variable(gradients, trainable=False)
                held = tf.Variable(tf.zeros_like(gradients), trainable=False)
            self._functions.append(self._of(table, accumulator, *on_worker, held))

    def _of(self, table: Any, accumulator: Any, ids: Any, gradients: Any, held: Any) -> dict[str, Any]:
        def pull() -> None:
            with tf.device(table.device):
                rows = tf.gather(table, ids.read_value())
            with tf.device(WORKER):
                held.assign(rows)

        def push() -> None:
            with tf.device(table.device):
                table.scatter_sub(tf.IndexedSlices(click_ids.LEARNING_RATE * gradients.read_value(), ids.read_value()))

        def adagrad() -> None:
            with tf.device(table.device):
                tf.raw_ops.ResourceSparseApplyAdagradV2(
                    var=table.handle,
                    accum=accumulator.handle,
                    lr=click_ids.LEARNING_RATE,
                    epsilon=1e-7,
                    grad=gradients.read_value(),
                    indices=ids.read_value(),
                )

        def looped(turn: Any) -> Any:
            @tf.function
            def loop() -> None:
                for _ in tf.range(LOOPS):
                    turn()

            return loop

        return {"pull_ms": looped(pull), "push_ms": looped(push), "adagrad_ms": looped(adagrad)}

    def answer(self, request: Any) -> dict[str, Any]:
        """Return milliseconds of one turn of each kind, a figure for each batch."""
        times: dict[str, list[float]] = {}
        for functions in self._functions[: request["batches"]]:
            for name, function in functions.items():
                self._run(function)
                times.setdefault(name, []).append(seam.milliseconds(lambda run=function: self._run(run)) / LOOPS)
        return times

    def _run(self, function: Any) -> None:
        self._coordinator.schedule(function)
        self._coordinator.join()


if __name__ == "__main__":
    seam.serve(TensorFlowRows().answer, ["tensorflow", "numpy"])
