"""TORCH_LEDGER: a script that trains a PyTorch module whose final weights and state count examples and steps.

It takes the number of epochs, the consistency and, if they are others than two on this machine, the number of workers
and the address of Ray. It prints one JSON object. While there is a file `slow` beside it, a step takes a tenth of a
second.
"""

EXAMPLES, STEPS_AN_EPOCH = 60, 15

TORCH_LEDGER = """
import json, sys, time
from pathlib import Path
import numpy as np
import torch
import parashard as ps

EXAMPLES, EPOCHS = 60, int(sys.argv[1])
slow = Path("slow")

class Ledger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(EXAMPLES))
        self.norm = torch.nn.BatchNorm1d(1, affine=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("examples", torch.zeros(2, dtype=torch.int32))

    def forward(self, indices):
        if self.training:
            time.sleep(0.1 if slow.exists() else 0.0)
            self.steps += 1
            self.examples[1] += len(indices)
        self.norm(indices.float())
        return self.counts[indices[:, 0]]

def minus_sum(outputs, targets):
    return -outputs.sum()

workers = int(sys.argv[3]) if len(sys.argv) > 3 else 2
where = ps.Ray(sys.argv[4]) if len(sys.argv) > 4 else None
strategy = ps.ParameterServerStrategy(shards=2, workers=workers, consistency=sys.argv[2], cluster=where)
model = ps.torch.Model(Ledger, minus_sum, state={"steps": "counter", "examples": "counter"})
trainer = ps.Trainer(model, ps.SGD(1.0), strategy, settings={"checkpoint.every_s": 0.2, "consistency.reduce": "sum"})
data = np.arange(EXAMPLES)[:, None], np.zeros(EXAMPLES, np.float32)
history = trainer.fit(data, epochs=EPOCHS, batch_size=4, verbose=0)
net = trainer.model()
print(json.dumps({
    "counts": [net.counts.min().item(), net.counts.max().item()],
    "steps": net.steps.item(), "tracked": net.norm.num_batches_tracked.item(), "examples": net.examples[1].item(),
    "variance": net.norm.running_var.item(), "sha256": history.report["weights_sha256"],
}))
"""
