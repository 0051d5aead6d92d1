"""Who clicks? A wide and deep model in PyTorch: its weights and embeddings are rows of tables. Needs the extra `torch`.

    python examples/clicks_torch.py [--adult FOLDER] [--workers 4]

The data are a synthetic click log, or UCI Adult, whose folder has adult.data and adult.test. Each id has a row in both
tables, which comes to be when the id is first seen.
"""

import argparse
import json

import torch

import parashard as ps

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--adult", metavar="FOLDER")
parser.add_argument("--examples", type=int, default=40_000)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--shards", type=int, default=2)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()

ADULT = (
    "age workclass fnlwgt education education-num marital-status occupation relationship race sex capital-gain "
    "capital-loss hours-per-week native-country income"
)
if options.adult:
    data = ps.open_data(
        "csv",
        path=options.adult,
        file="adult.data",
        held_out_file="adult.test",
        columns=ADULT.split(),
        separator=", ",
        missing="?",
        comment="|",
        strip_label=".",
        label="income",
        ignore=["fnlwgt"],
        key_columns=["*"],
    )
else:
    data = ps.open_data("clicks", examples=options.examples, held_out=options.examples // 10, vocabulary=200)
numbers, ids = (field.shape[0] for field in data.spec.fields if field.name.startswith("inputs/"))

WIDE = ps.Table("wide", 1, optimizer=ps.Adagrad(0.05), initializer="zeros")
DEEP = ps.Table("deep", 8, optimizer=ps.Adagrad(0.05), scale=0.05)


class WideDeep(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = ps.torch.EmbeddingBag(WIDE, mode="sum")
        self.deep = ps.torch.Embedding(DEEP)
        self.tower = torch.nn.Sequential(
            torch.nn.Linear(numbers + ids * DEEP.dimension, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )

    def forward(self, numbers: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        embedded = self.deep(keys).flatten(1)
        return (self.wide(keys) + self.tower(torch.cat([numbers, embedded], 1)))[:, 0]


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype))


model = ps.torch.Model(
    WideDeep,
    loss,
    metrics=[ps.metrics.AUC(2001, from_logits=True), ps.metrics.NormalizedEntropy(from_logits=True)],
    keys=lambda inputs: {"wide": inputs["keys"], "deep": inputs["keys"]},  # the rows that a batch needs
)
strategy = ps.ParameterServerStrategy(options.shards, options.workers)
trainer = ps.Trainer(model, ps.Adam(1e-3), strategy)
history = trainer.fit(data, epochs=options.epochs, batch_size=256, resume=options.resume)

keys, rows = trainer.table("wide")
print(json.dumps({**history.report["held_out"], "rows": history.report["rows"], "widest": float(abs(rows).max())}))
