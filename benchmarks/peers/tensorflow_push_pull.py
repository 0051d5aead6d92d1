"""TensorFlow's ParameterServerStrategy: `assign_sub` and `read_value` of one variable, in a loop inside a tf.function.

The function runs on the worker, which has the gradient; the variable lies on the parameter server. A time is that of a
call with LOOPS turns, divided by LOOPS, so that what the coordinator and Python need hardly counts. "both" is a push
and then a pull, in strict turn by control dependencies; in "loop" TensorFlow may overlap a pull with the push after it.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from benchmarks.peers import seam
from benchmarks.peers.tensorflow_cluster import start_cluster

LOOPS = 5
WORKER = "/job:worker/replica:0/task:0/device:CPU:0"


class TensorFlowPushPull(seam.PushPull):
    """The chief's view: each method has the worker run a function and waits for it."""

    def __init__(self) -> None:
        self._coordinator = start_cluster(workers=1, servers=1)

    def open(self, gradient: seam.Floats) -> None:
        """Put the variable on the server and the gradient, times the learning rate, on the worker; trace functions."""
        with self._coordinator.strategy.scope():
            weights = tf.Variable(tf.zeros(gradient.size))
        with tf.device(WORKER):
            change = tf.Variable(gradient * seam.LEARNING_RATE, trainable=False)
            held = tf.Variable(tf.zeros(gradient.size), trainable=False)

        def push() -> None:
            weights.assign_sub(change.read_value())

        def pull() -> None:
            with tf.device(WORKER):
                held.assign(weights.read_value())

        def both() -> None:
            push()
            pull()

        @tf.function
        def in_order() -> None:
            turn = tf.constant(0)
            for _ in tf.range(LOOPS):
                with tf.control_dependencies([turn]):
                    pushed = weights.assign_sub(change.read_value(), read_value=False)
                with tf.control_dependencies([pushed]), tf.device(WORKER):
                    pulled = held.assign(weights.read_value(), read_value=False)
                with tf.control_dependencies([pulled]):
                    turn = tf.identity(turn)

        self._held = held
        self._one_push, self._one_pull = looped(push, 1), looped(pull, 1)
        self._loops = {name: looped(turn, LOOPS) for name, turn in (("push", push), ("pull", pull), ("loop", both))}
        self._loops["both"] = in_order

    def push(self) -> None:
        """Send the gradient once."""
        self._run(self._one_push)

    def pull(self) -> seam.Floats:
        """Ask for the weights once, and return the worker's copy."""
        self._run(self._one_pull)
        return self._held.numpy()

    def timed(self, repeats: int) -> tuple[dict[str, list[float]], int]:
        """Return the milliseconds of a turn of each kind, from calls of LOOPS turns, and the number of pushes."""
        assert repeats % LOOPS == 0, f"{repeats} repeats are no multiple of {LOOPS}"
        times = {
            f"{name}_ms": [
                seam.milliseconds(lambda loop=loop: self._run(loop)) / LOOPS for _ in range(repeats // LOOPS)
            ]
            for name, loop in self._loops.items()
        }
        return times, 3 * repeats

    def _run(self, function: Callable[[], None]) -> None:
        self._coordinator.schedule(function)
        self._coordinator.join()


def looped(turn: Callable[[], None], turns: int) -> Callable[[], None]:
    """Return a tf.function that takes this many turns in sequence."""

    @tf.function
    def loop() -> None:
        for _ in tf.range(turns):
            turn()

    return loop


def main() -> None:
    """Start the cluster and answer rounds."""
    seam.serve(seam.push_pull_answers(TensorFlowPushPull()), ["tensorflow", "numpy"])


if __name__ == "__main__":
    main()
