"""A loop of one's own: least squares on numbers that this program draws, by workers of one thread each.

    python examples/custom_loop.py

`ps.Cluster` starts the shards, each session is a worker. Kill a shard while it runs (`parashard kill shard-1`): it is
started again, and no step is lost or in twice. After Ctrl-C, `python examples/custom_loop.py --resume` goes on.
`custom_schedule.py` beside this one does the same by functions that are scheduled.
"""

import argparse
import threading

import numpy as np

import parashard as ps

FEATURES, EXAMPLES, EPOCHS, BATCH, WORKERS = 20, 4000, 10, 50, 2


def loss_and_gradients(w, b, x, y):
    """Return the mean squared error and its gradients."""
    error = x @ w + b - y
    return float((error**2).mean()), {"w": 2 * x.T @ error / len(x), "b": 2 * error.mean(keepdims=True)}


def work(run_dir, inputs, targets):
    """Compute steps until the job is done."""
    with ps.connect(run_dir) as session:
        for step in session.steps():
            weights = session.pull()
            x, y = inputs[step.indices], targets[step.indices]
            loss, gradients = loss_and_gradients(weights["w"], weights["b"], x, y)
            session.push(step, gradients, loss=loss)


def main():
    """Train, and print the error that is left."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--resume", action="store_true", help="go on with the newest run, if it is not done")
    arguments = parser.parse_args()
    rng = np.random.default_rng(1)
    inputs = rng.standard_normal((EXAMPLES, FEATURES), dtype=np.float32)
    targets = inputs @ rng.standard_normal(FEATURES, dtype=np.float32) + 3.0
    variables = {"w": np.zeros(FEATURES), "b": np.zeros(1)}
    with ps.Cluster(
        variables, ps.Adam(0.02), examples=EXAMPLES, epochs=EPOCHS, batch_size=BATCH, resume=arguments.resume
    ) as cluster:
        workers = [threading.Thread(target=work, args=(cluster.run_dir, inputs, targets)) for _ in range(WORKERS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        report = cluster.finish()
        weights = cluster.weights()
    loss, _ = loss_and_gradients(weights["w"], weights["b"], inputs, targets)
    print(f"{report['steps_total']} steps, mean squared error {loss:.6f}")


if __name__ == "__main__":
    main()
