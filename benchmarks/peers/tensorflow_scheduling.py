"""TensorFlow's coordinator at empty steps: `schedule` so many, then `join`. Two workers, one parameter server.

Answers {"steps": n} with {"steps_per_s": rate}.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from benchmarks.peers import seam
from benchmarks.peers.tensorflow_cluster import start_cluster

WARM_UPS = 50


def main() -> None:
    """Start the cluster and answer rounds."""
    coordinator = start_cluster(workers=2, servers=1)
    with coordinator.strategy.scope():
        done = tf.Variable(0, dtype=tf.int64)

    @tf.function
    def empty() -> None:
        return

    @tf.function
    def counted() -> None:
        done.assign_add(1)

    def rate(function: Any, steps: int) -> float:
        began_s = time.perf_counter()
        for _ in range(steps):
            coordinator.schedule(function)
        coordinator.join()
        return steps / (time.perf_counter() - began_s)

    def answer(request: Mapping[str, Any]) -> dict[str, Any]:
        for function in (empty, counted):  # trace it, on both workers
            rate(function, WARM_UPS)
        done.assign(0)
        rate(counted, WARM_UPS)
        assert int(done.numpy()) == WARM_UPS, f"{done.numpy()} of {WARM_UPS} steps were taken"
        return {"steps_per_s": rate(empty, request["steps"])}

    seam.serve(answer, ["tensorflow", "numpy"])


if __name__ == "__main__":
    main()
