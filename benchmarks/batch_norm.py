"""Batch normalisation under asynchronous training: `python -m benchmarks.batch_norm --data FOLDER [--write]`.

Eight asynchronous workers with pipelines train a convolutional PyTorch net with batch normalisation on MNIST, so that
gradients and statistics belong to weights of many steps before. The learning rate falls to zero by a cosine, so that
the final weights have no noise of single steps. Three questions about the final state: are the running variances
positive; is the net as accurate with them as with statistics that are recomputed for its weights; and is it as
accurate as one that a single process trained. The module's own counter counts its calls.

Needs PyTorch (`make test-frameworks` makes an environment with it).
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch

import parashard as ps
from benchmarks.tables import table, write
from parashard.data.array_files import read_idx

functional = torch.nn.functional


class Net(torch.nn.Sequential):
    """Two convolutions and a dense layer, each normalised by batch."""

    def __init__(self) -> None:
        super().__init__(
            *(torch.nn.Conv2d(1, 8, 5, stride=2), torch.nn.BatchNorm2d(8), torch.nn.ReLU()),
            *(torch.nn.Conv2d(8, 16, 3, stride=2), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Flatten()),
            *(torch.nn.Linear(400, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 10)),
        )
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Any) -> Any:
        """Return one output a class, and count the call."""
        if self.training:
            self.calls += 1
        return super().forward(inputs)


def images(folder: Path, prefix: str) -> tuple[Any, Any]:
    """Return images in [0, 1] and their digits."""
    pixels = read_idx(folder / f"{prefix}-images-idx3-ubyte.gz", dimensions=3)
    digits = read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", dimensions=1)
    return torch.tensor(pixels).unsqueeze(1).float() / 255, torch.tensor(digits).long()


def accuracy(net: torch.nn.Module, data: tuple[Any, Any]) -> float:
    """Return the fraction of examples that a net classifies correctly."""
    with torch.no_grad():
        return round(float((net.eval()(data[0]).argmax(1) == data[1]).float().mean()), 4)


def recomputed(net: torch.nn.Module, inputs: Any) -> torch.nn.Module:
    """Return a net of the same weights, with statistics over the training data."""
    other = copy.deepcopy(net).train()
    for layer in other.modules():
        if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm):
            layer.reset_running_stats()
            layer.momentum = None  # the mean over all batches
    with torch.no_grad():
        for some in inputs.split(1000):
            other(some)
    return other


def trained(workers: int, consistency: str, data: tuple[Any, Any], epochs: int, seed: int) -> tuple[Any, Any]:
    """Return the net and the run's report."""
    strategy = ps.ParameterServerStrategy(shards=1, workers=workers, consistency=consistency)
    depth = 6 if consistency == "async" else 0
    settings = {"cluster.pipeline_depth": depth, "cluster.worker_threads": 1}
    model = ps.torch.Model(Net, functional.cross_entropy, state={"calls": "counter"})
    optimizer = ps.Adam(1e-3, schedule={"kind": "cosine"})
    trainer = ps.Trainer(model, optimizer, strategy, seed=seed, settings=settings)
    history = trainer.fit(data, epochs=epochs, batch_size=128, verbose=0)
    return trainer.model(), history.report


def main() -> None:
    """Train both ways for each seed, compare, and print or write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    training, held_out = images(options.data, "train"), images(options.data, "t10k")
    rows = []
    for seed in range(options.seeds):
        net, report = trained(8, "async", training, options.epochs, seed)
        alone, _ = trained(1, "sync:1", training, options.epochs, seed)
        variances = [buffer for name, buffer in net.named_buffers() if name.endswith("running_var")]
        rows.append(
            {
                "seed": seed,
                "accuracy": accuracy(net, held_out),
                "recomputed": accuracy(recomputed(net, training[0]), held_out),
                "one_process": accuracy(alone, held_out),
                "least_variance": round(min(float(variance.min()) for variance in variances), 4),
                "calls": int(net.calls),
                "steps": report["steps_total"],
                "staleness": report["staleness"],
            }
        )
    if not ps.is_worker():
        shown = [
            [str(row[key]) if key != "staleness" else "{p50}, {p95}, {max}".format(**row[key]) for key in rows[0]]
            for row in rows
        ]
        text = table([*list(rows[0])[:-1], "staleness: median, 95 %, most"], shown)
        print(text)
        print(json.dumps(rows))
        if options.write:
            write("batch_norm", {"Batch normalisation, 8 asynchronous workers": text}, {"rows": rows})


if __name__ == "__main__":
    main()
