"""Scheduled functions, after TensorFlow's `ClusterCoordinator`: least squares on numbers that each worker draws.

    python examples/custom_schedule.py

The workers are this script, run again; kill one while it runs (`parashard kill worker-0`): what it was at is done
again, and each function's push is in once.
"""

import numpy as np

import parashard as ps

FEATURES, CALLS, BATCH = 20, 800, 50


def examples(count, seed):
    """Return inputs and targets."""
    truth = np.random.default_rng(1).standard_normal(FEATURES, dtype=np.float32)
    inputs = np.random.default_rng(seed).standard_normal((count, FEATURES), dtype=np.float32)
    return inputs, inputs @ truth


@ps.function
def train_step(weights, seed):
    """Return the loss of a batch, and its gradients, which are pushed."""
    x, y = examples(BATCH, seed)
    error = x @ weights["w"] - y
    return float((error**2).mean()), {"w": 2 * x.T @ error / BATCH}


@ps.function(pushes=0)
def judge(weights, count):
    """Return the loss on other examples; nothing is pushed."""
    x, y = examples(count, 0)
    return float(((x @ weights["w"] - y) ** 2).mean())


def main():
    """Train, and print how the loss went."""
    strategy = ps.ParameterServerStrategy(shards=2, workers=2)
    with ps.Coordinator(strategy, variables={"w": np.zeros(FEATURES)}, optimizer=ps.Adam(0.02)) as coordinator:
        losses = [coordinator.schedule(train_step, args=(1 + number,)) for number in range(CALLS)]
        coordinator.join()
        first, last = coordinator.fetch([losses[0], coordinator.schedule(judge, args=(1000,))])
    print(f"{CALLS} steps, loss {first:.4f} at first, {last:.6f} in the end")


if __name__ == "__main__":
    main()
