"""Ray: the server is an actor, a push and a pull are one call of it each.

A gradient goes through the object store, Ray's default for arrays of this size. Ray returns a read-only view of the
store's memory; a pull ends with a copy in the worker's own array, as with all peers.
"""

from __future__ import annotations

import os
import tempfile

import numpy as np
import ray

from benchmarks.peers import seam

STORE_BYTES = 2 << 30


@ray.remote
class Server:
    """The weights, and the three calls."""

    def open(self, elements: int) -> None:
        """Reset the weights to zeros, of this size."""
        self._weights, self._step = np.zeros((2, elements), np.float32)

    def push(self, gradient: seam.Floats) -> None:
        """Apply a gradient."""
        np.multiply(gradient, np.float32(seam.LEARNING_RATE), out=self._step)
        np.subtract(self._weights, self._step, out=self._weights)

    def pull(self) -> seam.Floats:
        """Return the weights."""
        return self._weights


class RayPushPull(seam.PushPull):
    """The worker."""

    def __init__(self) -> None:
        self._server = Server.remote()

    def open(self, gradient: seam.Floats) -> None:
        """Put zeros on the server."""
        self._gradient = gradient
        self._pulled = np.empty_like(gradient)
        ray.get(self._server.open.remote(gradient.size))

    def push(self) -> None:
        """Send the gradient, and wait for the answer."""
        ray.get(self._server.push.remote(self._gradient))

    def pull(self) -> seam.Floats:
        """Ask for the weights."""
        np.copyto(self._pulled, ray.get(self._server.pull.remote()))
        return self._pulled


def main() -> None:
    """Start Ray with the actor in a process of its own, and answer rounds."""
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
    }  # the latter writes into the home folder
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray.init(
            num_cpus=len(os.sched_getaffinity(0)),
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": os.getcwd()}},
            _temp_dir=folder,
        )
        seam.serve(seam.push_pull_answers(RayPushPull()), ["ray", "numpy"])
        ray.shutdown()


if __name__ == "__main__":
    main()
