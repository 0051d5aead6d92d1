"""Handwritten digits with a PyTorch module: needs the extras `torch` and `examples`, and no download.

    python examples/digits_torch.py [--workers 4]

While it runs, kill anything from another terminal: `parashard kill worker-0`, `parashard status`.
"""

import argparse
import json

import torch
from sklearn.datasets import load_digits

import parashard as ps

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--shards", type=int, default=2)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--consistency", default="auto")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()

digits = load_digits()
x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
training, held_out = order[:1437], (x[order[1437:]], y[order[1437:]])


class Net(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 10))


model = ps.torch.Model(Net, loss=torch.nn.functional.cross_entropy, metrics=["accuracy"])
strategy = ps.ParameterServerStrategy(options.shards, options.workers, options.consistency)
trainer = ps.Trainer(model, ps.Adam(2e-3), strategy)
history = trainer.fit(
    (x[training], y[training]),
    epochs=options.epochs,
    batch_size=32,
    validation_data=held_out,
    resume=options.resume,
)

net = trainer.model()  # the module itself, with the weights in it
right = (net(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
metrics = trainer.evaluate(held_out)
print(json.dumps({**metrics, "own": right, "weights_sha256": history.report["weights_sha256"]}))
